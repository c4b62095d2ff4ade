"""What a measurement may have in place of the acceptance of drafts: a seam of the graph executor."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from drift_sdk._kernels.sampling.rows import SampleBuffers
    from drift_sdk._kernels.slots.slot_columns import SlotColumns, SlotState


class Acceptance(Protocol):
    """Decides how many drafts of a round are accepted, on the device. Its launches are captured."""

    def commit(
        self,
        row_slot: Tensor,
        row_token: Tensor,
        buffers: SampleBuffers,
        state: SlotState,
        slots: SlotColumns,
        emitted: Tensor,
        output_ring: Tensor,
        current_entry: Tensor,
        next_entry: Tensor,
        /,
        *,
        rows_per_slot: int,
        is_ngram: Tensor | None = None,
    ) -> None:
        """Commit rows of chains; launched in place of `commit`."""

    def choose(
        self, row_slot: Tensor, row_parent: Tensor, row_token: Tensor, chosen: Tensor, *, nodes_per_tree: int
    ) -> None:
        """Overwrite what was chosen behind the nodes of trees; launched before `tree_accept`."""


AcceptanceFactory = Callable[[int, "torch.device"], Acceptance]
"""Makes the acceptance of a GPU, from the number of slots and the device."""
