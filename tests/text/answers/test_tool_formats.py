"""Arguments of calls in each format: none at all, and those that are not written as their schema says."""

from __future__ import annotations

import pytest
from chat_families import ADD_CALL, DS, NUMBERS, NUMBERS_JSON, SIZES, call, calls_of

from drift_sdk.text.answers.tool_formats import UnfinishedCall

COMMENTARY = "<|channel|>commentary to=functions.add <|constrain|>json<|message|>"
FENCED = f"{DS[1]}function{DS[2]}add\n```json\n"


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        *((name, '<tool_call>{"name": "add"', "</tool_call>") for name in ("json", "hermes", "qwen3_coder")),
        *((name, '{"name": "add"', "") for name in ("json", "llama3_json")),
        ("mistral", '[TOOL_CALLS][{"name": "add"', "]"),
        ("granite", '<|tool_call|>[{"name": "add"', "]"),
        ("phi4_mini", '<|tool_call|>[{"name": "add"', "]<|/tool_call|>"),
        ("phi4_mini", 'functools[{"name": "add"', "]"),
    ],
)
@pytest.mark.parametrize("key", ["arguments", "parameters"])
@pytest.mark.parametrize("value", [None, '""', '" "', "null", '"null"', "{}", '"{}"'])
def test_empty_arguments_of_an_object_are_none(
    name: str, before: str, after: str, key: str, value: str | None
) -> None:
    written = "" if value is None else f', "{key}": {value}'
    for size in SIZES:
        assert calls_of(name, f"{before}{written}}}{after}", size) == ("", [("add", {})], None)


@pytest.mark.parametrize("written", ["", " ", "\n", "{}", '""', "null", " null\n"])
@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("mistral", "[TOOL_CALLS]add[ARGS]", ""),
        ("mistral", "[TOOL_CALLS]add[CALL_ID]abc123DEF[ARGS]", f"[TOOL_CALLS]add[ARGS]{NUMBERS_JSON}"),
        ("mistral", "[TOOL_CALLS]add ", f"[TOOL_CALLS]add[ARGS]{NUMBERS_JSON}"),
        ("deepseek", f"{DS[0]}{DS[1]}add{DS[2]}", f"{DS[3]}{DS[4]}"),
        ("deepseek", f"{DS[1]}add{DS[2]}", f"{DS[3]}{DS[1]}add{DS[2]}{NUMBERS_JSON}{DS[3]}"),
        ("deepseek", FENCED, f"\n```{DS[3]}"),
        ("harmony", COMMENTARY, ""),
        ("harmony", COMMENTARY, "<|call|>"),
        ("harmony", COMMENTARY, f"<|end|><|start|>assistant{COMMENTARY}{NUMBERS_JSON}<|call|>"),
    ],
)
def test_empty_arguments_behind_a_name_are_none(name: str, before: str, after: str, written: str) -> None:
    expected = [("add", {}), *([("add", NUMBERS)] if NUMBERS_JSON in after else [])]
    for size in SIZES:
        text, calls, failure = calls_of(name, f"{before}{written}{after}", size)
        assert (text.strip(), calls, failure) == ("", expected, None)


def test_deepseek_call_without_a_block_has_no_arguments() -> None:
    assert calls_of("deepseek", f"{DS[1]}function{DS[2]}add\n{DS[3]}") == ("", [("add", {})], None)


@pytest.mark.parametrize(
    ("name", "raw"),
    [
        ("mistral", "[TOOL_CALLS]add[ARGS]nu"),
        ("mistral", "[TOOL_CALLS]add[ARGS]"),
        ("mistral", "[TOOL_CALLS]ad"),
        ("mistral", "[TOOL_CALLS]add[TOOL_CA"),
        ("deepseek", f"{DS[1]}add{DS[2]}"),
        ("deepseek", f"{DS[1]}add{DS[2]}{DS[3][:-1]}"),
        ("deepseek", FENCED),
        ("harmony", COMMENTARY),
        ("harmony", COMMENTARY + '"'),
    ],
)
def test_arguments_that_are_cut_are_not_empty(name: str, raw: str) -> None:
    for size in SIZES:
        text, calls, failure = calls_of(name, raw, size, is_cut=True)
        assert (text, calls) == (raw, []) and isinstance(failure, UnfinishedCall)


def test_word_at_the_end_is_a_call_only_of_a_tool_that_was_given() -> None:
    for raw, calls in (("[TOOL_CALLS]add", [("add", {})]), ("The marker is [TOOL_CALLS] yes", [])):
        text, found, _ = calls_of("mistral", raw)
        assert (text, found) == ("" if calls else raw, calls)


def test_arguments_of_other_types_are_text() -> None:
    for written in ("1", "[]", '"x"', "false", "nil"):
        for name, raw in (
            ("hermes", f"<tool_call>{call('add', written)}</tool_call>"),
            ("mistral", f"[TOOL_CALLS]add[ARGS]{written}"),
        ):
            text, calls, failure = calls_of(name, raw)
            assert (text, calls) == (raw, []) and failure is not None
    assert calls_of("hermes", f"<tool_call>{ADD_CALL}</tool_call>")[1] == [("add", NUMBERS)]
