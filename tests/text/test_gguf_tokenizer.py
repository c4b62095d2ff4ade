"""Tokenizers built from GGUF metadata: ids and text, and errors in the metadata."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drift_sdk.errors import ModelLoadError
from drift_sdk.text.gguf_tokenizer import gguf_eos_token_ids
from drift_sdk.text.tokenizer import Tokenizer

TEXTS = [
    "The quick brown fox doesn't mind",
    "def add(left, right):\n    return left + right  # 3.14\n\n\tpass",
    "👩‍👩‍👧 🎉🇩🇪 中文字符 日本語 한국어 e\u0301",
    "   runs of    spaces \t\n\n  ",
    "<|im_start|>user\n<think><a tool><思><|im_end|>",
    "",
    " ",
]

GEMMA3 = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]
GEMMA4 = ["<pad>", "<eos>", "<bos>", "<|turn>", "<turn|>", "<|tool_response>", "<tool_response|>"]
PHI3 = ["<unk>", "<s>", "</s>", "<|endoftext|>", "<|assistant|>", "<|end|>"]
GPT_OSS = ["a", "b", "<|endoftext|>", "<|return|>", "<|call|>", "<|end|>"]
LLAMA3 = ["a", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>"]
QWEN = ["a", "<|im_end|>", "<|im_start|>", "<|endoftext|>"]


def words(tokenizer: Tokenizer, text: str) -> list[str]:
    """The parts into which a text is split before merging."""
    return [text[start:end] for _, (start, end) in tokenizer._raw.pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize("text", TEXTS)
def test_byte_level_equals_the_tokenizer_json(
    tmp_path: Path, byte_level_json: str, byte_level_metadata: dict[str, Any], text: str
) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(byte_level_json, encoding="utf-8")
    original = Tokenizer.from_file(path)
    tokenizer = Tokenizer.from_gguf(byte_level_metadata)
    ids = tokenizer.encode(text)
    assert ids == original.encode(text)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.decode(ids) == original.decode(ids)
    assert tokenizer.vocab_size == original.vocab_size
    assert tokenizer.special_token_ids == original.special_token_ids


def test_fields_are_read_from_the_metadata(byte_level_metadata: dict[str, Any]) -> None:
    tokenizer = Tokenizer.from_gguf(byte_level_metadata)
    assert tokenizer.bos_token == "<|im_start|>"
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.eos_token_id == 2
    assert tokenizer.chat_template == "{{ messages[0].content }}"


# The parts of "don't pay 1234½!?\n\n   OK" and of "aB/नमस्ते 中かな한`x`\n", separated by "|".
GPT2_PARTS = ("don|'t| pay| 1234½|!?|\n\n  | OK", "aB|/|नमस|्|त|े| 中かな한|`|x|`|\n")
DIGIT_PARTS = ("don|'t| pay| |1|2|3|4|½|!?|\n\n  | OK", GPT2_PARTS[1])
LLAMA3_PARTS = ("don|'t| pay| |123|4½|!?\n\n|  | OK", "aB|/नमस|्त|े| 中かな한|`x|`\n")
QWEN2_PARTS = ("don|'t| pay| |1|2|3|4|½|!?\n\n|  | OK", LLAMA3_PARTS[1])
GPT4O_PARTS = ("don't| pay| |123|4½|!?\n\n|  | OK", "a|B|/नमस्ते| 中かな한|`x|`\n")
BLOOM_PARTS = ("don't| pay| 1234½|!?\n\n  | OK", "aB/नमस्ते| 中かな한`x`|\n")
PARTS = {
    **dict.fromkeys(["gpt-2", "default", "olmo", "jais", "trillion", "exaone4"], GPT2_PARTS),
    **dict.fromkeys(["smollm", "starcoder", "refact", "command-r", "exaone", "minerva-7b"], DIGIT_PARTS),
    **dict.fromkeys(["llama-bpe", "pixtral", "smaug-bpe", "dbrx", "chatglm-bpe", "glm4"], LLAMA3_PARTS),
    **dict.fromkeys(["minicpm5", "jais-2"], LLAMA3_PARTS),
    **dict.fromkeys(["qwen2", "megrez", "stablelm2", "hunyuan", "grok-2", "bailingmoe"], QWEN2_PARTS),
    **dict.fromkeys(["gpt-4o", "llama4"], GPT4O_PARTS),
    **dict.fromkeys(["bloom", "poro-chat", "gpt3-finnish"], BLOOM_PARTS),
    "viking": ("don't| pay| |1|2|3|4|½|!?\n\n  | OK", BLOOM_PARTS[1]),
    "qwen35": (QWEN2_PARTS[0], "aB|/नमस्ते| 中かな한|`x|`\n"),
    "tekken": ("don|'t| pay| |1|2|3|4|½|!?\n\n|  | OK", GPT4O_PARTS[1]),
    "kimi-k2": (GPT4O_PARTS[0], "a|B|/नमस्ते| |中|かな한|`x|`\n"),
    **dict.fromkeys(["deepseek-v3", "hunyuan-dense"], (LLAMA3_PARTS[0], "aB|/|नमस्ते| |中かな|한|`x|`\n")),
    "deepseek-llm": ("don|'|t| pay| |1234½|!?|\n|\n|  | OK", "aB|/|नमस्ते| |中かな한|`|x|`|\n"),
    "deepseek-coder": ("don|'|t| pay| |1|2|3|4|½|!?|\n|\n|  | OK", "aB|/|नमस|्|त|े| |中かな한|`|x|`|\n"),
    "seed-coder": ("don|'t| pay| |1|2|3|4|½|!?|\n\n|  | OK", "aB|/नमस|्त|े| 中かな한|`x|`|\n"),
    "ufakzeka": QWEN2_PARTS,
    "laguna": ("don|'t| pay| |1|2|3|4|½|!?|\n\n|  | OK", "aB|/नमस|्त|े| 中かな한|`x|`|\n"),
    "exaone-moe": ("don|'t| pay| |1|2|3|4|½|!?\n|\n|  | OK", "aB|/नमस्ते 中かな한|`x|`\n"),
    "falcon": ("don|'|t| pay| |123|4½|!?|\n\n  | OK", GPT2_PARTS[1]),
    "chameleon": ("don|'|t| pay| |1|2|3|4|½|!|?|\n|\n|  | OK", "aB|/|नमस|्|त|े| 中かな한|`|x|`|\n"),
}


@pytest.mark.parametrize("pre", PARTS)
def test_pre_tokenizer_splits_text_as_named(byte_level_metadata: dict[str, Any], pre: str) -> None:
    tokenizer = Tokenizer.from_gguf(byte_level_metadata | {"tokenizer.ggml.pre": pre})
    for text, expected in zip(
        ("don't pay 1234½!?\n\n   OK", "aB/नमस्ते 中かな한`x`\n"), PARTS[pre], strict=True
    ):
        assert words(tokenizer, text) == expected.split("|")


def test_gpt_4o_splits_words_at_capitals(byte_level_metadata: dict[str, Any]) -> None:
    tokenizer = Tokenizer.from_gguf(byte_level_metadata | {"tokenizer.ggml.pre": "gpt-4o"})
    expected = ["camel", "Case", " HTTPServer", " a", "/b", "//\n", " c"]
    assert words(tokenizer, "camelCase HTTPServer a/b//\n c") == expected


def test_file_without_pre_tokenizer_splits_as_gpt2(byte_level_metadata: dict[str, Any]) -> None:
    metadata = {key: value for key, value in byte_level_metadata.items() if not key.endswith(".pre")}
    assert words(Tokenizer.from_gguf(metadata), "don't 12") == ["don", "'t", " 12"]


@pytest.mark.parametrize(
    ("pre", "num_tokens"), [("gpt-2", 2), ("llama-bpe", 1), ("pixtral", 1), ("tekken", 1), ("qwen2", 2)]
)
def test_some_use_whole_words_without_a_merge(
    byte_level_metadata: dict[str, Any], pre: str, num_tokens: int
) -> None:
    tokens = [*byte_level_metadata["tokenizer.ggml.tokens"], "Zq"]
    types = [*byte_level_metadata["tokenizer.ggml.token_type"], 1]
    metadata = byte_level_metadata | {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
    tokenizer = Tokenizer.from_gguf(metadata | {"tokenizer.ggml.pre": pre})
    assert len(tokenizer.encode("Zq", add_special_tokens=False)) == num_tokens


@pytest.mark.parametrize("pre", ["qwen2", "qwen35", "command-r"])
def test_some_compose_characters(byte_level_metadata: dict[str, Any], pre: str) -> None:
    tokenizer = Tokenizer.from_gguf(byte_level_metadata | {"tokenizer.ggml.pre": pre})
    assert tokenizer.encode("e\u0301") == tokenizer.encode("\u00e9")


@pytest.mark.parametrize(
    ("pre", "add_bos_token", "is_added"),
    [
        ("gpt-2", None, False),
        ("gpt-2", True, True),
        ("llama-bpe", None, True),
        ("llama-bpe", False, False),
        ("tekken", None, True),
        ("deepseek-llm", None, False),
    ],
)
def test_byte_level_bos_follows_metadata_and_pre_tokenizer(
    byte_level_metadata: dict[str, Any], pre: str, add_bos_token: bool | None, is_added: bool
) -> None:
    metadata = byte_level_metadata | {"tokenizer.ggml.pre": pre}
    if add_bos_token is not None:
        metadata["tokenizer.ggml.add_bos_token"] = add_bos_token

    tokenizer = Tokenizer.from_gguf(metadata)
    plain = tokenizer.encode("The", add_special_tokens=False)
    assert tokenizer.encode("The") == ([1] if is_added else []) + plain


def join_best_neighbours(text: str, scores: dict[str, float]) -> list[str]:
    """Sentencepiece's rule: join the two neighbours whose joined token has the best score, leftmost first."""
    symbols = list(text)
    while True:
        joined = [left + right for left, right in zip(symbols, symbols[1:], strict=False)]
        candidates = [(scores[token], -index) for index, token in enumerate(joined) if token in scores]
        if not candidates:
            return symbols

        index = -max(candidates)[1]
        symbols[index : index + 2] = [joined[index]]


