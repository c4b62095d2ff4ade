"""The hidden states of prompts that requests ask for, gathered from the chunks of either executor.

The mean of a prompt's states does not depend on how the prompt is divided into chunks: it is a sum of
integers, which has the same value in any order.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from drift_sdk.results import PromptStates, StateKind

STATE_ROWS = 256
"""Most rows that are normalised at a time: all rows of a long prompt would take much memory."""
FIXED_POINT = 2.0**30
"""Numbers of the mean are multiples of its inverse: 5e-10 is the largest error. The sum of a million numbers
below 8,192 fits into 63 bits, and after the final norm they are far below that."""


class StateGatherer:
    """Gathers the hidden states of one prompt, chunk by chunk.

    Sums and copies are queued on the device. `result` is valid when what `add` has queued has ended.
    """

    def __init__(self, kind: StateKind) -> None:
        self._kind = kind
        self._sum: Tensor | None = None
        self._zero: Tensor | None = None  # NaN if a number is not finite, which integers cannot tell
        self._num_rows = 0
        self._parts: list[Tensor] = []  # on the host

    def add(self, hidden: Tensor, normalise: Callable[[Tensor], Tensor], *, is_last: bool) -> None:
        """Add the rows of a chunk.

        hidden [N, H]: the residual stream after the last layer. normalise: the final norm, for at most
        STATE_ROWS rows. is_last: the chunk ends the prompt.
        """
        if self._kind == "last":
            if is_last:
                self._keep(normalise(hidden[-1:]))
            return

        for rows in hidden.split(STATE_ROWS):
            normed = normalise(rows)
            if self._kind == "all":
                self._keep(normed)
                continue

            wide = normed.to(torch.float64)
            part = (wide * FIXED_POINT).round_().to(torch.int64).sum(dim=0, keepdim=True)
            zero = wide.sum() * 0.0
            self._sum = part if self._sum is None else self._sum + part
            self._zero = zero if self._zero is None else self._zero + zero
            self._num_rows += len(rows)
        if is_last and self._sum is not None and self._zero is not None:
            self._keep(self._sum.to(torch.float64) / (FIXED_POINT * self._num_rows) + self._zero)

    def result(self) -> PromptStates:
        """The states; call it once, when the step of the last chunk has ended."""
        rows = torch.cat(self._parts).to(torch.float32).contiguous()
        return PromptStates(num_rows=len(rows), size=rows.shape[1], data=rows.numpy().tobytes())

    def _keep(self, rows: Tensor) -> None:
        """Start to copy rows to the host."""
        host = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=rows.is_cuda)
        host.copy_(rows, non_blocking=True)
        self._parts.append(host)
