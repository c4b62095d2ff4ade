"""Engines for measurements: recorded rounds, and profiles.

How many tokens the rounds of speculative decoding emit is recorded and saved:

    engine = recorded_engine(folder, config)
    ...
    engine.rounds.trace().save("trace.json")
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import msgspec

from drift_sdk.config import EngineConfig
from drift_sdk.driver.model_opener import LoadedModel, with_limits
from drift_sdk.engine import Engine
from drift_sdk.errors import ConfigError
from drift_sdk.execution.acceptance import AcceptanceFactory
from drift_sdk.profiling.acceptance_trace import AcceptanceTrace
from drift_sdk.profiling.recording_executor import RecordedRounds, RecordingExecutor
from drift_sdk.progress import Report
from drift_sdk.steps import ExecutorLimits

__all__ = [
    "AcceptanceTrace",
    "RecordedEngine",
    "RecordedRounds",
    "profiled_engine",
    "recorded_engine",
]


def recorded_engine(model: str | Path, config: EngineConfig) -> RecordedEngine:
    """An engine, of any executor, that records how many tokens each round emits, in its `rounds`."""
    return RecordedEngine(model, config)


def profiled_engine(model: str | Path, config: EngineConfig) -> RecordedEngine:
    """An engine whose steps are marked by NVTX ranges, for profilers.

    The launch of each step is a range "prefill", "base_decode" or "verify". While graphs are captured, the
    kernels of each stage are launched in a range of the stage's name:

    - "base_decode", or "verify" where tokens were drafted: the model's own pass over all rows;
    - "accept": the tokens chosen behind the rows; and "commit";
    - of an EAGLE-3 draft, "draft_lm_head", "draft_attention" and "draft_mlp"; and "draft_extend", the draft's
      pass over the tokens that were right. Of a small model, "draft_model" in place of the two of the layers.

    config: with executor="graph". Raises ConfigError for another executor.
    """
    check_graphs(config, "to have its stages marked")
    return RecordedEngine(model, config, is_profiled=True)


def check_graphs(config: EngineConfig, purpose: str) -> None:
    if config.executor != "graph":
        raise ConfigError.of("executor", config.executor, f'"graph" {purpose}')


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
        self.rounds: RecordedRounds = RecordedRounds()
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
