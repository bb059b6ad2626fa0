// XLA FFI handlers of the CUDA kernels: decode, check, launch, map the error. Fit for command buffers.
#include "handlers_cuda.h"

#include <cuda_runtime_api.h>

#include <exception>
#include <string>

#include "ffi_ops.h"
#include "kernels_cuda.h"

namespace kvcanary {
namespace {

cudaError_t copy_states(cudaStream_t stream, const Frame& frame) {
  for (const StateCopy& copy : frame.copies()) {
    const cudaError_t e = cudaMemcpyAsync(copy.to, copy.from, copy.bytes, cudaMemcpyDeviceToDevice, stream);
    if (e != cudaSuccess) return e;
  }
  return cudaSuccess;
}

template <typename Decode, typename Run>
ffi::Error handle(const char* op, cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets, ffi::Dictionary attrs,
                  const Decode& decode, const Run& run) {
  try {
    Frame frame(op, args, rets, attrs);
    const auto call = decode(frame);
    if (!frame.ok()) return frame.error();
    cudaError_t status = copy_states(stream, frame);
    if (status == cudaSuccess) status = run(call);
    if (status == cudaSuccess) return ffi::Error::Success();
    return ffi::Error::Internal(std::string("kv-canary: ") + op + ": CUDA: " + cudaGetErrorString(status));
  } catch (const std::exception& e) {
    return ffi::Error::Internal(std::string("kv-canary: ") + op + ": " + e.what());
  }
}

cuda::HostSources host_sources(const SourceArrays& arrays, void* scratch) {
  return {arrays.set(), arrays.geometries.size(), scratch};
}

ffi::Error plan(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets, ffi::Dictionary attrs) {
  return handle("plan", stream, args, rets, attrs, decode_plan,
                [&](const PlanCall& call) { return cuda::plan(stream, call.batch, call.out); });
}

ffi::Error verify(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets, ffi::Dictionary attrs) {
  return handle("verify", stream, args, rets, attrs, decode_verify, [&](const VerifyCall& call) {
    const cuda::PlannedEntries entries{call.slot_indices, call.expected_tokens, call.expected_positions, call.prev_slot_indices,
                                       call.batch_rows,   call.num_valid,       call.enable,             call.row_status};
    return cuda::verify(stream, call.args, entries, host_sources(call.sources, call.scratch));
  });
}

ffi::Error verify_fused(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets, ffi::Dictionary attrs) {
  return handle("verify_fused", stream, args, rets, attrs, decode_verify_fused, [&](const VerifyCall& call) {
    int64_t* entry_offsets = static_cast<int64_t*>(call.scratch);
    return cuda::verify_fused(stream, call.args, call.batch, entry_offsets,
                              host_sources(call.sources, entry_offsets + call.batch.size() + 1));
  });
}

ffi::Error write(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets, ffi::Dictionary attrs) {
  return handle("write", stream, args, rets, attrs, decode_write, [&](const WriteCall& call) {
    uint64_t* hashes = static_cast<uint64_t*>(call.scratch);
    uint32_t* tags = reinterpret_cast<uint32_t*>(hashes + call.args.tokens);
    const int64_t tagged = call.args.source_tags != nullptr ? call.args.sources.count : 0;
    unsigned char* table = static_cast<unsigned char*>(call.scratch) + write_scratch_bytes(call.args.tokens, tagged);
    const cuda::WriteScratch scratch{hashes, tags, tags + call.args.tokens * tagged};
    return cuda::write(stream, call.args, scratch, host_sources(call.sources, table));
  });
}

ffi::Error scatter(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets, ffi::Dictionary attrs) {
  return handle("scatter_req_token_ids", stream, args, rets, attrs, decode_scatter,
                [&](const ScatterArgs& call) { return cuda::scatter(stream, call); });
}

}  // namespace

#define KVC_CUDA_HANDLER(symbol, function)                                                                            \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(symbol, function,                                                                     \
                                ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cudaStream_t>>().RemainingArgs().RemainingRets().Attrs(), \
                                {ffi::Traits::kCmdBufferCompatible})

KVC_CUDA_HANDLER(kvcanary_plan_cuda, plan);
KVC_CUDA_HANDLER(kvcanary_verify_cuda, verify);
KVC_CUDA_HANDLER(kvcanary_verify_fused_cuda, verify_fused);
KVC_CUDA_HANDLER(kvcanary_write_cuda, write);
KVC_CUDA_HANDLER(kvcanary_scatter_cuda, scatter);

}  // namespace kvcanary
