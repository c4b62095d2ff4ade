"""Masks of grammars, compared with those of languages small enough to be listed; bounds and errors."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import json
import math
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Annotated, Any, Literal, NamedTuple, TypedDict

import msgspec
import numpy as np
import pydantic
import pytest
import tokenizers
import typing_extensions
from hypothesis import given
from hypothesis import strategies as st

from drift_sdk import JsonSchema, Lark, Regex, RequestError
from drift_sdk.grammars import AnyOf
from drift_sdk.testing import byte_tokenizer
from drift_sdk.text import grammar as grammar_module
from drift_sdk.text import grammar as grammars
from drift_sdk.text.grammar import GrammarConstraint, check_schema, constrain
from drift_sdk.text.tokenizer import Tokenizer

NUM_PADDED = 37  # ids of the model after the tokenizer's last one
ANYTHING = Regex(r"(?s:.*)")


@pytest.fixture(scope="session")
def tokenizer(byte_level_json: str) -> Tokenizer:
    raw = tokenizers.Tokenizer.from_str(byte_level_json)
    return Tokenizer(raw, bos_token="<|im_start|>", eos_token="<|im_end|>", chat_template=None, adds_bos=None)


@pytest.fixture(scope="session")
def model(tokenizer: Tokenizer) -> Model:
    return Model(tokenizer)


class Model:
    """A tokenizer, and a model whose vocabulary is a little larger."""

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
        """Ids that may follow a prefix: tokens that continue a sentence, and eos ids after a whole one."""
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


# Single bytes, words and added tokens of the vocabulary, and characters of two to four bytes.
words = st.lists(
    st.sampled_from(
        ["a", "b", "the", " the", "fox", "{", '"', "\n", "/", "é", "中文", "🎉", "<think>", "<思>"]
    ),
    min_size=1,
    max_size=4,
).map("".join)
# Some sentences are prefixes of others: after them the text may end or continue.
languages = st.lists(words, min_size=1, max_size=5).map(
    lambda parts: sorted({*parts, *(left + right for left, right in itertools.pairwise(parts))})
)


@given(
    sentences=languages,
    data=st.data(),
    kind=st.sampled_from(["regex", "json", "either"]),
    ignore_eos=st.booleans(),
)
def test_masks_are_exact_along_any_walk(
    model: Model, sentences: list[str], data: st.DataObject, kind: str, ignore_eos: bool
) -> None:
    grammar: Regex | JsonSchema | AnyOf = as_regex(sentences)
    if kind == "either":
        grammar = AnyOf((Lark('start: "<call>" /the|fox/'), grammar))
        sentences = [*sentences, "<call>the", "<call>fox"]
    elif kind == "json":
        # Characters that must be escaped have several escapes: leave them out.
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
        assert next_ids(constraint) == expected, "drafts changed the state"
        goes_on = sorted(expected - set(model.eos_token_ids))
        if not goes_on:
            break

        # Sometimes several tokens at once, as after a verified draft.
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
    """Check the masks of a draft in which some tokens are allowed and some are not."""
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


def test_constraint_is_slow_while_its_masks_take_long(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    constraint = model.constrain(Regex("a*b"))
    for limit_s, is_slow in ((-1.0, True), (1e3, False)):
        monkeypatch.setattr(grammar_module, "SLOW_MASK_S", limit_s)
        constraint.advance(model.tokenizer.encode("a"))
        assert constraint.is_slow is is_slow


def test_mask_does_not_change_after_advance(model: Model) -> None:
    constraint = model.constrain(Regex("ab"))
    before = constraint.masks(())
    copy = before.copy()
    constraint.advance(model.tokenizer.encode("a"))
    assert np.array_equal(before, copy)
    assert before.flags.writeable  # torch would warn


def test_special_and_padded_ids_never_count_as_text(model: Model) -> None:
    texts = {token_id for token_id, data in model.bytes.items() if data}
    assert next_ids(model.constrain(ANYTHING)) <= texts | set(model.eos_token_ids)
    assert len(next_ids(model.constrain(ANYTHING))) > 300
    assert not next_ids(model.constrain(Regex("<.im_start.>"))) & model.tokenizer.special_token_ids


def test_eos_id_that_is_text_to_the_tokenizer_only_ends_the_text(tokenizer: Tokenizer) -> None:
    think = tokenizer.token_to_id("<think>")
    assert think not in tokenizer.special_token_ids
    constraint = constrain(
        Regex("(<think>)?"), tokenizer, vocab_size=tokenizer.vocab_size, eos_token_ids=(think,)
    )
    assert think in next_ids(constraint)
    constraint.advance(tokenizer.encode("<"))
    assert think not in next_ids(constraint)


def test_tokens_too_long_for_llguidance_are_not_permitted(byte_level_json: str) -> None:
    raw = tokenizers.Tokenizer.from_str(byte_level_json)
    texts = ["a" * 1000, "a" * 1001, "é" * 501, "a" * 5000]
    raw.add_tokens([tokenizers.AddedToken(text, normalized=False) for text in texts])
    ends = ["<" + "|" * 2000 + end for end in "ab"]
    raw.add_special_tokens(ends)
    long = Tokenizer(raw, bos_token=None, eos_token=ends[0], chat_template=None, adds_bos=None)
    ids = [long.token_to_id(text) for text in texts]
    first, second = map(long.token_to_id, ends)
    options = {"vocab_size": long.vocab_size, "eos_token_ids": (first,)}
    constraint = constrain(ANYTHING, long, **options)
    permitted = next_ids(constraint)
    assert [token_id in permitted for token_id in ids] == [True, False, False, False]
    assert first in permitted and second not in permitted
    assert next_ids(constrain(Lark(f"start: <[{second}]>"), long, **options)) == {second}
    constraint.advance((ids[0],))
    assert next_ids(constraint) == permitted


def test_vocabulary_may_be_smaller_than_the_tokenizer() -> None:
    tokenizer = byte_tokenizer()
    options = {"vocab_size": 100, "eos_token_ids": (99,)}
    assert next_ids(constrain(Regex("[a-z]"), tokenizer, **options)) == {97, 98}
    with pytest.raises(RequestError, match="grammar: it cannot be followed beyond 1 tokens|no token"):
        constrain(Regex("az"), tokenizer, **options).advance((97,))


def test_lark_supports_special_tokens_and_schemas(model: Model) -> None:
    start = model.tokenizer.token_to_id("<|im_start|>")
    constraint = model.constrain(Lark('start: <|im_start|> %json {"enum": ["a"]}'))
    assert next_ids(constraint) == {start}
    constraint.advance((start, *model.tokenizer.encode('"a"')))
    assert next_ids(constraint) == set(model.eos_token_ids)


def test_grammar_cannot_switch_forcing_on(model: Model) -> None:
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


def test_json_is_compact_or_indented_without_other_whitespace(model: Model) -> None:
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
        (Regex(r"[^\x00-\u{10ffff}]"), "cannot be followed beyond 0 tokens: no text matches it"),
        (Lark("start: nothing"), 'Lark cannot be compiled: unknown name: "nothing"'),
        (Lark("start: <|nope|>"), "unknown special token"),
        (Lark("no grammar at all"), "Lark cannot be compiled"),
        (JsonSchema({"type": "objekt"}), "JsonSchema cannot be compiled: Invalid type: objekt"),
        (JsonSchema({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (JsonSchema({"type": "integer", "minimum": 3, "maximum": 2}), "minimum .* is greater than maximum"),
        (JsonSchema({"$ref": "#/$defs/missing"}), "missing"),
    ],
)
def test_grammar_that_cannot_be_compiled_is_rejected_with_a_reason(
    model: Model, grammar: Any, reason: str
) -> None:
    for _ in range(2):  # a failure is not cached as a success
        with pytest.raises(RequestError, match=rf"(?s)^grammar: .*{reason}") as caught:
            model.constrain(grammar)
        assert caught.value.field == "grammar"
        assert "<state>" not in str(caught.value) and "no_forcing" not in str(caught.value)


def chain_of_refs(length: int) -> dict[str, Any]:
    links = {f"r{i}": {"$ref": f"#/$defs/r{i + 1}"} for i in range(length)}
    return {"$ref": "#/$defs/r0", "$defs": links | {f"r{length}": {"type": "integer"}}}


def chain_of_rules(length: int, name: str = "r") -> str:
    links = "".join(f'{name}{i}: "b" {name}{i + 1}\n' for i in range(length))
    return f'start: {name}0\n{links}{name}{length}: "a"\n'


def patterns(count: int, wrap: str | None = None) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [{"type": "string", "pattern": f".*{i}.*"} for i in range(count)]
    return [{"properties": {wrap: each}} for each in found] if wrap else found


def optional(count: int, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{i}": True for i in range(count)}} | more


@pytest.mark.parametrize(
    ("grammar", "bound"),
    [
        (JsonSchema({"minimum": -(2**63), "maximum": -(2**63), "type": "integer"}), "minimum=-9223"),
        (JsonSchema({"minimum": -1e19, "type": "integer"}), "minimum=-1e.19: expected a number from"),
        (JsonSchema({"minimum": 10**19, "type": "integer"}), "minimum=10000000000000000000: expected"),
        (JsonSchema({"maximum": 2**64 - 1, "type": "integer"}), "maximum=18446744073709551615: expected"),
        (JsonSchema({"minimum": 2**53 + 1, "type": "integer"}), "minimum=9007199254740993: expected"),
        (JsonSchema({"exclusiveMinimum": 2**60, "type": "integer"}), "exclusiveMinimum=.*2..53"),
        (JsonSchema({"minimum": 1e-20, "maximum": 1e-19}), "at most 15 digits after"),
        (JsonSchema({"const": 2**53 + 1}), "const=9007199254740993: expected"),
        (JsonSchema({"enum": [[1, {"a": -(2**63)}]]}), "enum=-9223372036854775808: expected"),
        (JsonSchema({"type": "integer", "const": -(2.0**63)}), "const=-9.22"),
        (Lark('start: "a"\n%ignore / /\na: %json {"const": -9223372036854775808}'), "const=-9223"),
        (JsonSchema({"allOf": [{"multipleOf": 4294967291}, {"multipleOf": 4294967279}]}), "multipleOf="),
        (JsonSchema({"type": "number", "multipleOf": 99999989}), "multipleOf=99999989: expected at most"),
        (JsonSchema({"multipleOf": 0.10007}), "multipleOf=0.10007: expected at most 10000"),
        (
            JsonSchema({"allOf": [{"multipleOf": 997}, {"multipleOf": 991}]}),
            "multipleOf=991, 997: expected at",
        ),
        (JsonSchema('{"minimum": NaN}'), "minimum=nan"),
        (JsonSchema('{"minimum": 1e400}'), "minimum=inf"),
        (JsonSchema(chain_of_refs(5000)), "parts: expected at most 5000"),
        (Lark(chain_of_rules(6000)), "rules and groups: expected at most 5000"),
        (Lark(chain_of_rules(1100, "R")), "1101 terminals: expected at most 1000"),
        (Lark("start: R0\n" + "".join(f'R{i}.2[capture] : "b"\n' for i in range(1001))), "1001 terminals"),
        (JsonSchema({"allOf": patterns(20)}), "for one string: expected at most 8"),
        (JsonSchema({"allOf": patterns(20, "a")}), "for one string: expected at most 8"),
        (JsonSchema(optional(2000)), "2000 properties: expected at most 1000"),
        (JsonSchema(optional(1000, minProperties=1, additionalProperties=False)), "properties: expected at"),
        (
            JsonSchema({"patternProperties": {f"^x{i}$": {} for i in range(300)}}),
            "patternProperties: expected",
        ),
        (JsonSchema({"const": [dict.fromkeys(map(str, range(9000)))]}), "parts: expected at most"),
        (JsonSchema({"pattern": "a?" * 2000}), "repetitions in a pattern: expected at most 1000"),
        (JsonSchema({"enum": ["x" * 300_000]}), "bytes: expected at most 262144"),
        (Regex("a?" * 20_000), "repetitions in pattern: expected at most 1000"),
        (Regex("a" * 300_000), "bytes: expected at most"),
        (Regex("a\\"), "ends with a backslash"),
        (Lark("start: A\nA: /" + "a?" * 2000 + "/"), "repetitions in a regex"),
        (Lark('start: "a"' + ' "b"?' * 6000), "repetitions: expected at most"),
        (Lark('\\"' * 32_000), "a string that begins at character 1 is not terminated"),
        (Lark('start: "a\n"'), "a string that begins at character 7 is not terminated"),
        (Lark("start: " + "/\\" * 32_000), "a regex that begins at character 7 is not terminated"),
        (JsonSchema({"allOf": [{"multipleOf": -(3**k)} for k in range(1, 999)]}), "multipleOf="),
    ],
)
def test_grammar_out_of_bounds_is_rejected_before_compiling(
    model: Model, grammar: Any, bound: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_module, "LLMatcher", None)
    with pytest.raises(
        RequestError, match=rf"^grammar: {type(grammar).__name__} cannot be compiled: .*{bound}"
    ):
        model.constrain(grammar)


def test_schema_that_json_cannot_represent_is_rejected() -> None:
    value: Any = 1
    for _ in range(5000):
        value = [value]
    with pytest.raises(RequestError, match="^schema=.*: expected plain JSON values"):
        JsonSchema({"const": value})
    with pytest.raises(RequestError, match="^schema=.*: expected plain JSON values"):
        JsonSchema({"minimum": 10**5000})
    endless: dict[str, Any] = {}
    endless["items"] = [endless, endless]
    with pytest.raises(RequestError, match="^schema=.*: expected plain JSON values .more than 100000 items"):
        JsonSchema(endless)


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "number"}, "1e999", math.inf),
        (float, "1e999", math.inf),
        (Any, "-1e999", -math.inf),
        (list[float], "[1e999]", [math.inf]),
        (dict[int, float], '{"3": 1e999}', {3: math.inf}),
    ],
)
def test_numbers_beyond_doubles_are_infinite_for_every_kind_of_schema(
    schema: Any, text: str, value: Any
) -> None:
    assert JsonSchema(schema).decode(text) == value
    with pytest.raises(msgspec.ValidationError, match="Expected `int`"):
        JsonSchema(int).decode("1e999")


def test_number_with_too_many_digits_for_python_has_no_value() -> None:
    with pytest.raises(msgspec.ValidationError, match="digits"):
        JsonSchema({"type": "integer"}).decode("1" * 5000)


def merging(num_objects: int) -> dict[str, Any]:
    """A schema with many objects that merge the same large one."""
    large = {"properties": {f"p{i}": {"pattern": "a"} for i in range(900)}}
    users = {f"u{i}": {"allOf": [{"$ref": "#/$defs/large"}]} for i in range(num_objects)}
    return {"$defs": {"large": large} | users}


def alternatives(length: int) -> dict[str, Any]:
    """A schema with a choice of the links of a chain that leads to a pattern."""
    links = {f"r{i}": {"$ref": f"#/$defs/r{i + 1}"} for i in range(length)}
    choice = [{"$ref": f"#/$defs/r{i}"} for i in range(length)]
    return {"anyOf": choice, "$defs": links | {f"r{length}": {"pattern": "a", "format": "date"}}}


@pytest.mark.parametrize(
    "schema",
    [
        chain_of_refs(2000),
        {"$defs": dict(reversed(chain_of_refs(2000)["$defs"].items()))},
        alternatives(900),
        merging(600),
    ],
    ids=["chain", "reversed chain", "alternatives", "merged"],
)
def test_checking_a_schema_takes_linear_time(schema: dict[str, Any]) -> None:
    num_lines = 0

    def count(frame: Any, event: str, argument: Any) -> Any:
        nonlocal num_lines
        num_lines += event == "line"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        check_schema(schema)
    finally:
        sys.settrace(before)
    assert num_lines < 15 * len(json.dumps(schema))


def test_constraints_are_counted_along_cycles_and_alternatives() -> None:
    ring = {f"r{i}": {"allOf": [{"$ref": f"#/$defs/r{(i + 1) % 5}"}]} for i in range(5)}
    check_schema({"$defs": ring})
    with pytest.raises(ValueError, match="for one string"):
        check_schema({"$defs": ring | {"r3": {"pattern": "a", "$ref": "#/$defs/r0"}}})

    check_schema({"anyOf": patterns(100)})
    check_schema({"allOf": [{"anyOf": patterns(100)}] * 8})
    with pytest.raises(ValueError, match="for one string"):
        check_schema({"allOf": [{"anyOf": patterns(100)}] * 9})


@pytest.mark.parametrize(
    "grammar",
    [
        JsonSchema(chain_of_refs(1200)),
        Lark(chain_of_rules(4900)),
        Lark(chain_of_rules(990, "R")),
        JsonSchema(optional(0, required=[f"p{i}" for i in range(990)])),
    ],
    ids=["refs", "rules", "terminals", "required"],
)
def test_longest_chains_compile_on_a_thread_with_a_small_stack(model: Model, grammar: Any) -> None:
    found: list[object] = []

    is_restored = threading.Event()

    def work() -> None:
        is_restored.wait()
        try:
            constraint = model.constrain(grammar)
            found.append(len(next_ids(constraint)))
        except BaseException as error:
            found.append(error)

    before = threading.stack_size(512 << 10)
    try:
        thread = threading.Thread(target=work)
        thread.start()
    finally:
        threading.stack_size(before)
    is_restored.set()
    thread.join()
    assert found[0] == len(next_ids(model.constrain(grammar)))
    assert threading.stack_size() == before


def test_integer_bounds_are_exact(model: Model) -> None:
    for low, high in [(0, 2**63 - 1), (-(2**53), 2**53), (2**53 - 7, 2**53), (-12, 1003), (10**15, 10**17)]:
        schema = JsonSchema({"type": "integer", "minimum": low, "maximum": high})
        for value in (low, low + 1, high - 1, high):
            assert accepts(model, schema, str(value)), (low, high, value)
        for value in (low - 1, high + 1, high * 10 + 1):
            assert not accepts(model, schema, str(value)), (low, high, value)


@cache
def digits() -> list[str]:
    return [char for char in map(chr, range(0x110000)) if char.isdigit()]


@pytest.mark.parametrize(
    "grammar",
    [
        Regex(r"\d"),
        Regex(r"[\d]"),
        Regex(r"[^\D]"),
        Regex(r"(?i)\d"),
        Regex(r"[\w&&[^\D]]"),
        JsonSchema({"type": "string", "pattern": r"^\d$"}),
        JsonSchema({"type": "string", "pattern": r"^[^\D]$"}),
    ],
)
def test_digit_classes_match_ascii_only(grammar: Any) -> None:
    assert len(digits()) > 700
    assert characters(grammar, digits()) == set("0123456789")


def test_word_and_space_classes_of_a_regex_match_ascii_only() -> None:
    samples = [*map(chr, range(0x300)), *map(chr, range(0x2000, 0x2070)), "\u3000", "\ufeff", *digits()]
    words = {char for char in samples if char.isascii() and (char.isalnum() or char == "_")}
    spaces = set(" \t\n\r\f\v")
    for pattern, expected in [(r"\w", words), (r"[\w]", words), (r"\s", spaces), (r"(?x)\s", spaces)]:
        assert characters(Regex(pattern), samples) == expected
    for pattern, excluded in [(r"\W", words), (r"[^\w]", words), (r"\S", spaces), (r"[\S]", spaces)]:
        assert characters(Regex(pattern), samples) == set(samples) - excluded


def characters(grammar: Any, samples: Iterable[str]) -> set[str]:
    """The samples that the grammar accepts as one character, found byte by byte in its masks."""
    start = constrain(grammar, byte_tokenizer(), vocab_size=257, eos_token_ids=(256,))
    if isinstance(grammar, JsonSchema):
        start.advance(b'"')

    allowed_after: dict[bytes, set[int]] = {}
    found = set()
    for char in samples:
        data = char.encode()
        for index in range(len(data)):
            prefix = data[:index]
            if prefix not in allowed_after:
                allowed_after[prefix] = allowed(start.masks(prefix)[-1])
            if data[index] not in allowed_after[prefix]:
                break
        else:
            found.add(char)
    return found


class Panic(BaseException):
    """Not an Exception, like pyo3's PanicException."""


