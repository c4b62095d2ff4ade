"""Requests of models with recurrent layers: alone and together, with prefix hits and preemptions."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
from loops import until
from msgspec.structs import replace
from near_ties import no_near_ties
from tolerances import bound

from drift_sdk import Completion, Engine, EngineConfig, SamplingParams
from drift_sdk.execution.eager.drafters import EagleDrafter

__all__ = [
    "NEAR_TIE",
    "PREFIX",
    "VARIANTS",
    "VOCAB_SIZE",
    "Case",
    "answers_of",
    "ask_at_steps",
    "config_of",
    "draw_cases",
    "run_all",
    "run_alone",
    "tokens_of",
]

VOCAB_SIZE = 160
NUM_REQUESTS = 24
PREFIX = [3 + (7 * i) % 150 for i in range(160)]
NEAR_TIE = bound(16.0, inner=96, depth=1 + 4 * 4)
"""More than the rounding of logits of a model with three recurrent layers in four."""
VARIANTS = [
    {"prefill_token_budget": 512},
    {"prefill_token_budget": 16},
    {"prefill_token_budget": 61, "kv_cache_tokens": 320, "max_num_seqs": 12},  # preemptions
]


class Case:
    """A request whose prompt begins with a part of PREFIX, and the step at which it arrives: one of two, so
    that many run at a time on a busy machine too."""

    def __init__(self, rng: random.Random, seed: int) -> None:
        own = [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(1, 60))]
        shared = rng.choice([0, 1, 31, 32, 33, 63, 64, 65, 100, 128, 160])
        self.prompt = PREFIX[:shared] + own
        self.arrival = rng.randrange(40) // 20 * 20
        self.params = SamplingParams(
            max_tokens=rng.randint(1, 48),
            ignore_eos=True,
            seed=seed,
            temperature=0.8 if seed % 3 == 2 else 0.0,
            priority=rng.choice([0, 0, 0, 1]),
        )


def config_of(**fields: object) -> EngineConfig:
    return EngineConfig(
        **{"dtype": "float32", "device": "cpu", "max_model_len": 320, "block_size": 16} | fields
    )


async def ask_at_steps(
    engine: Engine, arrivals: Sequence[int], ask: Callable[[int], Awaitable[None]]
) -> None:
    """Call ask with the index of each arrival, at that number of steps from now, or when nothing runs."""
    first = engine.stats().num_steps

    def is_time(index: int) -> bool:
        stats = engine.stats()
        is_idle = stats.num_running == stats.num_waiting == stats.num_queued == 0
        return is_idle or stats.num_steps - first >= arrivals[index]

    async with anyio.create_task_group() as tasks:
        for index in sorted(range(len(arrivals)), key=arrivals.__getitem__):
            await until(partial(is_time, index))
            tasks.start_soon(ask, index)
            await anyio.lowlevel.checkpoint()  # it is submitted


async def run_all(
    folder: Path,
    config: EngineConfig,
    given: list[Case],
    *,
    num_passes: int = 1,
    on_end: Callable[[Engine], None] = lambda engine: None,
) -> list[Completion]:
    """Requests at their steps, or one after the other if only one may run; of the last pass."""
    completions: dict[int, Completion] = {}
    async with Engine(folder, config) as engine:

        async def ask(index: int) -> None:
            completions[index] = await engine.generate(given[index].prompt, given[index].params)

        for _ in range(num_passes):
            if config.max_num_seqs == 1:
                for index in range(len(given)):
                    await ask(index)
            else:
                await ask_at_steps(engine, [case.arrival for case in given], ask)
        on_end(engine)
    return [completions[index] for index in range(len(given))]


def draw_cases() -> list[Case]:
    rng = random.Random(2027)
    return [Case(rng, seed) for seed in range(NUM_REQUESTS)]


def run_alone(folder: Path, cases: list[Case], near_tie: float = NEAR_TIE) -> list[Completion]:
    """Each request alone, without prefix hits. Their tokens are no near ties."""
    salted = [Case(random.Random(0), 0) for _ in cases]
    for index, (each, case) in enumerate(zip(salted, cases, strict=True)):
        each.prompt, each.params = case.prompt, replace(case.params, cache_salt=str(index))
    with no_near_ties(near_tie):
        found = anyio.run(lambda: run_all(folder, config_of(max_num_seqs=1), salted))
    assert not any(each.usage.cached_tokens for each in found)
    assert len({token for each in found for token in each.token_ids}) > 40
    return found


def tokens_of(completions: list[Completion]) -> list[tuple[int, ...]]:
    return [each.token_ids for each in completions]


Drafts = list[tuple[int, ...]]


def answers_of(path: Path, config: EngineConfig) -> tuple[list[tuple[int, ...]], Drafts, int]:
    """Tokens for some prompts, of greedy answers and of drawn ones; all drafts in order, and how many were
    accepted."""
    prompts = [[3 + (7 * i + j) % 150 for i in range(5 + 9 * j)] for j in range(3)]
    drafts: Drafts = []
    propose = EagleDrafter.propose

    def noted(self: EagleDrafter, *inputs: Any) -> Any:
        found = propose(self, *inputs)
        drafts.extend(tuple(draft.token_ids) for draft in found if draft.token_ids)
        return found

    async def main() -> list[Completion]:
        async with Engine(path, config) as engine:
            return [
                await engine.generate(
                    prompt, max_tokens=12, ignore_eos=True, seed=index, temperature=0.9 * (index % 2)
                )
                for index, prompt in enumerate(prompts)
            ]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EagleDrafter, "propose", noted)
        found = anyio.run(main)
    stats = [each.speculation for each in found if each.speculation is not None]
    return tokens_of(found), drafts, sum(each.num_accepted for each in stats)
