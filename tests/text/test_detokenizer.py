"""Detokenised pieces join to the text that the tokenizer decodes at once."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import decoders, models

from drift_sdk.errors import DriftError, ModelLoadError
from drift_sdk.text.tokenizer import BytesDetokenizer, Detokenizer, TokenBytes, Tokenizer

REPLACEMENT = "\ufffd"
SAMPLES = [
    "👩‍👩‍👧 🎉🇩🇪",
    "中文字符、日本語 한국어",
    "e\u0301a\u0308\u0323",
    "  a  b\n\n\tc ",
    "1234.5 don't",
    " ",
    "",
]

CUTS = st.lists(st.integers(0, 6), min_size=1)


@pytest.fixture(scope="module")
def byte_level(byte_level_metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_gguf(byte_level_metadata)


@pytest.fixture(scope="module")
def sentencepiece(sentencepiece_metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_gguf(sentencepiece_metadata)


def push_in_pieces(detokenizer: Detokenizer, ids: Sequence[int], sizes: Sequence[int]) -> list[str]:
    """The results of all pushes and of the flush. The sizes of the pushes are used in turn, repeatedly."""
    pieces = []
    start = turn = 0
    while start < len(ids):
        size = sizes[turn % len(sizes)] if any(sizes) else 1
        pieces.append(detokenizer.push(ids[start : start + size]))
        start += size
        turn += 1

    return [*pieces, detokenizer.flush()]


def is_byte_token(sentencepiece: Tokenizer, token_id: int) -> bool:
    return sentencepiece.token_to_id("<0x00>") <= token_id <= sentencepiece.token_to_id("<0xFF>")


@given(data=st.data(), sizes=CUTS)
def test_byte_level_random_ids_equal_decode_of_all(
    byte_level: Tokenizer, data: st.DataObject, sizes: list[int]
) -> None:
    ids = data.draw(st.lists(st.integers(0, byte_level.vocab_size + 2), max_size=40))
    assert "".join(push_in_pieces(byte_level.detokenizer(), ids, sizes)) == byte_level.decode(ids)


@given(data=st.binary(max_size=40), sizes=CUTS)
@example(data=b"\xed\xa0\x80\xf4\x90\x80\x80\xc0\x80\xe2\x82", sizes=[1])
def test_byte_level_random_bytes_equal_decode_of_all(
    byte_level: Tokenizer, byte_level_metadata: dict[str, Any], data: bytes, sizes: list[int]
) -> None:
    # Arbitrary bytes, each a token: every kind of broken UTF-8.
    table = TokenBytes(byte_level._raw, byte_level.special_token_ids)
    num_tokens = len(byte_level_metadata["tokenizer.ggml.tokens"])
    id_of = {table[token_id]: token_id for token_id in range(num_tokens) if len(table[token_id]) == 1}
    ids = [id_of[bytes([byte])] for byte in data]
    text = "".join(push_in_pieces(byte_level.detokenizer(), ids, sizes))
    assert text == byte_level.decode(ids) == data.decode(errors="replace")


@given(text=st.one_of(st.text(max_size=30), st.sampled_from(SAMPLES)), sizes=CUTS)
def test_byte_level_text_is_restored_with_whole_characters(
    byte_level: Tokenizer, text: str, sizes: list[int]
) -> None:
    text = text.replace(REPLACEMENT, "")
    # An added token spelled in the byte alphabet decodes to the spelled bytes, so it is not restored.
    ids = byte_level.encode(text.replace("Ġspelled", ""), add_special_tokens=False)
    pieces = push_in_pieces(byte_level.detokenizer(), ids, sizes)
    assert REPLACEMENT not in "".join(pieces)
    assert "".join(pieces) == byte_level.decode(ids)
    if not any(token in byte_level.special_token_ids for token in ids):
        assert "".join(pieces) == text.replace("Ġspelled", "")


def test_character_of_four_tokens_is_returned_with_the_last_token(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("𝔘", add_special_tokens=False)
    assert len(ids) == 4
    detokenizer = byte_level.detokenizer()
    assert [detokenizer.push([token_id]) for token_id in ids] == ["", "", "", "𝔘"]
    assert detokenizer.flush() == ""


def test_flush_replaces_an_incomplete_character_once(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("x𝔘", add_special_tokens=False)[:-1]
    detokenizer = byte_level.detokenizer()
    assert detokenizer.push(ids) == "x"
    assert detokenizer.flush() == REPLACEMENT
    assert detokenizer.flush() == ""


def test_broken_character_is_replaced_at_the_first_invalid_byte(byte_level: Tokenizer) -> None:
    start = byte_level.encode("𝔘", add_special_tokens=False)[:2]
    detokenizer = byte_level.detokenizer()
    assert detokenizer.push(start) == ""
    assert detokenizer.push(byte_level.encode("the", add_special_tokens=False)) == REPLACEMENT + "the"


def test_special_and_unknown_ids_add_nothing_and_do_not_split_characters(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("𝔘", add_special_tokens=False)
    assert byte_level.eos_token_id is not None
    between = [*ids[:2], byte_level.eos_token_id, byte_level.vocab_size + 7, *ids[2:]]
    detokenizer = byte_level.detokenizer()
    assert detokenizer.push(between) == byte_level.decode(between) == "𝔘"
    assert detokenizer.push([]) == ""


@pytest.mark.parametrize("text", ["<think>", "<a tool>", "<思>", "Ġspelled"])
def test_added_tokens_equal_decode(byte_level: Tokenizer, text: str) -> None:
    token_id = byte_level.token_to_id(text)
    assert token_id is not None
    detokenizer = byte_level.detokenizer()
    assert detokenizer.push([token_id]) + detokenizer.flush() == byte_level.decode([token_id])


def test_detokenizers_of_one_tokenizer_are_independent(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("𝔘", add_special_tokens=False)
    first, second = byte_level.detokenizer(), byte_level.detokenizer()
    assert first.push(ids[:2]) == ""
    assert second.push(ids) == "𝔘"
    assert first.push(ids[2:]) == "𝔘"


@given(text=st.one_of(st.text(max_size=30), st.sampled_from(SAMPLES)), sizes=CUTS)
def test_sentencepiece_text_equals_decode_of_all(
    sentencepiece: Tokenizer, text: str, sizes: list[int]
) -> None:
    text = text.replace(REPLACEMENT, "").replace("▁", "")
    ids = sentencepiece.encode(text)
    pieces = push_in_pieces(sentencepiece.detokenizer(), ids, sizes)
    assert "".join(pieces) == sentencepiece.decode(ids)
    assert REPLACEMENT not in "".join(pieces)


@given(data=st.data(), sizes=CUTS)
def test_sentencepiece_random_pieces_equal_decode_of_all(
    sentencepiece: Tokenizer, data: st.DataObject, sizes: list[int]
) -> None:
    # Tokens of spaces are drawn often, because the decoder removes leading spaces at the start only.
    spaces = [sentencepiece.token_to_id("▁"), sentencepiece.token_to_id("    "), 1]
    pieces = st.integers(0, sentencepiece.vocab_size + 2).filter(
        lambda i: not is_byte_token(sentencepiece, i)
    )
    ids = data.draw(st.lists(st.one_of(st.sampled_from(spaces), pieces), max_size=30))
    assert "".join(push_in_pieces(sentencepiece.detokenizer(), ids, sizes)) == sentencepiece.decode(ids)


@given(data=st.binary(max_size=30), sizes=CUTS)
def test_sentencepiece_broken_byte_runs_keep_their_valid_characters(
    sentencepiece: Tokenizer, data: bytes, sizes: list[int]
) -> None:
    ids = [sentencepiece.token_to_id(f"<0x{byte:02X}>") or 0 for byte in data]
    text = data.decode(errors="replace").removeprefix(" ")
    assert "".join(push_in_pieces(sentencepiece.detokenizer(), ids, sizes)) == text
    if REPLACEMENT not in text:
        assert text == sentencepiece.decode(ids)


def test_sentencepiece_character_in_byte_tokens_is_returned_whole(sentencepiece: Tokenizer) -> None:
    ids = sentencepiece.encode("a🎉", add_special_tokens=False)
    detokenizer = sentencepiece.detokenizer()
    pieces = [detokenizer.push([token_id]) for token_id in ids]
    assert pieces[-4:] == ["", "", "", "🎉"]
    assert "".join(pieces) == "a🎉"


def test_metaspace_decoder_removes_one_leading_space(metaspace_raw: tokenizers.Tokenizer) -> None:
    tokenizer = Tokenizer(metaspace_raw, bos_token=None, eos_token=None, chat_template=None, adds_bos=None)
    for text in ("a", "ab a", "a a ab"):
        ids = tokenizer.encode(text)
        assert "".join(push_in_pieces(tokenizer.detokenizer(), ids, [1])) == tokenizer.decode(ids) == text


@pytest.mark.parametrize(
    ("token", "text", "decoded"),
    [("▁▁a", " a", "a"), ("a▁b", "a b", "ab"), ("▁a", "a", "a"), (" a", "a", " a")],
)
def test_metaspace_decoder_and_the_library_differ_in_the_first_token(
    token: str, text: str, decoded: str
) -> None:
    raw = tokenizers.Tokenizer(models.WordLevel({token: 0}, unk_token=token))
    raw.decoder = decoders.Metaspace()
    detokenizer = BytesDetokenizer(TokenBytes(raw, frozenset()))
    assert (detokenizer.push([0]), raw.decode([0])) == (text, decoded)


@given(text=st.one_of(st.text(max_size=30), st.sampled_from(SAMPLES)), sizes=CUTS)
def test_continuation_of_a_text_keeps_its_first_spaces(
    sentencepiece: Tokenizer, text: str, sizes: list[int]
) -> None:
    before, *_ = sentencepiece.encode("the", add_special_tokens=False)
    ids = sentencepiece.encode(text.replace(REPLACEMENT, ""), add_special_tokens=False)
    shown_ids = frozenset([1])  # whose bytes are of another table
    for detokenizer in (
        sentencepiece.detokenizer(is_continuation=True),
        sentencepiece.detokenizer(shown_ids, is_continuation=True),
    ):
        pieces = push_in_pieces(detokenizer, ids, sizes)
        assert sentencepiece.decode([before]) + "".join(pieces) == sentencepiece.decode([before, *ids])


@pytest.mark.parametrize("tokens", [["▁", "▁", "▁", "a"], ["▁", "a", "▁", "a"], ["▁▁▁a"], ["a", "▁▁"], ["▁"]])
def test_leading_spaces_are_counted_across_pushes(tokens: list[str]) -> None:
    vocab = {token: token_id for token_id, token in enumerate(dict.fromkeys(tokens))}
    raw = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    raw.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 2, 0)])
    ids = [vocab[token] for token in tokens]
    detokenizer = BytesDetokenizer(TokenBytes(raw, frozenset()))
    assert "".join(push_in_pieces(detokenizer, ids, [1])) == raw.decode(ids)


WORDS = ["hello</w>", "wo", "rld</w>", "##ld", "a", "n't", ".", "|", "<pad>", "\ufffd", " ", "é", "", "__"]
JOINING_DECODERS = {
    "none": None,
    "WordPiece": decoders.WordPiece(),
    "WordPiece without cleanup": decoders.WordPiece(cleanup=False),
    "BPEDecoder": decoders.BPEDecoder(),
    "CTC": decoders.CTC(),
    "replaced, fused": decoders.Sequence(
        [decoders.Replace("a", "b"), decoders.WordPiece(cleanup=False), decoders.Fuse()]
    ),
    "regular expression": decoders.Replace(tokenizers.Regex("_+|a"), "-"),
}


def word_tokenizer(decoder: decoders.Decoder | None) -> Tokenizer:
    """Words as tokens, the last of which, "<s>", is special."""
    raw = tokenizers.Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="a"))
    raw.add_special_tokens(["<s>"])
    raw.decoder = decoder
    return Tokenizer(raw, bos_token="<s>", eos_token=None, chat_template=None, adds_bos=False)


@pytest.mark.parametrize("name", JOINING_DECODERS)
def test_tokens_that_depend_on_their_neighbours_join_to_the_decoded_text(name: str) -> None:
    tokenizer = word_tokenizer(JOINING_DECODERS[name])
    assert not tokenizer.has_token_bytes and tokenizer.min_num_tokens("hello") == 0
    with pytest.raises(DriftError, match="has no token_bytes"):
        _ = tokenizer.token_bytes
    draw = random.Random(5)
    for _ in range(300):
        # The special token and an id that no token has, which decoding leaves out, are drawn too.
        ids = [draw.randrange(len(WORDS) + 2) for _ in range(draw.randrange(12))]
        pieces = push_in_pieces(tokenizer.detokenizer(), ids, [draw.randrange(1, 4) for _ in range(3)])
        assert "".join(pieces) == tokenizer.decode(ids), ids


@pytest.mark.parametrize(
    ("decoder", "found"),
    [
        (decoders.Strip(" ", 1, 0), "Strip"),
        (decoders.Sequence([decoders.Fuse(), decoders.Strip("_", 1, 0)]), "Strip"),
        (decoders.Sequence([decoders.Fuse(), decoders.Replace(tokenizers.Regex("_+"), " ")]), "Replace"),
        (decoders.Sequence([decoders.WordPiece(), decoders.ByteFallback()]), "WordPiece"),
        (decoders.Sequence([decoders.BPEDecoder(), decoders.Replace("a ", "b")]), "BPEDecoder"),
    ],
)
def test_decoders_whose_text_cannot_be_streamed_are_rejected(decoder: decoders.Decoder, found: str) -> None:
    with pytest.raises(ModelLoadError, match=f'decoder step .*"{found}".*expected ByteLevel'):
        word_tokenizer(decoder)
