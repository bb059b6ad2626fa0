"""The whole contract in plain NumPy and Python integers: what every other implementation is compared with.

One operation a file, each a loop over entries in entry order. Nothing here is fast except folding the bytes of many slots.
"""

from __future__ import annotations

from jax_kvcanary.reference.hashing import fold_bytes, fold_rows, mix3, splitmix64, splitmix64_array
from jax_kvcanary.reference.plan import plan
from jax_kvcanary.reference.scatter import scatter_req_token_ids
from jax_kvcanary.reference.source import SlotHash, SourceReader
from jax_kvcanary.reference.verify import verify, verify_fused
from jax_kvcanary.reference.write import write

__all__ = [
    "SlotHash",
    "SourceReader",
    "fold_bytes",
    "fold_rows",
    "mix3",
    "plan",
    "scatter_req_token_ids",
    "splitmix64",
    "splitmix64_array",
    "verify",
    "verify_fused",
    "write",
]
