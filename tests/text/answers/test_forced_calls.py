"""Grammars of tool calls: answers that they allow are calls, in each family's format."""

from __future__ import annotations

import json
import random

import jsonschema
import msgspec
import numpy as np
import pytest
from chat_families import ADD, FAMILIES, TOOLS, WEATHER, family_tokenizer

from drift_sdk import JsonSchema, Lark, Regex, RequestError
from drift_sdk.grammars import After, AnyGrammar, AnyOf, Grammar
from drift_sdk.text.answers.answer import GRAMMARS, final_message, forced_calls, optional_calls
from drift_sdk.text.answers.formats import AnswerFormats, detect_formats
from drift_sdk.text.answers.tool_formats import noted
from drift_sdk.text.grammar import GrammarConstraint, constrain
from drift_sdk.text.tokenizer import Tokenizer
from drift_sdk.text.tools import ToolSet

EOS = 256
THINK = {
    "think": "<think>Hm.</think>\n\n",
    "granite": "<think>Hm.</think>\n",
    "mistral": "[THINK]Hm.[/THINK]",
    "gemma4": "<|channel>thought\nHm.\n<channel|>",
}

# An answer of two calls (Harmony: one) as each family's grammar has it.
ANSWERS = {
    "hermes": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo", "unit": "C"}}\n</tool_call>'
    '\n<tool_call>\n{"name": "add", "arguments": {"numbers": [1, 2]}}\n</tool_call>',
    "llama": '{"name": "get_weather", "parameters": {"city": "Oslo", "unit": "C"}}; '
    '{"name": "add", "parameters": {"numbers": [1, 2]}}',
    "pythonic": '[get_weather(city="Oslo", unit="C", exact=True), add(numbers=[1, 2])]',
    "mistral": '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Oslo", "unit": "C"}}, '
    '{"name": "add", "arguments": {"numbers": [1, 2]}}]',
    "magistral": '[TOOL_CALLS]get_weather[ARGS]{"city": "Oslo", "unit": "C"}'
    '[TOOL_CALLS]add[ARGS]{"numbers": [1, 2]}',
    "qwen3_coder": "<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n"
    "<parameter=unit>\nC\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=add>\n"
    "<parameter=numbers>\n[1, 2]\n</parameter>\n</function>\n</tool_call>",
    "glm": "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Oslo</arg_value>"
    "<arg_key>unit</arg_key><arg_value>C</arg_value></tool_call>"
    "<tool_call>add<arg_key>numbers</arg_key><arg_value>[1, 2]</arg_value></tool_call>",
    "gemma4": '<|tool_call>call:get_weather{city:<|"|>Oslo<|"|>,unit:<|"|>C<|"|>}<tool_call|>'
    "<|tool_call>call:add{numbers:[1,2]}<tool_call|>",
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
    '{"city": "Oslo", "unit": "C"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n'
    '```json\n{"numbers": [1, 2]}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
    '{"city": "Oslo", "unit": "C"}<｜tool▁call▁end｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>'
    '{"numbers": [1, 2]}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "granite": '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Oslo", "unit": "C"}}, '
    '{"name": "add", "arguments": {"numbers": [1, 2]}}]',
    "phi4_mini": '<|tool_call|>{"name": "get_weather", "arguments": {"city": "Oslo", "unit": "C"}}'
    '<|/tool_call|><|tool_call|>{"name": "add", "arguments": {"numbers": [1, 2]}}<|/tool_call|>',
    "harmony": "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
    '{"city": "Oslo", "unit": "C"}',
}


