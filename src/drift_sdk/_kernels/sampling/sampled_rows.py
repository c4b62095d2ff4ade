"""From logits to tokens in eight launches, whatever the rows ask for."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from drift_sdk._kernels.common.arguments import check_tensor
from drift_sdk._kernels.common.launching import launch_options, uses_pdl
from drift_sdk._kernels.sampling.apply_logits_rules import rule_logits
from drift_sdk._kernels.sampling.filter_brackets import PASSES, collect_candidates, refine_bracket
from drift_sdk._kernels.sampling.filter_thresholds import find_thresholds
from drift_sdk._kernels.sampling.gumbel_sample import choose
from drift_sdk._kernels.sampling.sample_buffers import CHUNK, MAX_CANDIDATES, MAX_TOP, SampleBuffers
from drift_sdk._kernels.sampling.top_tokens import pick_tokens, rank_chunks
from drift_sdk._kernels.slots.slot_columns import SlotColumns

__all__ = ["sample_rows"]

FILTER_BLOCK = 8192
"""Tokens at a time where a program has a row to itself."""
MOST_PROGRAMS = 1024
"""About as many as a GPU runs at once: with many rows each takes several chunks, as most leave at once where
nothing was asked of them."""


def sample_rows(
    logits: Tensor,
    row_slot: Tensor,
    row_position: Tensor,
    row_token: Tensor,
    slots: SlotColumns,
    mask_words: Tensor,
    buffers: SampleBuffers,
    *,
    rows_per_slot: int = 1,
) -> None:
    """Choose the token that follows each row's token; take log-probabilities where they are asked for.

    logits [2, R, V] fp32: plane 0 is read, plane 1 overwritten where rules apply; the planes may stand apart.
    row_slot (-1: padding), row_token and its absolute position row_position [R] int32: the chosen token is to
    stand at row_position + 1. mask_words [R, W] int32: what each row's constraint allows.

    Rows come in groups of `rows_per_slot` of one slot at consecutive positions: the first holds a token that
    `slots` has counted, the others the tokens drafted behind it, which it has not.

    Results are in `buffers`, rows [:R]. Raises ValueError for another shape or type.
    """
    num_rows, vocab_size = _check(logits, row_slot, row_position, row_token, slots, mask_words, buffers)
    if num_rows % rows_per_slot:
        raise ValueError(f"row_slot: {num_rows} rows: expected a multiple of {rows_per_slot}")

    num_chunks = triton.cdiv(vocab_size, CHUNK)
    by_row, by_chunk = (num_rows,), (num_rows, num_chunks)
    by_part = (num_rows, min(num_chunks, triton.cdiv(MOST_PROGRAMS, max(num_rows, 1))))
    plane_stride = logits.stride(0)
    rule_logits[by_chunk](
        logits,
        plane_stride,
        row_slot,
        row_position,
        row_token,
        mask_words,
        slots.flags,
        slots.min_length,
        slots.presence_penalty,
        slots.frequency_penalty,
        slots.repetition_penalty,
        slots.num_logprobs,
        slots.temperature,
        slots.top_p,
        slots.bias,
        slots.counts,
        slots.prompt_bits,
        slots.stop_bits,
        slots.allowed_bits,
        buffers.chunk_value,
        buffers.chunk_token,
        buffers.chunk_mass,
        buffers.raw_max,
        buffers.raw_sum,
        vocab_size,
        mask_words.shape[1],
        ROWS_PER_SLOT=rows_per_slot,
        CHUNK=CHUNK,
        PDL=uses_pdl(),
        num_warps=8,
        enable_fp_fusion=False,  # a product rounded before it is subtracted, as in the reference
        **launch_options(),
    )
    rows = (
        logits,
        plane_stride,
        row_slot,
        row_position,
        slots.temperature,
        slots.top_k,
        slots.top_p,
        slots.flags,
        slots.min_length,
        buffers.chunk_value,
    )
    bracketing = (buffers.chunk_mass, buffers.brackets, buffers.weights)
    chunks = {
        "CHUNK": CHUNK,
        "CHUNKS": triton.next_power_of_2(num_chunks),
        "PDL": uses_pdl(),
        "enable_fp_fusion": False,  # levels of a bracket are worked out again in each launch
        **launch_options(),
    }
    for number in range(PASSES.value):
        refine_bracket[by_part](
            *rows, *bracketing, vocab_size, num_chunks, PASS=number, num_warps=4, **chunks
        )

    collect_candidates[by_part](
        *rows,
        *bracketing,
        buffers.candidates,
        buffers.num_candidates,
        vocab_size,
        num_chunks,
        MOST=MAX_CANDIDATES,
        num_warps=4,
        **chunks,
    )
    find_thresholds[by_row](
        *rows,
        slots.min_p,
        buffers.brackets,
        buffers.candidates,
        buffers.num_candidates,
        buffers.row_max,
        buffers.row_threshold,
        vocab_size,
        num_chunks,
        CHUNKS=triton.next_power_of_2(num_chunks),
        MOST=MAX_CANDIDATES,
        BLOCK=FILTER_BLOCK,
        PDL=uses_pdl(),
        num_warps=8,
        **launch_options(),
    )
    choose[by_part](
        logits,
        plane_stride,
        row_slot,
        row_position,
        slots.temperature,
        slots.seed,
        slots.flags,
        slots.min_length,
        buffers.row_max,
        buffers.row_threshold,
        buffers.chunk_value,
        buffers.chunk_token,
        vocab_size,
        num_chunks,
        CHUNK=CHUNK,
        PDL=uses_pdl(),
        num_warps=8,
        **launch_options(),
    )
    rank_chunks[by_part](
        logits,
        row_slot,
        slots.num_logprobs,
        buffers.candidate_value,
        buffers.candidate_token,
        vocab_size,
        num_chunks,
        MAX_TOP=MAX_TOP,
        CHUNK=CHUNK,
        PDL=uses_pdl(),
        num_warps=8,
        **launch_options(),
    )
    pick_tokens[by_row](
        logits,
        row_slot,
        slots.num_logprobs,
        buffers.chunk_value,
        buffers.chunk_token,
        buffers.raw_max,
        buffers.raw_sum,
        buffers.candidate_value,
        buffers.candidate_token,
        buffers.chosen,
        buffers.chosen_logprob,
        buffers.top_token,
        buffers.top_logprob,
        vocab_size,
        num_chunks,
        MAX_TOP=MAX_TOP,
        CHUNKS=triton.next_power_of_2(num_chunks),
        CANDIDATES=triton.next_power_of_2(num_chunks * MAX_TOP),
        TOPS=triton.next_power_of_2(MAX_TOP),
        PDL=uses_pdl(),
        **launch_options(),
    )


def _check(
    logits: Tensor,
    row_slot: Tensor,
    row_position: Tensor,
    row_token: Tensor,
    slots: SlotColumns,
    mask_words: Tensor,
    buffers: SampleBuffers,
) -> tuple[int, int]:
    """(R, V), or a ValueError."""
    (num_rows,) = row_slot.shape
    vocab_size = slots.vocab_size
    for name, column in (("row_slot", row_slot), ("row_position", row_position), ("row_token", row_token)):
        check_tensor(name, column, (num_rows,), torch.int32)
    check_tensor("mask_words", mask_words, (num_rows, slots.prompt_bits.shape[1]), torch.int32)
    if logits.shape != (2, num_rows, vocab_size):
        raise ValueError(f"logits: {list(logits.shape)}: expected {[2, num_rows, vocab_size]}")

    check_tensor("logits", logits[0], (num_rows, vocab_size), torch.float32)
    check_tensor("logits", logits[1], (num_rows, vocab_size), torch.float32)
    if buffers.chosen.shape[0] < num_rows:
        raise ValueError(f"buffers: {buffers.chosen.shape[0]} rows: expected at least {num_rows}")

    if buffers.chunk_value.shape[1] != triton.cdiv(vocab_size, CHUNK):
        raise ValueError(
            f"buffers: {buffers.chunk_value.shape[1]} chunks: expected {triton.cdiv(vocab_size, CHUNK)}"
        )

    return num_rows, vocab_size
