"""Arguments of tool calls: strict JSON, and Python's literals."""

from __future__ import annotations

import json
import re
import sys
from typing import Any, NoReturn

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
