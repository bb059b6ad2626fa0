// verify and verify_fused on the CPU: chunks of entries in parallel, rows merged in entry order.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "fold_cpu.h"
#include "kernels_cpu.h"
#include "log_cpu.h"

namespace kvcanary::cpu {
namespace {

// Rows wait in memory until their wave is merged: at most 512 KiB a chunk.
constexpr int64_t kChunksPerWave = 256;

// Entries of a chunk: enough to pay for its scheduling, fewer when each reads many bytes.
int64_t entries_per_chunk(const VerifyArgs& args) {
  int64_t bytes = 64;
  for (int32_t i = 0; i < args.sources.count; ++i) bytes += args.sources.geometries[args.sources.sources[i].geometry].read_bytes;
  return std::clamp<int64_t>((int64_t{1} << 18) / bytes, 16, 4096);
}

void raise_to(int32_t* value, int32_t floor) {
  int32_t seen = __atomic_load_n(value, __ATOMIC_RELAXED);
  while (seen < floor && !__atomic_compare_exchange_n(value, &seen, floor, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
}

// -1 stands for none, so positions compare as unsigned.
void lower_to(int32_t* value, int32_t ceiling) {
  int32_t seen = __atomic_load_n(value, __ATOMIC_RELAXED);
  while (static_cast<uint32_t>(seen) > static_cast<uint32_t>(ceiling) &&
         !__atomic_compare_exchange_n(value, &seen, ceiling, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
}

void mark(const VerifyArgs& args, const VerifyEntry& e, bool bad) {
  if (!known_row(args, e.batch_row)) return;
  raise_to(&args.verdict[e.batch_row], bad ? kBad : kOk);
  if (bad) lower_to(&args.first_bad_position[e.batch_row], verdict_position(e.expected_position));
}

void count_unattested(const VerifyArgs& args, const VerifyEntry& e) {
  if (!known_row(args, e.batch_row)) return;
  __atomic_fetch_add(&args.unattested[e.batch_row], 1, __ATOMIC_RELAXED);
  lower_to(&args.first_unattested_position[e.batch_row], verdict_position(e.expected_position));
}

// Entries whose slots are read, kept until there are enough to hash together; rows keep their order, since every entry passes here.
class EntryGroup {
 public:
  EntryGroup(const VerifyArgs& args, const SourceWindow& window, RowCollector& rows) : args_(args), window_(window), rows_(rows) {}

  void add(const VerifyEntry& e) {
    switch (classify(args_, e.slot)) {
      case EntryClass::kSkip:
        return;
      case EntryClass::kOutOfRange:
        if (!args_.extended) return;
        flush();
        rows_.add(out_of_range_row(args_, e));
        return mark(args_, e, true);
      case EntryClass::kCheck:
        slots_[count_] = static_cast<uint32_t>(e.slot);
        entries_[count_++] = e;
        if (count_ == kFoldGroup) flush();
    }
  }

  void flush() {
    RealKvFold folds[kFoldGroup];
    for (int32_t k = 0; k < args_.sources.count; ++k) {
      if (!window_.contains(k)) continue;
      const Source& source = args_.sources.sources[k];
      const SourceGeometry& g = args_.sources.geometries[source.geometry];
      uint64_t hashes[kFoldGroup];
      fold_group(source, g, slots_, count_, hashes);
      for (int i = 0; i < count_; ++i) folds[i].add(k, hashes[i], g, tags(slots_[i]));
    }
    for (int i = 0; i < count_; ++i) judge(entries_[i], folds[i]);
    count_ = 0;
  }

 private:
  const uint32_t* tags(uint32_t slot) const {
    return args_.source_tags == nullptr ? nullptr : args_.source_tags + static_cast<int64_t>(slot) * args_.sources.count;
  }

  void judge(const VerifyEntry& e, const RealKvFold& fold) {
    const Record record = load_record(args_.records, e.slot);
    const bool unwritten = args_.extended && is_unwritten(args_.records, e.slot, record);
    if (unwritten && args_.tolerant) return count_unattested(args_, e);
    const uint64_t prev_hash = prev_is_readable(args_, e.prev_slot) ? chain_next(load_record(args_.records, e.prev_slot)) : 0;
    const ChainExpectation chain = expect_chain(args_, e, record, prev_hash);
    const RealKvCheck real = window_.count < window_.total ? fold.against_tags() : fold.against_record(record);
    const uint32_t reason = entry_reasons(args_, e, record, chain, real.bad, unwritten);
    if (reason != 0) rows_.add(checked_row(args_, e, reason, record, chain, real));
    mark(args_, e, reason != 0);
  }

  const VerifyArgs& args_;
  const SourceWindow& window_;
  RowCollector& rows_;
  VerifyEntry entries_[kFoldGroup];
  uint32_t slots_[kFoldGroup];
  int count_ = 0;
};

void start_launch(const VerifyArgs& args) {
  std::fill_n(args.verdict, args.batch_size, static_cast<int32_t>(kNotChecked));
  std::fill_n(args.first_bad_position, args.batch_size, -1);
  std::fill_n(args.unattested, args.batch_size, 0);
  std::fill_n(args.first_unattested_position, args.batch_size, -1);
  ++*args.log.kernel_runs;
}

void report_table_row(const VerifyArgs& args, int64_t r, RowCollector& rows) {
  if (!args.extended) return;
  rows.add(table_row(args, r));
  raise_to(&args.verdict[r], kBad);
}

// Checks `total` entries; `visit(first, last, body)` calls body(entry) for each of a range.
template <typename Visit>
void check_entries(const VerifyArgs& args, int64_t total, const Visit& visit, Executor& executor) {
  *args.log.slot_runs += static_cast<uint64_t>(total);
  const SourceWindow window = source_window(args);
  const int64_t per_chunk = entries_per_chunk(args);
  const int64_t chunks = (total + per_chunk - 1) / per_chunk;
  for (int64_t wave = 0; wave < chunks; wave += kChunksPerWave) {
    const int64_t count = std::min(kChunksPerWave, chunks - wave);
    std::vector<RowCollector> rows(static_cast<size_t>(count), RowCollector(log_room(args.log)));
    executor.run(count, [&](int64_t i) {
      const int64_t first = (wave + i) * per_chunk;
      EntryGroup group(args, window, rows[static_cast<size_t>(i)]);
      visit(first, std::min(total, first + per_chunk), [&](const VerifyEntry& e) { group.add(e); });
      group.flush();
    });
    for (const RowCollector& collected : rows) append_rows(args.log, collected);
  }
}

}  // namespace

void verify(const VerifyArgs& args, const PlannedEntries& entries, Executor& executor) {
  start_launch(args);
  if (*entries.enable == 0) return;
  normalize_index(args.log);
  RowCollector table_rows(log_room(args.log));
  for (int64_t r = 0; r < args.batch_size; ++r) {
    if (entries.row_status[r] != 0) report_table_row(args, r, table_rows);
  }
  append_rows(args.log, table_rows);
  const int64_t total = std::clamp<int64_t>(*entries.num_valid, 0, entries.slot_indices.size);
  const auto visit = [&](int64_t first, int64_t last, const auto& body) {
    for (int64_t i = first; i < last; ++i) {
      body(VerifyEntry{entries.slot_indices[i], entries.prev_slot_indices[i], entries.expected_positions[i],
                       entries.expected_tokens[i], entries.batch_rows.get(i, -1)});
    }
  };
  check_entries(args, total, visit, executor);
}

void verify_fused(const VerifyArgs& args, const RequestBatch& batch, Executor& executor) {
  start_launch(args);
  normalize_index(args.log);
  const int64_t bs = batch.size();
  std::vector<int64_t> offsets(static_cast<size_t>(bs) + 1, 0);
  RowCollector table_rows(log_room(args.log));
  for (int64_t r = 0; r < bs; ++r) {
    const RequestSpan span = batch.span(r);
    if (span.status != 0) report_table_row(args, r, table_rows);
    offsets[static_cast<size_t>(r) + 1] = saturating_add(offsets[static_cast<size_t>(r)], span.entries(), kInt64Max);
  }
  append_rows(args.log, table_rows);
  const auto visit = [&](int64_t first, int64_t last, const auto& body) {
    int64_t r = std::upper_bound(offsets.begin(), offsets.end(), first) - offsets.begin() - 1;
    for (; first < last; ++r) {
      const int64_t row_start = offsets[static_cast<size_t>(r)];
      const int64_t stop = std::min(last, offsets[static_cast<size_t>(r) + 1]);
      if (first >= stop) continue;
      const RequestSpan span = batch.span(r);
      int64_t position = span.position(first - row_start);
      int64_t prev_slot = batch.prev_slot_at(r, span.req_pool_idx, position);
      for (; first < stop; ++first) {
        const int64_t slot = batch.slot_at(r, span.req_pool_idx, position);
        body(VerifyEntry{slot, prev_slot, position, batch.expected_token(r, span.req_pool_idx, position), r});
        if (first + 1 == stop) continue;
        position += span.stride;
        prev_slot = span.stride == 1 ? slot : batch.prev_slot_at(r, span.req_pool_idx, position);
      }
    }
  };
  check_entries(args, offsets.back(), visit, executor);
}

}  // namespace kvcanary::cpu