@given(
    text=st.lists(
        st.sampled_from(["the", "quick", "doesn't", " ", "and", "re", "turn", "left", "e"]), max_size=12
    )
)
def test_sentencepiece_joins_by_score(sentencepiece_metadata: dict[str, Any], text: list[str]) -> None:
    tokenizer = Tokenizer.from_gguf(sentencepiece_metadata)
    tokens = sentencepiece_metadata["tokenizer.ggml.tokens"]
    table = zip(
        tokens,
        sentencepiece_metadata["tokenizer.ggml.scores"],
        sentencepiece_metadata["tokenizer.ggml.token_type"],
        strict=True,
    )
    scores = {token: score for token, score, token_type in table if token_type == 1}
    # Runs of four spaces are a user-defined token, matched before anything else.
    joined = "".join(text).replace("    ", "")
    symbols = join_best_neighbours("▁" + joined.replace(" ", "▁"), scores) if joined else []
    ids = tokenizer.encode(joined, add_special_tokens=False)
    assert [tokens[token_id] for token_id in ids] == symbols
    assert tokenizer.decode(ids) == joined


def test_sentencepiece_bytes_specials_and_spaces(sentencepiece_metadata: dict[str, Any]) -> None:
    tokenizer = Tokenizer.from_gguf(sentencepiece_metadata)
    assert tokenizer.encode("") == [1]
    assert tokenizer.special_token_ids == {0, 1, 2}
    space = tokenizer.token_to_id("▁")
    party = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in "🎉".encode()]
    assert tokenizer.encode("🎉") == [1, space, *party]
    assert tokenizer.encode("    ", add_special_tokens=False) == [tokenizer.token_to_id("    ")]
    assert tokenizer.encode("</s>", add_special_tokens=False) == [2]
    for text in ("the 🎉 fox", "  two spaces", "中文"):
        assert tokenizer.decode(tokenizer.encode(text)) == text

    # The space prefix is added again after each added token.
    assert tokenizer.decode(tokenizer.encode("a<extra>b")) == "a<extra> b"


