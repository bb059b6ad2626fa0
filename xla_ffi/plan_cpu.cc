// plan on the CPU: prefix sums over the batch, then the entries of all rows in parallel.
#include <algorithm>
#include <cstdint>

#include "kernels_cpu.h"

namespace kvcanary::cpu {
namespace {

constexpr int64_t kEntriesPerChunk = 8192;

void fill_entries(const RequestBatch& batch, const PlanOutput& out, int64_t first, int64_t last) {
  const int64_t* offsets = out.entry_offsets;
  const int64_t bs = batch.size();
  int64_t r = std::upper_bound(offsets, offsets + bs + 1, first) - offsets - 1;
  while (first < last) {
    const int64_t stop = std::min(last, offsets[r + 1]);
    if (first < stop) {
      const RequestSpan span = batch.span(r);
      for (int64_t i = first; i < stop; ++i) {
        const int64_t position = span.begin + (i - offsets[r]);
        out.slot_indices.store(i, batch.slot_at(r, span.req_pool_idx, position));
        out.prev_slot_indices.store(i, batch.prev_slot_at(r, span.req_pool_idx, position));
        out.expected_positions.store(i, position);
        out.expected_tokens.store(i, batch.expected_token(r, span.req_pool_idx, position));
        out.batch_rows.store(i, r);
      }
      first = stop;
    }
    ++r;
  }
}

}  // namespace

void plan(const RequestBatch& batch, const PlanOutput& out, Executor& executor) {
  const int64_t bs = batch.size();
  const int64_t top = out.write_offsets.wide ? kInt64Max : kInt32Max;
  int64_t entries = 0;
  int64_t written = 0;
  out.write_offsets.store(0, 0);
  for (int64_t r = 0; r < bs; ++r) {
    const RequestSpan span = batch.span(r);
    out.row_status[r] = static_cast<int32_t>(span.status);
    out.entry_offsets[r] = entries;
    entries = saturating_add(entries, span.entries(), kInt64Max);
    written = saturating_add(written, batch.write_length(r), top);
    out.write_offsets.store(r + 1, written);
    out.seed_slots.store(r, batch.seed_slot(r, span));
  }
  out.entry_offsets[bs] = entries;
  for (int64_t r = bs; r < out.write_req_capacity; ++r) {
    out.write_offsets.store(r + 1, 0);
    out.seed_slots.store(r, -1);
  }
  const int64_t valid = std::min(entries, out.verify_capacity);
  *out.num_valid = static_cast<int32_t>(valid);
  *out.enable = entries <= out.verify_capacity;
  *out.num_valid_reqs = static_cast<int32_t>(bs);
  if (*out.enable == 0) return;
  executor.run((valid + kEntriesPerChunk - 1) / kEntriesPerChunk, [&](int64_t chunk) {
    const int64_t first = chunk * kEntriesPerChunk;
    fill_entries(batch, out, first, std::min(valid, first + kEntriesPerChunk));
  });
}

}  // namespace kvcanary::cpu
