"""The tokenizer: text to token ids and back, whole or as ids arrive.

`TokenFloor` is a lower bound on the number of tokens of a text, computed without tokenising it. `NoTokenizer`
stands for a model without a tokenizer, which takes and gives token ids alone.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, Protocol

import tokenizers

from drift_sdk._files import has_file, unreadable
from drift_sdk.errors import DriftError, ModelLoadError, RequestError, short_repr
from drift_sdk.text.gguf_tokenizer import adds_bos, build_gguf_tokenizer, special_token
from drift_sdk.text.tokenizer_limits import checked_file

NUM_IDS = 2**32
"""Token ids are less than this; the tokenizers library accepts no others."""

WORD_DECODERS = ("WordPiece", "BPEDecoder", "CTC")
ALLOWED = (
    "ByteLevel, Metaspace, Replace (a string), ByteFallback, Fuse, Strip (leading spaces); or Replace, then "
    "at most one of WordPiece, BPEDecoder and CTC"
)

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes(dict[int, bytes]):
    """Mapping of token id to the UTF-8 bytes that it adds to a text. Entries are made when first looked up.

    Special ids and ids outside the vocabulary add nothing. Entries never change, so threads may share a
    table.

    texts:               token id -> text, of the ids looked up so far whose bytes are whole characters.
    num_leading_spaces:  number of spaces that the tokenizer's decoder removes at the start of a text; 1 for
                         the decoder Metaspace, which removes each U+2581 of the first token.

    Raises `ModelLoadError` if the tokenizer's decoder has a step that this class does not support.
    """

    def __init__(self, raw: tokenizers.Tokenizer, special_token_ids: frozenset[int]) -> None:
        super().__init__()
        self._raw = raw
        self._special_token_ids = special_token_ids
        self._is_byte_level = False
        self._has_byte_tokens = False
        self._replacements: list[tuple[str, str]] = []
        self.texts: dict[int, str] = {}
        self.num_leading_spaces: int = 0
        self._read_decoder()

    def __missing__(self, token_id: int) -> bytes:
        token = self._raw.id_to_token(token_id) if 0 <= token_id < NUM_IDS else None
        if token is None or token_id in self._special_token_ids:
            return b""

        self[token_id] = data = self._to_bytes(token)
        with suppress(UnicodeDecodeError):
            self.texts[token_id] = data.decode()
        return data

    def _to_bytes(self, token: str) -> bytes:
        if self._is_byte_level:
            # A token with a character outside the byte alphabet is literal text; added tokens may be.
            is_spelled = all(char in CHAR_TO_BYTE for char in token)
            return bytes(CHAR_TO_BYTE[char] for char in token) if is_spelled else token.encode()

        if self._has_byte_tokens and (byte := BYTE_TOKEN.fullmatch(token)):
            return bytes([int(byte[1], 16)])

        for old, new in self._replacements:
            token = token.replace(old, new)

        return token.encode()

    def _read_decoder(self) -> None:
        is_fused = False
        for step in decoder_steps(self._raw):
            match step:
                case {"type": "ByteLevel"}:
                    self._is_byte_level = True
                case {"type": "ByteFallback"}:
                    self._has_byte_tokens = True
                case {"type": "Fuse"}:
                    is_fused = True
                case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
                    self._replacements.append((old, new))
                case {"type": "Metaspace", "replacement": str(old), "prepend_scheme": str(scheme)}:
                    self._replacements.append((old, " "))
                    self.num_leading_spaces = 0 if scheme == "never" else 1
                case {"type": "Strip", "content": " ", "start": int(start), "stop": 0} if is_fused:
                    self.num_leading_spaces = start
                case _:
                    raise ModelLoadError(f"tokenizer: decoder step {json.dumps(step)}, expected {ALLOWED}")


def decoder_steps(raw: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    """The steps of a tokenizer's decoder, in order; empty without a decoder."""
    if raw.decoder is None:
        return []

    spec: dict[str, Any] = json.loads(raw.decoder.__getstate__())
    return list(spec["decoders"]) if spec["type"] == "Sequence" else [spec]


