// plan on CUDA: one block scans the batch, then the whole grid fills the entries.
#include <cstdint>

#include "kernels_cuda.h"
#include "launch_cuda.cuh"

namespace kvcanary::cuda {
namespace {

constexpr int kScanThreads = 1024;
constexpr int kFillThreads = 256;

struct Sum {
  int64_t top;
  __device__ int64_t operator()(int64_t a, int64_t b) const { return saturating_add(a, b, top); }
};

__global__ void __launch_bounds__(kScanThreads) scan_batch(const __grid_constant__ RequestBatch batch, const __grid_constant__ PlanOutput out) {
  __shared__ int64_t shared[kWarp];
  const Sum add_entries{kInt64Max};
  const Sum add_written{out.write_offsets.wide ? kInt64Max : kInt32Max};
  const int64_t bs = batch.size();
  int64_t entries = 0;
  int64_t written = 0;
  __shared__ int64_t carry[2];
  for (int64_t base = 0; base < bs; base += kScanThreads) {
    const int64_t r = base + threadIdx.x;
    int64_t row_entries = 0;
    int64_t row_written = 0;
    if (r < bs) {
      const RequestSpan span = batch.span(r);
      row_entries = span.entries();
      row_written = batch.write_length(r);
      out.row_status[r] = static_cast<int32_t>(span.status);
      out.seed_slots.store(r, batch.seed_slot(r, span));
    }
    const int64_t through = add_entries(entries, block_inclusive_scan<kScanThreads>(row_entries, shared, add_entries));
    const int64_t written_through = add_written(written, block_inclusive_scan<kScanThreads>(row_written, shared, add_written));
    if (r < bs) {
      out.entry_offsets[r + 1] = through;
      out.write_offsets.store(r + 1, written_through);
    }
    if (threadIdx.x == kScanThreads - 1) carry[0] = through, carry[1] = written_through;
    __syncthreads();
    entries = carry[0];
    written = carry[1];
    __syncthreads();
  }
  for (int64_t r = bs + threadIdx.x; r < out.write_req_capacity; r += kScanThreads) {
    out.write_offsets.store(r + 1, 0);
    out.seed_slots.store(r, -1);
  }
  if (threadIdx.x == 0) {
    out.entry_offsets[0] = 0;
    out.write_offsets.store(0, 0);
    *out.num_valid = static_cast<int32_t>(entries < out.verify_capacity ? entries : out.verify_capacity);
    *out.enable = entries <= out.verify_capacity;
    *out.num_valid_reqs = static_cast<int32_t>(bs);
  }
}

__global__ void __launch_bounds__(kFillThreads) fill_entries(const __grid_constant__ RequestBatch batch, const __grid_constant__ PlanOutput out) {
  if (*out.enable == 0) return;
  const int64_t valid = *out.num_valid;
  const int64_t bs = batch.size();
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kFillThreads + threadIdx.x; i < valid;
       i += static_cast<int64_t>(gridDim.x) * kFillThreads) {
    const int64_t r = find_row(out.entry_offsets, bs, i);
    const RequestSpan span = batch.span(r);
    const int64_t position = span.begin + (i - out.entry_offsets[r]);
    out.slot_indices.store(i, batch.slot_at(r, span.req_pool_idx, position));
    out.prev_slot_indices.store(i, batch.prev_slot_at(r, span.req_pool_idx, position));
    out.expected_positions.store(i, position);
    out.expected_tokens.store(i, batch.expected_token(r, span.req_pool_idx, position));
    out.batch_rows.store(i, r);
  }
}

}  // namespace

cudaError_t plan(cudaStream_t stream, const RequestBatch& batch, const PlanOutput& out) {
  scan_batch<<<1, kScanThreads, 0, stream>>>(batch, out);
  if (cudaError_t e = cudaGetLastError(); e != cudaSuccess) return e;
  if (out.verify_capacity == 0 || batch.size() == 0) return cudaSuccess;
  unsigned blocks = 0;
  if (cudaError_t e = grid_blocks(ceil_div(out.verify_capacity, kFillThreads), 16, &blocks); e != cudaSuccess) return e;
  fill_entries<<<blocks, kFillThreads, 0, stream>>>(batch, out);
  return cudaGetLastError();
}

}  // namespace kvcanary::cuda
