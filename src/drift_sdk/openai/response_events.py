"""Answers of OpenAI's Responses: output items, and the events that build them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from typing import Any

from drift_sdk import BaseEngine, Chunk, Completion, DriftError, ToolCall
from drift_sdk.openai.answer_parts import AnswerParts, ToolUse
from drift_sdk.openai.errors import described
from drift_sdk.openai.generation import Event
from drift_sdk.openai.service import new_id
from drift_sdk.openai.token_log import TokenLog

__all__ = ["ResponseAnswer"]

PREFIXES = {"message": "msg_", "reasoning": "rs_", "function_call": "fc_"}
PARTS = {"message": "output_text", "reasoning": "reasoning_text"}
"""Type of an item -> type of the part with its text."""


class Item:
    """An output item that is being built: reasoning, a message, or a call.

    kind: its type. text: of its part, or the arguments of the call.
    """

    def __init__(self, kind: str, index: int, call: ToolCall | None = None) -> None:
        self.id = new_id(PREFIXES[kind])
        self.kind = kind
        self.index = index
        self.text = ""
        self.logprobs: list[dict[str, Any]] = []
        self._call = call

    @property
    def part(self) -> dict[str, Any]:
        """The part that has the text."""
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": self.text}

        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": self.logprobs}

    def json(self, status: str) -> dict[str, Any]:
        common = {"id": self.id, "type": self.kind, "status": status}
        parts = [self.part] if self.text or status != "in_progress" else []
        if self._call is not None:
            call = {"call_id": self._call.id, "name": self._call.name, "arguments": self.text}
            return {**common, **call}

        if self.kind == "reasoning":
            return {**common, "summary": [], "content": parts}

        return {**common, "role": "assistant", "content": parts}


class ResponseAnswer:
    """A response, as `generation.Answer` describes it.

    echoed: fields of the response that repeat the request.
    """

    def __init__(
        self,
        engine: BaseEngine,
        use: ToolUse,
        echoed: Mapping[str, Any],
        *,
        response_id: str,
        model: str,
        has_logprobs: bool,
        shows_cached_tokens: bool,
    ) -> None:
        self._parts = AnswerParts(use)
        self._log = TokenLog(engine) if has_logprobs else None
        self._is_split = False
        self._echoed = echoed
        self._common = {
            "id": response_id,
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
        }
        self._shows_cached_tokens = shows_cached_tokens
        self._items: list[Item] = []
        self._open: Item | None = None
        self._num_events = 0
        self.headers: Mapping[str, str] = {"x-request-id": response_id}

    def whole(self, completions: list[Completion]) -> dict[str, Any]:
        (completion,) = completions
        for _ in self._add(completion, completion):  # the events are not sent
            pass
        return self._response(completion)

    def begin(self, num_prompt_tokens: int) -> Iterator[Event]:
        for name in ("created", "in_progress"):
            yield self._event(f"response.{name}", response=self._response(None))

    def chunk(self, index: int, chunk: Chunk, completion: Completion | None) -> Iterator[Event]:
        yield from self._add(chunk, completion)

    def end(self, completions: list[Completion]) -> Iterator[Event]:
        response = self._response(completions[0])
        yield self._event(f"response.{response['status']}", response=response)

    def failed(self, error: DriftError) -> Iterator[Event]:
        found = described(error, {})
        failure = {"code": found.code or "server_error", "message": found.message}
        yield self._event(
            "response.failed", response={**self._response(None), "status": "failed", "error": failure}
        )

    def _add(self, part: Chunk | Completion, completion: Completion | None) -> Iterator[Event]:
        """Add a chunk, or all of a completion. completion: given with the last chunk."""
        text, calls = self._parts.read(part)
        logprobs = self._logprobs(part, completion)
        if part.reasoning:
            yield from self._write("reasoning", part.reasoning, [])
        if text or logprobs:
            yield from self._write("message", text, logprobs)
        for call in calls:
            yield from self._close("completed")
            yield from self._call(call)
        if completion is not None:
            is_whole = self._parts.ended(completion) != "length"
            yield from self._close("completed" if is_whole else "incomplete")
            if not self._items:  # an empty answer is a message too
                yield from self._write("message", "", [])
                yield from self._close("completed" if is_whole else "incomplete")

    def _write(self, kind: str, text: str, logprobs: list[dict[str, Any]]) -> Iterator[Event]:
        """Add text to the open item, or to a new one if that is of another kind."""
        if self._open is None or self._open.kind != kind:
            yield from self._close("completed")
            self._open = Item(kind, len(self._items))
            self._items.append(self._open)
            yield self._item_event("added", self._open, "in_progress")
            yield self._part_event("added", self._open)
        item = self._open
        item.text += text
        item.logprobs += logprobs
        more = {"logprobs": logprobs} if kind == "message" else {}
        if text or logprobs:
            yield self._event(f"response.{PARTS[kind]}.delta", **place(item), delta=text, **more)

    def _close(self, status: str) -> Iterator[Event]:
        """Complete the open item, if there is one."""
        item, self._open = self._open, None
        if item is not None:
            more = {"logprobs": item.logprobs} if item.kind == "message" else {}
            yield self._event(f"response.{PARTS[item.kind]}.done", **place(item), text=item.text, **more)
            yield self._part_event("done", item)
            yield self._item_event("done", item, status)

    def _call(self, call: ToolCall) -> Iterator[Event]:
        """The events of a call, which comes whole."""
        item = Item("function_call", len(self._items), call)
        self._items.append(item)
        yield self._item_event("added", item, "in_progress")
        item.text = json.dumps(call.arguments, ensure_ascii=False)
        where = {"item_id": item.id, "output_index": item.index}
        name = "response.function_call_arguments"
        yield self._event(f"{name}.delta", **where, delta=item.text)
        yield self._event(f"{name}.done", **where, name=call.name, arguments=item.text)
        yield self._item_event("done", item, "completed")

    def _logprobs(self, part: Chunk | Completion, completion: Completion | None) -> list[dict[str, Any]]:
        if self._log is None or part.logprobs is None:
            return []

        self._is_split |= bool(part.reasoning or part.tool_calls)
        taken = self._log.take(part.text, part.logprobs, completion, is_split=self._is_split)
        return [self._log.entry_json(entry) for _, entry in taken]

    def _response(self, completion: Completion | None) -> dict[str, Any]:
        """The response as it is now. completion: None before the end."""
        status, details = "in_progress", None
        if completion is not None:
            is_cut = self._parts.ended(completion) == "length"
            status = "incomplete" if is_cut else "completed"
            details = {"reason": "max_output_tokens"} if is_cut else None
        last = self._items[-1] if self._items else None
        output = [
            item.json("incomplete" if item is last and status == "incomplete" else "completed")
            for item in self._items
        ]
        return {
            **self._common,
            **self._echoed,
            "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,
            "error": None,
            "incomplete_details": details,
            "output": output,
            "usage": None if completion is None else self._usage(completion),
        }

    def _usage(self, completion: Completion) -> dict[str, Any]:
        usage = completion.usage
        cached = usage.cached_tokens if self._shows_cached_tokens else 0
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }

    def _item_event(self, name: str, item: Item, status: str) -> Event:
        where = {"output_index": item.index, "item": item.json(status)}
        return self._event(f"response.output_item.{name}", **where)

    def _part_event(self, name: str, item: Item) -> Event:
        return self._event(f"response.content_part.{name}", **place(item), part=item.part)

    def _event(self, kind: str, **fields: Any) -> Event:
        event = Event({"type": kind, "sequence_number": self._num_events, **fields}, kind)
        self._num_events += 1
        return event


def place(item: Item) -> dict[str, Any]:
    return {"item_id": item.id, "output_index": item.index, "content_index": 0}
