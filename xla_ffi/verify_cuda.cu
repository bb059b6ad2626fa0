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
constexpr int kStagedThreads = 64;  // of two warps with stages in shared memory
constexpr int64_t kFillingRow = 4;  // entries of a row, on average, from which on a warp walks rows

// How sources are read: not at all; the only one's 16 bytes at once; from memory; some through shared memory.
enum class Fold { kNone, kBrief, kDirect, kStaged };

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
    // A ring's positions have no bound; a warp looks some rounds ahead.
    return batch.kind != kTableIdentity && width <= kInt32Max - 2 * kWarp * batch.stride;
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
template <bool kStaged, typename Entries>
__device__ __noinline__ void check_range(const VerifyArgs& a, const Entries& entries, const DeviceSources& sources, int lanes_log2, int64_t first,
                            int64_t last, Stager<ManySlots>& stager) {
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
    fold_slot_sources<kStaged>(sources, lanes_log2, check ? static_cast<int32_t>(e.slot) : -1, -1, stager,
                      [&](int32_t k) { return window.contains(k); },
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

// Slots of one row's positions, read in the way that its table allows: those of rows, flat runs and blocks of a power of two are one
// 32-bit load and little else.
class RowSlots {
 public:
  __device__ RowSlots(const RequestBatch& b, int32_t row, int64_t req_pool_idx) : b_(b), row_(row), req_pool_idx_(req_pool_idx) {
    if (b.table.wide || b.has_mapping || b.kind == kTableIdentity) return;
    const int64_t first = b.kind == kTableFlat ? b.table_starts[row] : req_pool_idx * b.table_width;
    const uint32_t page = b.kind == kTableBlocks ? static_cast<uint32_t>(b.page_size) : 1u;
    if ((page & (page - 1)) != 0) return;
    shift_ = 31 - __clz(static_cast<int>(page));
    plain_ = static_cast<const int32_t*>(b.table.data) + first;
  }

  // -1 or another number out of range where the slot is.
  __device__ int32_t operator[](int32_t position) const {
    if (plain_ == nullptr) return narrow(b_.slot_at(row_, req_pool_idx_, position));
    const int32_t entry = plain_[position >> shift_];
    if (shift_ == 0) return entry;
    return entry < 0 || entry > (kInt32Max >> shift_) ? -1 : (entry << shift_) + (position & ((1 << shift_) - 1));
  }

 private:
  const RequestBatch& b_;
  const int32_t row_;
  const int64_t req_pool_idx_;
  const int32_t* plain_ = nullptr;
  int32_t shift_ = 0;
};

// The full rules for one entry whose bytes are already hashed; true if it is good.
__device__ __noinline__ bool judge_slowly(const VerifyArgs& a, const RequestBatch& batch, int32_t row, int32_t position, bool rotated,
                                          uint64_t combined, int32_t first_bad_source, uint32_t bad_stored, uint32_t bad_found) {
  const int64_t req_pool_idx = batch.req_pool_indices[row];
  const VerifyEntry e{batch.slot_at(row, req_pool_idx, position), batch.prev_slot_at(row, req_pool_idx, position), position,
                      batch.expected_token(row, req_pool_idx, position), row};
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
  const RealKvFold fold{combined, first_bad_source, bad_stored, bad_found};
  const RealKvCheck real = rotated ? fold.against_tags() : fold.against_record(record);
  const ChainExpectation chain = expect_chain(a, e, record, prev_hash);
  const uint32_t reason = entry_reasons(a, e, record, chain, real.bad, unwritten);
  if (reason == 0) return true;
  append_row(a.log, checked_row(a, e, reason, record, chain, real));
  mark_bad(a, e);
  return false;
}

// What the hot loop knows of the launch.
struct HotLaunch {
  const VerifyArgs& a;
  const RequestBatch& batch;
  const DeviceSources& sources;
  SourceWindow window;
  int32_t slots;
  int32_t padding;  // -1 where there is none in the pool
  bool rotated;

  __device__ bool readable(int32_t slot) const { return static_cast<uint32_t>(slot) < static_cast<uint32_t>(slots) && slot != padding; }
  __device__ uint64_t next_hash(int32_t slot) const { return readable(slot) ? chain_next(load_record(a.records, slot)) : 0; }
};

// What a lane reads of one slot: asked for when it is made.
template <Fold kFold>
struct RoundLoad {
  int32_t slot;  // -1 where there is nothing to read
  Record record{};
  Bytes16 brief{};  // the only source's 16 bytes, with Fold::kBrief

  __device__ RoundLoad(const HotLaunch& h, int32_t candidate) : slot(h.readable(candidate) ? candidate : -1) {
    if (slot < 0) return;
    record = load_record(h.a.records, slot);
    if constexpr (kFold == Fold::kBrief) {
      brief = *reinterpret_cast<const Bytes16*>(slot_base(h.sources.sources[0], h.sources.geometries[0], static_cast<uint32_t>(slot)));
    }
  }
};

// Checks `count` entries of one row from `begin` on, every stride-th position, a lane an entry. Decides in few instructions that an
// entry is good and leaves every other to the full rules; 0 stands for a chain hash that is not known, since no good record has it.
template <Fold kFold, bool kStrided>
__device__ __forceinline__ void check_row(const HotLaunch& h, int32_t row, int32_t begin, int32_t count, Stager<ManySlots>& stager) {
  const VerifyArgs& a = h.a;
  const int lane = threadIdx.x % kWarp;
  const int64_t req_pool_idx = h.batch.req_pool_indices[row];
  const RowSlots table(h.batch, row, req_pool_idx);
  const int32_t stride = kStrided ? static_cast<int32_t>(h.batch.stride) : 1;
  const uint64_t anchor = anchor_hash(static_cast<uint64_t>(a.namespaces.get(row, 0)));
  int32_t position = begin + lane * stride;
  uint64_t carry = kStrided ? 0 : begin == 0 ? anchor : h.next_hash(table[begin - 1]);
  bool any_good = false;
  // Two rounds ahead the slots are asked for, one round ahead what is in them.
  RoundLoad<kFold> ahead(h, lane < count ? table[position] : -1);
  int32_t upcoming = lane + kWarp < count ? table[position + kWarp * stride] : -1;
  for (int32_t left = count - lane, rounds = (count + kWarp - 1) / kWarp; rounds > 0; --rounds, left -= kWarp, position += kWarp * stride) {
    const RoundLoad<kFold> now = ahead;
    const int32_t slot = now.slot;
    const bool live = left > 0;
    const Record& record = now.record;
    uint64_t expected = 0;
    if constexpr (kStrided) {
      if (live) expected = position == 0 ? anchor : h.next_hash(table[position - 1]);
    }
    ahead = RoundLoad<kFold>(h, upcoming);
    upcoming = left > 2 * kWarp ? table[position + 2 * kWarp * stride] : -1;
    RealKvFold fold;
    if constexpr (kFold == Fold::kBrief) {
      if (slot >= 0) fold.combined = splitmix64(splitmix64(splitmix64(now.brief.low) ^ now.brief.high));
      if (slot >= 0 && a.source_tags != nullptr) {
        fold.combined = 0;
        fold.add(0, splitmix64(splitmix64(now.brief.low) ^ now.brief.high), h.sources.geometries[0], a.source_tags + slot);
      }
    } else if constexpr (kFold != Fold::kNone) {
      const uint32_t* tags = a.source_tags == nullptr || slot < 0 ? nullptr : a.source_tags + static_cast<int64_t>(slot) * h.sources.count;
      fold_slot_sources<kFold == Fold::kStaged>(h.sources, 0, slot, ahead.slot, stager, [&](int32_t j) { return h.window.contains(j); },
                                                [&](int32_t j, uint64_t hash, const SourceGeometry& g) { fold.add(j, hash, g, tags); });
    }
    if constexpr (!kStrided) {
      const uint64_t near = __shfl_sync(kFullMask, chain_next(record), (lane + kWarp - 1) % kWarp);
      expected = lane == 0 ? carry : near;
      carry = near;
    }
    bool good = record.prev_hash == expected && expected != 0 && record.position == static_cast<uint64_t>(static_cast<uint32_t>(position));
    good = good && (h.rotated ? fold.first_bad_source < 0 : fold.combined == record.real_kv_hash);
    if (a.check_token && good) {
      const int64_t token = h.batch.expected_token(row, req_pool_idx, position);
      good = token == -1 || static_cast<int64_t>(record.token) == token;
    }
    if (live && !good) {
      good = judge_slowly(a, h.batch, row, position, h.rotated, fold.combined, static_cast<int32_t>(fold.first_bad_source), fold.bad_stored,
                          fold.bad_found);
    }
    any_good = any_good || (live && good);
    __syncwarp();
  }
  if (__any_sync(kFullMask, any_good) && lane == 0) atomicMax(&a.verdict[row], kOk);
}

// The hot path of a fused launch: a warp's share, row by row.
template <Fold kFold, bool kStrided>
__device__ void check_rows(const VerifyArgs& a, const Fused& f, const DeviceSources& sources, int64_t first, int64_t last, Stager<ManySlots>& stager) {
  const bool padded = a.has_padding_slot && a.padding_slot >= 0 && a.padding_slot < a.slots;
  const SourceWindow window = source_window(a);
  const HotLaunch h{a, f.batch, sources, window, static_cast<int32_t>(a.slots), padded ? static_cast<int32_t>(a.padding_slot) : -1,
                    window.count < window.total};
  int64_t row = find_row_by_warp(f.entry_offsets, a.batch_size, first);
  for (; first < last; ++row) {
    const int64_t row_first = f.entry_offsets[row];
    const int64_t row_last = f.entry_offsets[row + 1];
    const int64_t stop = row_last < last ? row_last : last;
    if (stop <= first) continue;
    const int64_t begin = f.batch.span(row).position(first - row_first);
    check_row<kFold, kStrided>(h, static_cast<int32_t>(row), static_cast<int32_t>(begin), static_cast<int32_t>(stop - first), stager);
    first = stop;
  }
}

// Every warp takes one run of consecutive entries, so that rows are looked up once and chains stay in registers.
template <Fold kFold, typename Entries>
__device__ void check_share(const VerifyArgs& a, const Entries& entries, const DeviceSources& sources, Stager<ManySlots>& stager) {
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
    // Worth it where rows fill a warp's rounds.
    if (lanes_log2 == 0 && entries.positions_fit_int32() && total / kFillingRow >= a.batch_size) {
      if (entries.batch.stride == 1) {
        check_rows<kFold, false>(a, entries, sources, first, last, stager);
      } else {
        check_rows<kFold, true>(a, entries, sources, first, last, stager);
      }
      return;
    }
  }
  check_range<kFold == Fold::kStaged>(a, entries, sources, lanes_log2, first, last, stager);
}

// Blocks on a multiprocessor: as many as the stages leave room for; and where one source or none is read, few with registers enough to
// keep two rounds under way.
constexpr int blocks_per_sm(Fold fold) { return fold == Fold::kStaged ? 6 : fold == Fold::kDirect ? 3 : 2; }
constexpr int threads_of(Fold fold) { return fold == Fold::kStaged ? kStagedThreads : kDirectThreads; }

template <Fold kFold, typename Entries>
__global__ void __launch_bounds__(threads_of(kFold), blocks_per_sm(kFold))
    check(const __grid_constant__ VerifyArgs a, const __grid_constant__ Entries entries, const __grid_constant__ DeviceSources sources) {
  extern __shared__ __align__(16) unsigned char shared[];
  Stager<ManySlots> stager(kFold == Fold::kStaged ? reinterpret_cast<WarpStages<ManySlots>*>(shared) + threadIdx.x / kWarp : nullptr);
  check_share<kFold>(a, entries, sources, stager);
}

template <Fold kFold, typename Entries>
cudaError_t launch_check(cudaStream_t stream, const VerifyArgs& args, const Entries& entries, int64_t lanes, const DeviceSources& table) {
  const size_t shared = kFold == Fold::kStaged ? kStagedThreads / kWarp * sizeof(WarpStages<ManySlots>) : 0;
  if (cudaError_t e = shared > 0 ? allow_shared(check<kFold, Entries>, shared) : cudaSuccess; e != cudaSuccess) return e;
  // As many blocks as are resident at once, so that a share is as long as it can be.
  unsigned blocks = 0;
  if (cudaError_t e = grid_blocks(ceil_div(lanes, threads_of(kFold)), blocks_per_sm(kFold), &blocks); e != cudaSuccess) return e;
  check<kFold, Entries><<<blocks, threads_of(kFold), shared, stream>>>(args, entries, table);
  return cudaGetLastError();
}

template <typename Entries>
cudaError_t launch_check(cudaStream_t stream, const VerifyArgs& args, const Entries& entries, int64_t most_entries, const HostSources& sources) {
  if (most_entries == 0) return cudaSuccess;
  DeviceSources table;
  if (cudaError_t e = device_sources<ManySlots::kEngine>(stream, sources, &table); e != cudaSuccess) return e;
  const int64_t lanes = most_entries * std::min<int64_t>(std::max(table.count, 1), kWarp);
  if (table.count == 0) return launch_check<Fold::kNone>(stream, args, entries, lanes, table);
  if (table.staged) return launch_check<Fold::kStaged>(stream, args, entries, lanes, table);
  const SourceGeometry& g = table.geometries[0];
  if (std::is_same_v<Entries, Fused> && table.count == 1 && !args.rotate && g.piece == 16 && is_one_run(g) && g.read_bytes == 16) {
    return launch_check<Fold::kBrief>(stream, args, entries, lanes, table);
  }
  return launch_check<Fold::kDirect>(stream, args, entries, lanes, table);
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
