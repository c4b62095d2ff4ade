"""Recipients in Harmony: which messages are calls, and what becomes of the others."""

from __future__ import annotations

from typing import Any

import pytest
from chat_families import NUMBERS, NUMBERS_JSON, SIZES, TOOLS

from drift_sdk.text.answers.formats import AnswerFormats, AnswerSplitter
from drift_sdk.text.answers.reader import Split
from drift_sdk.text.tools import ToolSet

FINAL = "<|end|><|start|>assistant<|channel|>final<|message|>Yes."


def split(raw: str, size: int, reasoning: str | None = "harmony") -> tuple[AnswerSplitter, tuple[Any, ...]]:
    formats = AnswerFormats(tools="harmony", reasoning=reasoning)
    splitter = formats.splitter(ToolSet.of(TOOLS), prompt="<|start|>assistant")
    pieces = [raw[start : start + size] for start in range(0, len(raw), size)]
    part = sum([*map(splitter.push, pieces), splitter.flush()], Split())
    return splitter, (part.reasoning, part.text, [(each.name, each.arguments) for each in part.tool_calls])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("header", "body", "is_call"),
    [
        ("analysis to=functions.add <|constrain|>json", NUMBERS_JSON, True),
        ("analysis to=functions.add code", NUMBERS_JSON, True),
        ("analysis to=functions.add", "not an object", False),
        ("analysis to=functions.add", '{"numbers": [1, 2}, I think', False),
        ("analysis to=python code", "print(1)", False),
        ("analysis to=assistant", "Hm.", False),
        ("analysis to=assistant", NUMBERS_JSON, False),
        ("analysis to=user", NUMBERS_JSON, False),
    ],
)
def test_recipient_of_reasoning_leaves_no_markers(header: str, body: str, is_call: bool, size: int) -> None:
    raw = f"<|channel|>{header}<|message|>{body}{FINAL}"
    expected = ("", "Yes.", [("add", NUMBERS)]) if is_call else (body, "Yes.", [])
    assert split(raw, size)[1] == expected
    if not is_call:
        assert split(raw, size, reasoning=None)[1] == ("", f"{body}\nYes.", [])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("role", ["assistant", "user", "system", "developer", "tool", "all"])
@pytest.mark.parametrize("body", [NUMBERS_JSON, "I look."])
def test_message_to_a_role_is_no_call(role: str, body: str, size: int) -> None:
    for header in (f"<|channel|>commentary to={role}", f" to={role}<|channel|>commentary json"):
        splitter, parts = split(f"{header}<|message|>{body}{FINAL}", size)
        assert parts == ("", f"{body}\nYes.", []) and splitter.failure is None


def test_malformed_call_is_reported_on_every_channel() -> None:
    for channel, expected in (
        ("analysis", ("[1]", "", [])),
        ("commentary", ("", "<|channel|>commentary to=functions.add<|message|>[1]", [])),
    ):
        splitter, parts = split(f"<|channel|>{channel} to=functions.add<|message|>[1]<|call|>", 1)
        assert parts == expected and splitter.failure is not None


@pytest.mark.parametrize("size", SIZES)
def test_reasoning_has_places_in_the_answer(size: int) -> None:
    thoughts = ["Hm.", "Well, "]
    raw = "".join(f"<|channel|>analysis<|message|>{each}<|end|><|start|>assistant" for each in thoughts)
    call = f"<|channel|>analysis to=functions.add<|message|>{NUMBERS_JSON}<|end|><|start|>assistant"
    splitter = split(raw + call + FINAL.removeprefix("<|end|><|start|>assistant"), size)[0]
    assert [raw[start:end] for start, end in splitter.reasoning_spans] == thoughts
    assert split(raw, size, reasoning=None)[0].reasoning_spans == []
