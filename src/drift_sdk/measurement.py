"""Engines for measurements: recorded rounds, profiles, and times of a round's stages.

    engine = recorded_engine(folder, config)
    ...
    engine.rounds.trace().save("trace.json")

The stages of a round are timed without an engine:

    times = stage_times(folder, config, batch=1, context=512, num_draft_tokens=3)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import msgspec

from drift_sdk._validation import check_int
from drift_sdk.config import EngineConfig, prefill_token_budget
from drift_sdk.driver.loaded_model import LoadedModel, with_limits
from drift_sdk.engine import Engine
from drift_sdk.errors import ConfigError
from drift_sdk.execution.acceptance import AcceptanceFactory
from drift_sdk.profiling.acceptance_trace import AcceptanceTrace
from drift_sdk.profiling.manual_driver import ManualDriver
from drift_sdk.profiling.recording_executor import RecordedRounds, RecordingExecutor
from drift_sdk.profiling.stage_timing import StageTiming, time_stages
from drift_sdk.progress import Report, ignore_progress
from drift_sdk.steps import Executor, ExecutorLimits

__all__ = [
    "AcceptanceTrace",
    "RecordedEngine",
    "RecordedRounds",
    "StageTiming",
    "profiled_engine",
    "recorded_engine",
    "stage_times",
    "staged_executor",
]


def recorded_engine(model: str | Path, config: EngineConfig) -> RecordedEngine:
    """An engine, of any executor, that records how many tokens each round emits, in its `rounds`."""
    return RecordedEngine(model, config)


def profiled_engine(model: str | Path, config: EngineConfig) -> RecordedEngine:
    """An engine whose steps are marked by NVTX ranges, for profilers.

    The launch of each step is a range "prefill", "base_decode" or "verify". While graphs are captured, the
    kernels of each stage are launched in a range of the stage's name (see `stage_times`).

    config: with executor="graph". Raises ConfigError for another executor.
    """
    check_graphs(config, "to have its stages marked")
    return RecordedEngine(model, config, is_profiled=True)


def check_graphs(config: EngineConfig, purpose: str) -> None:
    if config.executor != "graph":
        raise ConfigError.of("executor", config.executor, f'"graph" {purpose}')


def stage_times(
    model: str | Path,
    config: EngineConfig,
    *,
    batch: int,
    context: int,
    num_draft_tokens: int = 0,
    acceptance: AcceptanceFactory | None = None,
    num_rounds: int = 64,
) -> StageTiming:
    """Load a model on a GPU, without an engine, and time the stages of its rounds; on the calling thread.

    There are `batch` sequences with prompts of `context` random tokens, and `num_rounds` rounds are timed,
    one at a time. The stages are

    - "base_decode", or "verify" where tokens were drafted: the model's own pass over all rows;
    - "accept": the tokens chosen behind the rows; and "commit";
    - of an EAGLE-3 draft, "draft_lm_head", "draft_attention" and "draft_mlp", each summed over the drafted
      tokens; and "draft_extend", the draft's pass over the tokens that were right. Of a small model,
      "draft_model" in place of the two of the layers.

    The marks between stages take a few microseconds each.

    config: with room for the sequences, and with a Speculation of at least num_draft_tokens unless that is 0.
    acceptance: accepts drafts in place of their comparison. Raises ConfigError.
    """
    most = config.speculation.shape.num_draft_tokens if config.speculation is not None else 0
    check_int(ConfigError, "num_draft_tokens", num_draft_tokens, ge=0, le=most)
    with staged_executor(model, config, acceptance) as (executor, take_stages):
        slots = ManualDriver(executor, prefill_token_budget=prefill_token_budget(config, "cuda"))
        return time_stages(
            slots,
            take_stages,
            batch=batch,
            context=context,
            num_draft_tokens=num_draft_tokens,
            num_rounds=num_rounds,
        )


@contextmanager
def staged_executor(
    model: str | Path, config: EngineConfig, acceptance: AcceptanceFactory | None = None
) -> Iterator[tuple[Executor, Callable[[], dict[str, float]]]]:
    """An executor of CUDA graphs with marks between stages, and a function that returns the seconds of each
    stage in the steps since its last call. The executor is closed at the end of the block.

    model, config, acceptance: as for `stage_times`. Raises ConfigError.
    """
    from drift_sdk.execution.stages import TimedStageMarks
    from drift_sdk.startup.model_startup import open_model

    config = config.replace(executor="graph")
    stages = TimedStageMarks()
    opened = open_model(model, config, ignore_progress, acceptance=acceptance, stages=stages)
    try:
        yield opened.executor, stages.take
    finally:
        opened.executor.close()


class RecordedEngine(Engine):
    """An `Engine` that records its rounds in `rounds`, which are complete once it is paused or closed."""

    def __init__(
        self,
        model: str | Path,
        config: EngineConfig,
        acceptance: AcceptanceFactory | None = None,
        *,
        is_profiled: bool = False,
    ) -> None:
        self.rounds = RecordedRounds()
        open_model = partial(open_recorded, model, config, acceptance, is_profiled, self.rounds)
        super().__init__(model, config, open_model=open_model)


def open_recorded(
    model: str | Path,
    config: EngineConfig,
    acceptance: AcceptanceFactory | None,
    is_profiled: bool,
    rounds: RecordedRounds,
    report: Report,
    limits: ExecutorLimits | None = None,
) -> LoadedModel:
    # Imported here, on the engine's thread, because it loads torch.
    from drift_sdk.execution.stages import NvtxStageMarks
    from drift_sdk.startup.model_startup import open_model

    stages = NvtxStageMarks() if is_profiled else None
    config = with_limits(config, limits)
    opened = open_model(model, config, report, acceptance=acceptance, stages=stages)
    return msgspec.structs.replace(opened, executor=RecordingExecutor(opened.executor, rounds))
