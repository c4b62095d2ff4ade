"""What drafts tokens inside the graphs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from drift_sdk.execution.forward.decode import Rows

__all__ = ["RoundDrafter"]


class RoundDrafter(Protocol):
    """Every method records kernels that take all they need from the device.

    A round of B slots with K drafts each has T = K + 1 rows a slot: row b * T its newest token, the others
    the drafts behind it, slot -1 where there is no use for one. `aux_layers`: the target's layer boundaries
    whose residual stream is wanted.
    """

    aux_layers: Sequence[int]

    def propose(self, rows: Rows, *, num_slots: int, num_draft_tokens: int) -> None:
        """Write drafted tokens to rows.token [B * T]; a row without one loses its slot."""

    def draft_extend(
        self,
        rows: Rows,
        *,
        num_slots: int,
        num_draft_tokens: int,
        aux_hidden: Sequence[Tensor],
        hidden: Tensor,
        chosen: Tensor,
        emitted: Tensor,
    ) -> None:
        """The target has computed these rows: `aux_hidden` [B * T, H] at each boundary and `hidden` after the
        last layer. chosen [B * T] int32 is behind them, of which the first emitted [B] int32 of each slot
        were emitted."""

    def follow_prefill(
        self,
        rows: Rows,
        *,
        next_token: Tensor,
        hits: Tensor,
        last_token: Tensor,
        aux_hidden: Sequence[Tensor],
        hidden: Tensor,
    ) -> None:
        """The target has computed the rows [N] of chunks. next_token [N] int32: what follows each, -1 for
        the slot's last_token [S]. hits [C] int32: first row of each chunk behind a prefix hit; -1: none."""
