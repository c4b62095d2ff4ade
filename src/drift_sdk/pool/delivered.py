"""Delivered: what a stream has been given, so that a replay gives it the rest."""

from __future__ import annotations

from msgspec.structs import replace

from drift_sdk.results import Chunk, Completion, TokenLogprobs, ToolCall

__all__ = ["Delivered", "ReplayDiverged"]


class ReplayDiverged(Exception):
    """A replay has other tokens than the stream has been given."""


class Delivered:
    """Tokens, text and tool calls that a stream has been given by all attempts at its request.

    A further attempt begins with `begin_again`; `rest_of` takes the chunks of an attempt in order and returns
    what is new in them. Chunks of two attempts may be cut differently.
    """

    __slots__ = (
        "_calls_seen",
        "_chars_seen",
        "_is_replayed",
        "_logprobs",
        "_num_chars",
        "_reasoning",
        "_text",
        "_tokens_seen",
        "_tool_calls",
        "token_ids",
    )

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._logprobs: list[TokenLogprobs] = []
        self._tool_calls: list[ToolCall] = []
        self._num_chars = [0, 0]  # of text and of reasoning
        self._is_replayed = False
        # Of the current attempt, until it has caught up:
        self._tokens_seen = self._calls_seen = 0
        self._chars_seen = [0, 0]

    @property
    def has_any(self) -> bool:
        """Whether the stream has been given anything."""
        return bool(self.token_ids or self._text)

    def begin_again(self) -> None:
        """An attempt begins that repeats everything."""
        self._is_replayed = self.has_any
        self._tokens_seen = self._calls_seen = 0
        self._chars_seen = [0, 0]

    def rest_of(self, chunk: Chunk) -> Chunk | None:
        """The part of a chunk that the stream does not have; None if it has all of it. Raises ReplayDiverged
        if the chunk has other tokens than the stream."""
        if self._is_replayed:
            rest = self._without_known(chunk)
            if rest is None:
                return None

            chunk = rest
        self.token_ids.extend(chunk.token_ids)
        self._text.append(chunk.text)
        self._reasoning.append(chunk.reasoning)
        self._num_chars[0] += len(chunk.text)
        self._num_chars[1] += len(chunk.reasoning)
        self._logprobs.extend(chunk.logprobs or ())
        self._tool_calls.extend(chunk.tool_calls)
        return chunk

    def completed(self, completion: Completion) -> Completion:
        """The completion of the last attempt, as that of the stream. A replay draws other ids for tool calls,
        and one that was cancelled may have fewer tokens. Its raw text is its own if text was
        split: chunks have no markers. Raises ReplayDiverged for other tokens."""
        if not self._is_replayed:
            return completion

        completion = replace(completion, tool_calls=tuple(self._tool_calls))
        token_ids = tuple(self.token_ids)
        if token_ids == completion.token_ids:
            return completion

        num_replayed = len(completion.token_ids)
        if completion.finish_reason != "cancelled" or token_ids[:num_replayed] != completion.token_ids:
            raise ReplayDiverged

        text, reasoning = "".join(self._text), "".join(self._reasoning)
        is_split = reasoning or self._tool_calls or completion.raw_text != completion.text
        return replace(
            completion,
            text=text,
            raw_text=completion.raw_text if is_split else text,
            reasoning=reasoning,
            token_ids=token_ids,
            logprobs=tuple(self._logprobs) if completion.logprobs is not None else None,
            usage=replace(completion.usage, completion_tokens=len(token_ids)),
        )

    def _without_known(self, chunk: Chunk) -> Chunk | None:
        """The part of a replayed chunk that is new."""
        num_known = max(0, min(len(self.token_ids) - self._tokens_seen, len(chunk.token_ids)))
        known = self.token_ids[self._tokens_seen : self._tokens_seen + num_known]
        if tuple(known) != chunk.token_ids[:num_known]:
            raise ReplayDiverged

        num_calls = max(0, min(len(self._tool_calls) - self._calls_seen, len(chunk.tool_calls)))
        rest = replace(
            chunk,
            token_ids=chunk.token_ids[num_known:],
            text=self._new_chars(0, chunk.text),
            reasoning=self._new_chars(1, chunk.reasoning),
            logprobs=chunk.logprobs[num_known:] if chunk.logprobs is not None else None,
            tool_calls=chunk.tool_calls[num_calls:],
        )
        self._tokens_seen += len(chunk.token_ids)
        self._calls_seen += len(chunk.tool_calls)
        is_new = rest.token_ids or rest.text or rest.reasoning or rest.tool_calls or rest.finish_reason
        return rest if is_new else None

    def _new_chars(self, kind: int, text: str) -> str:
        num_known = max(0, self._num_chars[kind] - self._chars_seen[kind])
        self._chars_seen[kind] += len(text)
        return text[num_known:]
