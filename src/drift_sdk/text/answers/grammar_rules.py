"""Rules of grammars of answers, in llguidance's Lark."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from drift_sdk.grammars import Lark
from drift_sdk.text.tokenizer import Tokenizer

COMPACT: dict[str, bool | str] = {"whitespace_flexible": False, "key_separator": ": ", "item_separator": ", "}
"""White space as Python's json.dumps writes it, which is what templates show to models."""
ANY_TEXT = r"/(?s:.*)/"


class Rules:
    """The rules of a grammar, and its literals.

    template:     source of the model's chat template.
    is_single:    whether there is exactly one call.
    object_style: white space of objects that are calls by themselves, without a marker.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: str,
        *,
        is_single: bool = False,
        object_style: Mapping[str, object] = COMPACT,
    ) -> None:
        self.template = template
        self.object_style = object_style
        self._lines: list[str] = []
        self._is_single = is_single
        self._tokenizer = tokenizer

    def grammar(self, start: str) -> Lark:
        """The grammar with these rules."""
        return Lark("\n".join([f"start: {start}", *self._lines]))

    def rule(self, body: str, options: str = "") -> str:
        """The name of a new rule."""
        name = f"rule{len(self._lines)}"
        self._lines.append(f"{name}{options}: {body}")
        return name

    def calls(self, call: str, separator: str = "") -> str:
        """A call, or several with a separator between them."""
        return call if self._is_single else f"{call} ({separator} {call})*"

    def literal(self, text: str) -> str:
        """A text, with the special tokens of the vocabulary that stand alone in it."""
        (token_id,) = self._tokenizer.special_ids_of([text]) or (None,)
        return quoted(text) if token_id is None else f"<[{token_id}]>"

    def text_before(self, marker: str) -> str:
        """Any text without a marker, and the marker."""
        if self._tokenizer.special_ids_of([marker]):
            return f"{self.rule(ANY_TEXT)} {self.literal(marker)}"

        return self.rule(ANY_TEXT, f"[suffix={quoted(marker)}]")

    def value(self, schema: Mapping[str, Any], style: Mapping[str, object] = COMPACT) -> str:
        """A JSON value that a schema describes. style: its white space."""
        return f"%json {json.dumps({**schema, 'x-guidance': style}, ensure_ascii=False)}"


def quoted(text: str) -> str:
    """A literal in Lark's notation, in which U+007F cannot stand by itself."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
