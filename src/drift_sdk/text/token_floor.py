"""A lower bound on the number of tokens of a text, computed without tokenising it."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import tokenizers

from drift_sdk.text.token_bytes import TokenBytes

__all__ = ["TokenFloor"]

NON_ASCII = range(0x80, 0x100)
# Bytes that occur in UTF-8 text.
UTF8 = frozenset(range(0x100)) - {0xC0, 0xC1, *range(0xF5, 0x100)}
SLICE_CHARS = 2**16
"""Characters that are counted at a time: no other thread runs Python code meanwhile."""
BLANKS = b" \t\n\v\f\r\x1c\x1d\x1e\x1f"


class TokenFloor:
    """Computes the bound for a tokenizer whose tokens cover every byte of a text.

    Each byte has a weight: 1 / (number of bytes of the longest token that contains it). So no token weighs
    more than 1, and the weight of a text does not exceed the number of its tokens. A byte that may be dropped
    has weight 0: one that is not a token by itself (bytes without a token are dropped or merged into a single
    unknown token), and a blank if blanks beside an added token are removed. If the tokenizer may shorten a
    text before splitting it into tokens, the bound is 0: for every text, or only for texts that are not
    ASCII.
    """

    def __init__(self, raw: tokenizers.Tokenizer, token_bytes: TokenBytes) -> None:
        parts: Mapping[str, Any] = json.loads(raw.to_str(pretty=False))
        added = parts["added_tokens"]
        normalizers = steps(parts["normalizer"], "normalizers")
        kinds = {step["type"] for step in normalizers}
        self._weights: list[float] = []
        self._is_for_ascii = "NFC" in kinds
        if (
            parts["model"]["type"] in ("BPE", "Unigram")
            and all(keeps_length(step) for step in normalizers)
            and all(keeps_text(step) for step in steps(parts["pre_tokenizer"], "pretokenizers"))
            # If added tokens are normalised too, they begin with the prepended character.
            and not ("Prepend" in kinds and any(token["normalized"] for token in added))
        ):
            self._weights = weigh(raw, token_bytes)
            if any(token["lstrip"] or token["rstrip"] for token in added):
                for byte in (*BLANKS, *NON_ASCII):  # some blanks are not ASCII
                    self._weights[byte] = 0.0

    def __call__(self, text: str, enough: float = math.inf) -> int:
        """A number of tokens that the text has at least; 0 if nothing is known. If it exceeds `enough`, it
        may be that of a beginning of the text."""
        if not self._weights or (self._is_for_ascii and not text.isascii()):
            return 0

        weight = 0.0
        for start in range(0, len(text), SLICE_CHARS):
            counts = Counter(text[start : start + SLICE_CHARS].encode(errors="surrogatepass"))
            weight += sum(self._weights[byte] * count for byte, count in counts.items())
            if weight > enough:
                break
        return int(weight * (1.0 - 1e-9))  # rounded down, with a margin for rounding errors of the sum


def weigh(raw: tokenizers.Tokenizer, token_bytes: TokenBytes) -> list[float]:
    """The weight of each byte, 256 numbers from 0 to 1."""
    longest, single = [0] * 0x100, set()
    added = raw.get_added_tokens_decoder()
    for token, token_id in raw.get_vocab(with_added_tokens=True).items():
        data = token_bytes[token_id]
        if len(data) == 1 and token_id not in added:
            single.add(data[0])
        # A token may also occur in a text as it is spelled: special tokens, and the character for a space.
        for form in (data, token.encode()):
            for byte in set(form):
                longest[byte] = max(longest[byte], len(form))

    # If a byte of a character is not a token, the whole character may become an unknown token.
    weighing = single if UTF8 <= single else single.difference(NON_ASCII)
    return [1.0 / longest[byte] if byte in weighing else 0.0 for byte in range(0x100)]


def steps(spec: Mapping[str, Any] | None, parts: str) -> list[Mapping[str, Any]]:
    """The steps of a component of a tokenizer.json, with nested sequences flattened.

    spec:   the component; None for no steps.
    parts:  name of the field with the steps of a sequence.
    """
    if spec is None:
        return []

    if spec["type"] == "Sequence":
        return [step for part in spec[parts] for step in steps(part, parts)]

    return [spec]


def keeps_length(normalizer: Mapping[str, Any]) -> bool:
    """Whether a normalizer never shortens a text (NFC: an ASCII text)."""
    match normalizer:
        case {"type": "Prepend" | "NFC"}:
            return True
        case {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}:
            return True

    return False


def keeps_text(pre_tokenizer: Mapping[str, Any]) -> bool:
    """Whether a pre-tokenizer keeps all characters of a text."""
    match pre_tokenizer:
        case {"type": "ByteLevel" | "Digits" | "Metaspace"}:
            return True
        case {"type": "Split", "behavior": str(behavior)}:
            return behavior != "Removed"

    return False
