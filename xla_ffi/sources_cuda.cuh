// The source table on the device.
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

// Whether a source's bytes go through shared memory: aligned, long enough, and no longer than sizes are counted there; where the copy
// engine fetches them they may be in several runs.
inline constexpr int64_t kStagedFrom = 128;
inline constexpr int64_t kStagedTo = int64_t{1} << 30;
inline constexpr int64_t kStagedRun = 64;

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
inline constexpr bool kHasCopyEngine = false;
#else
inline constexpr bool kHasCopyEngine = true;
#endif

template <bool kEngine>
__host__ __device__ inline bool is_staged(const SourceGeometry& g) {
  const bool runs = is_one_run(g) || (kEngine && kHasCopyEngine && g.run_bytes >= kStagedRun);
  return g.piece == 16 && runs && g.read_bytes >= kStagedFrom && g.read_bytes <= kStagedTo;
}

// Small tables travel in the kernel's parameters; larger ones lie in scratch memory.
inline constexpr int kInlineSources = 96;
inline constexpr int kInlineGeometries = 8;

struct DeviceSources {
  Source sources[kInlineSources];
  SourceGeometry geometries[kInlineGeometries];
  const Source* far_sources;
  const SourceGeometry* far_geometries;
  int32_t count;
  bool far;
  bool staged;  // some source is long enough for staging

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
template <bool kEngine>
cudaError_t device_sources(cudaStream_t stream, const HostSources& host, DeviceSources* out) {
  std::memset(out, 0, sizeof(*out));
  const size_t n = static_cast<size_t>(host.set.count);
  out->count = host.set.count;
  for (size_t i = 0; i < host.geometries; ++i) out->staged = out->staged || is_staged<kEngine>(host.set.geometries[i]);
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

}  // namespace kvcanary::cuda

#endif  // KVCANARY_SOURCES_CUDA_CUH_
