// Appending rows to the log from many threads at once.
#ifndef KVCANARY_LOG_CUDA_CUH_
#define KVCANARY_LOG_CUDA_CUH_

#include <cstdint>

#include "launch_cuda.cuh"
#include "violation.h"

namespace kvcanary::cuda {

// A negative index counts as 0. Once it is not negative it never becomes so, hence any thread may do this at any time.
__device__ inline void normalize_index(const ViolationLog& log) { atomicMax(log.write_index, 0); }

// First of `count` consecutive row numbers. The index saturates: near the top threads take turns, below it a plain add cannot
// overshoot, since fewer threads than the margin are in flight on any device.
__device__ inline int64_t reserve_rows(const ViolationLog& log, int count) {
  constexpr int32_t kTop = 0x7FFFFFFF;
  constexpr int32_t kMargin = 1 << 26;
  int32_t seen = *static_cast<volatile int32_t*>(log.write_index);
  if (seen < 0) {
    normalize_index(log);
    seen = 0;
  }
  if (seen < kTop - kMargin) return atomicAdd(log.write_index, count);
  while (true) {
    const int32_t next = seen > kTop - count ? kTop : seen + count;
    const int32_t before = atomicCAS(log.write_index, seen, next);
    if (before == seen) return seen;
    seen = before;
  }
}

// Threads that append together share one atomic.
__device__ inline void append_row(const ViolationLog& log, const ViolationRow& row) {
  const unsigned active = __activemask();
  const int lane = threadIdx.x % kWarp;
  const int leader = __ffs(static_cast<int>(active)) - 1;
  long long start = 0;
  if (lane == leader) start = reserve_rows(log, __popc(active));
  start = __shfl_sync(active, start, leader);
  const int64_t index = start + __popc(active & ((1u << lane) - 1));
  if (index < log.rows) store_row(log, index, row);
}

__device__ inline void add_count(uint64_t* counter, uint64_t n) {
  atomicAdd(reinterpret_cast<unsigned long long*>(counter), static_cast<unsigned long long>(n));
}

}  // namespace kvcanary::cuda

#endif  // KVCANARY_LOG_CUDA_CUH_
