// The Python module of the CPU kernels.
#include "bindings.h"
#include "handlers_cpu.h"

NB_MODULE(_kvcanary_cpu, m) {
  using namespace kvcanary;
  m.doc() = "CPU custom calls of jax_kvcanary.";
  m.def(
      "registrations",
      [] {
        nb::dict d;
        d[kTargetPlan] = handler_capsule(kvcanary_plan_cpu);
        d[kTargetVerify] = handler_capsule(kvcanary_verify_cpu);
        d[kTargetVerifyFused] = handler_capsule(kvcanary_verify_fused_cpu);
        d[kTargetWrite] = handler_capsule(kvcanary_write_cpu);
        d[kTargetScatter] = handler_capsule(kvcanary_scatter_cpu);
        return d;
      },
      nb::sig("def registrations() -> dict[str, object]"), "Handler capsules by custom call target.");
  m.def("constants", &spec_constants, nb::sig("def constants() -> dict[str, int]"), "Numbers of the contract.");
}
