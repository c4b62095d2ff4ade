"""The best token of each chunk once noise is added: the Gumbel-max trick, which samples the softmax.

The arg max of scaled logits plus independent standard Gumbel noise is distributed as the softmax of the
scaled logits. The noise is a function of (seed, position of the token to be chosen, token id), see `noise`.

Grid (rows, parts): a program owns every P-th chunk of its row. A chunk is computed by itself, so the number
of programs does not change a bit. Bytes: a row of logits, less the chunks whose best is below the threshold
or negligible.

Programmatic dependent launch: the kernel waits for its producers before its first read and lets its
dependents start right after that: greedy rows end at once.

Reference: `sample.sample`.
"""

from __future__ import annotations

import triton.language as tl

from drift_sdk._kernels.common.kernel import kernel
from drift_sdk._kernels.common.launching import launch_options, start_dependents, uses_pdl, wait_for_producers
from drift_sdk._kernels.sampling.apply_logits_rules import find_ruled_row
from drift_sdk._kernels.sampling.gumbel import arg_max, gumbel
from drift_sdk._kernels.sampling.rows_to_sample import RowsToSample
from drift_sdk._kernels.sampling.sample_buffers import CHUNK_TOKENS
from drift_sdk._kernels.sampling.scaled_logits import NEGLIGIBLE_LOGIT, scale

__all__ = ["add_noise"]


@kernel
def _gumbel_sample(
    # The rows.
    logits_ptr,  # [2, R, V] fp32
    logits_plane_stride,
    row_slot_ptr,  # [R] int32
    row_position_ptr,  # [R] int32
    # The slots.
    temperature_ptr,  # [S] fp32
    seed_ptr,  # [S] int64
    flags_ptr,  # [S] int32
    min_length_ptr,  # [S] int32
    # The buffers.
    row_max_ptr,  # [R] fp32
    row_threshold_ptr,  # [R] fp32
    chunk_value_ptr,  # [R, C] fp32, read and written
    chunk_token_ptr,  # [R, C] int32, written
    # Sizes.
    vocab_size,  # V
    num_chunks,  # C
    CHUNK_TOKENS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (R, P). Greedy rows and padding are not written."""
    wait_for_producers(PDL)
    start_dependents(PDL)
    row = tl.program_id(0)
    slot = tl.load(row_slot_ptr + row)
    if slot < 0:
        return

    temperature = tl.load(temperature_ptr + slot)
    if temperature <= 0:
        return

    best = tl.load(row_max_ptr + row)
    threshold = tl.load(row_threshold_ptr + row)
    position = tl.load(row_position_ptr + row)
    seed = tl.load(seed_ptr + slot)
    row_logits_ptr = find_ruled_row(
        logits_ptr, logits_plane_stride, row_position_ptr, flags_ptr, min_length_ptr, row, slot, vocab_size
    )
    for chunk in range(tl.program_id(1), num_chunks, tl.num_programs(1)):
        cell = row * num_chunks + chunk
        chunk_best = scale(tl.load(chunk_value_ptr + cell), best, temperature)
        if chunk_best < tl.maximum(threshold, NEGLIGIBLE_LOGIT):
            tl.store(chunk_value_ptr + cell, -float("inf"))
        else:
            token_ids = chunk * CHUNK_TOKENS + tl.arange(0, CHUNK_TOKENS)
            in_vocab = token_ids < vocab_size
            logits = tl.load(row_logits_ptr + token_ids, mask=in_vocab, other=-float("inf"))
            scaled = scale(logits, best, temperature)
            noise = gumbel(seed, position + 1, chunk * CHUNK_TOKENS, CHUNK_TOKENS)
            noisy = tl.where(scaled < threshold, -float("inf"), scaled + noise)
            value, token = arg_max(noisy, token_ids)
            tl.store(chunk_value_ptr + cell, value)
            tl.store(chunk_token_ptr + cell, token)


def add_noise(rows: RowsToSample) -> None:
    """For rows that are not greedy, chunk_value and chunk_token become those of the largest scaled logit plus
    noise among the tokens that the filters keep."""
    _gumbel_sample[rows.part_grid](
        rows.logits,
        rows.logits.stride(0),
        rows.row_slot,
        rows.row_position,
        rows.slots.temperature,
        rows.slots.seed,
        rows.slots.flags,
        rows.slots.min_length,
        rows.buffers.row_max,
        rows.buffers.row_threshold,
        rows.buffers.chunk_value,
        rows.buffers.chunk_token,
        rows.vocab_size,
        rows.num_chunks,
        CHUNK_TOKENS=CHUNK_TOKENS,
        PDL=uses_pdl(),
        num_warps=8,
        **launch_options(),
    )
