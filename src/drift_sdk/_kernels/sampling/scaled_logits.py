"""Scaled logits: logits over the temperature, with the row's largest at zero. Filters and noise work on them.

Parts of kernels; in the reference they are the first line of `sample.sample`.
"""

from __future__ import annotations

import triton.language as tl

from drift_sdk._kernels.common.device_function import device_function
from drift_sdk._kernels.sampling.gumbel import LEAST_NOISE, MOST_NOISE

__all__ = ["NEGLIGIBLE_LOGIT", "best_of_chunks", "mass_of_chunks", "scale"]

NEGLIGIBLE_LOGIT = tl.constexpr(LEAST_NOISE - MOST_NOISE - 0.1)
"""About -25.8. A token with a scaled logit below it is never chosen: even with the most noise it stays below
the best token with the least, with 0.1 for rounding. Where a filter cuts below it does not matter."""
LEAST_TEMPERATURE = tl.constexpr(1e-30)
"""Keeps the factor finite, so that the best logit, 0, is never multiplied by infinity. Far below every
temperature at which more than one token can be chosen."""


@device_function
def scale(logits, row_max, temperature):
    """Scaled logits, of logits [N] of a row whose largest is `row_max`."""
    return (logits - row_max) * (1.0 / tl.maximum(temperature, LEAST_TEMPERATURE))


@device_function
def best_of_chunks(
    chunk_value_ptr,  # [R, C] fp32
    row,
    num_chunks,  # C
    PADDED_CHUNKS: tl.constexpr,  # C as a power of two
):
    """The largest logit of a row, from those of its chunks; 0 if all are -inf."""
    chunk = tl.arange(0, PADDED_CHUNKS)
    values = tl.load(chunk_value_ptr + row * num_chunks + chunk, mask=chunk < num_chunks, other=-float("inf"))
    best = tl.max(values, axis=0)
    return tl.where(best == -float("inf"), 0.0, best)


@device_function
def mass_of_chunks(
    chunk_value_ptr,  # [R, C] fp32
    chunk_mass_ptr,  # [R, C] fp32: each with the chunk's best at zero
    row,
    best,  # of the row
    temperature,
    num_chunks,  # C
    PADDED_CHUNKS: tl.constexpr,  # C as a power of two
):
    """The mass of a row: the sum of exp(scaled logits), chunk by chunk in one reduction."""
    chunk = tl.arange(0, PADDED_CHUNKS)
    cell = row * num_chunks + chunk
    is_chunk = chunk < num_chunks
    values = tl.load(chunk_value_ptr + cell, mask=is_chunk, other=-float("inf"))
    masses = tl.load(chunk_mass_ptr + cell, mask=is_chunk, other=0.0)
    return tl.sum(masses * tl.exp(scale(values, best, temperature)), axis=0)
