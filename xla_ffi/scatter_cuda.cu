// scatter_req_token_ids on CUDA: a block a request. A cell belongs to the last request that names it, as if requests ran in order.
#include <cstdint>

#include "kernels_cuda.h"
#include "launch_cuda.cuh"

namespace kvcanary::cuda {
namespace {

constexpr int kThreads = 128;

// How many cells of the row the requests after r write.
__device__ int64_t cells_of_later(const ScatterArgs& a, int64_t r, int64_t row) {
  int64_t most = 0;
  for (int64_t later = r + 1 + threadIdx.x; later < a.req_pool_indices.size; later += kThreads) {
    if (a.req_pool_indices[later] != row) continue;
    const int64_t length = scatter_segment(a, later).length;
    most = length > most ? length : most;
  }
  return most;
}

__global__ void __launch_bounds__(kThreads) scatter_rows(const __grid_constant__ ScatterArgs a) {
  __shared__ unsigned long long later_cells;
  for (int64_t r = blockIdx.x; r < a.req_pool_indices.size; r += gridDim.x) {
    const ScatterSegment segment = scatter_segment(a, r);
    if (threadIdx.x == 0) {
      a.status[r] = segment.status;
      later_cells = 0;
    }
    if (segment.length == 0) continue;
    __syncthreads();
    if (const int64_t most = cells_of_later(a, r, segment.row); most > 0) atomicMax(&later_cells, static_cast<unsigned long long>(most));
    __syncthreads();
    const int64_t first = static_cast<int64_t>(later_cells);
    for (int64_t i = first + threadIdx.x; i < segment.length; i += kThreads) scatter_token(a, segment, i);
    __syncthreads();
  }
}

}  // namespace

cudaError_t scatter(cudaStream_t stream, const ScatterArgs& args) {
  if (args.req_pool_indices.size == 0) return cudaSuccess;
  unsigned blocks = 0;
  if (cudaError_t e = grid_blocks(args.req_pool_indices.size, 32, &blocks); e != cudaSuccess) return e;
  scatter_rows<<<blocks, kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace kvcanary::cuda
