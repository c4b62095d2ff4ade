"""Calls of Gemma 4, whose values are not JSON: their notation, and grammars of the schemas of arguments."""

from __future__ import annotations

import random
from typing import Any

import jsonschema
import numpy as np
import pytest
from chat_families import FAMILIES, SIZES, calls_of, family_tokenizer

from drift_sdk import RequestError
from drift_sdk.text.answers.answer import MAX_JOINED, forced_calls
from drift_sdk.text.answers.formats import AnswerFormats
from drift_sdk.text.answers.tool_formats import MalformedCall, UnfinishedCall, noted
from drift_sdk.text.grammar import GrammarConstraint, constrain
from drift_sdk.text.tools import MAX_DEPTH, ToolSet

EOS = 256
TOKENIZERS = {
    "tokens": family_tokenizer(FAMILIES["gemma4"]),
    "text": family_tokenizer(FAMILIES["phi4_mini"]),
}
"""With the markers as special tokens, and without them."""

VALUES = [
    "",
    "plain",
    "quotes \" and ' and \\",
    "lines\n\tand {brackets}, [others]: 1",
    "<|tool_call>call:add{}<tool_call|>",
    '<|"| is no end, <channel|> neither',
    "é 😀 \x7f",
    0,
    -15,
    2.5e-9,
    True,
    False,
    None,
    [],
    {},
    [["a", []], {"b": [{"c d": "}"}, None]}, -1],
    {"Z": 1, "a": {"b-c": "x,y:z"}, "$ref": [True]},
]


def called(*values: Any) -> str:
    arguments = {f"a{index:02}": value for index, value in enumerate(values)}
    return f"<|tool_call>call:f{noted(arguments)}<tool_call|>"


@pytest.mark.parametrize("size", SIZES)
def test_values_are_read_as_they_are_noted(size: int) -> None:
    expected = {f"a{index:02}": value for index, value in enumerate(VALUES)}
    text, calls, failure = calls_of("gemma4", f"A.{called(*VALUES)}{called()}\nB.", size)
    assert (text, calls, failure) == ("A.\nB.", [("f", expected), ("f", {})], None)
    kinds = [type(each) for each in calls[0][1].values()]
    assert kinds == [type(each) for each in VALUES]


def test_notation() -> None:
    value = {"b": [1, 'a"\n'], "A": {"y": None, "X": True}}
    assert noted(value) == '{A:{X:true,y:null},b:[1,<|"|>a"\n<|"|>]}'
    for wrong in (float("nan"), [float("inf")]):
        with pytest.raises(ValueError, match="Out of range"):
            noted(wrong)


@pytest.mark.parametrize(
    "inside",
    [
        "",
        "{",
        "call:",
        "call:f",
        "call:f{a}",
        "call:f{a:}",
        "call:f{a:1,}",
        "call:f{,a:1}",
        "call:f{a:1 b:2}",
        "call:f{a:1,a:2}",
        "call:f{a:{b:1,b:1}}",
        "call:f{a:Paris}",
        "call:f{a:NaN}",
        "call:f{a:01}",
        'call:f{"a":1}',
        'call:f{a:"x"}',
        "call:f{a:[1,]}",
        "call:f{a:[1}",
        "call:f[]",
        'call:f{a:<|"|>x<|"|><|"|>y<|"|>}',
        "f{a:1}",
        f"call:{'f' * 257}{{}}",
    ],
)
def test_malformed_call_is_text(inside: str) -> None:
    raw = f"A. <|tool_call>{inside}<tool_call|> B."
    for size in SIZES:
        text, calls, failure = calls_of("gemma4", raw, size)
        assert (text, calls) == (raw, []) and type(failure) is MalformedCall
        text, calls, _ = calls_of("gemma4", f"{called(1)}{raw}{called(2)}", size)
        assert (text, calls) == (raw, [("f", {"a00": 1}), ("f", {"a00": 2})])


def test_call_that_is_cut_is_text() -> None:
    raw = called(*VALUES)
    end = raw.rindex("}") + 1
    for length in range(len("<|tool_call>"), end):
        text, calls, failure = calls_of("gemma4", raw[:length], is_cut=True)
        assert (text, calls) == (raw[:length], []) and isinstance(failure, UnfinishedCall), raw[:length]
    for length in range(end, len(raw)):
        assert len(calls_of("gemma4", raw[:length], is_cut=True)[1]) == 1


def test_values_are_nested_up_to_a_depth() -> None:
    for opening, inner, closing in (("[", "", "]"), ("{a:", "{}", "}")):
        for num_brackets, is_call in ((MAX_DEPTH, True), (MAX_DEPTH + 1, False)):
            depth = num_brackets - 1 - (len(inner) > 0)
            raw = f"<|tool_call>call:f{{a:{opening * depth}{inner}{closing * depth}}}<tool_call|>"
            assert len(calls_of("gemma4", raw)[1]) == is_call


