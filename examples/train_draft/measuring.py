"""Acceptance and speed of a head, measured in the engine."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct

from drift_sdk import (
    Chain,
    Completion,
    ConfigError,
    DynamicTree,
    Engine,
    EngineConfig,
    Job,
    NGram,
    SamplingParams,
    Speculation,
    SpeculationStats,
)
from drift_sdk.measurement import recorded_engine
from drift_sdk.trees import MAX_TREE_ROWS

from .acceptance import NUM_DRAFTS, Acceptance
from .answers import MAX_REPEATED_SHARE, repeated_share
from .questions import EVALUATION_FILE, Question, evaluation_questions

__all__ = ["measure", "measure_shapes", "speculation_of"]

TEMPERATURES = (0.0, 1.0)
DEFAULT_SEQS = 64
TOP_K, MAX_DEPTH = 4, 8
"""Limits of trees: candidates after each token, and tokens of a path."""
ExecutorName = Literal["auto", "eager", "graph"]
KINDS_OF_DRAFTS = ("chain", "tree", "ngram", "hybrid")
TRACED = "chat 0"
"""The group of answers to whose questions rounds are recorded."""
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


def speculation_of(draft: Path, name: str) -> Speculation:
    """Drafts in every round, of a name such as "chain-7": K tokens of the head in a chain; "tree-7", of the
    head in a tree that is grown anew in every round; "ngram-7", of n-grams; "hybrid-7", of n-grams where they
    are accepted at least as often as those of the head.

    Raises ValueError for another name, and ConfigError for a K out of range.
    """
    kind, _, digits = name.partition("-")
    if kind not in KINDS_OF_DRAFTS or not digits.isdecimal():
        raise ValueError(f"{name}: expected one of {', '.join(f'{each}-K' for each in KINDS_OF_DRAFTS)}")

    number = int(digits)
    if kind == "tree":
        tree = DynamicTree(top_k=TOP_K, depth=min(number, MAX_DEPTH), num_draft_tokens=number)
        return Speculation(draft=draft, shape=tree, adaptive=False)

    return Speculation(
        draft=NGram() if kind == "ngram" else draft,
        ngrams=NGram() if kind == "hybrid" else None,
        shape=Chain(number),
        adaptive=False,
    )


async def measure_shapes(
    model: str,
    draft: Path,
    *,
    names: Sequence[str],
    prompts: Path | None,
    max_tokens: int,
    batches: Sequence[int],
    executor: ExecutorName,
) -> dict[str, Any]:
    """The acceptance of drafts of several shapes, by kind of question and temperature, the rows that the
    model verifies in a round, and the speed for numbers of requests at a time; with such numbers, that
    without drafts as well.

    names: as of `speculation_of`. executor: as in EngineConfig. Raises ConfigError for more
    requests at a time than can be measured with these shapes.
    """
    file = prompts or EVALUATION_FILE
    questions = evaluation_questions(file)
    speculations = {name: speculation_of(draft, name) for name in names}
    # In larger batches, trees would have fewer nodes. All shapes are measured with the same sequences.
    most_verified = max(each.shape.num_draft_tokens + 1 for each in speculations.values())
    max_num_seqs = min(DEFAULT_SEQS, MAX_TREE_ROWS // most_verified)
    if max(batches, default=0) > max_num_seqs:
        expected = f"at most {max_num_seqs} with rounds of {most_verified} rows"
        raise ConfigError.of("batches", max(batches), expected)

    config = EngineConfig(max_num_seqs=max_num_seqs, executor=executor)

    async def speeds(engine: Engine) -> dict[str, float]:
        return {
            str(batch): round(await tokens_per_s(engine, questions, max_tokens, batch), 1)
            for batch in batches
        }

    shapes: dict[str, Any] = {}
    record = inputs_of(draft, file, max_tokens) | {"shapes": shapes}
    if batches:
        async with Engine(model, config) as engine:
            shapes["plain"] = {"num_verified": 1, "tokens_per_s": await speeds(engine)}
    for name, speculation in speculations.items():
        async with Engine(model, config.replace(speculation=speculation)) as engine:
            record["executor"] = engine.executor
            answered = await answer_all(engine, questions, max_tokens)
            shapes[name] = {
                "num_verified": speculation.shape.num_draft_tokens + 1,
                "acceptance": acceptance_by_group(answered),
                "tokens_per_s": await speeds(engine),
            }
    return record


def inputs_of(draft: Path, file: Path, max_tokens: int) -> dict[str, Any]:
    """The inputs of a measurement: hashes of head and questions, and the most tokens of an answer."""
    return {
        "draft_sha256": hashlib.sha256((draft / "model.safetensors").read_bytes()).hexdigest(),
        "prompts_sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
        "max_tokens": max_tokens,
    }


async def record_trace(
    model: str, config: EngineConfig, questions: Sequence[Question], max_tokens: int, file: Path
) -> None:
    """Write the rounds of greedy answers to a file."""
    params = SamplingParams(max_tokens=max_tokens)
    async with recorded_engine(model, config) as engine:
        streams = [engine.chat(messages_of(question), params) for question in questions]
        for stream in streams:
            await stream
    engine.rounds.trace().save(file)


async def measure(
    model: str,
    draft: Path,
    *,
    prompts: Path | None,
    max_tokens: int,
    batches: Sequence[int],
    executor: ExecutorName = "auto",
    trace: Path | None = None,
) -> dict[str, Any]:
    """The acceptance of chains of NUM_DRAFTS tokens, by kind of question and temperature, and the speed
    with and without the head for numbers of requests at a time; without any, acceptance alone.

    executor: as in EngineConfig. trace: file for the rounds of greedy answers in
    conversations, but for those that repeat themselves.
    """
    file = prompts or EVALUATION_FILE
    questions = evaluation_questions(file)
    shape = Chain(NUM_DRAFTS)
    speculations = {"always": Speculation(draft=draft, shape=shape, adaptive=False)}
    if batches:
        speculations |= {"adaptive": Speculation(draft=draft, shape=shape)}
    max_num_seqs = max(batches, default=DEFAULT_SEQS)
    config = EngineConfig(max_num_seqs=max_num_seqs, executor=executor)
    tokens: dict[str, list[tuple[int, ...]]] = {}
    speeds: dict[int, dict[str, float]] = {batch: {} for batch in batches}
    record = inputs_of(draft, file, max_tokens)
    record["num_draft_tokens"] = NUM_DRAFTS

    async def use(name: str, speculation: Speculation | None) -> None:
        async with Engine(model, config.replace(speculation=speculation)) as engine:
            answered = await answer_all(engine, questions, max_tokens)
            tokens[name] = [each.completion.token_ids for each in answered]
            if name == "always":
                record["executor"] = engine.executor
                record["acceptance"] = acceptance_by_group(answered)
                traced.extend(each.question for each in answered if each.group == TRACED)
            for batch in batches:
                speeds[batch][name] = await tokens_per_s(engine, questions, max_tokens, batch)

    traced: list[Question] = []
    for name, speculation in speculations.items():
        await use(name, speculation)
    if trace is not None:
        await record_trace(
            model, config.replace(speculation=speculations["always"]), traced, max_tokens, trace
        )
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
    """Of each group: acceptance length and rates by position in rounds with drafts, 1 and zeros without such
    rounds; their number; tokens a step, of all steps that gave tokens; and the number of answers."""
    totals: dict[str, Acceptance] = {}
    tokens: dict[str, list[tuple[int, int]]] = {}
    for each in answered:
        stats = each.completion.speculation or SpeculationStats()
        rounds = Acceptance(num_rounds=stats.num_rounds, accepted_at=stats.accepted_at)
        totals[each.group] = totals.get(each.group, Acceptance()).plus(rounds)
        found = (each.completion.usage.completion_tokens, stats.num_accepted)
        tokens.setdefault(each.group, []).append(found)
    return {
        name: {
            "acceptance_length": round(total.length, 4),
            "rates": [round(rate, 4) for rate in total.rates],
            "num_rounds": total.num_rounds,
            "tokens_per_step": round(per_step(tokens[name]), 4),
            "num_answers": len(tokens[name]),
        }
        for name, total in sorted(totals.items())
    }


def per_step(answers: Sequence[tuple[int, int]]) -> float:
    """Tokens a step, given the tokens of each answer and how many of them were drafted: each of the others
    was a step's own."""
    num_tokens, num_drafted = sum(tokens for tokens, _ in answers), sum(drafted for _, drafted in answers)
    return num_tokens / max(num_tokens - num_drafted, 1)


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
