"""The tokens that a draft proposes: the best of its logits, with the noise that the target will choose by.

The arg max of logits + temperature * noise is that of logits / temperature + noise, at any temperature above
zero, and at zero that of the logits. The noise is that of the target's id at the token's position, so that
draft and target agree often.

Two launches. `_best_of_chunks`, grid (rows, chunks): a program owns CHUNK_TOKENS logits of a row that a slot
drafts from, one a depth. `_place_tokens`, grid (rows,): a program owns a row of logits, takes the best of its
chunks, and writes the drafted token and the row that the draft computes next. Logits that come as partial
sums are added slice by slice, in order. Bytes: a row of logits for each drafted token, all its slices.

A draft may propose the tokens of its best clusters alone. Two launches before: `_find_best_clusters`, grid
(rows,): a program takes the best scores of a row one after the other. `_mask_logits`, grid (rows, chunks): a
program owns CHUNK_TOKENS logits. Bytes: a row of logits, read and written.

Programmatic dependent launch: all wait for their producers before their first read and, being short, let
their dependents start right after that.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from drift_sdk._kernels.launch.arguments import check_partial_sums, check_tensor, next_power_of_2
from drift_sdk._kernels.launch.kernel import (
    device_function,
    kernel,
    launch_options,
    start_dependents,
    uses_pdl,
    wait_for_producers,
)
from drift_sdk._kernels.sampling.rows import LAST_ID, arg_max, gumbel_from_bits

CHUNK_TOKENS = 1024
"""Logits of a program: 8 a thread of 4 warps. A draft's vocabulary of 32,000 has 32 chunks, so that a single
row is shared by 32 multiprocessors."""


def num_draft_chunks(vocab_size: int) -> int:
    """Number of chunks, and of programs that share them, of a row of so many logits."""
    return -(-vocab_size // CHUNK_TOKENS)


@device_function
def _noise(seed, position, token_ids):
    """Gumbel variates of token_ids [N], any ids: the same as `noise.gumbel` gives for a run of ids."""
    counters = (token_ids // 4).to(tl.uint32)
    zero = counters * 0
    a, b, c, d = tl.philox(seed, counters, zero + position.to(tl.uint32), zero, zero)
    word = token_ids % 4
    return gumbel_from_bits(tl.where(word < 2, tl.where(word == 0, a, b), tl.where(word == 2, c, d)))


@kernel(do_not_specialize=["depth", "num_depths", "rows_per_slot"])
def _best_of_chunks(
    logits_ptr,  # [B * num_depths, D], or partial sums [NUM_SLICES, B * num_depths, D] fp32
    target_ids_ptr,  # [D] int32
    row_slot_ptr,  # [B * rows_per_slot] int32
    row_position_ptr,  # [B * rows_per_slot] int32
    temperature_ptr,  # [S] fp32
    seed_ptr,  # [S] int64
    chunk_value_ptr,  # [B * num_depths, C] fp32, written
    chunk_token_ptr,  # [B * num_depths, C] int32, written
    vocab_size,  # D
    logits_slice_stride,  # elements from a slice of logits to the next
    depth,  # of the first rows drafted now, 1 or more
    num_depths,  # rows of each slot that are drafted now
    rows_per_slot,
    NUM_SLICES: tl.constexpr,
    CHUNK_TOKENS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (B * num_depths, C)."""
    wait_for_producers(PDL)
    start_dependents(PDL)
    index, chunk = tl.program_id(0), tl.program_id(1)
    row = index // num_depths * rows_per_slot + depth + index % num_depths
    slot = tl.load(row_slot_ptr + row)
    if slot >= 0:
        column = chunk * CHUNK_TOKENS + tl.arange(0, CHUNK_TOKENS)
        in_vocab = column < vocab_size
        slice_ptr = logits_ptr + index.to(tl.int64) * vocab_size + column
        logits = tl.load(slice_ptr, mask=in_vocab, other=-float("inf")).to(tl.float32)
        for part in tl.static_range(1, NUM_SLICES):
            logits += tl.load(slice_ptr + part * logits_slice_stride, mask=in_vocab, other=0.0)

        token_ids = tl.load(target_ids_ptr + column, mask=in_vocab, other=LAST_ID)
        temperature = tl.load(temperature_ptr + slot)
        if temperature > 0:
            position = tl.load(row_position_ptr + row)
            logits += temperature * _noise(tl.load(seed_ptr + slot), position, token_ids)

        best, token = arg_max(logits, token_ids)
        cell = index * tl.num_programs(1) + chunk
        tl.store(chunk_value_ptr + cell, best)
        tl.store(chunk_token_ptr + cell, token)


