// How a warp hashes the sources of its slots: straight from memory, or staged through shared memory where a source is long.
#ifndef KVCANARY_FOLD_CUDA_CUH_
#define KVCANARY_FOLD_CUDA_CUH_

#include <cstdint>

#include "launch_cuda.cuh"
#include "source.h"
#include "sources_cuda.cuh"

namespace kvcanary::cuda {

// A warp brings some bytes of each lane's slot at a time while every lane folds those that came before. Rows of a stage are padded by 16
// bytes, so that the lanes' 16-byte reads fall into different banks.

// Where slots fill the device: as many warps as shared memory holds, so that their folds hide each other, and copies by lanes side by
// side, which together outrun the copy engine.
struct ManySlots {
  static constexpr int kBytes = 256;
  static constexpr int kDepth = 2;
  static constexpr bool kEngine = false;
};

// Where few warps run: long pieces, and copies by the engine (from compute capability 9.0 on), which cost the warp next to nothing.
struct FewSlots {
  static constexpr int kBytes = 512;
  static constexpr int kDepth = 2;
  static constexpr bool kEngine = true;
};

template <typename Shape>
struct alignas(16) WarpStages {
  unsigned char rows[Shape::kDepth][kWarp][Shape::kBytes + 16];
  const unsigned char* starts[2][kWarp];  // of this item and of the next
  int32_t sizes[2][kWarp];
  uint64_t barriers[Shape::kDepth];
};

// What a lane folds: a source of its slot; nothing with a null geometry.
struct StagedItem {
  const unsigned char* start = nullptr;
  const SourceGeometry* g = nullptr;

  __device__ int32_t size() const { return g == nullptr ? 0 : static_cast<int32_t>(g->read_bytes); }
};

// A warp's stages, filled by the copy engine, a copy a lane, or by the lanes. While an item is folded the next one's first bytes are
// already asked for.
template <typename Shape>
class Stager {
  static constexpr int kStageBytes = Shape::kBytes;
  static constexpr int kStageDepth = Shape::kDepth;
  static constexpr bool kEngine = Shape::kEngine && kHasCopyEngine;

 public:
  using Stages = WarpStages<Shape>;

