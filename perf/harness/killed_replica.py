"""Requests on engines in processes, one of which is killed: what each stream sees."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from drift_sdk import (
    DriftError,
    EngineConfig,
    EnginePool,
    ProcessEngine,
    ReplicaFailed,
    Routing,
    SamplingParams,
    TokenStream,
)
from drift_sdk.testing import ScriptedModel
from perf.harness.record import Run
from perf.harness.recording import dtype_name
from perf.harness.scripted import next_letter
from perf.harness.shapes import Model

__all__ = ["SCRIPTED", "KilledReplica", "LossRun", "engine_of", "requests_of"]

SCRIPTED = "scripted"
SCRIPTED_STEP_S = 0.002
PROMPT_TOKENS = (16, 200)
FIRST_TOKEN_ID = 10  # the ids below are special tokens in some models


class LossRun(Run, kw_only=True):
    """One load of `batch` streams of `num_tokens` tokens each.

    has_replay:              None for the undisturbed load.
    num_killed:              streams that the killed replica had.
    num_replayed, num_moved: of them, those that went on elsewhere after they had got tokens, and before.
    num_failed:              of them, those that ended with ReplicaFailed.
    tokens_before:           fewest and most tokens that a killed stream had; empty if none was killed.
    gap_ms:                  longest wait between two chunks: median and most of the killed streams; of all,
                             if none was killed.
    other_gap_ms:            the same of the streams of other replicas.
    restart_s:               seconds until the killed replica was in service again; None if it was left out.
    problems:                everything that went wrong.
    """

    num_tokens: int
    has_replay: bool | None
    num_killed: int
    num_replayed: int
    num_moved: int
    num_failed: int
    tokens_before: tuple[int, ...]
    gap_ms: dict[str, float]
    other_gap_ms: dict[str, float]
    restart_s: float | None
    problems: list[str]


@dataclass
class Seen:
    """The events that a stream saw.

    was_killed: whether its replica was killed.
    num_before: tokens that it had when its replica was killed.
    error:      that it ended with.
    """

    tokens: list[int] = field(default_factory=list)
    was_killed: bool = False
    num_before: int = 0
    longest_gap_s: float = 0.0
    error: DriftError | None = None

    async def follow(self, stream: TokenStream) -> None:
        last = None
        try:
            async for chunk in stream:
                now = time.perf_counter()
                if last is not None:
                    self.longest_gap_s = max(self.longest_gap_s, now - last)
                last = now
                self.tokens += chunk.token_ids
        except DriftError as error:
            self.error = error


class KilledReplica:
    """Engines, the first of which is killed, and the requests that they serve.

    num_tokens: of each request.
    """

    def __init__(
        self,
        engines: Sequence[ProcessEngine],
        requests: Sequence[tuple[list[int], SamplingParams]],
        num_tokens: int,
        model_name: str,
    ) -> None:
        self._engines, self._requests = engines, requests
        self._num_tokens, self._model_name = num_tokens, model_name
        self._expected: list[Seen] = []

    async def serve(self, routing: Routing, *, kills: bool) -> LossRun:
        """Serve all requests by a new pool of the engines, which are left open."""
        pool = EnginePool(self._engines, routing)
        await pool.start()
        all_seen, streams = [], []
        for index, (prompt, params) in enumerate(self._requests):
            num_before = pool.replicas()[0].num_routed
            streams.append(pool.generate(prompt, params, request_id=f"request {index}"))
            all_seen.append(Seen(was_killed=kills and pool.replicas()[0].num_routed > num_before))
        started_at = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            for seen, stream in zip(all_seen, streams, strict=True):
                tasks.create_task(seen.follow(stream))
            if kills:
                tasks.create_task(self._kill(all_seen))
        seconds = time.perf_counter() - started_at
        first = pool.replicas()[0]
        restart_s = await self._restart(pool) if kills and routing.replay else None
        if not self._expected:
            self._expected = all_seen
        killed = [seen for seen in all_seen if seen.was_killed]
        others = [seen for seen in all_seen if not seen.was_killed]
        config, num_tokens = self._engines[0].config, self._num_tokens
        run = LossRun(
            engine="drift",
            model=self._model_name,
            dtype=dtype_name(config.dtype, config.device),
            scenario="undisturbed" if not kills else "with replay" if routing.replay else "without replay",
            batch=len(self._requests),
            context=PROMPT_TOKENS[1],
            tokens_per_s=sum(len(seen.tokens) for seen in all_seen) / seconds,
            num_tokens=num_tokens,
            has_replay=routing.replay if kills else None,
            num_killed=len(killed),
            num_replayed=first.num_replayed,
            num_moved=first.num_moved,
            num_failed=sum(isinstance(seen.error, ReplicaFailed) for seen in killed),
            tokens_before=extremes_of([seen.num_before for seen in killed]),
            gap_ms=gaps_of(killed or others),
            other_gap_ms=gaps_of(others),
            restart_s=restart_s,
            problems=[],
        )
        run.problems += self._problems(all_seen, has_replay=routing.replay)
        return run

    async def _kill(self, all_seen: Sequence[Seen]) -> None:
        """Kill replica 0 when every stream has got an eighth of its tokens."""
        least = self._num_tokens // 8
        while any(len(seen.tokens) < least and seen.error is None for seen in all_seen):  # noqa: ASYNC110 - no event
            await asyncio.sleep(0.001)  # long enough not to take time from the streams
        pid = self._engines[0].pid
        assert pid is not None
        for seen in all_seen:
            seen.num_before = len(seen.tokens)
        os.kill(pid, signal.SIGKILL)

    async def _restart(self, pool: EnginePool) -> float:
        started_at = time.perf_counter()
        await pool.restart(0)
        return time.perf_counter() - started_at

    def _problems(self, all_seen: Sequence[Seen], *, has_replay: bool) -> list[str]:
        found = []
        for index, (seen, expected) in enumerate(zip(all_seen, self._expected, strict=True)):
            if seen.tokens != expected.tokens[: len(seen.tokens)]:
                found.append(f"request {index}: other tokens than undisturbed")
            if seen.error is None and len(seen.tokens) != self._num_tokens:
                found.append(f"request {index}: {len(seen.tokens)} tokens")
            may_fail = seen.was_killed and not has_replay
            if seen.error is not None and not (may_fail and isinstance(seen.error, ReplicaFailed)):
                found.append(f"request {index}: {seen.error!r}")
            if isinstance(seen.error, ReplicaFailed) and seen.error.num_tokens != len(seen.tokens):
                found.append(f"request {index}: ReplicaFailed counts {seen.error.num_tokens} tokens")
        return found


def extremes_of(numbers: Sequence[int]) -> tuple[int, ...]:
    return (min(numbers), max(numbers)) if numbers else ()


def gaps_of(all_seen: Sequence[Seen]) -> dict[str, float]:
    gaps_ms = [1e3 * seen.longest_gap_s for seen in all_seen] or [0.0]
    return {"p50": statistics.median(gaps_ms), "max": max(gaps_ms)}


def engine_of(model: Model | None, device: str, config: EngineConfig) -> ProcessEngine:
    """An engine of a replica; a scripted one without a model."""
    if model is None:
        scripted = ScriptedModel(next_letter, step_s=SCRIPTED_STEP_S)
        return ProcessEngine(SCRIPTED, scripted.config, open_model=scripted)

    return ProcessEngine(model.path, config.replace(device=device, load=model.load))


def requests_of(number: int, num_tokens: int, vocab_size: int) -> list[tuple[list[int], SamplingParams]]:
    """Random prompts; every second request is sampled."""
    numbers = random.Random(0)
    return [
        (
            numbers.choices(range(FIRST_TOKEN_ID, vocab_size), k=numbers.randint(*PROMPT_TOKENS)),
            SamplingParams(
                max_tokens=num_tokens, ignore_eos=True, temperature=0.8 * (index % 2), top_p=0.95, seed=index
            ),
        )
        for index in range(number)
    ]
