"""The best tokens after each row of a draft, with the draft's probabilities: candidates for nodes of trees.

    score[t]   = logits[t] + temperature * noise[t]
    logprob[t] = log(softmax(score / temperature))[t], and with temperature 0 that of the softmax of logits

The best are those with the highest scores; of equal ones the lowest id comes first. The noise is that of the
target's id at the position behind the row, so that the order is the one by which the target will choose.

Two launches. `_rank_chunks`, grid (rows, chunks): a program owns CHUNK_TOKENS logits of a row, and finds the
best of them and the sum of their exponentials. `_merge_chunks`, grid (rows,): a program owns a row. Logits
that come as partial sums are added slice by slice, in order. Bytes: a row of logits a row, all its slices.

Programmatic dependent launch: both wait for their producers before their first read and, being short, let
their dependents start right after that.
"""

from __future__ import annotations

import torch
import triton.language as tl
from msgspec import Struct
from torch import Tensor

from drift_sdk._kernels.common.arguments import check_range, check_tensor, check_tensors
from drift_sdk._kernels.common.kernel import kernel
from drift_sdk._kernels.common.launching import launch_options, start_dependents, uses_pdl, wait_for_producers
from drift_sdk._kernels.common.sizes import next_power_of_2
from drift_sdk._kernels.draft.draft_choose import CHUNK_TOKENS, _noise, num_draft_chunks
from drift_sdk._kernels.sampling.logits import LEAST_TEMPERATURE
from drift_sdk._kernels.sampling.noise import LAST_ID, arg_max
from drift_sdk.trees.limits import MAX_CANDIDATES

__all__ = ["CandidateBuffers", "rank_candidates"]


class CandidateBuffers(Struct, frozen=True):
    """The N best tokens of M rows, and scratch memory for K chunks of their logits.

    token [M, N] int32, logprob [M, N] fp32: the results, best first; undefined for rows of slot -1.
    chunk_max, chunk_sum [M, K] fp32, chunk_value [M, K, N] fp32, chunk_token [M, K, N] int32: scratch.
    """

    token: Tensor
    logprob: Tensor
    chunk_max: Tensor
    chunk_sum: Tensor
    chunk_value: Tensor
    chunk_token: Tensor


