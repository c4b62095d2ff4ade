"""Answers in each family's format: the same parts wherever they are cut; what is no call stays text."""

from __future__ import annotations

import ast
import sys

import pytest
from chat_families import FAMILIES, TOOLS, Family, Reply, family_tokenizer

from drift_sdk.config import REASONING_FORMATS, TOOL_FORMATS
from drift_sdk.text.answers import formats as answer_formats
from drift_sdk.text.answers import reasoning, tool_formats
from drift_sdk.text.answers.formats import AnswerFormats, AnswerSplitter, detect_formats
from drift_sdk.text.answers.reader import Split
from drift_sdk.text.tools import MAX_DEPTH, ToolSet, decode_keywords

REPLIES = [(name, reply) for name, family in FAMILIES.items() for reply in family.replies]
ids = [f"{name}-{number}" for number, (name, _) in enumerate(REPLIES)]

WEATHER = '{"name": "get_weather", "arguments": {"city": "Paris"}}'


def new_splitter(family: Family) -> AnswerSplitter:
    tools, reasoning = family.formats
    return AnswerFormats(tools=tools, reasoning=reasoning).splitter(
        ToolSet.of(TOOLS), prompt="<|start|>assistant"
    )


def split(splitter: AnswerSplitter, pieces: list[str]) -> list[Split]:
    return [*map(splitter.push, pieces), splitter.flush()]


def joined(parts: list[Split]) -> tuple[object, ...]:
    calls = [call for part in parts for call in part.tool_calls]
    assert [call.index for call in calls] == list(range(len(calls)))
    reasoning, text = "".join(part.reasoning for part in parts), "".join(part.text for part in parts)
    return reasoning, text, tuple((call.name, call.arguments) for call in calls)


@pytest.mark.parametrize("name, reply", REPLIES, ids=ids)
def test_call_that_was_cut_is_unfinished_rather_than_malformed(name: str, reply: Reply) -> None:
    for length in range(len(reply.raw)):
        splitter = new_splitter(FAMILIES[name])
        splitter.push(reply.raw[:length])
        splitter.flush(is_cut=True)
        assert splitter.failure is None or splitter.is_unfinished, reply.raw[:length]


def of_hermes(
    text: str, size: int = 10**9, reasoning: str | None = "think", **options: bool
) -> tuple[object, ...]:
    splitter = AnswerFormats(tools="hermes", reasoning=reasoning).splitter(ToolSet.of(TOOLS), **options)
    return joined(split(splitter, [text[i : i + size] for i in range(0, len(text), size)]))


@pytest.mark.parametrize(("name", "reply"), REPLIES, ids=ids)
def test_answer_has_the_same_parts_wherever_it_is_cut(name: str, reply: Reply) -> None:
    family, raw = FAMILIES[name], reply.raw
    expected = (reply.reasoning, reply.text, reply.calls)
    for cut in range(len(raw) + 1):
        splitter = new_splitter(family)
        assert joined(split(splitter, [raw[:cut], raw[cut:]])) == expected, raw[:cut]
        assert splitter.failure is None
    for size in (1, 2, 3, 7):
        pieces = [raw[start : start + size] for start in range(0, len(raw), size)]
        assert joined(split(new_splitter(family), pieces)) == expected, size


@pytest.mark.parametrize(("name", "reply"), REPLIES, ids=ids)
def test_special_tokens_are_split_too(name: str, reply: Reply) -> None:
    """The tokens of an answer, detokenised one by one, byte by byte between the special ones."""
    family = FAMILIES[name]
    tokenizer = family_tokenizer(family)
    tools, reasoning = family.formats
    shown = tokenizer.special_ids_of(AnswerFormats(tools=tools, reasoning=reasoning).markers)
    detokenizer = tokenizer.detokenizer(shown)
    ids = tokenizer.encode(reply.raw, add_special_tokens=False)
    pieces = [detokenizer.push([token_id]) for token_id in ids]
    assert "".join(pieces) == reply.raw
    assert joined(split(new_splitter(family), pieces)) == (reply.reasoning, reply.text, reply.calls)