class Grammar:
    """The grammar of one call of a tool f with these parameters."""

    def __init__(self, parameters: dict[str, Any], markers: str = "tokens") -> None:
        self.tokenizer = TOKENIZERS[markers]
        self.tools = ToolSet.of([{"name": "f", "parameters": parameters}])
        self.formats = AnswerFormats(tools="gemma4", reasoning=None)
        self._lark = forced_calls(
            self.formats, self.tools, self.tokenizer, template="", is_thinking=False, is_single=True
        )

    def constraint(self) -> GrammarConstraint:
        size = self.tokenizer.vocab_size
        return constrain(self._lark, self.tokenizer, vocab_size=size, eos_token_ids=(EOS,))

    def accepts(self, arguments: dict[str, Any]) -> bool:
        """Whether a call may have these arguments. One that may is read as it was written."""
        raw = f"<|tool_call>call:f{noted(arguments)}<tool_call|>"
        constraint = self.constraint()
        for token_id in self.tokenizer.encode(raw, add_special_tokens=False):
            if token_id not in allowed_ids(constraint):
                return False

            constraint.advance([token_id])
        assert calls_of("gemma4", raw) == ("", [("f", arguments)], None)
        return EOS in allowed_ids(constraint)


def allowed_ids(constraint: GrammarConstraint) -> set[int]:
    bits = np.unpackbits(constraint.masks(())[0].view(np.uint8), bitorder="little")
    return set(map(int, np.flatnonzero(bits)))


PLACE = {
    "type": "object",
    "properties": {"street": {"type": "string"}, "no": {"type": "integer", "minimum": 1}},
    "required": ["street"],
}
SCHEMAS: list[tuple[dict[str, Any], list[Any], list[Any]]] = [
    ({"type": "string"}, ["", 'a "b"\n{}[],:', "<tool_call>"], [1, None, ["a"]]),
    ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "é{\n"], ["", "a", "abcd"]),
    ({"type": "integer", "minimum": -1, "maximum": 20}, [-1, 0, 20], [-2, 21, 1.5, "1", True]),
    ({"type": "number", "exclusiveMinimum": 0}, [0.5, 3], [0, -1, "1"]),
    ({"type": "boolean"}, [True, False], [None, 0, "true"]),
    ({"type": ["integer", "null"]}, [3, None], [True, "3"]),
    (
        {"enum": ["x\n", 1, None, [1, {"a": "b"}], ""]},
        ["x\n", 1, None, [1, {"a": "b"}], ""],
        ["x", 2, [1], {}],
    ),
    ({"const": {"b": [True], "a": 'q"'}}, [{"a": 'q"', "b": [True]}], [{"a": 'q"'}, "a"]),
    ({"type": "array", "items": {"type": "integer"}}, [[], [1], [1, 2, 3]], [["1"], 1, [None]]),
    ({"items": {"type": "string"}, "minItems": 1}, [["a"], ["a", "b"]], [[], [1]]),
    ({"type": "array", "minItems": 2, "maxItems": 3}, [[1, "a"], [[], {}, None]], [[1], [1, 2, 3, 4]]),
    ({"type": "array", "maxItems": 0}, [[]], [[1]]),
    ({"type": "array", "maxItems": 1}, [[], [1]], [[1, 2]]),
    ({"type": "array", "minItems": 1, "maxItems": 1}, [["a"]], [[], [1, 2]]),
    ({"type": "array", "minItems": 2}, [["a", 1], [1, 2, 3]], [[], [1]]),
    (PLACE, [{"street": "Rue", "no": 2}, {"street": ""}], [{}, {"no": 2}, {"street": "a", "no": 0}, "Rue"]),
    ({"$ref": "#/$defs/place"}, [{"street": "Rue"}], [{}, None]),
    ({"anyOf": [{"$ref": "#/$defs/place"}, {"type": "null"}]}, [{"street": "Rue"}, None], [{}, 1]),
    (
        {
            "type": "object",
            "properties": {"a": {}, "b": {}},
            "anyOf": [{"required": ["a"]}, {"required": ["b"]}],
        },
        [{"a": 1}, {"b": [1]}, {"a": "x", "b": 2}],
        [{}],
    ),
    ({"oneOf": [{"type": "integer"}, {"const": "x"}]}, [1, "x"], ["y", None]),
    ({"type": "object"}, [{}, {"a": 1, "_b": {"c": [None]}}], ["a", []]),
    ({"type": "object", "additionalProperties": {"type": "integer"}}, [{}, {"a": 1}], [{"a": "b"}]),
    ({"type": "object", "additionalProperties": False}, [{}], [{"a": 1}]),
    (
        {"type": "object", "properties": {"B": {}, "a": {}, "c": False}},
        [{"B": 1, "a": 2}, {"a": {}}, {}],
        [{"c": 1}, {"d": 1}],
    ),
    ({}, ["a", 1.5, None, [{"a": []}], {"b": True}], []),
    ({"description": "Anything."}, ["a", [1]], []),
]


