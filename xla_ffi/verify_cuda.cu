// verify and verify_fused on CUDA: a small kernel opens the launch, then warps take entries, their lanes the sources.
#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "fold_cuda.cuh"
#include "kernels_cuda.h"
#include "launch_cuda.cuh"
#include "log_cuda.cuh"
#include "sources_cuda.cuh"

namespace kvcanary::cuda {
namespace {

constexpr int kOpenThreads = 1024;
constexpr int kDirectThreads = 256;
constexpr int kStagedThreads = 128;  // four warps' stages a block, three blocks on a multiprocessor

// --- where entries come from ---

struct Planned {
  PlannedEntries e;

  __device__ bool enabled() const { return *e.enable != 0; }
  __device__ int64_t total(const VerifyArgs&) const {
    const int64_t n = *e.num_valid;
    return n < 0 ? 0 : n > e.slot_indices.size ? e.slot_indices.size : n;
  }

  // Reads entries of rising number.
  struct Cursor {
    __device__ Cursor(const Planned&, const VerifyArgs&, int64_t) {}
    __device__ VerifyEntry entry(const Planned& p, int64_t i) const {
      return {p.e.slot_indices[i], p.e.prev_slot_indices[i], p.e.expected_positions[i], p.e.expected_tokens[i], p.e.batch_rows.get(i, -1)};
    }
  };
};

struct Fused {
  RequestBatch batch;
  int64_t* entry_offsets;  // [bs + 1]

  __device__ bool enabled() const { return true; }
  __device__ int64_t total(const VerifyArgs& a) const { return entry_offsets[a.batch_size]; }

  struct Cursor {
    int64_t row;
    int64_t row_end;   // number of the first entry past the row
    int64_t shift;     // position of an entry less its number
    int64_t req_pool_idx;

    __device__ Cursor(const Fused& f, const VerifyArgs& a, int64_t first) : row(find_row(f.entry_offsets, a.batch_size, first)) { load(f); }
    __device__ void load(const Fused& f) {
      const RequestSpan span = f.batch.span(row);
      row_end = f.entry_offsets[row + 1];
      shift = span.begin - f.entry_offsets[row];
      req_pool_idx = span.req_pool_idx;
    }
    __device__ VerifyEntry entry(const Fused& f, int64_t i) {
      if (i >= row_end) {
        do {
          ++row;
        } while (i >= f.entry_offsets[row + 1]);
        load(f);
      }
      const int64_t position = i + shift;
      return {f.batch.slot_at(row, req_pool_idx, position), f.batch.prev_slot_at(row, req_pool_idx, position), position,
              f.batch.expected_token(row, req_pool_idx, position), row};
    }
  };
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

// Marks the rows of good entries. A lane remembers the row it marked last, and lanes of one row leave it to the first.
struct OkMarker {
  int64_t marked = -1;

