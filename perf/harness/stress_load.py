"""Loads that stress an engine: contexts that fill the KV cache, and random requests."""

from __future__ import annotations

import asyncio
import math
import random
import time
from typing import Any

from msgspec import Struct

from drift_sdk import Completion, Engine, EngineConfig, SamplingParams, TokenStream
from drift_sdk.config import PREFILL_TOKEN_BUDGETS
from perf.harness.decoding import BLOCK_SIZE
from perf.harness.scenario import random_tokens
from perf.harness.shapes import Model

__all__ = ["MOST_LIVE", "Leg", "Load", "Served", "Stress", "churn", "fill_cache"]

NUM_LAST_ROUNDS = 16
"""Rounds of all sequences together, after the last prompt has been computed."""
MOST_LIVE = 24
"""Requests at once in the random load."""
LEAST_RANDOM = 32
"""Requests of a random load, however short its time."""
MOST_SLEEP_S = 0.02
MOST_RANDOM_TOKENS = 256


class Load(Struct, frozen=True):
    """Sequences of `context` tokens that hold the share `fill` of the KV cache."""

    context: int
    fill: float


class Leg(Struct, frozen=True):
    """Random requests for `seconds`; `number` of them went before."""

    number: int
    seconds: float


class Stress(Struct, frozen=True, kw_only=True):
    """Settings.

    contexts, fills:   loads, in all combinations.
    num_long:          sequences of the longest context that make the highest fill.
    minutes:           of random requests, for each engine.
    """

    device: str
    dtype: str = "auto"
    executor: str = "auto"
    contexts: tuple[int, ...]
    fills: tuple[float, ...]
    num_long: int = 4
    minutes: float = 0.0
    seed: int = 0

    @property
    def loads(self) -> list[Load]:
        return [Load(context, fill) for context in self.contexts for fill in self.fills]

    @property
    def legs(self) -> list[Leg]:
        """The random requests of an engine, in parts of a minute at most."""
        number = math.ceil(round(self.minutes, 6))
        return [Leg(index, self.minutes * 60 / number) for index in range(number)]

    def num_tokens(self, num_draft_tokens: int) -> int:
        """Tokens of each completion: as many as a sequence can emit while the others' prompts are computed,
        of which a step has a quarter of the budget beside sequences that decode."""
        num_chunks = self.num_long * max(self.contexts) // (PREFILL_TOKEN_BUDGETS["cuda"] // 4) + 1
        return (num_chunks + NUM_LAST_ROUNDS) * (num_draft_tokens + 1)

    def config(self, model: Model, num_draft_tokens: int) -> EngineConfig:
        """A KV cache that `num_long` sequences of the longest context fill as far as the highest fill."""
        completion = self.num_tokens(num_draft_tokens)
        longest = max(self.contexts) + completion
        capacity = int(self.num_long * (longest + BLOCK_SIZE) / max(self.fills))
        fields: dict[str, Any] = {
            "device": self.device,
            "dtype": self.dtype,
            "executor": self.executor,
            "load": model.load,
            "max_model_len": longest,
            "max_num_seqs": capacity // min(self.contexts) + 2,
            "kv_cache_tokens": -(-capacity // BLOCK_SIZE) * BLOCK_SIZE,
        }
        return EngineConfig(**fields)


class Served(Struct, kw_only=True):
    """The outcome of some requests."""

    num_requests: int = 0
    num_tokens: int = 0
    num_cancelled: int = 0
    errors: list[str] = []

    def add(self, done: Completion | BaseException) -> None:
        """Count a completion, or the error that a request ended with."""
        self.num_requests += 1
        if isinstance(done, Completion):
            self.num_tokens += len(done.token_ids)
            self.num_cancelled += done.finish_reason == "cancelled"
        else:
            self.errors.append(f"{type(done).__name__}: {done}")


async def fill_cache(engine: Engine, load: Load, vocab_size: int, num_tokens: int) -> Served:
    """Serve as many sequences of `load.context` tokens, and a shorter one, as hold `load.fill` of the cache
    with their prompts. They are queued in a paused engine, and each generates `num_tokens` tokens, so that
    all are running when the last prompt has been computed; a sequence that finds no block for them is
    preempted."""
    capacity = engine.config.kv_cache_tokens
    assert capacity is not None
    block_size = capacity // engine.stats().num_blocks
    left = int(load.fill * capacity)
    lengths: list[int] = []
    while left >= block_size:
        lengths.append(min(load.context, left))
        left -= -(-lengths[-1] // block_size) * block_size
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    served = Served()
    await engine.pause()
    streams = [
        engine.generate(random_tokens(vocab_size, length, seed=index), params)
        for index, length in enumerate(lengths)
    ]
    await engine.resume()
    ends = [stream.completion() for stream in streams]
    for done in await asyncio.gather(*ends, return_exceptions=True):
        served.add(done)
        if isinstance(done, Completion) and len(done.token_ids) != num_tokens:
            served.errors.append(f"a completion of {len(done.token_ids)} tokens: expected {num_tokens}")
    return served


async def churn(engine: Engine, stress: Stress, vocab_size: int, num_draft_tokens: int, leg: Leg) -> Served:
    """Send and cancel random requests, LEAST_RANDOM or more of them, then cancel what is left. Prompts share
    beginnings; lengths, temperatures, drafts and the order of cancellations are random, drawn from the seed
    and the leg."""
    rng = random.Random(f"{stress.seed} {leg.number}")
    served = Served()
    live: list[TokenStream] = []
    ends: set[asyncio.Future[Completion]] = set()
    ended_at = time.perf_counter() + leg.seconds
    prompts = [random_tokens(vocab_size, max(stress.contexts), seed=seed) for seed in range(4)]

    def reap(done: asyncio.Future[Completion]) -> None:
        ends.discard(done)
        served.add(done.exception() or done.result())

    num_sent = 0
    while num_sent < LEAST_RANDOM or time.perf_counter() < ended_at:
        if len(live) < MOST_LIVE and rng.random() < 0.6:
            prompt = rng.choice(prompts)[: int(max(stress.contexts) ** rng.random())]
            params = SamplingParams(
                max_tokens=rng.randint(1, MOST_RANDOM_TOKENS),
                temperature=rng.choice((0.0, 1.0)),
                num_draft_tokens=rng.randint(0, num_draft_tokens),
                ignore_eos=True,
            )
            live.append(engine.generate(prompt, params))
            num_sent += 1
            end = asyncio.ensure_future(live[-1].completion())
            ends.add(end)
            end.add_done_callback(reap)
        elif live:
            live.pop(rng.randrange(len(live))).cancel()
        await asyncio.sleep(rng.random() * MOST_SLEEP_S)

    for stream in live:
        stream.cancel()
    await asyncio.gather(*ends, return_exceptions=True)
    await asyncio.sleep(0)  # the callbacks of the last ones
    return served
