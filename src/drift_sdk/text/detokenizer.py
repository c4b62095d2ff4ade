"""Token ids to text, as they come."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from drift_sdk.text.token_bytes import TokenBytes

__all__ = ["Detokenizer"]


class Detokenizer:
    """Turns the token ids of one text into characters, however the ids are cut into pushes.

    A character whose bytes are spread over several tokens is returned when it is complete; bytes that can no
    longer become a character are returned as U+FFFD. Special ids add nothing. Every push takes time in
    proportion to its own ids.

    The joined text equals `Tokenizer.decode` of all ids. The exceptions are sentencepiece models: a run of
    byte tokens with an invalid byte in it keeps its valid characters here, where `decode` replaces every byte
    of the run (the run's end cannot be awaited in a stream).
    """

    __slots__ = ("_bytes_of", "_incomplete", "_num_leading_spaces", "_text_of")

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._bytes_of, self._text_of = token_bytes.__getitem__, token_bytes.texts.get
        self._incomplete = b""  # the first bytes of a character
        self._num_leading_spaces = token_bytes.num_leading_spaces

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that became certain with these ids, often empty."""
        if len(token_ids) == 1 and not self._incomplete:  # as a rule
            text = self._text_of(token_ids[0])
            if text is not None:
                return self._stripped(text) if self._num_leading_spaces else text

        return self._decode(b"".join(map(self._bytes_of, token_ids)))

    def flush(self) -> str:
        """The rest, once no more ids will come: U+FFFD if a character is incomplete."""
        return self._decode(b"", is_last=True)

    def _decode(self, data: bytes, *, is_last: bool = False) -> str:
        data = self._incomplete + data
        text, num_used = codecs.utf_8_decode(data, "replace", is_last)
        self._incomplete = data[num_used:]
        return self._stripped(text) if self._num_leading_spaces else text

    def _stripped(self, text: str) -> str:
        """Only the very start of the text is stripped: it is over at the first other character."""
        num_spaces = len(text) - len(text.lstrip(" "))
        num_stripped = min(num_spaces, self._num_leading_spaces)
        self._num_leading_spaces = self._num_leading_spaces - num_stripped if num_spaces == len(text) else 0
        return text[num_stripped:]
