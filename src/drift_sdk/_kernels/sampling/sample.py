"""Sampling of a step's rows: from logits to tokens in eight launches, whatever the rows ask for.

The launches are the same for every step, so that a captured graph serves any mixture of rows: what a slot's
columns ask for decides in each kernel which rows have work. Rows share nothing: a row's token, and every bit
of its log-probabilities, are the same as in a step without other rows.

The best token of each chunk once noise is added: the Gumbel-max trick, which samples the softmax.

The arg max of scaled logits plus independent standard Gumbel noise is distributed as the softmax of the
scaled logits. The noise is a function of (seed, position of the token to be chosen, token id), see
`eager.sampling`.

Grid (rows, parts): a program owns every P-th chunk of its row. A chunk is computed by itself, so the number
of programs does not change a bit. Bytes: a row of logits, less the chunks whose best is below the threshold
or negligible.

Programmatic dependent launch: the kernel waits for its producers before its first read and lets its
dependents start right after that: greedy rows end at once.

Reference: `eager.sampling.sample`.

The chosen token of each row and, where they are asked for, its log-probability and the most likely tokens.

Two kernels. `_rank_chunks`, grid (rows, parts): a program owns every P-th chunk of its row, and finds the
chunk's most likely tokens. `_pick_tokens`, grid (rows,): a program owns a row, takes the best of its chunks,
and merges what their log-probabilities need. Tokens are found one by one in the order (logit falling, id
rising), each as the first behind the one before, so equal logits are reported with the lowest ids first.

The logarithm of the sum of exponentials comes from each chunk's largest logit and sum, merged in one
reduction over the row's chunks: its bits depend only on the row.

Bytes: a row of logits where log-probabilities of several tokens are reported; else a few words a chunk.

Programmatic dependent launch: both kernels wait for their producers before their first read and let their
dependents start right after that: most rows report nothing.

Reference: `eager.sampling.top_logprobs`.
"""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from drift_sdk._kernels.launch.arguments import next_power_of_2
from drift_sdk._kernels.launch.kernel import (
    device_function,
    kernel,
    launch_options,
    start_dependents,
    uses_pdl,
    wait_for_producers,
)
from drift_sdk._kernels.sampling.filters import collect_candidates, find_thresholds, refine_brackets
from drift_sdk._kernels.sampling.logits import NEGLIGIBLE_LOGIT, apply_logits_rules, find_ruled_row, scale
from drift_sdk._kernels.sampling.rows import (
    CHUNK_TOKENS,
    LAST_ID,
    MAX_TOP,
    RowsToSample,
    SampleBuffers,
    arg_max,
    gumbel,
)
from drift_sdk._kernels.slots import SlotColumns


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


@device_function
def _next_token(values, token_ids, last_value, last_token):
    """(value, token) of the first of (values, token_ids) [N] behind the last one; LAST_ID if there is
    none."""
    is_behind = (values < last_value) | ((values == last_value) & (token_ids > last_token))
    value = tl.max(tl.where(is_behind, values, -float("inf")), axis=0)
    is_first = is_behind & (values == value)
    return value, tl.min(tl.where(is_first, token_ids, LAST_ID), axis=0)


