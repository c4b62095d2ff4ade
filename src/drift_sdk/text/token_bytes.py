"""What each token id adds to the text, as bytes."""

from __future__ import annotations

import json
import re
from contextlib import suppress

import tokenizers

from drift_sdk.errors import ModelLoadError

__all__ = ["NUM_IDS", "TokenBytes"]

NUM_IDS = 2**32
"""Token ids are below this: the tokenizers library takes no others."""

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes(dict[int, bytes]):
    """Token id -> the UTF-8 bytes it adds to the text; an entry is made when its id is first looked up.

    Special ids and ids outside the vocabulary add nothing. `texts` has the ids looked up so far whose bytes
    are whole characters. `num_leading_spaces` is how many spaces the tokenizer's decoder takes off the very
    start of the text. Entries never change, so threads may share it.

    Raises `ModelLoadError` when the decoder does more to tokens than this can express.
    """

    def __init__(self, raw: tokenizers.Tokenizer, special_token_ids: frozenset[int]) -> None:
        super().__init__()
        self._raw = raw
        self._special_token_ids = special_token_ids
        self._is_byte_level = False
        self._has_byte_tokens = False
        self._replacements: list[tuple[str, str]] = []
        self.texts: dict[int, str] = {}
        self.num_leading_spaces = 0
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
            # A token with any character outside the byte alphabet is meant literally, as added tokens may be.
            is_spelled = all(char in CHAR_TO_BYTE for char in token)
            return bytes(CHAR_TO_BYTE[char] for char in token) if is_spelled else token.encode()

        if self._has_byte_tokens and (byte := BYTE_TOKEN.fullmatch(token)):
            return bytes([int(byte[1], 16)])

        for old, new in self._replacements:
            token = token.replace(old, new)

        return token.encode()

    def _read_decoder(self) -> None:
        decoder = self._raw.decoder
        if decoder is None:
            raise ModelLoadError("tokenizer: no decoder, expected a byte-level or sentencepiece one")

        spec = json.loads(decoder.__getstate__())
        is_fused = False
        for step in spec["decoders"] if spec["type"] == "Sequence" else [spec]:
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
                    allowed = (
                        "ByteLevel, Metaspace, Replace (a string), ByteFallback, Fuse, Strip (leading spaces)"
                    )
                    raise ModelLoadError(f"tokenizer: decoder step {json.dumps(step)}, expected {allowed}")


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes as printable characters: those that print stand for themselves, the others
    are numbered upwards from U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


CHAR_TO_BYTE = _byte_alphabet()
