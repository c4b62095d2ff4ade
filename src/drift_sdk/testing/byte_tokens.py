"""The scripted model's vocabulary: bytes and an end-of-sequence token."""

from __future__ import annotations

from collections.abc import Sequence

from drift_sdk.text.tokenizer import Tokenizer

__all__ = ["EOS_TOKEN_ID", "byte_alphabet", "byte_tokenizer", "text_of"]

EOS_TOKEN_ID = 256
"""The scripted model's end-of-sequence id; ids 0 to 255 are bytes."""


def text_of(token_ids: Sequence[int]) -> str:
    """The text of token ids. Bytes that are no whole character become U+FFFD."""
    pieces = (bytes((token_id,)) if token_id < EOS_TOKEN_ID else b"<eos>" for token_id in token_ids)
    return b"".join(pieces).decode(errors="replace")


def byte_tokenizer() -> Tokenizer:
    """A tokenizer of 256 byte tokens and an end-of-sequence token, `EOS_TOKEN_ID`."""
    return Tokenizer.from_gguf(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "gpt-2",
            "tokenizer.ggml.tokens": [*byte_alphabet(), "<eos>"],
            "tokenizer.ggml.token_type": [1] * 256 + [3],
            "tokenizer.ggml.merges": [],
            "tokenizer.ggml.eos_token_id": EOS_TOKEN_ID,
        }
    )


def byte_alphabet() -> list[str]:
    """The printable character that stands for each byte in byte-level vocabularies."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    shifted = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(shifted)) for byte in range(256)]