@kernel
def _rank_chunks(
    logits_ptr,  # [M, D], or partial sums [NUM_SLICES, M, D] fp32
    target_ids_ptr,  # [D] int32
    row_slot_ptr,  # [M] int32
    row_position_ptr,  # [M] int32
    temperature_ptr,  # [S] fp32
    seed_ptr,  # [S] int64
    chunk_max_ptr,  # [M, K] fp32, written
    chunk_sum_ptr,  # [M, K] fp32, written
    chunk_value_ptr,  # [M, K, NUM_CANDIDATES] fp32, written
    chunk_token_ptr,  # [M, K, NUM_CANDIDATES] int32, written
    vocab_size,  # D
    logits_slice_stride,  # elements from a slice of logits to the next
    NUM_CANDIDATES: tl.constexpr,
    NUM_SLICES: tl.constexpr,
    CHUNK_TOKENS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (M, K)."""
    wait_for_producers(PDL)
    start_dependents(PDL)
    row, chunk = tl.program_id(0), tl.program_id(1)
    slot = tl.load(row_slot_ptr + row)
    if slot >= 0:
        column = chunk * CHUNK_TOKENS + tl.arange(0, CHUNK_TOKENS)
        in_vocab = column < vocab_size
        slice_ptr = logits_ptr + row.to(tl.int64) * vocab_size + column
        scores = tl.load(slice_ptr, mask=in_vocab, other=-float("inf")).to(tl.float32)
        for index in tl.static_range(1, NUM_SLICES):
            scores += tl.load(slice_ptr + index * logits_slice_stride, mask=in_vocab, other=0.0)

        token_ids = tl.load(target_ids_ptr + column, mask=in_vocab, other=LAST_ID)
        temperature = tl.load(temperature_ptr + slot)
        inverse = 1.0
        if temperature > 0:
            position = tl.load(row_position_ptr + row) + 1
            scores += temperature * _noise(tl.load(seed_ptr + slot), position, token_ids)
            inverse = 1.0 / tl.maximum(temperature, LEAST_TEMPERATURE)

        cell = row * tl.num_programs(1) + chunk
        best = tl.max(scores, 0)
        tl.store(chunk_max_ptr + cell, best)
        tl.store(chunk_sum_ptr + cell, tl.sum(tl.exp((scores - best) * inverse), 0))
        for rank in range(NUM_CANDIDATES):
            value, token = arg_max(scores, token_ids)
            tl.store(chunk_value_ptr + cell * NUM_CANDIDATES + rank, value)
            tl.store(chunk_token_ptr + cell * NUM_CANDIDATES + rank, token)
            scores = tl.where(token_ids == token, -float("inf"), scores)


@kernel
def _merge_chunks(
    chunk_max_ptr,  # [M, K] fp32
    chunk_sum_ptr,  # [M, K] fp32
    chunk_value_ptr,  # [M, K, NUM_CANDIDATES] fp32
    chunk_token_ptr,  # [M, K, NUM_CANDIDATES] int32
    row_slot_ptr,  # [M] int32
    temperature_ptr,  # [S] fp32
    token_ptr,  # [M, NUM_CANDIDATES] int32, written
    logprob_ptr,  # [M, NUM_CANDIDATES] fp32, written
    num_chunks,  # K
    NUM_CANDIDATES: tl.constexpr,
    PADDED_CHUNKS: tl.constexpr,  # K as a power of two
    PADDED_ENTRIES: tl.constexpr,  # K * NUM_CANDIDATES as a power of two
    PDL: tl.constexpr,
):
    """Grid (M,)."""
    wait_for_producers(PDL)
    start_dependents(PDL)
    row = tl.program_id(0)
    slot = tl.load(row_slot_ptr + row)
    if slot >= 0:
        temperature = tl.load(temperature_ptr + slot)
        inverse = 1.0
        if temperature > 0:
            inverse = 1.0 / tl.maximum(temperature, LEAST_TEMPERATURE)
        chunk = tl.arange(0, PADDED_CHUNKS)
        is_chunk = chunk < num_chunks
        maxima = tl.load(chunk_max_ptr + row * num_chunks + chunk, mask=is_chunk, other=-float("inf"))
        sums = tl.load(chunk_sum_ptr + row * num_chunks + chunk, mask=is_chunk, other=0.0)
        best = tl.max(maxima, 0)
        log_sum = tl.log(tl.sum(sums * tl.exp((maxima - best) * inverse), 0))
        entry = tl.arange(0, PADDED_ENTRIES)
        is_entry = entry < num_chunks * NUM_CANDIDATES
        first = row * num_chunks * NUM_CANDIDATES
        values = tl.load(chunk_value_ptr + first + entry, mask=is_entry, other=-float("inf"))
        tokens = tl.load(chunk_token_ptr + first + entry, mask=is_entry, other=LAST_ID)
        for rank in range(NUM_CANDIDATES):
            value, token = arg_max(values, tokens)
            tl.store(token_ptr + row * NUM_CANDIDATES + rank, token)
            tl.store(logprob_ptr + row * NUM_CANDIDATES + rank, (value - best) * inverse - log_sum)
            values = tl.where(tokens == token, -float("inf"), values)


def rank_candidates(
    logits: Tensor,
    target_ids: Tensor,
    row_slot: Tensor,
    row_position: Tensor,
    temperature: Tensor,
    seed: Tensor,
    buffers: CandidateBuffers,
) -> None:
    """Write the best tokens after rows [M], and the logarithms of their probabilities, to `buffers`.

    logits: over the draft's vocabulary: [M, D] in the storage type, or fp32 partial sums [num_slices, M, D],
    added in order. target_ids [D] int32, ascending: the target's id of each of the draft's. row_slot,
    row_position [M] int32: slot (-1: nothing is written) and position of each row's token. temperature [S]
    fp32, seed [S] int64.

    Raises ValueError for another shape or type.
    """
    num_rows, vocab_size = logits.shape[-2:]
    num_slices = logits.shape[0] if logits.dim() == 3 else 1
    num_chunks, num_candidates = num_draft_chunks(vocab_size), buffers.token.shape[1]
    check_range("num_candidates", num_candidates, 1, min(MAX_CANDIDATES, vocab_size))
    check_tensor("logits", logits, logits.shape, torch.float32 if logits.dim() == 3 else logits.dtype)
    check_tensor("target_ids", target_ids, (vocab_size,), torch.int32)
    check_tensors((num_rows,), torch.int32, row_slot=row_slot, row_position=row_position)
    check_tensor("temperature", temperature, temperature.shape, torch.float32)
    check_tensor("seed", seed, temperature.shape, torch.int64)
    by_rank, by_chunk = (num_rows, num_candidates), (num_rows, num_chunks)
    check_tensor("token", buffers.token, by_rank, torch.int32)
    check_tensor("logprob", buffers.logprob, by_rank, torch.float32)
    check_tensors(by_chunk, torch.float32, chunk_max=buffers.chunk_max, chunk_sum=buffers.chunk_sum)
    check_tensor("chunk_value", buffers.chunk_value, (*by_chunk, num_candidates), torch.float32)
    check_tensor("chunk_token", buffers.chunk_token, (*by_chunk, num_candidates), torch.int32)
    _rank_chunks[(num_rows, num_chunks)](
        logits,
        target_ids,
        row_slot,
        row_position,
        temperature,
        seed,
        buffers.chunk_max,
        buffers.chunk_sum,
        buffers.chunk_value,
        buffers.chunk_token,
        vocab_size,
        logits.stride(0) if logits.dim() == 3 else 0,
        NUM_CANDIDATES=num_candidates,
        NUM_SLICES=num_slices,
        CHUNK_TOKENS=CHUNK_TOKENS,
        PDL=uses_pdl(),
        num_warps=4,
        **launch_options(),
    )
    _merge_chunks[(num_rows,)](
        buffers.chunk_max,
        buffers.chunk_sum,
        buffers.chunk_value,
        buffers.chunk_token,
        row_slot,
        temperature,
        buffers.token,
        buffers.logprob,
        num_chunks,
        NUM_CANDIDATES=num_candidates,
        PADDED_CHUNKS=next_power_of_2(num_chunks),
        PADDED_ENTRIES=next_power_of_2(num_chunks * num_candidates),
        PDL=uses_pdl(),
        num_warps=4,
        **launch_options(),
    )
