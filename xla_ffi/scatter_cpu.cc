// scatter_req_token_ids on the CPU: requests in order, so that the last one wins a row named twice.
#include <cstdint>

#include "kernels_cpu.h"

namespace kvcanary::cpu {

void scatter(const ScatterArgs& args, Executor&) {
  for (int64_t r = 0; r < args.req_pool_indices.size; ++r) {
    const ScatterSegment segment = scatter_segment(args, r);
    args.status[r] = segment.status;
    for (int64_t i = 0; i < segment.length; ++i) scatter_token(args, segment, i);
  }
}

}  // namespace kvcanary::cpu