def joins_words(raw: tokenizers.Tokenizer) -> bool:
    """Whether the tokenizers library has to decode tokens, and the text of a token depends on the token
    before it at most: without a decoder, which joins tokens with spaces, with the decoders WordPiece,
    BPEDecoder and CTC, and with replacements of regular expressions."""
    steps = decoder_steps(raw)
    if not steps:
        return True

    replacements = list(takewhile(lambda step: step["type"] == "Replace", steps))
    kinds = [step["type"] for step in steps[len(replacements) :]]
    if kinds[-1:] == ["Fuse"]:
        del kinds[-1]

    # Replaced strings are read by TokenBytes; regular expressions are left to the library.
    has_regex = any("Regex" in step["pattern"] for step in replacements)
    return len(kinds) == 1 and kinds[0] in WORD_DECODERS or (not kinds and has_regex)


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's mapping of printable characters to bytes.

    Bytes that are printable characters in Latin-1 are represented by these; the others by characters from
    U+0100 on, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


CHAR_TO_BYTE = _byte_alphabet()


class TokenTexts(dict[int, str]):
    """Mapping of token id to its text. Entries are made when first looked up and never change, so threads may
    share a table.

    Bytes that are no whole character become U+FFFD. Special tokens are spelled out, although they add nothing
    to a text. Ids outside the vocabulary have no text.
    """

    def __init__(self, raw: tokenizers.Tokenizer, token_bytes: TokenBytes | None) -> None:
        """token_bytes: None for a tokenizer whose tokens the library has to decode."""
        super().__init__()
        self._raw = raw
        self._token_bytes = token_bytes

    def __missing__(self, token_id: int) -> str:
        if self._token_bytes is None:
            is_known = 0 <= token_id < NUM_IDS
            return self._raw.decode([token_id], skip_special_tokens=False) if is_known else ""

        data = self._token_bytes[token_id]
        if not data:
            spelled = self._raw.id_to_token(token_id) if 0 <= token_id < NUM_IDS else None
            return spelled or ""

        self[token_id] = text = data.decode(errors="replace")
        return text


class Detokenizer(Protocol):
    """Turns the token ids of one text into characters, as the ids arrive.

    is_incomplete: whether a part of a character is held back.
    """

    @property
    def is_incomplete(self) -> bool: ...

    def push(self, token_ids: Sequence[int]) -> str:
        """Add ids; returns the text that they complete, which may be empty."""

    def flush(self) -> str:
        """End the text; returns what is left of it."""


class BytesDetokenizer:
    """A detokeniser for tokens that add the same bytes wherever they stand.

    The result does not depend on how the ids are split over pushes.

    A character whose bytes are spread over several tokens is returned when it is complete. Bytes that can no
    longer become a character are returned as U+FFFD. Special ids add nothing. A push takes time proportional
    to the number of its own ids.

    The joined text equals `Tokenizer.decode` of all ids, with two exceptions:
    - With sentencepiece models, a run of byte tokens that contains an invalid byte keeps its valid characters
      here, while `decode` replaces every byte of the run. (A stream cannot wait for the end of the run.)
    - With the decoder Metaspace, one space is removed at the start of the text, while `decode` removes every
      U+2581 of the first token and no other space.

    is_continuation: the ids continue a text: the spaces that `decode` removes at the start of a text are
                     kept.
    """

    __slots__ = ("_bytes_of", "_incomplete", "_num_leading_spaces", "_text_of")

    def __init__(self, token_bytes: TokenBytes, *, is_continuation: bool = False) -> None:
        self._bytes_of, self._text_of = token_bytes.__getitem__, token_bytes.texts.get
        self._incomplete = b""  # first bytes of a character whose last bytes have not arrived
        self._num_leading_spaces = 0 if is_continuation else token_bytes.num_leading_spaces

    @property
    def is_incomplete(self) -> bool:
        return bool(self._incomplete)

    def push(self, token_ids: Sequence[int]) -> str:
        """Add ids; returns the text that they complete, which may be empty."""
        if len(token_ids) == 1 and not self._incomplete:  # the usual case
            text = self._text_of(token_ids[0])
            if text is not None:
                return self._stripped(text) if self._num_leading_spaces else text

        return self._decode(b"".join(map(self._bytes_of, token_ids)))

    def flush(self) -> str:
        """End the text; returns what is left of it: U+FFFD if a character is incomplete, else nothing."""
        return self._decode(b"", is_last=True)

    def _decode(self, data: bytes, *, is_last: bool = False) -> str:
        data = self._incomplete + data
        text, num_used = codecs.utf_8_decode(data, "replace", is_last)
        self._incomplete = data[num_used:]
        return self._stripped(text) if self._num_leading_spaces else text

    def _stripped(self, text: str) -> str:
        """Remove the leading spaces that the tokenizer's decoder removes at the start of a text.

        After the first other character nothing more is removed.
        """
        num_spaces = len(text) - len(text.lstrip(" "))
        num_stripped = min(num_spaces, self._num_leading_spaces)
        self._num_leading_spaces = self._num_leading_spaces - num_stripped if num_spaces == len(text) else 0
        return text[num_stripped:]


