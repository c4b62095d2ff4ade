"""The operations that change logits before a token is chosen: biases, penalties for tokens seen before,
masks.

In plain torch: the eager executor applies them, and they are the reference of `apply_logits_rules`. Each
works on the rows it is given and does not change its arguments (`count_tokens` excepted). A row's result
depends only on that row.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = [
    "add_bias",
    "count_tokens",
    "mask_logits",
    "penalise_counts",
    "penalise_repetition",
    "select_tokens",
    "unpack_mask",
]


def add_bias(logits: Tensor, rows: Tensor, token_ids: Tensor, bias: Tensor) -> Tensor:
    """logits [M, V] fp32 with bias [N] fp32 added at (rows [N], token_ids [N]), both int64."""
    return logits.index_put((rows, token_ids), bias, accumulate=True)


def count_tokens(counts: Tensor, token_ids: Tensor) -> None:
    """Count each of token_ids [N] int64, which may repeat, in counts [V] int32, in place."""
    counts.index_add_(0, token_ids, torch.ones_like(token_ids, dtype=counts.dtype))


def penalise_repetition(logits: Tensor, is_seen: Tensor, penalty: Tensor) -> Tensor:
    """logits [M, V] fp32 divided by penalty [M] fp32 where is_seen [M, V] bool; multiplied where negative.

    Keskar et al. 2019, "CTRL", with the case of the sign as in transformers.
    """
    penalised = torch.where(logits < 0, logits * penalty[:, None], logits / penalty[:, None])
    return torch.where(is_seen, penalised, logits)


def penalise_counts(
    logits: Tensor, counts: Tensor, frequency_penalty: Tensor, presence_penalty: Tensor
) -> Tensor:
    """logits [M, V] fp32 minus frequency_penalty [M] times counts [M, V] int32, then minus
    presence_penalty [M] where the count is not 0. The formula of OpenAI's API."""
    logits = logits - frequency_penalty[:, None] * counts
    return logits - presence_penalty[:, None] * (counts > 0)


def select_tokens(num_rows: int, vocab_size: int, rows: Tensor, token_ids: Tensor) -> Tensor:
    """Bool [num_rows, vocab_size], true at (rows [N], token_ids [N]), both int64."""
    selected = torch.zeros(num_rows, vocab_size, dtype=torch.bool, device=rows.device)
    selected[rows, token_ids] = True
    return selected


def unpack_mask(words: Tensor, vocab_size: int) -> Tensor:
    """Bool [M, vocab_size] of words [M, ceil(vocab_size / 32)] int32: bit i % 32 of word i // 32 is i's."""
    # An arithmetic shift of a negative word fills it with ones from the left; only the lowest bit is kept.
    bits = (words[:, :, None] >> torch.arange(32, dtype=torch.int32, device=words.device)) & 1
    return bits.flatten(1)[:, :vocab_size].to(torch.bool)


def mask_logits(logits: Tensor, is_kept: Tensor, is_kept_at_least: Tensor) -> Tensor:
    """logits [M, V] with -inf where not is_kept [M, V] bool. In rows where is_kept holds for no token,
    is_kept_at_least [M, V] bool takes its place."""
    is_kept = torch.where(is_kept.any(dim=-1, keepdim=True), is_kept, is_kept_at_least)
    return logits.masked_fill(~is_kept, -torch.inf)
