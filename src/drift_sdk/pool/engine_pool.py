"""EnginePool: several engines of one model behind the methods of one."""

from __future__ import annotations

import logging
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import anyio
from msgspec.structs import replace

from drift_sdk._display import html_table, state_repr
from drift_sdk._fields import check_bool, check_float, check_int, with_config
from drift_sdk.base_engine import BaseEngine, EngineKind
from drift_sdk.config import EngineConfig
from drift_sdk.driver.loops import Latch
from drift_sdk.driver.prompts import ModelText, Prompt
from drift_sdk.engine import Engine
from drift_sdk.errors import (
    ConfigError,
    DriftError,
    EngineClosed,
    ExecutorError,
    RequestError,
    short_repr,
)
from drift_sdk.events import Event, Progress
from drift_sdk.pool.pool_state import (
    PoolPause,
    PoolState,
    Replica,
    ReplicaStats,
    summed_histograms,
    summed_stats,
)
from drift_sdk.pool.routing import Routing
from drift_sdk.remote.remote_engine import ProcessEngine
from drift_sdk.serving import Submission
from drift_sdk.stats import EngineMetrics, EngineStats, load_of

MAX_REPLICAS = 1024

log: logging.Logger = logging.getLogger("drift_sdk")


class EnginePool(BaseEngine):
    """Engines of one model, its replicas, behind the methods of an `Engine`.

    replicas: the engines, of one model and config except for `device`. The pool starts and closes them; they
              get no requests of others.
    routing:  None = `Routing()`.

    A request goes to the replica with the fewest live tokens, or to one that has computed the beginning of
    its prompt; see `Routing`. It can be used as an engine can: from any task of any event loop.

    If a replica fails, it gets no further requests until `restart`. Its requests whose streams have
    received nothing go to another replica. Others raise ReplicaFailed, or go on on another replica with
    `Routing(replay=True)`. A request is given to three replicas at most. When no replica is left, requests
    end as those of an engine that fails.
    """

    @with_config(EngineConfig)
    def __init__(self, replicas: Sequence[BaseEngine], routing: Routing | None = None) -> None:
        if not isinstance(replicas, Sequence) or not 1 <= len(replicas) <= MAX_REPLICAS:
            raise ConfigError.of("replicas", replicas, f"1 to {MAX_REPLICAS} engines")

        if routing is not None and not isinstance(routing, Routing):
            raise ConfigError.of("routing", routing, "a Routing")

        check_replicas(replicas)
        super().__init__()
        self.engines: tuple[BaseEngine, ...] = tuple(replicas)
        self.model: str | Path = replicas[0].model
        self.config: EngineConfig = replicas[0].config
        self.routing: Routing = routing if routing is not None else Routing()
        self._last_state = PoolState(self.engines, self.routing)
        self._updates_lock = threading.Lock()
        self._last_update = Latch()
        self._last_update.set()

    @classmethod
    @with_config(EngineConfig)
    def on_devices(
        cls,
        model: str | Path,
        config: EngineConfig | None = None,
        *,
        devices: Sequence[str],
        routing: Routing | None = None,
        processes: bool = False,
        on_progress: Callable[[Progress], None] | None = None,
        on_event: Callable[[Event], object] | None = None,
    ) -> EnginePool:
        """A pool with an `Engine` on each device, such as `["cuda:0", "cuda:1"]`. A device that is named
        twice gets two engines, which share its memory: see docs/deployment/sizing.md.

        model, config: as of `Engine`; `config.device` is replaced.
        processes:     whether each engine is a `ProcessEngine`, in a child process of its own.
        on_progress, on_event: as of `Engine`; None with `processes`. `on_event` is called for one event at a
                       time. Of a request that another engine takes, one that rejects it reports that too.
        """
        if isinstance(devices, str) or not isinstance(devices, Sequence) or not devices:
            raise ConfigError.of("devices", devices, 'a sequence of devices, such as ["cuda:0", "cuda:1"]')

        check_bool(ConfigError, "processes", processes)
        settings = config if config is not None else EngineConfig()
        engines: list[BaseEngine] = []
        if processes:
            for name, given in (("on_progress", on_progress), ("on_event", on_event)):
                if given is not None:
                    raise ConfigError.of(name, given, "None with processes=True")

            engines += [ProcessEngine(model, settings.replace(device=device)) for device in devices]
        else:
            in_turn = serially(on_event) if callable(on_event) else on_event
            engines += [
                Engine(model, settings.replace(device=device), on_progress=on_progress, on_event=in_turn)
                for device in devices
            ]
        return cls(engines, routing)

    async def start(self) -> None:
        """Start all replicas, or those of an open pool that have failed. Raises what `Engine.start` raises,
        and ConfigError if requests are to be replayed and the replicas are not of one kind. A pool that was
        not open is closed then, and if the task is cancelled, unless another task starts it too."""
        num_closed = self._state.num_closed
        self._state.num_starting += 1

        async def start(engine: BaseEngine) -> None:
            was_open = engine.is_open
            await engine.start()
            if not was_open:
                await self._state.apply_to(engine)

        try:
            await for_each(self.engines, start, stops_early=not self._state.is_started)
            await self._check_kinds()
            self._check_not_closed(num_closed)
            self._state.is_started = True
        except BaseException:
            if not self._state.is_started and self._state.num_starting == 1:
                with anyio.CancelScope(shield=True):
                    await for_each(self.engines, lambda engine: engine.aclose())
            raise
        finally:
            self._state.num_starting -= 1

    async def aclose(self, drain: float = 0.0) -> None:
        """Close all replicas, as `Engine.aclose` does."""
        check_float(RequestError, "drain", drain, ge=0.0, le=1e6)
        self._state.num_closing += 1
        self._state.num_closed += 1
        self._state.is_started, self._state.traffic.is_closing = False, True
        try:
            await for_each(self.engines, lambda engine: engine.aclose(drain))
        finally:  # engines close to the end, also if the task is cancelled
            self._state.num_closing -= 1
            self._state.traffic.is_closing = self._state.num_closing > 0
            self._state.begin_again()

    async def drain(self, index: int) -> None:
        """Give no new requests to a replica, and return when it has none any more. It is in service again
        after `restore` or `restart`, or if the task is cancelled."""
        await self._replica(index).drain()

    def restore(self, index: int) -> None:
        """Take a drained replica back into service."""
        self._replica(index).restore()

    async def restart(self, index: int) -> None:
        """Close a replica and start it again, one that has failed or any other, and take it into service.
        Requests that it has are treated as those of a failed replica: `drain` it before. Raises what
        `Engine.start` raises, EngineClosed if the pool is closed meanwhile, and DriftError if the replica is
        being restarted already."""
        replica, num_closed = self._replica(index), self._state.num_closed
        self._check_not_closed(num_closed)
        await replica.restart(partial(self._check_not_closed, num_closed))
        self._state.router.forget(index)
        try:
            await self._check_kinds()
            self._check_not_closed(num_closed)
            await self._state.apply_to(replica.engine)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await replica.engine.aclose()
            raise

        replica.restore()

    async def resume(self) -> None:
        engines = self._open_engines()
        self._state.end_pauses()
        await for_each(engines, lambda engine: engine.resume())

    async def sleep(self) -> None:
        engines = self._open_engines()
        self._state.is_asleep = True
        try:
            await for_each(engines, lambda engine: engine.sleep())
        finally:  # engines fall asleep, also if the task is cancelled
            self._state.forget_prefixes()

    async def wake(self) -> None:
        engines = self._open_engines()
        self._state.is_asleep = False
        await for_each(engines, lambda engine: engine.wake())

    async def update_weights(self, tensors: Mapping[str, Any]) -> None:
        """See `BaseEngine.update_weights`. The replicas get the weights one after the other, each between two
        of its steps, and serve meanwhile: `Completion.weights_versions` and the `weights_version` of each
        replica's statistics tell which weights were used. A wrong tensor is found by the first replica. An
        error of a later one names it; those before it have the new weights. One that is closed or fails
        meanwhile is left out. A replica that is restarted loads its files, and begins with version 0. One
        update begins when the one before it has ended."""
        if not self._calls_functions:
            allowed = "replicas of this process: tensors are not sent to another one"
            raise RequestError(f"tensors: expected {allowed}", field="tensors", allowed=allowed)

        done = Latch()
        with self._updates_lock:
            before, self._last_update = self._last_update, done
        try:
            await self._update_replicas(tensors, before)
        finally:
            done.set()

    async def _update_replicas(self, tensors: Mapping[str, Any], before: Latch) -> None:
        """Update all replicas after another update, also if the task is cancelled; the cancellation is raised
        afterwards."""
        cancelled: BaseException | None = None
        closed: DriftError | None = None
        num_updated = 0
        try:
            await before.wait_shielded()
        except anyio.get_cancelled_exc_class() as error:
            cancelled = error
        for engine in self._open_engines():
            try:
                await engine.update_weights(tensors)
            except anyio.get_cancelled_exc_class() as error:  # after the update
                cancelled = error
            except (EngineClosed, ExecutorError) as error:
                closed = error
                continue
            except RequestError as error:
                if cancelled is not None:
                    raise cancelled from error

                if not num_updated:
                    raise

                place = f"replica {self.engines.index(engine)}, after {num_updated} with the new weights"
                raise RequestError(
                    f"{place}: {error}", field=error.field, value=error.value, allowed=error.allowed
                ) from error

            num_updated += 1
        if cancelled is not None:
            raise cancelled

        if closed is not None and not num_updated:
            raise closed

    @property
    def is_open(self) -> bool:
        """Whether requests are admitted: at least one replica is open and not drained."""
        return not self._state.num_closing and any(replica.is_in_service for replica in self._state.replicas)

    def stats(self) -> EngineStats:
        """The sums of the statistics of all replicas that are open or have failed; `replicas()` has those of
        each. `num_rejected` is the number of requests that no replica took."""
        found = [stats for replica in self._state.replicas if (stats := replica.engine_stats()) is not None]
        if not found:
            self.engines[0].stats()  # raises EngineClosed, which says why

        return self._summed(found)

    def replicas(self) -> tuple[ReplicaStats, ...]:
        """The state, load and statistics of each replica, in order."""
        return tuple(replica.stats() for replica in self._state.replicas)

    def metrics(self) -> EngineMetrics:
        """The sums over all replicas that are open or have failed, as of `Engine.metrics`. Those of each, on
        one page, are `collector({f"replica-{i}": engine for i, engine in enumerate(pool.engines)})`."""
        found = [each for replica in self._state.replicas if (each := replica.engine_metrics()) is not None]
        if not found:
            found = [self.engines[0].metrics()]  # raises EngineClosed, which says why

        return EngineMetrics(
            model=str(self.model),
            executor=found[0].executor,
            stats=self._summed([metrics.stats for metrics in found]),
            histograms=summed_histograms(metrics.histograms for metrics in found),
        )

    def _summed(self, stats: Sequence[EngineStats]) -> EngineStats:
        return replace(summed_stats(stats), num_rejected=self._state.traffic.num_rejected)

    @property
    def executor(self) -> str:
        return self._open_engines()[0].executor

    def __repr__(self) -> str:
        """Model, state and load."""
        return state_repr(type(self).__name__, self._description())

    def _repr_html_(self) -> str:
        """The same as a table, for notebooks."""
        return html_table(type(self).__name__, self._description())

    def _description(self) -> dict[str, str]:
        if not hasattr(self, "_last_state"):  # the constructor has failed
            return {"state": "not started"}

        num_open = sum(engine.is_open for engine in self.engines)
        shown = {"model": short_repr(str(self.model)), "replicas": f"{num_open} of {len(self.engines)} open"}
        return shown | load_of(self.stats()) if num_open else shown

    async def _pause(self) -> Callable[[], None]:
        pause, pauses = PoolPause(), self._state.pauses
        engines = self._open_engines()

        def undo() -> None:
            if pause in pauses:
                pauses.remove(pause)
            pause.undo()

        pauses.append(pause)
        try:
            await for_each(engines, pause.add)
        except BaseException:
            undo()
            raise

        return undo

    async def _kind(self) -> EngineKind:
        return await self._open_engines()[0]._kind()

    def _enter(self, submissions: Sequence[Submission]) -> Sequence[Callable[[], None]]:
        if self._state.num_closing:
            raise EngineClosed("the pool is closing")

        return self._state.traffic.submit(submissions)

    def _cancel(self, request_id: str) -> bool:
        return self._state.traffic.cancel(request_id)

    async def _count_tokens(self, prompt: Prompt) -> int:
        return await self._open_engines()[0]._count_tokens(prompt)

    @property
    def _calls_functions(self) -> bool:
        return all(engine._calls_functions for engine in self.engines)

    @property
    def _has_room(self) -> bool:
        return any(engine._has_room for engine in self._open_engines())

    def _model_text(self) -> ModelText:
        return self._open_engines()[0]._model_text()

    @property
    def _state(self) -> PoolState:
        """The state in this process."""
        if self._last_state.is_from_parent:
            self._last_state = PoolState(self.engines, self.routing)
        return self._last_state

    def _open_engines(self) -> list[BaseEngine]:
        """The engines that are open; if none is, the first, whose methods say why."""
        return [engine for engine in self.engines if engine.is_open] or [self.engines[0]]

    def _replica(self, index: int) -> Replica:
        check_int(RequestError, "index", index, ge=0, le=len(self._state.replicas) - 1)
        return self._state.replicas[index]

    def _check_not_closed(self, num_closed: int) -> None:
        if self._state.num_closing or self._state.num_closed != num_closed:
            raise EngineClosed("the pool was closed meanwhile")

    async def _check_kinds(self) -> None:
        """ConfigError if requests are to be replayed and the open replicas are not of one kind, or their
        tokens depend on other requests."""
        if not self.routing.replay:
            return

        engines = self._open_engines()
        kinds = [await engine._kind() for engine in engines]
        for engine, kind in zip(engines, kinds, strict=True):
            differences = kinds[0].differences(kind)
            if differences:
                index = self.engines.index(engine)
                allowed = f"False, or replicas of one kind: replica {index} differs: {'; '.join(differences)}"
                raise ConfigError.of("replay", True, allowed)

            if kind.is_lossy:
                allowed = "False with partial_verification, whose tokens depend on other requests"
                raise ConfigError.of("replay", True, allowed)