def test_call_comes_with_the_piece_that_closes_it() -> None:
    for name, reply in REPLIES:
        splitter = new_splitter(FAMILIES[name])
        parts = [splitter.push(char) for char in reply.raw]
        closed = [index for index, part in enumerate(parts) if part.tool_calls]
        assert len(closed) == len(reply.calls)
        assert all(reply.raw[index] in "})>" for index in closed), name


def test_text_is_not_held_back_longer_than_needed() -> None:
    splitter = new_splitter(FAMILIES["hermes"])
    pieces = [splitter.push(char).text for char in "a <b> <tool"]
    assert (
        pieces == ["a", "", " <b", "", "", ">", "", "", "", "", ""][: len(pieces)]
        or "".join(pieces) == "a <b>"
    )
    thinking = new_splitter(FAMILIES["hermes"])
    assert thinking.push("<think>\nIs it").reasoning == "Is it"
    assert thinking.push(" raining?</thi").reasoning == " raining?"


@pytest.mark.parametrize("size", [1, 5, 10**9])
@pytest.mark.parametrize(
    ("text", "reasoning", "answer", "calls"),
    [
        ("<think>\nIs it", "Is it", "", 0),
        ("<think>\nIs it\n", "Is it", "", 0),
        ("<think>", "", "", 0),
        ("<think>a</thi", "a</thi", "", 0),
        ("<thi", "", "<thi", 0),
        ("  <think>a</think>", "a", "", 0),
        ("The tag <think> is", "", "The tag <think> is", 0),
        ("<think>a<think>b</think>c</think>d", "a<think>b", "c</think>d", 0),
        (f"<think><tool_call>{WEATHER}</tool_call>?</think>x", f"<tool_call>{WEATHER}</tool_call>?", "x", 0),
        ("x <tool_call>\n", "", "x <tool_call>\n", 0),
        (f"x <tool_call>{WEATHER[:20]}", "", f"x <tool_call>{WEATHER[:20]}", 0),
        (f"<tool_call>{WEATHER}</tool", "", "", 1),
        (f"<tool_call>{WEATHER}\n</tool_call>\n<tool_call>\n", "", "<tool_call>\n", 1),
    ],
)
def test_answer_that_ends_too_early_is_defined(
    text: str, reasoning: str, answer: str, calls: int, size: int
) -> None:
    found = of_hermes(text, size)
    assert (found[0], found[1]) == (reasoning, answer)
    assert isinstance(found[2], tuple) and len(found[2]) == calls


@pytest.mark.parametrize(
    ("text", "answer", "calls"),
    [
        (
            f"<tool_call>{WEATHER[:-1]}</tool_call><tool_call>{WEATHER}</tool_call>",
            f"<tool_call>{WEATHER[:-1]}</tool_call>",
            1,
        ),
        (f"<tool_call>[{WEATHER}, 7]</tool_call>!", ", 7]</tool_call>!", 1),
        ('<tool_call>{"name": "add", "arguments": "text"}</tool_call>', None, 0),
        ('<tool_call>{"name": "add", "arguments": [1]}</tool_call>', None, 0),
        ('<tool_call>{"name": 7, "arguments": {}}</tool_call>', None, 0),
        ('<tool_call>{"arguments": {}}</tool_call>', None, 0),
        ('<tool_call>{"name": "add", "name": "add"}</tool_call>', None, 0),
        ('<tool_call>{"name": "add", "arguments": {"a": 1, "a": 2}}</tool_call>', None, 0),
        ('<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>', None, 0),
        ('<tool_call>{"name": "add", "arguments": {"a": "\n"}}</tool_call>', None, 0),
        ('<tool_call>{"name": "add", "arguments": {"a": ' + "9" * 5000 + "}}</tool_call>", None, 0),
        ("<tool_call>call add!</tool_call>", None, 0),
        ("<tool_call>" + "[" * (MAX_DEPTH + 1), None, 0),
        ("<tool_call>{]</tool_call>", None, 0),
        ("<tool_call>[]</tool_call>", "", 0),
        ('<tool_call>{"name": "now"}</tool_call>', "", 1),
        ('<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', "", 1),
    ],
)
def test_malformed_call_is_text(text: str, answer: str | None, calls: int) -> None:
    """answer: None = all of the text."""
    for size in (1, 4, 10**9):
        reasoning, found, found_calls = of_hermes(text, size)
        assert (reasoning, found) == ("", text if answer is None else answer)
        assert isinstance(found_calls, tuple) and len(found_calls) == calls


