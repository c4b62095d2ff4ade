"""Answers of any form, in every format and cut anywhere: parsed whole and in pieces to the same parts."""

from __future__ import annotations

import itertools

from hypothesis import strategies as st

from drift_sdk.config import REASONING_FORMATS, TOOL_FORMATS
from drift_sdk.text.answers.formats import AnswerFormats
from drift_sdk.text.tools import ToolSet

TOOLS = ToolSet.of([{"name": "f", "parameters": {"properties": {"a": {"type": "integer"}}}}, {"name": "g"}])
NAMES = [name for name in TOOL_FORMATS if name != "auto"]
MARKERS = sorted(
    {marker for name in NAMES for marker in AnswerFormats(tools=name, reasoning=None).markers}
    | {
        marker
        for name in REASONING_FORMATS
        if name != "auto"
        for marker in AnswerFormats(tools=None, reasoning=name).markers
    }
)
PIECES = [
    *('{"name": "f", "arguments": {"a": 1}}', '{"name": "g", "parameters": {}}', '{"a": "\\"</tool_call>"}'),
    *("f", "g", "f(a=1, b='x')", "[f(", ")]", '"', "'", "\\", "[", "]", "{", "}", "(", ")", ", ", ": ", "; "),
    *(" ", "\n", "```json\n", "\n```", "<parameter=a>\n1\n</parameter>", "</function>", "<function=f>", "="),
    *(
        "to=functions.f",
        "analysis",
        "final",
        "commentary",
        "json",
        "1",
        "-2.5e3",
        "null",
        "True",
        "é",
        "text",
    ),
]

fragments = st.sampled_from(MARKERS + PIECES) | st.text(max_size=5)
repeated = st.tuples(fragments, st.sampled_from([1, 1, 1, 2, 70, 5000])).map(
    lambda drawn: drawn[0] * drawn[1]
)
texts = st.lists(repeated, max_size=20).map("".join)
strategy = st.tuples(
    st.sampled_from([*NAMES, None]),
    st.sampled_from(["think", "mistral", "granite", None]),
    texts,
    st.lists(st.integers(1, 12), min_size=1, max_size=5),
    st.booleans(),
)


def parts_of(formats: AnswerFormats, pieces: list[str], is_thinking: bool) -> tuple[object, ...]:
    splitter = formats.splitter(TOOLS, prompt="<|start|>assistant", is_thinking=is_thinking)
    found = [*map(splitter.push, pieces), splitter.flush()]
    calls = [(call.index, call.name, call.arguments) for part in found for call in part.tool_calls]
    text = "".join(part.text for part in found)
    return "".join(part.reasoning for part in found), text, calls, str(splitter.failure)


def run(data: tuple[str | None, str | None, str, list[int], bool]) -> None:
    tools, reasoning, text, sizes, is_thinking = data
    if tools == "harmony":
        reasoning = "harmony"
    formats = AnswerFormats(tools=tools, reasoning=reasoning)
    whole = parts_of(formats, [text], is_thinking)
    pieces: list[str] = []
    start = 0
    for size in itertools.cycle(sizes):
        if start >= len(text):
            break

        pieces.append(text[start : start + size])
        start += size
    assert parts_of(formats, pieces, is_thinking) == whole
    if tools is None and reasoning is None:
        assert whole[1] == text
