"""Settings of a graph executor, and what is called while it starts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from msgspec import Struct

from drift_sdk.execution.acceptance import AcceptanceFactory
from drift_sdk.execution.stages import NO_STAGE_MARKS, StageMarks
from drift_sdk.partial_verification import ViewLayout
from drift_sdk.progress import Report, ignore_progress

__all__ = ["NO_HOOKS", "FitBlocks", "GraphOptions", "StartupHooks"]

FitBlocks = Callable[[int], int]
"""Takes the number of graphs to be captured and returns how many KV blocks there is room for beside them.
Called once everything else has its memory."""


class GraphOptions(Struct, frozen=True, kw_only=True):
    """Settings of a graph executor.

    prefill_token_budget: most tokens of a prefill step.
    fast_prompts:         prompts are computed in the fastest orders of summation instead of decoding's.
    step_timeout_s:       most seconds that the device may take for a step; None = no limit.
    acceptance:           for measuring: makes what accepts drafts in place of their comparison.
    stages:               for measuring: marks around the stages of steps.
    has_checks:           rounds of speculation are checked.
    view_layout:          of partial verification; None without it.
    num_checkpoints:      places for checkpoints of recurrent layers.
    shape_log:            file to which the products that ran are added when the executor is closed.
    """

    prefill_token_budget: int
    fast_prompts: bool = False
    step_timeout_s: float | None = None
    acceptance: AcceptanceFactory | None = None
    stages: StageMarks = NO_STAGE_MARKS
    has_checks: bool = False
    view_layout: ViewLayout | None = None
    num_checkpoints: int = 0
    shape_log: Path | None = None


class StartupHooks(Struct, frozen=True, kw_only=True):
    """Called while an executor starts.

    fit_blocks: how many KV blocks there is room for; None = limits.num_blocks. report: progress.
    """

    fit_blocks: FitBlocks | None = None
    report: Report = ignore_progress


NO_HOOKS = StartupHooks()