def test_numbers_that_no_double_can_hold_are_the_largest_double() -> None:
    """JSON has them, and so have grammars of calls: a call must not be lost because of them."""
    for text, value in (("1e999", sys.float_info.max), ("-2.5E+400", -sys.float_info.max), ("1e-999", 0.0)):
        (call,) = of_hermes(f'<tool_call>{{"name": "add", "arguments": {{"a": {text}}}}}</tool_call>', 3)[2]
        assert call == ("add", {"a": value})
        assert decode_keywords(f"a={text}") == {"a": value}


def test_strings_of_calls_can_be_encoded() -> None:
    """Half of a surrogate pair is no text: such a call stays as it is written. A pair is one character."""
    for escapes, expected in ((r"\ud83d\ude00", "\U0001f600"), (r"\ud83d", None), (r"\ude00\ud83d", None)):
        calls = {
            "hermes": f'<tool_call>{{"name": "get_weather", "arguments": {{"city": "{escapes}"}}}}',
            "llama3_json": f'{{"name": "get_weather", "parameters": {{"city": "{escapes}"}}}}',
            "pythonic": f'[get_weather(city="{escapes}")]',
        }
        for name, text in calls.items():
            splitter = AnswerFormats(tools=name, reasoning=None).splitter(ToolSet.of(TOOLS))
            _, rest, found = joined(split(splitter, [text]))
            assert found == ((("get_weather", {"city": expected}),) if expected else ()), (name, escapes)
            assert rest == ("" if expected else text)


@pytest.mark.parametrize(
    "literal",
    [r"'\033[0m \101\7'", r"'\0'", r"'\08'", r"'\1234'", r"'\x41\u00e9\n\\'", "'a\tb'", '"a\tb"', "'\t'"],
)
def test_strings_of_pythonic_calls_are_those_of_python(literal: str) -> None:
    expected = (("get_weather", {"city": ast.literal_eval(literal)}),)
    for size in (1, 10**9):
        splitter = AnswerFormats(tools="pythonic", reasoning=None).splitter(ToolSet.of(TOOLS))
        text = f"[get_weather(city={literal})]"
        pieces = [text[start : start + size] for start in range(0, len(text), size)]
        assert joined(split(splitter, pieces)) == ("", "", expected)


def test_control_characters_in_strings_of_calls() -> None:
    """JSON allows none, and Python no end of a line."""
    for name, text in (
        ("llama3_json", '{"name": "get_weather", "parameters": {"city": "a\tb"}}'),
        ("pythonic", '[get_weather(city="a\nb")]'),
    ):
        splitter = AnswerFormats(tools=name, reasoning=None).splitter(ToolSet.of(TOOLS))
        assert joined(split(splitter, [text])) == ("", text, ())


def test_type_of_a_deeply_nested_schema_is_found() -> None:
    """The schema comes from a caller; types are looked up on the engine's thread."""
    schema: dict[str, object] = {"type": "integer"}
    for number in range(5000):
        schema = {("anyOf", "oneOf")[number % 2]: [schema]}
    tools = ToolSet.of([{"name": "f", "parameters": {"properties": {"a": schema}}}])
    splitter = AnswerFormats(tools="qwen3_coder", reasoning=None).splitter(tools)
    found = joined(split(splitter, ["<function=f><parameter=a>1</parameter></function>"]))
    assert found == ("", "", (("f", {"a": 1}),))


def test_depth_of_arguments_is_bounded() -> None:
    for depth, calls in ((MAX_DEPTH - 2, 1), (MAX_DEPTH - 1, 0)):
        text = '<tool_call>{"name": "add", "arguments": {"a": ' + "[" * depth + "]" * depth + "}}"
        assert len(of_hermes(text)[2]) == calls  # type: ignore[arg-type]


