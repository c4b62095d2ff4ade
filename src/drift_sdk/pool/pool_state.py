"""PoolState: the requests of a pool, and what it knows of its replicas."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from drift_sdk.base_engine import BaseEngine
from drift_sdk.driver.process_hooks import num_forks
from drift_sdk.pool.replica import Replica
from drift_sdk.pool.router import Router
from drift_sdk.pool.routing import Routing
from drift_sdk.pool.traffic import Traffic

__all__ = ["PoolPause", "PoolState"]


class PoolPause:
    """A pause of the replicas of a pool, also of those that are started while it lasts."""

    def __init__(self) -> None:
        self._undos: list[Callable[[], None]] = []
        self._has_ended = False

    async def add(self, engine: BaseEngine) -> None:
        """Pause a replica, unless the pause ends before that is done."""
        undo = await engine._pause()
        if self._has_ended:
            undo()
        else:
            self._undos.append(undo)

    def end(self) -> None:
        """Pause no further replica. Those that are paused resume by `resume`."""
        self._has_ended = True

    def undo(self) -> None:
        """Take the pauses of all replicas back."""
        self.end()
        for undo in self._undos:
            undo()


class PoolState:
    """The state of a pool in one process. A forked child begins with a new one: the requests are those of its
    parent, whose threads may hold the locks.

    num_closing:  calls of `aclose` in progress.
    num_closed:   calls of `aclose` that have begun.
    num_starting: calls of `start` in progress.
    pauses:       those that have not ended.
    is_asleep:    whether the replicas are to sleep.
    """

    def __init__(self, engines: Sequence[BaseEngine], routing: Routing) -> None:
        self._num_forks = num_forks()
        self.num_closing = self.num_closed = self.num_starting = 0
        self.is_started = False
        self.is_asleep: bool = False
        self.router: Router = Router(len(engines), routing.affinity)
        self.replicas: list[Replica] = [
            Replica(index, engine, load)
            for index, (engine, load) in enumerate(zip(engines, self.router.loads, strict=True))
        ]
        self.traffic: Traffic = Traffic(self.replicas, self.router, replays=routing.replay)
        self.pauses: list[PoolPause] = []

    async def apply_to(self, engine: BaseEngine) -> None:
        """Pause a replica that has been started, and have it sleep, as the others do."""
        for pause in list(self.pauses):
            await pause.add(engine)
        if self.is_asleep:
            await engine.sleep()

    def end_pauses(self) -> None:
        """End all pauses."""
        pauses, self.pauses = self.pauses, []
        for pause in pauses:
            pause.end()

    def begin_again(self) -> None:
        """All replicas are closed: forget pauses, sleep, drains and prefixes."""
        self.pauses.clear()
        self.is_asleep = False
        for replica in self.replicas:
            replica.restore()
        self.forget_prefixes()

    def forget_prefixes(self) -> None:
        """The caches of all replicas are empty."""
        for replica in self.replicas:
            self.router.forget(replica.index)

    @property
    def is_from_parent(self) -> bool:
        """True in a forked child, if the parent made this state."""
        return self._num_forks != num_forks()
