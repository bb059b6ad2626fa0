// scatter_req_token_ids on CUDA: a block a request.
#include <cstdint>

#include "kernels_cuda.h"
#include "launch_cuda.cuh"

namespace kvcanary::cuda {
namespace {

constexpr int kThreads = 128;

__global__ void __launch_bounds__(kThreads) scatter_rows(const __grid_constant__ ScatterArgs a) {
  for (int64_t r = blockIdx.x; r < a.req_pool_indices.size; r += gridDim.x) {
    const ScatterSegment segment = scatter_segment(a, r);
    if (threadIdx.x == 0) a.status[r] = segment.status;
    for (int64_t i = threadIdx.x; i < segment.length; i += kThreads) scatter_token(a, segment, i);
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