class Case:
    """A family's formats, tokenizer and grammar."""

    def __init__(
        self,
        name: str,
        tools: list[dict[str, object]],
        *,
        is_thinking: bool = False,
        reasons: bool = True,
        is_single: bool = False,
    ) -> None:
        family = FAMILIES[name]
        found = detect_formats(family.template)
        self.formats = found if reasons else AnswerFormats(tools=found.tools, reasoning=None)
        self.tokenizer: Tokenizer = family_tokenizer(family)
        self.tools = ToolSet.of(tools)
        self.grammar: AnyGrammar = forced_calls(
            self.formats,
            self.tools,
            self.tokenizer,
            template=family.template,
            is_thinking=is_thinking,
            is_single=is_single,
        )

    def constraint(self) -> GrammarConstraint:
        vocab_size = self.tokenizer.vocab_size
        return constrain(self.grammar, self.tokenizer, vocab_size=vocab_size, eos_token_ids=(EOS,))

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)


def allowed_ids(constraint: GrammarConstraint) -> list[int]:
    bits = np.unpackbits(constraint.masks(())[0].view(np.uint8), bitorder="little")
    return [int(token_id) for token_id in np.flatnonzero(bits)]


def is_accepted(case: Case, text: str) -> bool:
    """Whether an answer may consist of this text."""
    constraint = case.constraint()
    for token_id in case.ids(text):
        if token_id not in allowed_ids(constraint):
            return False

        constraint.advance([token_id])
    return EOS in allowed_ids(constraint)


@pytest.mark.parametrize("name", ANSWERS)
def test_documented_answer_is_accepted(name: str) -> None:
    case = Case(name, TOOLS)
    answer = ANSWERS[name]
    assert is_accepted(case, answer)
    assert not is_accepted(case, answer.replace("get_weather", "get_wether"))
    assert not is_accepted(case, answer.replace("Oslo", "a much too long name"))
    assert not is_accepted(case, f"I look. {answer}")
    assert not is_accepted(case, "")
    if name == "harmony":
        thought = "<|channel|>analysis<|message|>a<|end|><|start|>assistant"
        assert is_accepted(case, thought + answer) and not is_accepted(case, thought)
    elif case.formats.reasoning is not None:
        thought = THINK[case.formats.reasoning]
        assert is_accepted(case, thought + answer) and not is_accepted(case, thought)
        goes_on = Case(name, TOOLS, is_thinking=True)
        opener = thought[: thought.index("Hm.")]
        assert is_accepted(goes_on, thought.removeprefix(opener) + answer)
        assert not is_accepted(goes_on, answer)


@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize("is_single", [False, True])
def test_any_accepted_answer_is_calls_alone(name: str, is_single: bool) -> None:
    """Random walks through the grammar. Arguments are those that the tools' schemas describe."""
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
    case = Case(name, TOOLS, reasons=False, is_single=is_single)
    assert is_accepted(case, ANSWERS[name]) == (not is_single or name == "harmony")
    shown = case.tokenizer.special_ids_of(case.formats.markers)
    for seed in range(1 if is_single else 3):
        draw, constraint, ids = random.Random(seed), case.constraint(), []
        while True:
            choices = allowed_ids(constraint)
            if EOS in choices and (draw.random() < 0.3 or choices == [EOS]):
                break

            # Printable characters, so that strings are text; a Harmony answer without reasoning.
            likely = [i for i in choices if 32 <= i < 127 or i == 10 or i > EOS] or choices
            if name == "harmony" and len(ids) == 1:
                likely = [ord("c")]
            ids.append(draw.choice(likely))
            constraint.advance([ids[-1]])
            assert len(ids) < 4000
        raw = case.tokenizer.detokenizer(shown).push(ids)
        splitter = case.formats.splitter(case.tools, prompt="<|start|>assistant")
        parts = [splitter.push(raw), splitter.flush()]
        calls = [call for part in parts for call in part.tool_calls]
        assert calls and splitter.failure is None, raw
        assert len(calls) == 1 or not is_single
        assert not any(part.text or part.reasoning for part in parts), raw
        for call in calls:
            jsonschema.validate(call.arguments, schemas[call.name])


