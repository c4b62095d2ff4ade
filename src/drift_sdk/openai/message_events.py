"""Answers of Anthropic's Messages: content blocks, and the events that build them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from drift_sdk import Chunk, Completion, DriftError, ToolCall
from drift_sdk.openai.answer_parts import AnswerParts, ToolUse
from drift_sdk.openai.errors import described, shaped
from drift_sdk.openai.generation import Event

__all__ = ["MessageAnswer"]

Kind = Literal["thinking", "text"]
EMPTY: dict[Kind, dict[str, str]] = {
    "thinking": {"type": "thinking", "thinking": "", "signature": ""},
    "text": {"type": "text", "text": ""},
}


class MessageAnswer:
    """A message, as `generation.Answer` describes it.

    shows_thinking: False = the text of thinking is left out.
    """

    def __init__(
        self,
        use: ToolUse,
        *,
        message_id: str,
        model: str,
        shows_thinking: bool,
        shows_cached_tokens: bool,
    ) -> None:
        self._parts = AnswerParts(use)
        self._common = {"id": message_id, "type": "message", "role": "assistant", "model": model}
        self._shows_thinking = shows_thinking
        self._shows_cached_tokens = shows_cached_tokens
        self._num_blocks = 0
        self._open: Kind | None = None
        self.headers: Mapping[str, str] = {"request-id": message_id, "x-request-id": message_id}

    def whole(self, completions: list[Completion]) -> dict[str, Any]:
        (completion,) = completions
        text, calls = self._parts.read(completion)
        content: list[dict[str, Any]] = []
        if completion.reasoning:
            content.append({**EMPTY["thinking"], "thinking": self._thought(completion.reasoning)})
        if text:
            content.append({**EMPTY["text"], "text": text})
        content += [call_json(call, call.arguments) for call in calls]
        ended = self._ended(completion)
        return {**self._common, "content": content, **ended, "usage": self._usage(completion)}

    def begin(self, num_prompt_tokens: int) -> Iterator[Event]:
        usage = {
            "input_tokens": num_prompt_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 0,
        }
        not_ended = {"stop_reason": None, "stop_sequence": None}
        yield event("message_start", message={**self._common, "content": [], **not_ended, "usage": usage})

    def chunk(self, index: int, chunk: Chunk, completion: Completion | None) -> Iterator[Event]:
        text, calls = self._parts.read(chunk)
        if chunk.reasoning:
            yield from self._write("thinking", self._thought(chunk.reasoning))
        if text:
            yield from self._write("text", text)
        for call in calls:
            yield from self._close()
            yield self._block_event("start", content_block=call_json(call, {}))
            written = json.dumps(call.arguments, ensure_ascii=False)
            yield self._block_event("delta", delta={"type": "input_json_delta", "partial_json": written})
            yield from self._stop()
        if completion is not None:
            yield from self._close()

    def end(self, completions: list[Completion]) -> Iterator[Event]:
        (completion,) = completions
        yield event("message_delta", delta=self._ended(completion), usage=self._usage(completion))
        yield event("message_stop")

    def failed(self, error: DriftError) -> Iterator[Event]:
        yield Event(shaped(described(error, {}), is_anthropic=True), "error")

    def _write(self, kind: Kind, text: str) -> Iterator[Event]:
        """Add text to the open block, or to a new one if that is of another kind."""
        if self._open != kind:
            yield from self._close()
            self._open = kind
            yield self._block_event("start", content_block=EMPTY[kind])
        if text:
            yield self._block_event("delta", delta={"type": f"{kind}_delta", kind: text})

    def _close(self) -> Iterator[Event]:
        """End the open block, if there is one."""
        if self._open is not None:
            self._open = None
            yield from self._stop()

    def _stop(self) -> Iterator[Event]:
        yield self._block_event("stop")
        self._num_blocks += 1

    def _block_event(self, name: str, **fields: Any) -> Event:
        return event(f"content_block_{name}", index=self._num_blocks, **fields)

    def _thought(self, text: str) -> str:
        return text if self._shows_thinking else ""

    def _ended(self, completion: Completion) -> dict[str, Any]:
        reason, found = self._parts.ended(completion), completion.stop_reason
        if reason == "tool_calls":
            return {"stop_reason": "tool_use", "stop_sequence": None}

        if reason == "length":
            is_full = found == "context"
            kind = "model_context_window_exceeded" if is_full else "max_tokens"
            return {"stop_reason": kind, "stop_sequence": None}

        if isinstance(found, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": found}

        return {"stop_reason": "end_turn", "stop_sequence": None}

    def _usage(self, completion: Completion) -> dict[str, Any]:
        """Token counts. In this protocol the tokens of the input do not include those that were cached."""
        usage = completion.usage
        cached = usage.cached_tokens if self._shows_cached_tokens else 0
        return {
            "input_tokens": usage.prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
        }


def call_json(call: ToolCall, arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": arguments}


def event(kind: str, **fields: Any) -> Event:
    return Event({"type": kind, **fields}, kind)
