"""A request's tokens depend neither on other requests nor on how its prompt is divided into chunks."""

from __future__ import annotations

import random
from pathlib import Path

import anyio
import pytest
from hybrid_requests import ask_at_steps
from model_zoo import logprob_bound, make_model
from near_ties import no_near_ties
from placement import engine_config
from slow_cases import slow_after

from drift_sdk import Completion, Engine, SamplingParams

NUM_REQUESTS = 32
VOCAB_SIZE = 500
MODEL = 0


class Case:
    """A request, and the step at which it arrives."""

    def __init__(self, rng: random.Random, index: int) -> None:
        shared = [7 + (5 * i) % 300 for i in range(48)]
        length = rng.randint(1, 120)
        own = [rng.randrange(3, VOCAB_SIZE) for _ in range(length)]
        self.prompt = shared[: rng.choice([0, 16, 33, 48])] + own
        self.arrival = rng.randrange(60) // 30 * 30  # in steps of the engine: many at a time
        sampled = {"temperature": rng.choice([0.7, 1.0, 1.3]), "top_p": rng.choice([0.8, 0.95, 1.0])}
        self.params = SamplingParams(
            max_tokens=rng.randint(1, 40),
            ignore_eos=rng.random() < 0.7,
            seed=rng.randrange(2**63),
            priority=rng.choice([0, 0, 0, 1]),
            top_k=rng.choice([0, 0, 20]),
            min_p=rng.choice([0.0, 0.02]),
            **(sampled if index % 2 else {}),
        )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_model(MODEL, folder)
    return folder


@pytest.fixture(scope="module")
def cases(folder: Path) -> list[Case]:
    rng = random.Random(2026)
    return [Case(rng, index) for index in range(NUM_REQUESTS)]


@pytest.fixture(scope="module")
def alone(folder: Path, cases: list[Case]) -> list[Completion]:
    async def main() -> list[Completion]:
        config = engine_config(max_num_seqs=1, max_model_len=256)
        async with Engine(folder, config) as engine:
            with no_near_ties(logprob_bound(MODEL)):
                return [await engine.generate(case.prompt, case.params) for case in cases]

    return anyio.run(main)


@pytest.mark.parametrize("kv_cache_tokens", slow_after(1, [320, 16_384]))
@pytest.mark.parametrize("prefill_token_budget", slow_after(1, [64, 16, 512]))
def test_requests_together_equal_requests_alone(
    folder: Path,
    cases: list[Case],
    alone: list[Completion],
    prefill_token_budget: int,
    kv_cache_tokens: int,
) -> None:
    async def main() -> None:
        config = engine_config(
            max_num_seqs=12,
            max_model_len=256,
            block_size=16,
            kv_cache_tokens=kv_cache_tokens,
            prefill_token_budget=prefill_token_budget,
        )
        completions: dict[int, Completion] = {}
        async with Engine(folder, config) as engine:

            async def ask(index: int) -> None:
                completions[index] = await engine.generate(cases[index].prompt, cases[index].params)

            for _ in range(2):  # in the second pass, prefixes are cached
                await ask_at_steps(engine, [case.arrival for case in cases], ask)
                for index, expected in enumerate(alone):
                    found = completions[index]
                    assert found.token_ids == expected.token_ids, f"request {index}"
                    assert found.finish_reason == expected.finish_reason
                    assert found.text == expected.text

            stats = engine.stats()
            num_cached = sum(completion.usage.cached_tokens for completion in completions.values())
            assert num_cached > 0
            assert (stats.num_preemptions > 0) == (kv_cache_tokens == 320)
            assert stats.num_running == stats.num_waiting == 0
            assert stats.num_free_blocks == kv_cache_tokens // 16

    anyio.run(main)


def test_tokens_follow_the_seed(folder: Path) -> None:
    async def main() -> None:
        config = engine_config(max_model_len=256)
        async with Engine(folder, config) as engine:

            async def tokens(**kwargs: object) -> tuple[int, ...]:
                params = SamplingParams(max_tokens=20, temperature=1.0, ignore_eos=True, **kwargs)
                completion = await engine.generate([5, 6, 7], params)
                assert kwargs.get("seed", completion.seed) == completion.seed
                repeated = await engine.generate(
                    [5, 6, 7],
                    SamplingParams(max_tokens=20, temperature=1.0, ignore_eos=True, seed=completion.seed),
                )
                assert repeated.token_ids == completion.token_ids
                return completion.token_ids

            assert len({await tokens(), await tokens(), await tokens(seed=1), await tokens(seed=2)}) == 4

    anyio.run(main)
