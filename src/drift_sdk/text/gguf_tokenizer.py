"""The tokenizer that the metadata of a GGUF file describes, and the tokens that end an answer.

Keys and their meaning: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. For what a file does not
specify, this module follows llama.cpp, for which the files are written.

Byte-level BPE vocabularies split a text in ways that the files name. A way is a sequence of regular
expressions. Each cuts the parts that are left by the expressions before it into its matches and the text
between them. The names, and the ways that they stand for, are llama.cpp's; where it adapts an expression to
its own engine, this module has the model's own. Names whose expressions take time that grows with the square
of a text's length, such as "superbpe", are left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from drift_sdk.errors import ModelLoadError, short_repr
from drift_sdk.text.tokenizer_limits import check_tokens

DIGIT, UP_TO_3_DIGITS = r"\p{N}", r"\p{N}{1,3}"
ENGLISH = "'s|'t|'re|'ve|'m|'ll|'d"
SUFFIXES = f"(?i:{ENGLISH})"
NEWLINES = r"\s*[\r\n]+"
SPACES = r"\s+(?!\S)|\s+"
WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
SIGNS = r" ?[^\s\p{L}\p{N}]+"
HAN_AND_KANA = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
EAST_ASIAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"

GPT2 = rf"{ENGLISH}| ?\p{{L}}+| ?\p{{N}}+|{SIGNS}|{SPACES}"


def _cl100k(digits: str, *, suffixes: str = f"{SUFFIXES}|", signs: str = rf"{SIGNS}[\r\n]*") -> str:
    """The split of GPT-4, with runs of digits as given."""
    return rf"{suffixes}{WORD}|{digits}|{signs}|{NEWLINES}|{SPACES}"


LLAMA3, QWEN2 = _cl100k(UP_TO_3_DIGITS), _cl100k(DIGIT)
QWEN35 = (
    rf"{SUFFIXES}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|{DIGIT}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{NEWLINES}|{SPACES}"
)
BAILING = rf"'(?i:[sdmt]|ll|ve|re)|{WORD}|{DIGIT}|{SIGNS}[\r\n]*|\s*[\r\n]|{SPACES}"
EXAONE_MOE = (
    rf"{SUFFIXES}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|{DIGIT}"
    rf"|{SIGNS}[\r\n/]?|\s*[\r\n]|{SPACES}"
)
FEWER_SPACES = "|".join(rf"\s{{{n}}}(?!\S)" for n in (512, 256, 128, 64, 32, 16, 8, 4, "1,2")) + r"|\s{1}"
JAIS2 = rf"{SUFFIXES}|{WORD}|{UP_TO_3_DIGITS}|{SIGNS}[\r\n]*|{NEWLINES}|{FEWER_SPACES}"


def _o200k(
    digits: str, *, suffixes: str = f"{SUFFIXES}?", but: str = "", signs: str = rf"{SIGNS}[\r\n/]*"
) -> str:
    """The split of GPT-4o, which cuts words before capitals. but: excluded from the characters of words."""
    upper, lower = (rf"[\p{{{case}}}\p{{Lm}}\p{{Lo}}\p{{M}}{but}]" for case in (r"Lu}\p{Lt", "Ll"))
    words = (f"{upper}*{lower}+", f"{upper}+{lower}*")
    cut = "|".join(rf"[^\r\n\p{{L}}\p{{N}}]?{word}{suffixes}" for word in words)
    return f"{cut}|{digits}|{signs}|{NEWLINES}|{SPACES}"


GPT4O = _o200k(UP_TO_3_DIGITS)
TEKKEN = _o200k(DIGIT, suffixes="")
KIMI = r"\p{Han}+|" + _o200k(UP_TO_3_DIGITS, but=r"&&[^\p{Han}]", signs=rf"{SIGNS}[\r\n]*")

ASCII_SIGN = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"
DEEPSEEK3_WORDS = rf"{ASCII_SIGN}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+"
DEEPSEEK3 = (UP_TO_3_DIGITS, HAN_AND_KANA, rf"{DEEPSEEK3_WORDS}[\r\n]*|{NEWLINES}|{SPACES}")
# Letters of scripts with two cases, as DeepSeek lists them.
CASED = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af"
    "\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5"
    "\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba"
    "\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45"
    "\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe"
    "\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102"
    "\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3"
    "\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06"
    "\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df"
    "\U0001e900-\U0001e943"
)
DEEPSEEK_SIGNS = "[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]"
DEEPSEEK_LLM = (r"[\r\n]", rf"\s?[{CASED}]+", rf"\s?{DEEPSEEK_SIGNS}+", r"\s+$", EAST_ASIAN, r"\p{N}+")
DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", EAST_ASIAN, DIGIT)
BLOOM = "[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
CHAMELEON = (
    "<sentinel:[0-9]+>",
    "IMGIMG[A-I]{1,4}Z",
    "[\t\n]|    |  ",
    DIGIT,
    r"[\p{P}!-/:-@\[-`{-~]",
    GPT2,
)

LLAMA3_NAMES = ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "lfm2", "midm-2.0", "pixtral")

SPLITS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("default", "gpt-2", "phi-2", "mpt", "olmo", "roberta-bpe", "jais", "trillion"), (GPT2,)),
    **dict.fromkeys(("gigachat", "a.x-4.0", "mellum", "exaone4", "granite-docling"), (GPT2,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), (DIGIT, GPT2)),
    **dict.fromkeys(("minerva-7b", "mellum2"), (DIGIT, GPT2)),
    **dict.fromkeys(LLAMA3_NAMES, (LLAMA3,)),
    **dict.fromkeys(("smaug-bpe", "dbrx", "glm4", "chatglm-bpe"), (LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "kormo", "megrez", "stablelm2", "hunyuan"), (QWEN2,)),
    **dict.fromkeys(("solar-open", "grok-2"), (QWEN2,)),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), (GPT4O,)),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), (BAILING,)),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"), DEEPSEEK3),
    **dict.fromkeys(("bloom", "poro-chat", "gpt3-finnish"), (f" ?{BLOOM}",)),
    "viking": (f" ?{BLOOM}", DIGIT),
    "qwen35": (QWEN35,),
    "tekken": (TEKKEN,),
    "kimi-k2": (KIMI,),
    "deepseek-llm": DEEPSEEK_LLM,
    "deepseek-coder": DEEPSEEK_CODER,
    "seed-coder": (_cl100k(DIGIT, signs=r" ?[^\s\p{L}\p{N}\r\n]+"),),
    "ufakzeka": (_cl100k(DIGIT, suffixes=""),),
    "laguna": (r"[^\n]+|\n+", QWEN2),
    "minicpm5": (UP_TO_3_DIGITS, _cl100k(r"\p{N}+")),
    "jais-2": (JAIS2,),
    "exaone-moe": (EXAONE_MOE,),
    "falcon": (r"[\p{P}$+<=>^~|`]+", GPT2, "[0-9][0-9][0-9]"),
    "chameleon": CHAMELEON,
}
"""The expressions of each name, first to last."""

IGNORES_MERGES = frozenset({*LLAMA3_NAMES, "tekken", "minicpm5"})
"""Names whose vocabularies take a part that is a token as it is, whether merges lead to it or not."""

ADDS_BOS = frozenset({*LLAMA3_NAMES, "tekken", "chameleon"})
"""Names with which a text begins with the beginning-of-sequence token, unless a file says otherwise."""

COMPOSES = frozenset({"qwen2", "qwen35", "command-r"})
"""Names of models that were trained with composed characters (NFC), which files do not say."""

METASPACE = "\u2581"
GEMMA4 = "gemma4"
MODELS = ("gpt2", "llama", GEMMA4)
"""Kinds of vocabularies. The last has the characters and bytes of "llama", and the merges of "gpt2"."""
TOKENS = "tokenizer.ggml.tokens"
TYPE_NAMES: dict[type, str] = {str: "a string", int: "an integer", float: "a number"}
END_KEYS = tuple(f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
"""Metadata that names the end of text, of turn and of message."""
ENDS_KEY = "tokenizer.ggml.eos_token_ids"
"""Metadata that lists several ends."""
MESSAGE_END = "<|end|>"
ANSWER_ENDS = ("<|return|>", "<|call|>")
"""The ends of gpt-oss, where MESSAGE_END ends a message of several in an answer."""
TOOL_ANSWER = "<|tool_response>"
"""The begin of a tool's answer, with which Gemma 4 ends an answer of calls."""
END_TEXTS = (
    *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", MESSAGE_END, "<end_of_turn>", "<turn|>", "<|endoftext|>"),
    *(TOOL_ANSWER, *ANSWER_ENDS),
)
"""Texts of tokens that end an answer. llama.cpp's converter writes one end of those that a model has."""


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
    if model not in MODELS:
        expected = f"one of {', '.join(map(repr, MODELS))}"
        raise ModelLoadError(f"tokenizer.ggml.model={short_repr(model)}: expected {expected}")

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

    if model != "gpt2":
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
    """Whether an encoded text begins with the beginning-of-sequence token. Gemma 4 has it, whatever the file
    says, as in llama.cpp."""
    model, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if model == GEMMA4:
        return True

    is_usual = model == "llama" or (isinstance(pre, str) and pre in ADDS_BOS)
    return _flag(metadata, "tokenizer.ggml.add_bos_token", default=is_usual)


