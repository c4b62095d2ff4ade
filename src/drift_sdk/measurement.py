"""Speculative decoding at any acceptance, to measure what it costs; which acceptance there was; and where the
time of a round goes.

    engine = simulated_engine(folder, config, acceptance=3.2)

    engine = recorded_engine(folder, config)
    ...
    engine.rounds.trace().save("trace.json")
    again = simulated_engine(folder, config, acceptance=AcceptanceTrace.load("trace.json").lengths)

How fast an engine speculates hangs on how many of its drafts are right, of which random weights say nothing.

    times = stage_times(folder, config, batch=1, context=512, num_draft_tokens=3, acceptance=3.2)
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import msgspec

from drift_sdk._validation import check_int
from drift_sdk.config import EngineConfig
from drift_sdk.driver.loaded_model import LoadedModel, with_limits
from drift_sdk.engine import Engine
from drift_sdk.errors import ConfigError
from drift_sdk.profiling.acceptance_trace import AcceptanceTrace
from drift_sdk.profiling.manual_driver import ManualDriver
from drift_sdk.profiling.recording_executor import RecordedRounds, RecordingExecutor
from drift_sdk.profiling.stage_timing import StageTiming, time_stages
from drift_sdk.steps import Executor, ExecutorLimits

__all__ = [
    "AcceptanceTrace",
    "RecordedEngine",
    "RecordedRounds",
    "StageTiming",
    "profiled_engine",
    "recorded_engine",
    "simulated_engine",
    "stage_times",
    "staged_executor",
]

log = logging.getLogger("drift_sdk")


def recorded_engine(model: str | Path, config: EngineConfig) -> RecordedEngine:
    """An engine like any other, of any executor, that notes how many tokens each round emitted: see its
    `rounds`."""
    return RecordedEngine(model, config)


def profiled_engine(model: str | Path, config: EngineConfig) -> RecordedEngine:
    """An engine whose steps a profiler finds in NVTX ranges: the launch of each in "prefill", "base_decode"
    or "verify", and, while graphs are captured, what each stage starts (see `stage_times`).

    config: with executor="graph". Raises ConfigError.
    """
    check_graphs(config, "to have its stages marked")
    return RecordedEngine(model, config, is_profiled=True)


def check_graphs(config: EngineConfig, purpose: str) -> None:
    if config.executor != "graph":
        raise ConfigError.of("executor", config.executor, f'"graph" {purpose}')


def simulated_engine(
    model: str | Path, config: EngineConfig, *, acceptance: float | Sequence[int]
) -> RecordedEngine:
    """An engine for measuring alone: WHAT IT GENERATES IS NOT THE MODEL'S.

    Drafts are made and verified as ever, but not compared: as many are taken for right as make rounds of
    `acceptance` tokens, the model's own included. A sequence gives the tokens of each round in turn, over and
    over, as `recorded_engine` noted them. A number is their mean, with the least variance (3.2: three tokens,
    or four in one round of five), from 1 to the shape's num_draft_tokens + 1. Each slot starts elsewhere in
    them. A round with fewer drafts than that, by the policy's choice or for want of a proposal, takes all it
    has; one that is not to draft does not count.

    config: with speculation and executor="graph", whose rounds alone can be simulated. Raises ConfigError.
    """
    trace = simulated_trace(config, acceptance)
    return RecordedEngine(model, config, trace)


def simulated_trace(config: EngineConfig, acceptance: float | Sequence[int]) -> AcceptanceTrace:
    trace = AcceptanceTrace.of(acceptance)
    check_graphs(config, "to simulate acceptance")
    if config.speculation is None:
        raise ConfigError.of("speculation", None, "a Speculation whose acceptance to simulate")

    most = config.speculation.shape.num_draft_tokens + 1
    if not isinstance(acceptance, Sequence) and acceptance > most:
        raise ConfigError.of("acceptance", acceptance, f"at most {most}, the tokens of a round")

    log.warning(
        "acceptance is simulated at %g tokens a round: what this engine generates is not the model's",
        trace.mean,
    )
    return trace


def stage_times(
    model: str | Path,
    config: EngineConfig,
    *,
    batch: int,
    context: int,
    num_draft_tokens: int = 0,
    acceptance: float | Sequence[int] | None = None,
    num_rounds: int = 64,
) -> StageTiming:
    """Open a model on a GPU, without an engine, and time the stages of its rounds; on the calling thread.

    `batch` sequences of `context` random tokens each, rounds one at a time. Stages: "base_decode", or
    "verify" where tokens were drafted: the model's own pass over all rows; "accept": the tokens chosen behind
    them; "commit"; and of an EAGLE-3 draft "draft_lm_head", "draft_attention" and "draft_mlp", all steps
    together, and "draft_extend", what it takes in of the tokens that were right. Marks between them cost a
    few microseconds each.

    config: with room for the sequences, and a Speculation of num_draft_tokens if that is not 0.
    acceptance: as of `simulated_engine`; None: the drafts' own. Raises ConfigError.
    """
    most = config.speculation.shape.num_draft_tokens if config.speculation is not None else 0
    check_int(ConfigError, "num_draft_tokens", num_draft_tokens, ge=0, le=most)
    with staged_executor(model, config, acceptance) as (executor, take_stages):
        slots = ManualDriver(executor, prefill_token_budget=config.prefill_token_budget)
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
    model: str | Path, config: EngineConfig, acceptance: float | Sequence[int] | None = None
) -> Iterator[tuple[Executor, Callable[[], dict[str, float]]]]:
    """An executor of graphs with marks in them, and what gives the seconds of each stage since its last
    call."""
    from drift_sdk.execution.stages import TimedStageMarks
    from drift_sdk.startup.model_startup import open_model

    config = config.replace(executor="graph")
    lengths = simulated_trace(config, acceptance).lengths if acceptance is not None else None
    stages = TimedStageMarks()
    opened = open_model(model, config, lambda stage, fraction: None, acceptance_trace=lengths, stages=stages)
    try:
        yield opened.executor, stages.take
    finally:
        opened.executor.close()


class RecordedEngine(Engine):
    """An `Engine` that writes down its rounds: `rounds`, complete once the engine is paused or closed."""

    def __init__(
        self,
        model: str | Path,
        config: EngineConfig,
        acceptance: AcceptanceTrace | None = None,
        *,
        is_profiled: bool = False,
    ) -> None:
        self.rounds = RecordedRounds()
        open_model = partial(open_recorded, model, config, acceptance, is_profiled, self.rounds)
        super().__init__(model, config, open_model=open_model)


def open_recorded(
    model: str | Path,
    config: EngineConfig,
    acceptance: AcceptanceTrace | None,
    is_profiled: bool,
    rounds: RecordedRounds,
    report: Callable[[str, float], None],
    limits: ExecutorLimits | None = None,
) -> LoadedModel:
    # Imported here, on the engine's thread, for it loads torch.
    from drift_sdk.execution.stages import NvtxStageMarks
    from drift_sdk.startup.model_startup import open_model

    lengths = acceptance.lengths if acceptance is not None else None
    stages = NvtxStageMarks() if is_profiled else None
    config = with_limits(config, limits)
    opened = open_model(model, config, report, acceptance_trace=lengths, stages=stages)
    return msgspec.structs.replace(opened, executor=RecordingExecutor(opened.executor, rounds))
