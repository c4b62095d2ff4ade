"""References of the kernels of `drift_sdk._kernels.exchange`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from drift_sdk._kernels.layers.norm import NormKind
from references.layers import add_norm_reference


def add_norm_across_reference(
    hidden: Tensor,
    deltas: list[Tensor],
    weight: Tensor,
    *,
    eps: float,
    bias: Tensor | None = None,
    delta_norm: Tensor | None = None,
    delta_eps: float | None = None,
    delta_multiplier: float = 1.0,
    norm_kind: NormKind = "rounded",
) -> tuple[Tensor, Tensor]:
    """Return (hidden, normed) as `add_norm_across` writes them on every rank, in new tensors.

    deltas: the partial sums [num_slices, R, H] of all ranks.
    """
    return add_norm_reference(
        hidden,
        torch.cat(deltas),
        weight,
        eps=eps,
        bias=bias,
        delta_norm=delta_norm,
        delta_eps=delta_eps,
        delta_multiplier=delta_multiplier,
        norm_kind=norm_kind,
    )


def gather_logits_reference(parts: list[Tensor]) -> Tensor:
    """Return the parts [R, N] of all ranks side by side."""
    return torch.cat(parts, dim=1)


def share_drafts_reference(columns_of_ranks: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Return the columns that every rank has afterwards."""
    return [column.clone() for column in columns_of_ranks[0]]