def test_sentencepiece_without_a_space_prefix(sentencepiece_metadata: dict[str, Any]) -> None:
    tokenizer = Tokenizer.from_gguf(sentencepiece_metadata | {"tokenizer.ggml.add_space_prefix": False})
    assert tokenizer.encode("🎉", add_special_tokens=False)[0] == tokenizer.token_to_id("<0xF0>")
    assert tokenizer.decode(tokenizer.encode(" the")) == " the"


def test_sentencepiece_bos_can_be_disabled(sentencepiece_metadata: dict[str, Any]) -> None:
    tokenizer = Tokenizer.from_gguf(sentencepiece_metadata | {"tokenizer.ggml.add_bos_token": False})
    assert tokenizer.encode("") == []


@pytest.mark.parametrize("text", [*TEXTS, "<bos>the<extra> dog", "\n\n\n", "the end\n\nof 中文"])
def test_gemma_4_equals_the_tokenizer_json(
    tmp_path: Path, gemma4_json: str, gemma4_metadata: dict[str, Any], text: str
) -> None:
    """With the beginning-of-sequence token, whatever the file says."""
    path = tmp_path / "tokenizer.json"
    path.write_text(gemma4_json, encoding="utf-8")
    original, tokenizer = Tokenizer.from_file(path), Tokenizer.from_gguf(gemma4_metadata)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids == original.encode(text, add_special_tokens=False)
    assert tokenizer.encode(text) == [1, *ids]
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.special_token_ids == original.special_token_ids
    assert tokenizer.has_token_bytes and tokenizer.token_bytes == original.token_bytes
    assert len(ids) < max(2, len(text.encode()))


