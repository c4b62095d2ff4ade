"""Acceptance and speed of a head, measured in the engine."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from drift_sdk import Chain, Completion, Engine, EngineConfig, Job, SamplingParams, Speculation

from .acceptance import NUM_DRAFTS, Acceptance
from .answers import MAX_REPEATED_SHARE, repeated_share
from .questions import EVALUATION_FILE, Question, evaluation_questions

__all__ = ["measure"]

TEMPERATURES = (0.0, 1.0)
DEFAULT_SEQS = 64
SPEED_ROUNDS = 3
"""Times that each speed is measured, besides one time to warm up; the median counts."""


class Answered(Struct, frozen=True):
    """A question at a temperature, and what the engine made of it."""

    question: Question
    temperature: float
    completion: Completion

    @property
    def group(self) -> str:
        """The name of the group that the answer is counted in."""
        is_repetitive = repeated_share(list(self.completion.token_ids)) > MAX_REPEATED_SHARE
        kind = "repetitive" if is_repetitive else self.question.kind
        return f"{kind} {self.temperature:g}"


async def measure(
    model: str,
    draft: Path,
    *,
    prompts: Path | None,
    max_tokens: int,
    batches: Sequence[int],
) -> dict[str, Any]:
    """The acceptance of chains of NUM_DRAFTS tokens, by kind of question and temperature, and the speed
    with and without the head for numbers of requests at a time; without any, acceptance alone."""
    file = prompts or EVALUATION_FILE
    questions = evaluation_questions(file)
    shape = Chain(NUM_DRAFTS)
    speculations = {"always": Speculation(draft=draft, shape=shape, adaptive=False)}
    if batches:
        speculations |= {"adaptive": Speculation(draft=draft, shape=shape)}
    config = EngineConfig(max_num_seqs=max(batches, default=DEFAULT_SEQS))
    tokens: dict[str, list[tuple[int, ...]]] = {}
    speeds: dict[int, dict[str, float]] = {batch: {} for batch in batches}
    record: dict[str, Any] = {
        "draft_sha256": hashlib.sha256((draft / "model.safetensors").read_bytes()).hexdigest(),
        "prompts_sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
        "max_tokens": max_tokens,
        "num_draft_tokens": NUM_DRAFTS,
    }

    async def use(name: str, speculation: Speculation | None) -> None:
        async with Engine(model, config.replace(speculation=speculation)) as engine:
            answered = await answer_all(engine, questions, max_tokens)
            tokens[name] = [each.completion.token_ids for each in answered]
            if name == "always":
                record["executor"] = engine.executor
                record["acceptance"] = acceptance_by_group(answered)
            for batch in batches:
                speeds[batch][name] = await tokens_per_s(engine, questions, max_tokens, batch)

    for name, speculation in speculations.items():
        await use(name, speculation)
    if batches:
        await use("plain", None)
        record["same_answers"] = {name: same_share(tokens["plain"], tokens[name]) for name in speculations}
        record["tokens_per_s"] = {
            str(batch): {name: round(speed, 1) for name, speed in found.items()}
            | {"gain": round(found["adaptive"] / found["plain"], 3)}
            for batch, found in speeds.items()
        }
    return record


def same_share(first: Sequence[object], second: Sequence[object]) -> float:
    """The share of places at which two sequences are equal."""
    return sum(a == b for a, b in zip(first, second, strict=True)) / len(first)


async def answer_all(engine: Engine, questions: Sequence[Question], max_tokens: int) -> list[Answered]:
    """The answers to all questions at all temperatures."""
    answered = []
    for temperature in TEMPERATURES:
        params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=0)
        streams = [engine.chat(messages_of(question), params) for question in questions]
        answered += [
            Answered(question, temperature, await stream)
            for question, stream in zip(questions, streams, strict=True)
        ]
    return answered


def acceptance_by_group(answered: Sequence[Answered]) -> dict[str, dict[str, Any]]:
    """Acceptance length, rates by position, and numbers of rounds and answers, of each group."""
    totals: dict[str, Acceptance] = {}
    counts: dict[str, int] = {}
    for each in answered:
        stats = each.completion.speculation
        if stats is None or not stats.num_rounds:
            continue

        rounds = Acceptance(num_rounds=stats.num_rounds, accepted_at=stats.accepted_at)
        totals[each.group] = totals.get(each.group, Acceptance()).plus(rounds)
        counts[each.group] = counts.get(each.group, 0) + 1
    return {
        name: {
            "acceptance_length": round(total.length, 4),
            "rates": [round(rate, 4) for rate in total.rates],
            "num_rounds": total.num_rounds,
            "num_answers": counts[name],
        }
        for name, total in sorted(totals.items())
    }


async def tokens_per_s(engine: Engine, questions: Sequence[Question], max_tokens: int, batch: int) -> float:
    """Tokens a second of greedy answers to questions, `batch` at a time, with all that a request takes."""
    chosen = [questions[index % len(questions)] for index in range(max(batch, 8))]
    speeds = []
    for _ in range(SPEED_ROUNDS + 1):
        started_at = time.perf_counter()
        jobs = [Job(key=index, messages=messages_of(each)) for index, each in enumerate(chosen)]
        params = SamplingParams(max_tokens=max_tokens)
        num_tokens = 0
        async for completion in engine.map(jobs, params, max_concurrent=batch, ordered=False):
            num_tokens += completion.usage.completion_tokens
        speeds.append(num_tokens / (time.perf_counter() - started_at))

    return sorted(speeds[1:])[SPEED_ROUNDS // 2]


def messages_of(question: Question) -> list[dict[str, str]]:
    return [{"role": "user", "content": question.prompt}]
