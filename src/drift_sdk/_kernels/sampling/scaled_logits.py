"""Logits over the temperature, with the largest at zero: what filters and noise work on."""

from __future__ import annotations

import triton
import triton.language as tl

from drift_sdk._kernels.sampling.gumbel import LEAST_NOISE, MOST_NOISE

__all__ = ["NEGLIGIBLE_LOGIT", "best_of_chunks", "mass_of_chunks", "scale"]

# So far below the best logit no noise lifts a token to the top: where in there a filter cuts is of no matter.
NEGLIGIBLE_LOGIT = tl.constexpr(LEAST_NOISE - MOST_NOISE - 0.1)


@triton.jit
def scale(logits, row_max, temperature):
    # A bounded factor: at no temperature is it 0 * inf.
    return (logits - row_max) * (1.0 / tl.maximum(temperature, 1e-30))


@triton.jit
def best_of_chunks(chunk_value, row, num_chunks, CHUNKS: tl.constexpr):
    """The largest logit of a row; 0 if all are -inf."""
    chunk = tl.arange(0, CHUNKS)
    values = tl.load(chunk_value + row * num_chunks + chunk, mask=chunk < num_chunks, other=-float("inf"))
    best = tl.max(values, axis=0)
    return tl.where(best == -float("inf"), 0.0, best)


@triton.jit
def mass_of_chunks(chunk_value, chunk_mass, row, best, temperature, num_chunks, CHUNKS: tl.constexpr):
    """The mass of a row, from that of each chunk with its best at zero."""
    chunk = tl.arange(0, CHUNKS)
    cell = row * num_chunks + chunk
    is_chunk = chunk < num_chunks
    values = tl.load(chunk_value + cell, mask=is_chunk, other=-float("inf"))
    masses = tl.load(chunk_mass + cell, mask=is_chunk, other=0.0)
    return tl.sum(masses * tl.exp(scale(values, best, temperature)), axis=0)
