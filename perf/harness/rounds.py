"""Rounds of decoding: how long, how many, and what became of the drafts in them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from msgspec import Struct

from drift_sdk import EngineConfig, EngineStats
from drift_sdk.measurement import RecordedEngine
from perf.decode import BLOCK_SIZE, DecodeOptions, engine_config, generation_seconds
from perf.harness.scenario import Scenario
from perf.harness.shapes import Model

__all__ = ["Counts", "Rounds", "batch_config", "measure_rounds"]


class Counts(Struct, frozen=True):
    """What an engine has done: steps; rounds of a sequence, with a draft or without one; tokens drafted in
    them, and accepted."""

    num_steps: int
    num_rounds: int
    num_drafted: int
    num_accepted: int

    @classmethod
    def of(cls, stats: EngineStats) -> Counts:
        num_undrafted = (
            stats.num_undrafted_by_policy
            + stats.num_undrafted_by_request
            + stats.num_undrafted_for_room
            + stats.num_undrafted_by_drafter
        )
        num_rounds = stats.num_draft_rounds + num_undrafted
        return cls(stats.num_steps, num_rounds, stats.num_drafted_tokens, stats.num_accepted_tokens)

    def minus(self, other: Counts) -> Counts:
        return Counts(
            self.num_steps - other.num_steps,
            self.num_rounds - other.num_rounds,
            self.num_drafted - other.num_drafted,
            self.num_accepted - other.num_accepted,
        )


class Rounds(Struct, frozen=True, kw_only=True):
    """What longer generations took more than shorter ones, in each repeat: seconds, and counts.

    `num_tokens` more of each sequence. `emitted`: of each step of the longer ones, the tokens of each
    sequence that got any.
    """

    num_tokens: int
    seconds: tuple[float, ...]
    counts: tuple[Counts, ...]
    emitted: tuple[tuple[int, ...], ...]

    @property
    def tokens_per_step(self) -> float:
        """Of a sequence, whether it still runs or waits for slower ones."""
        return self.num_tokens * len(self.counts) / self._sum("num_steps")

    @property
    def step_seconds(self) -> list[float]:
        """Of each repeat, with as many tokens a step in all of them."""
        return [seconds / self.num_tokens * self.tokens_per_step for seconds in self.seconds]

    def tokens_per_s(self, batch: int) -> float:
        """Of so many sequences together: the median of the repeats."""
        return batch * self.num_tokens / statistics.median(self.seconds)

    @property
    def acceptance_length(self) -> float:
        """Mean tokens of a round of a sequence that runs; 1 where nothing speculates."""
        num_rounds = self._sum("num_rounds")
        return 1 + self._sum("num_accepted") / num_rounds if num_rounds else 1.0

    @property
    def mean_drafts(self) -> float:
        """Tokens drafted in a round of a sequence."""
        num_rounds = self._sum("num_rounds")
        return self._sum("num_drafted") / num_rounds if num_rounds else 0.0

    @property
    def several_share(self) -> float:
        """Rounds of a sequence with two tokens or more, of all of them."""
        lengths = [length for step in self.emitted for length in step]
        return sum(length > 1 for length in lengths) / len(lengths)

    @property
    def num_active(self) -> list[int]:
        """Sequences that got tokens, step by step."""
        return [len(step) for step in self.emitted]

    def _sum(self, name: str) -> int:
        return sum(getattr(counts, name) for counts in self.counts)


def batch_config(model: Model, scenarios: Sequence[Scenario], options: DecodeOptions) -> EngineConfig:
    """As for plain decoding, with a budget in which all sequences of a batch start in one step: what the
    prefix cache lacks of each is a block."""
    config = engine_config(model, scenarios, options)
    budget = max(config.prefill_token_budget, BLOCK_SIZE * config.max_num_seqs)
    return config.replace(prefill_token_budget=budget)


async def measure_rounds(
    engine: RecordedEngine, scenario: Scenario, vocab_size: int, options: DecodeOptions
) -> Rounds:
    """By the difference of two lengths. Leaves the engine paused."""
    prompts = scenario.prompts(vocab_size)
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
    # Steps that were launched ahead count only once they have ended.
    await engine.pause()
    before = Counts.of(engine.stats())
    seconds = await generation_seconds(engine, prompts, num_tokens)
    await engine.pause()
    return seconds, Counts.of(engine.stats()).minus(before)