  // The whole warp calls it with its own stages, null where it has none, before the first use.
  __device__ explicit Stager(Stages* stages) : stages_(stages) {
    if (kEngine && stages_ != nullptr && threadIdx.x % kWarp == 0) {
      for (int stage = 0; stage < kStageDepth; ++stage) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier(stage)) : "memory");
      }
      if constexpr (kEngine) asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncwarp();
  }

  // Folds an item of each lane. The whole warp calls it. `next` is the item of the next call, or nothing in every lane.
  __device__ uint64_t fold(const StagedItem& item, const StagedItem& next) {
    const int32_t size = item.size();
    const int chunks = chunks_of(size);
    const int next_chunks = chunks_of(next.size());
    if (!primed_) describe(side_, item);
    describe(side_ ^ 1, next);
    __syncwarp();
    for (int c = primed_ ? min(chunks, kStageDepth) : 0; c < kStageDepth; ++c) advance(c, chunks, next_chunks, item, next);
    uint64_t acc = 0;
    for (int c = 0; c < chunks; ++c) {
      const int stage = (head_ + c) % kStageDepth;
      wait(stage);
      const Bytes16* row = reinterpret_cast<const Bytes16*>(stages_->rows[stage][threadIdx.x % kWarp]);
      const int32_t left = size - c * kStageBytes;
      if (left >= kStageBytes) {
#pragma unroll 8
        for (int i = 0; i < kStageBytes / 16; ++i) acc = fold_piece(acc, row[i]);
      } else {
        for (int i = 0; i < left / 16; ++i) acc = fold_piece(acc, row[i]);
      }
      __syncwarp();
      advance(c + kStageDepth, chunks, next_chunks, item, next);
    }
    head_ = (head_ + chunks) % kStageDepth;
    side_ ^= 1;
    primed_ = next_chunks > 0;
    if (!primed_) drain();
    return acc;
  }

 private:
  static __device__ uint64_t fold_piece(uint64_t acc, const Bytes16& piece) {
    return splitmix64(splitmix64(acc ^ piece.low) ^ piece.high);
  }
  static __device__ int chunks_of(int32_t size) { return (__reduce_max_sync(kFullMask, size) + kStageBytes - 1) / kStageBytes; }

  // Asks for what comes `c` chunks after this item's first: one of its own, or of the next item.
  __device__ void advance(int c, int chunks, int next_chunks, const StagedItem& item, const StagedItem& next) {
    const int stage = (head_ + c) % kStageDepth;
    if (c < chunks) {
      fetch(c, stage, item, side_);
    } else if (c - chunks < next_chunks) {
      fetch(c - chunks, stage, next, side_ ^ 1);
    } else {
      skip();
    }
  }

  // What the lanes need to know of each other's items.
  __device__ void describe(int side, const StagedItem& item) {
    if constexpr (!kEngine) {
      stages_->starts[side][threadIdx.x % kWarp] = item.start;
      stages_->sizes[side][threadIdx.x % kWarp] = item.size();
      const int32_t least = __reduce_min_sync(kFullMask, item.size());
      (side == 0 ? least_[0] : least_[1]) = least;
    }
  }
  __device__ void fetch(int chunk, int stage, const StagedItem& item, int side) {
    if constexpr (kEngine) {
      fetch_by_engine(chunk, stage, item);
    } else {
      if ((chunk + 1) * kStageBytes <= (side == 0 ? least_[0] : least_[1])) {
        fetch_by_lanes<true>(chunk, stage, side);
      } else {
        fetch_by_lanes<false>(chunk, stage, side);
      }
      skip();
    }
  }
  __device__ void skip() {
    if constexpr (!kEngine) asm volatile("cp.async.commit_group;" ::: "memory");
  }
  __device__ void wait(int stage) {
    if constexpr (kEngine) {
      uint32_t done = 0;
      while (done == 0) {
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                     : "=r"(done)
                     : "r"(barrier(stage)), "r"(parity_ >> stage & 1)
                     : "memory");
      }
      parity_ ^= 1u << stage;
    } else {
      asm volatile("cp.async.wait_group %0;" ::"n"(kStageDepth - 1) : "memory");
      __syncwarp();
    }
  }
  __device__ void drain() {
    if constexpr (!kEngine) {
      asm volatile("cp.async.wait_group 0;" ::: "memory");
      __syncwarp();
    }
  }

  // `full`: no lane's bytes end before those of the chunk.
  template <bool full>
  __device__ void fetch_by_lanes(int chunk, int stage, int side) {
    constexpr int kColumns = kStageBytes / 16 < kWarp ? kStageBytes / 16 : kWarp;  // lanes side by side in one row
    constexpr int kRows = kWarp / kColumns;                                        // rows at once
    static_assert(kStageBytes / 16 % kColumns == 0, "every lane copies the same columns of each of its rows");
    const int first = threadIdx.x % kWarp / kColumns;
    for (int column = threadIdx.x % kColumns * 16; column < kStageBytes; column += kColumns * 16) {
      const int offset = chunk * kStageBytes + column;
#pragma unroll
      for (int i = 0; i < kWarp / kRows; ++i) {
        const int row = i * kRows + first;
        if (!full && offset >= stages_->sizes[side][row]) continue;
        const unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(&stages_->rows[stage][row][column]));
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(stages_->starts[side][row] + offset) : "memory");
      }
    }
  }

  __device__ uint32_t barrier(int stage) const { return static_cast<uint32_t>(__cvta_generic_to_shared(&stages_->barriers[stage])); }
  __device__ void fetch_by_engine(int chunk, int stage, const StagedItem& item) {
    const int lane = threadIdx.x % kWarp;
    int32_t offset = chunk * kStageBytes;
    int32_t bytes = min(max(item.size() - offset, 0), kStageBytes);
    const unsigned total = __reduce_add_sync(kFullMask, static_cast<unsigned>(bytes));
    if (lane == 0) {
      asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier(stage)), "r"(total) : "memory");
    }
    __syncwarp();
    if (bytes == 0) return;
    uint32_t to = static_cast<uint32_t>(__cvta_generic_to_shared(stages_->rows[stage][lane]));
    const SourceGeometry& g = *item.g;
    if (is_one_run(g)) return copy(to, item.start + offset, bytes, stage);
    while (bytes > 0) {
      const int32_t run_bytes = static_cast<int32_t>(g.run_bytes);
      int32_t run = offset / run_bytes;
      const int32_t within = offset - run * run_bytes;
      const int32_t part = min(bytes, run_bytes - within);
      const unsigned char* from = item.start + within;
      for (int level = kRunLevels - 1; level >= 0; --level) {
        const int32_t outer = run / g.run_counts[level];
        from += (run - outer * g.run_counts[level]) * g.run_strides[level];
        run = outer;
      }
      copy(to, from, part, stage);
      to += part, offset += part, bytes -= part;
    }
  }
  __device__ void copy(uint32_t to, const unsigned char* from, int32_t bytes, int stage) const {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from), "r"(bytes),
                 "r"(barrier(stage))
                 : "memory");
  }

  Stages* stages_;
  uint32_t parity_ = 0;    // of each stage's barrier, a bit each
  int32_t least_[2] = {};  // the fewest bytes of a lane, of both items
  int head_ = 0;           // stage of the item's first chunk
  int side_ = 0;           // which of the two descriptions is this item's
  bool primed_ = false;    // its first chunks are on their way
};