class ContextDetokenizer:
    """A detokeniser for tokens whose text depends on the token before them: words joined with spaces, for
    example.

    decode: the text of token ids. Adding an id may only add to the text, by what depends on the last id
            before it.
    adds_text: whether an id takes part in `decode`; special ids, and those outside the vocabulary, do not.

    Each push decodes the new ids together with the last one before them, whose own text is known. The joined
    text equals that of all ids decoded at once.
    """

    __slots__ = ("_adds_text", "_decode", "_last")
    is_incomplete = False

    def __init__(self, decode: Callable[[Sequence[int]], str], adds_text: Callable[[int], bool]) -> None:
        self._decode = decode
        self._adds_text = adds_text
        self._last: list[int] = []  # the newest id, none at the start

    def push(self, token_ids: Sequence[int]) -> str:
        """Add ids; returns the text that they add, which may be empty."""
        added = [token_id for token_id in token_ids if self._adds_text(token_id)]
        if not added:
            return ""

        num_known = len(self._decode(self._last))
        text = self._decode([*self._last, *added])[num_known:]
        self._last = added[-1:]
        return text

    def flush(self) -> str:
        """End the text; nothing is ever left of it."""
        return ""


class SilentDetokenizer:
    """A detokeniser for a model without a tokenizer: tokens have no text."""

    __slots__ = ()
    is_incomplete = False

    def push(self, token_ids: Sequence[int]) -> str:
        return ""

    def flush(self) -> str:
        return ""


NON_ASCII = range(0x80, 0x100)
# Bytes that occur in UTF-8 text.
UTF8 = frozenset(range(0x100)) - {0xC0, 0xC1, *range(0xF5, 0x100)}
SLICE_CHARS = 2**16
"""Characters that are counted at a time: no other thread runs Python code meanwhile."""
BLANKS = b" \t\n\v\f\r\x1c\x1d\x1e\x1f"


