"""The text of each token id by itself."""

from __future__ import annotations

import tokenizers

from drift_sdk.text.token_bytes import NUM_IDS, TokenBytes

__all__ = ["TokenTexts"]


class TokenTexts(dict[int, str]):
    """Mapping of token id to its text. Entries are made when first looked up and never change, so threads may
    share a table.

    Bytes that are no whole character become U+FFFD. Special tokens are spelled out, although they add nothing
    to a text. Ids outside the vocabulary have no text.
    """

    def __init__(self, raw: tokenizers.Tokenizer, token_bytes: TokenBytes) -> None:
        super().__init__()
        self._raw = raw
        self._token_bytes = token_bytes

    def __missing__(self, token_id: int) -> str:
        data = self._token_bytes[token_id]
        if not data:
            spelled = self._raw.id_to_token(token_id) if 0 <= token_id < NUM_IDS else None
            return spelled or ""

        self[token_id] = text = data.decode(errors="replace")
        return text
