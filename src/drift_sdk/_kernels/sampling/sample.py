"""Sampling in plain torch: filters, Gumbel-max, log-probabilities.

The eager executor samples with it, and it is the reference of `sampled_rows.sample_rows`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from drift_sdk._kernels.sampling.noise import gumbel_noise

__all__ = ["filter_logits", "sample", "top_logprobs"]


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    position: Tensor,
) -> Tensor:
    """One token id per row: int64 [M].

    logits [M, V] fp32; temperature, top_p, min_p [M] fp32; top_k, seed, position [M] int64, on one device.
    `position` is the absolute position of the token being chosen. Rows of temperature 0 take the arg max;
    the others the arg max of filtered logits / temperature + Gumbel noise, which samples the softmax. Ties
    go to the lowest id. A row's token depends only on that row.
    """
    tokens = logits.argmax(dim=-1)
    rows = (temperature > 0).nonzero().flatten()
    if rows.numel() == 0:
        return tokens

    # With the largest logit at zero, none overflows to infinity, at which several would tie, however low the
    # temperature.
    scaled = (logits[rows] - logits[rows].amax(dim=-1, keepdim=True)) / temperature[rows, None]
    kept = filter_logits(scaled, top_k[rows], top_p[rows], min_p[rows])
    noise = gumbel_noise(seed[rows], position[rows], logits.shape[-1])
    tokens[rows] = (kept + noise).argmax(dim=-1)
    return tokens


def filter_logits(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """logits [M, V] with -inf where top_k, then top_p, then min_p (each [M]) cut a token off.

    logits are scaled by the temperature already. Each filter is a threshold on the logit, so tokens that tie
    with the last one kept stay.
    """
    num_tokens = logits.shape[-1]
    needs_order = bool(((top_k > 0) & (top_k < num_tokens)).any() or (top_p < 1).any())
    if needs_order:
        ordered = logits.sort(dim=-1, descending=True).values
        last = torch.where(top_k > 0, top_k, num_tokens).clamp(max=num_tokens) - 1
        threshold = ordered.gather(-1, last[:, None])
        ordered = ordered.masked_fill(ordered < threshold, -torch.inf)
        probs = ordered.softmax(dim=-1)
        # A token stays while the probability of the tokens before it is under top_p; the first always does.
        before = probs.cumsum(dim=-1) - probs
        num_kept = ((before < top_p[:, None]) & (probs > 0)).sum(dim=-1).clamp(min=1)
        nucleus = ordered.gather(-1, num_kept[:, None] - 1)
        threshold = torch.where(top_p[:, None] < 1, torch.maximum(threshold, nucleus), threshold)
        logits = logits.masked_fill(logits < threshold, -torch.inf)

    if bool((min_p > 0).any()):
        floor = logits.max(dim=-1, keepdim=True).values + min_p[:, None].log()
        logits = logits.masked_fill(logits < floor, -torch.inf)

    return logits


def top_logprobs(logits: Tensor, tokens: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-softmax of raw logits [M, V] fp32 at tokens [M], and its `num_top` largest entries.

    Returns (token log-probability [M], top ids [M, num_top], top log-probabilities [M, num_top]).
    """
    logprobs = logits.log_softmax(dim=-1)
    top = logprobs.topk(min(num_top, logits.shape[-1]), dim=-1)
    return logprobs.gather(-1, tokens[:, None]).squeeze(-1), top.indices, top.values