def check_replicas(replicas: Sequence[BaseEngine]) -> None:
    """ConfigError for what is no engine, or not one of the same model and config as the first."""
    for index, engine in enumerate(replicas):
        name = f"replicas[{index}]"
        if not isinstance(engine, BaseEngine):
            raise ConfigError.of(name, engine, "an engine")

        if any(engine is other for other in replicas[:index]):
            raise ConfigError.of(name, engine, "an engine that is given once")

        first = replicas[0]
        if engine.model != first.model:
            raise ConfigError.of(f"{name}.model", engine.model, f"that of the others, {first.model!r}")

        for field in EngineConfig.__struct_fields__:
            value, expected = getattr(engine.config, field), getattr(first.config, field)
            if field != "device" and value != expected:
                raise ConfigError.of(f"{name}.config.{field}", value, f"{expected!r}, that of replicas[0]")


def serially(on_event: Callable[[Event], object]) -> Callable[[Event], object]:
    """A function that several threads call, for one that is called by one at a time."""
    lock = threading.Lock()

    def called(event: Event) -> object:
        with lock:
            return on_event(event)

    return called


async def for_each(
    engines: Sequence[BaseEngine],
    act: Callable[[BaseEngine], Awaitable[None]],
    *,
    stops_early: bool = False,
) -> None:
    """Await `act` for all engines at once, and raise the first error after all have ended.

    stops_early: whether an error cancels what has not ended.
    """
    errors: list[Exception] = []

    async def attempt(engine: BaseEngine) -> None:
        try:
            await act(engine)
        except Exception as error:
            errors.append(error)
            if stops_early:
                tasks.cancel_scope.cancel()

    async with anyio.create_task_group() as tasks:
        for engine in engines:
            tasks.start_soon(attempt, engine)
    for error in errors[1:]:
        log.warning("a further replica: %r", error)
    if errors:
        raise errors[0]
