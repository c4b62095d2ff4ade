"""A replica of a pool: an engine, and whether it is in service."""

from __future__ import annotations

import threading
from collections.abc import Callable

from drift_sdk.base_engine import BaseEngine
from drift_sdk.driver.loops import Latch
from drift_sdk.errors import DriftError, EngineClosed
from drift_sdk.pool.router import Load
from drift_sdk.pool.summed import ReplicaStats
from drift_sdk.stats import EngineMetrics, EngineStats

__all__ = ["Replica"]


class Replica:
    """An engine of a pool. Used from any thread.

    num_moved, num_replayed, num_lost: as of `ReplicaStats`.
    """

    def __init__(self, index: int, engine: BaseEngine, load: Load) -> None:
        self.index = index
        self.engine = engine
        self._has_drained = False
        self._drains: list[object] = []  # calls of `drain` that wait
        self.is_restarting: bool = False
        self.num_moved = self.num_replayed = self.num_lost = 0
        self._load = load
        self._lock = threading.RLock()
        self._idle: list[Latch] = []

    @property
    def is_in_service(self) -> bool:
        """Whether it gets new requests."""
        return not self.is_drained and self.engine.is_open

    @property
    def is_drained(self) -> bool:
        """Whether `drain` keeps the replica out of service."""
        return self._has_drained or bool(self._drains)

    def restore(self) -> None:
        """Take it back into service, also if calls of `drain` wait."""
        with self._lock:
            self._has_drained = False
            self._drains.clear()

    def became_idle(self) -> None:
        """Its last request has ended."""
        with self._lock:
            latches, self._idle = self._idle, []
        for latch in latches:
            latch.set()

    async def drain(self) -> None:
        """Take it out of service and wait until it has no requests. If the task is cancelled, it is back in
        service, unless another task has drained it or waits for that."""
        drain, idle = object(), Latch()
        with self._lock:
            self._drains.append(drain)
            self._idle.append(idle)
        if not self._load.num_requests:
            self.became_idle()
        has_drained = False
        try:
            await idle.wait()
            has_drained = True
        finally:
            with self._lock:
                if drain in self._drains:  # else it was restored
                    self._drains.remove(drain)
                    self._has_drained |= has_drained

    async def restart(self, check: Callable[[], None]) -> None:
        """Close the engine and start it again. DriftError if that is being done already.

        check: called between the two; raises an error if the engine is to stay closed."""
        with self._lock:
            if self.is_restarting:
                raise DriftError(f"replica {self.index} is being restarted already")

            self.is_restarting = True
        try:
            await self.engine.aclose()
            check()
            await self.engine.start()
        finally:
            self.is_restarting = False

    def engine_metrics(self) -> EngineMetrics | None:
        """The engine's statistics and histograms; None if it is not open and has not failed."""
        try:
            return self.engine.metrics()
        except EngineClosed:
            return None

    def engine_stats(self) -> EngineStats | None:
        """The engine's statistics; None if it is not open and has not failed."""
        try:
            return self.engine.stats()
        except EngineClosed:
            return None

    def stats(self) -> ReplicaStats:
        is_open = self.engine.is_open
        return ReplicaStats(
            index=self.index,
            device=self.engine.config.device,
            state="closed" if not is_open else "drained" if self.is_drained else "open",
            num_requests=self._load.num_requests,
            num_tokens=self._load.num_tokens,
            num_routed=self._load.num_routed,
            num_by_prefix=self._load.num_by_prefix,
            num_moved=self.num_moved,
            num_replayed=self.num_replayed,
            num_lost=self.num_lost,
            engine=self.engine_stats(),
        )
