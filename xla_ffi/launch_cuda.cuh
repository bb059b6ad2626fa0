// Grid sizes and block-wide scans of the CUDA kernels.
#ifndef KVCANARY_LAUNCH_CUDA_CUH_
#define KVCANARY_LAUNCH_CUDA_CUH_

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include <cuda_runtime.h>

namespace kvcanary::cuda {

inline constexpr int kWarp = 32;
inline constexpr unsigned kFullMask = 0xFFFFFFFFu;

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Blocks for `work` blocks' worth of work: all of it, but no more than a few waves of a grid-stride loop.
inline cudaError_t grid_blocks(int64_t work, int blocks_per_sm, unsigned* blocks) {
  int device = 0, sms = 0;
  if (cudaError_t e = cudaGetDevice(&device); e != cudaSuccess) return e;
  if (cudaError_t e = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device); e != cudaSuccess) return e;
  *blocks = static_cast<unsigned>(std::clamp<int64_t>(work, 1, static_cast<int64_t>(sms) * blocks_per_sm));
  return cudaSuccess;
}

// Lets a kernel use more shared memory than the default; cheap, and no operation on a stream.
template <typename Kernel>
cudaError_t allow_shared(Kernel kernel, size_t bytes) {
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
}

// Inclusive scan over a block of `kThreads`; `shared` holds kThreads / 32 values. Every thread must call it.
template <int kThreads, typename T, typename Add>
__device__ T block_inclusive_scan(T value, T* shared, const Add& add) {
  const int lane = threadIdx.x % kWarp;
  const int warp = threadIdx.x / kWarp;
  for (int step = 1; step < kWarp; step *= 2) {
    const T below = __shfl_up_sync(kFullMask, value, step);
    if (lane >= step) value = add(below, value);
  }
  if (lane == kWarp - 1) shared[warp] = value;
  __syncthreads();
  if (warp == 0) {
    T sum = lane < kThreads / kWarp ? shared[lane] : T{};
    for (int step = 1; step < kThreads / kWarp; step *= 2) {
      const T below = __shfl_up_sync(kFullMask, sum, step);
      if (lane >= step) sum = add(below, sum);
    }
    if (lane < kThreads / kWarp) shared[lane] = sum;
  }
  __syncthreads();
  if (warp > 0) value = add(shared[warp - 1], value);
  __syncthreads();
  return value;
}

// Batch row that holds entry i, given prefix sums [rows + 1] whose last exceeds i.
__device__ inline int64_t find_row(const int64_t* offsets, int64_t rows, int64_t i) {
  int64_t low = 0, high = rows;  // offsets[low] <= i < offsets[high]
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    if (offsets[middle] <= i) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// The same by a whole warp for one entry: two dependent reads where a thread alone needs ten.
__device__ inline int64_t find_row_by_warp(const int64_t* offsets, int64_t rows, int64_t i) {
  const int64_t lane = threadIdx.x % kWarp;
  int64_t low = 0, high = rows;
  while (high - low > 1) {
    const int64_t step = (high - low + kWarp - 1) / kWarp;
    const int64_t at = low + lane * step;
    const unsigned below = __ballot_sync(kFullMask, at < high && offsets[at] <= i);
    const int last = 31 - __clz(static_cast<int>(below));  // lane 0 is always below
    low += last * step;
    high = low + step < high ? low + step : high;
  }
  return low;
}

}  // namespace kvcanary::cuda

#endif  // KVCANARY_LAUNCH_CUDA_CUH_
