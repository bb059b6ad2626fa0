// The contract restated plainly, one request and one byte at a time: what a case must leave behind. Shares nothing with the kernels
// but the names of codes and columns; every access is checked.
#ifndef KVCANARY_TESTS_MODEL_H_
#define KVCANARY_TESTS_MODEL_H_

#include <algorithm>
#include <cstdint>
#include <map>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

#include "case.h"
#include "random.h"

namespace kvtest {

using kvcanary::Column;

struct Expected {
  Result result;          // `ring` as it was before the launch
  std::vector<Row> rows;  // all that the launch reports
  bool reports = false;   // the launch writes to the log at all
  // Requests touch each other's slots, so the outcome on a parallel backend depends on their order.
  bool order_sensitive = false;
  int64_t checked_ok = 0;                     // verdicts, entries: how much a case has exercised
  int64_t tolerated = 0;                      // entries not checked, predecessors and seeds not believed, since nobody wrote them
  int64_t entries = 0;                        // of a plan: entries in total, beyond its capacity too
  std::vector<std::set<int32_t>> candidates;  // of a scatter with a row named twice: what a cell may hold
};

// --- hashes ---

inline uint64_t model_mix(uint64_t x) {
  x ^= x >> 30;
  x *= 0xBF58476D1CE4E5B9ull;
  x ^= x >> 27;
  x *= 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

inline uint64_t model_chain(uint64_t prev_hash, uint64_t token, uint64_t position) {
  return model_mix(model_mix(model_mix(prev_hash) ^ token) ^ position);
}

inline uint64_t model_anchor(int64_t name_space) { return model_mix(0xC0FFEE1234567890ull ^ static_cast<uint64_t>(name_space)); }

// --- sources ---

// The sources as a launch reads them in its mode.
struct Reading {
  std::vector<int64_t> read_bytes;  // a source
  int64_t slots = kMax32;
  bool tags = false;
};

inline Reading reading(const Case& c) {
  Reading out;
  const bool none = c.sources.mode == kvcanary::kModeNone;
  // A verify without a mode has no sources; a write still stamps tags, of 0.
  if (none && (c.op != Op::kWrite || !c.state.has_tags)) return out;
  out.tags = c.state.has_tags;
  for (const SourceSpec& s : c.sources.specs) {
    int64_t bytes = s.read_bytes;
    if (c.sources.mode == kvcanary::kModePartial) bytes = std::min<int64_t>(16, bytes);
    if (none) bytes = 0;
    if (bytes > 0) out.slots = std::min(out.slots, s.page_size > kMax32 / std::max<int64_t>(s.pages, 1) ? kMax32 : s.pages * s.page_size);
    out.read_bytes.push_back(bytes);
  }
  return out;
}

inline int64_t reachable_slots(const Case& c) { return std::min(c.state.slots, reading(c).slots); }

inline std::vector<unsigned char> slot_bytes(const Case& c, const SourceSpec& s, int64_t slot, int64_t read_bytes) {
  std::vector<unsigned char> out;
  const std::vector<unsigned char>& buffer = c.sources.buffers.at(static_cast<size_t>(s.buffer)).values;
  const int64_t start = s.offset + slot / s.page_size * s.page_stride + slot % s.page_size * s.token_stride;
  const auto& [n0, n1, n2, n3] = s.counts;
  for (int64_t i0 = 0; i0 < n0; ++i0) {
    for (int64_t i1 = 0; i1 < n1; ++i1) {
      for (int64_t i2 = 0; i2 < n2; ++i2) {
        for (int64_t i3 = 0; i3 < n3; ++i3) {
          const int64_t run = start + i0 * s.strides[0] + i1 * s.strides[1] + i2 * s.strides[2] + i3 * s.strides[3];
          for (int64_t b = 0; b < s.run_bytes; ++b) {
            if (static_cast<int64_t>(out.size()) == read_bytes) return out;
            out.push_back(buffer.at(static_cast<size_t>(run + b)));
          }
        }
      }
    }
  }
  return out;
}

struct SlotHashes {
  uint64_t combined = 0;
  std::vector<uint32_t> tags;  // a source
};

// Real-KV hashes of slots, each computed once.
class RealKv {
 public:
  explicit RealKv(const Case& c) : case_(c), reading_(reading(c)) {}

  const Reading& source_reading() const { return reading_; }
  const SlotHashes& of(int64_t slot) {
    const auto known = slots_.find(slot);
    if (known != slots_.end()) return known->second;
    SlotHashes& out = slots_[slot];
    for (size_t k = 0; k < reading_.read_bytes.size(); ++k) {
      const int64_t read = reading_.read_bytes[k];
      uint64_t hash = 0;
      if (read > 0) {
        std::vector<unsigned char> bytes = slot_bytes(case_, case_.sources.specs[k], slot, read);
        while (bytes.size() % 8 != 0) bytes.push_back(0);
        for (size_t w = 0; w < bytes.size(); w += 8) {
          uint64_t word = 0;
          for (size_t b = 0; b < 8; ++b) word |= static_cast<uint64_t>(bytes[w + b]) << (8 * b);
          hash = model_mix(hash ^ word);
        }
        out.combined = model_mix(out.combined ^ hash);
      }
      out.tags.push_back(static_cast<uint32_t>(hash));
    }
    return out;
  }

 private:
  const Case& case_;
  Reading reading_;
  std::unordered_map<int64_t, SlotHashes> slots_;
};

// --- records ---

struct ModelRecord {
  uint64_t token = 0, position = 0, prev_hash = 0, real_kv_hash = 0;
};

inline size_t record_at(const State& s, int64_t slot, int word) {
  return static_cast<size_t>(slot) * static_cast<size_t>(s.words) + static_cast<size_t>(word);
}

inline uint64_t word_pair(const std::vector<uint32_t>& words, size_t at) {
  return static_cast<uint64_t>(words.at(at + 1)) << 32 | words.at(at);
}

inline void set_word_pair(std::vector<uint32_t>& words, size_t at, uint64_t value) {
  words.at(at) = static_cast<uint32_t>(value);
  words.at(at + 1) = static_cast<uint32_t>(value >> 32);
}

inline ModelRecord model_record(const State& s, const std::vector<uint32_t>& records, int64_t slot) {
  return {word_pair(records, record_at(s, slot, 0)), word_pair(records, record_at(s, slot, 2)), word_pair(records, record_at(s, slot, 4)),
          word_pair(records, record_at(s, slot, 6))};
}

inline void set_model_record(const State& s, std::vector<uint32_t>& records, int64_t slot, const ModelRecord& r) {
  set_word_pair(records, record_at(s, slot, 0), r.token);
  set_word_pair(records, record_at(s, slot, 2), r.position);
  set_word_pair(records, record_at(s, slot, 4), r.prev_hash);
  set_word_pair(records, record_at(s, slot, 6), r.real_kv_hash);
}

inline bool model_blank(const State& s, const std::vector<uint32_t>& records, int64_t slot, int words) {
  for (int w = 0; w < words; ++w) {
    if (records.at(record_at(s, slot, w)) != 0) return false;
  }
  return true;
}

inline uint64_t model_next(const ModelRecord& r) { return model_chain(r.prev_hash, r.token, r.position); }

inline Row model_row(const Case& c, int64_t slot, uint64_t reason, int64_t batch_row, int64_t req_pool_idx) {
  Row row{};
  row[kvcanary::kColTag] = static_cast<uint64_t>(c.launch.tag);
  row[kvcanary::kColSlot] = static_cast<uint64_t>(slot);
  row[kvcanary::kColExpectedToken] = ~uint64_t{0};
  row[kvcanary::kColReason] = reason;
  row[kvcanary::kColBatchRow] = static_cast<uint64_t>(batch_row);
  row[kvcanary::kColReqPoolIdx] = static_cast<uint64_t>(req_pool_idx);
  row[kvcanary::kColStep] = c.launch.context[0];
  row[kvcanary::kColExpectedPosition] = ~uint64_t{0};
  row[kvcanary::kColFirstBadSource] = ~uint64_t{0};
  row[kvcanary::kColShard] = c.launch.context[1];
  return row;
}

// --- plan ---

struct ModelRequest {
  bool padding = false;
  int32_t status = 0;
  int64_t begin = 0, end = 0;  // positions to verify
  int64_t write_length = 0;
  int64_t seed_slot = -1;
};

struct ModelEntry {
  int64_t slot, prev_slot, position, token, batch_row;
};

inline int64_t model_slot(const Batch& b, int64_t r, int64_t position) {
  const int64_t idx = b.req_pool_indices.at(r);
  int64_t slot = 0;
  switch (b.kind) {
    case kvcanary::kTableRows:
      slot = b.table.at(idx * b.table_width + position);
      break;
    case kvcanary::kTableBlocks: {
      const int64_t block = b.table.at(idx * b.table_width + position / b.page_size);
      slot = block < 0 || block > kMax32 ? block : block * b.page_size + position % b.page_size;
      break;
    }
    case kvcanary::kTableFlat:
      slot = b.table.at(b.table_starts.at(r) + position);
      break;
    default:
      slot = b.table_width > 0 ? idx * b.table_width + position % b.table_width : -2;
  }
  return b.has_mapping && slot >= 0 ? b.mapping.get(slot, -2) : slot;
}

inline int64_t model_prev_slot(const Batch& b, int64_t r, int64_t position) { return position > 0 ? model_slot(b, r, position - 1) : -1; }

inline int64_t model_expected_token(const Batch& b, int64_t r, int64_t position) {
  const int64_t idx = b.req_pool_indices.at(r);
  if (!b.has_expected || idx < 0 || idx >= b.expected_rows) return -1;
  const __int128 column = static_cast<__int128>(position) + b.token_offset;
  if (column < 0 || column >= std::min(b.valid_lens.at(r), b.expected_width)) return -1;
  return b.expected_tokens.at(idx * b.expected_width + static_cast<int64_t>(column));
}

inline ModelRequest model_request(const Batch& b, int64_t r) {
  ModelRequest out;
  const int64_t idx = b.req_pool_indices.at(r);
  out.padding = idx == -1 || (b.has_padding_req && idx == b.padding_req);
  if (out.padding) return out;
  if (b.extend_seq_lens.size() > 0) out.write_length = std::max<int64_t>(0, b.extend_seq_lens.at(r));
  const int64_t prefix = std::max<int64_t>(0, b.prefix_lens.at(r));
  bool inside = idx >= 0 && idx < b.table_rows;
  __int128 width = b.table_width;
  if (b.kind == kvcanary::kTableBlocks) width *= b.page_size;
  if (b.kind == kvcanary::kTableFlat) {
    inside = b.table_starts.at(r) >= 0;
    width = static_cast<__int128>(std::min(b.table_starts.at(r + 1), b.table.size())) - b.table_starts.at(r);
  }
  if (!inside || (b.kind != kvcanary::kTableIdentity && prefix > width)) {
    out.status = kvcanary::kTableOutOfRange;
    return out;
  }
  out.end = prefix;
  out.begin = b.window > 0 ? std::max<int64_t>(0, prefix - b.window) : 0;
  if (b.kind == kvcanary::kTableIdentity && prefix > b.table_width) {
    // The oldest position of a ring has lost its predecessor; a ring of nothing has lost everything.
    out.begin = std::max(out.begin, b.table_width > 0 ? prefix - b.table_width + 1 : prefix);
  }
  if (prefix > 0 && out.write_length > 0) out.seed_slot = model_slot(b, r, prefix - 1);
  return out;
}

inline int64_t add_saturating(int64_t a, int64_t b, int64_t top) {
  const __int128 sum = static_cast<__int128>(a) + b;
  return sum > top ? top : static_cast<int64_t>(sum);
}

// Entries of the whole batch, at most 2^63 - 1.
inline int64_t model_total(const Batch& b) {
  int64_t total = 0;
  for (int64_t r = 0; r < b.size(); ++r) {
    const ModelRequest request = model_request(b, r);
    total = add_saturating(total, request.end - request.begin, kMax64);
  }
  return total;
}

inline std::vector<ModelEntry> model_entries(const Batch& b, uint32_t step) {
  std::vector<ModelEntry> out;
  for (int64_t r = 0; r < b.size(); ++r) {
    const ModelRequest request = model_request(b, r);
    for (int64_t p = request.begin; p < request.end; ++p) {
      if (p % b.stride != step % b.stride) continue;
      out.push_back({model_slot(b, r, p), model_prev_slot(b, r, p), p, model_expected_token(b, r, p), r});
    }
  }
  return out;
}

inline int64_t model_narrow(int64_t value, bool wide) { return wide ? value : std::clamp(value, kMin32, kMax32); }

inline Expected expect_plan(const Case& c) {
  const Batch& b = c.batch;
  Expected out;
  Result& result = out.result;
  const bool wide = c.plan.wide;
  out.entries = model_total(b);
  result.enable = out.entries <= c.plan.verify_capacity;
  result.num_valid = static_cast<int32_t>(std::min(out.entries, c.plan.verify_capacity));
  result.num_valid_reqs = static_cast<int32_t>(b.size());
  result.write_offsets.assign(static_cast<size_t>(c.plan.write_req_capacity) + 1, 0);
  result.seed_slots.assign(static_cast<size_t>(c.plan.write_req_capacity), -1);
  int64_t written = 0;
  for (int64_t r = 0; r < b.size(); ++r) {
    const ModelRequest request = model_request(b, r);
    written = add_saturating(written, request.write_length, wide ? kMax64 : kMax32);
    result.write_offsets[static_cast<size_t>(r) + 1] = written;
    result.seed_slots[static_cast<size_t>(r)] = model_narrow(request.seed_slot, wide);
    result.row_status.push_back(request.status);
  }
  if (result.enable == 0) return out;
  for (const ModelEntry& e : model_entries(b, 0)) {
    result.slot_indices.push_back(model_narrow(e.slot, wide));
    result.expected_tokens.push_back(model_narrow(e.token, wide));
    result.expected_positions.push_back(model_narrow(e.position, wide));
    result.prev_slot_indices.push_back(model_narrow(e.prev_slot, wide));
    result.batch_rows.push_back(e.batch_row);
  }
  return out;
}

// --- log ---

// State as it was; counters of the launch's tag as they will be.
inline Expected open_launch(const Case& c, uint64_t slot_runs) {
  Expected out;
  Result& result = out.result;
  result.records = c.state.records.values;
  result.tags = c.state.tags.values;
  result.ring = c.state.ring.values;
  result.write_index = c.state.write_index;
  result.slot_runs = c.state.slot_runs;
  result.kernel_runs = c.state.kernel_runs;
  result.kernel_runs[static_cast<size_t>(c.launch.tag)] += 1;
  result.slot_runs[static_cast<size_t>(c.launch.tag)] += slot_runs;
  return out;
}

inline void close_launch(Expected& out) {
  out.reports = true;
  const int64_t start = std::max(0, out.result.write_index);
  out.result.write_index = static_cast<int32_t>(add_saturating(start, static_cast<int64_t>(out.rows.size()), kMax32));
}

// --- verify ---

inline std::vector<ModelEntry> planned_entries(const Case& c) {
  const Entries& e = c.entries;
  std::vector<ModelEntry> out;
  const int64_t n = std::clamp<int64_t>(e.num_valid, 0, e.slot_indices.size());
  for (int64_t i = 0; i < n; ++i) {
    out.push_back(
        {e.slot_indices.at(i), e.prev_slot_indices.at(i), e.expected_positions.at(i), e.expected_tokens.at(i), e.batch_rows.get(i, -1)});
  }
  return out;
}

struct ModelChain {
  bool reachable;
  bool out_of_range;
  uint64_t hash;
};

inline ModelChain model_chain_of(const Case& c, const std::vector<uint32_t>& records, const ModelEntry& e, int64_t slots) {
  if (e.prev_slot < 0) {
    const bool known = e.batch_row >= 0 && e.batch_row < c.batch.size();
    return {true, e.prev_slot < -1, model_anchor(known ? c.verify.namespaces.get(e.batch_row, 0) : 0)};
  }
  if (c.launch.has_padding_slot && e.prev_slot == c.launch.padding_slot) return {false, false, 0};
  if (e.prev_slot >= slots) return {false, true, 0};
  if (c.launch.tolerant() && model_blank(c.state, records, e.prev_slot, 8)) return {false, false, 0};
  return {true, false, model_next(model_record(c.state, records, e.prev_slot))};
}

// Sources that a rotated verify looks at; empty: all of them, as one hash.
inline std::vector<int64_t> rotated_sources(const Case& c, const Reading& read, bool* rotated) {
  const int64_t total = static_cast<int64_t>(read.read_bytes.size());
  const int64_t count = std::clamp<int64_t>(c.verify.source_window[1], 0, total);
  *rotated = c.verify.rotate && count < total;
  std::vector<int64_t> out;
  if (!*rotated) return out;
  const int64_t start = ((c.verify.source_window[0] % total) + total) % total;
  for (int64_t j = 0; j < count; ++j) out.push_back((start + j) % total);
  std::sort(out.begin(), out.end());
  return out;
}

inline Expected expect_verify(const Case& c, const std::vector<ModelEntry>& entries, const std::vector<int32_t>& row_status, bool enable) {
  Expected out = open_launch(c, enable ? entries.size() : 0);
  const int64_t bs = c.batch.size();
  std::vector<int32_t>& verdict = out.result.verdict;
  std::vector<int32_t>& first_bad = out.result.first_bad_position;
  verdict.assign(static_cast<size_t>(bs), kvcanary::kNotChecked);
  first_bad.assign(static_cast<size_t>(bs), -1);
  out.result.unattested.assign(static_cast<size_t>(bs), 0);
  out.result.first_unattested_position.assign(static_cast<size_t>(bs), -1);
  if (!enable) return out;

  const std::vector<uint32_t>& records = c.state.records.values;
  const int64_t slots = reachable_slots(c);
  const bool extended = c.launch.extended;
  RealKv real_kv(c);
  bool rotated = false;
  const std::vector<int64_t> window = rotated_sources(c, real_kv.source_reading(), &rotated);
  for (int64_t r = 0; r < bs; ++r) {
    if (row_status.at(static_cast<size_t>(r)) == 0 || !extended) continue;
    out.rows.push_back(model_row(c, -1, kvcanary::kTableOutOfRange, r, c.batch.req_pool_indices.at(r)));
    verdict[static_cast<size_t>(r)] = kvcanary::kBad;
  }
  for (const ModelEntry& e : entries) {
    const bool known = e.batch_row >= 0 && e.batch_row < bs;
    const int64_t req_pool_idx = known ? c.batch.req_pool_indices.at(e.batch_row) : -1;
    const int64_t shown_token = c.verify.check_token ? e.token : -1;
    if (c.launch.has_padding_slot && e.slot == c.launch.padding_slot) continue;
    uint64_t reason = 0;
    Row row = model_row(c, e.slot, 0, known ? e.batch_row : -1, req_pool_idx);
    row[kvcanary::kColExpectedToken] = static_cast<uint64_t>(shown_token);
    row[kvcanary::kColExpectedPosition] = static_cast<uint64_t>(e.position);
    if (e.slot < 0 || e.slot >= slots) {
      if (!extended) continue;
      reason = kvcanary::kSlotOutOfRange;
    } else {
      const ModelRecord record = model_record(c.state, records, e.slot);
      const bool blank = model_blank(c.state, records, e.slot, c.state.words >= 16 ? 16 : 8);
      if (blank && c.launch.tolerant()) {
        ++out.tolerated;
        if (!known) continue;
        out.result.unattested[static_cast<size_t>(e.batch_row)] += 1;
        int32_t& position = out.result.first_unattested_position[static_cast<size_t>(e.batch_row)];
        const int32_t here = static_cast<int32_t>(std::clamp<int64_t>(e.position, 0, kMax32));
        if (position == -1 || here < position) position = here;
        continue;
      }
      const ModelChain chain = model_chain_of(c, records, e, slots);
      if (chain.reachable && record.prev_hash != chain.hash) reason |= kvcanary::kVerifyChainHash;
      if (chain.out_of_range && extended) reason |= kvcanary::kSlotOutOfRange;
      if (!chain.reachable && !chain.out_of_range && c.launch.tolerant()) ++out.tolerated;
      if (static_cast<int64_t>(record.position) != e.position) reason |= kvcanary::kVerifyPosition;
      if (c.verify.check_token && e.token != -1 && static_cast<int64_t>(record.token) != e.token) reason |= kvcanary::kVerifyToken;
      const SlotHashes& real = real_kv.of(e.slot);
      const auto tag = [&](int64_t k) {
        return c.state.tags.values.at(static_cast<size_t>(e.slot) * c.sources.specs.size() + static_cast<size_t>(k));
      };
      int64_t first_bad_source = -1;
      row[kvcanary::kColRealKvHash] = rotated ? 0 : record.real_kv_hash;
      row[kvcanary::kColExpectedRealKvHash] = rotated ? 0 : real.combined;
      if (rotated) {
        for (const int64_t k : window) {
          if (tag(k) == real.tags.at(static_cast<size_t>(k))) continue;
          reason |= kvcanary::kVerifyRealKvHash;
          first_bad_source = k;
          row[kvcanary::kColRealKvHash] = tag(k);
          row[kvcanary::kColExpectedRealKvHash] = real.tags.at(static_cast<size_t>(k));
          break;
        }
      } else if (record.real_kv_hash != real.combined) {
        reason |= kvcanary::kVerifyRealKvHash;
        for (size_t k = 0; real_kv.source_reading().tags && k < real.tags.size() && first_bad_source < 0; ++k) {
          if (tag(static_cast<int64_t>(k)) != real.tags[k]) first_bad_source = static_cast<int64_t>(k);
        }
      }
      if (blank && extended) reason |= kvcanary::kUnwritten;
      row[kvcanary::kColPosition] = record.position;
      row[kvcanary::kColToken] = record.token;
      row[kvcanary::kColChainHash] = record.prev_hash;
      row[kvcanary::kColAux] = chain.reachable ? chain.hash : record.prev_hash;
      row[kvcanary::kColFirstBadSource] = static_cast<uint64_t>(first_bad_source);
    }
    row[kvcanary::kColReason] = reason;
    if (reason != 0) out.rows.push_back(row);
    if (reason == 0) ++out.checked_ok;
    if (!known) continue;
    int32_t& v = verdict[static_cast<size_t>(e.batch_row)];
    v = std::max(v, static_cast<int32_t>(reason != 0 ? kvcanary::kBad : kvcanary::kOk));
    if (reason == 0) continue;
    int32_t& position = first_bad[static_cast<size_t>(e.batch_row)];
    const int32_t here = static_cast<int32_t>(std::clamp<int64_t>(e.position, 0, kMax32));
    if (position == -1 || here < position) position = here;
  }
  close_launch(out);
  return out;
}

inline Expected expect_verify_fused(const Case& c) {
  std::vector<int32_t> status;
  for (int64_t r = 0; r < c.batch.size(); ++r) status.push_back(model_request(c.batch, r).status);
  return expect_verify(c, model_entries(c.batch, c.launch.context[0]), status, true);
}

// --- write ---

// Requests that read or write a slot which another one writes.
class Sharing {
 public:
  void stores(int64_t r, int64_t slot) {
    const auto [known, fresh] = writer_.emplace(slot, r);
    if (!fresh && known->second != r) shared_ = true;
  }
  void reads(int64_t r, int64_t slot) { seeds_.push_back({r, slot}); }
  bool any() const {
    for (const auto& [r, slot] : seeds_) {
      const auto known = writer_.find(slot);
      if (known != writer_.end() && known->second != r) return true;
    }
    return shared_;
  }

 private:
  std::map<int64_t, int64_t> writer_;
  std::vector<std::pair<int64_t, int64_t>> seeds_;
  bool shared_ = false;
};

inline Expected expect_write(const Case& c) {
  Expected out = open_launch(c, 0);
  const WriteParts& w = c.write;
  std::vector<uint32_t>& records = out.result.records;
  const int64_t slots = reachable_slots(c);
  const bool extended = c.launch.extended;
  RealKv real_kv(c);
  Sharing sharing;
  out.result.verdict.assign(static_cast<size_t>(w.capacity()), kvcanary::kNotChecked);
  const int64_t requests = std::clamp<int64_t>(w.num_valid_reqs, 0, w.capacity());
  for (int64_t r = 0; r < requests; ++r) {
    const size_t rows_before = out.rows.size();
    const int64_t req_pool_idx = w.req_pool_indices.get(r, -1);
    const int64_t begin = w.write_offsets.at(r), end = w.write_offsets.at(r + 1);
    if (extended && (begin < 0 || end > w.tokens() || end < begin)) {
      Row row = model_row(c, -1, kvcanary::kTableOutOfRange, r, req_pool_idx);
      row[kvcanary::kColAux] = ~uint64_t{0};
      out.rows.push_back(row);
    }
    const int64_t first = std::max<int64_t>(0, begin), last = std::min(end, w.tokens());
    int64_t stored = 0;
    if (first < last) {
      const int64_t seed = w.seed_slots.at(r);
      uint64_t running = model_anchor(w.namespaces.get(r, 0));
      uint64_t previous = 0;
      bool assert_position = false, position_known = true;
      if (seed >= 0 && seed < slots) {
        const ModelRecord record = model_record(c.state, records, seed);
        running = model_next(record);
        previous = record.position;
        assert_position = w.chain_position_assert != 0;
        if (c.launch.tolerant() && model_blank(c.state, records, seed, 8)) {
          position_known = false;
          ++out.tolerated;
        }
        sharing.reads(r, seed);
      } else if (seed != -1 && extended) {
        Row row = model_row(c, seed, kvcanary::kSlotOutOfRange, r, req_pool_idx);
        row[kvcanary::kColChainHash] = running;
        row[kvcanary::kColAux] = ~uint64_t{0};
        out.rows.push_back(row);
      }
      for (int64_t i = first; i < last; ++i) {
        const int64_t slot = w.out_cache_loc.at(i), token = w.input_ids.at(i), position = w.positions.at(i);
        const bool inside = slot >= 0 && slot < slots;
        if (slot == -1 || (!inside && c.launch.has_padding_slot && slot == c.launch.padding_slot)) continue;
        const int64_t expected_token = w.assert_input ? w.expected_tokens.at(i) : -1;
        const int64_t expected_position = w.assert_input ? w.expected_positions.at(i) : -1;
        uint64_t reason = 0;
        if (w.assert_input && token != expected_token) reason |= kvcanary::kWriteToken;
        if (w.assert_input && position != expected_position) reason |= kvcanary::kWritePosition;
        if (!inside && extended) reason |= kvcanary::kSlotOutOfRange;
        const uint64_t real = inside ? real_kv.of(slot).combined : 0;
        Row row = model_row(c, slot, reason, r, req_pool_idx);
        row[kvcanary::kColPosition] = static_cast<uint64_t>(position);
        row[kvcanary::kColToken] = static_cast<uint64_t>(token);
        row[kvcanary::kColExpectedToken] = static_cast<uint64_t>(expected_token);
        row[kvcanary::kColChainHash] = running;
        row[kvcanary::kColAux] = row[kvcanary::kColExpectedPosition] = static_cast<uint64_t>(expected_position);
        row[kvcanary::kColRealKvHash] = row[kvcanary::kColExpectedRealKvHash] = real;
        if (reason != 0 && (inside || extended)) out.rows.push_back(row);
        if (!inside) continue;
        if (assert_position && position_known && static_cast<uint64_t>(position) != previous + 1) {
          row[kvcanary::kColReason] = kvcanary::kWritePosition;
          row[kvcanary::kColExpectedToken] = static_cast<uint64_t>(token);
          row[kvcanary::kColAux] = row[kvcanary::kColExpectedPosition] = previous + 1;
          out.rows.push_back(row);
        }
        set_model_record(c.state, records, slot, {static_cast<uint64_t>(token), static_cast<uint64_t>(position), running, real});
        if (c.state.words >= 16) {
          set_word_pair(records, record_at(c.state, slot, 8), static_cast<uint64_t>(w.request_ids.get(r, 0)));
          set_word_pair(records, record_at(c.state, slot, 10), static_cast<uint64_t>(w.record_flags) << 32 | c.launch.context[0]);
          set_word_pair(records, record_at(c.state, slot, 12), static_cast<uint64_t>(w.namespaces.get(r, 0)));
          set_word_pair(records, record_at(c.state, slot, 14), 0);
        }
        for (size_t k = 0; c.state.has_tags && k < c.sources.specs.size(); ++k) {
          out.result.tags.at(static_cast<size_t>(slot) * c.sources.specs.size() + k) = real_kv.of(slot).tags.at(k);
        }
        sharing.stores(r, slot);
        running = model_chain(running, static_cast<uint64_t>(token), static_cast<uint64_t>(position));
        previous = static_cast<uint64_t>(position);
        position_known = true;
        ++stored;
      }
    }
    out.result.slot_runs[static_cast<size_t>(c.launch.tag)] += static_cast<uint64_t>(stored);
    out.checked_ok += stored;
    out.result.verdict[static_cast<size_t>(r)] = out.rows.size() > rows_before ? kvcanary::kBad
                                                 : stored > 0                  ? kvcanary::kOk
                                                                               : kvcanary::kNotChecked;
  }
  out.order_sensitive = sharing.any();
  close_launch(out);
  return out;
}

// --- scatter ---

inline Expected expect_scatter(const Case& c) {
  const ScatterParts& s = c.scatter;
  Expected out;
  out.result.pool = s.pool;
  out.candidates.resize(s.pool.size());
  std::map<int64_t, int> named;
  for (int64_t r = 0; r < s.req_pool_indices.size(); ++r) {
    const int64_t row = s.req_pool_indices.at(r), begin = s.offsets.at(r), end = s.offsets.at(r + 1);
    const bool bad = row != -1 && (row < 0 || row >= s.rows || begin < 0 || end > s.flat_in.size() || end < begin);
    out.result.status.push_back(bad ? static_cast<int32_t>(kvcanary::kTableOutOfRange) : 0);
    if (row == -1 || bad) continue;
    if (++named[row] > 1) out.order_sensitive = true;
    for (int64_t i = 0; i < std::min(end - begin, s.width); ++i) {
      const size_t cell = static_cast<size_t>(row * s.width + i);
      out.result.pool.at(cell) = static_cast<int32_t>(static_cast<uint32_t>(s.flat_in.at(begin + i)));
      out.candidates.at(cell).insert(out.result.pool[cell]);
    }
  }
  return out;
}

inline Expected expect(const Case& c) {
  switch (c.op) {
    case Op::kPlan:
      return expect_plan(c);
    case Op::kVerify:
      return expect_verify(c, planned_entries(c), c.entries.row_status, c.entries.enable != 0);
    case Op::kVerifyFused:
      return expect_verify_fused(c);
    case Op::kWrite:
      return expect_write(c);
    case Op::kScatter:
      return expect_scatter(c);
  }
  return {};
}

}  // namespace kvtest

#endif  // KVCANARY_TESTS_MODEL_H_