def test_gemma_4_without_merges_is_rejected(gemma4_metadata: dict[str, Any]) -> None:
    metadata = {key: value for key, value in gemma4_metadata.items() if not key.endswith("merges")}
    with pytest.raises(ModelLoadError, match="tokenizer.ggml.merges: found NoneType, expected a list"):
        Tokenizer.from_gguf(metadata)


@pytest.mark.parametrize(
    ("key", "value", "found"),
    [
        ("tokenizer.ggml.model", "bert", "tokenizer.ggml.model='bert'"),
        ("tokenizer.ggml.model", None, "tokenizer.ggml.model=None"),
        ("tokenizer.ggml.pre", "martian", "tokenizer.ggml.pre='martian'"),
        ("tokenizer.ggml.tokens", None, "tokenizer.ggml.tokens"),
        (
            "tokenizer.ggml.tokens",
            ["a", "b", "a"],
            "tokenizer.ggml.token_type: found 424 entries, expected 3",
        ),
        ("tokenizer.ggml.merges", None, "tokenizer.ggml.merges"),
        ("tokenizer.ggml.merges", ["zz yy"], "merges: 'zz yy', expected two tokens that form a third"),
        ("tokenizer.ggml.merges", ["a"], "merges: 'a', expected two tokens"),
        (
            "tokenizer.ggml.merges",
            ["! z"],
            "merges: '! z', expected two tokens",
        ),  # both are in the vocabulary, "!z" is not
        ("tokenizer.ggml.merges", [7], "merges: found 7, expected each to be a string"),
        ("tokenizer.ggml.merges", "a b", "merges: found str"),
        ("tokenizer.ggml.model", ["gpt2"], r"tokenizer.ggml.model=\['gpt2'\]"),
        ("tokenizer.ggml.pre", ["gpt-2"], r"tokenizer.ggml.pre=\['gpt-2'\]"),
        ("tokenizer.ggml.tokens", 7, "tokenizer.ggml.tokens: found int"),
        ("tokenizer.ggml.tokens", ["a" * 2049], "ggml.tokens: a token of 2049 characters, expected"),
        ("tokenizer.ggml.token_type", ["1"] * 424, "token_type: found '1', expected each to be an integer"),
        ("tokenizer.ggml.add_bos_token", "no", "tokenizer.ggml.add_bos_token='no'"),
        ("tokenizer.ggml.eos_token_id", True, "tokenizer.ggml.eos_token_id=True"),
        ("tokenizer.ggml.eos_token_id", [2], r"tokenizer.ggml.eos_token_id=\[2\]"),
        ("tokenizer.chat_template", 7, "tokenizer.chat_template: chat_template=7"),
        ("tokenizer.ggml.token_type", [1], "tokenizer.ggml.token_type: found 1 entries"),
        ("tokenizer.ggml.eos_token_id", 10**6, "tokenizer.ggml.eos_token_id=1000000"),
    ],
)
def test_unusable_metadata_is_rejected_by_key(
    byte_level_metadata: dict[str, Any], key: str, value: object, found: str
) -> None:
    with pytest.raises(ModelLoadError, match=found):
        Tokenizer.from_gguf(byte_level_metadata | {key: value})


