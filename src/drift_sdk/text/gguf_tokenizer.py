"""Builds the tokenizer that the metadata of a GGUF file describes.

Keys and their meaning: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. For what a file does not
specify, this module follows llama.cpp, for which the files are written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from drift_sdk.errors import ModelLoadError, short_repr
from drift_sdk.text.gguf_splits import ADDS_BOS, COMPOSES, IGNORES_MERGES, SPLITS
from drift_sdk.text.tokenizer_limits import check_tokens

__all__ = ["adds_bos", "build_gguf_tokenizer", "special_token"]

METASPACE = "\u2581"
TOKENS = "tokenizer.ggml.tokens"
TYPE_NAMES: dict[type, str] = {str: "a string", int: "an integer", float: "a number"}


class TokenType(IntEnum):
    """Values of tokenizer.ggml.token_type."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def build_gguf_tokenizer(metadata: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """The tokenizer for a file's metadata, given as plain Python values by key.

    Raises `ModelLoadError` that names the key with a missing or wrong value.
    """
    model = metadata.get("tokenizer.ggml.model")
    if model not in ("gpt2", "llama"):
        raise ModelLoadError(f"tokenizer.ggml.model={short_repr(model)}: expected 'gpt2' or 'llama'")

    tokens, types = _read_tokens(metadata, model)
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        repeated = next(token for token_id, token in enumerate(tokens) if vocab[token] != token_id)
        raise ModelLoadError(f"{TOKENS}: {short_repr(repeated)} occurs twice, expected distinct tokens")

    build = _byte_level if model == "gpt2" else _sentencepiece
    try:
        raw = build(metadata, vocab, types)
    except ModelLoadError:
        raise
    except Exception as error:
        raise ModelLoadError(f"tokenizer.ggml: vocabulary and merges do not fit together: {error}") from error

    _add_tokens(raw, tokens, types)
    return raw


def _read_tokens(metadata: Mapping[str, Any], model: str) -> tuple[list[str], Sequence[int]]:
    """The vocabulary and the `TokenType` of each token."""
    tokens: list[str] = _list(metadata, TOKENS, str)
    try:
        check_tokens(tokens)
    except ValueError as error:
        raise ModelLoadError(f"{TOKENS}: {error}") from error

    types: Sequence[int] = [TokenType.NORMAL] * len(tokens)
    if "tokenizer.ggml.token_type" in metadata:
        types = _list(metadata, "tokenizer.ggml.token_type", int, length=len(tokens))

    if model == "llama":
        # User-defined tokens are matched in the original text, which has plain spaces.
        tokens = [
            token.replace(METASPACE, " ") if token_type == TokenType.USER_DEFINED else token
            for token, token_type in zip(tokens, types, strict=True)
        ]

    return tokens, types


def _add_tokens(raw: tokenizers.Tokenizer, tokens: Sequence[str], types: Sequence[int]) -> None:
    """Mark special and user-defined tokens, which are matched in a text before it is split."""
    added = list(zip(tokens, types, strict=True))
    is_special = (TokenType.UNKNOWN, TokenType.CONTROL)
    raw.add_special_tokens([AddedToken(token, normalized=False) for token, t in added if t in is_special])
    raw.add_tokens([AddedToken(token, normalized=False) for token, t in added if t == TokenType.USER_DEFINED])


def special_token(metadata: Mapping[str, Any], name: str) -> str | None:
    """The text of the token of that name ("bos", "eos" or "unknown"); None if the file has none."""
    key = f"tokenizer.ggml.{name}_token_id"
    token_id = metadata.get(key)
    if token_id is None:
        return None

    tokens: list[str] = _list(metadata, TOKENS, str)
    if type(token_id) is not int or not 0 <= token_id < len(tokens):
        raise ModelLoadError(f"{key}={short_repr(token_id)}: expected a token id below {len(tokens)}")

    return tokens[token_id]


def adds_bos(metadata: Mapping[str, Any]) -> bool:
    """Whether an encoded text begins with the beginning-of-sequence token."""
    model, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    is_usual = model == "llama" or (isinstance(pre, str) and pre in ADDS_BOS)
    return _flag(metadata, "tokenizer.ggml.add_bos_token", default=is_usual)


def _byte_level(
    metadata: Mapping[str, Any], vocab: dict[str, int], types: Sequence[int]
) -> tokenizers.Tokenizer:
    """A tokenizer with a "gpt2" vocabulary: byte-level BPE with the file's merges."""
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if not isinstance(pre, str):
        raise ModelLoadError(f"tokenizer.ggml.pre={short_repr(pre)}: expected a string")

    splits = SPLITS.get(pre)
    if splits is None:
        known = ", ".join(sorted(SPLITS))
        raise ModelLoadError(f"tokenizer.ggml.pre={short_repr(pre)}: expected one of {known}")

    merges = _read_merges(metadata, vocab)
    raw = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre in IGNORES_MERGES))
    steps = [pre_tokenizers.Split(Regex(split), behavior="isolated") for split in splits]
    raw.pre_tokenizer = pre_tokenizers.Sequence(
        [*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    raw.decoder = decoders.ByteLevel()
    if pre in COMPOSES:
        raw.normalizer = normalizers.NFC()

    return raw


def _read_merges(metadata: Mapping[str, Any], vocab: dict[str, int]) -> list[tuple[str, str]]:
    """Pairs of tokens that form a third. The tokenizers library panics on other pairs."""
    key = "tokenizer.ggml.merges"
    merges = []
    for merge in _list(metadata, key, str):
        left, space, right = merge.partition(" ")
        if not (space and left in vocab and right in vocab and left + right in vocab):
            raise ModelLoadError(f"{key}: {short_repr(merge)}, expected two tokens that form a third")

        merges.append((left, right))

    return merges


def _sentencepiece(
    metadata: Mapping[str, Any], vocab: dict[str, int], types: Sequence[int]
) -> tokenizers.Tokenizer:
    """A tokenizer with a "llama" vocabulary: sentencepiece BPE, whose merges follow from the scores."""
    scores = _list(metadata, "tokenizer.ggml.scores", float, length=len(vocab))
    raw = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=_merges_by_score(vocab, scores, types),
            unk_token=special_token(metadata, "unknown"),
            fuse_unk=True,
            byte_fallback=TokenType.BYTE in types,
        )
    )
    has_space_prefix = _flag(metadata, "tokenizer.ggml.add_space_prefix", default=True)
    replace = normalizers.Replace(" ", METASPACE)
    raw.normalizer = (
        normalizers.Sequence([normalizers.Prepend(METASPACE), replace]) if has_space_prefix else replace
    )
    steps = [decoders.Replace(METASPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if has_space_prefix:
        steps.append(decoders.Strip(" ", 1, 0))

    raw.decoder = decoders.Sequence(steps)
    return raw


def _merges_by_score(
    vocab: dict[str, int], scores: list[float], types: Sequence[int]
) -> list[tuple[str, str]]:
    """Ranked merges that are equivalent to sentencepiece's scores.

    Sentencepiece joins the two neighbours whose joined token has the best score. The equivalent list has each
    way to cut a token into two others, in the order of the tokens' scores, best first; for one token, the cut
    with the longest left part comes first.
    """
    mergeable = {
        token for token, t in zip(vocab, types, strict=True) if t in (TokenType.NORMAL, TokenType.UNUSED)
    }
    merges = []
    for token in sorted(mergeable, key=lambda token: (-scores[vocab[token]], vocab[token])):
        for cut in range(len(token) - 1, 0, -1):
            left, right = token[:cut], token[cut:]
            if left in mergeable and right in mergeable:
                merges.append((left, right))

    return merges


def _flag(metadata: Mapping[str, Any], key: str, *, default: bool) -> bool:
    value = metadata.get(key, default)
    if not isinstance(value, bool):
        raise ModelLoadError(f"{key}={short_repr(value)}: expected true or false")

    return value


def _list(metadata: Mapping[str, Any], key: str, kind: type, *, length: int | None = None) -> list[Any]:
    """The list at a key.

    Raises ModelLoadError unless it has `length` values of type `kind`, none of them NaN.
    """
    values = metadata.get(key)
    if not isinstance(values, list):
        raise ModelLoadError(f"{key}: found {type(values).__name__}, expected a list")

    if length is not None and len(values) != length:
        raise ModelLoadError(f"{key}: found {len(values)} entries, expected {length}, one per token")

    if not all(type(value) is kind and value == value for value in values):
        found = next(value for value in values if type(value) is not kind or value != value)
        raise ModelLoadError(f"{key}: found {short_repr(found)}, expected each to be {TYPE_NAMES[kind]}")

    return values