def test_panic_of_llguidance_raises_request_error(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    def panic(*args: object, **options: object) -> None:
        raise Panic("index out of bounds")

    monkeypatch.setattr(grammar_module, "LLMatcher", panic)
    with pytest.raises(RequestError, match="llguidance failed: index out of bounds"):
        model.constrain(Regex("panic"))


def test_endless_compilation_is_rejected_after_the_timeout(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()
    monkeypatch.setattr(grammar_module, "LLMatcher", lambda *args, **options: release.wait())
    monkeypatch.setattr(grammar_module, "COMPILE_TIMEOUT_S", 0.05)
    for number in range(grammar_module.MAX_OVERDUE):
        with pytest.raises(RequestError, match="it takes longer than"):
            model.constrain(Regex(f"endless{number}"))
    with pytest.raises(RequestError, match="4 others take longer"):
        model.constrain(Regex("one too many"))
    release.set()
    grammar_module.wait_for_compilations()
    monkeypatch.undo()
    model.constrain(Regex("again"))


def test_token_outside_the_grammar_is_named_in_the_error(model: Model) -> None:
    constraint = model.constrain(Regex("ab"))
    a, c = model.tokenizer.encode("a")[0], model.tokenizer.encode("c")[0]
    with pytest.raises(RequestError, match=f"grammar: token {c} does not continue the text of 1 tokens"):
        constraint.advance((a, c))


def test_model_without_eos_id_is_rejected(model: Model) -> None:
    for eos_token_ids in ((), (model.vocab_size,)):
        with pytest.raises(RequestError, match="the model has none"):
            constrain(Regex("a"), model.tokenizer, vocab_size=model.vocab_size, eos_token_ids=eos_token_ids)


def test_grammars_are_compiled_once(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []
    real = grammar_module.LLMatcher

    def counting(tokenizer: Any, lark: str, **options: Any) -> Any:
        compiled.append(lark)
        return real(tokenizer, lark, **options)

    monkeypatch.setattr(grammar_module, "LLMatcher", counting)
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


def test_vocabulary_is_read_once_and_freed_with_its_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
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
    constraint.advance(b"a")  # a constraint in use still works
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


class Pet(pydantic.BaseModel):
    name: str


@pydantic.dataclasses.dataclass
class Owner:
    age: Annotated[int, pydantic.Field(ge=18)]
    pets: list[Pet] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Household:
    owners: list[Owner]
    next: Household | None = None


class TypedPets(typing_extensions.TypedDict):  # pydantic takes no other before Python 3.12
    count: Annotated[int, pydantic.Field(ge=0)]


class NamedPet(NamedTuple):
    pet: Pet


OF_PYDANTIC: list[tuple[Any, str, Any, str]] = [
    (list[Pet], '[{"name": "a"}]', [Pet(name="a")], '[{"name": 1}]'),
    (Pet | None, "null", None, "1"),
    (Pet | Literal["none"], '{"name": "a"}', Pet(name="a"), '"some"'),
    (dict[str, tuple[Pet, int]], '{"a": [{"name": "b"}, 1]}', {"a": (Pet(name="b"), 1)}, '{"a": [{}, 1]}'),
    (Owner, '{"age": 18}', Owner(18), '{"age": 17}'),
    (Household, '{"owners": [{"age": 18}]}', Household([Owner(18)]), '{"owners": [{"age": 17}]}'),
    (TypedPets, '{"count": 0}', {"count": 0}, '{"count": -1}'),
    (NamedPet, '[{"name": "a"}]', NamedPet(Pet(name="a")), "[{}]"),
    (Annotated[int, pydantic.Field(le=3)], "3", 3, "4"),
    (list[pydantic.PositiveInt], "[1]", [1], "[0]"),
    (list[pydantic.Base64Str], '["YQ=="]', ["a"], "[1]"),
    (dict[Annotated[str, pydantic.Field(pattern="^[a-z]$")], int], '{"a": 1}', {"a": 1}, '{"A": 1}'),
    (pydantic.TypeAdapter(list[Pet]), '[{"name": "a"}]', [Pet(name="a")], "[{}]"),
]


@pytest.mark.parametrize(("schema", "text", "value", "other"), OF_PYDANTIC)
def test_type_with_parts_of_pydantic_is_enforced_and_read_as_pydantic_does(
    model: Model, schema: Any, text: str, value: Any, other: str
) -> None:
    grammar = JsonSchema(schema)
    assert grammar.decode(text) == value
    assert type(grammar.decode(text)) is type(value)
    assert accepts(model, grammar, text)
    assert not accepts(model, grammar, other)
    with pytest.raises(pydantic.ValidationError):
        grammar.decode(other)


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
def test_schema_of_a_type_accepts_and_decodes_its_values(
    model: Model, schema: Any, text: str, value: Any
) -> None:
    grammar = JsonSchema(schema)
    assert grammar.decode(text) == value
    assert type(grammar.decode(text)) is type(value)
    assert accepts(model, grammar, text)
    assert not accepts(model, grammar, '{"unknown": 1}')
    assert grammar == JsonSchema(schema) and hash(grammar) == hash(JsonSchema(schema))


def test_objects_of_a_type_have_no_other_fields(model: Model) -> None:
    fields = msgspec.defstruct("Fields", [("properties", int), ("type", Point)])
    for kind, text in ((Point, '{"x": 1, %s"y": 2}'), (fields, '{"properties": 1, %s"type": {"x": 1}}')):
        assert accepts(model, JsonSchema(kind), text % "")
        assert not accepts(model, JsonSchema(kind), text % '"z": 3, ')
    assert not accepts(model, JsonSchema(fields), '{"properties": 1, "type": {"x": 1, "z": 3}}')
    assert accepts(model, JsonSchema({"properties": {"x": {"type": "integer"}}}), '{"x": 1, "z": 3}')


def test_validators_of_a_type_raise_their_own_error(model: Model) -> None:
    assert accepts(model, JsonSchema(Model_), '{"size": 3}')
    with pytest.raises(pydantic.ValidationError, match="odd"):
        JsonSchema(Model_).decode('{"size": 3}')


def test_schema_is_copied_from_its_dict() -> None:
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
def test_value_that_is_no_schema_is_rejected(schema: Any) -> None:
    with pytest.raises(RequestError, match="^schema="):
        JsonSchema(schema)


@pytest.mark.parametrize("text", [None, 5, "", b"a", "\ud800", ["a"]])
def test_value_that_is_no_pattern_or_grammar_is_rejected(text: Any) -> None:
    with pytest.raises(RequestError, match="^pattern="):
        Regex(text)
    with pytest.raises(RequestError, match="^grammar="):
        Lark(text)


def test_importing_the_package_does_not_load_llguidance_or_pydantic() -> None:
    code = (
        "import sys, msgspec, drift_sdk\n"
        "class A(msgspec.Struct):\n  x: int\n"
        "drift_sdk.SamplingParams(grammar=drift_sdk.JsonSchema(A))\n"
        "sys.exit(bool({'llguidance', 'pydantic', 'torch'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no processes to fork")
def test_locks_are_free_in_a_forked_child() -> None:
    """At the fork, a thread that does not exist in the child was holding them."""
    script = """
import os
from drift_sdk.text import grammar
with grammar._vocabularies_lock, grammar._stack_size_lock:
    child = os.fork()
    if child == 0:
        locks = (grammar._vocabularies_lock, grammar._stack_size_lock)
        os._exit(0 if all(lock.acquire(timeout=120) for lock in locks) else 1)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0
