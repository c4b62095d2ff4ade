"""Completions and chunks in the shapes of OpenAI's chat and completions protocol."""

import json
from collections.abc import Sequence
from typing import Any

from drift_sdk import Chunk, Completion, Engine, TokenLogprobs, ToolCall, Usage


class TokenLog:
    """The log-probabilities of a text's tokens, each with its text, its bytes and its offset in the text.

    Tokens that do not belong to the text (the end of sequence, a stop string) are left out. An entry is
    therefore kept back until the text in which it begins has been sent.
    """

    def __init__(self, engine: Engine) -> None:
        self._tokenizer = engine.tokenizer
        self._detokenizer = engine.tokenizer.detokenizer()
        self._waiting: list[tuple[int, TokenLogprobs]] = []
        self._num_generated = 0
        self._num_sent = 0

    def take(
        self,
        text: str,
        entries: Sequence[TokenLogprobs],
        finish_reason: str | None,
        *,
        is_split: bool = False,
    ) -> list[tuple[int, TokenLogprobs]]:
        """Add the entries of a chunk; returns those that can be sent with its text, with their offsets.
        is_split: the text is not all that was generated, so that it does not show where it ends."""
        self._num_sent += len(text)
        for entry in entries:
            self._waiting.append((self._num_generated, entry))
            self._num_generated += len(self._detokenizer.push([entry.token_id]))
        if is_split:
            self._num_sent = self._num_generated
        if finish_reason in ("length", "cancelled"):
            ready = len(self._waiting)
        else:
            ready = sum(offset < self._num_sent for offset, _ in self._waiting)
        taken, self._waiting = self._waiting[:ready], self._waiting[ready:]
        return taken

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes of a token, which may be a part of a character. Special tokens are spelled out."""
        data = self._tokenizer.token_bytes[token_id]
        return data or self._tokenizer.decode([token_id], skip_special_tokens=False).encode()

    def text_of(self, token_id: int) -> str:
        return self.bytes_of(token_id).decode(errors="replace")


class ChatAnswer:
    """One choice of the chat endpoint."""

    kind, chunk_kind, id_prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def __init__(self, engine: Engine) -> None:
        self._log = TokenLog(engine)
        self._is_first = True
        self._is_split = False

    def piece(self, chunk: Chunk, completion: Completion | None) -> dict[str, Any]:
        """The JSON of a chunk. completion: given with the last chunk."""
        delta: dict[str, Any] = {"role": "assistant"} if self._is_first else {}
        if chunk.reasoning:
            delta["reasoning_content"] = chunk.reasoning
        if chunk.text or not (chunk.reasoning or chunk.tool_calls):
            delta["content"] = chunk.text
        if chunk.tool_calls:
            delta["tool_calls"] = [{"index": call.index, **call_json(call)} for call in chunk.tool_calls]
        self._is_first = False
        return {
            "delta": delta,
            "logprobs": self._logprobs(chunk, chunk.logprobs),
            "finish_reason": finish_reason(completion) if completion is not None else None,
        }

    def whole(self, completion: Completion) -> dict[str, Any]:
        """The JSON of an answer that is not streamed."""
        message: dict[str, Any] = {"role": "assistant", "content": completion.text, "refusal": None}
        if completion.reasoning:
            message["reasoning_content"] = completion.reasoning
        if completion.tool_calls:
            calls = [call_json(call) for call in completion.tool_calls]
            message |= {"content": completion.text or None, "tool_calls": calls}
        return {
            "message": message,
            "logprobs": self._logprobs(completion, completion.logprobs),
            "finish_reason": finish_reason(completion),
        }

    def _logprobs(
        self, part: Chunk | Completion, entries: Sequence[TokenLogprobs] | None
    ) -> dict[str, Any] | None:
        if entries is None:
            return None

        self._is_split |= bool(part.reasoning or part.tool_calls)
        taken = self._log.take(part.text, entries, part.finish_reason, is_split=self._is_split)
        content = [
            {
                **self._token(entry.token_id, entry.logprob),
                "top_logprobs": [self._token(token_id, logprob) for token_id, logprob in entry.top],
            }
            for _, entry in taken
        ]
        return {"content": content, "refusal": None}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        data = self._log.bytes_of(token_id)
        return {"token": data.decode(errors="replace"), "logprob": logprob, "bytes": list(data)}


class TextAnswer:
    """One choice of the completions endpoint. Offsets of tokens count from the beginning of the text."""

    kind, chunk_kind, id_prefix = "text_completion", "text_completion", "cmpl"

    def __init__(self, engine: Engine) -> None:
        self._log = TokenLog(engine)

    def piece(self, chunk: Chunk, completion: Completion | None) -> dict[str, Any]:
        logprobs = self._logprobs(chunk.text, chunk.logprobs, chunk.finish_reason)
        return {"text": chunk.text, "logprobs": logprobs, "finish_reason": chunk.finish_reason}

    def whole(self, completion: Completion) -> dict[str, Any]:
        logprobs = self._logprobs(completion.text, completion.logprobs, completion.finish_reason)
        return {"text": completion.text, "logprobs": logprobs, "finish_reason": completion.finish_reason}

    def _logprobs(
        self, text: str, entries: Sequence[TokenLogprobs] | None, reason: str | None
    ) -> dict[str, Any] | None:
        if entries is None:
            return None

        taken = self._log.take(text, entries, reason)
        text_of = self._log.text_of
        return {
            "tokens": [text_of(entry.token_id) for _, entry in taken],
            "token_logprobs": [entry.logprob for _, entry in taken],
            "top_logprobs": [{text_of(token): value for token, value in entry.top} for _, entry in taken],
            "text_offset": [offset for offset, _ in taken],
        }


def finish_reason(completion: Completion) -> str:
    is_call = completion.tool_calls and completion.finish_reason == "stop"
    return "tool_calls" if is_call else completion.finish_reason


def call_json(call: ToolCall) -> dict[str, Any]:
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def usage(counts: Sequence[Usage], choices_per_prompt: int) -> dict[str, Any]:
    """Token counts of all choices together. A prompt with several choices counts once."""
    prompt_tokens = sum(count.prompt_tokens for count in counts[::choices_per_prompt])
    completion_tokens = sum(count.completion_tokens for count in counts)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {
            "cached_tokens": sum(count.cached_tokens for count in counts[::choices_per_prompt])
        },
    }