  // The whole warp calls it.
  __device__ void mark(const VerifyArgs& a, int64_t batch_row, bool good) {
    const bool fresh = good && batch_row != marked && known_row(a, batch_row);
    const unsigned voters = __ballot_sync(kFullMask, fresh);
    if (voters == 0) return;
    const int first = __ffs(static_cast<int>(voters)) - 1;
    const int64_t first_row = __shfl_sync(kFullMask, batch_row, first);
    if (!fresh) return;
    marked = batch_row;
    if (batch_row == first_row && static_cast<int>(threadIdx.x % kWarp) != first) return;
    atomicMax(&a.verdict[batch_row], kOk);
  }
};

// What successors of the previous round's last slot expect, so that a chain crosses rounds without another load.
struct LastSlot {
  int64_t slot = -1;
  uint64_t next_hash = 0;
};

// Hash that an entry's predecessor gives: from the neighbouring lane or the last round where it was just read, else from memory.
// The whole warp calls it; `own` is the record of a lane's entry, read where `has_own`.
__device__ uint64_t predecessor_hash(const VerifyArgs& a, const VerifyEntry& e, bool check, const Record& own, bool has_own, LastSlot& last) {
  const int lane = threadIdx.x % kWarp;
  const int64_t my_slot = has_own ? e.slot : -1;
  const uint64_t my_next = chain_next(own);
  int64_t near_slot = __shfl_up_sync(kFullMask, my_slot, 1);
  uint64_t near_next = __shfl_up_sync(kFullMask, my_next, 1);
  if (lane == 0) {
    near_slot = last.slot;
    near_next = last.next_hash;
  }
  last.slot = __shfl_sync(kFullMask, my_slot, kWarp - 1);
  last.next_hash = __shfl_sync(kFullMask, my_next, kWarp - 1);
  if (!check || !prev_is_readable(a, e.prev_slot)) return 0;
  return near_slot == e.prev_slot ? near_next : chain_next(load_record(a.records, e.prev_slot));
}

// Checks entries [first, last) of a launch, 32 >> lanes_log2 at a time.
template <typename Entries, typename Stages>
__device__ void check_range(const VerifyArgs& a, const Entries& entries, const DeviceSources& sources, int lanes_log2, int64_t first,
                            int64_t last, Stages* stages) {
  if (first >= last) return;
  const SourceWindow window = source_window(a);
  const int lane = threadIdx.x % kWarp;
  const bool leads = (lane & ((1 << lanes_log2) - 1)) == 0;
  OkMarker marker;
  LastSlot last_slot;
  int64_t i = first + (lane >> lanes_log2);
  typename Entries::Cursor cursor(entries, a, i < last ? i : first);
  for (; first < last; first += kWarp >> lanes_log2, i += kWarp >> lanes_log2) {
    const bool live = i < last;
    VerifyEntry e{-1, -1, 0, -1, -1};
    if (live) e = cursor.entry(entries, i);
    const EntryClass kind = live ? classify(a, e.slot) : EntryClass::kSkip;
    const bool check = kind == EntryClass::kCheck;
    // The record is asked for before the bytes are, so that both loads are under way.
    Record record{};
    if (check && leads) record = load_record(a.records, e.slot);
    const uint32_t* tags = a.source_tags == nullptr || !check ? nullptr : a.source_tags + e.slot * sources.count;
    RealKvFold fold;
    fold_slot_sources(sources, lanes_log2, check ? static_cast<int32_t>(e.slot) : -1, stages, [&](int32_t k) { return window.contains(k); },
                      [&](int32_t k, uint64_t hash, const SourceGeometry& g) { fold.add(k, hash, g, tags); });
    const uint64_t prev_hash = predecessor_hash(a, e, check && leads, record, check && leads, last_slot);
    bool good = false;
    if (check && leads) {
      const RealKvCheck real = window.count < window.total ? fold.against_tags() : fold.against_record(record);
      const ChainExpectation chain = expect_chain(a, e, record, prev_hash);
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
    marker.mark(a, e.batch_row, good);
  }
}

// Every warp takes one run of consecutive entries, so that rows are looked up once and chains stay in registers.
template <typename Entries, typename Stages>
__device__ void check_share(const VerifyArgs& a, const Entries& entries, const DeviceSources& sources, Stages* stages) {
  if (!entries.enabled()) return;
  const int64_t total = entries.total(a);
  const int64_t warps = static_cast<int64_t>(gridDim.x) * blockDim.x / kWarp;
  const int64_t warp = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / kWarp;
  const int lanes_log2 = lanes_log2_for(sources.count, total, warps * kWarp);
  const int64_t per_round = kWarp >> lanes_log2;
  const int64_t rounds = (total + per_round - 1) / per_round;
  const int64_t share = (rounds + warps - 1) / warps * per_round;
  const int64_t first = warp * share;
  check_range(a, entries, sources, lanes_log2, first, first + share < total ? first + share : total, stages);
}

template <typename Entries>
__global__ void __launch_bounds__(kDirectThreads, 3)
    check_direct(const __grid_constant__ VerifyArgs a, const __grid_constant__ Entries entries, const __grid_constant__ DeviceSources sources) {
  check_share<Entries, DeepStages>(a, entries, sources, nullptr);
}

template <typename Entries, typename Stages>
__global__ void __launch_bounds__(kStagedThreads)
    check_staged(const __grid_constant__ VerifyArgs a, const __grid_constant__ Entries entries, const __grid_constant__ DeviceSources sources) {
  extern __shared__ __align__(16) unsigned char shared[];
  check_share(a, entries, sources, reinterpret_cast<Stages*>(shared) + threadIdx.x / kWarp);
}

template <typename Entries>
cudaError_t launch_check(cudaStream_t stream, const VerifyArgs& args, const Entries& entries, int64_t most_entries, const HostSources& sources) {
  if (most_entries == 0) return cudaSuccess;
  DeviceSources table;
  if (cudaError_t e = device_sources(stream, sources, &table); e != cudaSuccess) return e;
  const int64_t lanes = most_entries * std::min<int64_t>(std::max(table.count, 1), kWarp);
  unsigned blocks = 0;
  if (table.staged) {
    return launch_staged(
        stream, lanes, kStagedThreads, [](auto* stages) { return check_staged<Entries, std::remove_pointer_t<decltype(stages)>>; }, args, entries, table);
  } else {
    if (cudaError_t e = grid_blocks(ceil_div(lanes, kDirectThreads), 8, &blocks); e != cudaSuccess) return e;
    check_direct<Entries><<<blocks, kDirectThreads, 0, stream>>>(args, entries, table);
  }
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