def test_grammar_of_one_tool_allows_no_other() -> None:
    for name, answer in ANSWERS.items():
        assert not is_accepted(Case(name, [ADD]), answer), name
    only_weather = Case("hermes", [WEATHER])
    assert is_accepted(only_weather, ANSWERS["hermes"].partition('\n<tool_call>\n{"name": "add"')[0])


def test_tools_without_parameters_and_with_references() -> None:
    tools = [
        {"name": 'say "hi"', "parameters": {}},
        {
            "name": "point",
            "parameters": {
                "properties": {"at": {"$ref": "#/$defs/place"}, "n": {"type": ["integer", "null"]}},
                "$defs": {"place": {"enum": [[1, 2]]}},
            },
        },
    ]
    for name in ("hermes", "pythonic", "qwen3_coder"):
        given = tools if name == "hermes" else tools[1:]  # the others do not quote names
        case = Case(name, given, reasons=False)  # type: ignore[arg-type]
        written = {
            "hermes": '<tool_call>\n{"name": "point", "arguments": {"at": [1, 2], "n": null}}\n</tool_call>',
            "pythonic": "[point(n=null), point(at=[1, 2]), point(at=[1, 2], n=3), point()]",
            "qwen3_coder": "<tool_call>\n<function=point>\n<parameter=at>\n[1, 2]\n</parameter>\n"
            "</function>\n</tool_call>",
        }
        assert is_accepted(case, written[name]), name
    quoted = '<tool_call>\n{"name": "say \\"hi\\"", "arguments": {}}\n</tool_call>'
    assert is_accepted(Case("hermes", tools), quoted)  # type: ignore[arg-type]


CALLS = {
    "hermes": '<tool_call>\n{{"name": "send", "arguments": {{{}}}}}\n</tool_call>',
    "llama": '{{"name": "send", "parameters": {{{}}}}}',
    "pythonic": "[send({})]",
    "qwen3_coder": "<tool_call>\n<function=send>\n{}</function>\n</tool_call>",
    "glm": "<tool_call>send{}</tool_call>",
    "gemma4": "<|tool_call>call:send{{{}}}<tool_call|>",
}
"""Calls of a tool in formats that write arguments in different ways."""


def call_of(name: str, arguments: dict[str, str]) -> str:
    """A call of the tool send with arguments that are written as JSON."""
    if name == "qwen3_coder":
        texts = [
            f"<parameter={key}>\n{value.strip(chr(34))}\n</parameter>\n" for key, value in arguments.items()
        ]
        return CALLS[name].format("".join(texts))

    if name == "glm":
        texts = [
            f"<arg_key>{key}</arg_key><arg_value>{value.strip(chr(34))}</arg_value>"
            for key, value in arguments.items()
        ]
        return CALLS[name].format("".join(texts))

    if name == "gemma4":
        found = {key: json.loads(value) if value != "two" else value for key, value in arguments.items()}
        return CALLS[name].format(noted(found)[1:-1])

    form = "{}={}" if name == "pythonic" else '"{}": {}'
    return CALLS[name].format(", ".join(form.format(*each) for each in arguments.items()))


def calls_in(case: Case, text: str) -> list[dict[str, object]]:
    splitter = case.formats.splitter(case.tools)
    part = splitter.push(text) + splitter.flush()
    return [dict(call.arguments) for call in part.tool_calls]


@pytest.mark.parametrize("name", CALLS)
def test_schema_that_is_a_reference(name: str) -> None:
    """As msgspec describes a Struct: the parameters are a reference to one of their definitions."""

    class Args(msgspec.Struct):
        city: str
        days: int = 1

    case = Case(name, [{"name": "send", "parameters": msgspec.json.schema(Args)}], reasons=False)
    call = call_of(name, {"city": '"Oslo"', "days": "2"})
    assert is_accepted(case, call) and calls_in(case, call) == [{"city": "Oslo", "days": 2}]
    assert is_accepted(case, call_of(name, {"city": '"Oslo"'}))
    for wrong in ({}, {"days": "2"}, {"city": '"Oslo"', "other": "1"}, {"city": '"Oslo"', "days": "two"}):
        assert not is_accepted(case, call_of(name, wrong)), wrong