HOSTILE = [
    ("json", "["),
    ("json", '{"a":'),
    ("hermes", "<tool_call>["),
    ("hermes", "<tool_call>"),
    ("hermes", '<tool_call>{"name": "'),
    ("hermes", " "),
    ("hermes", "<"),
    ("hermes", "<tool_call"),
    ("pythonic", "[add(a=["),
    ("pythonic", "[add(a='"),
    ("mistral", "[TOOL_CALLS]["),
    ("mistral", "[TOOL_CALLS]a[CALL_ID]"),
    ("deepseek", tool_formats.CALL_BEGIN),
    ("deepseek", tool_formats.CALL_BEGIN + "f" + tool_formats.CALL_SEP),
    ("qwen3_coder", "<function=a><parameter=b>"),
    ("qwen3_coder", "<function="),
    ("qwen3_coder", "<function=a><parameter=b></parameter> "),
    ("qwen3_coder", "<function=a><parameter=b>\n</parameter>\n"),
    ("qwen3_coder", "<function=a><parameter=b>\n</function>\n"),
    ("qwen3_coder", "<function=a><parameter=b>\n<parameter=c \n</function> </tool_call> "),
    ("qwen3_coder", "<function=a><parameter=b>\n</tool_call>\n"),
    ("glm", "<tool_call>a<arg_key>"),
    ("glm", "<tool_call>a<arg_key>b</arg_key><arg_value>"),
    ("glm", "<tool_call>a<arg_key>b</arg_key><arg_value>c</arg_value>"),
    ("gemma4", "<|tool_call>call:a{b:"),
    ("gemma4", "<|tool_call>call:a{b:["),
    ("gemma4", '<|tool_call>call:a{b:<|"|>'),
    ("gemma4", '<|tool_call>call:a{<|"|>b<|"|>:<|"|>c<|"|>,'),
    ("mistral", "[TOOL_CALLS]a"),
    ("mistral", "[TOOL_CALLS]a[ARGS]nul"),
    ("json", "\n{"),
    ("llama3_json", '\n{"name": "add"}'),
    ("granite", "<|tool_call|>[{"),
    ("phi4_mini", "functools[{"),
    ("harmony", "<|start|>a<|message|>{"),
    ("harmony", "<|channel|>commentary to=a<|message|>["),
]


@pytest.mark.parametrize("is_thinking", [False, True])
@pytest.mark.parametrize(("name", "unit"), HOSTILE)
def test_parsing_takes_linear_time(name: str, unit: str, is_thinking: bool) -> None:
    """Counted in calls of Python functions, which do not depend on the machine."""
    import sys

    def cost(num_units: int) -> int:
        formats = AnswerFormats(tools=name, reasoning="think" if is_thinking else None)
        splitter = formats.splitter(ToolSet.of(TOOLS), is_thinking=is_thinking)
        num_calls = 0

        def count(frame: object, event: str, arg: object) -> None:
            nonlocal num_calls
            num_calls += event in ("call", "c_call")

        text = unit * num_units
        sys.setprofile(count)
        try:
            for start in range(0, len(text), 64):
                splitter.push(text[start : start + 64])
            splitter.flush()
        finally:
            sys.setprofile(None)
        return num_calls

    assert cost(400) <= 2.2 * cost(200) + 200


def test_megabytes_of_brackets_are_text() -> None:
    for text in (
        "[" * 10**6,
        "<tool_call>" + "[" * 10**6,
        '{"a":' * 10**5,
        "<|tool_call>call:a{a:" + "[" * 10**6,
        "<|tool_call>call:a" + "{a:" * 10**5,
    ):
        for tools in ("json", "hermes", "pythonic", "gemma4"):
            splitter = AnswerFormats(tools=tools, reasoning=None).splitter(ToolSet.of(TOOLS))
            assert joined(split(splitter, [text])) == ("", text, ())


