"""The bytes that each token id adds to a text."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from itertools import takewhile
from typing import Any

import tokenizers

from drift_sdk.errors import ModelLoadError

__all__ = ["NUM_IDS", "TokenBytes", "joins_words"]

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
