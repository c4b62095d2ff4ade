"""Bounds of a tokenizer.json, checked before the tokenizers library reads it.

Normalizers, pre-tokenizers, decoders and post-processors come with downloaded models, and each of them may
make text longer. If several multiply its length, the result exceeds the memory, and the library aborts the
process. It normalizes added tokens while it loads a file, so the check comes first. Sizes for which it aborts
are checked too: the lengths of tokens, and tables of normalizers. A `ValueError` names the part that exceeds
its bound, or whose growth is not known.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import msgspec

from drift_sdk.errors import short_repr

MAX_GROWTH = 100
"""Most characters that the parts may make of one character; for a post-processor, tokens of one token."""

MAX_ADDED_TOKENS = 1024
"""Most tokens that a post-processor may add to a text."""

MAX_AFFIX_CHARS = 64
"""Most characters of the prefix and suffix that a BPE model adds to pieces of a text."""

MAX_TOKEN_CHARS = 2048
"""Most characters of a token. The library frees the trie of a Unigram vocabulary by a recursion that takes
about 60 bytes of the thread's stack for each byte of the longest token: at most 500 KB. The longest tokens of
usual vocabularies are runs of some hundred spaces."""

MAX_VOCAB_CHARS = 2**24
"""Most characters of all tokens, several times what the largest vocabularies have. In a trie each takes about
350 bytes."""

# The largest number of characters that one character becomes: 4 by canonical decomposition, 18 by
# compatibility decomposition (U+FDFA), 2 in lower case, 4 as bytes; a pre-tokenizer may add a space.
NORMALIZERS = {
    "BertNormalizer": 8,
    "NFC": 3,
    "NFD": 4,
    "NFKC": 18,
    "NFKD": 18,
    "Lowercase": 2,
    "ByteLevel": 4,
}
NORMALIZERS |= dict.fromkeys(["Strip", "StripAccents", "Nmt"], 1)
PRE_TOKENIZERS = {"ByteLevel": 5, "Metaspace": 2} | dict.fromkeys(
    [
        "BertPreTokenizer",
        "CharDelimiterSplit",
        "Delimiter",
        "Digits",
        "FixedLength",
        "Punctuation",
        "Split",
        "UnicodeScripts",
        "Whitespace",
        "WhitespaceSplit",
    ],
    1,
)

Spec = Mapping[str, Any]


class Model(msgspec.Struct):
    """The parts of a tokenizer.json's model that have bounds. Others are not read."""

    vocab: Any = None
    continuing_subword_prefix: Any = None
    end_of_word_suffix: Any = None


class File(msgspec.Struct, omit_defaults=True):
    """The parts of a tokenizer.json that this package uses."""

    model: msgspec.Raw
    version: Any = None
    added_tokens: Any = None
    normalizer: Any = None
    pre_tokenizer: Any = None
    post_processor: Any = None
    decoder: Any = None


def checked_file(data: bytes) -> bytes:
    """A tokenizer.json with the parts that this package uses, after checks. Raises ValueError.

    Each part occurs once: the library builds all parts of a name that occurs twice, and keeps the last.
    """
    file = msgspec.json.decode(data, type=File)
    model = msgspec.json.decode(file.model, type=Model)
    check_tokens([*_tokens(model.vocab), *_tokens(file.added_tokens)])
    for affix in (model.continuing_subword_prefix, model.end_of_word_suffix):
        if isinstance(affix, str) and len(affix) > MAX_AFFIX_CHARS:
            found = f"a prefix or suffix of {len(affix)} characters"
            raise ValueError(f"model: {found}, expected at most {MAX_AFFIX_CHARS}")

    of_text = growth(file.normalizer, "normalizers", of_normalizer)
    _check_growth("normalizer", of_text)
    of_pieces = growth(file.pre_tokenizer, "pretokenizers", of_pre_tokenizer)
    _check_growth("normalizer and pre_tokenizer", of_text * of_pieces)
    _check_growth("decoder", growth(file.decoder, "decoders", of_decoder))
    of_tokens, num_added = _growth_of_tokens(file.post_processor)
    _check_growth("post_processor", of_tokens)
    if num_added > MAX_ADDED_TOKENS:
        raise ValueError(f"post_processor: adds {num_added} tokens, expected at most {MAX_ADDED_TOKENS}")

    return msgspec.json.encode(file)


def check_tokens(tokens: Collection[str]) -> None:
    """Check the lengths of tokens. Raises ValueError."""
    longest, total = max(map(len, tokens), default=0), sum(map(len, tokens))
    if longest > MAX_TOKEN_CHARS:
        raise ValueError(f"a token of {longest} characters, expected at most {MAX_TOKEN_CHARS}")

    if total > MAX_VOCAB_CHARS:
        raise ValueError(f"tokens of {total} characters together, expected at most {MAX_VOCAB_CHARS}")


