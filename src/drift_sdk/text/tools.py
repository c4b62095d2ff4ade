"""Tools as chat templates take them, and values of their arguments that models write as text."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

from msgspec import Struct

from drift_sdk.text.schemas import followed, is_local, resolve

MAX_DEPTH = 64
"""Most brackets around a value."""

LITERALS: dict[str, bool | None] = {
    "True": True,
    "False": False,
    "None": None,
    "true": True,
    "false": False,
    "null": None,
}
ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "\n": ""}
ESCAPE = re.compile(
    r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([0-7]{1,3})|(.))", re.DOTALL
)
TOKEN = re.compile(
    r"""\s*(?:(?P<string>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')"""
    r"""|(?P<number>[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?)"""
    r"""|(?P<name>[^\W\d]\w*)"""
    r"""|(?P<mark>[\[\](){}:,=])"""
    r"""|(?P<end>\Z))""",
    re.DOTALL,
)


def decode_json(text: str) -> Any:
    """The value of a JSON text. Raises ValueError for what is not JSON, for a key that an object has twice,
    for integers of more digits than Python converts, and for strings with half of a surrogate pair. A number
    with an exponent that no double can hold is the largest double, with its sign."""
    value = _decoder.decode(text)
    if "\\u" in text:
        json.dumps(value, ensure_ascii=False).encode()  # UnicodeEncodeError, a ValueError
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("an object has a key twice")

    return found


def _float(text: str) -> float:
    return max(-sys.float_info.max, min(float(text), sys.float_info.max))


def _reject(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


_decoder = json.JSONDecoder(object_pairs_hook=_unique, parse_float=_float, parse_constant=_reject)


def decode_keywords(text: str) -> dict[str, Any]:
    """The arguments of a call as Python has it, `a=1, b="x"`, without the brackets.

    Values are strings, numbers, True, False, None (also as JSON has them), lists, tuples and dicts with
    string keys. Raises ValueError for anything else, for a name that is given twice, and for values nested
    deeper than MAX_DEPTH.
    """
    tokens = Tokens(text)
    found: dict[str, Any] = {}
    while not tokens.accept("end", ""):
        name = tokens.expect("name")
        if name in found:
            raise ValueError("an argument is given twice")

        tokens.expect("mark", "=")
        found[name] = read_value(tokens, 1)
        if not tokens.accept("mark", ","):
            tokens.expect("end")
            break

    return found


def decode_literal(text: str) -> Any:
    """The value of a Python literal, of those that `decode_keywords` takes. ValueError for anything else."""
    tokens = Tokens(text)
    value = read_value(tokens, 1)
    tokens.expect("end")
    return value


class Tokens:
    """The tokens of a Python literal, one after the other."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._position = 0
        self.kind: str
        self.token: str
        self._next()

    def _next(self) -> None:
        match = TOKEN.match(self._text, self._position)
        if match is None:
            raise ValueError("arguments are not Python literals")

        self.kind, self._position = str(match.lastgroup), match.end()
        self.token = match[self.kind]

    def accept(self, kind: str, token: str) -> bool:
        """Take the next token if it is this one."""
        if (self.kind, self.token) != (kind, token):
            return False

        if kind != "end":
            self._next()
        return True

    def expect(self, kind: str, token: str | None = None) -> str:
        """Take the next token, which must be of this kind."""
        found = self.token
        if self.kind != kind or token not in (None, found):
            raise ValueError("arguments are not Python literals")

        if kind != "end":
            self._next()
        return found


def read_value(tokens: Tokens, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise ValueError(f"values are nested deeper than {MAX_DEPTH} levels")

    kind = tokens.kind
    if kind == "string":
        return unescaped(tokens.expect(kind)[1:-1])

    if kind == "number":
        number = tokens.expect(kind)
        return int(number) if number.lstrip("+-").isdigit() else _float(number)

    if kind == "name" and tokens.token in LITERALS:
        return LITERALS[tokens.expect(kind)]

    if tokens.accept("mark", "{"):
        return read_dict(tokens, depth)

    for opening, closing in ("[]", "()"):
        if tokens.accept("mark", opening):
            return read_items(tokens, closing, depth)

    raise ValueError("arguments are not Python literals")


def read_items(tokens: Tokens, closing: str, depth: int) -> list[Any]:
    items: list[Any] = []
    while not tokens.accept("mark", closing):
        items.append(read_value(tokens, depth + 1))
        if not tokens.accept("mark", ","):
            tokens.expect("mark", closing)
            break

    return items


def read_dict(tokens: Tokens, depth: int) -> dict[str, Any]:
    pairs: list[tuple[str, Any]] = []
    while not tokens.accept("mark", "}"):
        key = unescaped(tokens.expect("string")[1:-1])
        tokens.expect("mark", ":")
        pairs.append((key, read_value(tokens, depth + 1)))
        if not tokens.accept("mark", ","):
            tokens.expect("mark", "}")
            break

    return _unique(pairs)


def unescaped(text: str) -> str:
    """The text of a Python string literal without its quotes. Two escapes that are a surrogate pair are one
    character, as in JSON; ValueError for half of a pair."""

    def replace(match: re.Match[str]) -> str:
        code = match[1] or match[2] or match[3]
        if code:
            return chr(int(code, 16))  # ValueError beyond the last character

        if match[4]:
            return chr(int(match[4], 8))

        return ESCAPES.get(match[5], match[5] if match[5] in "\\'\"" else match[0])

    if "\\" not in text:
        return text

    return ESCAPE.sub(replace, text).encode("utf-16", "surrogatepass").decode("utf-16")


class Tool(Struct, frozen=True):
    """A tool.

    name:       as the model writes it in calls.
    parameters: JSON schema of its arguments, an object, joined with what it refers to; empty if the
                description has none.
    """

    name: str
    parameters: Mapping[str, Any]

    @property
    def properties(self) -> Mapping[str, Any]:
        """The schemas of its arguments by name."""
        properties = self.parameters.get("properties")
        return properties if isinstance(properties, Mapping) else {}

    @property
    def required(self) -> frozenset[str]:
        """Names of arguments that every call has."""
        required = self.parameters.get("required")
        names = required if isinstance(required, Sequence) and not isinstance(required, str) else ()
        return frozenset(name for name in names if isinstance(name, str) and name in self.properties)


class ToolSet(dict[str, Tool]):
    """Tools by name. Of tools with the same name, the last counts."""

    @classmethod
    def of(cls, descriptions: object) -> ToolSet:
        """The tools of a list of descriptions, {"type": "function", "function": {...}} or the inner part
        alone. Descriptions of another form are left out: the chat template rejects them or makes sense of
        them."""
        given = descriptions if isinstance(descriptions, Sequence) else ()
        inner = [tool.get("function", tool) for tool in given if isinstance(tool, Mapping)]
        found = cls()
        for each in inner:
            if isinstance(each, Mapping) and isinstance(name := each.get("name"), str) and name:
                parameters = each.get("parameters")
                schema = followed(parameters, parameters) if isinstance(parameters, Mapping) else {}
                found[name] = Tool(name, schema)
        return found

    def only(self, name: str) -> ToolSet:
        """The set of one of its tools."""
        return ToolSet({name: self[name]})


JSON_TYPES: dict[type, tuple[str, ...]] = {
    bool: ("boolean",),
    int: ("integer", "number"),
    float: ("number",),
    str: ("string",),
    list: ("array",),
    dict: ("object",),
    type(None): ("null",),
}
IMPLIED_TYPES = {
    "additionalProperties": "object",
    "items": "array",
    "patternProperties": "object",
    "prefixItems": "array",
    "properties": "object",
    "required": "object",
}
"""Types of the values that a keyword is about."""
WORDS: dict[str, bool | None] = {"True": True, "False": False, "None": None}
MAX_EXACT = 2.0**53
"""Up to here, a double that is a whole number is this number and no other."""


def argument_of(tool: Tool, name: str, text: str) -> dict[str, Any]:
    """The argument that is written as text, by its name, with a value of a type that its schema allows: JSON
    or a Python literal, perhaps in quotes. A text that has no value of such a type is kept as it can be read.
    White space instead of a value is null where null is allowed, and otherwise no argument."""
    types = types_of(tool, name)
    if types <= {"string"}:
        return {name: text}

    if not text.strip() and "string" not in types:
        return {name: None} if "null" in types else {}

    values = list(readings(text, may_be_string="string" in types))
    found = (value for value in values if types & set(JSON_TYPES[type(value)]))
    return {name: next(found, text if "string" in types or not values else values[0])}


def readings(text: str, *, may_be_string: bool) -> Iterator[Any]:
    """The values that a text may stand for, the most likely first. may_be_string: whether it may also be a
    string without quotes, which Python's lists and dicts are then."""
    for _ in range(2):  # as it is, and in quotes
        try:
            value = decode_json(text)
        except (ValueError, RecursionError):
            try:
                value = WORDS[text] if may_be_string else decode_literal(text)
            except (ValueError, RecursionError, OverflowError, KeyError):
                return

        yield value
        if isinstance(value, float) and value.is_integer() and abs(value) <= MAX_EXACT:
            yield int(value)
        if not isinstance(value, str):
            return

        text = value


def values_of(schema: Mapping[str, Any]) -> list[Any] | None:
    """The values that a schema enumerates; None if it does not."""
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    return values if isinstance(values, list) else None


def types_of(tool: Tool, name: str) -> set[str]:
    """The JSON types of an argument: the types that its schema names, and the schemas that it consists of or
    refers to. One that names none has the types of the values that it enumerates, or else the types that its
    keywords are about. Empty if there is no sign of any."""
    found: set[str] = set()
    waiting = [tool.properties.get(name)]
    references: set[str] = set()
    while waiting:
        each = waiting.pop()
        if not isinstance(each, Mapping):
            continue

        named = each.get("type")
        if named is None:
            named = [JSON_TYPES.get(type(value), ("",))[0] for value in values_of(each) or ()]
        if named == []:
            named = [implied for keyword, implied in IMPLIED_TYPES.items() if keyword in each]
        found |= {kind for kind in (named if isinstance(named, list) else [named]) if isinstance(kind, str)}
        for keyword in ("allOf", "anyOf", "oneOf"):
            members = each.get(keyword)
            waiting += members if isinstance(members, list) else []
        reference = each.get("$ref")
        if is_local(reference) and reference not in references:
            references.add(reference)
            waiting.append(resolve(tool.parameters, reference))
    return found
