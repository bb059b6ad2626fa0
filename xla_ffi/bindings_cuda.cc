// The Python module of the CUDA kernels.
#include "bindings.h"
#include "handlers_cuda.h"

NB_MODULE(_kvcanary_cuda, m) {
  using namespace kvcanary;
  m.doc() = "CUDA custom calls of jax_kvcanary.";
  m.def(
      "registrations",
      [] {
        nb::dict d;
        d[kTargetPlan] = handler_capsule(kvcanary_plan_cuda);
        d[kTargetVerify] = handler_capsule(kvcanary_verify_cuda);
        d[kTargetVerifyFused] = handler_capsule(kvcanary_verify_fused_cuda);
        d[kTargetWrite] = handler_capsule(kvcanary_write_cuda);
        d[kTargetScatter] = handler_capsule(kvcanary_scatter_cuda);
        return d;
      },
      nb::sig("def registrations() -> dict[str, object]"), "Handler capsules by custom call target.");
  m.def("constants", &spec_constants, nb::sig("def constants() -> dict[str, int]"), "Numbers of the contract.");
}
