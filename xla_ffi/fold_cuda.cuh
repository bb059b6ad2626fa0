// How a warp hashes the sources of its slots: straight from memory, or staged through shared memory where a source is long.
#ifndef KVCANARY_FOLD_CUDA_CUH_
#define KVCANARY_FOLD_CUDA_CUH_

#include <cstdint>

#include "launch_cuda.cuh"
#include "source.h"
#include "sources_cuda.cuh"

namespace kvcanary::cuda {

// A warp brings 256 bytes of each lane's slot at a time, 16 lanes side by side for each, while every lane folds the 256 bytes that
// came before. Rows are padded by 16 bytes, so that the lanes' 16-byte reads fall into different banks.
inline constexpr int kStageBytes = 256;
inline constexpr int kStageRow = kStageBytes + 16;

template <int kDepth>
struct alignas(16) WarpStages {
  static constexpr int kStages = kDepth;

  unsigned char rows[kDepth][kWarp][kStageRow];
  const unsigned char* starts[kWarp];
  int32_t sizes[kWarp];
};

// Many warps hide each other's latency and need little memory each; few warps keep all they can in flight.
using ShallowStages = WarpStages<2>;
using DeepStages = WarpStages<8>;

__device__ inline void copy_async16(void* to, const void* from) {
  const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(from) : "memory");
}
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending>
__device__ inline void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Asks for chunk `chunk` of every lane's bytes.
template <typename Stages>
__device__ inline void fetch_chunk(Stages& stages, int chunk) {
  const int column = (threadIdx.x % 16) * 16;
  const int first = threadIdx.x % kWarp / 16;
  const int offset = chunk * kStageBytes + column;
#pragma unroll
  for (int i = 0; i < kWarp / 2; ++i) {
    const int row = 2 * i + first;
    if (offset < stages.sizes[row]) copy_async16(&stages.rows[chunk % Stages::kStages][row][column], stages.starts[row] + offset);
  }
  commit_copies();
}

// Folds `size` bytes (a multiple of 16) at `start` of each lane; the whole warp calls it, size 0 where a lane has nothing.
template <typename Stages>
__device__ inline uint64_t staged_fold(Stages& stages, const unsigned char* start, int32_t size) {
  constexpr int kStages = Stages::kStages;
  const int lane = threadIdx.x % kWarp;
  stages.starts[lane] = start;
  stages.sizes[lane] = size;
  __syncwarp();
  const int chunks = (__reduce_max_sync(kFullMask, size) + kStageBytes - 1) / kStageBytes;
#pragma unroll
  for (int c = 0; c < kStages; ++c) fetch_chunk(stages, c);
  uint64_t acc = 0;
  for (int c = 0; c < chunks; ++c) {
    wait_copies<kStages - 1>();
    __syncwarp();
    const Bytes16* row = reinterpret_cast<const Bytes16*>(stages.rows[c % kStages][lane]);
    const int pieces = min(size - c * kStageBytes, kStageBytes) / 16;
#pragma unroll 4
    for (int i = 0; i < pieces; ++i) {
      const Bytes16 piece = row[i];
      acc = splitmix64(acc ^ piece.low);
      acc = splitmix64(acc ^ piece.high);
    }
    __syncwarp();
    fetch_chunk(stages, c + kStages);
  }
  wait_copies<0>();
  __syncwarp();
  return acc;
}

// Lanes of a warp that share a slot, as a power of two: one where there are slots enough to fill the device, more (up to one a
// source) where there are few.
__device__ inline int lanes_log2_for(int32_t sources, int64_t slots, int64_t threads) {
  int log2 = 0;
  while ((1 << log2) < kWarp && (1 << log2) < sources && (slots << log2) < threads) ++log2;
  return log2;
}

// Hashes every source of the warp's slots: lanes that share a slot take one source each, round by round, and `add(index, hash,
// geometry)` is then called by all of them for each source in order. `use(index)` tells which sources are read; slot < 0 reads
// nothing. The whole warp calls it. `stages` is null where nothing is staged.
template <typename Stages, typename Use, typename Add>
__device__ inline void fold_slot_sources(const DeviceSources& table, int lanes_log2, int32_t slot, Stages* stages, const Use& use,
                                         const Add& add) {
  const int lane = threadIdx.x % kWarp;
  const int width = 1 << lanes_log2;
  const int first_lane = lane & ~(width - 1);
  for (int32_t base = 0; base < table.count; base += width) {
    const int32_t mine = base + (lane - first_lane);
    const bool reads = slot >= 0 && mine < table.count && use(mine);
    uint64_t hash = 0;
    if (stages != nullptr) {
      const unsigned char* start = nullptr;
      int32_t size = 0;
      if (reads) {
        const Source& source = table.source(mine);
        const SourceGeometry& g = table.geometry(source);
        if (is_staged(g)) {
          start = slot_base(source, g, static_cast<uint32_t>(slot));
          size = static_cast<int32_t>(g.read_bytes);
        } else {
          hash = fold_source(source, g, static_cast<uint32_t>(slot));
        }
      }
      __syncwarp();
      if (__any_sync(kFullMask, size > 0)) {
        const uint64_t staged = staged_fold(*stages, start, size);
        if (size > 0) hash = staged;
      }
    } else if (reads) {
      const Source& source = table.source(mine);
      hash = fold_source(source, table.geometry(source), static_cast<uint32_t>(slot));
    }
    if (width == 1) {
      if (reads) add(mine, hash, table.geometry(table.source(mine)));
      continue;
    }
    const int32_t round = table.count - base < width ? table.count - base : width;
    for (int32_t j = 0; j < round; ++j) {
      const uint64_t other = __shfl_sync(kFullMask, hash, first_lane + j);
      if (slot >= 0 && use(base + j)) add(base + j, other, table.geometry(table.source(base + j)));
    }
  }
}

// Launches the kernel that `kernel_for` names for a type of stages: deep ones in blocks of one warp while these fit on the
// device at once, else shallow ones in blocks of `threads`.
template <typename KernelFor, typename... Args>
cudaError_t launch_staged(cudaStream_t stream, int64_t lanes, int threads, const KernelFor& kernel_for, const Args&... args) {
  unsigned few = 0;
  if (cudaError_t e = grid_blocks(ceil_div(lanes, kWarp), 3, &few); e != cudaSuccess) return e;
  if (ceil_div(lanes, kWarp) <= few) {
    const auto kernel = kernel_for(static_cast<DeepStages*>(nullptr));
    if (cudaError_t e = allow_shared(kernel, sizeof(DeepStages)); e != cudaSuccess) return e;
    kernel<<<few, kWarp, sizeof(DeepStages), stream>>>(args...);
    return cudaGetLastError();
  }
  const auto kernel = kernel_for(static_cast<ShallowStages*>(nullptr));
  const size_t bytes = static_cast<size_t>(threads / kWarp) * sizeof(ShallowStages);
  unsigned blocks = 0;
  if (cudaError_t e = allow_shared(kernel, bytes); e != cudaSuccess) return e;
  if (cudaError_t e = grid_blocks(ceil_div(lanes, threads), 3, &blocks); e != cudaSuccess) return e;
  kernel<<<blocks, threads, bytes, stream>>>(args...);
  return cudaGetLastError();
}

}  // namespace kvcanary::cuda

#endif  // KVCANARY_FOLD_CUDA_CUH_