def test_reasoning_that_the_prompt_has_opened() -> None:
    think = AnswerFormats(tools=None, reasoning="think")
    for prompt, continued, expected in (
        ("<|Assistant|><think>\n", None, True),
        ("<|Assistant|><think>", None, True),
        ("user: <think>\nassistant: ", None, False),
        ("<think>\n\n</think>\n\n", None, False),
        ("... <think>\nI ", "<think>\nI ", True),
        ("... <think>a</think>I ", "<think>a</think>I ", False),
        ("user: <think> assistant: I ", "I ", False),
    ):
        assert think.is_thinking(prompt, continued) is expected, prompt
    assert not AnswerFormats(tools=None, reasoning=None).is_thinking("<think>", None)
    gemma = AnswerFormats(tools=None, reasoning="gemma4")
    for prompt, expected in (("<|turn>model\n", False), ("<|channel>thought\n<channel|>", False)):
        assert gemma.is_thinking(prompt, None) is expected
    assert gemma.is_thinking("<|turn>model\n<|channel>thought\n", None)
    for text in ("hm\n</think>\n\nYes.", "\n<think>\nhm</think>Yes."):
        assert of_hermes(text, is_thinking=True) == ("hm", "Yes.", ())
    assert of_hermes("hm", is_thinking=True) == ("hm", "", ())


@pytest.mark.parametrize("size", [1, 3, 10**9])
@pytest.mark.parametrize(
    ("raw", "thought", "text"),
    [
        ("<think>a</think>\n<response>b</response>", "a", "b"),
        ("<think>a</think><response>\nb</response>", "a", "b"),
        ("<think>a</think><response>b", "a", "b"),
        ("<think>a</think> b <response>c</response>", "a", "b <response>c</response>"),
        (
            "Here is my thought process:\na\nHere is my response:\nThe tag </response>.",
            "a",
            "The tag </response>.",
        ),
        ("Use <response> and </response> in XML.", "", "Use <response> and </response> in XML."),
        ('{"a": "<response>x</response>"}', "", '{"a": "<response>x</response>"}'),
        ("<response>b</response>", "", "<response>b</response>"),
        ("<think>a</think>\n<respon", "a", "<respon"),
    ],
)
def test_response_of_granite_is_marked_directly_behind_reasoning(
    raw: str, thought: str, text: str, size: int
) -> None:
    splitter = new_splitter(FAMILIES["granite"])
    pieces = [raw[start : start + size] for start in range(0, len(raw), size)]
    assert joined(split(splitter, pieces)) == (thought, text, ())


def test_harmony_goes_on_inside_of_a_message() -> None:
    formats = AnswerFormats(tools="harmony", reasoning="harmony")
    for prompt, expected in (
        ("<|start|>user<|message|><|end|><|start|>assistant<|channel|>final<|message|>It ", ("", "is.", ())),
        ("<|start|>assistant<|channel|>analysis<|message|>It ", ("is.", "", ())),
    ):
        assert joined(split(formats.splitter(ToolSet.of(TOOLS), prompt=prompt), ["is."])) == expected


def test_calls_are_not_looked_for_without_tools() -> None:
    for name, reply in REPLIES:
        tools, reasoning = FAMILIES[name].formats
        splitter = AnswerFormats(tools=tools, reasoning=reasoning).splitter(
            ToolSet.of(None), prompt="<|start|>a"
        )
        found = joined(split(splitter, [reply.raw]))
        assert found[0] == reply.reasoning and found[2] == ()
        assert bool(found[1]) == bool(reply.text or reply.calls)


def test_bare_calls_must_name_a_tool_that_was_given() -> None:
    for name in ("json", "llama3_json"):
        formats = AnswerFormats(tools=name, reasoning=None)
        for text in ('{"name": "Bob", "arguments": {}}', f'{WEATHER} {{"name": "Bob"}}', f"I say {WEATHER}"):
            _, found, calls = joined(split(formats.splitter(ToolSet.of(TOOLS)), [text]))
            assert isinstance(found, str) and text.endswith(found)
            assert len(calls) == text.startswith(WEATHER)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "value",
    [
        "see <parameter=x>a</parameter> in XML",
        "</parameter>",
        "a</parameter></parameter>\n\n</parameter> b",
        "<a>\n</parameter>\n</a>",
        "</parameter></tool_call>",
        "</parameter>\n<tool_call>",
        "</parameter",
    ],
)
def test_value_may_contain_the_end_of_a_parameter(value: str) -> None:
    first, second = f"<parameter=city>\n{value}\n</parameter>\n", f"<parameter=unit>{value}</parameter>\n"
    raw = f"<tool_call>\n<function=get_weather>\n{first}{second}</function>\n</tool_call> So."
    expected = ("", "So.", (("get_weather", {"city": value, "unit": value}),))
    for size in (1, 2, 3, 7, 10**9):
        splitter = AnswerFormats(tools="qwen3_coder", reasoning=None).splitter(ToolSet.of(TOOLS))
        assert joined(split(splitter, [raw[at : at + size] for at in range(0, len(raw), size)])) == expected
    for length in range(len("<tool_call>"), raw.index("</function>") + 10):
        splitter = AnswerFormats(tools="qwen3_coder", reasoning=None).splitter(ToolSet.of(TOOLS))
        assert joined(split(splitter, [raw[:length]])) == ("", raw[:length], ())
        assert splitter.is_unfinished


