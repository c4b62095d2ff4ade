"""The lower bound on the number of tokens: never too high, and not much too low."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from drift_sdk.testing import byte_tokenizer
from drift_sdk.text.tokenizer import Tokenizer

WORDS = ["ab", "abc", "  ", "    ", "the", "日本", "é", "ing", "aaaa"]


def wrap(raw: tokenizers.Tokenizer) -> Tokenizer:
    return Tokenizer(raw, bos_token=None, eos_token=None, chat_template=None, adds_bos=None)


def merged(pieces: list[str], words: list[str]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Vocabulary and merges with these words, each merged from its characters from left to right."""
    vocab = {piece: index for index, piece in enumerate(pieces)}
    merges = []
    for word in words:
        for end in range(2, len(word) + 1):
            if word[:end] not in vocab and word[end - 1] in vocab:
                vocab[word[:end]] = len(vocab)
                merges.append((word[: end - 1], word[end - 1]))
    return vocab, merges


def byte_level(*added: AddedToken | str) -> tokenizers.Tokenizer:
    pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words = [pre_tokenizer.pre_tokenize_str(word)[0][0] for word in WORDS]
    vocab, merges = merged(sorted(pre_tokenizers.ByteLevel.alphabet()), words)
    raw = tokenizers.Tokenizer(models.BPE(vocab, merges))
    raw.pre_tokenizer, raw.decoder = pre_tokenizer, decoders.ByteLevel()
    raw.add_tokens(list(added))
    return raw


def with_nfc() -> tokenizers.Tokenizer:
    raw = byte_level()
    raw.normalizer = normalizers.NFC()
    return raw


def with_stripping() -> tokenizers.Tokenizer:
    return byte_level(AddedToken("<sep>", lstrip=True, rstrip=True, normalized=False))


def sentencepiece(*, byte_fallback: bool) -> tokenizers.Tokenizer:
    letters = [chr(code) for code in range(0x21, 0x7B)] + ["\u2581", "日", "本", "é"]
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)] if byte_fallback else []
    vocab, merges = merged(["<unk>", *bytes_, *letters], [word.replace(" ", "\u2581") for word in WORDS])
    raw = tokenizers.Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=byte_fallback)
    )
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    raw.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    raw.add_special_tokens([AddedToken("<|end of text|>", normalized=False)])
    return raw


TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {
    "bytes": byte_tokenizer,
    "byte level": lambda: wrap(byte_level("<tool call>", AddedToken("zz top", normalized=True))),
    "NFC": lambda: wrap(with_nfc()),
    "stripping": lambda: wrap(with_stripping()),
    "sentencepiece": lambda: wrap(sentencepiece(byte_fallback=True)),
    "unknown characters": lambda: wrap(sentencepiece(byte_fallback=False)),
}

pieces = st.sampled_from(
    [*WORDS, " ", "a", "b", "e\u0301", "\u212b", "\u3000", "\u2581", "\u1112\u1161\u11ab", "Ġ", "<sep>"]
    + ["<tool call>", "zz top", "<|end of text|>", "\n", "\t", "🎉", "ж", "\x00", "<0x0A>", "\u0130"]
)
texts = st.one_of(
    st.text(max_size=40),
    st.lists(pieces, max_size=20).map("".join),
    st.builds(lambda piece, times: piece * times, pieces, st.integers(1, 200)),
)


@pytest.fixture(scope="module", params=TOKENIZERS)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return TOKENIZERS[request.param]()


@settings(max_examples=100)
@given(text=texts)
@example(text="\u6965" * 40)  # one unknown token, of bytes that tokens have
def test_bound_does_not_exceed_the_number_of_tokens(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.min_num_tokens(text) <= len(tokenizer.encode(text, add_special_tokens=False))


def test_bound_of_a_long_text_is_that_of_a_beginning_once_it_is_enough(tokenizer: Tokenizer) -> None:
    text = "the abc is a thing " * 20_000
    bound = tokenizer.min_num_tokens(text)
    assert bound <= len(tokenizer.encode(text, add_special_tokens=False))
    assert 100 < tokenizer.min_num_tokens(text, 100) < bound
    assert tokenizer.min_num_tokens(text, bound) == bound


def test_bound_is_at_least_an_eighth_of_the_number_of_tokens(tokenizer: Tokenizer) -> None:
    text = "the abc is a thing " * 100
    assert tokenizer.min_num_tokens(text) >= len(tokenizer.encode(text)) / 8


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("normalizer", {"type": "Replace", "pattern": {"Regex": "a+"}, "content": ""}),
        ("normalizer", {"type": "Strip", "strip_left": True, "strip_right": True}),
        ("pre_tokenizer", {"type": "Whitespace"}),
        (
            "pre_tokenizer",
            {"type": "Split", "pattern": {"String": "a"}, "behavior": "Removed", "invert": False},
        ),
    ],
)
def test_bound_is_zero_if_the_tokenizer_may_drop_text(part: str, value: object) -> None:
    spec = json.loads(byte_level().to_str())
    spec[part] = value
    assert wrap(tokenizers.Tokenizer.from_str(json.dumps(spec))).min_num_tokens("a b c" * 1000) == 0


def test_fingerprints_differ_between_tokenizers() -> None:
    assert wrap(byte_level()).fingerprint == wrap(byte_level()).fingerprint
    prints = {TOKENIZERS[name]().fingerprint for name in TOKENIZERS}
    assert len(prints) == len(TOKENIZERS)
