"""Routes: a request on its way to one replica or, after a failure, to another, and its updates on their way
back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from drift_sdk.driver.loops import LoopPoster
from drift_sdk.driver.stream_updates import Update
from drift_sdk.errors import DriftError, EngineClosed, ExecutorError
from drift_sdk.pool.delivered import Delivered, ReplayDiverged
from drift_sdk.pool.prompt_blocks import PromptBlocks
from drift_sdk.submission import Submission

__all__ = ["Attempt", "Route", "RoutePlanner"]


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