def test_repeated_tokens_are_rejected(byte_level_metadata: dict[str, Any]) -> None:
    tokens = list(byte_level_metadata["tokenizer.ggml.tokens"])
    tokens[-1] = tokens[5]
    with pytest.raises(ModelLoadError, match="occurs twice"):
        Tokenizer.from_gguf(byte_level_metadata | {"tokenizer.ggml.tokens": tokens})


def test_sentencepiece_without_scores_is_rejected(sentencepiece_metadata: dict[str, Any]) -> None:
    metadata = {key: value for key, value in sentencepiece_metadata.items() if not key.endswith("scores")}
    with pytest.raises(ModelLoadError, match="tokenizer.ggml.scores"):
        Tokenizer.from_gguf(metadata)


@pytest.mark.parametrize(
    ("key", "value", "found"),
    [
        ("scores", ["x"], "found 'x', expected each to be a number"),
        ("scores", [float("nan")], "found nan, expected each to be a number"),
        ("tokens", [7], "found 7, expected each to be a string"),
        ("tokens", ["a" * 100_000], "a token of 100000 characters, expected at most 2048"),
    ],
)
def test_unusable_sentencepiece_entries_are_rejected_by_key(
    sentencepiece_metadata: dict[str, Any], key: str, value: list[Any], found: str
) -> None:
    """One entry, that of an ordinary token, has a wrong value."""
    key = f"tokenizer.ggml.{key}"
    values = list(sentencepiece_metadata[key])
    values[300:301] = value
    with pytest.raises(ModelLoadError, match=f"{key}: {found}"):
        Tokenizer.from_gguf(sentencepiece_metadata | {key: values})
    with pytest.raises(ModelLoadError, match="add_space_prefix='no'"):
        Tokenizer.from_gguf(sentencepiece_metadata | {"tokenizer.ggml.add_space_prefix": "no"})


def _ends(tokens: list[str], **ids: Any) -> dict[str, Any]:
    return {"tokenizer.ggml.tokens": tokens} | {f"tokenizer.ggml.{name}": ids[name] for name in ids}


@pytest.mark.parametrize(
    "tokens, named, expected",
    [
        (GEMMA3, 1, {1, 5}),
        (GEMMA4, 1, {1, 4, 5}),
        (PHI3, 3, {3, 5}),
        (GPT_OSS, 3, {2, 3, 4}),
        (GPT_OSS, 5, {2, 3, 4}),
        (LLAMA3, 3, {2, 3}),
        (QWEN, 1, {1, 3}),
    ],
)
def test_ends_by_text(tokens: list[str], named: int, expected: set[int]) -> None:
    """Files of llama.cpp's converter name one end. `<|end|>` of gpt-oss ends a message, not the answer."""
    ids = gguf_eos_token_ids(_ends(tokens, eos_token_id=named), "m.gguf")
    assert set(ids) == expected and len(ids) == len(expected)


def test_ends_by_id() -> None:
    keys = {"eos_token_id": 7, "eot_token_id": 9, "eom_token_id": 7, "eos_token_ids": [9, 8]}
    assert gguf_eos_token_ids(_ends(["a"], **keys), "m.gguf") == [7, 9, 8]
    assert gguf_eos_token_ids({}, "m.gguf") == []


@pytest.mark.parametrize("ids", [["7"], "7", [True], [[7]]])
def test_ends_that_are_no_ids(ids: Any) -> None:
    with pytest.raises(ModelLoadError, match=r"m.gguf: tokenizer.ggml.eos_token_ids=.*: expected a token id"):
        gguf_eos_token_ids(_ends(["a"], eos_token_ids=ids), "m.gguf")