// Lanes of a warp that share a slot, as a power of two: one where there are slots enough to fill the device, more (up to one a
// source) where there are few.
__device__ inline int lanes_log2_for(int32_t sources, int64_t slots, int64_t threads) {
  int log2 = 0;
  while ((1 << log2) < kWarp && (1 << log2) < sources && (slots << log2) < threads) ++log2;
  return log2;
}

// The next source from `first` on that is read through shared memory, or the number of sources.
template <typename Shape, typename Use>
__device__ inline int32_t next_staged(const DeviceSources& table, int32_t first, const Use& use) {
  while (first < table.count && !(use(first) && is_staged<Shape::kEngine>(table.geometry(table.source(first))))) ++first;
  return first;
}

__device__ inline StagedItem staged_item(const DeviceSources& table, int32_t index, int32_t slot) {
  if (slot < 0 || index >= table.count) return {};
  const Source& source = table.source(index);
  const SourceGeometry& g = table.geometry(source);
  return {slot_base(source, g, static_cast<uint32_t>(slot)), &g};
}

// Hashes every source of the warp's slots: lanes that share a slot take one source each, round by round, and `add(index, hash,
// geometry)` is then called by all of them for each source in order. `use(index)` tells which sources are read; slot < 0 reads
// nothing. The whole warp calls it. `next_slot`: that of the next call, with one lane a slot, or -1 in every lane. Without kStaged nothing
// goes through the stager.
template <bool kStaged, typename Shape, typename Use, typename Add>
__device__ inline void fold_slot_sources(const DeviceSources& table, int lanes_log2, int32_t slot, int32_t next_slot, Stager<Shape>& stager,
                                         const Use& use, const Add& add) {
  if (lanes_log2 == 0) {
    for (int32_t k = 0; k < table.count; ++k) {
      if (!use(k)) continue;
      const SourceGeometry& g = table.geometry(table.source(k));
      uint64_t hash = 0;
      if (kStaged && is_staged<Shape::kEngine>(g)) {
        // The next item: another source of these slots, or the first one of the next.
        const int32_t after = next_staged<Shape>(table, k + 1, use);
        const StagedItem next = after < table.count ? staged_item(table, after, slot)
                                                    : staged_item(table, next_staged<Shape>(table, 0, use), next_slot);
        hash = stager.fold(staged_item(table, k, slot), next);
      } else if (slot >= 0) {
        hash = fold_source(table.source(k), g, static_cast<uint32_t>(slot));
      }
      if (slot >= 0) add(k, hash, g);
    }
    return;
  }
  const int lane = threadIdx.x % kWarp;
  const int width = 1 << lanes_log2;
  const int first_lane = lane & ~(width - 1);
  for (int32_t base = 0; base < table.count; base += width) {
    const int32_t mine = base + (lane - first_lane);
    const bool reads = slot >= 0 && mine < table.count && use(mine);
    uint64_t hash = 0;
    bool through = false;
    if constexpr (kStaged) {
      through = reads && is_staged<Shape::kEngine>(table.geometry(table.source(mine)));
      if (__any_sync(kFullMask, through)) hash = stager.fold(through ? staged_item(table, mine, slot) : StagedItem{}, {});
    }
    if (reads && !through) hash = fold_source(table.source(mine), table.geometry(table.source(mine)), static_cast<uint32_t>(slot));
    __syncwarp();
    const int32_t round = table.count - base < width ? table.count - base : width;
    for (int32_t j = 0; j < round; ++j) {
      const uint64_t other = __shfl_sync(kFullMask, hash, first_lane + j);
      if (slot >= 0 && use(base + j)) add(base + j, other, table.geometry(table.source(base + j)));
    }
  }
}

}  // namespace kvcanary::cuda

#endif  // KVCANARY_FOLD_CUDA_CUH_
