"""The tokens that end a completion, from the metadata of a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from drift_sdk.errors import ModelLoadError, short_repr

END_KEYS = tuple(f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
"""Metadata that names the end of text, of turn and of message."""
ENDS_KEY = "tokenizer.ggml.eos_token_ids"
"""Metadata that lists several ends."""
TOKENS_KEY = "tokenizer.ggml.tokens"
MESSAGE_END = "<|end|>"
ANSWER_ENDS = ("<|return|>", "<|call|>")
"""The ends of gpt-oss, where MESSAGE_END ends a message of several in an answer."""
END_TEXTS = (
    *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", MESSAGE_END, "<end_of_turn>", "<|endoftext|>"),
    *ANSWER_ENDS,
)
"""Texts of tokens that end an answer. llama.cpp's converter writes one end of those that a model has."""


def gguf_eos_token_ids(metadata: Mapping[str, Any], location: str) -> list[int]:
    """The ids that metadata names, and those of tokens with known texts, whatever the type of the token.

    location: the file, for messages. Raises ModelLoadError naming it for metadata that is no token id.
    """
    ids = {_token_id(metadata[key], key, location): None for key in END_KEYS if key in metadata}
    listed = metadata.get(ENDS_KEY, [])
    for token_id in listed if isinstance(listed, list) else [listed]:
        ids[_token_id(token_id, ENDS_KEY, location)] = None

    tokens = metadata.get(TOKENS_KEY)
    if not isinstance(tokens, list):
        return list(ids)

    by_id = {index: text for index, text in enumerate(tokens) if text in END_TEXTS}
    ids |= dict.fromkeys(by_id)
    if any(text in ANSWER_ENDS for text in by_id.values()):
        return [token_id for token_id in ids if by_id.get(token_id) != MESSAGE_END]

    return list(ids)


def _token_id(value: object, key: str, location: str) -> int:
    if type(value) is not int:
        raise ModelLoadError(f"{location}: {key}={short_repr(value)}: expected a token id")

    return value
