"""Nested data of callers: what is read of it, and its bounds."""

from __future__ import annotations

import itertools
from collections import OrderedDict, UserDict, UserList
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Any

import pytest
from msgspec import Struct

from drift_sdk import EngineConfig, JsonSchema, RequestError, SamplingParams
from drift_sdk._plain_data import MAX_DEPTH, MAX_ITEMS, MAX_JSON_CHARS, to_plain
from drift_sdk.errors import short_repr
from drift_sdk.testing import scripted_engine

MESSAGE = {"role": "user", "content": "x"}


class Unending(Mapping[Any, Any]):
    """A mapping that says it has one item and has no end; the keys are read from an iterator."""

    def __init__(self, keys: Callable[[], Iterator[Any]] = itertools.count, value: Any = 1.0) -> None:
        self.keys_of = keys
        self.value = value

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[Any]:
        return self.keys_of()

    def __getitem__(self, key: Any) -> Any:
        return self.value

    def items(self) -> Any:
        raise AssertionError("not read: it might compute all items at once")


class UnendingDict(dict[Any, Any]):
    def __iter__(self) -> Iterator[Any]:
        return itertools.count()

    def keys(self) -> Any:
        return itertools.count()

    def items(self) -> Any:
        return ((key, 1) for key in itertools.count())


def names() -> Iterator[str]:
    return map(str, itertools.count())


def same_name() -> Iterator[str]:
    return itertools.repeat("a")


TOO_LARGE = [
    ["x"] * (MAX_ITEMS + 1),
    tuple(range(MAX_ITEMS + 1)),
    [[]] * (MAX_ITEMS + 1),
    [[[0] * 1000] * 1000],
    dict.fromkeys(range(MAX_ITEMS + 1)),
    dict.fromkeys(map(str, range(MAX_ITEMS + 1)), 1),
    frozenset(range(MAX_ITEMS + 1)),
    [{"a": 1}] * (MAX_ITEMS // 2 + 1),
    Unending(names),
    Unending(same_name),
    {"a": [Unending(names)]},
    UserDict.fromkeys(range(MAX_ITEMS + 1)),
    UserList([0] * (MAX_ITEMS + 1)),
    MappingProxyType({"a": ["x"] * MAX_ITEMS}),
    OrderedDict.fromkeys(range(MAX_ITEMS + 1)),
]


@pytest.mark.parametrize("value", TOO_LARGE, ids=lambda value: type(value).__name__)
def test_data_of_too_many_items_is_rejected(value: Any) -> None:
    with pytest.raises(RequestError, match=rf"^field=.*\(more than {MAX_ITEMS} items\)$") as caught:
        to_plain("field", value)
    assert caught.value.field == "field" and len(str(caught.value)) < 400


def test_data_of_the_most_items_and_levels_is_copied() -> None:
    for value in (list(range(MAX_ITEMS)), dict.fromkeys(map(str, range(MAX_ITEMS)), [])):
        if isinstance(value, dict):
            assert to_plain("field", value) == value
        else:
            assert to_plain("field", [value[:-1]]) == [value[:-1]]
    for wrap in (lambda inner: [inner], lambda inner: {"a": inner}):
        deep: Any = 1
        for _ in range(MAX_DEPTH):
            deep = wrap(deep)
        to_plain("field", deep)
        with pytest.raises(RequestError, match=f"nested deeper than {MAX_DEPTH} levels"):
            to_plain("field", wrap(deep))
    deep = []
    deep.append(deep)
    with pytest.raises(RequestError, match=f"nested deeper than {MAX_DEPTH} levels"):
        to_plain("field", deep)


class Kind(Enum):
    TEXT = "text"


class Part(Struct, tag_field="type", tag="text", omit_defaults=True):
    text: str
    index: int | None = None


@dataclass
class Function:
    name: str
    parameters: Any


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        ({"a": (1, [2.5, None, True])}, {"a": (1, [2.5, None, True])}),
        (UserList([UserDict(a=UserList([1]))]), [{"a": [1]}]),
        (MappingProxyType({1: Kind.TEXT}), {1: "text"}),
        ([Part(text="hi")], [{"type": "text", "text": "hi"}]),
        (Function("look", {"type": Kind.TEXT}), {"name": "look", "parameters": {"type": "text"}}),
        (range(3), [0, 1, 2]),
        (UnendingDict(a=1), {"a": 1}),
    ],
)
def test_data_of_other_classes_is_copied_as_plain_data(value: Any, plain: Any) -> None:
    assert to_plain("field", value) == plain


def test_objects_of_too_many_items_are_rejected() -> None:
    for value in (Part(text="hi", index=[0] * (MAX_ITEMS + 1)), Function("look", [0] * (MAX_ITEMS + 1))):
        with pytest.raises(RequestError, match=f"more than {MAX_ITEMS} items"):
            to_plain("field", [value])


LARGE: Any = [[]] * (MAX_ITEMS + 1)


