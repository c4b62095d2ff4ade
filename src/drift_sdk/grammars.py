"""Constraints of a completion's text, as values: JSON schemas, regular expressions, Lark grammars."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Collection
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, Protocol, get_args, get_origin, get_type_hints, overload

import msgspec
from msgspec import Struct
from typing_extensions import TypeVar

from drift_sdk._fields import RequestFields, check_fields
from drift_sdk._plain_data import MAX_JSON_CHARS, to_json
from drift_sdk.errors import RequestError

__all__ = [
    "JSON_STYLE",
    "After",
    "AnyGrammar",
    "AnyOf",
    "Grammar",
    "JsonSchema",
    "Lark",
    "ParsedT",
    "ParsedT_co",
    "Regex",
]

ParsedT = TypeVar("ParsedT", default=Any)
"""The type that a completion's text is decoded into: that of its `JsonSchema`."""
ParsedT_co = TypeVar("ParsedT_co", covariant=True, default=Any)

# Whitespace in JSON: one blank, or a newline and its indentation. If any whitespace were allowed, small
# models might generate it without end.
JSON_STYLE = {"whitespace_pattern": r"( |\n[ \t]{0,32})"}

PYDANTIC_SCHEMAS = ("__pydantic_core_schema__", "__get_pydantic_core_schema__")
PYDANTIC_BOUNDS = ("pydantic", "annotated_types")
"""Packages of the annotations that pydantic reads."""


class TypeReader(Protocol[ParsedT_co]):
    """What pydantic's `TypeAdapter` has, for type checkers."""

    def json_schema(self) -> dict[str, Any]: ...

    def validate_json(self, data: str, /) -> ParsedT_co: ...


class JsonSchema(Struct, Generic[ParsedT_co], frozen=True, dict=True, metaclass=RequestFields):
    """The text is JSON that a schema describes. For type checkers, `JsonSchema(City)` is a
    `JsonSchema[City]`, and `Completion.parsed` a `City | None`; of a schema that is no class, such as a dict
    or a union of types, it is Any.

    schema: a JSON schema, as a dict or as JSON text, or a type to decode into: a msgspec Struct, a dataclass,
            a TypedDict, a builtin generic such as `list[int]`, a pydantic model class or TypeAdapter.
            pydantic also reads types that have its models, types or Fields as parts, such as `list[Model]`.

    Wherever JSON permits white space, the model may write one blank, or a newline and up to 32 blanks or
    tabs: parse the text, and do not compare it.

    A dict is kept as JSON text. Objects of a type have its fields and no others. A schema that allows further
    properties, or strings and arrays of any length, is not restricted further: close its objects
    (`additionalProperties`) and bound its strings and arrays, or a model may go on until `max_tokens`.

    The formats date, time, date-time, duration, email, hostname, ipv4, ipv6, uri and uuid are enforced, but
    not on names of properties; other formats are annotations. The least number over an exclusive bound is
    1e-18 if the bound is 0, and the next one of 15 digits if it is another whole number. The schemas of a
    `oneOf` must differ by their types, by constants, or by a property that one of them requires. Alternatives
    of a type need not, and items of its sets may be equal: decoding the text shows it.

    A value that is not a schema raises `RequestError`, and so does a dict of more than 100,000 items over all
    levels, or a text of more than 524,288 characters. Keywords that llguidance cannot enforce are found when
    the request is prepared, and its stream raises RequestError. So are numbers that are not exact as doubles
    or reach 2**63 (except `maximum` 2**63 - 1), exclusive bounds over 2**53, bounds with more than 15
    decimals, and schemas of more than 256 KiB, 5,000 parts (objects, properties, alternatives), 100 levels,
    1,000 properties of one object (100 with minProperties or maxProperties), 10 propertyNames and
    patternProperties, or 8 patterns, formats and lengths for one string. In a `pattern`, \\d and \\w are
    ASCII and \\s is any Unicode space. Each pattern has at most 1,000 repetition operators.
    """

    schema: Any

    if TYPE_CHECKING:

        @overload
        def __init__(self, schema: type[ParsedT_co] | TypeReader[ParsedT_co]) -> None: ...
        @overload
        def __init__(self: JsonSchema[Any], schema: object) -> None: ...
        def __init__(self, schema: object) -> None: ...

    def __post_init__(self) -> None:
        check_fields(RequestError, self)
        if isinstance(self.schema, dict):
            msgspec.structs.force_setattr(self, "schema", to_json("schema", self.schema))
        elif isinstance(self.schema, str) and len(self.schema) > MAX_JSON_CHARS:
            raise RequestError.of("schema", self.schema, f"at most {MAX_JSON_CHARS} characters")

        _ = self.definition  # raises RequestError for what is not a schema

    @cached_property
    def definition(self) -> dict[str, Any]:
        """The JSON schema as a dict."""
        return _parse(self.schema) if isinstance(self.schema, str) else self._derived()

    @cached_property
    def _adapter(self) -> Any:
        """pydantic's TypeAdapter for the type, or None if msgspec reads it. pydantic is not imported to find
        out, which would slow down programs that do not use it."""
        adapter = getattr(sys.modules.get("pydantic"), "TypeAdapter", None)  # pydantic 1 has none
        if adapter is None or isinstance(self.schema, adapter):
            return self.schema if adapter else None

        return adapter(self.schema) if _has_pydantic_parts(self.schema) else None

    def _derived(self) -> dict[str, Any]:
        """The schema of a type."""
        allowed = "a JSON schema (dict or JSON text) or a type that has one"
        kind = self.schema
        # msgspec takes None for a type, and looks for types in nested lists, however large.
        if kind is None or (isinstance(kind, Collection) and not isinstance(kind, type)):
            raise RequestError.of("schema", self.schema, allowed)

        try:
            schema = self._adapter.json_schema() if self._adapter else msgspec.json.schema(self.schema)
        except Exception as error:  # a model class may run any code
            raise RequestError.of("schema", self.schema, f"{allowed} ({error})") from error

        written: dict[str, Any] = _close(schema)
        return written

    def decode(self, text: str) -> ParsedT_co:
        """The value of a completion's text: of the schema's type, or plain JSON. A number beyond the largest
        double, such as 1e999, is infinite. A type that checks more than its schema says raises its own
        validation error, and msgspec.ValidationError is raised for an integer with more digits than Python
        reads."""
        value: ParsedT_co = self._decode(text)
        return value

    def _decode(self, text: str) -> Any:
        if isinstance(self.schema, str):
            try:
                return json.loads(text)
            except ValueError as error:
                raise msgspec.ValidationError(str(error)) from error

        if self._adapter:
            return self._adapter.validate_json(text)

        try:
            return msgspec.json.decode(text, type=self.schema)
        except msgspec.ValidationError as error:
            # It reads no number beyond the largest double, which is infinite elsewhere.
            try:
                value = json.loads(text)
            except ValueError:
                raise error from None

            return msgspec.convert(value, self.schema, str_keys=True)


