// Comparing what a launch left behind with what it should have, and counting what the cases exercised.
#ifndef KVCANARY_TESTS_CHECK_H_
#define KVCANARY_TESTS_CHECK_H_

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <iterator>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "case.h"
#include "model.h"

namespace kvtest {

// The first difference of two sequences, as text; empty if there is none.
template <typename Sequence>
std::string difference(const char* what, const Sequence& expected, const Sequence& got) {
  if (expected.size() != got.size()) {
    return std::string(what) + ": length " + std::to_string(got.size()) + ", expected " + std::to_string(expected.size());
  }
  for (size_t i = 0; i < expected.size(); ++i) {
    if (expected[i] == got[i]) continue;
    return std::string(what) + "[" + std::to_string(i) + "]: " + std::to_string(got[i]) + ", expected " + std::to_string(expected[i]);
  }
  return {};
}

inline std::string number_difference(const char* what, int64_t expected, int64_t got) {
  return expected == got ? std::string() : std::string(what) + ": " + std::to_string(got) + ", expected " + std::to_string(expected);
}

inline std::string text(const Row& row) {
  std::string out = "(";
  for (const uint64_t column : row) out += std::to_string(static_cast<int64_t>(column)) + " ";
  out.back() = ')';
  return out;
}

inline Row ring_row(const std::vector<uint32_t>& ring, int64_t index) {
  Row row;
  for (size_t column = 0; column < row.size(); ++column) {
    row[column] = word_pair(ring, static_cast<size_t>(index) * kvcanary::kRingWords + 2 * column);
  }
  return row;
}

// Ring and index: the rows reported stand at the index, in any order; a ring that is full holds some of them, none twice.
inline std::string check_log(const Expected& expected, const Result& got) {
  const Result& want = expected.result;
  if (!expected.reports) {
    std::string out = number_difference("write_index", want.write_index, got.write_index);
    return !out.empty() ? out : difference("ring", want.ring, got.ring);
  }
  const std::string index = number_difference("write_index", want.write_index, got.write_index);
  if (!index.empty()) return index;
  const int64_t reported = static_cast<int64_t>(expected.rows.size());
  const int64_t ring_rows = static_cast<int64_t>(want.ring.size()) / kvcanary::kRingWords;
  // close_launch has added the rows; the index saturates only beyond every ring.
  const int64_t start = std::min<int64_t>(ring_rows, std::max<int64_t>(0, want.write_index - reported));
  const int64_t stored = std::min(reported, ring_rows - start);
  std::vector<Row> rows;
  for (int64_t i = 0; i < ring_rows; ++i) {
    if (i >= start && i < start + stored) {
      rows.push_back(ring_row(got.ring, i));
    } else if (ring_row(got.ring, i) != ring_row(want.ring, i)) {
      return "ring row " + std::to_string(i) + " was written to, outside of [" + std::to_string(start) + ", " +
             std::to_string(start + stored) + ")";
    }
  }
  std::vector<Row> all = expected.rows;
  std::sort(all.begin(), all.end());
  std::sort(rows.begin(), rows.end());
  if (std::includes(all.begin(), all.end(), rows.begin(), rows.end())) return {};
  std::vector<Row> strange;
  std::set_difference(rows.begin(), rows.end(), all.begin(), all.end(), std::back_inserter(strange));
  std::vector<Row> missing;
  std::set_difference(all.begin(), all.end(), rows.begin(), rows.end(), std::back_inserter(missing));
  return "a ring row is not one of those expected, or is there twice: " + text(strange.front()) + "; " + std::to_string(missing.size()) +
         " expected rows not there, such as " + (missing.empty() ? "none" : text(missing.front()));
}

// Only what does not depend on the order of requests that share slots: counts, and everything that no request touches.
inline std::string check_shared_write(const Case& c, const Expected& expected, const Result& got) {
  const Result& want = expected.result;
  const State& s = c.state;
  const int64_t start = std::max(0, s.write_index);
  // A segment and a seed a request, two asserts a token; segments may overlap.
  const int64_t most = c.write.capacity() * (2 + 2 * c.write.tokens());
  std::vector<bool> named(static_cast<size_t>(s.slots), false);
  for (const int64_t slot : c.write.out_cache_loc.values) {
    if (slot >= 0 && slot < s.slots) named[static_cast<size_t>(slot)] = true;
  }
  if (got.write_index < start || got.write_index > add_saturating(start, most, kMax32)) return "write_index left its bounds";
  for (int64_t slot = 0; slot < s.slots; ++slot) {
    for (int word = 0; word < s.words; ++word) {
      const size_t at = record_at(s, slot, word);
      if ((!named[static_cast<size_t>(slot)] || (s.words < 16 && word >= 8) || word >= 16) && want.records[at] != got.records[at]) {
        return "record of slot " + std::to_string(slot) + " changed, which nothing writes to";
      }
    }
  }
  for (int64_t i = 0; i < s.ring_rows; ++i) {
    const Row row = ring_row(got.ring, i);
    const bool stored = i >= start && i < got.write_index;
    if (stored ? row[kvcanary::kColTag] != static_cast<uint64_t>(c.launch.tag) : row != ring_row(s.ring.values, i)) {
      return "ring row " + std::to_string(i) + " is not what it should be";
    }
  }
  for (const int32_t verdict : got.verdict) {
    if (verdict < kvcanary::kNotChecked || verdict > kvcanary::kBad) return "a verdict is none of the three";
  }
  return {};
}

// Pool cells that several requests name may hold what any of them brings.
inline std::string check_shared_scatter(const Expected& expected, const Result& got) {
  for (size_t cell = 0; cell < got.pool.size(); ++cell) {
    const std::set<int32_t>& candidates = expected.candidates[cell];
    if (candidates.empty() ? got.pool[cell] != expected.result.pool[cell] : candidates.count(got.pool[cell]) == 0) {
      return "pool[" + std::to_string(cell) + "] holds what no request brings";
    }
  }
  return {};
}

// The first thing that is wrong, or nothing. `ordered`: the backend takes requests in order.
inline std::string check(const Case& c, const Expected& expected, const Result& got, bool ordered) {
  const Result& want = expected.result;
  const bool loose = expected.order_sensitive && !ordered;
  std::vector<std::string> found;
  if (c.op == Op::kPlan) {
    found = {number_difference("num_valid", want.num_valid, got.num_valid),
             number_difference("enable", want.enable, got.enable),
             number_difference("num_valid_reqs", want.num_valid_reqs, got.num_valid_reqs),
             difference("slot_indices", want.slot_indices, got.slot_indices),
             difference("expected_tokens", want.expected_tokens, got.expected_tokens),
             difference("expected_positions", want.expected_positions, got.expected_positions),
             difference("prev_slot_indices", want.prev_slot_indices, got.prev_slot_indices),
             difference("batch_rows", want.batch_rows, got.batch_rows),
             difference("write_offsets", want.write_offsets, got.write_offsets),
             difference("seed_slots", want.seed_slots, got.seed_slots),
             difference("row_status", want.row_status, got.row_status)};
  } else if (c.op == Op::kScatter) {
    found = {difference("status", want.status, got.status),
             loose ? check_shared_scatter(expected, got) : difference("pool", want.pool, got.pool)};
  } else {
    found = {difference("kernel_runs", want.kernel_runs, got.kernel_runs), difference("slot_runs", want.slot_runs, got.slot_runs)};
    if (loose) {
      found.push_back(check_shared_write(c, expected, got));
    } else {
      found.insert(found.end(), {difference("records", want.records, got.records), difference("tags", want.tags, got.tags),
                                 check_log(expected, got), difference("verdict", want.verdict, got.verdict),
                                 difference("first_bad_position", want.first_bad_position, got.first_bad_position),
                                 difference("unattested", want.unattested, got.unattested),
                                 difference("first_unattested_position", want.first_unattested_position, got.first_unattested_position)});
    }
  }
  for (const std::string& text : found) {
    if (!text.empty()) return text;
  }
  return {};
}

// What a run of cases has reached: a generator that stops reaching something should not go unnoticed.
class Coverage {
 public:
  void add(const Case& c, const Expected& expected) {
    count(kOpNames[static_cast<size_t>(c.op)]);
    if (c.op == Op::kPlan) {
      count(expected.result.enable != 0 ? "plan_enabled" : "plan_disabled");
      return;
    }
    if (c.op == Op::kScatter) return;
    for (const int32_t v : expected.result.verdict) ++verdicts_[static_cast<size_t>(v)];
    const bool is_write = c.op == Op::kWrite;
    if (expected.tolerated > 0) count(is_write ? "write_tolerated" : "verify_tolerated");
    if (c.op == Op::kVerifyFused && c.batch.stride > 1 && expected.checked_ok > 1) count("strided");
    for (const Row& row : expected.rows) {
      for (uint64_t bit = 1; bit <= kvcanary::kUnwritten; bit *= 2) {
        if (row[kvcanary::kColReason] & bit) count((is_write ? "write_bit_" : "verify_bit_") + std::to_string(bit));
      }
      if (row[kvcanary::kColFirstBadSource] + 1 != 0) count("first_bad_source");
    }
    if (expected.rows.empty() && expected.checked_ok > 1) count(is_write ? "write_quiet" : "verify_quiet");
    const int64_t room = c.state.ring_rows - std::max(0, c.state.write_index);
    if (room > 0 && static_cast<int64_t>(expected.rows.size()) > room) count("ring_overflow");
    if (expected.result.write_index == kMax32) count("index_saturated");
    if (expected.order_sensitive) count("order_sensitive");
  }
  void print() const {
    std::printf("coverage: verdicts %lld %lld %lld", static_cast<long long>(verdicts_[0]), static_cast<long long>(verdicts_[1]),
                static_cast<long long>(verdicts_[2]));
    for (const auto& [name, n] : counts_) std::printf(" %s=%lld", name.c_str(), static_cast<long long>(n));
    std::printf("\n");
  }
  void count(const std::string& name) { ++counts_[name]; }

 private:
  std::map<std::string, int64_t> counts_;
  std::array<int64_t, 3> verdicts_{};
};

}  // namespace kvtest

#endif  // KVCANARY_TESTS_CHECK_H_
