"""The largest of a block of values and whose it is."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["arg_max"]

LAST_ID = tl.constexpr(2**31 - 1)


@triton.jit
def arg_max(values, token_ids):
    """(largest of values [N], lowest of token_ids [N] that has it)."""
    best = tl.max(values, axis=0)
    # "Not less" rather than "equal": a model gone wrong, all its logits NaN, must still give a valid id.
    return best, tl.min(tl.where(values < best, LAST_ID, token_ids), axis=0)
