// The source table on the device, and how a warp hashes the sources of its slots.
#ifndef KVCANARY_SOURCES_CUDA_CUH_
#define KVCANARY_SOURCES_CUDA_CUH_

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "kernels_cuda.h"
#include "launch_cuda.cuh"
#include "source.h"

namespace kvcanary::cuda {

// Small tables travel in the kernel's parameters; larger ones lie in scratch memory.
inline constexpr int kInlineSources = 96;
inline constexpr int kInlineGeometries = 8;

struct DeviceSources {
  Source sources[kInlineSources];
  SourceGeometry geometries[kInlineGeometries];
  const Source* far_sources;
  const SourceGeometry* far_geometries;
  int32_t count;
  int32_t lanes_log2;  // lanes of a warp that share a slot: one a source, up to 32
  bool far;

  __device__ const Source& source(int32_t i) const { return far ? far_sources[i] : sources[i]; }
  __device__ const SourceGeometry& geometry(const Source& s) const { return far ? far_geometries[s.geometry] : geometries[s.geometry]; }
};

struct TableChunk {
  unsigned char bytes[3584];
};

__global__ static void store_table_chunk(const __grid_constant__ TableChunk chunk, unsigned char* out, int size) {
  for (int i = threadIdx.x; i < size; i += blockDim.x) out[i] = chunk.bytes[i];
}

// Fills `out`; a table that does not fit is first written to scratch by kernels, which a command buffer can hold.
inline cudaError_t device_sources(cudaStream_t stream, const HostSources& host, DeviceSources* out) {
  std::memset(out, 0, sizeof(*out));
  const size_t n = static_cast<size_t>(host.set.count);
  out->count = host.set.count;
  while ((size_t{1} << out->lanes_log2) < std::min<size_t>(n, kWarp)) ++out->lanes_log2;
  if (n == 0) return cudaSuccess;
  if (n <= kInlineSources && host.geometries <= kInlineGeometries) {
    std::copy_n(host.set.sources, n, out->sources);
    std::copy_n(host.set.geometries, host.geometries, out->geometries);
    return cudaSuccess;
  }
  const size_t source_bytes = n * sizeof(Source);
  const size_t geometry_bytes = host.geometries * sizeof(SourceGeometry);
  const unsigned char* source_data = reinterpret_cast<const unsigned char*>(host.set.sources);
  const unsigned char* geometry_data = reinterpret_cast<const unsigned char*>(host.set.geometries);
  std::vector<unsigned char> bytes(source_data, source_data + source_bytes);
  bytes.insert(bytes.end(), geometry_data, geometry_data + geometry_bytes);
  unsigned char* scratch = static_cast<unsigned char*>(host.scratch);
  for (size_t at = 0; at < bytes.size(); at += sizeof(TableChunk)) {
    TableChunk chunk;
    const size_t size = std::min(sizeof(TableChunk), bytes.size() - at);
    std::memcpy(chunk.bytes, bytes.data() + at, size);
    store_table_chunk<<<1, 256, 0, stream>>>(chunk, scratch + at, static_cast<int>(size));
    if (cudaError_t e = cudaGetLastError(); e != cudaSuccess) return e;
  }
  out->far = true;
  out->far_sources = reinterpret_cast<const Source*>(scratch);
  out->far_geometries = reinterpret_cast<const SourceGeometry*>(scratch + source_bytes);
  return cudaSuccess;
}

// Hashes every source of the warp's slots: lanes that share a slot take one source each, round by round, and `add(index, hash,
// geometry)` is then called by all of them for each source in order. `use(index)` tells which sources are read at all; slot < 0
// reads nothing. The whole warp must call this.
template <typename Use, typename Add>
__device__ void fold_slot_sources(const DeviceSources& table, int32_t slot, const Use& use, const Add& add) {
  const int lane = threadIdx.x % kWarp;
  const int width = 1 << table.lanes_log2;
  const int first_lane = lane & ~(width - 1);
  for (int32_t base = 0; base < table.count; base += width) {
    const int32_t mine = base + (lane - first_lane);
    uint64_t hash = 0;
    if (slot >= 0 && mine < table.count && use(mine)) {
      const Source& source = table.source(mine);
      hash = fold_source(source, table.geometry(source), static_cast<uint32_t>(slot));
    }
    const int32_t round = table.count - base < width ? table.count - base : width;
    for (int32_t j = 0; j < round; ++j) {
      const uint64_t other = __shfl_sync(kFullMask, hash, first_lane + j);
      if (slot >= 0 && use(base + j)) add(base + j, other, table.geometry(table.source(base + j)));
    }
  }
}

}  // namespace kvcanary::cuda

#endif  // KVCANARY_SOURCES_CUDA_CUH_
