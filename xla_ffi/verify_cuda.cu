// verify and verify_fused on CUDA: a small kernel opens the launch, then warps take entries, their lanes the sources.
#include <cstdint>

#include "kernels_cuda.h"
#include "launch_cuda.cuh"
#include "log_cuda.cuh"
#include "sources_cuda.cuh"

namespace kvcanary::cuda {
namespace {

constexpr int kOpenThreads = 1024;
constexpr int kThreads = 256;
constexpr int kWarpsPerBlock = kThreads / kWarp;

// --- where entries come from ---

struct Planned {
  PlannedEntries e;

  __device__ bool enabled() const { return *e.enable != 0; }
  __device__ int64_t total(const VerifyArgs&) const {
    const int64_t n = *e.num_valid;
    return n < 0 ? 0 : n > e.slot_indices.size ? e.slot_indices.size : n;
  }
  __device__ VerifyEntry entry(const VerifyArgs&, int64_t i) const {
    return {e.slot_indices[i], e.prev_slot_indices[i], e.expected_positions[i], e.expected_tokens[i], e.batch_rows.get(i, -1)};
  }
};

struct Fused {
  RequestBatch batch;
  int64_t* entry_offsets;  // [bs + 1]

  __device__ bool enabled() const { return true; }
  __device__ int64_t total(const VerifyArgs& a) const { return entry_offsets[a.batch_size]; }
  __device__ VerifyEntry entry(const VerifyArgs& a, int64_t i) const {
    const int64_t r = find_row(entry_offsets, a.batch_size, i);
    const RequestSpan span = batch.span(r);
    const int64_t position = span.begin + (i - entry_offsets[r]);
    return {batch.slot_at(r, span.req_pool_idx, position), batch.prev_slot_at(r, span.req_pool_idx, position), position,
            batch.expected_token(r, span.req_pool_idx, position), r};
  }
};

// --- opening a launch: verdicts, counters, rows of requests that are out of range ---

__device__ void open_row(const VerifyArgs& a, int64_t r, bool out_of_range) {
  const bool bad = out_of_range && a.extended;
  a.verdict[r] = bad ? kBad : kNotChecked;
  a.first_bad_position[r] = -1;
  if (bad) append_row(a.log, table_row(a, r));
}

__global__ void __launch_bounds__(kOpenThreads) open_planned(const __grid_constant__ VerifyArgs a, const __grid_constant__ Planned planned) {
  const bool enabled = planned.enabled();
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    add_count(a.log.kernel_runs, 1);
    if (enabled) {
      normalize_index(a.log);
      add_count(a.log.slot_runs, static_cast<uint64_t>(planned.total(a)));
    }
  }
  for (int64_t r = static_cast<int64_t>(blockIdx.x) * kOpenThreads + threadIdx.x; r < a.batch_size;
       r += static_cast<int64_t>(gridDim.x) * kOpenThreads) {
    open_row(a, r, enabled && planned.e.row_status[r] != 0);
  }
}

struct Sum {
  __device__ int64_t operator()(int64_t x, int64_t y) const { return x + y; }
};

// One block, which also scans the rows' entries.
__global__ void __launch_bounds__(kOpenThreads) open_fused(const __grid_constant__ VerifyArgs a, const __grid_constant__ Fused fused) {
  __shared__ int64_t shared[kWarp];
  __shared__ int64_t carry;
  if (threadIdx.x == 0) normalize_index(a.log);
  int64_t entries = 0;
  for (int64_t base = 0; base < a.batch_size; base += kOpenThreads) {
    const int64_t r = base + threadIdx.x;
    int64_t row_entries = 0;
    if (r < a.batch_size) {
      const RequestSpan span = fused.batch.span(r);
      row_entries = span.entries();
      open_row(a, r, span.status != 0);
    }
    __syncwarp();
    const int64_t through = entries + block_inclusive_scan<kOpenThreads>(row_entries, shared, Sum{});
    if (r < a.batch_size) fused.entry_offsets[r + 1] = through;
    if (threadIdx.x == kOpenThreads - 1) carry = through;
    __syncthreads();
    entries = carry;
    __syncthreads();
  }
  if (threadIdx.x == 0) {
    fused.entry_offsets[0] = 0;
    add_count(a.log.kernel_runs, 1);
    add_count(a.log.slot_runs, static_cast<uint64_t>(entries));
  }
}

// --- entries ---

__device__ void mark_bad(const VerifyArgs& a, const VerifyEntry& e) {
  if (!known_row(a, e.batch_row)) return;
  atomicMax(&a.verdict[e.batch_row], kBad);
  // -1 stands for none, so positions compare as unsigned.
  atomicMin(reinterpret_cast<unsigned*>(&a.first_bad_position[e.batch_row]), static_cast<unsigned>(verdict_position(e.expected_position)));
}

// Marks the rows of a warp's good entries, once where all are of one row. The whole warp calls it.
__device__ void mark_ok(const VerifyArgs& a, int64_t batch_row, bool good) {
  const bool mine = good && known_row(a, batch_row);
  const unsigned voters = __ballot_sync(kFullMask, mine);
  if (voters == 0) return;
  const int first = __ffs(static_cast<int>(voters)) - 1;
  const int64_t first_row = __shfl_sync(kFullMask, batch_row, first);
  const bool repeated = batch_row == first_row && static_cast<int>(threadIdx.x % kWarp) != first;
  if (mine && !repeated && *static_cast<volatile int32_t*>(&a.verdict[batch_row]) < kOk) atomicMax(&a.verdict[batch_row], kOk);
}

template <typename Entries>
__global__ void __launch_bounds__(kThreads)
    check_entries(const __grid_constant__ VerifyArgs a, const __grid_constant__ Entries entries, const __grid_constant__ DeviceSources sources) {
  if (!entries.enabled()) return;
  const int64_t total = entries.total(a);
  const SourceWindow window = source_window(a);
  const int lane = threadIdx.x % kWarp;
  const int lanes = 1 << sources.lanes_log2;
  const int per_warp = kWarp / lanes;
  const bool leads = lane % lanes == 0;
  const int64_t warp = static_cast<int64_t>(blockIdx.x) * kWarpsPerBlock + threadIdx.x / kWarp;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kWarpsPerBlock * per_warp;
  for (int64_t first = warp * per_warp; first < total; first += stride) {
    const int64_t i = first + lane / lanes;
    const bool live = i < total;
    VerifyEntry e{-1, -1, 0, -1, -1};
    if (live) e = entries.entry(a, i);
    const EntryClass kind = live ? classify(a, e.slot) : EntryClass::kSkip;
    const bool check = kind == EntryClass::kCheck;
    // The record is asked for before the bytes are, so that both loads are under way.
    Record record{};
    Record prev{};
    if (check && leads) {
      record = load_record(a.records, e.slot);
      if (prev_is_readable(a, e.prev_slot)) prev = load_record(a.records, e.prev_slot);
    }
    const int32_t slot = check ? static_cast<int32_t>(e.slot) : -1;
    const uint32_t* tags = a.source_tags == nullptr || !check ? nullptr : a.source_tags + e.slot * sources.count;
    RealKvFold fold;
    fold_slot_sources(sources, slot, [&](int32_t k) { return window.contains(k); },
                      [&](int32_t k, uint64_t hash, const SourceGeometry& g) { fold.add(k, hash, g, tags); });
    bool good = false;
    if (check && leads) {
      const RealKvCheck real = window.count < window.total ? fold.against_tags() : fold.against_record(record);
      const ChainExpectation chain = expect_chain(a, e, record, prev);
      const bool unwritten = a.extended && is_unwritten(a.records, e.slot, record);
      const uint32_t reason = entry_reasons(a, e, record, chain, real.bad, unwritten);
      good = reason == 0;
      if (!good) {
        append_row(a.log, checked_row(a, e, reason, record, chain, real));
        mark_bad(a, e);
      }
    } else if (leads && kind == EntryClass::kOutOfRange && a.extended) {
      append_row(a.log, out_of_range_row(a, e));
      mark_bad(a, e);
    }
    __syncwarp();
    mark_ok(a, e.batch_row, good);
  }
}

template <typename Entries>
cudaError_t launch_check(cudaStream_t stream, const VerifyArgs& args, const Entries& entries, int64_t most_entries, const HostSources& sources) {
  if (most_entries == 0) return cudaSuccess;
  DeviceSources table;
  if (cudaError_t e = device_sources(stream, sources, &table); e != cudaSuccess) return e;
  const int64_t per_block = kWarpsPerBlock * (kWarp >> table.lanes_log2);
  unsigned blocks = 0;
  if (cudaError_t e = grid_blocks(ceil_div(most_entries, per_block), 16, &blocks); e != cudaSuccess) return e;
  check_entries<Entries><<<blocks, kThreads, 0, stream>>>(args, entries, table);
  return cudaGetLastError();
}

// An upper bound of a batch's entries from its shapes.
int64_t most_entries(const RequestBatch& batch) {
  const int64_t width = batch.kind == kTableBlocks ? batch.table_width * batch.page_size
                        : batch.kind == kTableFlat ? batch.table.size
                                                   : batch.table_width;
  const int64_t bs = batch.size();
  return bs == 0 || width == 0 ? 0 : width > (int64_t{1} << 40) / bs ? int64_t{1} << 40 : bs * width;
}

}  // namespace

cudaError_t verify(cudaStream_t stream, const VerifyArgs& args, const PlannedEntries& entries, const HostSources& sources) {
  const Planned planned{entries};
  unsigned blocks = 0;
  if (cudaError_t e = grid_blocks(ceil_div(args.batch_size, kOpenThreads), 1, &blocks); e != cudaSuccess) return e;
  open_planned<<<blocks, kOpenThreads, 0, stream>>>(args, planned);
  if (cudaError_t e = cudaGetLastError(); e != cudaSuccess) return e;
  return launch_check(stream, args, planned, entries.slot_indices.size, sources);
}

cudaError_t verify_fused(cudaStream_t stream, const VerifyArgs& args, const RequestBatch& batch, int64_t* entry_offsets,
                         const HostSources& sources) {
  const Fused fused{batch, entry_offsets};
  open_fused<<<1, kOpenThreads, 0, stream>>>(args, fused);
  if (cudaError_t e = cudaGetLastError(); e != cudaSuccess) return e;
  return launch_check(stream, args, fused, most_entries(batch), sources);
}

}  // namespace kvcanary::cuda
