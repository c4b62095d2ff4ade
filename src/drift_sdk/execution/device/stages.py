"""Seams of a step for measurements: marks around stages, and a replacement of the acceptance of drafts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from drift_sdk._kernels.commit import CommitTensors
    from drift_sdk.execution.device.device import Device, Replay

NO_MARK = nullcontext()


def forward_stage(num_draft_tokens: int) -> str:
    """The name of the stage in which the target computes a round's rows."""
    return "verify" if num_draft_tokens > 0 else "base_decode"


class StageMarks(Protocol):
    """Used as `with stages("verify"):` around the kernels of a stage, or around the launch of a replay."""

    def __call__(self, name: str) -> AbstractContextManager[None]: ...

    def capture(self, device: Device, step: Callable[[], None]) -> Replay:
        """Capture a step by `device.capture`, with its marks."""


class NoStageMarks:
    """Marks nothing."""

    def __call__(self, name: str) -> AbstractContextManager[None]:
        return NO_MARK

    def capture(self, device: Device, step: Callable[[], None]) -> Replay:
        return device.capture(step)


NO_STAGE_MARKS = NoStageMarks()


class NvtxStageMarks(NoStageMarks):
    """Profiler ranges: around each stage while steps are warmed up and captured, and while serving around the
    launches of prefill steps and rounds."""

    def __call__(self, name: str) -> AbstractContextManager[None]:
        import torch  # here, since `drift_sdk.measurement` is imported without it

        nvtx: Any = torch.cuda.nvtx
        return nvtx.range(name)  # type: ignore[no-any-return]  # a context manager without annotations


class WatchedReplay:
    """A replay that calls `on_launch` before each launch."""

    def __init__(self, replay: Replay, on_launch: Callable[[], None]) -> None:
        self._replay, self._on_launch = replay, on_launch

    def launch(self) -> None:
        self._on_launch()
        self._replay.launch()

    def close(self) -> None:
        self._replay.close()


class Acceptance(Protocol):
    """Decides how many drafts of a round are accepted, on the device. Its launches are captured."""

    def commit(self, tensors: CommitTensors, /) -> None:
        """Commit rows of chains; launched in place of `commit`."""

    def choose(
        self, row_slot: Tensor, row_parent: Tensor, row_token: Tensor, chosen: Tensor, *, nodes_per_tree: int
    ) -> None:
        """Overwrite what was chosen behind the nodes of trees; launched before `tree_accept`."""


AcceptanceFactory = Callable[[int, "torch.device"], Acceptance]
"""Makes the acceptance of a GPU, from the number of slots and the device."""
