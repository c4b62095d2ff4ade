"""Engines for measurements: simulated acceptance, recorded rounds, profiles, and times of a round's stages.

The speed of speculative decoding depends on how many drafts are right, which random weights tell nothing
about. So acceptance can be simulated, by a mean or by a recorded trace:

    engine = simulated_engine(folder, config, acceptance=3.2)

    engine = recorded_engine(folder, config)
    ...
    engine.rounds.trace().save("trace.json")
    again = simulated_engine(folder, config, acceptance=AcceptanceTrace.load("trace.json").lengths)

The stages of a round are timed without an engine:

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
from drift_sdk.config import EngineConfig, prefill_token_budget
from drift_sdk.driver.loaded_model import LoadedModel, with_limits
from drift_sdk.engine import Engine
from drift_sdk.errors import ConfigError
from drift_sdk.profiling.acceptance_trace import AcceptanceTrace
from drift_sdk.profiling.manual_driver import ManualDriver
from drift_sdk.profiling.recording_executor import RecordedRounds, RecordingExecutor
from drift_sdk.profiling.stage_timing import StageTiming, time_stages
from drift_sdk.progress import Report, ignore_progress
from drift_sdk.speculation import Chain
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


def simulated_engine(
    model: str | Path, config: EngineConfig, *, acceptance: float | Sequence[int]
) -> RecordedEngine:
    """An engine for measurements only: WHAT IT GENERATES IS NOT THE MODEL'S OUTPUT.

    Drafts are made and verified as usual, but not compared with the model's tokens: as many are accepted as
    make rounds of `acceptance` tokens, the model's own included.

    acceptance: a sequence gives the number of tokens of each round in turn, over and over, as
    `recorded_engine` has recorded them. A number is their mean, with the least variance (3.2: three tokens,
    or four in one round of five), from 1 to the most tokens that a round may emit. Each slot starts at
    another place in the sequence. A round with fewer drafts, because the policy chose so or the drafter
    proposed fewer, accepts all that there are; a round without drafts by the policy's choice is not counted.

    config: with speculation, and with executor="graph", the only executor whose rounds can be simulated.
    Raises ConfigError for another config or acceptance.
    """
    trace = simulated_trace(config, acceptance)
    return RecordedEngine(model, config, trace)


def simulated_trace(config: EngineConfig, acceptance: float | Sequence[int]) -> AcceptanceTrace:
    trace = AcceptanceTrace.of(acceptance)
    check_graphs(config, "to simulate acceptance")
    if config.speculation is None:
        raise ConfigError.of("speculation", None, "a Speculation, whose acceptance is to be simulated")

    shape = config.speculation.shape
    most = (shape.num_draft_tokens if isinstance(shape, Chain) else shape.depth) + 1
    if not isinstance(acceptance, Sequence) and acceptance > most:
        raise ConfigError.of("acceptance", acceptance, f"at most {most}, the tokens of a round")

    log.warning(
        "acceptance is simulated at %g tokens a round: what this engine generates is not the model's output",
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
    acceptance: as for `simulated_engine`; None: drafts are compared. Raises ConfigError.
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
    model: str | Path, config: EngineConfig, acceptance: float | Sequence[int] | None = None
) -> Iterator[tuple[Executor, Callable[[], dict[str, float]]]]:
    """An executor of CUDA graphs with marks between stages, and a function that returns the seconds of each
    stage in the steps since its last call. The executor is closed at the end of the block.

    model, config, acceptance: as for `stage_times`. Raises ConfigError.
    """
    from drift_sdk.execution.stages import TimedStageMarks
    from drift_sdk.startup.model_startup import open_model

    config = config.replace(executor="graph")
    lengths = simulated_trace(config, acceptance).lengths if acceptance is not None else None
    stages = TimedStageMarks()
    opened = open_model(model, config, ignore_progress, acceptance_trace=lengths, stages=stages)
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
    report: Report,
    limits: ExecutorLimits | None = None,
) -> LoadedModel:
    # Imported here, on the engine's thread, because it loads torch.
    from drift_sdk.execution.stages import NvtxStageMarks
    from drift_sdk.startup.model_startup import open_model

    lengths = acceptance.lengths if acceptance is not None else None
    stages = NvtxStageMarks() if is_profiled else None
    config = with_limits(config, limits)
    opened = open_model(model, config, report, acceptance_trace=lengths, stages=stages)
    return msgspec.structs.replace(opened, executor=RecordingExecutor(opened.executor, rounds))
