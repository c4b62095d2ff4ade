"""A planted fault: inputs of rejected rows stay in the states of recurrent layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from drift_sdk.execution.forward import gated_delta

__all__ = ["keep_rejected_inputs"]


def keep_rejected_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """In rounds with drafts, the first row of a slot does not replace what the ring of the convolution's
    inputs has in its place: the input of the row that was rejected there. Rounds without drafts are right."""
    mix_rows = gated_delta.mix_rows

    def mix_and_keep(
        spec: Any,
        product: Tensor,
        weight: Tensor,
        slot: Tensor,
        position: Tensor,
        ring: Tensor,
        *rest: Any,
        is_kept: bool,
    ) -> None:
        before = ring.nan_to_num(0.0, 0.0, 0.0).clamp(-8.0, 8.0)  # a place may not be initialised
        mix_rows(spec, product, weight, slot, position, ring, *rest, is_kept=is_kept)
        if is_kept:
            no_row = torch.full_like(slot[:1], -1)
            is_first = slot != torch.cat([no_row, slot[:-1]])
            is_drafted = slot == torch.cat([slot[1:], no_row])
            num_slots, num_places, _ = ring.shape
            place = torch.where(is_first & is_drafted & (slot >= 0), slot, num_slots)
            stays = torch.zeros(num_slots + 1, num_places, dtype=torch.bool, device=ring.device)
            stays[place.long(), position.long() % num_places] = torch.ones_like(stays[0, 0])
            ring.copy_(torch.where(stays[:num_slots, :, None], before, ring))

    monkeypatch.setattr(gated_delta, "mix_rows", mix_and_keep)
