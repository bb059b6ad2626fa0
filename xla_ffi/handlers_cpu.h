// Symbols of the CPU handlers.
#ifndef KVCANARY_HANDLERS_CPU_H_
#define KVCANARY_HANDLERS_CPU_H_

#include "xla/ffi/api/c_api.h"
#include "xla/ffi/api/ffi.h"

namespace kvcanary {

XLA_FFI_DECLARE_HANDLER_SYMBOL(kvcanary_plan_cpu);
XLA_FFI_DECLARE_HANDLER_SYMBOL(kvcanary_verify_cpu);
XLA_FFI_DECLARE_HANDLER_SYMBOL(kvcanary_verify_fused_cpu);
XLA_FFI_DECLARE_HANDLER_SYMBOL(kvcanary_write_cpu);
XLA_FFI_DECLARE_HANDLER_SYMBOL(kvcanary_scatter_cpu);

}  // namespace kvcanary

#endif  // KVCANARY_HANDLERS_CPU_H_
