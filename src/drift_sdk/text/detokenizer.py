"""From token ids to text: the bytes and the text of each id, and the text of ids as they arrive."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import takewhile
from typing import Any, Protocol

import tokenizers

from drift_sdk.errors import ModelLoadError

NUM_IDS = 2**32
"""Token ids are less than this; the tokenizers library accepts no others."""

WORD_DECODERS = ("WordPiece", "BPEDecoder", "CTC")
ALLOWED = (
    "ByteLevel, Metaspace, Replace (a string), ByteFallback, Fuse, Strip (leading spaces); or Replace, then "
    "at most one of WordPiece, BPEDecoder and CTC"
)

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes(dict[int, bytes]):
    """Mapping of token id to the UTF-8 bytes that it adds to a text. Entries are made when first looked up.

    Special ids and ids outside the vocabulary add nothing. Entries never change, so threads may share a
    table.

    texts:               token id -> text, of the ids looked up so far whose bytes are whole characters.
    num_leading_spaces:  number of spaces that the tokenizer's decoder removes at the start of a text; 1 for
                         the decoder Metaspace, which removes each U+2581 of the first token.

    Raises `ModelLoadError` if the tokenizer's decoder has a step that this class does not support.
    """

    def __init__(self, raw: tokenizers.Tokenizer, special_token_ids: frozenset[int]) -> None:
        super().__init__()
        self._raw = raw
        self._special_token_ids = special_token_ids
        self._is_byte_level = False
        self._has_byte_tokens = False
        self._replacements: list[tuple[str, str]] = []
        self.texts: dict[int, str] = {}
        self.num_leading_spaces: int = 0
        self._read_decoder()

    def __missing__(self, token_id: int) -> bytes:
        token = self._raw.id_to_token(token_id) if 0 <= token_id < NUM_IDS else None
        if token is None or token_id in self._special_token_ids:
            return b""

        self[token_id] = data = self._to_bytes(token)
        with suppress(UnicodeDecodeError):
            self.texts[token_id] = data.decode()
        return data

    def _to_bytes(self, token: str) -> bytes:
        if self._is_byte_level:
            # A token with a character outside the byte alphabet is literal text; added tokens may be.
            is_spelled = all(char in CHAR_TO_BYTE for char in token)
            return bytes(CHAR_TO_BYTE[char] for char in token) if is_spelled else token.encode()

        if self._has_byte_tokens and (byte := BYTE_TOKEN.fullmatch(token)):
            return bytes([int(byte[1], 16)])

        for old, new in self._replacements:
            token = token.replace(old, new)

        return token.encode()

    def _read_decoder(self) -> None:
        is_fused = False
        for step in decoder_steps(self._raw):
            match step:
                case {"type": "ByteLevel"}:
                    self._is_byte_level = True
                case {"type": "ByteFallback"}:
                    self._has_byte_tokens = True
                case {"type": "Fuse"}:
                    is_fused = True
                case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
                    self._replacements.append((old, new))
                case {"type": "Metaspace", "replacement": str(old), "prepend_scheme": str(scheme)}:
                    self._replacements.append((old, " "))
                    self.num_leading_spaces = 0 if scheme == "never" else 1
                case {"type": "Strip", "content": " ", "start": int(start), "stop": 0} if is_fused:
                    self.num_leading_spaces = start
                case _:
                    raise ModelLoadError(f"tokenizer: decoder step {json.dumps(step)}, expected {ALLOWED}")


def decoder_steps(raw: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    """The steps of a tokenizer's decoder, in order; empty without a decoder."""
    if raw.decoder is None:
        return []

    spec: dict[str, Any] = json.loads(raw.decoder.__getstate__())
    return list(spec["decoders"]) if spec["type"] == "Sequence" else [spec]


def joins_words(raw: tokenizers.Tokenizer) -> bool:
    """Whether the tokenizers library has to decode tokens, and the text of a token depends on the token
    before it at most: without a decoder, which joins tokens with spaces, with the decoders WordPiece,
    BPEDecoder and CTC, and with replacements of regular expressions."""
    steps = decoder_steps(raw)
    if not steps:
        return True

    replacements = list(takewhile(lambda step: step["type"] == "Replace", steps))
    kinds = [step["type"] for step in steps[len(replacements) :]]
    if kinds[-1:] == ["Fuse"]:
        del kinds[-1]

    # Replaced strings are read by TokenBytes; regular expressions are left to the library.
    has_regex = any("Regex" in step["pattern"] for step in replacements)
    return len(kinds) == 1 and kinds[0] in WORD_DECODERS or (not kinds and has_regex)


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's mapping of printable characters to bytes.

    Bytes that are printable characters in Latin-1 are represented by these; the others by characters from
    U+0100 on, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


CHAR_TO_BYTE = _byte_alphabet()


class TokenTexts(dict[int, str]):
    """Mapping of token id to its text. Entries are made when first looked up and never change, so threads may
    share a table.

    Bytes that are no whole character become U+FFFD. Special tokens are spelled out, although they add nothing
    to a text. Ids outside the vocabulary have no text.
    """

    def __init__(self, raw: tokenizers.Tokenizer, token_bytes: TokenBytes | None) -> None:
        """token_bytes: None for a tokenizer whose tokens the library has to decode."""
        super().__init__()
        self._raw = raw
        self._token_bytes = token_bytes

    def __missing__(self, token_id: int) -> str:
        if self._token_bytes is None:
            is_known = 0 <= token_id < NUM_IDS
            return self._raw.decode([token_id], skip_special_tokens=False) if is_known else ""

        data = self._token_bytes[token_id]
        if not data:
            spelled = self._raw.id_to_token(token_id) if 0 <= token_id < NUM_IDS else None
            return spelled or ""

        self[token_id] = text = data.decode(errors="replace")
        return text


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