@pytest.mark.parametrize("name", CALLS)
def test_references_refer_to_the_parameters(name: str) -> None:
    tree: dict[str, object] = {
        "type": "object",
        "properties": {"size": {"type": "integer"}, "child": {"$ref": "#"}},
        "required": ["size"],
    }
    case = Case(name, [{"name": "send", "parameters": tree}], reasons=False)
    for child, is_right in (('{"size": 2}', True), ('{"size": "a"}', False), ("{}", False), ("2", False)):
        call = call_of(name, {"size": "1", "child": child})
        assert is_accepted(case, call) == is_right, child
    assert calls_in(case, call_of(name, {"size": "1", "child": '{"size": 2}'})) == [
        {"size": 1, "child": {"size": 2}}
    ]
    same: dict[str, object] = {
        "properties": {"a": {"type": "integer"}, "b": {"$ref": "#/properties/a"}},
        "required": ["a", "b"],
    }
    case = Case(name, [{"name": "send", "parameters": same}], reasons=False)
    assert is_accepted(case, call_of(name, {"a": "1", "b": "2"}))
    assert not is_accepted(case, call_of(name, {"a": "1", "b": '"x"'}))


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/$defs/place"},
        {"allOf": [{"$ref": "#/$defs/place"}], "description": "Where."},
        {"anyOf": [{"$ref": "#/$defs/place"}, {"type": "null"}]},
        {"anyOf": [{"anyOf": [{"$ref": "#/$defs/place"}]}]},
        {"properties": {"street": {"type": "string"}}, "required": ["street"], "additionalProperties": False},
    ],
)
def test_argument_that_is_an_object_by_other_words_than_its_type(schema: dict[str, object]) -> None:
    place = {"type": "object", "properties": {"street": {"type": "string"}}, "required": ["street"]}
    parameters = {
        "properties": {"at": schema},
        "required": ["at"],
        "$defs": {"place": {**place, "additionalProperties": False}},
    }
    case = Case("qwen3_coder", [{"name": "send", "parameters": parameters}], reasons=False)
    call = call_of("qwen3_coder", {"at": '{"street": "Rue"}'})
    assert is_accepted(case, call) and calls_in(case, call) == [{"at": {"street": "Rue"}}]
    for wrong in ("no object", '{"street": 1}', "{}"):
        assert not is_accepted(case, call_of("qwen3_coder", {"at": wrong}))


@pytest.mark.parametrize("value", ["see <parameter=x>a</parameter> in XML", "</parameter></tool_call>"])
def test_forced_call_with_the_end_of_a_parameter_in_a_value_is_a_call(value: str) -> None:
    for schema, wanted in (({"type": "string"}, value), ({"type": "array"}, [value])):
        tool = {"name": "send", "parameters": {"properties": {"a": schema}, "required": ["a"]}}
        case = Case("qwen3_coder", [tool], reasons=False)
        call = call_of("qwen3_coder", {"a": value if wanted == value else json.dumps(wanted)})
        assert is_accepted(case, call) and calls_in(case, call) == [{"a": wanted}]


def test_array_and_enumeration_by_other_words_than_their_type() -> None:
    parameters = {
        "properties": {"unit": {"$ref": "#/$defs/unit"}, "sizes": {"items": {"type": "integer"}}},
        "required": ["unit", "sizes"],
        "$defs": {"unit": {"type": "string", "enum": ["C", "F"]}},
    }
    case = Case("qwen3_coder", [{"name": "send", "parameters": parameters}], reasons=False)
    call = call_of("qwen3_coder", {"unit": "C", "sizes": "[1, 2]"})
    assert is_accepted(case, call) and calls_in(case, call) == [{"unit": "C", "sizes": [1, 2]}]
    assert not is_accepted(case, call_of("qwen3_coder", {"unit": "K", "sizes": "[1, 2]"}))


