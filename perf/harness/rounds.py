"""Rounds of decoding: their time and number, and how many drafts they accepted."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import zip_longest

from msgspec import Struct

from drift_sdk import EngineConfig, EngineStats
from drift_sdk.config import prefill_token_budget
from drift_sdk.measurement import RecordedEngine
from perf.harness.decoding import BLOCK_SIZE, DecodeOptions, engine_config, generation_seconds
from perf.harness.scenario import Scenario
from perf.harness.shapes import Model

__all__ = ["Counts", "Rounds", "batch_config", "measure_rounds"]


class Counts(Struct, frozen=True):
    """Counters of an engine.

    num_steps:     steps of the engine.
    num_rounds:    rounds of a sequence, with or without drafts.
    num_drafted:   tokens drafted in these rounds.
    num_accepted:  drafted tokens that were accepted.
    accepted_at:   at index i, rounds in which draft i and all drafts before it were accepted.
    num_draft_rounds:  rounds of a sequence with drafts.
    """

    num_steps: int
    num_rounds: int
    num_drafted: int
    num_accepted: int
    accepted_at: tuple[int, ...] = ()
    num_draft_rounds: int = 0

    @classmethod
    def of(cls, stats: EngineStats) -> Counts:
        num_undrafted = (
            stats.num_undrafted_by_policy
            + stats.num_undrafted_by_request
            + stats.num_undrafted_for_room
            + stats.num_undrafted_by_drafter
        )
        num_rounds = stats.num_draft_rounds + num_undrafted
        return cls(
            stats.num_steps,
            num_rounds,
            stats.num_drafted_tokens,
            stats.num_accepted_tokens,
            stats.accepted_at,
            stats.num_draft_rounds,
        )

    def minus(self, other: Counts) -> Counts:
        return Counts(
            self.num_steps - other.num_steps,
            self.num_rounds - other.num_rounds,
            self.num_drafted - other.num_drafted,
            self.num_accepted - other.num_accepted,
            tuple(a - b for a, b in zip_longest(self.accepted_at, other.accepted_at, fillvalue=0)),
            self.num_draft_rounds - other.num_draft_rounds,
        )


class Rounds(Struct, frozen=True, kw_only=True):
    """Differences between longer and shorter generations, for each repeat.

    num_tokens:       additional tokens of each sequence.
    seconds, counts:  additional time, and additional counts.
    emitted:          for each step of the longer generations, the tokens of each sequence that got any.
    """

    num_tokens: int
    seconds: tuple[float, ...]
    counts: tuple[Counts, ...]
    emitted: tuple[tuple[int, ...], ...]

    @property
    def tokens_per_step(self) -> float:
        """Mean tokens of a sequence per step, including steps in which it waits for slower sequences."""
        return self.num_tokens * len(self.counts) / self._sum("num_steps")

    @property
    def step_seconds(self) -> list[float]:
        """Seconds of a step in each repeat, computed with the mean tokens per step of all repeats."""
        return [seconds / self.num_tokens * self.tokens_per_step for seconds in self.seconds]

    def tokens_per_s(self, batch: int) -> float:
        """Tokens per second of `batch` sequences together: the median of the repeats."""
        return batch * self.num_tokens / statistics.median(self.seconds)

    @property
    def acceptance_length(self) -> float:
        """Mean tokens per round of a running sequence; 1 without speculation."""
        num_rounds = self._sum("num_rounds")
        return 1 + self._sum("num_accepted") / num_rounds if num_rounds else 1.0

    @property
    def mean_drafts(self) -> float:
        """Mean tokens drafted per round of a sequence."""
        num_rounds = self._sum("num_rounds")
        return self._sum("num_drafted") / num_rounds if num_rounds else 0.0

    @property
    def accepted_at(self) -> tuple[float, ...]:
        """At index i, the share of the rounds with drafts that accepted draft i and all before it; empty
        without drafts."""
        num_rounds = self._sum("num_draft_rounds")
        columns = zip_longest(*(counts.accepted_at for counts in self.counts), fillvalue=0)
        return tuple(round(sum(column) / num_rounds, 5) for column in columns) if num_rounds else ()

    @property
    def several_share(self) -> float:
        """Share of the rounds of a sequence with two or more tokens."""
        lengths = [length for step in self.emitted for length in step]
        return sum(length > 1 for length in lengths) / len(lengths)

    @property
    def num_active(self) -> list[int]:
        """Number of sequences that got tokens, for each step."""
        return [len(step) for step in self.emitted]

    def _sum(self, name: str) -> int:
        return sum(getattr(counts, name) for counts in self.counts)


def batch_config(model: Model, scenarios: Sequence[Scenario], options: DecodeOptions) -> EngineConfig:
    """The configuration for plain decoding, with a larger prefill budget.

    All sequences of a batch can start in one step: the prefix cache lacks one block of each.
    """
    config = engine_config(model, scenarios, options)
    budget = max(prefill_token_budget(config, "cuda"), BLOCK_SIZE * config.max_num_seqs)
    return config.replace(prefill_token_budget=budget)


async def measure_rounds(
    engine: RecordedEngine, scenario: Scenario, vocab_size: int, options: DecodeOptions
) -> Rounds:
    """Measure rounds by the difference of two lengths. The engine is paused afterwards."""
    prompts = options.prompts(scenario, vocab_size)
    short, long = options.lengths
    for num_tokens in (short, long, long):
        await generation_seconds(engine, prompts, num_tokens)

    seconds: list[float] = []
    counts: list[Counts] = []
    emitted: list[tuple[int, ...]] = []
    for _ in range(options.repeats):
        short_s, of_short = await counted_generation(engine, prompts, short)
        num_before = len(engine.rounds.steps)
        long_s, of_long = await counted_generation(engine, prompts, long)
        seconds.append(long_s - short_s)
        counts.append(of_long.minus(of_short))
        emitted += [tuple(step.values()) for step in engine.rounds.steps[num_before:]]

    return Rounds(
        num_tokens=long - short, seconds=tuple(seconds), counts=tuple(counts), emitted=tuple(emitted)
    )


async def counted_generation(
    engine: RecordedEngine, prompts: Sequence[Sequence[int]], num_tokens: int
) -> tuple[float, Counts]:
    """Seconds and counts of one generation. The engine is paused afterwards."""
    # The counters include steps that were launched ahead only after these have ended.
    await engine.pause()
    before = Counts.of(engine.stats())
    seconds = await generation_seconds(engine, prompts, num_tokens)
    await engine.pause()
    return seconds, Counts.of(engine.stats()).minus(before)
