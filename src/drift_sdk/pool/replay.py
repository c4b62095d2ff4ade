"""A request on its way to one replica or, after a failure, to another, and its updates on their way back.

`Delivered` is what a stream has been given, so that a replay gives it the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from msgspec.structs import replace

from drift_sdk.driver.loops import LoopPoster
from drift_sdk.driver.stream_updates import Update
from drift_sdk.errors import DriftError, EngineClosed, ExecutorError
from drift_sdk.pool.routing import PromptBlocks
from drift_sdk.results import Chunk, Completion, TokenLogprobs, ToolCall
from drift_sdk.serving import Submission


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


class RoutePlanner(Protocol):
    """The part of a pool that decides where requests go."""

    def grown(self, attempt: Attempt, num_tokens: int) -> None:
        """A request has got so many tokens."""

    def left(self, attempt: Attempt) -> None:
        """A request has left a replica. Called once for each attempt, from any thread."""

    def finished(self, route: Route) -> None:
        """A request has ended for its stream. From any thread; may be called again."""

    def recover(self, attempt: Attempt, error: DriftError) -> DriftError | None:
        """Have a request that a replica has ended with this error go on elsewhere. Returns the error for its
        stream if that is not possible, or if the error is the request's own."""


class Route:
    """A request of a pool. `attempt` is what runs now; updates of earlier ones are dropped.

    num_attempts: replicas that it was given to, one after the other.
    """

    def __init__(self, submission: Submission, blocks: PromptBlocks, planner: RoutePlanner) -> None:
        self.submission = submission
        self.blocks = blocks
        self.planner = planner
        self.delivered: Delivered = Delivered()
        self.attempt: Attempt | None = None
        self.num_attempts: int = 0
        self._is_cancelled = False

    @property
    def is_cancelled(self) -> bool:
        return self._is_cancelled

    def cancel(self) -> None:
        """End the request; from any thread."""
        self._is_cancelled = True
        attempt = self.attempt
        if attempt is not None:
            attempt.cancel()

    def follow(self, attempt: Attempt, cancel: Callable[[], None]) -> None:
        """Count the updates of this attempt from now on. cancel: ends it."""
        attempt.cancel = cancel
        self.num_attempts += 1
        self.delivered.begin_again()
        self.attempt = attempt
        if self._is_cancelled:  # meanwhile, by another thread
            cancel()


class Attempt:
    """A request at one replica: it receives the replica's updates and forwards them to the stream.

    index:      of the replica.
    num_tokens: of the prompt, estimated, and of the completion so far.
    """

    __slots__ = ("_is_over", "cancel", "index", "num_tokens", "route")

    def __init__(self, route: Route, index: int) -> None:
        self.route: Route = route
        self.index: int = index
        self.num_tokens: int = route.blocks.num_tokens
        self.cancel: Callable[[], None] = do_nothing
        self._is_over = False

    @property
    def loop_poster(self) -> LoopPoster:
        return self.route.submission.stream_updates.loop_poster

    @property
    def awaits_acceptance(self) -> bool:
        return self.route.submission.stream_updates.awaits_acceptance

    @property
    def num_prompt_tokens(self) -> int | None:
        return self.route.submission.stream_updates.num_prompt_tokens

    @num_prompt_tokens.setter
    def num_prompt_tokens(self, value: int | None) -> None:
        self.route.submission.stream_updates.num_prompt_tokens = value

    def deliver(self, update: Update) -> None:
        """Forward an update, or have the request go on elsewhere. Runs on the stream's event loop."""
        route = self.route
        if self._is_over or route.attempt is not self:
            return

        chunk, completion, error = update.chunk, update.completion, update.error
        if chunk is not None and chunk.token_ids:
            self.num_tokens += len(chunk.token_ids)
            route.planner.grown(self, len(chunk.token_ids))
        if completion is not None or error is not None:
            self.leave()
        try:
            if chunk is not None:
                chunk = route.delivered.rest_of(chunk)
            if completion is not None:
                completion = route.delivered.completed(completion)
        except ReplayDiverged:
            self.cancel()
            self.leave()
            chunk, completion, error = None, None, diverged(route)
        receiver = route.submission.stream_updates
        if isinstance(error, DriftError) and update.error is not None:
            error = route.planner.recover(self, error)
            if error is None:  # the last chunk of a remote engine may come with its error
                if chunk is not None:
                    receiver.deliver(Update(stream_updates=receiver, chunk=chunk))
                return

        if completion is not None or error is not None:
            route.planner.finished(route)
        is_wake_up = update.chunk is None and completion is None and error is None
        if chunk is not None or completion is not None or error is not None or is_wake_up:
            receiver.deliver(Update(stream_updates=receiver, chunk=chunk, completion=completion, error=error))

    def desert(self) -> None:
        self.leave()
        self.route.planner.finished(self.route)

    def leave(self) -> None:
        """The replica has ended the request, or is of no interest any more."""
        if not self._is_over:
            self._is_over = True
            self.route.planner.left(self)


def do_nothing() -> None:
    """Cancels an attempt that has not been submitted yet."""


def is_loss(error: DriftError) -> bool:
    """True if an error of a request means that its replica has failed or was closed. It may have been started
    again meanwhile."""
    return isinstance(error, EngineClosed) or (isinstance(error, ExecutorError) and error.ends_engine)


def diverged(route: Route) -> ExecutorError:
    """The error of a stream whose replay has other tokens."""
    return ExecutorError(
        f"request {route.submission.request_id} was replayed after a failure, and the replica has generated "
        f"other tokens than the {len(route.delivered.token_ids)} that its stream has",
        ends_engine=False,
    )
