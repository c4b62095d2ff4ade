"""Masks against languages small enough to be listed: what may come next is known without a parser."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import json
import subprocess
import sys
import weakref
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal, TypedDict

import msgspec
import numpy as np
import pydantic
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from drift_sdk import JsonSchema, Lark, Regex, RequestError
from drift_sdk.testing import byte_tokenizer
from drift_sdk.text import grammar as grammars
from drift_sdk.text.grammar import GrammarConstraint, constrain
from drift_sdk.text.tokenizer import Tokenizer

NUM_PADDED = 37  # ids of the model behind the tokenizer's last
ANYTHING = Regex(r"(?s:.*)")


@pytest.fixture(scope="session")
def tokenizer(byte_level_json: str) -> Tokenizer:
    raw = tokenizers.Tokenizer.from_str(byte_level_json)
    return Tokenizer(raw, bos_token="<|im_start|>", eos_token="<|im_end|>", chat_template=None, adds_bos=None)


@pytest.fixture(scope="session")
def model(tokenizer: Tokenizer) -> Model:
    return Model(tokenizer)


class Model:
    """A tokenizer, and the ids and bytes of a model that is a little larger."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = tokenizer.vocab_size + NUM_PADDED
        self.eos_token_ids = tuple(tokenizer.token_to_id(token) for token in ("<|im_end|>", "<|endoftext|>"))
        self.bytes = {}
        for token_id in range(tokenizer.vocab_size):
            if token_id not in tokenizer.special_token_ids:
                self.bytes[token_id] = tokenizer.token_bytes[token_id]

    def constrain(self, grammar: Any, **options: Any) -> GrammarConstraint:
        return constrain(
            grammar, self.tokenizer, vocab_size=self.vocab_size, eos_token_ids=self.eos_token_ids, **options
        )

    def expected(self, sentences: Iterable[bytes], prefix: bytes, *, ignore_eos: bool = False) -> set[int]:
        """What may follow: tokens with which some sentence goes on, and the ends of a whole one."""
        rests = {sentence[len(prefix) :] for sentence in sentences if sentence.startswith(prefix)}
        ids = {i for i, data in self.bytes.items() if data and any(rest.startswith(data) for rest in rests)}
        if b"" in rests and not (ignore_eos and ids):
            ids.update(self.eos_token_ids)
        return ids


