"""Questions: those that the model answers for training, and those that the head is evaluated with."""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
from msgspec import Struct

__all__ = [
    "EVALUATION_FILE",
    "EVALUATION_SHA256",
    "KINDS",
    "Overlaps",
    "Question",
    "QuestionError",
    "Templates",
    "evaluation_questions",
]

KINDS = ("chat", "code", "maths")
TEMPLATES_FILE = Path(__file__).with_name("questions.json")
EVALUATION_FILE = Path(__file__).with_name("evaluation_prompts.jsonl")
# Fixed before the first head was trained. A head's record names it.
EVALUATION_SHA256 = "4df8f02b86a06260168c9dc9ab561a5bd9293085a9b2874a1f082b68e416930c"
OVERLAP = 8
"""Words in a row that a question for training must not share with one for evaluation."""


class QuestionError(OSError):
    """Questions that cannot be used. The message names file, line and reason."""


class Question(Struct, frozen=True):
    """A question of one of KINDS, or of the user's own kind."""

    kind: str
    prompt: str


class Templates:
    """Endless questions made from templates and lists of words, the same for the same seed.

    A word in braces stands for a random entry of its list; {small}, {number} and {large} for random numbers.
    """

    def __init__(self, seed: int) -> None:
        self._lists: dict[str, list[str]] = json.loads(TEMPLATES_FILE.read_text(encoding="utf-8"))
        self._random = random.Random(seed)

    def questions(self) -> Iterator[Question]:
        for kind in itertools.cycle(KINDS):
            template = self._random.choice(self._lists[kind])
            yield Question(kind, re.sub(r"\{(\w+)\}", lambda name: self._fill(name.group(1)), template))

    def _fill(self, name: str) -> str:
        ranges = {"small": (2, 12), "number": (13, 99), "large": (100, 900)}
        if name in ranges:
            return str(self._random.randint(*ranges[name]))

        return self._random.choice(self._lists[name])


def evaluation_questions(file: Path = EVALUATION_FILE) -> list[Question]:
    """The questions of a JSONL file with "kind" and "prompt" in each line that is not blank.

    Raises QuestionError for a line of another form and a file without questions, and ValueError if the
    committed file was changed.
    """
    content = file.read_bytes()
    if file == EVALUATION_FILE and hashlib.sha256(content).hexdigest() != EVALUATION_SHA256:
        raise ValueError(f"{file}: is not the committed file, of sha256 {EVALUATION_SHA256}")

    lines = enumerate(content.split(b"\n"), 1)
    questions = [read_question(line, f"{file}, line {number}") for number, line in lines if line.strip()]
    if not questions:
        raise QuestionError(f'{file}: expected lines with "kind" and "prompt"; it has none')

    return questions


def read_question(line: bytes, place: str) -> Question:
    try:
        question = msgspec.json.decode(line, type=Question)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise QuestionError(f'{place}: expected an object with "kind" and "prompt": {error}') from error

    if not question.prompt:
        raise QuestionError(f"{place}: expected a prompt that is not empty")

    return question


class Overlaps:
    """Finds questions that share OVERLAP words in a row with a question for evaluation, or repeat it."""

    def __init__(self, questions: list[Question]) -> None:
        self._seen = {run for question in questions for run in word_runs(question.prompt)}

    def has(self, prompt: str) -> bool:
        return not self._seen.isdisjoint(word_runs(prompt))


def word_runs(text: str) -> set[tuple[str, ...]]:
    """All runs of OVERLAP words, or the whole text if it is shorter."""
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[start : start + OVERLAP]) for start in range(max(1, len(words) - OVERLAP + 1))}
