// Symbols of the CUDA handlers.
#ifndef KVCANARY_HANDLERS_CUDA_H_
#define KVCANARY_HANDLERS_CUDA_H_

#include "xla/ffi/api/c_api.h"
#include "xla/ffi/api/ffi.h"

namespace kvcanary {

XLA_FFI_DECLARE_HANDLER_SYMBOL(kvcanary_plan_cuda);
XLA_FFI_DECLARE_HANDLER_SYMBOL(kvcanary_verify_cuda);
XLA_FFI_DECLARE_HANDLER_SYMBOL(kvcanary_verify_fused_cuda);
XLA_FFI_DECLARE_HANDLER_SYMBOL(kvcanary_write_cuda);
XLA_FFI_DECLARE_HANDLER_SYMBOL(kvcanary_scatter_cuda);

}  // namespace kvcanary

#endif  // KVCANARY_HANDLERS_CUDA_H_