@kernel(do_not_specialize=["depth", "num_depths", "rows_per_slot"])
def _place_tokens(
    chunk_value_ptr,  # [B * num_depths, C] fp32
    chunk_token_ptr,  # [B * num_depths, C] int32
    row_slot_ptr,  # [B * rows_per_slot] int32
    row_token_ptr,  # [B * rows_per_slot] int32, written at depth
    row_position_ptr,  # [B * rows_per_slot] int32
    next_slot_ptr,  # [B * num_depths] int32, written
    next_token_ptr,  # [B * num_depths] int32, written
    next_position_ptr,  # [B * num_depths] int32, written
    num_chunks,  # C
    depth,
    num_depths,
    rows_per_slot,
    PADDED_CHUNKS: tl.constexpr,  # C as a power of two
    PDL: tl.constexpr,
):
    """Grid (B * num_depths,)."""
    wait_for_producers(PDL)
    start_dependents(PDL)
    index = tl.program_id(0)
    row = index // num_depths * rows_per_slot + depth + index % num_depths
    slot = tl.load(row_slot_ptr + row)
    is_last = depth + index % num_depths + 1 == rows_per_slot
    next_slot = tl.load(row_slot_ptr + row + 1, mask=is_last == 0, other=slot)
    token = slot * 0 - 1  # -1 as a tensor: changed in the branch
    if slot >= 0:
        chunk = tl.arange(0, PADDED_CHUNKS)
        cell = index * num_chunks + chunk
        is_chunk = chunk < num_chunks
        values = tl.load(chunk_value_ptr + cell, mask=is_chunk, other=-float("inf"))
        _, token = arg_max(values, tl.load(chunk_token_ptr + cell, mask=is_chunk, other=LAST_ID))
        tl.store(row_token_ptr + row, token)

    tl.store(next_slot_ptr + index, tl.where(slot >= 0, next_slot, -1))
    tl.store(next_token_ptr + index, token)
    tl.store(next_position_ptr + index, tl.load(row_position_ptr + row))


def choose_drafts(
    logits: Tensor,
    target_ids: Tensor,
    row_slot: Tensor,
    row_token: Tensor,
    row_position: Tensor,
    temperature: Tensor,
    seed: Tensor,
    chunks: tuple[Tensor, Tensor],
    out: tuple[Tensor, Tensor, Tensor],
    *,
    depth: int,
    num_depths: int = 1,
) -> None:
    """Choose the tokens of rows b * T + depth, of T rows for each of B slots, and of the num_depths - 1 rows
    behind each of them, and write them to row_token. Below, N is B * num_depths.

    logits: of the rows before these, over the draft's vocabulary: [N, D] in the storage type, or fp32 partial
    sums [num_slices, N, D], added in order. target_ids [D] int32, ascending: the target's id of each of the
    draft's; ties go to the lowest. row_slot, row_token, row_position [B * T] int32; rows of slot -1 are not
    written. temperature [S] fp32, seed [S] int64. depth: 1 to T - num_depths.
    chunks: scratch, [N, num_draft_chunks] fp32 and int32. out: (slot, token, position) [N] int32, written: of
    the rows that a draft of one token after the other computes next, with slot -1 where a row or the one
    behind it has none. After the last depth the slot is the row's own.

    Raises ValueError for another shape or type.
    """
    num_tokens, vocab_size = logits.shape[-2:]
    num_slices = logits.shape[0] if logits.dim() == 3 else 1
    num_chunks = num_draft_chunks(vocab_size)
    num_slots = num_tokens // num_depths
    rows_per_slot = row_slot.shape[0] // num_slots
    _check_rows(num_slots, depth, num_depths, row_slot, row_token, row_position)
    check_tensor("logits", logits, logits.shape, torch.float32 if logits.dim() == 3 else logits.dtype)
    check_tensor("target_ids", target_ids, (vocab_size,), torch.int32)
    check_tensor("temperature", temperature, temperature.shape, torch.float32)
    check_tensor("seed", seed, temperature.shape, torch.int64)
    check_tensor("chunks", chunks[0], (num_tokens, num_chunks), torch.float32)
    check_tensor("chunks", chunks[1], (num_tokens, num_chunks), torch.int32)
    for name, column in zip(("slot", "token", "position"), out, strict=True):
        check_tensor(name, column, (num_tokens,), torch.int32)

    chunk_value, chunk_token = chunks
    _best_of_chunks[(num_tokens, num_chunks)](
        logits,
        target_ids,
        row_slot,
        row_position,
        temperature,
        seed,
        chunk_value,
        chunk_token,
        vocab_size,
        logits.stride(0) if logits.dim() == 3 else 0,
        depth,
        num_depths,
        rows_per_slot,
        NUM_SLICES=num_slices,
        CHUNK_TOKENS=CHUNK_TOKENS,
        PDL=uses_pdl(),
        num_warps=4,
        **launch_options(),
    )
    _place_tokens[(num_tokens,)](
        chunk_value,
        chunk_token,
        row_slot,
        row_token,
        row_position,
        *out,
        num_chunks,
        depth,
        num_depths,
        rows_per_slot,
        PADDED_CHUNKS=next_power_of_2(num_chunks),
        PDL=uses_pdl(),
        num_warps=1,
        **launch_options(),
    )


