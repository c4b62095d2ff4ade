"""Reasoning: calls that a model writes in it, and markers that close what was not opened."""

from __future__ import annotations

from typing import Any

import pytest
from chat_families import (
    ADD_CALL,
    ADD_NOTED,
    BOTH,
    DS,
    NUMBERS_JSON,
    PARIS_JSON,
    TOOLS,
    WEATHER_CALL,
    WEATHER_NOTED,
)

from drift_sdk.text.answers.formats import AnswerFormats, AnswerSplitter
from drift_sdk.text.answers.reader import Split
from drift_sdk.text.tools import ToolSet

XML_CALLS = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=unit>\nC\n"
    "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=add>\n<parameter=numbers>\n[1, 2]\n"
    "</parameter>\n</function>\n</tool_call>"
)
TAGGED = f"<tool_call>\n{WEATHER_CALL}\n</tool_call>\n<tool_call>\n{ADD_CALL}\n</tool_call>"
CALLS = {
    "hermes": TAGGED,
    "json": TAGGED,
    "qwen3_coder": XML_CALLS,
    "llama3_json": f"\n{WEATHER_CALL}; {ADD_CALL}",
    "pythonic": '\n[get_weather(city="Paris", unit="C"), add(numbers=[1, 2])]',
    "mistral": f"[TOOL_CALLS]get_weather[ARGS]{PARIS_JSON}[TOOL_CALLS]add[ARGS]{NUMBERS_JSON}",
    "deepseek": (
        f"{DS[0]}{DS[1]}get_weather{DS[2]}{PARIS_JSON}{DS[3]}{DS[1]}add{DS[2]}{NUMBERS_JSON}{DS[3]}{DS[4]}"
    ),
    "gemma4": f"{WEATHER_NOTED}{ADD_NOTED}",
    "granite": f"<|tool_call|>[{WEATHER_CALL}, {ADD_CALL}]",
    "phi4_mini": f"<|tool_call|>[{WEATHER_CALL}, {ADD_CALL}]<|/tool_call|>",
}
"""The calls BOTH in each format, as they stand in text."""
TAGS = {
    "think": ("<think>", "</think>"),
    "mistral": ("[THINK]", "[/THINK]"),
    "granite": ("<think>", "</think>"),
    "gemma4": ("<|channel>thought\n", "<channel|>"),
}


def split(
    formats: tuple[str, str], raw: str, size: int = 10**9, *, is_cut: bool = False, **options: Any
) -> tuple[AnswerSplitter, Split]:
    tools, reasoning = formats
    splitter = AnswerFormats(tools=tools, reasoning=reasoning).splitter(ToolSet.of(TOOLS), **options)
    parts = [splitter.push(raw[start : start + size]) for start in range(0, len(raw), size)]
    return splitter, sum([*parts, splitter.flush(is_cut=is_cut)], Split())


def parts_of(formats: tuple[str, str], raw: str, size: int = 10**9, **options: Any) -> tuple[object, ...]:
    part = split(formats, raw, size, **options)[1]
    assert [call.index for call in part.tool_calls] == list(range(len(part.tool_calls)))
    return part.reasoning, part.text, tuple((call.name, call.arguments) for call in part.tool_calls)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 10**9])
@pytest.mark.parametrize("reasoning", TAGS)
@pytest.mark.parametrize("tools", CALLS)
def test_call_with_which_reasoning_ends_the_answer_is_a_call(tools: str, reasoning: str, size: int) -> None:
    formats, calls, (opening, closing) = (tools, reasoning), CALLS[tools], TAGS[reasoning]
    for raw in (f"{opening}\nHm.\n{calls}", f"{opening}Hm. {calls}\n", f"{opening}Hm.{calls}\n{closing}\n\n"):
        assert parts_of(formats, raw, size) == ("Hm.", "", BOTH), raw
    assert parts_of(formats, f"{opening}{calls}", size) == ("", "", BOTH)
    assert parts_of(formats, f"Hm.\n{calls}", size, is_thinking=True) == ("Hm.", "", BOTH)
    found, *rest = parts_of(formats, f"{opening}A. {calls}\n\nB.\n{calls}", size)
    assert str(found).split() == ["A.", "B."] and rest == ["", (*BOTH, *BOTH)]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 10**9])
@pytest.mark.parametrize("reasoning", TAGS)
@pytest.mark.parametrize("tools", CALLS)
def test_call_in_reasoning_that_goes_on_to_an_answer_is_reasoning(
    tools: str, reasoning: str, size: int
) -> None:
    formats, calls, (opening, closing) = (tools, reasoning), CALLS[tools], TAGS[reasoning]
    thought = f"Hm. {calls.strip()}\n\nNo.{calls}"
    for space in ("", "\n\n"):
        raw = f"{opening}\n{thought}\n{closing}{space}Yes."
        assert parts_of(formats, raw, size) == (thought, "Yes.", ())
        again = f"{opening}\n{thought}\n{closing}{space}{calls}"
        assert parts_of(formats, again, size) == (thought, "", BOTH)
    assert parts_of(formats, f"{opening}{thought}\nOr", size, is_cut=True) == (f"{thought}\nOr", "", ())


