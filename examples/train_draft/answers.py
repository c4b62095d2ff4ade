"""Answers of the model to questions, made with the engine and kept in JSONL files."""

from __future__ import annotations

import itertools
import random
import sys
import time
from pathlib import Path
from typing import TextIO
from uuid import uuid4

import anyio
import msgspec
from msgspec import Struct

from drift_sdk import Completion, Engine, SamplingParams

from .questions import Overlaps, Question, Templates, evaluation_questions
from .target import ChatFormat

__all__ = [
    "MAX_REPEATED_SHARE",
    "Answer",
    "AnswerError",
    "AnswerFolder",
    "Limits",
    "generate",
    "repeated_share",
]

MAX_REPEATED_SHARE = 0.2
"""Answers that repeat more of themselves are predicted too easily: they are not trained on, and are left out
of evaluation."""
TEMPERATURES = (0.0, 0.0, 0.7, 1.0)
"""Of the answers to train with, in turn."""
QUESTION_PARAMS = SamplingParams(max_tokens=96, temperature=0.9, top_p=0.95)
MIN_QUESTION_CHARS = 12
REPORT_TOKENS = 100_000
"""Tokens between two lines of progress."""
POLL_S = 0.5


class AnswerError(OSError):
    """Answers that cannot be used. The message names their folder and the reason."""


class Answer(Struct, frozen=True, kw_only=True):
    """A conversation of one question and its answer, as token ids.

    token_ids: with the token that ended the answer, if one did.
    """

    kind: str
    temperature: float
    prompt_ids: list[int]
    token_ids: list[int]


class Limits(Struct, frozen=True, kw_only=True):
    """The limits of a generation. It ends after so many tokens or seconds, whichever comes first.

    own_share: share of the questions that the model writes itself; the others are made from templates.
    """

    num_tokens: int
    seconds: float
    max_answer: int = 256
    num_lanes: int = 256
    own_share: float = 0.5


def repeated_share(token_ids: list[int], length: int = 8) -> float:
    """The share of runs of `length` tokens that occur before in the same text."""
    runs = [tuple(token_ids[start : start + length]) for start in range(len(token_ids) - length + 1)]
    return 1 - len(set(runs)) / len(runs) if runs else 0.0


