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


class ChatAnswer:
    """One choice of the chat endpoint."""

    kind, chunk_kind, id_prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def __init__(self, engine: Engine, *, is_forced: bool = False, max_calls: int | None = None) -> None:
        """is_forced: the answer consists of tool calls, so that text after a call is one that was cut short.
        max_calls: further calls are left out; None = all are kept."""
        self._log = TokenLog(engine)
        self._is_forced = is_forced
        self._max_calls = max_calls
        self._is_first = True
        self._is_split = False
        self._has_calls = False

    def pieces(self, chunk: Chunk, completion: Completion | None) -> list[dict[str, Any]]:
        """The JSON of a chunk, in one piece or two, or none if nothing of it is shown: tokens of a tool call,
        or a part of a character. completion: given with the last chunk.

        Clients take a call as whole when a piece follows it, so the reason to finish comes by itself then."""
        delta: dict[str, Any] = {"role": "assistant"} if self._is_first else {}
        self._is_first = False
        calls = self._kept(chunk.tool_calls)
        self._has_calls |= bool(calls)
        text = "" if self._is_forced and self._has_calls else chunk.text
        if chunk.reasoning:
            delta["reasoning_content"] = chunk.reasoning
        if text or not (chunk.reasoning or calls):
            delta["content"] = text
        if calls:
            delta["tool_calls"] = [{"index": call.index, **call_json(call)} for call in calls]
        logprobs = self._logprobs(chunk, completion)
        piece = {"delta": delta, "logprobs": logprobs, "finish_reason": None}
        if completion is None:
            return [piece] if delta != {"content": ""} or logprobs is not None else []

        ended = self._ended(completion)
        return [piece, {"delta": {}, "logprobs": None, **ended}] if calls else [{**piece, **ended}]

    def whole(self, completion: Completion) -> dict[str, Any]:
        """The JSON of an answer that is not streamed."""
        calls = self._kept(completion.tool_calls)
        message: dict[str, Any] = {"role": "assistant", "content": completion.text, "refusal": None}
        if completion.reasoning:
            message["reasoning_content"] = completion.reasoning
        if calls:
            message["content"] = None if self._is_forced else completion.text or None
            message["tool_calls"] = [call_json(call) for call in calls]
        logprobs = self._logprobs(completion, completion)
        return {"message": message, "logprobs": logprobs, **self._ended(completion)}

    def _kept(self, calls: Sequence[ToolCall]) -> list[ToolCall]:
        return [call for call in calls if self._max_calls is None or call.index < self._max_calls]

    def _ended(self, completion: Completion) -> dict[str, Any]:
        """The reasons why an answer ended. One that has all calls it may have is not cut short."""
        calls, reason = completion.tool_calls, completion.finish_reason
        is_full = self._max_calls is not None and len(calls) >= self._max_calls
        is_call = bool(calls) and (reason == "stop" or (reason == "length" and is_full))
        return {**ended_json(completion), **({"finish_reason": "tool_calls"} if is_call else {})}

    def _logprobs(self, part: Chunk | Completion, completion: Completion | None) -> dict[str, Any] | None:
        if part.logprobs is None:
            return None

        self._is_split |= bool(part.reasoning or part.tool_calls)
        taken = self._log.take(part.text, part.logprobs, completion, is_split=self._is_split)
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

    def pieces(self, chunk: Chunk, completion: Completion | None) -> list[dict[str, Any]]:
        logprobs = self._logprobs(chunk, completion)
        ended = ended_json(completion) if completion is not None else {"finish_reason": None}
        return [{"text": chunk.text, "logprobs": logprobs, **ended}]

    def whole(self, completion: Completion) -> dict[str, Any]:
        logprobs = self._logprobs(completion, completion)
        return {"text": completion.text, "logprobs": logprobs, **ended_json(completion)}

    def _logprobs(self, part: Chunk | Completion, completion: Completion | None) -> dict[str, Any] | None:
        if part.logprobs is None:
            return None

        taken = self._log.take(part.text, part.logprobs, completion)
        text_of = self._log.text_of
        return {
            "tokens": [text_of(entry.token_id) for _, entry in taken],
            "token_logprobs": [entry.logprob for _, entry in taken],
            "top_logprobs": [{text_of(token): value for token, value in entry.top} for _, entry in taken],
            "text_offset": [offset for offset, _ in taken],
        }


def ended_json(completion: Completion) -> dict[str, Any]:
    """The reasons why a text ended. `stop_reason`, which is not in OpenAI's protocol, is the stop string or
    token, or "context" if the context was full."""
    return {"finish_reason": completion.finish_reason, "stop_reason": completion.stop_reason}


def call_json(call: ToolCall) -> dict[str, Any]:
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def usage(counts: Sequence[Usage], *, choices_per_prompt: int, shows_cached_tokens: bool) -> dict[str, Any]:
    """Token counts of all choices together. A prompt with several choices counts once."""
    prompt_tokens = sum(count.prompt_tokens for count in counts[::choices_per_prompt])
    completion_tokens = sum(count.completion_tokens for count in counts)
    found: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
    if shows_cached_tokens:
        cached_tokens = sum(count.cached_tokens for count in counts[::choices_per_prompt])
        found["prompt_tokens_details"] = {"cached_tokens": cached_tokens}
    return found
