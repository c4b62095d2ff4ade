"""A model without a tokenizer, which takes and gives token ids alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from drift_sdk.errors import RequestError
from drift_sdk.text.detokenizer import SilentDetokenizer
from drift_sdk.text.tokenizer import Tokenizer

__all__ = ["NoTokenizer"]


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