def _check_rows(
    num_slots: int,
    depth: int,
    num_depths: int,
    row_slot: Tensor,
    row_token: Tensor,
    row_position: Tensor,
) -> None:
    (num_rows,) = row_slot.shape
    rows_per_slot = num_rows // num_slots
    if num_rows % num_slots or not 1 <= depth <= rows_per_slot - num_depths:
        most = rows_per_slot - num_depths
        raise ValueError(f"depth={depth}: expected 1 to {most} of {num_rows} rows of {num_slots} slots")

    for name, column in (("row_slot", row_slot), ("row_token", row_token), ("row_position", row_position)):
        check_tensor(name, column, (num_rows,), torch.int32)


@kernel(do_not_specialize=["num_best"])
def _find_best_clusters(
    scores_ptr,  # [B, C], or partial sums [NUM_SLICES, B, C] fp32
    is_best_ptr,  # [B, C] int32, written
    num_clusters,  # C
    scores_slice_stride,  # elements from a slice of scores to the next
    num_best,
    NUM_SLICES: tl.constexpr,
    PADDED_CLUSTERS: tl.constexpr,  # C as a power of two
    PDL: tl.constexpr,
):
    """Grid (B,)."""
    wait_for_producers(PDL)
    start_dependents(PDL)
    row = tl.program_id(0)
    cluster = tl.arange(0, PADDED_CLUSTERS)
    in_range = cluster < num_clusters
    slice_ptr = scores_ptr + row * num_clusters + cluster
    scores = tl.load(slice_ptr, mask=in_range, other=-float("inf")).to(tl.float32)
    for part in tl.static_range(1, NUM_SLICES):
        scores += tl.load(slice_ptr + part * scores_slice_stride, mask=in_range, other=0.0)

    ids = tl.where(in_range, cluster, LAST_ID)
    is_best = cluster < 0
    for _ in range(num_best):
        _, found = arg_max(tl.where(is_best, -float("inf"), scores), tl.where(is_best, LAST_ID, ids))
        is_best = is_best | (cluster == found)

    tl.store(is_best_ptr + row * num_clusters + cluster, is_best.to(tl.int32), mask=in_range)


@kernel
def _mask_logits(
    logits_ptr,  # [B, V] fp32, written
    clusters_ptr,  # [V] int32
    is_best_ptr,  # [B, C] int32
    vocab_size,  # V
    num_clusters,  # C
    CHUNK_TOKENS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (B, chunks)."""
    wait_for_producers(PDL)
    start_dependents(PDL)
    row, chunk = tl.program_id(0), tl.program_id(1)
    token = chunk * CHUNK_TOKENS + tl.arange(0, CHUNK_TOKENS)
    in_vocab = token < vocab_size
    cluster = tl.load(clusters_ptr + token, mask=in_vocab, other=0)
    is_best = tl.load(is_best_ptr + row * num_clusters + cluster, mask=in_vocab, other=1)
    places = logits_ptr + row.to(tl.int64) * vocab_size + token
    tl.store(places, -float("inf"), mask=in_vocab & (is_best == 0))


def keep_best_clusters(
    logits: Tensor, scores: Tensor, clusters: Tensor, is_best: Tensor, *, num_best: int
) -> None:
    """Set the logits of tokens outside of a row's best clusters to -inf.

    logits [B, V] fp32. scores: of the clusters, [B, C] in the storage type, or fp32 partial sums
    [num_slices, B, C], added in order; equal scores are taken from the lowest cluster on. clusters [V] int32:
    the cluster of each token, 0 to C - 1. is_best [B, C] int32: scratch. num_best: 1 to C.

    Raises ValueError for another shape, type or number.
    """
    num_rows, vocab_size = logits.shape
    num_clusters = scores.shape[-1]
    slices = check_partial_sums("scores", scores, num_rows, num_clusters, scores.dtype)
    check_tensor("logits", logits, (num_rows, vocab_size), torch.float32)
    check_tensor("scores", scores, scores.shape, scores.dtype)
    check_tensor("clusters", clusters, (vocab_size,), torch.int32)
    check_tensor("is_best", is_best, (num_rows, num_clusters), torch.int32)
    if not 1 <= num_best <= num_clusters:
        raise ValueError(f"num_best={num_best}: expected 1 to {num_clusters}")

    _find_best_clusters[(num_rows,)](
        scores,
        is_best,
        num_clusters,
        slices.slice_stride,
        num_best,
        NUM_SLICES=slices.num_slices,
        PADDED_CLUSTERS=next_power_of_2(num_clusters),
        PDL=uses_pdl(),
        num_warps=4,
        **launch_options(),
    )
    _mask_logits[(num_rows, num_draft_chunks(vocab_size))](
        logits,
        clusters,
        is_best,
        vocab_size,
        num_clusters,
        CHUNK_TOKENS=CHUNK_TOKENS,
        PDL=uses_pdl(),
        num_warps=4,
        **launch_options(),
    )