class TokenFloor:
    """Computes the bound for a tokenizer whose tokens cover every byte of a text.

    Each byte has a weight: 1 / (number of bytes of the longest token that contains it). So no token weighs
    more than 1, and the weight of a text does not exceed the number of its tokens. A byte that may be dropped
    has weight 0: one that is not a token by itself (bytes without a token are dropped or merged into a single
    unknown token), and a blank if blanks beside an added token are removed. If the tokenizer may shorten a
    text before splitting it into tokens, the bound is 0: for every text, or only for texts that are not
    ASCII.
    """

    def __init__(self, raw: tokenizers.Tokenizer, token_bytes: TokenBytes) -> None:
        parts: Mapping[str, Any] = json.loads(raw.to_str(pretty=False))
        added = parts["added_tokens"]
        normalizers = steps(parts["normalizer"], "normalizers")
        kinds = {step["type"] for step in normalizers}
        self._weights: list[float] = []
        self._is_for_ascii = "NFC" in kinds
        if (
            parts["model"]["type"] in ("BPE", "Unigram")
            and all(keeps_length(step) for step in normalizers)
            and all(keeps_text(step) for step in steps(parts["pre_tokenizer"], "pretokenizers"))
            # If added tokens are normalised too, they begin with the prepended character.
            and not ("Prepend" in kinds and any(token["normalized"] for token in added))
        ):
            self._weights = weigh(raw, token_bytes)
            if any(token["lstrip"] or token["rstrip"] for token in added):
                for byte in (*BLANKS, *NON_ASCII):  # some blanks are not ASCII
                    self._weights[byte] = 0.0

    def __call__(self, text: str, enough: float = math.inf) -> int:
        """A number of tokens that the text has at least; 0 if nothing is known. If it exceeds `enough`, it
        may be that of a beginning of the text."""
        if not self._weights or (self._is_for_ascii and not text.isascii()):
            return 0

        weight = 0.0
        for start in range(0, len(text), SLICE_CHARS):
            counts = Counter(text[start : start + SLICE_CHARS].encode(errors="surrogatepass"))
            weight += sum(self._weights[byte] * count for byte, count in counts.items())
            if weight > enough:
                break
        return int(weight * (1.0 - 1e-9))  # rounded down, with a margin for rounding errors of the sum


def weigh(raw: tokenizers.Tokenizer, token_bytes: TokenBytes) -> list[float]:
    """The weight of each byte, 256 numbers from 0 to 1."""
    longest, single = [0] * 0x100, set()
    added = raw.get_added_tokens_decoder()
    for token, token_id in raw.get_vocab(with_added_tokens=True).items():
        data = token_bytes[token_id]
        if len(data) == 1 and token_id not in added:
            single.add(data[0])
        # A token may also occur in a text as it is spelled: special tokens, and the character for a space.
        for form in (data, token.encode()):
            for byte in set(form):
                longest[byte] = max(longest[byte], len(form))

    # If a byte of a character is not a token, the whole character may become an unknown token.
    weighing = single if UTF8 <= single else single.difference(NON_ASCII)
    return [1.0 / longest[byte] if byte in weighing else 0.0 for byte in range(0x100)]


def steps(spec: Mapping[str, Any] | None, parts: str) -> list[Mapping[str, Any]]:
    """The steps of a component of a tokenizer.json, with nested sequences flattened.

    spec:   the component; None for no steps.
    parts:  name of the field with the steps of a sequence.
    """
    if spec is None:
        return []

    if spec["type"] == "Sequence":
        return [step for part in spec[parts] for step in steps(part, parts)]

    return [spec]


def keeps_length(normalizer: Mapping[str, Any]) -> bool:
    """Whether a normalizer never shortens a text (NFC: an ASCII text)."""
    match normalizer:
        case {"type": "Prepend" | "NFC"}:
            return True
        case {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}:
            return True

    return False


def keeps_text(pre_tokenizer: Mapping[str, Any]) -> bool:
    """Whether a pre-tokenizer keeps all characters of a text."""
    match pre_tokenizer:
        case {"type": "ByteLevel" | "Digits" | "Metaspace"}:
            return True
        case {"type": "Split", "behavior": str(behavior)}:
            return behavior != "Removed"

    return False


MAX_LOCKED_CHARS = 4096
"""Most characters of a text that are tokenised by a call of the library that keeps other threads from running
Python code, for a few milliseconds. For longer texts there is one that does not."""