@pytest.mark.parametrize("parameters", [{}, {"type": "object", "properties": {}}, {"type": "object"}])
def test_tool_without_parameters_is_called_without_arguments(parameters: dict[str, object]) -> None:
    """Without `properties`, a schema of an object allows any."""
    call = '<tool_call>\n{{"name": "now", "arguments": {}}}\n</tool_call>'
    case = Case("hermes", [{"name": "now", "parameters": parameters}], reasons=False)
    assert is_accepted(case, call.format("{}"))
    assert is_accepted(case, call.format('{"a": 1}')) == (parameters == {"type": "object"})


def test_forced_call_with_any_number_is_a_call() -> None:
    """A grammar allows exponents of any size."""
    tool = {"name": "f", "parameters": {"properties": {"x": {"type": "number"}}, "required": ["x"]}}
    case = Case("hermes", [tool], reasons=False)
    for number in ("1", "-2.5", "6.02e23", "1E-07", "1e999", "-1e99999"):
        answer = f'<tool_call>\n{{"name": "f", "arguments": {{"x": {number}}}}}\n</tool_call>'
        assert is_accepted(case, answer)
        splitter = case.formats.splitter(case.tools)
        part = splitter.push(answer) + splitter.flush()
        assert json.loads(json.dumps(part.tool_calls[0].arguments, allow_nan=False)) and not part.text


CITY = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "size": {"type": "integer"}},
    "required": ["name", "size"],
    "additionalProperties": False,
}
CITIES = (
    '{"name": "Oslo", "size": 3}',
    '{\n  "name": "get_weather",\n  "size": 3\n}',
    '{"name":"add","size":1}',
)
OWN: tuple[tuple[Grammar, tuple[str, ...]], ...] = (
    (JsonSchema(CITY), CITIES),
    (JsonSchema({"type": "array", "items": {"type": "string"}}), ("[]", '["add", "b"]')),
    (Regex("[A-Z][a-z]+"), ("Oslo",)),
    (Lark('start: x "b"\nx: "a" | "{"\n%ignore " "'), ("ab", "{ b")),
)
"""Grammars of requests, and texts that they describe. `start` and rules of a Lark grammar are its own."""


@pytest.mark.parametrize("name", ANSWERS)
def test_optional_calls_stand_beside_another_grammar(name: str) -> None:
    case = Case(name, TOOLS)
    calls = optional_calls(case.formats, case.tools, case.tokenizer, template=FAMILIES[name].template)
    for own, texts in OWN:
        case.grammar = AnyOf((calls, own))
        for text in (*texts, ANSWERS[name]):
            assert is_accepted(case, text), (own, text)
        for text in ("", "I look.", ANSWERS[name].replace("get_weather", "get_wether"), f"{texts[0]}!"):
            assert not is_accepted(case, text), (own, text)


def test_any_grammar_can_describe_the_final_message_of_harmony() -> None:
    case = Case("harmony", TOOLS)
    calls = optional_calls(case.formats, case.tools, case.tokenizer, template=FAMILIES["harmony"].template)
    final = "<|channel|>final<|message|>"
    thought = "<|channel|>analysis<|message|>a<|end|><|start|>assistant"
    for own, texts in OWN:
        message = After(final_message(case.formats, case.tokenizer), own)
        for case.grammar, has_calls in ((message, False), (AnyOf((calls, message)), True)):
            assert is_accepted(case, ANSWERS["harmony"]) == has_calls
            assert all(is_accepted(case, start + texts[0]) for start in (final, thought + final)), own
            assert not any(is_accepted(case, start + texts[0]) for start in ("", thought, final + "!")), own