class Regex(Struct, frozen=True, metaclass=RequestFields):
    """The text is matched by a regular expression from its first to its last character.

    pattern: in the syntax of Rust's regex crate, which has no look-around and no back-references. \\d, \\w
             and \\s are ASCII, (?i) folds case by Unicode. At most 256 KiB and 1,000 repetition operators
             (`*`, `+`, `?` and `{m,n}`, whatever m and n are).

    What is not a string with at least one character raises RequestError; a pattern that cannot be used is
    found when the request is prepared, and its stream raises RequestError."""

    pattern: str

    def __post_init__(self) -> None:
        check_fields(RequestError, self)
        _check_text("pattern", self.pattern)


class Lark(Struct, frozen=True, metaclass=RequestFields):
    """The text is derived from the rule `start` of a context-free grammar.

    grammar: in llguidance's variant of Lark,
             https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md

    Special tokens are written as <|name|>, JSON schemas as %json {...} with the bounds of `JsonSchema`. At
    most 256 KiB, 5,000 rules and groups, 1,000 of them terminals, 5,000 repetition operators, and 1,000 of
    them in one regular expression, where \\d, \\w and \\s are Unicode.

    A value that is not a string raises RequestError; a grammar that cannot be used is found when the request
    is prepared, and its stream raises RequestError."""

    grammar: str

    def __post_init__(self) -> None:
        check_fields(RequestError, self)
        _check_text("grammar", self.grammar)


Grammar = JsonSchema | Regex | Lark


class After(Struct, frozen=True):
    """The text begins with a text of one grammar, and the rest is described by another. The engine makes it;
    parameters have none."""

    first: Grammar
    rest: Grammar


class AnyOf(Struct, frozen=True):
    """The text is described by one of several grammars. The engine makes it; parameters have none."""

    grammars: tuple[Grammar | After, ...]


AnyGrammar = Grammar | After | AnyOf


def _check_text(field: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError.of(field, text, "text without lone surrogates") from error


def _parse(text: str) -> dict[str, Any]:
    allowed = "the JSON text of an object"
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError.of("schema", text, f"{allowed} ({error})") from error

    if not isinstance(schema, dict):
        raise RequestError.of("schema", text, allowed)

    return schema


def _has_pydantic_parts(kind: Any) -> bool:
    """Whether pydantic describes a type, or one of its arguments, fields and annotations. msgspec refuses
    pydantic's models, and passes over bounds that pydantic reads."""
    seen: set[type] = set()
    parts = [kind]
    while parts:
        part = parts.pop()
        package = type(part).__module__.partition(".")[0]
        if package in PYDANTIC_BOUNDS or any(hasattr(part, name) for name in PYDANTIC_SCHEMAS):
            return True

        parts += get_args(part)
        origin = get_origin(part) or part
        if isinstance(origin, type) and origin not in seen:
            seen.add(origin)
            parts += _types_of_fields(origin)
    return False


def _types_of_fields(kind: type) -> list[Any]:
    """The types of a dataclass, a TypedDict or a NamedTuple, with their annotations."""
    is_named_tuple = issubclass(kind, tuple) and hasattr(kind, "_fields")
    is_typed_dict = issubclass(kind, dict) and hasattr(kind, "__total__")  # of typing or typing_extensions
    if not (dataclasses.is_dataclass(kind) or is_typed_dict or is_named_tuple):
        return []

    return list(get_type_hints(kind, include_extras=True).values())


def _close(schema: Any) -> Any:
    """The schema of a type with `additionalProperties` false in each object that names its properties, and
    without what the type itself makes sure of: that items differ, and which of several types a value has."""
    if isinstance(schema, list):
        return [_close(item) for item in schema]

    if not isinstance(schema, dict):
        return schema

    closed = {key: _close(value) for key, value in schema.items()}
    if schema.get("type") == "object" and ("properties" in schema or "patternProperties" in schema):
        closed.setdefault("additionalProperties", False)
    if schema.get("uniqueItems") is True:
        del closed["uniqueItems"]
    if isinstance(schema.get("oneOf"), list) and "anyOf" not in schema:
        closed["anyOf"] = closed.pop("oneOf")
    return closed
