"""Sampling of tokens from logits, with separate parameters for each row."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from drift_sdk._kernels.sampling.torch_reference import filter_logits, gumbel_noise, sample, top_logprobs
from drift_sdk.results import TokenLogprobs
from drift_sdk.steps import SlotSampling

__all__ = ["choose", "rank", "token_logprobs"]

CUT_OFF = 1e6
"""Subtracted from the scores of tokens that filters cut off, so that they rank after the others."""


def choose(logits: Tensor, samplings: Sequence[SlotSampling], positions: Sequence[int]) -> Tensor:
    """Sample a token from each row of logits [M, V] fp32.

    positions: of the tokens in their sequences, from 0; part of the key of the random numbers.

    Returns [M] int64.
    """

    def column(values: Sequence[float] | Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=logits.device)

    return sample(
        logits,
        temperature=column([sampling.temperature for sampling in samplings], torch.float32),
        top_k=column([sampling.top_k for sampling in samplings], torch.int64),
        top_p=column([sampling.top_p for sampling in samplings], torch.float32),
        min_p=column([sampling.min_p for sampling in samplings], torch.float32),
        seed=column([sampling.seed for sampling in samplings], torch.int64),
        position=column(positions, torch.int64),
    )


def rank(
    logits: Tensor, samplings: Sequence[SlotSampling], positions: Sequence[int], num_candidates: int
) -> tuple[list[list[int]], list[list[float]]]:
    """The tokens that `choose` is most likely to choose from logits like these [M, V] fp32.

    Returns, for each row, `num_candidates` different ids, best first, and the logarithms of their
    probabilities. The first is the token that `choose` chooses. Scores are logits / temperature + noise, so
    the order is that of the noise that the target will choose by.
    """

    def column(values: Sequence[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=logits.device)

    temperature = column([each.temperature for each in samplings], torch.float32)
    rows = (temperature > 0).nonzero().flatten().tolist()
    scores = logits
    if rows:
        sampled = [samplings[row] for row in rows]
        scaled = (logits[rows] - logits[rows].amax(dim=-1, keepdim=True)) / temperature[rows, None]
        kept = filter_logits(
            scaled,
            column([each.top_k for each in sampled], torch.int64),
            column([each.top_p for each in sampled], torch.float32),
            column([each.min_p for each in sampled], torch.float32),
        )
        seeds = column([each.seed for each in sampled], torch.int64)
        noise = gumbel_noise(seeds, column([positions[row] for row in rows], torch.int64), logits.shape[-1])
        is_cut_off = (kept == -torch.inf) & (scaled > -torch.inf)
        noisy = scaled + noise - CUT_OFF * is_cut_off.to(torch.float32)
        scores = logits.index_copy(0, column(rows, torch.int64), noisy)

    top = scores.log_softmax(dim=-1).topk(num_candidates, dim=-1)
    return top.indices.tolist(), top.values.tolist()


def token_logprobs(
    logits: Tensor, tokens: Tensor, wanted: Sequence[int | None]
) -> list[TokenLogprobs | None]:
    """The log-probabilities of tokens [M] under logits [M, V], and of the most likely tokens.

    wanted: for each row the number of most likely tokens; None = no entry, returned as None.
    """
    rows = [row for row, num_top in enumerate(wanted) if num_top is not None]
    entries: list[TokenLogprobs | None] = [None] * len(wanted)
    if not rows:
        return entries

    most = max(num_top for num_top in wanted if num_top is not None)
    chosen, top_ids, top_values = top_logprobs(logits[rows], tokens[rows], most)
    for row, token, logprob, ids, values in zip(
        rows, tokens[rows].tolist(), chosen.tolist(), top_ids.tolist(), top_values.tolist(), strict=True
    ):
        num_top = wanted[row]
        top = tuple(zip(ids[:num_top], values[:num_top], strict=True))
        entries[row] = TokenLogprobs(token_id=token, logprob=logprob, top=top)

    return entries