@kernel
def _rank_chunks(
    logits_ptr,  # [2, R, V] fp32: plane 0
    row_slot_ptr,  # [R] int32
    num_logprobs_ptr,  # [S] int32
    chunk_top_value_ptr,  # [R, C, MAX_TOP] fp32, written
    chunk_top_token_ptr,  # [R, C, MAX_TOP] int32, written
    vocab_size,  # V
    num_chunks,  # C
    MAX_TOP: tl.constexpr,
    CHUNK_TOKENS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (R, P). As many tokens of each chunk as the row reports; rows that report none are not written."""
    wait_for_producers(PDL)
    start_dependents(PDL)
    row = tl.program_id(0)
    slot = tl.load(row_slot_ptr + row)
    if slot < 0:
        return

    num_top = tl.load(num_logprobs_ptr + slot)
    if num_top <= 0:
        return

    raw_logits_ptr = logits_ptr + row.to(tl.int64) * vocab_size
    for chunk in range(tl.program_id(1), num_chunks, tl.num_programs(1)):
        token_ids = chunk * CHUNK_TOKENS + tl.arange(0, CHUNK_TOKENS)
        # NaN comes behind nothing.
        logits = tl.load(raw_logits_ptr + token_ids, mask=token_ids < vocab_size, other=float("nan"))
        first_place = (row * num_chunks + chunk) * MAX_TOP
        value, token = float("inf"), -1
        for rank in range(0, tl.minimum(num_top, MAX_TOP)):
            value, token = _next_token(logits, token_ids, value, token)
            tl.store(chunk_top_value_ptr + first_place + rank, value)
            tl.store(chunk_top_token_ptr + first_place + rank, token)


@kernel
def _pick_tokens(
    logits_ptr,  # [2, R, V] fp32: plane 0
    row_slot_ptr,  # [R] int32
    num_logprobs_ptr,  # [S] int32
    # The buffers.
    chunk_value_ptr,  # [R, C] fp32
    chunk_token_ptr,  # [R, C] int32
    raw_max_ptr,  # [R, C] fp32
    raw_sum_ptr,  # [R, C] fp32
    chunk_top_value_ptr,  # [R, C, MAX_TOP] fp32
    chunk_top_token_ptr,  # [R, C, MAX_TOP] int32
    # The results.
    chosen_ptr,  # [R] int32, written
    chosen_logprob_ptr,  # [R] fp32, written
    top_token_ptr,  # [R, MAX_TOP] int32, written
    top_logprob_ptr,  # [R, MAX_TOP] fp32, written
    # Sizes.
    vocab_size,  # V
    num_chunks,  # C
    MAX_TOP: tl.constexpr,
    PADDED_CHUNKS: tl.constexpr,  # C as a power of two
    PADDED_CHUNK_TOPS: tl.constexpr,  # C * MAX_TOP as a power of two
    PADDED_TOP: tl.constexpr,  # MAX_TOP as a power of two
    PDL: tl.constexpr,
):
    """Grid (R,)."""
    wait_for_producers(PDL)
    start_dependents(PDL)
    row = tl.program_id(0)
    slot = tl.load(row_slot_ptr + row)
    if slot < 0:
        tl.store(chosen_ptr + row, -1)
        return

    chunk = tl.arange(0, PADDED_CHUNKS)
    is_chunk = chunk < num_chunks
    cell = row * num_chunks + chunk
    chunk_values = tl.load(chunk_value_ptr + cell, mask=is_chunk, other=-float("inf"))
    _, chosen = arg_max(chunk_values, tl.load(chunk_token_ptr + cell, mask=is_chunk, other=LAST_ID))
    tl.store(chosen_ptr + row, chosen)
    num_top = tl.load(num_logprobs_ptr + slot)
    if num_top < 0:
        return

    maxima = tl.load(raw_max_ptr + cell, mask=is_chunk, other=-float("inf"))
    sums = tl.load(raw_sum_ptr + cell, mask=is_chunk, other=0.0)
    largest = tl.max(maxima, axis=0)
    log_sum = tl.log(tl.sum(sums * tl.exp(maxima - largest), axis=0))
    chosen_logit = tl.load(logits_ptr + row.to(tl.int64) * vocab_size + chosen)
    tl.store(chosen_logprob_ptr + row, chosen_logit - largest - log_sum)

    place = tl.arange(0, PADDED_CHUNK_TOPS)
    is_ranked = (place < num_chunks * MAX_TOP) & (place % MAX_TOP < num_top)
    first_place = row * num_chunks * MAX_TOP
    values = tl.load(chunk_top_value_ptr + first_place + place, mask=is_ranked, other=float("nan"))
    token_ids = tl.load(chunk_top_token_ptr + first_place + place, mask=is_ranked, other=LAST_ID)
    ranks = tl.arange(0, PADDED_TOP)
    top_tokens = tl.full((PADDED_TOP,), -1, tl.int32)
    top_logprobs = tl.full((PADDED_TOP,), -float("inf"), tl.float32)
    value, token = float("inf"), -1
    for rank in range(0, tl.minimum(num_top, MAX_TOP)):
        value, token = _next_token(values, token_ids, value, token)
        is_own = (ranks == rank) & (token != LAST_ID)
        top_tokens = tl.where(is_own, token, top_tokens)
        top_logprobs = tl.where(is_own, value - largest - log_sum, top_logprobs)

    tl.store(top_token_ptr + row * MAX_TOP + ranks, top_tokens, mask=ranks < MAX_TOP)
    tl.store(top_logprob_ptr + row * MAX_TOP + ranks, top_logprobs, mask=ranks < MAX_TOP)


def rank_chunks(rows: RowsToSample) -> None:
    """Write the most likely tokens of each chunk, by raw logits, of rows that report any: chunk_top_value and
    chunk_top_token."""
    _rank_chunks[rows.part_grid](
        rows.logits,
        rows.row_slot,
        rows.slots.num_logprobs,
        rows.buffers.chunk_top_value,
        rows.buffers.chunk_top_token,
        rows.vocab_size,
        rows.num_chunks,
        MAX_TOP=MAX_TOP,
        CHUNK_TOKENS=CHUNK_TOKENS,
        PDL=uses_pdl(),
        num_warps=8,
        **launch_options(),
    )


def pick_tokens(rows: RowsToSample) -> None:
    """Write every row's chosen token, -1 for padding; and for rows that report them the log-probabilities of
    the token and of the most likely ones, from raw logits, with -1 and -inf behind the last one reported."""
    _pick_tokens[rows.row_grid](
        rows.logits,
        rows.row_slot,
        rows.slots.num_logprobs,
        rows.buffers.chunk_value,
        rows.buffers.chunk_token,
        rows.buffers.raw_max,
        rows.buffers.raw_sum,
        rows.buffers.chunk_top_value,
        rows.buffers.chunk_top_token,
        rows.buffers.chosen,
        rows.buffers.chosen_logprob,
        rows.buffers.top_token,
        rows.buffers.top_logprob,
        rows.vocab_size,
        rows.num_chunks,
        MAX_TOP=MAX_TOP,
        PADDED_CHUNKS=rows.padded_chunks,
        PADDED_CHUNK_TOPS=next_power_of_2(rows.num_chunks * MAX_TOP),
        PADDED_TOP=next_power_of_2(MAX_TOP),
        PDL=uses_pdl(),
        **launch_options(),
    )


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
    row_path: Tensor | None = None,
) -> None:
    """Choose the token that follows each row's token; take log-probabilities where they are asked for.

    logits [2, R, V] fp32: plane 0 is read, plane 1 overwritten where rules apply; the planes may stand apart.
    row_slot (-1: padding), row_token and its absolute position row_position [R] int32: the chosen token is
    that of position row_position + 1. mask_words [R, W] int32: what each row's constraint allows.

    `rows_per_slot` rows of one slot stand together, at consecutive positions: the first holds a token that
    `slots` has counted, the others the tokens drafted behind it, which are not counted yet. With row_path,
    they are the nodes of a tree, see `RowsToSample.row_path`.

    Results are in rows [:R] of `buffers`: chosen, chosen_logprob, top_token, top_logprob. Raises ValueError
    for another shape or type.
    """
    rows = RowsToSample(
        logits, row_slot, row_position, row_token, slots, mask_words, buffers, rows_per_slot, row_path
    )
    apply_logits_rules(rows)  # every row; after this the best chunk of a greedy row has its token
    _filter(rows)
    add_noise(rows)  # rows that are not greedy: after this the best chunk of every row has its token
    rank_chunks(rows)  # rows that report log-probabilities
    pick_tokens(rows)  # every row


def _filter(rows: RowsToSample) -> None:
    """Find the thresholds of rows that are not greedy: four launches."""
    refine_brackets(rows)  # top_k and top_p: two launches
    collect_candidates(rows)  # top_k and top_p
    find_thresholds(rows)  # all rows that are not greedy