@pytest.mark.parametrize("size", [1, 3, 10**9])
@pytest.mark.parametrize(
    ("tools", "mention"),
    [
        ("hermes", "The <tool_call> block comes next: <tool_call>{}</tool_call>"),
        ("hermes", '<tool_call>{"name": "add'),
        ("qwen3_coder", "Write <function=add>, then <function=add>\n<parameter=numbers>\n[1"),
        ("llama3_json", '{"name": "Bob", "arguments": {}}\n[1, 2]\n{"a"\n{"name": "ad'),
        ("pythonic", "[1, 2]\n[add]\n[print(a=1)]\n[add(numbers="),
        ("mistral", "[TOOL_CALLS] is the marker, [TOOL_CALLS]add[ARGS]{"),
        ("gemma4", '<|tool_call> begins it, <|tool_call>call:add{a:<|"|>b'),
    ],
)
def test_mention_of_a_call_does_not_end_reasoning(tools: str, mention: str, size: int) -> None:
    raw = f"<think>{mention}</think>Yes."
    splitter, part = split((tools, "think"), raw, size)
    assert (part.reasoning, part.text, part.tool_calls) == (mention, "Yes.", ())
    assert splitter.failure is None


def test_reasoning_comes_while_it_is_written_up_to_a_call() -> None:
    formats = AnswerFormats(tools="hermes", reasoning="think")
    splitter = formats.splitter(ToolSet.of(TOOLS))
    assert splitter.push("<think>One <b> two").reasoning == "One <b> two"
    assert splitter.push(f" three <tool_call>{ADD_CALL}</tool_call> four").reasoning == " three"
    assert splitter.push(" five").reasoning == ""
    assert splitter.push("</think>\n").reasoning == ""
    rest = splitter.push("Y")
    assert rest.reasoning == f" <tool_call>{ADD_CALL}</tool_call> four five" and rest.text == "Y"


def test_malformed_call_with_which_reasoning_ends_the_answer_is_reported() -> None:
    broken = '<tool_call>{"name": 7}</tool_call>'
    for end, is_reported in (("", True), ("</think>\n", True), ("</think>Yes.", False)):
        splitter, part = split(("hermes", "think"), f"<think>{broken}{end}")
        assert part.reasoning == broken and not part.tool_calls
        assert (splitter.failure is not None) == is_reported


@pytest.mark.parametrize("size", [1, 2, 3, 7, 10**9])
@pytest.mark.parametrize(
    ("raw", "text"),
    [
        ("Hm.</think>Yes.", "Hm.\nYes."),
        ("Hm.\n</think>\n\nYes.", "Hm.\nYes."),
        ("</think>\n\nYes.", "Yes."),
        ("\n</think>Yes.\n", "Yes.\n"),
        ("Hm.\n</think>", "Hm."),
        ("Hm.</thinks>", "Hm.</thinks>"),
        ("Hm.</thi", "Hm.</thi"),
        ("A.</think>B.</think>C.", "A.\nB.</think>C."),
        ("Write <think>a</think>.", "Write <think>a</think>."),
    ],
)
def test_tag_that_closes_what_was_not_opened_is_no_text(raw: str, text: str, size: int) -> None:
    for tools in ("hermes", "qwen3_coder", "json", "pythonic"):
        assert parts_of((tools, "think"), raw, size) == ("", text, ())
    no_reasoning = AnswerFormats(tools="hermes", reasoning=None).splitter(ToolSet.of(TOOLS))
    assert (no_reasoning.push(raw) + no_reasoning.flush()).text == raw


@pytest.mark.parametrize("size", [1, 3, 10**9])
@pytest.mark.parametrize("reasoning", TAGS)
@pytest.mark.parametrize("tools", CALLS)
def test_calls_follow_a_tag_that_closes_what_was_not_opened(tools: str, reasoning: str, size: int) -> None:
    closing, calls = TAGS[reasoning][1], CALLS[tools]
    assert parts_of((tools, reasoning), f"Hm.\n{closing}\n\n{calls}", size) == ("", "Hm.", BOTH)
    if tools != "llama3_json" or closing[0] != "[":  # which may begin a list of calls
        assert parts_of((tools, reasoning), f"{calls}\n{closing}\n\nYes.", size) == ("", "Yes.", BOTH)


def test_response_of_granite_follows_a_tag_that_closes_what_was_not_opened() -> None:
    raw = "Hm.</think>\n<response>Yes.</response>"
    assert parts_of(("granite", "granite"), raw, 1) == ("", "Hm.\nYes.", ())
    words = "Here is my response: yes."
    assert parts_of(("granite", "granite"), words, 1) == ("", words, ())


@pytest.mark.parametrize("size", [1, 2, 3, 7, 10**9])
@pytest.mark.parametrize("reasoning", TAGS)
def test_reasoning_has_a_place_in_the_answer(reasoning: str, size: int) -> None:
    """From behind the opening marker to the closing one, or to the end."""
    formats, (opening, closing) = ("hermes", reasoning), TAGS[reasoning]
    thought = f"\nHm.\n{CALLS['hermes']}\n"
    for raw, options in (
        (f" {opening}{thought}{closing}\n\nYes.", {}),
        (f"{opening}{thought}", {}),
        (f"{opening}{thought}", {"is_cut": True}),
        (f"{thought}{closing}Yes.", {"is_thinking": True}),
    ):
        ((start, end),) = split(formats, raw, size, **options)[0].reasoning_spans
        assert raw[start:end] == thought
    assert split(formats, "Yes.", size)[0].reasoning_spans == []
