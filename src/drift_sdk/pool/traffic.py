"""Traffic: the live requests of a pool, their replicas, and where they go when a replica fails."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from drift_sdk.errors import DriftError, EngineClosed, ExecutorError, QueueFull, ReplicaFailed, RequestError
from drift_sdk.pool.prompt_blocks import PromptBlocks
from drift_sdk.pool.replica import Replica
from drift_sdk.pool.router import Router
from drift_sdk.pool.routes import Attempt, Route, is_loss
from drift_sdk.submission import Submission

__all__ = ["Traffic"]

MAX_ATTEMPTS = 3
"""Most replicas that a request is given to, so that one that makes replicas fail does not end all of them."""

log: logging.Logger = logging.getLogger("drift_sdk")


class Traffic:
    """Submits requests to replicas. Used from any thread.

    replays:      whether started requests are run again.
    is_closing:   set while the pool ends its requests.
    num_rejected: requests that were rejected with QueueFull: no replica took them.
    """

    def __init__(self, replicas: Sequence[Replica], router: Router, *, replays: bool) -> None:
        self._replicas = replicas
        self._router = router
        self._replays = replays
        self.is_closing = False
        self.num_rejected: int = 0
        self._lock = threading.RLock()
        self._live: dict[str, list[Route]] = {}  # by request_id and by group_id

    def submit(self, submissions: Sequence[Submission]) -> list[Callable[[], None]]:
        """Submit requests of one prompt to the best replica that takes them, all or none."""
        blocks = PromptBlocks.of(submissions[0].prompt, submissions[0].params.cache_salt)
        routes = [Route(submission, blocks, self) for submission in submissions]
        self._add(routes)
        try:
            self._place(routes)
        except BaseException as error:
            for route in routes:
                self.finished(route)
            if isinstance(error, QueueFull):
                with self._lock:
                    self.num_rejected += len(routes)
            raise

        return [route.cancel for route in routes]

    def cancel(self, request_id: str) -> bool:
        """Cancel the live requests of this id; whether there are such."""
        with self._lock:
            routes = list(self._live.get(request_id, ()))
        for route in routes:
            route.cancel()
        return bool(routes)

    def grown(self, attempt: Attempt, num_tokens: int) -> None:
        self._router.grow(attempt.index, num_tokens)

    def left(self, attempt: Attempt) -> None:
        if self._router.end(attempt.index, attempt.num_tokens):
            self._replicas[attempt.index].became_idle()

    def recover(self, attempt: Attempt, error: DriftError) -> DriftError | None:
        """Have a request go on elsewhere; see `RoutePlanner`."""
        replica, route = self._replicas[attempt.index], attempt.route
        is_refused = isinstance(error, QueueFull)  # by a replica that refuses late
        if self.is_closing or not (is_refused or is_loss(error)):
            return error

        is_started = route.delivered.has_any
        if not is_refused:
            replica.num_lost += 1
            log.debug("%s has lost replica %d: %r", route.submission.request_id, replica.index, error)
        if not any(each.is_in_service for each in self._replicas):
            return error

        if route.is_cancelled or (is_started and not self._replays) or route.num_attempts >= MAX_ATTEMPTS:
            return error if is_refused else replica_failed(attempt, error)

        try:
            self._place([route], avoided=attempt.index)
        except DriftError as refusal:
            refusal.__cause__ = error
            return refusal

        replica.num_replayed += is_started
        replica.num_moved += not is_started
        return None

    def _place(self, routes: Sequence[Route], avoided: int | None = None) -> None:
        """Give routes of one prompt to a replica. avoided: the last one to be tried. Raises the error of the
        replicas if none takes them."""
        found: DriftError = EngineClosed("all replicas of the pool are drained")
        blocks = routes[0].blocks
        indices = [replica.index for replica in self._replicas if replica.is_in_service]
        if not indices:  # an engine that is not open says why
            indices = [replica.index for replica in self._replicas if not replica.is_drained][:1]
        for index in sorted(self._router.order(blocks, indices), key=lambda index: index == avoided):
            try:
                self._give(routes, index)
                return
            except (QueueFull, EngineClosed, ExecutorError) as error:
                found = error if not isinstance(found, QueueFull) else found

        raise found

    def _give(self, routes: Sequence[Route], index: int) -> None:
        """Submit routes to a replica. They count before that, so that its idleness is noticed afterwards."""
        attempts = [Attempt(route, index) for route in routes]
        for route in routes:
            self._router.begin(index, route.blocks)
        submissions = [
            replace(attempt.route.submission, stream_updates=attempt, group_id=group_of(routes, attempt))
            for attempt in attempts
        ]
        try:
            if self._replicas[index].is_drained:  # since it was chosen: `drain` has not waited for these
                raise EngineClosed(f"replica {index} is drained")

            cancels = self._replicas[index].engine._enter(submissions)
        except BaseException:
            for attempt in attempts:
                if self._router.end(index, attempt.num_tokens):
                    self._replicas[index].became_idle()
            raise

        for route, attempt, cancel in zip(routes, attempts, cancels, strict=True):
            self._router.remember(index, route.blocks)
            route.follow(attempt, cancel)

    def _add(self, routes: Sequence[Route]) -> None:
        """Make routes live, all or none: RequestError if a live request has one of their ids."""
        with self._lock:
            taken = next((name for route in routes for name in names_of(route) if name in self._live), None)
            if taken is not None:
                raise RequestError.of("request_id", taken, "an id that no live request has")

            for route in routes:
                for name in names_of(route):
                    self._live.setdefault(name, []).append(route)

    def finished(self, route: Route) -> None:
        with self._lock:
            for name in names_of(route):
                found = self._live.get(name, [])
                if route in found:
                    found.remove(route)
                if not found:
                    self._live.pop(name, None)


def names_of(route: Route) -> tuple[str, ...]:
    """The ids that a request can be found by."""
    submission = route.submission
    group_id = submission.group_id
    return (submission.request_id,) if group_id is None else (submission.request_id, group_id)


def group_of(routes: Sequence[Route], attempt: Attempt) -> str | None:
    """The name of samples that a replica gets together; one that moves alone is no group there."""
    return attempt.route.submission.group_id if len(routes) > 1 else None


def replica_failed(attempt: Attempt, cause: DriftError) -> ReplicaFailed:
    route = attempt.route
    num_tokens = len(route.delivered.token_ids)
    times = f", the last of {route.num_attempts} that failed," if route.num_attempts > 1 else ""
    error = ReplicaFailed(
        f"replica {attempt.index}{times} has failed after {num_tokens} tokens of this request: {cause}",
        replica=attempt.index,
        num_tokens=num_tokens,
    )
    error.__cause__ = cause
    return error
