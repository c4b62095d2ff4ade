"""Engines for measurements: recorded rounds, and profiles.

How many tokens the rounds of speculative decoding emit is recorded and saved:

    engine = recorded_engine(folder, config)
    ...
    engine.rounds.trace().save("trace.json")
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from fractions import Fraction
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Self

import msgspec
from msgspec import Struct

from drift_sdk._fields import check_float, check_int
from drift_sdk.config import EngineConfig
from drift_sdk.driver.life_cycle import LoadedModel, with_limits
from drift_sdk.engine import Engine
from drift_sdk.errors import ConfigError
from drift_sdk.events import Report
from drift_sdk.execution.device.stages import AcceptanceFactory
from drift_sdk.steps import Executor, ExecutorLimits, StepPlan, StepResult

__all__ = [
    "AcceptanceTrace",
    "RecordedEngine",
    "RecordedRounds",
    "profiled_engine",
    "recorded_engine",
]

MAX_DENOMINATOR = 1000
"""Longest trace made from a mean: means differ from it by less than a thousandth."""


class AcceptanceTrace(Struct, frozen=True):
    """Numbers of tokens emitted, for each sequence and each of its rounds in order.

    A number counts the model's own token, so it is 1 or more.
    """

    sequences: tuple[tuple[int, ...], ...]

    @classmethod
    def of_mean(cls, mean: float) -> Self:
        """The shortest trace with this mean, to a thousandth, and with the least variance.

        It is one sequence: 3.2 is 3, 3, 3, 3, 4.
        """
        ratio = Fraction(mean).limit_denominator(MAX_DENOMINATOR)
        whole = [ratio * index // 1 for index in range(ratio.denominator + 1)]
        return cls((tuple(after - before for before, after in zip(whole, whole[1:], strict=False)),))

    @classmethod
    def of(cls, acceptance: float | Sequence[int]) -> Self:
        """A trace from a mean, or from the number of tokens of each round.

        Raises ConfigError for a mean below 1, for a round of less than one token, and for no rounds.
        """
        if not isinstance(acceptance, Sequence):
            check_float(ConfigError, "acceptance", acceptance, ge=1)
            return cls.of_mean(acceptance)

        if not acceptance:
            raise ConfigError.of("acceptance", acceptance, "rounds")

        for length in acceptance:
            check_int(ConfigError, "acceptance", length, ge=1)
        return cls((tuple(acceptance),))

    @property
    def lengths(self) -> tuple[int, ...]:
        """Numbers of tokens of all rounds, sequence after sequence."""
        return tuple(chain.from_iterable(self.sequences))

    @property
    def mean(self) -> float:
        """Tokens a round."""
        lengths = self.lengths
        return sum(lengths) / len(lengths)

    def save(self, path: str | Path) -> None:
        """Write the trace to a JSON file."""
        Path(path).write_bytes(msgspec.json.encode(self) + b"\n")

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a trace that `save` has written. Raises ConfigError for any other file, and for one without
        rounds."""
        try:
            trace = msgspec.json.decode(Path(path).read_bytes(), type=cls)
            cls.of(trace.lengths)
        except (msgspec.DecodeError, ConfigError) as error:
            raise ConfigError.of(
                "path", str(path), f"a file written by AcceptanceTrace.save: {error}"
            ) from error
        return trace


class RecordedRounds:
    """Numbers of tokens that the rounds of an engine emitted, since it was started.

    steps: for each step with rounds, a mapping from the number of a sequence to its number of tokens; slots
    that had finished got no tokens and are left out. num_sequences: how many sequences there have been; they
    are numbered in the order of their assignment. A sequence that was preempted is counted as a new one when
    it is resumed.
    """

    def __init__(self) -> None:
        self.steps: list[dict[int, int]] = []
        self.num_sequences = 0

    def trace(self) -> AcceptanceTrace:
        """The rounds of each sequence, sequences in the order of their first rounds.

        A round without drafts emitted one token; the last round of a sequence may have been cut short by its
        end.
        """
        found: dict[int, list[int]] = {}
        for step in self.steps:
            for sequence, num_tokens in step.items():
                found.setdefault(sequence, []).append(num_tokens)

        return AcceptanceTrace(tuple(map(tuple, found.values())))


class RecordingExecutor:
    """An `Executor` that runs plans on another one, and records their rounds in `rounds`."""

    def __init__(self, executor: Executor, rounds: RecordedRounds) -> None:
        self._executor, self._rounds = executor, rounds
        self._launched: deque[list[int]] = deque()  # of each step in flight, the sequence of each decode row
        self._sequences: dict[int, int] = {}  # the number of the sequence in each slot

    @property
    def limits(self) -> ExecutorLimits:
        return self._executor.limits

    def launch(self, plan: StepPlan) -> None:
        self._executor.launch(plan)
        for assignment in plan.assignments:
            self._sequences[assignment.slot] = self._rounds.num_sequences
            self._rounds.num_sequences += 1
        # By the time the step is collected, its slots may have been assigned to other sequences.
        self._launched.append([self._sequences[row.slot] for row in plan.decode])

    @property
    def is_done(self) -> bool:
        return self._executor.is_done

    def collect(self) -> StepResult:
        result = self._executor.collect()
        sequences = self._launched.popleft()
        step = {
            sequence: len(output.token_ids)
            for sequence, output in zip(sequences, result.decode, strict=True)
            if output.token_ids
        }
        if step:
            self._rounds.steps.append(step)
        return result

    def close(self) -> None:
        self._launched.clear()
        self._executor.close()


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
    from drift_sdk.execution.device.stages import NvtxStageMarks
    from drift_sdk.startup.model_startup import open_model

    stages = NvtxStageMarks() if is_profiled else None
    config = with_limits(config, limits)
    opened = open_model(model, config, report, acceptance=acceptance, stages=stages)
    return msgspec.structs.replace(opened, executor=RecordingExecutor(opened.executor, rounds))
