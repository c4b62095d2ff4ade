"""Completions and chunks in the shapes of OpenAI's chat and completions protocol."""

import json
from collections.abc import Sequence
from typing import Any

from drift_sdk import Chunk, Completion, Engine, TokenLogprobs, Usage

TAG = "<tool_call>"
BARE_CALLS = ("{", "[", "<|python_tag|>")


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
        self, text: str, entries: Sequence[TokenLogprobs], finish_reason: str | None
    ) -> list[tuple[int, TokenLogprobs]]:
        """Add the entries of a chunk; returns those that can be sent with its text, with their offsets."""
        self._num_sent += len(text)
        for entry in entries:
            self._waiting.append((self._num_generated, entry))
            self._num_generated += len(self._detokenizer.push([entry.token_id]))
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
    """One choice of the chat endpoint.

    has_tools: hold back text that may be the beginning of a tool call until it is known not to be one.
    """

    kind, chunk_kind, id_prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def __init__(self, engine: Engine, choice_id: str, *, has_tools: bool = False) -> None:
        self._log = TokenLog(engine)
        self._id = choice_id
        self._has_tools = has_tools
        self._text = ""
        self._num_sent = 0
        self._is_first = True

    def piece(self, chunk: Chunk, completion: Completion | None) -> dict[str, Any]:
        """The JSON of a chunk. completion: given with the last chunk."""
        logprobs = self._logprobs(chunk.text, chunk.logprobs, chunk.finish_reason)
        self._text += chunk.text
        calls = self._calls(completion) if completion is not None else []
        end = len(self._text)
        if calls:
            end = max(len(content_before_calls(self._text) or ""), self._num_sent)
        elif completion is None and self._has_tools:
            end = max(end - num_held_back(self._text), self._num_sent)
        delta: dict[str, Any] = {"role": "assistant"} if self._is_first else {}
        if end > self._num_sent or not calls:
            delta["content"] = self._text[self._num_sent : end]
        if calls:
            delta["tool_calls"] = [{"index": index, **call} for index, call in enumerate(calls)]
        self._num_sent, self._is_first = end, False
        reason = finish_reason(completion) if completion is not None else None
        return {"delta": delta, "logprobs": logprobs, "finish_reason": reason}

    def whole(self, completion: Completion) -> dict[str, Any]:
        """The JSON of an answer that is not streamed."""
        message: dict[str, Any] = {"role": "assistant", "content": completion.text, "refusal": None}
        if calls := self._calls(completion):
            message |= {"content": content_before_calls(completion.text), "tool_calls": calls}
        return {
            "message": message,
            "logprobs": self._logprobs(completion.text, completion.logprobs, completion.finish_reason),
            "finish_reason": finish_reason(completion),
        }

    def _calls(self, completion: Completion) -> list[dict[str, Any]]:
        return [
            {
                "id": f"call_{self._id}_{index}",
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
            }
            for index, call in enumerate(completion.tool_calls)
        ]

    def _logprobs(
        self, text: str, entries: Sequence[TokenLogprobs] | None, reason: str | None
    ) -> dict[str, Any] | None:
        if entries is None:
            return None

        content = [
            {
                **self._token(entry.token_id, entry.logprob),
                "top_logprobs": [self._token(token_id, logprob) for token_id, logprob in entry.top],
            }
            for _, entry in self._log.take(text, entries, reason)
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


def content_before_calls(text: str) -> str | None:
    """The text before the first tool call; None if there is none."""
    thought, end, answer = text.rpartition("</think>")
    before = answer.partition(TAG)[0] if TAG in answer else ""
    return f"{thought}{end}{before}".rstrip() or None


def num_held_back(text: str) -> int:
    """Number of characters at the end of a text that are, or may be the beginning of, a tool call."""
    answer = text.rpartition("</think>")[2]
    stripped = answer.lstrip()
    if stripped.startswith(BARE_CALLS) or any(start.startswith(stripped) for start in BARE_CALLS):
        return len(answer)

    if TAG in answer:
        return len(answer) - answer.index(TAG)

    return next((n for n in range(len(TAG) - 1, 0, -1) if answer.endswith(TAG[:n])), 0)


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