def _tokens(entries: Any) -> Iterator[str]:
    """The tokens of a vocabulary or a list of added tokens. The library refuses entries of other forms."""
    for entry in entries if isinstance(entries, list | dict) else ():
        match entry:
            case str(token) | [str(token), *_] | {"content": str(token)}:
                yield token


def _check_growth(part: str, factor: int) -> None:
    if factor > MAX_GROWTH:
        found = f"up to {factor}" if factor < 10**6 else "more than a million"
        raise ValueError(f"{part}: makes {found} of one, expected at most {MAX_GROWTH}")


def growth(spec: Any, parts: str, of_step: Callable[[Spec], int | None]) -> int:
    """The growth of a component: the product of the growth of its steps.

    parts:    key of the steps in a sequence.
    of_step:  the growth of a step; None if it is not known.
    """
    if spec is None:
        return 1

    if isinstance(spec, Mapping) and spec.get("type") == "Sequence" and isinstance(spec.get(parts), list):
        return math.prod(growth(part, parts, of_step) for part in spec[parts])

    factor = of_step(spec) if isinstance(spec, Mapping) else None
    if factor is None:
        raise ValueError(f"{short_repr(spec)}: it is not known how much longer this makes a text")

    return factor


def of_normalizer(step: Spec) -> int | None:
    """The growth of a normalizer; None if it is not known."""
    match step:
        case {"type": "Prepend", "prepend": str(text)}:
            return 1 + len(text)  # added to each piece between added tokens
        case {"type": "Precompiled", "precompiled_charsmap": str(charsmap)}:
            return _longest_replacement(charsmap)
        case {"type": "Replace"}:
            return _of_replacement(step)
        case {"type": str(kind)}:
            return NORMALIZERS.get(kind)

    return None


def of_pre_tokenizer(step: Spec) -> int | None:
    """The growth of a pre-tokenizer; None if it is not known."""
    kind = step.get("type")
    return PRE_TOKENIZERS.get(kind) if isinstance(kind, str) else None


def of_decoder(step: Spec) -> int | None:
    """The growth of a decoder; None if it is not known."""
    # Others do not make text longer; decoders that this package does not support are rejected later.
    return _of_replacement(step) if step.get("type") == "Replace" else 1


def _of_replacement(step: Spec) -> int | None:
    """The growth of a step that replaces text; None if it is not known."""
    match step:
        case {"pattern": {"String": str(old)}, "content": str(new)} if old:
            return max(1, math.ceil(len(new) / len(old)))
        case {"pattern": {"String": str()} | {"Regex": str()}, "content": str(new)}:
            return 1 + len(new)  # it may match the empty text at each character

    return None


def _longest_replacement(charsmap: str) -> int:
    """Characters of the longest replacement in a charsmap. Raises ValueError for one that is not whole.

    A charsmap consists of the size of a trie in bytes, the trie of four bytes an entry, and replacements that
    end with a zero byte. The library reserves memory for the trie before it reads it.
    """
    data = base64.b64decode(charsmap, validate=True)
    num_bytes, rest = int.from_bytes(data[:4], "little"), data[4:]
    if len(data) < 4 or num_bytes % 4 or num_bytes > len(rest):
        raise ValueError(
            f"precompiled_charsmap: a table of {num_bytes} bytes among {len(data)}, expected a multiple of 4 "
            f"up to {len(data) - 4}"
        )

    replacements = rest[num_bytes:].split(b"\0")
    return max(1, *(len(each.decode(errors="replace")) for each in replacements))


def _growth_of_tokens(spec: Any) -> tuple[int, int]:
    """The number of times that a text's tokens occur in a post-processor's result, and of tokens it adds."""
    match spec:
        case None | {"type": "ByteLevel"}:
            return 1, 0
        case {"type": "BertProcessing" | "RobertaProcessing"}:
            return 1, 2
        case {"type": "Sequence", "processors": list(steps)}:
            factor, num_added = 1, 0
            for step in steps:
                of_step, added_by_step = _growth_of_tokens(step)
                factor, num_added = factor * of_step, num_added * of_step + added_by_step
            return factor, num_added
        case {"type": "TemplateProcessing", "single": list(pieces), "special_tokens": Mapping() as tokens}:
            factor, num_added = 0, 0
            for piece in pieces:
                match piece:
                    case {"Sequence": _}:
                        factor += 1
                    case {"SpecialToken": {"id": str(name)}}:
                        token = tokens.get(name)
                        num_added += len(token["ids"]) if token is not None else 0
                    case _:
                        raise ValueError(f"post_processor: {short_repr(piece)} is not a known piece")
            return factor, num_added

    raise ValueError(f"post_processor: {short_repr(spec)} is not known")
