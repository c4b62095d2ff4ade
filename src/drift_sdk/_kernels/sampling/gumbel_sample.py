"""The best of each chunk once noise is added: the Gumbel-max trick, which samples the softmax.

Reference: `sample.sample`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from drift_sdk._kernels.common.launching import start_dependents, wait_for_producers
from drift_sdk._kernels.sampling.apply_logits_rules import ruled_row
from drift_sdk._kernels.sampling.gumbel import arg_max, gumbel
from drift_sdk._kernels.sampling.scaled_logits import NEGLIGIBLE_LOGIT, scale

__all__ = ["choose"]


@triton.jit
def choose(
    logits, plane_stride, row_slot, row_position,
    slot_temperature, slot_seed, slot_flags, slot_min_length,
    row_max, row_threshold, chunk_value, chunk_token, vocab_size, num_chunks,
    CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (rows, parts of its chunks). For rows that are not greedy, chunk_value and chunk_token become
    those of the largest scaled logit plus noise among the ones the filters keep."""
    wait_for_producers(PDL)
    start_dependents(PDL)
    row = tl.program_id(0)
    slot = tl.load(row_slot + row)
    if slot < 0:
        return

    temperature = tl.load(slot_temperature + slot)
    if temperature <= 0:
        return

    best = tl.load(row_max + row)
    threshold = tl.load(row_threshold + row)
    position = tl.load(row_position + row)
    seed = tl.load(slot_seed + slot)
    row_logits = ruled_row(
        logits, plane_stride, row_position, slot_flags, slot_min_length, row, slot, vocab_size
    )
    for chunk in range(tl.program_id(1), num_chunks, tl.num_programs(1)):
        cell = row * num_chunks + chunk
        if scale(tl.load(chunk_value + cell), best, temperature) < tl.maximum(threshold, NEGLIGIBLE_LOGIT):
            tl.store(chunk_value + cell, -float("inf"))
        else:
            token_ids = chunk * CHUNK + tl.arange(0, CHUNK)
            values = tl.load(row_logits + token_ids, mask=token_ids < vocab_size, other=-float("inf"))
            scaled = scale(values, best, temperature)
            noise = gumbel(seed, position + 1, chunk * CHUNK, CHUNK)
            noisy = tl.where(scaled < threshold, -float("inf"), scaled + noise)
            value, token = arg_max(noisy, token_ids)
            tl.store(chunk_value + cell, value)
            tl.store(chunk_token + cell, token)
