"""Log-probabilities of the tokens of a text, with their texts, bytes and offsets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from drift_sdk import BaseEngine, Completion, TokenLogprobs

__all__ = ["TokenLog"]


class TokenLog:
    """The log-probabilities of a text's tokens, each with its text, its bytes and its offset in the text.

    Tokens that do not belong to the text (the end of sequence, a stop string) are left out. An entry is
    therefore kept back until the text in which it begins has been sent.
    """

    def __init__(self, engine: BaseEngine) -> None:
        self._tokenizer = engine.tokenizer
        self._detokenizer = engine.tokenizer.detokenizer()
        self._waiting: list[tuple[int, TokenLogprobs]] = []
        self._num_generated = 0
        self._num_sent = 0

    def take(
        self,
        text: str,
        entries: Sequence[TokenLogprobs],
        completion: Completion | None,
        *,
        is_split: bool = False,
    ) -> list[tuple[int, TokenLogprobs]]:
        """Add the entries of a chunk; returns those that can be sent with its text, with their offsets.

        completion: given with the last chunk. is_split: the text is not all that was generated, so that it
        does not show where it ends."""
        self._num_sent += len(text)
        for entry in entries:
            self._waiting.append((self._num_generated, entry))
            self._num_generated += len(self._detokenizer.push([entry.token_id]))
        if is_split:
            self._num_sent = self._num_generated
        if completion is None or (
            completion.finish_reason == "stop" and isinstance(completion.stop_reason, str)
        ):
            ready = sum(offset < self._num_sent for offset, _ in self._waiting)
        else:
            ready = len(self._waiting) - isinstance(completion.stop_reason, int)
        taken, self._waiting = self._waiting[:ready], self._waiting[ready:]
        return taken

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes of a token, which may be a part of a character. Special tokens are spelled out."""
        tokenizer = self._tokenizer
        data = tokenizer.token_bytes[token_id] if tokenizer.has_token_bytes else b""
        return data or self._tokenizer.decode([token_id], skip_special_tokens=False).encode()

    def text_of(self, token_id: int) -> str:
        return self.bytes_of(token_id).decode(errors="replace")

    def entry_json(self, entry: TokenLogprobs) -> dict[str, Any]:
        """An entry as the chat and Responses protocols write it."""
        top = [self._token_json(token_id, logprob) for token_id, logprob in entry.top]
        return {**self._token_json(entry.token_id, entry.logprob), "top_logprobs": top}

    def _token_json(self, token_id: int, logprob: float) -> dict[str, Any]:
        data = self.bytes_of(token_id)
        return {"token": data.decode(errors="replace"), "logprob": logprob, "bytes": list(data)}