@pytest.mark.parametrize(
    ("field", "arguments"),
    [
        ("messages", {"messages": [{**MESSAGE, "extra": LARGE}]}),
        ("messages", {"messages": [{**MESSAGE, "content": LARGE}]}),
        ("messages", {"messages": [Unending(names, "user")]}),
        ("tools", {"tools": [{"type": "function", "function": {"name": "f", "parameters": LARGE}}]}),
        ("tools", {"tools": LARGE}),
        ("tools", {"tools": [Unending(names)]}),
        ("template_args", {"template_args": {"documents": LARGE}}),
        ("template_args", {"template_args": Unending(names)}),
        ("template_args", {"template_args": Unending(same_name)}),
    ],
)
async def test_chat_rejects_too_large_arguments_at_the_call(field: str, arguments: dict[str, Any]) -> None:
    arguments = {"messages": [MESSAGE], **arguments}
    async with scripted_engine("fine") as engine:
        with pytest.raises(RequestError, match=f"more than {MAX_ITEMS} items") as caught:
            engine.chat(**arguments)
        assert caught.value.field == field
        with pytest.raises(RequestError, match=f"more than {MAX_ITEMS} items"):
            await engine.count_tokens(arguments.pop("messages"), **arguments)
        assert engine.stats().num_submitted == 0


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"enum": list(range(MAX_ITEMS + 1))}, f"more than {MAX_ITEMS} items"),
        ({"enum": [Unending(names)]}, f"more than {MAX_ITEMS} items"),
        ({"enum": ["x" * MAX_JSON_CHARS, "y"]}, f"more than {MAX_JSON_CHARS} characters"),
        ({"x" * (MAX_JSON_CHARS + 1): 1}, f"more than {MAX_JSON_CHARS} characters"),
        ({"enum": [2**10_000] * 1000}, f"more than {MAX_JSON_CHARS} characters"),
        ("{" + " " * MAX_JSON_CHARS + "}", f"at most {MAX_JSON_CHARS} characters"),
    ],
)
def test_too_large_schemas_are_rejected(schema: Any, said: str) -> None:
    with pytest.raises(RequestError, match=f"^schema=.*{said}") as caught:
        JsonSchema(schema)
    assert caught.value.field == "schema" and len(str(caught.value)) < 400


def test_collections_are_not_searched_for_types() -> None:
    """A list of thirty levels has a billion items."""
    nested: list[Any] = [int]
    for _ in range(30):
        nested = [nested, nested]
    for value in (nested, tuple(nested), UserList(nested), frozenset([int])):
        with pytest.raises(RequestError, match=r"^schema=.*: expected a JSON schema") as caught:
            JsonSchema(value)
        assert caught.value.field == "schema"


def test_schema_of_a_dict_class_is_read_by_its_own_items() -> None:
    assert JsonSchema(UnendingDict(type="integer")).definition == {"type": "integer"}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"logit_bias": dict.fromkeys(range(MAX_ITEMS + 1), 1.0)}, f"more than {MAX_ITEMS} items"),
        ({"logit_bias": Unending()}, f"more than {MAX_ITEMS} items"),
        ({"logit_bias": Unending(lambda: itertools.repeat(5))}, f"more than {MAX_ITEMS} items"),
        ({"allowed_token_ids": [5] * (2**19 + 1)}, "at most 524288 items"),
        ({"stop_token_ids": [5] * 10**6}, "at most 64 items"),
        ({"stop": ["a"] * 10**6}, "at most 64 items"),
    ],
)
def test_too_large_parameters_are_rejected(fields: dict[str, Any], said: str) -> None:
    (field,) = fields
    for make in (lambda: SamplingParams(**fields), lambda: SamplingParams.from_dict(fields)):
        with pytest.raises(RequestError, match=f"^{field}=.*{said}") as caught:
            make()
        assert caught.value.field == field


def test_largest_parameters_are_taken() -> None:
    bias = dict.fromkeys(range(MAX_ITEMS), -1.0)
    params = SamplingParams(logit_bias=bias, allowed_token_ids=list(range(2**19)))
    assert params.logit_bias == bias and params.allowed_token_ids == tuple(range(2**19))


def test_settings_without_an_end_are_rejected() -> None:
    for read in (SamplingParams.from_dict, EngineConfig.from_dict):
        with pytest.raises(
            RequestError if read is SamplingParams.from_dict else Exception, match="unknown field"
        ):
            read(Unending(lambda: itertools.cycle(["max_tokens"])))


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ({2: 1, 1: 2}, "{1: 2, 2: 1}"),
        (OrderedDict(b=1), "OrderedDict({'b': 1})"),
        (UserList([1]), "UserList([1])"),
        (Unending(same_name), "Unending({'a': 1.0})"),
        (range(5), "range(0, 5)"),
        (b"ab", "b'ab'"),
    ],
)
def test_short_repr_reads_the_first_items(value: Any, shown: str) -> None:
    assert short_repr(value) == shown


class Counted(Sequence[int]):
    """Counts how many items are read."""

    num_read = 0

    def __len__(self) -> int:
        return 10**9

    def __getitem__(self, index: Any) -> int:
        self.num_read += 1
        return 7


class Deep(Mapping[Any, Any]):
    """A mapping without an end, whose values are such mappings. Counts how many are made."""

    num_made = 0

    def __init__(self) -> None:
        Deep.num_made += 1

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[Any]:
        return itertools.count()

    def __getitem__(self, key: Any) -> Any:
        return Deep()


def test_short_repr_of_wide_nested_data_reads_few_items() -> None:
    """Sixteen items at each of four levels would be 65,536."""
    assert len(short_repr(Deep())) <= 200 and Deep.num_made < 5_000


def test_short_repr_of_a_large_sequence_is_short() -> None:
    counted = Counted()
    assert len(short_repr(counted)) < 200 and counted.num_read < 50