class Tokenizer:
    """A model's tokenizer. Its behaviour never changes after construction, so threads may share it.

    has_text: whether tokens have a text; False for a model without a tokenizer alone.
    """

    has_text = True

    def __init__(
        self,
        raw: tokenizers.Tokenizer,
        *,
        bos_token: str | None,
        eos_token: str | None,
        chat_template: str | None,
        adds_bos: bool | None,
    ) -> None:
        """Build around a tokenizer of the `tokenizers` library.

        raw:                   must not be used by others afterwards.
        bos_token, eos_token:  text of the special tokens; None if there are none.
        chat_template:         text of the template; None if there is none.
        adds_bos:              whether encoded texts begin with `bos_token`; None leaves the tokens added
                               around a text to `raw`.
        """
        # A tokenizer.json may contain the truncation, padding and dropout used in training.
        raw.no_truncation()
        raw.no_padding()
        if isinstance(raw.model, tokenizers.models.BPE):
            raw.model.dropout = None
        for token in (bos_token, eos_token):
            if token is not None:
                _make_special(raw, token)

        self._raw = raw
        self.bos_token = bos_token
        self.eos_token = eos_token
        self.chat_template = chat_template
        self.eos_token_id: int | None = None if eos_token is None else raw.token_to_id(eos_token)
        self.vocab_size: int = raw.get_vocab_size(with_added_tokens=True)
        self.special_token_ids: frozenset[int] = frozenset(
            token_id for token_id, token in raw.get_added_tokens_decoder().items() if token.special
        )
        self._prefix: list[int] = []
        if adds_bos is not None:
            raw.post_processor = None
            bos_token_id = None if bos_token is None else raw.token_to_id(bos_token)
            if adds_bos and bos_token_id is not None:
                self._prefix = [bos_token_id]

        self._token_bytes = None if joins_words(raw) else TokenBytes(raw, self.special_token_ids)
        self._tables: dict[frozenset[int], TokenBytes] = {}
        self.token_texts: Mapping[int, str] = TokenTexts(raw, self._token_bytes)
        self._floor: TokenFloor | None = None

    @classmethod
    def from_file(cls, path: Path, tokenizer_config: Mapping[str, Any] | None = None) -> Tokenizer:
        """Load a tokenizer.json. tokenizer_config: contents of the tokenizer_config.json in the same folder.

        Raises `ModelLoadError` if the file is missing, is not a tokenizer, makes text more than 100
        times as long, or has tokens that are too long (see `tokenizer_limits`).
        """
        if not has_file(path):
            raise ModelLoadError(f"{path}: is missing")

        config = tokenizer_config or {}
        config_file = path.with_name("tokenizer_config.json")
        add_bos_token = config.get("add_bos_token")
        if not isinstance(add_bos_token, bool | None):
            found = f"add_bos_token={short_repr(add_bos_token)}"
            raise ModelLoadError(f"{config_file}: {found}: expected true, false or null")

        bos_token, eos_token = (_token_text(config, f"{name}_token", config_file) for name in ("bos", "eos"))
        chat_template = default_template(config.get("chat_template"), config_file)
        try:
            content = path.read_bytes()
        except OSError as error:
            raise unreadable(path, error) from error

        with _no_panic(path):
            content = checked_file(content)
            tokenizer = cls(
                tokenizers.Tokenizer.from_buffer(content),
                bos_token=bos_token,
                eos_token=eos_token,
                chat_template=chat_template,
                adds_bos=add_bos_token,
            )
            tokenizer.encode("")  # fails here if the tokens added around a text are unknown
            return tokenizer

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """Build from the key/value metadata of a GGUF file, as plain Python values.

        Raises `ModelLoadError` naming the key that is missing, or a model or pre-tokenizer that is unknown.
        """
        return cls(
            build_gguf_tokenizer(metadata),
            bos_token=special_token(metadata, "bos"),
            eos_token=special_token(metadata, "eos"),
            chat_template=default_template(
                metadata.get("tokenizer.chat_template"), "tokenizer.chat_template"
            ),
            adds_bos=adds_bos(metadata),
        )

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Special tokens spelled out in the text become their ids.

        add_special_tokens: add the tokens that this model has around a text, such as a beginning-of-sequence
        token. False for a rendered chat template. Raises `RequestError` if the text cannot be encoded as
        UTF-8, or contains characters that the vocabulary cannot represent.
        """
        try:
            if len(text) <= MAX_LOCKED_CHARS:
                encoding = self._raw.encode(text, add_special_tokens=add_special_tokens)
            else:
                (encoding,) = self._raw.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            ids: list[int] = encoding.ids
        except BaseException as error:
            if not _is_of_library(error):
                raise

            is_utf8 = not isinstance(error, TypeError)
            allowed = f"text that can be tokenised ({error})" if is_utf8 else "text without lone surrogates"
            raise RequestError(
                f"prompt: expected {allowed}", field="prompt", value=text, allowed=allowed
            ) from error

        return self._prefix + ids if add_special_tokens else ids

    @property
    def has_token_bytes(self) -> bool:
        """Whether each token adds the same bytes to every text, which grammars need."""
        return self._token_bytes is not None

    @property
    def token_bytes(self) -> TokenBytes:
        """The bytes that each token adds, by token id. Raises DriftError unless `has_token_bytes`."""
        if self._token_bytes is None:
            raise DriftError(
                "this tokenizer has no token_bytes (has_token_bytes is False): what a token adds depends on "
                "those before it; token_texts has their texts"
            )

        return self._token_bytes

    def min_num_tokens(self, text: str, enough: float = math.inf) -> int:
        """A lower bound on the length of `encode(text)`, much faster to compute; 0 if nothing is known. If it
        exceeds `enough`, it may be that of a beginning of the text."""
        if self._token_bytes is None:
            return 0

        floor = self._floor
        if floor is None:
            floor = self._floor = TokenFloor(self._raw, self.token_bytes)

        return floor(text, enough)

    def tokens_by_id(self) -> dict[int, str]:
        """All tokens, as the vocabulary writes them."""
        return {token_id: token for token, token_id in self._raw.get_vocab(with_added_tokens=True).items()}

    @property
    def fingerprint(self) -> str:
        """A hash that is equal for tokenizers with the same behaviour."""
        parts = (self._raw.to_str(pretty=False), self._prefix, self.bos_token, self.eos_token)
        return hashlib.sha256(repr(parts).encode(errors="surrogatepass")).hexdigest()

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids. Bytes that are not a character become U+FFFD; unknown ids add nothing.

        skip_special_tokens: leave out special tokens, such as that of the end of a text.
        """
        known = [token_id for token_id in ids if 0 <= token_id < NUM_IDS]
        return self._raw.decode(known, skip_special_tokens=skip_special_tokens)

    def detokenizer(
        self, shown_ids: frozenset[int] = frozenset(), *, is_continuation: bool = False
    ) -> Detokenizer:
        """A new detokenizer, for the ids of one text as they arrive.

        shown_ids:       special ids that add their text like others, instead of nothing.
        is_continuation: the ids continue a text, so that their first spaces are kept. Without `token_bytes`,
                         they begin a new text even so.
        """
        if self._token_bytes is None:
            hidden_ids = self.special_token_ids - shown_ids

            def adds_text(token_id: int) -> bool:
                is_known = 0 <= token_id < NUM_IDS and self._raw.id_to_token(token_id) is not None
                return is_known and token_id not in hidden_ids

            return ContextDetokenizer(partial(self.decode, skip_special_tokens=False), adds_text)

        return BytesDetokenizer(self.shown_bytes(shown_ids), is_continuation=is_continuation)

    def shown_bytes(self, shown_ids: frozenset[int]) -> TokenBytes:
        """As `token_bytes`, with the text of these special ids."""
        if not shown_ids:
            return self.token_bytes

        table = self._tables.get(shown_ids)
        if table is None:
            table = self._tables[shown_ids] = TokenBytes(self._raw, self.special_token_ids - shown_ids)
        return table

    def special_ids_of(self, texts: Iterable[str]) -> frozenset[int]:
        """The ids of special tokens among these texts."""
        ids = {self._raw.token_to_id(text) for text in texts}
        return frozenset(token_id for token_id in ids if token_id in self.special_token_ids)

    def leading_added_token(self, text: str) -> str | None:
        """The longest added token that a text begins with; None if it begins with none."""
        added = (token.content for token in self._raw.get_added_tokens_decoder().values())
        return max((token for token in added if token and text.startswith(token)), key=len, default=None)

    def token_to_id(self, token: str) -> int | None:
        """The id of a token; None if it is not in the vocabulary."""
        return self._raw.token_to_id(token)