def allowed(row: np.ndarray) -> set[int]:
    bits = np.unpackbits(row.view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def next_ids(constraint: GrammarConstraint) -> set[int]:
    mask = constraint.masks(())
    assert mask.shape[0] == 1 and mask.dtype == np.int32
    return allowed(mask[0])


def as_regex(sentences: Sequence[str]) -> Regex:
    escapes = {char: f"\\{char}" for char in r"\.+*?()|[]{}^$#&-~/"}
    return Regex("|".join("".join(escapes.get(char, char) for char in each) for each in sentences))


# Bytes, words and added tokens of the vocabulary, and characters of two to four bytes.
words = st.lists(
    st.sampled_from(
        ["a", "b", "the", " the", "fox", "{", '"', "\n", "/", "é", "中文", "🎉", "<think>", "<思>"]
    ),
    min_size=1,
    max_size=4,
).map("".join)
# Some sentences begin others: they may end and need not.
languages = st.lists(words, min_size=1, max_size=5).map(
    lambda parts: sorted({*parts, *(left + right for left, right in itertools.pairwise(parts))})
)


@given(sentences=languages, data=st.data(), kind=st.sampled_from(["regex", "json"]), ignore_eos=st.booleans())
def test_masks_are_exact_along_any_walk(
    model: Model, sentences: list[str], data: st.DataObject, kind: str, ignore_eos: bool
) -> None:
    grammar: Regex | JsonSchema = as_regex(sentences)
    if kind == "json":
        # What has to be escaped may be escaped in more than one way.
        sentences = sorted({sentence.translate(dict.fromkeys(map(ord, '"\n'))) for sentence in sentences})
        grammar = JsonSchema({"enum": sentences})
        sentences = [json.dumps(sentence, ensure_ascii=False) for sentence in sentences]

    language = [sentence.encode() for sentence in sentences]
    constraint = model.constrain(grammar, ignore_eos=ignore_eos)
    text = b""
    while True:
        expected = model.expected(language, text, ignore_eos=ignore_eos)
        assert next_ids(constraint) == expected
        check_drafts(model, constraint, language, text, data, ignore_eos)
        assert next_ids(constraint) == expected, "drafts leave no trace"
        goes_on = sorted(expected - set(model.eos_token_ids))
        if not goes_on:
            break

        # Sometimes several tokens at once, as a verified draft brings them.
        committed = [data.draw(st.sampled_from(goes_on))]
        text += model.bytes[committed[0]]
        more = sorted(model.expected(language, text) - set(model.eos_token_ids))
        if more and data.draw(st.booleans()):
            committed.append(data.draw(st.sampled_from(more)))
            text += model.bytes[committed[1]]
        constraint.advance(tuple(committed))

    assert text in language


def check_drafts(
    model: Model,
    constraint: GrammarConstraint,
    language: list[bytes],
    text: bytes,
    data: st.DataObject,
    ignore_eos: bool,
) -> None:
    """Rows along a draft of which some tokens fit and some do not."""
    draft: list[int] = []
    rows = [model.expected(language, text, ignore_eos=ignore_eos)]
    for _ in range(data.draw(st.integers(0, 4))):
        fitting = sorted(rows[-1]) or [0]
        token_id = data.draw(st.sampled_from(fitting) | st.integers(0, model.vocab_size - 1))
        draft.append(token_id)
        if token_id not in rows[-1] or token_id in model.eos_token_ids:
            rows.append(set())
            continue

        text += model.bytes[token_id]
        rows.append(model.expected(language, text, ignore_eos=ignore_eos))

    masks = constraint.masks(draft)
    assert masks.shape == (len(draft) + 1, -(-model.vocab_size // 32))
    assert [allowed(row) for row in masks] == rows


def test_an_earlier_answer_stays_as_it_was(model: Model) -> None:
    constraint = model.constrain(Regex("ab"))
    before = constraint.masks(())
    copy = before.copy()
    constraint.advance(model.tokenizer.encode("a"))
    assert np.array_equal(before, copy)
    assert before.flags.writeable  # torch would warn


def test_special_and_padded_ids_are_never_text(model: Model) -> None:
    texts = {token_id for token_id, data in model.bytes.items() if data}
    assert next_ids(model.constrain(ANYTHING)) <= texts | set(model.eos_token_ids)
    assert len(next_ids(model.constrain(ANYTHING))) > 300
    assert not next_ids(model.constrain(Regex("<.im_start.>"))) & model.tokenizer.special_token_ids


def test_an_end_of_sequence_that_the_tokenizer_takes_for_text(tokenizer: Tokenizer) -> None:
    think = tokenizer.token_to_id("<think>")
    assert think not in tokenizer.special_token_ids
    constraint = constrain(
        Regex("(<think>)?"), tokenizer, vocab_size=tokenizer.vocab_size, eos_token_ids=(think,)
    )
    assert think in next_ids(constraint)
    constraint.advance(tokenizer.encode("<"))
    assert think not in next_ids(constraint)


def test_a_vocabulary_may_be_smaller_than_the_tokenizer() -> None:
    tokenizer = byte_tokenizer()
    options = {"vocab_size": 100, "eos_token_ids": (99,)}
    assert next_ids(constrain(Regex("[a-z]"), tokenizer, **options)) == {97, 98}
    with pytest.raises(RequestError, match="grammar: it cannot be followed beyond 1 tokens|no token"):
        constrain(Regex("az"), tokenizer, **options).advance((97,))


def test_lark_knows_special_tokens_and_schemas(model: Model) -> None:
    start = model.tokenizer.token_to_id("<|im_start|>")
    constraint = model.constrain(Lark('start: <|im_start|> %json {"enum": ["a"]}'))
    assert next_ids(constraint) == {start}
    constraint.advance((start, *model.tokenizer.encode('"a"')))
    assert next_ids(constraint) == set(model.eos_token_ids)


def test_no_setting_of_a_grammar_makes_masks_inexact(model: Model) -> None:
    constraint = model.constrain(Lark('%llguidance {"no_forcing": false}\nstart: "fox"'))
    assert next_ids(constraint) == model.expected([b"fox"], b"")
    assert len(next_ids(constraint)) > 1


def accepts(model: Model, grammar: Any, text: str) -> bool:
    constraint = model.constrain(grammar)
    try:
        constraint.advance(tuple(model.tokenizer.encode(text)))
    except RequestError:
        return False

    return set(model.eos_token_ids) <= next_ids(constraint)


def test_json_is_compact_or_indented_without_further_blanks(model: Model) -> None:
    value = {"a": [1, {"b": 2}]}
    for text in (json.dumps(value), json.dumps(value, indent=4), json.dumps(value, separators=(",", ":"))):
        assert accepts(model, JsonSchema({}), text)
    for text in (
        '{  "a": 1}',
        '{\n\n"a": 1}',
        ' {"a": 1}',
        '{"a": 1}\n',
        '{"a": 1,' + "\n" + " " * 40 + '"b": 2}',
    ):
        assert not accepts(model, JsonSchema({}), text)
    assert accepts(model, JsonSchema({"x-guidance": {"whitespace_flexible": True}}), '{  "a": 1}')


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (Regex("[a"), "Regex cannot be compiled: .*unclosed character class"),
        (Regex("a(?=b)"), "look-around"),
        (Regex(r"[^\x00-\u{10ffff}]"), "cannot be followed beyond 0 tokens"),
        (Lark("start: nothing"), 'Lark cannot be compiled: unknown name: "nothing"'),
        (Lark("start: <|nope|>"), "unknown special token"),
        (Lark("no grammar at all"), "Lark cannot be compiled"),
        (JsonSchema({"type": "objekt"}), "JsonSchema cannot be compiled: Invalid type: objekt"),
        (JsonSchema({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (JsonSchema({"type": "integer", "minimum": 3, "maximum": 2}), "minimum .* is greater than maximum"),
        (JsonSchema({"$ref": "#/$defs/missing"}), "missing"),
        (JsonSchema(set[int]), "uniqueItems"),
    ],
)
def test_grammars_that_cannot_be_compiled(model: Model, grammar: Any, reason: str) -> None:
    for _ in range(2):  # a failure is not remembered as anything else
        with pytest.raises(RequestError, match=rf"(?s)^grammar: .*{reason}") as caught:
            model.constrain(grammar)
        assert caught.value.field == "grammar"
        assert "<state>" not in str(caught.value) and "no_forcing" not in str(caught.value)


def test_tokens_that_do_not_fit_are_named(model: Model) -> None:
    constraint = model.constrain(Regex("ab"))
    a, c = model.tokenizer.encode("a")[0], model.tokenizer.encode("c")[0]
    with pytest.raises(
        RequestError, match=f"grammar={c}: expected a token that continues the text of 1 tokens"
    ):
        constraint.advance((a, c))


def test_a_model_without_an_end_is_refused(model: Model) -> None:
    for eos_token_ids in ((), (model.vocab_size,)):
        with pytest.raises(RequestError, match="the model names none"):
            constrain(Regex("a"), model.tokenizer, vocab_size=model.vocab_size, eos_token_ids=eos_token_ids)


def test_grammars_are_compiled_once(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []
    real = grammars.LLMatcher

    def counting(tokenizer: Any, lark: str, **options: Any) -> Any:
        compiled.append(lark)
        return real(tokenizer, lark, **options)

    monkeypatch.setattr(grammars, "LLMatcher", counting)
    schema = {"enum": ["compiled", "once"]}
    first = model.constrain(JsonSchema(schema))
    first.advance(model.tokenizer.encode('"c'))
    second = model.constrain(JsonSchema(json.dumps(schema)))
    assert len(compiled) == 1
    assert next_ids(second) == model.expected([b'"compiled"', b'"once"'], b"")
    assert next_ids(first) == model.expected([b'"compiled"'], b'"c')
    for index in range(grammars.NUM_CACHED_GRAMMARS):
        model.constrain(Regex(f"other {index}"))
    model.constrain(JsonSchema(schema))
    assert len(compiled) == 2 + grammars.NUM_CACHED_GRAMMARS


def test_a_vocabulary_is_read_once_and_dropped_with_its_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = []
    real = grammars.TokenTable

    def counting(*args: Any) -> Any:
        tables.append(real(*args))
        return tables[-1]

    monkeypatch.setattr(grammars, "TokenTable", counting)
    tokenizer = byte_tokenizer()
    for _ in range(3):
        constraint = constrain(Regex("a"), tokenizer, vocab_size=257, eos_token_ids=(256,))
    assert len(tables) == 1
    constrain(Regex("a"), tokenizer, vocab_size=260, eos_token_ids=(256,))
    assert len(tables) == 2
    gone = weakref.ref(tokenizer)
    gc.collect()
    num_vocabularies = len(grammars._vocabularies)
    del tokenizer
    gc.collect()
    assert gone() is None
    assert len(grammars._vocabularies) == num_vocabularies - 1
    constraint.advance(b"a")  # who is under way is not disturbed
    assert next_ids(constraint) == {256}


class Point(msgspec.Struct):
    x: int
    y: Annotated[int, msgspec.Meta(ge=0)] = 0
    inner: Point | None = None


@dataclasses.dataclass
class Plain:
    name: str
    tags: list[str]


class Typed(TypedDict):
    kind: Literal["a", "b"]


class Model_(pydantic.BaseModel):
    size: int
    points: list[int] = []

    @pydantic.field_validator("size")
    @classmethod
    def _is_even(cls, size: int) -> int:
        if size % 2:
            raise ValueError("odd")
        return size


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        (Point, '{"x": 1, "inner": {"x": 2}}', Point(1, 0, Point(2))),
        (Plain, '{"name": "n", "tags": ["t"]}', Plain("n", ["t"])),
        (Typed, '{"kind": "b"}', {"kind": "b"}),
        (list[int], "[1, 2]", [1, 2]),
        (dict[str, bool], '{"a": true}', {"a": True}),
        (tuple[int, str], '[1, "a"]', (1, "a")),
        (int | None, "null", None),
        (Literal["yes", "no"], '"yes"', "yes"),
        (Annotated[str, msgspec.Meta(max_length=2)], '"ab"', "ab"),
        (Model_, '{"size": 2, "points": [1]}', Model_(size=2, points=[1])),
        ({"type": "integer"}, "7", 7),
        ('{"type": ["number", "null"]}', "1.5", 1.5),
    ],
)
def test_schemas_from_types(model: Model, schema: Any, text: str, value: Any) -> None:
    grammar = JsonSchema(schema)
    assert grammar.decode(text) == value
    assert type(grammar.decode(text)) is type(value)
    assert accepts(model, grammar, text)
    assert not accepts(model, grammar, '{"unknown": 1}')
    assert grammar == JsonSchema(schema) and hash(grammar) == hash(JsonSchema(schema))


def test_objects_of_a_type_have_its_fields_alone(model: Model) -> None:
    fields = msgspec.defstruct("Fields", [("properties", int), ("type", Point)])
    for kind, text in ((Point, '{"x": 1, %s"y": 2}'), (fields, '{"properties": 1, %s"type": {"x": 1}}')):
        assert accepts(model, JsonSchema(kind), text % "")
        assert not accepts(model, JsonSchema(kind), text % '"z": 3, ')
    assert not accepts(model, JsonSchema(fields), '{"properties": 1, "type": {"x": 1, "z": 3}}')
    assert accepts(model, JsonSchema({"properties": {"x": {"type": "integer"}}}), '{"x": 1, "z": 3}')


def test_what_a_type_checks_beyond_its_schema_is_its_own_error(model: Model) -> None:
    assert accepts(model, JsonSchema(Model_), '{"size": 3}')
    with pytest.raises(pydantic.ValidationError, match="odd"):
        JsonSchema(Model_).decode('{"size": 3}')


def test_a_dict_may_change_later() -> None:
    schema = {"type": "integer"}
    grammar = JsonSchema(schema)
    schema["type"] = "string"
    assert grammar.definition == {"type": "integer"}
    assert grammar != JsonSchema(schema)


@pytest.mark.parametrize(
    "schema",
    [
        None,
        5,
        "",
        "[]",
        "{",
        b"{}",
        {"a": {1}},
        {"a": float("nan")},
        object(),
        complex,
        print,
        Point(1),
        [int],
    ],
)
def test_what_is_not_a_schema(schema: Any) -> None:
    with pytest.raises(RequestError, match="^schema="):
        JsonSchema(schema)


@pytest.mark.parametrize("text", [None, 5, "", b"a", "\ud800", ["a"]])
def test_what_is_not_a_pattern_or_grammar(text: Any) -> None:
    with pytest.raises(RequestError, match="^pattern="):
        Regex(text)
    with pytest.raises(RequestError, match="^grammar="):
        Lark(text)


def test_importing_the_package_loads_neither_llguidance_nor_pydantic() -> None:
    code = (
        "import sys, msgspec, drift_sdk\n"
        "class A(msgspec.Struct):\n  x: int\n"
        "drift_sdk.SamplingParams(grammar=drift_sdk.JsonSchema(A))\n"
        "sys.exit(bool({'llguidance', 'pydantic', 'torch'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
