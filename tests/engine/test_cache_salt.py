"""Requests that share no cached prefix, on every kind of engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from drift_sdk import (
    Completion,
    EngineConfig,
    EnginePool,
    Job,
    ProcessEngine,
    SamplingParams,
    SyncEngine,
)
from drift_sdk.testing import ScriptedModel, scripted_engine

CONFIG = EngineConfig(max_model_len=512, kv_cache_tokens=4096, block_size=16)
PROMPT = "p" * 400
SALTS = (None, "a", "b", "a", None, "b")
CACHED = [0, 0, 0, 384, 384, 384]


def process_engine() -> ProcessEngine:
    return ProcessEngine("scripted", CONFIG, open_model=ScriptedModel("yes", config=CONFIG))


ENGINES = {
    "engine": lambda: scripted_engine("yes", config=CONFIG),
    "process": process_engine,
    "pool": lambda: EnginePool([scripted_engine("yes", config=CONFIG) for _ in range(2)]),
}


def num_cached(completions: Sequence[Completion]) -> list[int]:
    return [completion.usage.cached_tokens for completion in completions]


@pytest.mark.parametrize("kind", ENGINES)
async def test_only_requests_of_equal_salts_share_prefixes(kind: str) -> None:
    async with ENGINES[kind]() as engine:
        found = [await engine.generate(PROMPT, cache_salt=salt) for salt in SALTS]
        assert num_cached(found) == CACHED


async def test_every_method_takes_a_salt() -> None:
    messages = [{"role": "user", "content": PROMPT}]
    async with scripted_engine("yes", config=CONFIG) as engine:
        chats = [await engine.chat(messages, cache_salt=salt) for salt in SALTS]
        assert num_cached(chats) == CACHED[:3] + [416, 416, 416]  # with the template's tokens
        groups = [await engine.samples(PROMPT, 2, cache_salt=salt) for salt in ("c", "d")]
        assert [num_cached(group) for group in groups] == [[0, 384], [0, 384]]
        jobs = [Job(key=i, prompt=PROMPT, params=SamplingParams(cache_salt=f"{i}")) for i in (0, 1, 1)]
        assert num_cached([each async for each in engine.map(jobs, max_concurrent=1)]) == [0, 0, 384]
        both = engine.map([PROMPT, PROMPT], cache_salt="e", max_concurrent=1)
        assert num_cached([each async for each in both]) == [0, 384]
        assert num_cached([await engine.generate(PROMPT)]) == [0]


def test_a_blocking_engine_takes_salts() -> None:
    with SyncEngine("scripted", CONFIG, open_model=ScriptedModel("yes", config=CONFIG)) as engine:
        assert num_cached([engine.generate(PROMPT, cache_salt=salt).result() for salt in SALTS]) == CACHED


async def test_a_pool_prefers_the_replica_that_has_the_beginning_with_the_salt() -> None:
    """One text with six salts, in turn: each stays where it is in the cache, and no replica gets all."""
    async with EnginePool([scripted_engine("yes", config=CONFIG) for _ in range(3)]) as pool:
        for turn in range(3):
            for salt in range(6):
                await pool.generate(PROMPT + str(turn), cache_salt=str(salt))
        assert pool.stats().num_cached_tokens == 6 * 2 * 400
        assert [replica.num_routed for replica in pool.replicas()] == [6, 6, 6]


async def test_the_salt_changes_no_token() -> None:
    def count(prompt: list[int], output: list[int], seed: int) -> Any:
        return (sum(prompt) + len(output)) % 250

    async with scripted_engine(count, config=CONFIG) as engine:
        found = [await engine.generate(PROMPT, max_tokens=9, cache_salt=salt) for salt in SALTS]
        assert len({each.token_ids for each in found}) == 1
