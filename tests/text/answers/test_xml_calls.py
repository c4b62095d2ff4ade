"""Calls in Qwen3-Coder's format: ends of arguments that are missing."""

from __future__ import annotations

import pytest
from chat_families import SIZES, calls_of

CITY, UNIT = "<parameter=city>\nParis", "<parameter=unit>\nC"
WEATHER = "<tool_call>\n<function=get_weather>\n"
CALL_END = "</function>\n</tool_call>"
ADD = "<tool_call>\n<function=add>\n<parameter=numbers>\n[1]\n</parameter>\n</function>\n</tool_call>"
PARIS = ("get_weather", {"city": "Paris", "unit": "C"})
ADDED = ("add", {"numbers": [1]})


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("behind", ["", f"\n{ADD}"])
@pytest.mark.parametrize(
    "raw",
    [
        f"{WEATHER}{CITY}\n{UNIT}\n</parameter>\n{CALL_END}",
        f"{WEATHER}{CITY}{UNIT}\n{CALL_END}",
        f"{WEATHER}{CITY}\n</parameter>\n{UNIT}\n{CALL_END}",
        f"{WEATHER}{CITY}\n{UNIT}{CALL_END}",
        f"{WEATHER}<parameter=city>Paris<parameter=unit>C</function></tool_call>",
        f"<function=get_weather>\n{CITY}\n{UNIT}\n</function>",
    ],
)
def test_missing_end_of_an_argument_ends_it(raw: str, behind: str, size: int) -> None:
    calls = [PARIS, ADDED] if behind else [PARIS]
    assert calls_of("qwen3_coder", raw + behind, size) == ("", calls, None)


@pytest.mark.parametrize("size", SIZES)
def test_missing_end_of_an_argument_of_a_tool_without_a_schema_ends_it(size: int) -> None:
    raw = "<function=f>\n<parameter=a>\n1\n<parameter=b>\n2 <parameter=c>\n</parameter>\n</function>"
    for tools in ([{"name": "f"}], [{"name": "g"}]):
        found = calls_of("qwen3_coder", raw, size, tools=tools)
        assert found == ("", [("f", {"a": "1", "b": "2 <parameter=c>"})], None)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    "value",
    [
        "see <parameter=x> and <parameter=city> here",
        "\n<parameter=x>\n",
        "<parameter=unit",
        "a\n</function>\nb </function>",
        "<function=add>\n</function>\n</tool_call>",
        "<function=add>\n<parameter=unit>\n</function></tool_call>",
        "<tool_call>\n</tool_call>\n",
        'print("</function></tool_call>")',
        "after </function> </tool_call> comes more",
    ],
)
def test_value_may_contain_markers_that_end_nothing(value: str, size: int) -> None:
    raw = f"{WEATHER}<parameter=city>\n{value}\n</parameter>\n{UNIT}\n</parameter>\n{CALL_END}"
    expected = [("get_weather", {"city": value, "unit": "C"})]
    assert calls_of("qwen3_coder", raw, size) == ("", expected, None)


@pytest.mark.parametrize("size", SIZES)
def test_call_without_any_end_leaves_the_next_call(size: int) -> None:
    begun = f"{WEATHER}{CITY}\n</tool_call>\n"
    text, calls, failure = calls_of("qwen3_coder", begun + ADD, size)
    assert (text, calls) == (begun.rstrip(), [ADDED]) and failure is not None


def test_argument_that_is_cut_does_not_end() -> None:
    for raw in (f"{WEATHER}{CITY}\n</function>\n", f"{WEATHER}{CITY}\n</function"):
        text, calls, _ = calls_of("qwen3_coder", raw, is_cut=True)
        assert (text, calls) == (raw, [])
