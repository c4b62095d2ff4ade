"""Texts of single token ids."""

from __future__ import annotations

from typing import Any

from drift_sdk.text.tokenizer import Tokenizer


def test_byte_level_tokens_have_their_own_texts(byte_level_metadata: dict[str, Any]) -> None:
    tokenizer = Tokenizer.from_gguf(byte_level_metadata)
    texts = tokenizer.token_texts
    for text in ("Hello", " world", "é", "世"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        data = [tokenizer.token_bytes[token_id] for token_id in ids]
        assert b"".join(data).decode() == text
        for _ in range(2):
            assert [texts[token_id] for token_id in ids] == [part.decode(errors="replace") for part in data]
    assert tokenizer.eos_token_id is not None
    assert texts[tokenizer.eos_token_id] == tokenizer.eos_token
    assert texts[tokenizer.vocab_size] == texts[-1] == texts[2**40] == ""


def test_sentencepiece_tokens_keep_their_spaces(sentencepiece_metadata: dict[str, Any]) -> None:
    tokenizer = Tokenizer.from_gguf(sentencepiece_metadata)
    texts = tokenizer.token_texts
    for token, text in (("\u2581the", " the"), ("<0xE2>", "\ufffd"), ("<0x41>", "A")):
        token_id = tokenizer.token_to_id(token)
        if token_id is not None:
            assert texts[token_id] == text
    ids = tokenizer.encode("the cat", add_special_tokens=False)
    assert "".join(texts[token_id] for token_id in ids).strip() == "the cat"