@pytest.mark.parametrize("markers", TOKENIZERS)
@pytest.mark.parametrize(("schema", "right", "wrong"), SCHEMAS)
def test_values_follow_their_schema(
    schema: dict[str, Any], right: list[Any], wrong: list[Any], markers: str
) -> None:
    parameters = {"properties": {"a": schema}, "required": ["a"], "$defs": {"place": PLACE}}
    validator = jsonschema.Draft202012Validator(parameters)
    grammar = Grammar(parameters, markers)
    for value in right:
        assert grammar.accepts({"a": value}), value
        validator.validate({"a": value})
    for value in wrong:
        assert not grammar.accepts({"a": value}), value
    assert not grammar.accepts({})


@pytest.mark.parametrize("seed", range(3))
def test_any_call_of_nested_schemas_follows_them(seed: int) -> None:
    """Random walks through the grammar."""
    kinds = {f"k{index}": schema for index, (schema, right, _) in enumerate(SCHEMAS) if right}
    parameters = {"type": "object", "properties": kinds, "required": [*kinds], "$defs": {"place": PLACE}}
    grammar, draw = Grammar(parameters), random.Random(seed)
    constraint, ids = grammar.constraint(), list[int]()
    while EOS not in (choices := allowed_ids(constraint)):
        ends = choices & {*map(ord, "]},"), *(i for i in choices if i > EOS)}
        likely = ends if ends and draw.random() < 0.5 else {i for i in choices if 32 <= i < 127} or choices
        ids.append(draw.choice(sorted(likely)))
        constraint.advance([ids[-1]])
        assert len(ids) < 4000
    raw = grammar.tokenizer.detokenizer(grammar.tokenizer.special_ids_of(grammar.formats.markers)).push(ids)
    text, [(_, arguments)], failure = calls_of("gemma4", raw)
    assert text == "" and failure is None and arguments, raw
    jsonschema.validate(arguments, parameters)


def test_arguments_stand_in_the_order_of_the_template() -> None:
    grammar = Grammar({"properties": {"b": {}, "A": {}, "c": {}}, "required": ["c"]})
    for arguments in ({"A": 1, "b": 2, "c": 3}, {"A": 1, "c": 3}, {"b": 2, "c": 3}, {"c": 3}):
        assert grammar.accepts(arguments)
    for arguments in ({"A": 1, "b": 2}, {"b": 2}, {}, {"c": 3, "d": 4}):
        assert not grammar.accepts(arguments)


def test_schemas_may_refer_to_themselves() -> None:
    tree = {
        "type": "object",
        "properties": {"size": {"type": "integer"}, "parts": {"type": "array", "items": {"$ref": "#"}}},
        "required": ["size"],
    }
    grammar = Grammar(tree)
    for parts, is_right in (
        ([], True),
        ([{"size": 1, "parts": [{"size": 2}]}], True),
        ([{"size": 1, "parts": [{"parts": []}]}], False),
        ([{"size": "1"}], False),
    ):
        assert grammar.accepts({"size": 0, "parts": parts}) == is_right


@pytest.mark.parametrize("parameters", [{}, {"type": "object", "properties": {}}, {"type": "object"}])
def test_tool_without_parameters_is_called_without_arguments(parameters: dict[str, Any]) -> None:
    """Without `properties`, a schema of an object allows any."""
    grammar = Grammar(parameters)
    assert grammar.accepts({}) and grammar.accepts({"a": [1]}) == (parameters == {"type": "object"})


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


LOOP = {"type": "object", "anyOf": [{"$ref": "#/$defs/loop"}, {"$ref": "#/$defs/loop"}]}


@pytest.mark.parametrize(
    ("schema", "part"),
    [
        ({"$ref": "#/$defs/missing"}, r"\$ref"),
        ({"$ref": "https://example.org/schema"}, r"\$ref"),
        ({"allOf": [{"type": "integer"}, {"minimum": 1}]}, "allOf"),
        ({"type": "object", "anyOf": [{"type": "null"}]}, "alternatives that differ"),
        (
            {"type": "object", "anyOf": [{"allOf": [{"minimum": 1}, {"maximum": 2}]}]},
            "alternatives that differ",
        ),
        ({"items": {"not": {"type": "string"}}}, "not"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "object", "patternProperties": {"a": {}}}, "patternProperties"),
        ({"type": "object", "properties": {"x": {"minProperties": 1}}}, "minProperties"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "members of oneOf"),
        ({"enum": []}, "enumerations"),
        ({"enum": "x"}, "enumerations"),
        ({"$ref": "#/$defs/loop"}, f"more than {MAX_JOINED} alternatives"),
        (nested(1000), "schemas that are nested so deeply"),
    ],
)
def test_schemas_that_are_not_followed_are_rejected(schema: dict[str, Any], part: str) -> None:
    parameters = {"properties": {"a": schema}, "$defs": {"loop": LOOP}}
    with pytest.raises(
        RequestError, match=f"^tool_choice='f': expected arguments of f without {part}"
    ) as caught:
        Grammar(parameters)
    assert caught.value.field == "tool_choice"


def test_keys_inside_of_values_are_checked() -> None:
    inner = {"type": "object", "properties": {"b:c": {"type": "integer"}}}
    with pytest.raises(RequestError, match="arguments of f that are names"):
        Grammar({"properties": {"a": {"type": "array", "items": inner}}})
