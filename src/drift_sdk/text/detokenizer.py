"""Incremental detokenisation: token ids to text, as the ids arrive."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

from drift_sdk.text.token_bytes import TokenBytes

__all__ = ["BytesDetokenizer", "ContextDetokenizer", "Detokenizer", "SilentDetokenizer"]


class Detokenizer(Protocol):
    """Turns the token ids of one text into characters, as the ids arrive.

    is_incomplete: whether a part of a character is held back.
    """

    @property
    def is_incomplete(self) -> bool: ...

    def push(self, token_ids: Sequence[int]) -> str:
        """Add ids; returns the text that they complete, which may be empty."""

    def flush(self) -> str:
        """End the text; returns what is left of it."""


class BytesDetokenizer:
    """A detokeniser for tokens that add the same bytes wherever they stand.

    The result does not depend on how the ids are split over pushes.

    A character whose bytes are spread over several tokens is returned when it is complete. Bytes that can no
    longer become a character are returned as U+FFFD. Special ids add nothing. A push takes time proportional
    to the number of its own ids.

    The joined text equals `Tokenizer.decode` of all ids, with two exceptions:
    - With sentencepiece models, a run of byte tokens that contains an invalid byte keeps its valid characters
      here, while `decode` replaces every byte of the run. (A stream cannot wait for the end of the run.)
    - With the decoder Metaspace, one space is removed at the start of the text, while `decode` removes every
      U+2581 of the first token and no other space.

    is_continuation: the ids continue a text: the spaces that `decode` removes at the start of a text are
                     kept.
    """

    __slots__ = ("_bytes_of", "_incomplete", "_num_leading_spaces", "_text_of")

    def __init__(self, token_bytes: TokenBytes, *, is_continuation: bool = False) -> None:
        self._bytes_of, self._text_of = token_bytes.__getitem__, token_bytes.texts.get
        self._incomplete = b""  # first bytes of a character whose last bytes have not arrived
        self._num_leading_spaces = 0 if is_continuation else token_bytes.num_leading_spaces

    @property
    def is_incomplete(self) -> bool:
        return bool(self._incomplete)

    def push(self, token_ids: Sequence[int]) -> str:
        """Add ids; returns the text that they complete, which may be empty."""
        if len(token_ids) == 1 and not self._incomplete:  # the usual case
            text = self._text_of(token_ids[0])
            if text is not None:
                return self._stripped(text) if self._num_leading_spaces else text

        return self._decode(b"".join(map(self._bytes_of, token_ids)))

    def flush(self) -> str:
        """End the text; returns what is left of it: U+FFFD if a character is incomplete, else nothing."""
        return self._decode(b"", is_last=True)

    def _decode(self, data: bytes, *, is_last: bool = False) -> str:
        data = self._incomplete + data
        text, num_used = codecs.utf_8_decode(data, "replace", is_last)
        self._incomplete = data[num_used:]
        return self._stripped(text) if self._num_leading_spaces else text

    def _stripped(self, text: str) -> str:
        """Remove the leading spaces that the tokenizer's decoder removes at the start of a text.

        After the first other character nothing more is removed.
        """
        num_spaces = len(text) - len(text.lstrip(" "))
        num_stripped = min(num_spaces, self._num_leading_spaces)
        self._num_leading_spaces = self._num_leading_spaces - num_stripped if num_spaces == len(text) else 0
        return text[num_stripped:]


class ContextDetokenizer:
    """A detokeniser for tokens whose text depends on the token before them: words joined with spaces, for
    example.

    decode: the text of token ids. Adding an id may only add to the text, by what depends on the last id
            before it.
    adds_text: whether an id takes part in `decode`; special ids, and those outside the vocabulary, do not.

    Each push decodes the new ids together with the last one before them, whose own text is known. The joined
    text equals that of all ids decoded at once.
    """

    __slots__ = ("_adds_text", "_decode", "_last")
    is_incomplete = False

    def __init__(self, decode: Callable[[Sequence[int]], str], adds_text: Callable[[int], bool]) -> None:
        self._decode = decode
        self._adds_text = adds_text
        self._last: list[int] = []  # the newest id, none at the start

    def push(self, token_ids: Sequence[int]) -> str:
        """Add ids; returns the text that they add, which may be empty."""
        added = [token_id for token_id in token_ids if self._adds_text(token_id)]
        if not added:
            return ""

        num_known = len(self._decode(self._last))
        text = self._decode([*self._last, *added])[num_known:]
        self._last = added[-1:]
        return text

    def flush(self) -> str:
        """End the text; nothing is ever left of it."""
        return ""


class SilentDetokenizer:
    """A detokeniser for a model without a tokenizer: tokens have no text."""

    __slots__ = ()
    is_incomplete = False

    def push(self, token_ids: Sequence[int]) -> str:
        return ""

    def flush(self) -> str:
        return ""