def _make_special(raw: tokenizers.Tokenizer, text: str) -> None:
    """Mark a token of the vocabulary as special."""
    token_id = raw.token_to_id(text)
    if token_id is None:
        return

    # Adding a token again replaces its entry, which may have rules about adjacent spaces: change that entry.
    known = raw.get_added_tokens_decoder()
    token = known[token_id] if token_id in known else tokenizers.AddedToken(text, normalized=False)
    token.special = True
    raw.add_special_tokens([token])


@contextmanager
def _no_panic(path: Path) -> Iterator[None]:
    """Turn all errors of the library into ModelLoadError, including its panics, which are not Exceptions."""
    try:
        yield
    except BaseException as error:
        if not _is_of_library(error):
            raise

        raise ModelLoadError(f"{path}: not a usable tokenizer.json: {error}") from error


def _is_of_library(error: BaseException) -> bool:
    """Whether an error may come from the tokenizers library, whose panics are not Exceptions."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def default_template(template: object, place: object) -> str | None:
    """The default chat template of a file. ModelLoadError as `named_templates`."""
    return named_templates(template, place).get("default")


def named_templates(template: object, place: object) -> dict[str, str]:
    """The chat templates of a file by name. A file has one, whose name is "default", or a list of named ones.

    Raises ModelLoadError that names `place` for any other value.
    """
    if template is None:
        return {}

    if isinstance(template, str):
        return {"default": template}

    entries = template if isinstance(template, list) else [None]
    found: dict[str, str] = {}
    for entry in entries:
        name, text = (
            (entry.get("name"), entry.get("template")) if isinstance(entry, Mapping) else (None, None)
        )
        if not isinstance(name, str) or not isinstance(text, str):
            expected = "text, or a list of names and texts"
            raise ModelLoadError(f"{place}: chat_template={short_repr(template)}: expected {expected}")

        found.setdefault(name, text)
    return found


def _token_text(config: Mapping[str, Any], name: str, place: Path) -> str | None:
    """The text of a token of tokenizer_config.json, which has it as text or as a dict with "content"."""
    token = config.get(name)
    text = token.get("content") if isinstance(token, Mapping) else token
    if not (isinstance(text, str) or token is None):
        raise ModelLoadError(f"{place}: {name}={short_repr(token)}: expected the text of a token")

    return text


class NoTexts(dict[int, str]):
    """The texts of token ids that have none."""

    def __missing__(self, token_id: int) -> str:
        return ""


class NoTokenizer(Tokenizer):
    """Stands in for the tokenizer of a model that has none: text cannot be encoded, and tokens have no text.

    place: the model's files, for messages.

    `encode` and `decode` raise RequestError.
    """

    has_text = False

    def __init__(self, place: str) -> None:
        self._place = place
        self.bos_token: None = None
        self.eos_token: None = None
        self.chat_template: None = None
        self.eos_token_id: None = None
        self.vocab_size = 0
        self.special_token_ids: frozenset[int] = frozenset()
        self._token_bytes = None
        self.token_texts: Mapping[int, str] = NoTexts()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        raise RequestError.of("prompt", text, f"token ids: {self._place} has no tokenizer")

    @property
    def fingerprint(self) -> str:
        return "none"

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        raise RequestError.of("ids", ids, f"a model with a tokenizer: {self._place} has none")

    def detokenizer(
        self, shown_ids: frozenset[int] = frozenset(), *, is_continuation: bool = False
    ) -> SilentDetokenizer:
        return SilentDetokenizer()

    def special_ids_of(self, texts: Iterable[str]) -> frozenset[int]:
        return frozenset()

    def leading_added_token(self, text: str) -> str | None:
        return None

    def token_to_id(self, token: str) -> int | None:
        return None
