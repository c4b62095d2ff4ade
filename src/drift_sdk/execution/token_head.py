"""From the last layer to the next token: logits, sampling, and what becomes of the slots."""

from __future__ import annotations

import torch
from torch import Tensor

from drift_sdk._kernels.commit import commit
from drift_sdk._kernels.gemm import multiply
from drift_sdk._kernels.sampled_rows import SampleBuffers, sample_rows
from drift_sdk._kernels.staging import copy_masks
from drift_sdk._kernels.tuning import UNTUNED, TunedTable
from drift_sdk.execution.decode_forward import Rows
from drift_sdk.execution.ring import Ring
from drift_sdk.execution.slot_table import SlotTable
from drift_sdk.execution.workspace import Workspace

__all__ = ["TokenHead"]


class TokenHead:
    """Chooses a token behind each row and commits it: `rows_per_slot` rows of each slot at a time.

    `emitted` [B] int32: how many tokens each slot got.
    """

    def __init__(
        self,
        head: Tensor,
        rows: Rows,
        table: SlotTable,
        ring: Ring,
        buffers: SampleBuffers,
        workspace: Workspace,
        tuned: TunedTable,
        *,
        rows_per_slot: int,
        simulated_length: float | None,
    ) -> None:
        num_rows, vocab_size = rows.slot.shape[0], head.shape[0]
        self._head, self._rows, self._table, self._ring = head, rows, table, ring
        self._buffers, self._rows_per_slot = buffers, rows_per_slot
        self._simulated_length = simulated_length
        self._logits = workspace.take("logits", (2, num_rows, vocab_size), torch.float32)
        self.emitted = workspace.take("emitted", (num_rows // rows_per_slot,), torch.int32)
        num_words = table.columns.stop_bits.shape[1]
        self._masks = workspace.take("masks", (num_rows, num_words), torch.int32)
        # Logits are wanted whole, not in partial sums.
        gemm = tuned.gemm(*head.shape).config(num_rows)
        self._gemm = gemm if gemm.num_partials == 1 else UNTUNED.config(num_rows)

    def run(self, normed: Tensor) -> None:
        """normed [R, H]: the normalised residual stream after the last layer."""
        rows, columns, ring = self._rows, self._table.columns, self._ring
        multiply(normed, self._head, self._logits[:1], self._gemm)
        copy_masks(
            rows.slot, columns.flags, ring.masks, ring.current, self._masks, rows_per_slot=self._rows_per_slot
        )
        sample_rows(
            self._logits,
            rows.slot,
            rows.position,
            rows.token,
            columns,
            self._masks,
            self._buffers,
            rows_per_slot=self._rows_per_slot,
        )
        commit(
            rows.slot,
            rows.token,
            self._buffers,
            self._table.state,
            columns,
            self.emitted,
            ring.output,
            ring.current,
            ring.counter,
            rows_per_slot=self._rows_per_slot,
            simulated_length=self._simulated_length,
        )
