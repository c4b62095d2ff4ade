"""PoolState: the requests of a pool, and what it knows of its replicas."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from drift_sdk.base_engine import BaseEngine
from drift_sdk.driver.process_hooks import num_forks
from drift_sdk.pool.replica import Replica
from drift_sdk.pool.router import Router
from drift_sdk.pool.routing import Routing
from drift_sdk.pool.traffic import Traffic

__all__ = ["PoolState"]


class PoolState:
    """The state of a pool in one process. A forked child begins with a new one: the requests are those of its
    parent, whose threads may hold the locks.

    num_closing:  calls of `aclose` in progress.
    num_closed:   calls of `aclose` that have begun.
    num_starting: calls of `start` in progress.
    pauses:       for each pause, the functions that take it back.
    """

    def __init__(self, engines: Sequence[BaseEngine], routing: Routing) -> None:
        self._num_forks = num_forks()
        self.num_closing = self.num_closed = self.num_starting = 0
        self.is_started = False
        self.router = Router(len(engines), routing.affinity)
        self.replicas = [
            Replica(index, engine, load)
            for index, (engine, load) in enumerate(zip(engines, self.router.loads, strict=True))
        ]
        self.traffic = Traffic(self.replicas, self.router, replays=routing.replay)
        self.pauses: list[list[Callable[[], None]]] = []

    @property
    def is_from_parent(self) -> bool:
        """True in a forked child, if the parent made this state."""
        return self._num_forks != num_forks()
