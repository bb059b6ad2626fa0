"""The operations in plain JAX: for platforms without a custom call, and on request elsewhere.

Each function takes the flat operands and the params of the primitive of its name and returns its results as a list. 64-bit values
are pairs of uint32 throughout, so the bits do not depend on x64.
"""

from __future__ import annotations

from jax_kvcanary.pure.plan import plan
from jax_kvcanary.pure.scatter import scatter
from jax_kvcanary.pure.verify import verify, verify_fused
from jax_kvcanary.pure.write import write

__all__ = ["plan", "scatter", "verify", "verify_fused", "write"]
