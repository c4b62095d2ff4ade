"""Sampling of tokens from logits, with separate parameters for each row."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from drift_sdk._kernels.sampling.sample import sample, top_logprobs
from drift_sdk.results import TokenLogprobs
from drift_sdk.steps import SlotSampling

__all__ = ["choose", "token_logprobs"]


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
