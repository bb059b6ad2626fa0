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

  __device__ bool positions_fit_int32() const {
    const int64_t width = batch.kind == kTableFlat     ? batch.table.size
                          : batch.kind == kTableBlocks ? batch.table_width * batch.page_size
                                                       : batch.table_width;
    return batch.kind != kTableIdentity && width <= kInt32Max;  // a ring's positions have no bound
  }

  struct Cursor {
    int64_t row;
    int64_t row_end;    // number of the first entry past the row
    int64_t row_start;  // number of its first entry
    int64_t begin;      // position of that entry
    int64_t req_pool_idx;

    __device__ Cursor(const Fused& f, const VerifyArgs& a, int64_t first) : row(find_row(f.entry_offsets, a.batch_size, first)) { load(f); }
    __device__ void load(const Fused& f) {
      const RequestSpan span = f.batch.span(row);
      row_end = f.entry_offsets[row + 1];
      row_start = f.entry_offsets[row];
      begin = span.begin;
      req_pool_idx = span.req_pool_idx;
    }
    __device__ VerifyEntry entry(const Fused& f, int64_t i) {
      if (i >= row_end) {
        do {
          ++row;
        } while (i >= f.entry_offsets[row + 1]);
        load(f);
      }
      const int64_t position = begin + (i - row_start) * f.batch.stride;
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
  a.unattested[r] = 0;
  a.first_unattested_position[r] = -1;
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
  __device__ int64_t operator()(int64_t x, int64_t y) const { return saturating_add(x, y, kInt64Max); }
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
    const int64_t through = Sum{}(entries, block_inclusive_scan<kOpenThreads>(row_entries, shared, Sum{}));
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

__device__ void count_unattested(const VerifyArgs& a, const VerifyEntry& e) {
  if (!known_row(a, e.batch_row)) return;
  // Threads that come here together share an atomic a row.
  const unsigned same = __match_any_sync(__activemask(), e.batch_row);
  const int lane = threadIdx.x % kWarp;
  if (__ffs(static_cast<int>(same)) - 1 == lane) atomicAdd(&a.unattested[e.batch_row], __popc(same));
  const unsigned position = static_cast<unsigned>(verdict_position(e.expected_position));
  atomicMin(reinterpret_cast<unsigned*>(&a.first_unattested_position[e.batch_row]), position);
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
__device__ __noinline__ void check_range(const VerifyArgs& a, const Entries& entries, const DeviceSources& sources, int lanes_log2, int64_t first,
                            int64_t last, Stages* stages) {
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
    const bool unwritten = check && leads && a.extended && is_unwritten(a.records, e.slot, record);
    if (unwritten && a.tolerant) {
      count_unattested(a, e);
    } else if (check && leads) {
      const RealKvCheck real = window.count < window.total ? fold.against_tags() : fold.against_record(record);
      const ChainExpectation chain = expect_chain(a, e, record, prev_hash);
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

// What a round of the fused path knows of a lane's entry before its record is read.
struct HotEntry {
  int32_t slot;      // -1 where there is nothing to read
  int32_t position;
  int32_t row;
  uint64_t anchor;   // chain hash of a head in this row
  bool live;
  bool follows;      // its predecessor is the entry before it
};

// Walks a warp's share of a fused launch, 32 entries a round, in 32-bit numbers counted from the share's first entry.
class HotCursor {
 public:
  __device__ HotCursor(const VerifyArgs& a, const Fused& f, int64_t first, int32_t count)
      : a_(a), f_(f), first_(first), count_(count), row_(static_cast<int32_t>(find_row_by_warp(f.entry_offsets, a.batch_size, first))) {
    load_row();
  }

  // Slot before the share's first entry, where that has a predecessor; before any call of entry().
  __device__ int32_t slot_before() const {
    return shift_ > begin_ ? narrow(f_.batch.slot_at(row_, req_pool_idx_, shift_ - 1)) : -1;
  }

  __device__ HotEntry entry(int32_t k) {
    HotEntry e{-1, 0, row_, anchor_, k < count_, false};
    if (!e.live) return e;
    if (k >= row_end_) {
      do {
        ++row_;
      } while (first_ + k >= f_.entry_offsets[row_ + 1]);
      load_row();
      e.row = row_;
      e.anchor = anchor_;
    }
    e.position = k + shift_;
    e.follows = e.position > begin_;
    e.slot = plain_ != nullptr ? plain_[e.position] : narrow(f_.batch.slot_at(row_, req_pool_idx_, e.position));
    return e;
  }

 private:
  __device__ void load_row() {
    const RequestBatch& b = f_.batch;
    const RequestSpan span = b.span(row_);
    const int64_t end = f_.entry_offsets[row_ + 1] - first_;
    row_end_ = static_cast<int32_t>(end < count_ ? end : count_);
    shift_ = static_cast<int32_t>(span.begin - (f_.entry_offsets[row_] - first_));
    begin_ = static_cast<int32_t>(span.begin);
    req_pool_idx_ = span.req_pool_idx;
    anchor_ = anchor_hash(static_cast<uint64_t>(a_.namespaces.get(row_, 0)));
    const bool plain = b.kind == kTableRows && !b.table.wide && !b.has_mapping;
    plain_ = plain ? static_cast<const int32_t*>(b.table.data) + req_pool_idx_ * b.table_width : nullptr;
  }

  const VerifyArgs& a_;
  const Fused& f_;
  const int64_t first_;
  const int32_t count_;
  int32_t row_;
  int32_t row_end_ = 0;
  int32_t shift_ = 0;
  int32_t begin_ = 0;
  int64_t req_pool_idx_ = 0;
  uint64_t anchor_ = 0;
  const int32_t* plain_ = nullptr;
};

// The full rules for one entry whose bytes are already hashed; true if it is good.
template <typename Entries>
__device__ __noinline__ bool judge_slowly(const VerifyArgs& a, const Entries& entries, int64_t i, const RealKvFold& fold, bool rotated) {
  typename Entries::Cursor cursor(entries, a, i);
  const VerifyEntry e = cursor.entry(entries, i);
  switch (classify(a, e.slot)) {
    case EntryClass::kSkip:
      return false;
    case EntryClass::kOutOfRange:
      if (a.extended) {
        append_row(a.log, out_of_range_row(a, e));
        mark_bad(a, e);
      }
      return false;
    case EntryClass::kCheck:
      break;
  }
  const Record record = load_record(a.records, e.slot);
  const bool unwritten = a.extended && is_unwritten(a.records, e.slot, record);
  if (unwritten && a.tolerant) {
    count_unattested(a, e);
    return false;
  }
  const uint64_t prev_hash = prev_is_readable(a, e.prev_slot) ? chain_next(load_record(a.records, e.prev_slot)) : 0;
  const RealKvCheck real = rotated ? fold.against_tags() : fold.against_record(record);
  const ChainExpectation chain = expect_chain(a, e, record, prev_hash);
  const uint32_t reason = entry_reasons(a, e, record, chain, real.bad, unwritten);
  if (reason == 0) return true;
  append_row(a.log, checked_row(a, e, reason, record, chain, real));
  mark_bad(a, e);
  return false;
}

// The hot loop: decides in few instructions that an entry is good, and leaves every other to the full rules.
template <bool kFold, typename Stages>
__device__ void check_hot(const VerifyArgs& a, const Fused& f, const DeviceSources& sources, int64_t first, int32_t count, Stages* stages) {
  const SourceWindow window = source_window(a);
  const bool rotated = window.count < window.total;
  const int lane = threadIdx.x % kWarp;
  const int32_t slots = static_cast<int32_t>(a.slots);
  const int32_t padding = a.has_padding_slot && a.padding_slot >= 0 && a.padding_slot < a.slots ? static_cast<int32_t>(a.padding_slot) : -1;
  OkMarker marker;
  HotCursor cursor(a, f, first, count);
  int32_t last_slot = cursor.slot_before();
  if (last_slot < 0 || last_slot >= slots || last_slot == padding) last_slot = -1;
  uint64_t last_next = last_slot >= 0 ? chain_next(load_record(a.records, last_slot)) : 0;
  HotEntry upcoming = cursor.entry(lane);
  for (int32_t base = 0; base < count; base += kWarp) {
    const HotEntry e = upcoming;
    const int32_t k = base + lane;
    const bool readable = e.slot >= 0 && e.slot < slots && e.slot != padding;
    Record record{};
    if (readable) record = load_record(a.records, e.slot);
    upcoming = cursor.entry(k + kWarp);  // its slot is on the way while this round works
    RealKvFold fold;
    if constexpr (kFold) {
      const uint32_t* tags = a.source_tags == nullptr || !readable ? nullptr : a.source_tags + static_cast<int64_t>(e.slot) * sources.count;
      fold_slot_sources(sources, 0, readable ? e.slot : -1, stages, [&](int32_t j) { return window.contains(j); },
                        [&](int32_t j, uint64_t hash, const SourceGeometry& g) { fold.add(j, hash, g, tags); });
    }
    const uint64_t next = chain_next(record);
    const int32_t own_slot = readable ? e.slot : -1;
    int32_t near_slot = __shfl_up_sync(kFullMask, own_slot, 1);
    uint64_t near_next = __shfl_up_sync(kFullMask, next, 1);
    if (lane == 0) {
      near_slot = last_slot;
      near_next = last_next;
    }
    last_slot = __shfl_sync(kFullMask, own_slot, kWarp - 1);
    last_next = __shfl_sync(kFullMask, next, kWarp - 1);
    const bool chain_known = e.position == 0 || (e.follows && near_slot >= 0);
    const uint64_t expected = e.position == 0 ? e.anchor : near_next;
    bool good = readable && chain_known && record.prev_hash == expected && record.prev_hash != 0 &&
                record.position == static_cast<uint64_t>(static_cast<uint32_t>(e.position));
    good = good && (rotated ? fold.first_bad_source < 0 : fold.combined == record.real_kv_hash);
    if (good && a.check_token) {
      const int64_t token = f.batch.expected_token(e.row, a.req_pool_indices[e.row], e.position);
      good = token == -1 || static_cast<int64_t>(record.token) == token;
    }
    if (e.live && !good) good = judge_slowly(a, f, first + k, fold, rotated);
    __syncwarp();
    marker.mark(a, e.row, good);
  }
}

// Every warp takes one run of consecutive entries, so that rows are looked up once and chains stay in registers.
template <bool kFold, typename Entries, typename Stages>
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
  const int64_t last = first + share < total ? first + share : total;
  if (first >= last) return;
  if constexpr (std::is_same_v<Entries, Fused>) {
    if (lanes_log2 == 0 && entries.batch.stride == 1 && share <= (int64_t{1} << 30) && entries.positions_fit_int32()) {
      check_hot<kFold>(a, entries, sources, first, static_cast<int32_t>(last - first), stages);
      return;
    }
  }
  check_range(a, entries, sources, lanes_log2, first, last, stages);
}

template <typename Entries, bool kFold>
__global__ void __launch_bounds__(kDirectThreads, kFold ? 3 : 4)
    check_direct(const __grid_constant__ VerifyArgs a, const __grid_constant__ Entries entries, const __grid_constant__ DeviceSources sources) {
  check_share<kFold, Entries, DeepStages>(a, entries, sources, nullptr);
}

template <typename Entries, typename Stages>
__global__ void __launch_bounds__(kStagedThreads)
    check_staged(const __grid_constant__ VerifyArgs a, const __grid_constant__ Entries entries, const __grid_constant__ DeviceSources sources) {
  extern __shared__ __align__(16) unsigned char shared[];
  check_share<true>(a, entries, sources, reinterpret_cast<Stages*>(shared) + threadIdx.x / kWarp);
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
  }
  // As many blocks as are resident at once, so that a share is as long as it can be.
  const bool fold = table.count > 0;
  if (cudaError_t e = grid_blocks(ceil_div(lanes, kDirectThreads), fold ? 3 : 4, &blocks); e != cudaSuccess) return e;
  if (fold) {
    check_direct<Entries, true><<<blocks, kDirectThreads, 0, stream>>>(args, entries, table);
  } else {
    check_direct<Entries, false><<<blocks, kDirectThreads, 0, stream>>>(args, entries, table);
  }
  return cudaGetLastError();
}

// An upper bound of a batch's entries from its shapes.
int64_t most_entries(const RequestBatch& batch) {
  const int64_t width = batch.kind == kTableBlocks ? batch.table_width * batch.page_size
                        : batch.kind == kTableFlat ? batch.table.size
                                                   : batch.table_width;
  const int64_t bs = batch.size();
  const int64_t most = (width + batch.stride - 1) / batch.stride;
  return bs == 0 || width == 0 ? 0 : most > (int64_t{1} << 40) / bs ? int64_t{1} << 40 : bs * most;
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
