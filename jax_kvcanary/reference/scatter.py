"""scatter_req_token_ids: keep the tokens that each request should hold, row by row, for the token check of verify."""

from __future__ import annotations

from typing import Any

import numpy as np

from jax_kvcanary.reference.integers import integers, item, signed
from jax_kvcanary.spec import FailReason
from jax_kvcanary.state import ScatterResult


def scatter_req_token_ids(*, flat_in: Any, offsets: Any, req_pool_indices: Any, pool_out: Any) -> ScatterResult:
    """Copy each request's segment of ``flat_in`` into its row of ``pool_out [rows, width] int32``, cut at the width.

    Values wrap to int32 and rows that are not named stay. Row -1 is padding. A row or segment out of range copies nothing and gets
    status 128.
    """
    pool = np.array(pool_out, np.int32)
    rows, width = pool.shape
    values, starts, row_of = integers(flat_in), integers(offsets), integers(req_pool_indices)
    status = [0] * len(row_of)
    for r, row in enumerate(row_of):
        if row == -1:
            continue
        begin, end = item(starts, r, -1), item(starts, r + 1, -1)
        if not (0 <= row < rows and 0 <= begin <= end <= len(values)):
            status[r] = int(FailReason.TABLE_OUT_OF_RANGE)
            continue
        segment = values[begin:end][:width]
        pool[row, : len(segment)] = [signed(value, 32) for value in segment]
    return ScatterResult(pool=pool, status=np.array(status, np.int32))