class AnswerFolder:
    """The files of answers in a folder, to which `generate` may still be adding."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._answers: list[Answer] = []
        self._num_read: dict[Path, int] = {}  # bytes

    def training(self) -> list[Answer]:
        """The answers to train with, those first that were there before. A line that is not yet whole is left
        out."""
        for file in sorted(self._folder.glob("answers-*.jsonl")):
            self._answers += self._new_answers(file)
        return self._answers

    def evaluation(self) -> list[Answer]:
        """The answers to evaluate with; none if they have not been generated."""
        file = evaluation_file(self._folder)
        return self._new_answers(file) if file.exists() else []

    def wait(self, num_tokens: int) -> None:
        """Wait until there are so many tokens to train with, and answers to evaluate with."""
        file = evaluation_file(self._folder)
        while sum(len(answer.token_ids) for answer in self.training()) < num_tokens or not file.exists():
            time.sleep(POLL_S)

    def _new_answers(self, file: Path) -> list[Answer]:
        with file.open("rb") as lines:
            lines.seek(self._num_read.get(file, 0))
            content = lines.read()
        whole = content[: content.rfind(b"\n") + 1]
        self._num_read[file] = self._num_read.get(file, 0) + len(whole)
        try:
            return [msgspec.json.decode(line, type=Answer) for line in whole.splitlines()]
        except msgspec.MsgspecError as error:
            raise AnswerError(f"{file}: a line is no answer: {error}") from error


def evaluation_file(folder: Path) -> Path:
    return folder / "evaluation.jsonl"


async def generate(engine: Engine, chat: ChatFormat, work: Path, limits: Limits, seed: int) -> int:
    """Write answers to train with into `answers-SEED.jsonl` of the folder `work`, after those that are there,
    and answers to the questions for evaluation into `evaluation.jsonl` if it is missing. Returns the number
    of tokens generated."""
    if not evaluation_file(work).exists():
        await answer_evaluation(engine, chat, evaluation_file(work), limits.max_answer)

    # Whole lines at once, so that a run that is stopped loses no answer.
    with (work / f"answers-{seed}.jsonl").open("a", encoding="utf-8", buffering=1) as output:
        # Other questions than those of an earlier run.
        writer = Writer(engine, chat, output, limits, seed=hash((seed, output.tell())))
        async with anyio.create_task_group() as lanes:
            for _ in range(limits.num_lanes):
                lanes.start_soon(writer.run_lane)

    return writer.num_tokens


async def answer_evaluation(engine: Engine, chat: ChatFormat, file: Path, max_answer: int) -> None:
    """Write the answers to the questions for evaluation, at temperatures 0 and 1."""
    questions = evaluation_questions()
    lines = []
    for temperature in (0.0, 1.0):
        params = SamplingParams(max_tokens=max_answer, temperature=temperature, seed=0, include_stop=True)
        prompts = [chat.prompt_ids(question.prompt) for question in questions]
        completions = [completion async for completion in engine.map(prompts, params)]
        lines += [
            encode_answer(question.kind, temperature, prompt, completion)
            for question, prompt, completion in zip(questions, prompts, completions, strict=True)
        ]

    write_whole(file, "".join(lines))


def write_whole(file: Path, text: str) -> None:
    """Write a file that is never there in part, also if several processes write it at the same time."""
    part = file.with_suffix(f".{uuid4().hex}.part")
    part.write_text(text, encoding="utf-8")
    part.replace(file)


def encode_answer(kind: str, temperature: float, prompt_ids: list[int], completion: Completion) -> str:
    answer = Answer(
        kind=kind,
        temperature=temperature,
        prompt_ids=prompt_ids,
        token_ids=list(completion.token_ids),
    )
    return msgspec.json.encode(answer).decode() + "\n"


class Writer:
    """Lanes that answer one question after another and write the answers to a file."""

    def __init__(self, engine: Engine, chat: ChatFormat, output: TextIO, limits: Limits, seed: int) -> None:
        self.num_tokens = 0
        self._engine = engine
        self._chat = chat
        self._output = output
        self._limits = limits
        self._random = random.Random(seed)
        self._templates = Templates(self._random.getrandbits(32)).questions()
        self._overlaps = Overlaps(evaluation_questions())
        self._question_start = chat.question_start_ids()
        self._began_at = time.monotonic()
        self._temperatures = itertools.cycle(TEMPERATURES)

    async def run_lane(self) -> None:
        while not self._is_done:
            question = await self._next_question()
            if question is None or self._overlaps.has(question.prompt):
                continue

            temperature = next(self._temperatures)
            prompt_ids = self._chat.prompt_ids(question.prompt)
            params = SamplingParams(
                max_tokens=self._limits.max_answer,
                temperature=temperature,
                seed=self._random.getrandbits(32),
                include_stop=True,
            )
            completion = await self._engine.generate(prompt_ids, params)
            self._report(len(completion.token_ids))
            if repeated_share(list(completion.token_ids)) <= MAX_REPEATED_SHARE:
                self._output.write(encode_answer(question.kind, temperature, prompt_ids, completion))

    def _report(self, num_tokens: int) -> None:
        """Count tokens, and print a line now and then."""
        self.num_tokens += num_tokens
        if self.num_tokens // REPORT_TOKENS > (self.num_tokens - num_tokens) // REPORT_TOKENS:
            seconds = time.monotonic() - self._began_at
            print(f"{self.num_tokens} tokens in {seconds:.0f} s", file=sys.stderr, flush=True)

    @property
    def _is_done(self) -> bool:
        limits = self._limits
        return self.num_tokens >= limits.num_tokens or time.monotonic() - self._began_at >= limits.seconds

    async def _next_question(self) -> Question | None:
        """A question from the templates or written by the model itself; None if that did not end."""
        if self._random.random() >= self._limits.own_share:
            return next(self._templates)

        params = QUESTION_PARAMS.replace(seed=self._random.getrandbits(32))
        completion = await self._engine.generate(self._question_start, params)
        text = completion.text.strip()
        is_whole = completion.finish_reason == "stop" and len(text) >= MIN_QUESTION_CHARS
        return Question("chat", text) if is_whole else None
