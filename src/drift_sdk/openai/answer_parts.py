"""The parts of an answer that a protocol shows, from chunks and completions."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from drift_sdk import Chunk, Completion, ToolCall

__all__ = ["AnswerParts", "Ended", "ToolUse"]

Ended = Literal["stop", "length", "tool_calls"]


class ToolUse(Struct, frozen=True, kw_only=True):
    """What a request allows in the answer besides text.

    is_forced: the answer consists of tool calls, so that text after a call is one that was cut short.
    max_calls: further calls are left out; None = all are kept.
    """

    is_forced: bool = False
    max_calls: int | None = None


class AnswerParts:
    """Text and calls of one answer as they are shown."""

    def __init__(self, use: ToolUse) -> None:
        self._use = use
        self._has_calls = False

    def read(self, part: Chunk | Completion) -> tuple[str, list[ToolCall]]:
        """Text and calls of a chunk, or of a whole answer. Reasoning is shown as it is."""
        calls = [call for call in part.tool_calls if self._is_kept(call)]
        self._has_calls |= bool(calls)
        return "" if self._use.is_forced and self._has_calls else part.text, calls

    def ended(self, completion: Completion) -> Ended:
        """Why the answer ended. One that has all calls it may have is not cut short."""
        calls, is_cut = completion.tool_calls, completion.finish_reason == "length"
        is_full = self._use.max_calls is not None and len(calls) >= self._use.max_calls
        if calls and (not is_cut or is_full):
            return "tool_calls"

        return "length" if is_cut else "stop"

    def _is_kept(self, call: ToolCall) -> bool:
        return self._use.max_calls is None or call.index < self._use.max_calls