def gguf_eos_token_ids(metadata: Mapping[str, Any], location: str) -> list[int]:
    """The ids that end an answer: named by metadata, or of tokens with known texts, of any type.

    location: the file, for messages. Raises ModelLoadError naming it for metadata that is no token id.
    """
    ids = {_token_id(metadata[key], key, location): None for key in END_KEYS if key in metadata}
    listed = metadata.get(ENDS_KEY, [])
    for token_id in listed if isinstance(listed, list) else [listed]:
        ids[_token_id(token_id, ENDS_KEY, location)] = None

    tokens = metadata.get(TOKENS)
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
    """A tokenizer with a "llama" vocabulary: sentencepiece BPE, whose merges follow from the scores; or with
    that of Gemma 4, whose merges the file has."""
    is_gemma4 = metadata["tokenizer.ggml.model"] == GEMMA4
    if is_gemma4:
        merges = _read_merges(metadata, vocab)
    else:
        scores = _list(metadata, "tokenizer.ggml.scores", float, length=len(vocab))
        merges = _merges_by_score(vocab, scores, types)
    raw = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=merges,
            unk_token=special_token(metadata, "unknown"),
            fuse_unk=True,
            byte_fallback=TokenType.BYTE in types,
        )
    )
    has_space_prefix = not is_gemma4 and _flag(metadata, "tokenizer.ggml.add_space_prefix", default=True)
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
