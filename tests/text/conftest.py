"""Small tokenizers: byte-level and sentencepiece, as tokenizer.json and as GGUF metadata."""

from __future__ import annotations

import json
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers

CORPUS = [
    "The quick brown fox jumps over the lazy dog. The dog doesn't mind, and they'll rest.",
    "def add(left, right):\n    return left + right  # 3.14159 and 2024-01-01\n\n\tpass",
    "Emoji: 👩‍👩‍👧 🎉🎉 🇩🇪, CJK: 中文字符 中文 日本語 日本.",
    "Korean 한국어, combining: e\u0301 a\u0308 e\u0301.",
    "   runs of    spaces   and\t\ttabs\n\n\n   the end of the text",
]
BYTE_LEVEL_SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


@pytest.fixture(scope="session")
def byte_level_json() -> str:
    """A tokenizer.json: byte-level BPE, 3 special tokens, and added tokens that are not special."""
    raw = tokenizers.Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=list(BYTE_LEVEL_SPECIALS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    raw.train_from_iterator(CORPUS, trainer)
    raw.add_tokens(
        [AddedToken(text, normalized=False) for text in ("<think>", "<a tool>", "<思>", "Ġspelled")]
    )
    return raw.to_str()


@pytest.fixture(scope="session")
def byte_level_metadata(byte_level_json: str) -> dict[str, Any]:
    """The same vocabulary and merges in the form of GGUF metadata."""
    spec = json.loads(byte_level_json)
    ids = dict(spec["model"]["vocab"]) | {token["content"]: token["id"] for token in spec["added_tokens"]}
    tokens = sorted(ids, key=ids.__getitem__)
    user_defined = {token["content"] for token in spec["added_tokens"] if not token["special"]}
    types = [3 if t in BYTE_LEVEL_SPECIALS else 4 if t in user_defined else 1 for t in tokens]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [" ".join(merge) for merge in spec["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": ids["<|im_start|>"],
        "tokenizer.ggml.eos_token_id": ids["<|im_end|>"],
        "tokenizer.chat_template": "{{ messages[0].content }}",
    }


@pytest.fixture(scope="session")
def sentencepiece_metadata() -> dict[str, Any]:
    """A small sentencepiece BPE in the form of GGUF metadata: scores, no merges, 256 byte tokens."""
    raw = tokenizers.Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always")
    corpus = ["".join(char for char in line if char.isascii() or char == "中") for line in CORPUS]
    raw.train_from_iterator(corpus, trainers.BpeTrainer(vocab_size=200, show_progress=False))
    model = json.loads(raw.to_str())["model"]
    merged = list(dict.fromkeys("".join(merge) for merge in model["merges"]))
    chars = [token for token in model["vocab"] if len(token) == 1]
    pieces = merged + chars
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", *byte_tokens, *pieces, "▁▁▁▁", "<extra>"],
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(rank) for rank in range(len(pieces))] + [0.0, 0.0],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(pieces) + [4, 4],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


@pytest.fixture(scope="session")
def gemma4_json() -> str:
    """A tokenizer.json as of Gemma 4: BPE of texts with "▁" for spaces, without splits, and bytes for
    characters that are not in the vocabulary."""
    trained = tokenizers.Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n+|▁*[^\n▁]+|▁+"), "isolated")
    corpus = ["".join(char for char in line if char.isascii() or char == "中") for line in CORPUS]
    trained.train_from_iterator(corpus, trainers.BpeTrainer(vocab_size=260, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces = ["<unk>", "<bos>", "<eos>", *byte_tokens, *model["vocab"], "<extra>"]
    raw = tokenizers.Tokenizer(
        models.BPE(
            {piece: index for index, piece in enumerate(pieces)},
            [tuple(merge) for merge in model["merges"]],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    raw.normalizer = normalizers.Replace(" ", "▁")
    raw.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    raw.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    raw.add_special_tokens([AddedToken(text, normalized=False) for text in ("<unk>", "<bos>", "<eos>")])
    raw.add_tokens([AddedToken("<extra>", normalized=False)])
    return raw.to_str()


@pytest.fixture(scope="session")
def gemma4_metadata(gemma4_json: str) -> dict[str, Any]:
    """The same in the form of GGUF metadata, with scores that have no meaning."""
    model = json.loads(gemma4_json)["model"]
    tokens = list(model["vocab"])
    types = [2, 3, 3] + [6] * 256 + [1] * (len(tokens) - 260) + [4]
    return {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [-1000.0] * len(tokens),
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
    }


@pytest.fixture(scope="session")
def metaspace_raw() -> tokenizers.Tokenizer:
    """A tokenizer whose only decoder step is Metaspace."""
    vocab = {"▁": 0, "a": 1, "b": 2, "▁a": 3, "ab": 4}
    raw = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[("▁", "a"), ("a", "b")]))
    raw.pre_tokenizer = pre_tokenizers.Metaspace()
    raw.normalizer = normalizers.NFC()
    raw.decoder = decoders.Metaspace()
    return raw