@pytest.mark.parametrize("char", ["\x7f", "\x01", "\x85", "\u2028", '"', "\\", "é"])
def test_names_keys_and_values_may_have_any_character(char: str) -> None:
    """llguidance reads no literal that has U+007F as it is."""
    name = json.dumps(char, ensure_ascii=False)
    case = Case("hermes", [{"name": char}], reasons=False)
    assert is_accepted(case, f'<tool_call>\n{{"name": {name}, "arguments": {{}}}}\n</tool_call>')
    schema = {"properties": {char: {"enum": [char]}}, "required": [char]}
    case = Case("qwen3_coder", [{"name": "send", "parameters": schema}], reasons=False)
    call = (
        f"<tool_call>\n<function=send>\n<parameter={char}>\n{char}\n</parameter>\n</function>\n</tool_call>"
    )
    assert is_accepted(case, call) and calls_in(case, call) == [{char: char}]


PLAIN_NAMES = (
    "pythonic",
    "magistral",
    "qwen3_coder",
    "glm",
    "gemma4",
    "deepseek_v3",
    "deepseek_v31",
    "harmony",
)
"""Families that write the names of tools without quotes."""


@pytest.mark.parametrize("tool", ["my tool", 'a"b', "a<b", "a\nb", "x" * 257])
def test_names_that_no_call_can_have_are_rejected(tool: str) -> None:
    for name in ANSWERS:
        if name in PLAIN_NAMES:
            with pytest.raises(RequestError, match="letters, digits") as caught:
                Case(name, [{"name": tool}])
            assert caught.value.field == "tool_choice"
        else:
            Case(name, [{"name": tool}]).constraint()


@pytest.mark.parametrize(
    ("name", "argument"),
    [("pythonic", "a-b"), ("pythonic", "1"), ("pythonic", 1), ("qwen3_coder", "a>b"), ("qwen3_coder", None)]
    + [("glm", "a<b"), ("glm", " a"), ("glm", "a\nb"), ("glm", 3)]
    + [("gemma4", "a:b"), ("gemma4", "a "), ("gemma4", "{"), ("gemma4", None)],
)
def test_arguments_that_no_call_can_have_are_rejected(name: str, argument: object) -> None:
    with pytest.raises(RequestError, match="arguments of f"):
        Case(name, [{"name": "f", "parameters": {"properties": {argument: {"type": "integer"}}}}])


def test_enumerations_without_a_type() -> None:
    """Values are written and read by their own types."""

    def case(name: str, schema: object) -> Case:
        return Case(name, [{"name": "f", "parameters": {"properties": {"a": schema}}}], reasons=False)

    answers = {
        "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=a>\n{}\n</parameter>\n</function>\n"
        "</tool_call>",
        "pythonic": "[f(a={})]",
        "glm": "<tool_call>f<arg_key>a</arg_key><arg_value>{}</arg_value></tool_call>",
    }
    strings, others = [{"enum": ["x"]}, {"const": "x"}], {"1": 1, "null": None, "true": True, '"x"': "x"}
    for name, answer in answers.items():
        mixed = case(name, {"enum": list(others.values())})
        for text, value in others.items():
            assert is_accepted(mixed, answer.format(text)), (name, text)
            assert is_accepted(case(name, {"const": value}), answer.format(text)) or value == "x"
            splitter = mixed.formats.splitter(mixed.tools)
            assert (splitter.push(answer.format(text)) + splitter.flush()).tool_calls[0].arguments == {
                "a": value
            }
        assert not any(is_accepted(mixed, answer.format(text)) for text in ("", "2", "false", "False"))
        for schema in strings:
            quote = '"' if name == "pythonic" else ""
            assert is_accepted(case(name, schema), answer.format(f"{quote}x{quote}"))
            assert not is_accepted(case(name, schema), answer.format(f"{quote}y{quote}"))
        for wrong in (3, {"x": 1}, []):
            with pytest.raises(RequestError):
                case(name, {"type": "string", "enum": wrong}).constraint()


def test_every_format_has_a_grammar() -> None:
    from drift_sdk.config import TOOL_FORMATS

    assert {*GRAMMARS, "auto"} == set(TOOL_FORMATS)
