"""The chosen token of each row, and where asked for its log-probability and the most likely tokens.

Reference: `sample.top_logprobs`. Tokens are found one by one in the order (logit falling, id rising), each as
the first behind the one before.
"""

from __future__ import annotations

import triton
import triton.language as tl

from drift_sdk._kernels.common.launching import start_dependents, wait_for_producers
from drift_sdk._kernels.sampling.gumbel import LAST_ID, arg_max

__all__ = ["pick_tokens", "rank_chunks"]


@triton.jit
def _next(values, token_ids, last_value, last_token):
    """The first of (values, token_ids) [N] behind the last one: LAST_ID where there is none."""
    is_behind = (values < last_value) | ((values == last_value) & (token_ids > last_token))
    value = tl.max(tl.where(is_behind, values, -float("inf")), axis=0)
    is_first = is_behind & (values == value)
    return value, tl.min(tl.where(is_first, token_ids, LAST_ID), axis=0)


@triton.jit
def rank_chunks(
    logits, row_slot, slot_num_logprobs, candidate_value, candidate_token, vocab_size, num_chunks,
    MAX_TOP: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (rows, parts of its chunks). For rows that report log-probabilities, each chunk's best of the raw
    logits as candidates [R, C, MAX_TOP], as many as are reported."""
    wait_for_producers(PDL)
    start_dependents(PDL)
    row = tl.program_id(0)
    slot = tl.load(row_slot + row)
    if slot < 0:
        return

    num_top = tl.load(slot_num_logprobs + slot)
    if num_top <= 0:
        return

    raw_logits = logits + row.to(tl.int64) * vocab_size
    for chunk in range(tl.program_id(1), num_chunks, tl.num_programs(1)):
        token_ids = chunk * CHUNK + tl.arange(0, CHUNK)
        # NaN comes behind nothing.
        values = tl.load(raw_logits + token_ids, mask=token_ids < vocab_size, other=float("nan"))
        first = (row * num_chunks + chunk) * MAX_TOP
        value, token = float("inf"), -1
        for index in range(0, tl.minimum(num_top, MAX_TOP)):
            value, token = _next(values, token_ids, value, token)
            tl.store(candidate_value + first + index, value)
            tl.store(candidate_token + first + index, token)


@triton.jit
def pick_tokens(
    logits, row_slot, slot_num_logprobs, chunk_value, chunk_token, raw_max, raw_sum,
    candidate_value, candidate_token, chosen, chosen_logprob, top_token, top_logprob,
    vocab_size, num_chunks, MAX_TOP: tl.constexpr,
    CHUNKS: tl.constexpr, CANDIDATES: tl.constexpr, TOPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (rows,). Writes every row's chosen token, -1 for padding, and for rows that report them the
    log-probabilities; places behind the tokens reported get -1 and -inf. CHUNKS, CANDIDATES and TOPS are
    num_chunks, num_chunks * MAX_TOP and MAX_TOP as powers of two."""
    wait_for_producers(PDL)
    start_dependents(PDL)
    row = tl.program_id(0)
    slot = tl.load(row_slot + row)
    if slot < 0:
        tl.store(chosen + row, -1)
        return

    chunk = tl.arange(0, CHUNKS)
    is_chunk = chunk < num_chunks
    cell = row * num_chunks + chunk
    values = tl.load(chunk_value + cell, mask=is_chunk, other=-float("inf"))
    _, token = arg_max(values, tl.load(chunk_token + cell, mask=is_chunk, other=LAST_ID))
    tl.store(chosen + row, token)
    num_top = tl.load(slot_num_logprobs + slot)
    if num_top < 0:
        return

    maxima = tl.load(raw_max + cell, mask=is_chunk, other=-float("inf"))
    sums = tl.load(raw_sum + cell, mask=is_chunk, other=0.0)
    largest = tl.max(maxima, axis=0)
    log_sum = tl.log(tl.sum(sums * tl.exp(maxima - largest), axis=0))
    chosen_logit = tl.load(logits + row.to(tl.int64) * vocab_size + token)
    tl.store(chosen_logprob + row, chosen_logit - largest - log_sum)

    place = tl.arange(0, CANDIDATES)
    is_candidate = (place < num_chunks * MAX_TOP) & (place % MAX_TOP < num_top)
    first = row * num_chunks * MAX_TOP
    values = tl.load(candidate_value + first + place, mask=is_candidate, other=float("nan"))
    token_ids = tl.load(candidate_token + first + place, mask=is_candidate, other=LAST_ID)
    rank = tl.arange(0, TOPS)
    tokens = tl.full((TOPS,), -1, tl.int32)
    logprobs = tl.full((TOPS,), -float("inf"), tl.float32)
    value, token = float("inf"), -1
    for index in range(0, tl.minimum(num_top, MAX_TOP)):
        value, token = _next(values, token_ids, value, token)
        is_place = (rank == index) & (token != LAST_ID)
        tokens = tl.where(is_place, token, tokens)
        logprobs = tl.where(is_place, value - largest - log_sum, logprobs)

    tl.store(top_token + row * MAX_TOP + rank, tokens, mask=rank < MAX_TOP)
    tl.store(top_logprob + row * MAX_TOP + rank, logprobs, mask=rank < MAX_TOP)