def test_call_without_the_end_of_its_function_leaves_the_next_call() -> None:
    parameter = "<function=add>\n<parameter=numbers>\n[1]\n</parameter>\n"
    for end in ("</tool_call>\n<tool_call>\n", "<tool_call>\n", ""):
        splitter = AnswerFormats(tools="qwen3_coder", reasoning=None).splitter(ToolSet.of(TOOLS))
        raw = f"{parameter}{end}{parameter}</function>"
        found = joined(split(splitter, [raw]))
        assert found[2] == (("add", {"numbers": [1]}),)
        assert splitter.failure is not None and not splitter.is_unfinished


@pytest.mark.parametrize("text", ["[]", "[] is the answer", "[ ]\n\nNo items."])
def test_empty_list_is_text(text: str) -> None:
    for name in ("json", "llama3_json"):
        for size in (1, 10**9):
            splitter = AnswerFormats(tools=name, reasoning=None).splitter(ToolSet.of(TOOLS))
            pieces = [text[start : start + size] for start in range(0, len(text), size)]
            assert joined(split(splitter, pieces)) == ("", text, ())


def test_ids_are_the_models_own_or_new() -> None:
    family = FAMILIES["mistral"]
    (call,) = [
        call for part in split(new_splitter(family), [family.replies[2].raw]) for call in part.tool_calls
    ]
    assert call.id == "abc123DEF"
    text = f'[TOOL_CALLS][{WEATHER}, {WEATHER[:-1]}, "id": "a1"}}, {WEATHER[:-1]}, "id": "{"a" * 99}"}}]'
    first, second, third = [
        call.id for part in split(new_splitter(family), [text]) for call in part.tool_calls
    ]
    assert second == "a1" and len({first, second, third}) == 3
    assert all(len(each) == 9 and each.isalnum() and each.isascii() for each in (first, third))


@pytest.mark.parametrize("name", FAMILIES)
def test_formats_are_found_in_the_template(name: str) -> None:
    family = FAMILIES[name]
    found = detect_formats(family.template)
    assert (found.tools, found.reasoning) == family.formats
    assert detect_formats(family.template, tool_format=None).tools in (None, "harmony")


def test_formats_can_be_named() -> None:
    found = detect_formats("", tool_format="mistral", reasoning_format="think")
    assert (found.tools, found.reasoning) == ("mistral", "think")
    assert detect_formats("").tools == "json" and detect_formats("").reasoning is None
    for options in ({"tool_format": "harmony"}, {"reasoning_format": "harmony"}):
        assert detect_formats("<tool_call>", **options).is_harmony


def test_every_format_of_the_config_has_a_parser() -> None:
    assert {*tool_formats.TOOL_FORMATS, "auto", "harmony"} == set(TOOL_FORMATS)
    assert {*reasoning.REASONING_FORMATS, "auto", "harmony"} == set(REASONING_FORMATS)
    named = {name for rows in (answer_formats.TOOL_MARKERS,) for name, _ in rows}
    assert named <= set(TOOL_FORMATS)
    openers = [each.openers for each in tool_formats.TOOL_FORMATS.values()]
    for markers in openers:  # a parser could not tell them apart while they arrive
        assert not [a for a in markers for b in markers if a != b and b.startswith(a)]
