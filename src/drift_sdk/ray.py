"""Engines in actors of Ray: `RayEngine`, and `ray_pool` with several of them behind the methods of one.

Needs the extra `ray`: DriftError without it. docs/deployment/scaling.md describes when to use it, and
what Ray does to the process.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, Struct, field
from msgspec.structs import force_setattr

from drift_sdk._fields import check_fields, check_float, check_int, check_str, with_config
from drift_sdk._plain_data import FrozenMapping
from drift_sdk.config import EngineConfig
from drift_sdk.driver.life_cycle import OpenModel
from drift_sdk.engine import Engine
from drift_sdk.errors import ConfigError, DriftError, ExecutorError, ModelLoadError
from drift_sdk.pool.engine_pool import MAX_REPLICAS, EnginePool
from drift_sdk.pool.routing import Routing
from drift_sdk.remote.host import Channel, EngineHost, HostLost, HostUnavailable
from drift_sdk.remote.remote_engine import RemoteEngine

try:
    from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError

    import ray
except ImportError as cause:
    raise DriftError('drift_sdk.ray needs the package ray: pip install "drift-engine[ray]"') from cause

__all__ = ["Placement", "RayEngine", "ray_pool"]

MOST = 1e6


class Placement(Struct, frozen=True, kw_only=True):
    """Resources of a cluster that the actor of an engine reserves; a wrong value raises ConfigError.

    num_gpus:  0 to 1; less than 1 lets engines share a GPU (`EngineConfig.gpu_memory_fraction` must fit). The
               actor sees no other GPUs. None = none if the config's device is "cpu", else 1.
    num_cpus:  0 to 1,000,000.
    resources: resources of nodes that Ray knows by name, and how much of each, over 0 to 1,000,000.
    timeout_s: seconds, over 0 to 1,000,000, after which a start is given up that found no node.
    """

    num_gpus: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    num_cpus: Annotated[float, Meta(ge=0.0, le=MOST)] = 1.0
    resources: Mapping[str, float] = field(default_factory=lambda: FrozenMapping({}))
    timeout_s: Annotated[float, Meta(gt=0.0, le=MOST)] = 300.0

    def __post_init__(self) -> None:
        check_fields(ConfigError, self)
        if not isinstance(self.resources, Mapping) or not all(
            isinstance(name, str) and name for name in self.resources
        ):
            raise ConfigError.of("resources", self.resources, "a mapping of names to numbers")

        for value in self.resources.values():
            check_float(ConfigError, "resources", value, gt=0.0, le=MOST)
        force_setattr(self, "resources", FrozenMapping(dict(self.resources)))


MAX_CALLS = 1000
"""Most calls of an actor at once; few are more than a moment in it."""
CHECK_S = 1.0
"""Seconds between two looks at the connection while a call is on its way."""

_connecting = threading.Lock()


class RayEngine(RemoteEngine):
    """An engine in an actor of Ray, with the methods of an `Engine`.

    model, config: as of `Engine`; the model is opened on the node of the actor, so a folder must exist there.
                   A GPU is assigned by Ray: "auto" or "cuda" is the right device.
    address:       of the cluster. "auto" = the one that this process is connected to, else the one of
                   RAY_ADDRESS or of this machine; "local" = the same, and if there is none, one is started on
                   this machine, which ends with this process.
    placement:     what the actor reserves. None = `Placement()`.
    open_model:    as of `Engine`, for tests: it must be possible to pickle it.

    See `RemoteEngine` for what differs from an `Engine`. `start` raises ConfigError if there is no such
    cluster, and ModelLoadError if no node takes the actor in time.
    """

    @with_config(EngineConfig)
    def __init__(
        self,
        model: str | Path,
        config: EngineConfig | None = None,
        *,
        address: str = "auto",
        placement: Placement | None = None,
        open_model: OpenModel | None = None,
    ) -> None:
        super().__init__(model, config)
        check_str(ConfigError, "address", address)
        if placement is not None and not isinstance(placement, Placement):
            raise ConfigError.of("placement", placement, "a Placement")

        if open_model is not None and not callable(open_model):
            raise ConfigError.of("open_model", open_model, "a function that opens a model, or None")

        self._address = address
        self._placement = placement if placement is not None else Placement()
        self._open_model = open_model

    async def _open_channel(self) -> Channel:
        await asyncio.to_thread(connect, self._address)
        placement = self._placement
        num_gpus = placement.num_gpus
        if num_gpus is None:
            num_gpus = 0.0 if self.config.device == "cpu" else 1.0
        actor_class = ray.remote(EngineHost).options(
            num_cpus=placement.num_cpus,
            num_gpus=num_gpus,
            resources=dict(placement.resources),
            max_concurrency=MAX_CALLS,
            scheduling_strategy="SPREAD",
        )
        make_engine = partial(Engine, self.model, self.config, open_model=self._open_model)
        channel = RayChannel(actor_class.remote(make_engine))
        try:
            async with asyncio.timeout(placement.timeout_s):
                await channel.call("__ray_ready__")
        except TimeoutError:
            await channel.kill()
            wanted = f"{placement.num_cpus:g} CPUs, {num_gpus:g} GPUs, {dict(placement.resources)}"
            raise ModelLoadError(
                f"{self.model}: no node of the cluster has taken an actor with {wanted} "
                f"within {placement.timeout_s:g} s"
            ) from None
        except (HostLost, HostUnavailable, DriftError) as error:
            await channel.kill()
            raise ModelLoadError(f"{self.model}: the actor could not be started: {error}") from error
        except BaseException:
            await channel.kill()
            raise

        return channel


@with_config(EngineConfig)
def ray_pool(
    model: str | Path,
    config: EngineConfig | None = None,
    *,
    num_replicas: int,
    address: str = "auto",
    placement: Placement | None = None,
    routing: Routing | None = None,
) -> EnginePool:
    """A pool of so many `RayEngine`s, spread over the nodes of a cluster."""
    check_int(ConfigError, "num_replicas", num_replicas, ge=1, le=MAX_REPLICAS)
    engines = [RayEngine(model, config, address=address, placement=placement) for _ in range(num_replicas)]
    return EnginePool(engines, routing)


class RayChannel:
    """Calls the methods of an actor."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self._connection = connection_id()

    async def call(self, method: str, *arguments: Any) -> Any:
        self._check_connected()  # without a connection, a call would start another cluster
        try:
            answer = asyncio.wrap_future(getattr(self._actor, method).remote(*arguments).future())
            answer.add_done_callback(look_at)
            while not (await asyncio.wait([answer], timeout=CHECK_S))[0]:
                self._check_connected()  # calls on their way are never answered then
            return answer.result()
        except ActorUnavailableError as error:
            raise HostUnavailable(short_message(error)) from error
        except RayActorError as error:
            raise HostLost(short_message(error)) from error
        except RayTaskError as error:  # the method has raised
            if isinstance(error.cause, DriftError):
                raise error.cause from None

            raise ExecutorError(f"the engine's host has failed: {short_message(error)}") from error
        except RayError as error:
            raise HostLost(short_message(error)) from error

    def _check_connected(self) -> None:
        if connection_id() != self._connection:
            raise HostLost("ray.shutdown() was called")

    async def kill(self) -> None:
        if connection_id() == self._connection:  # else the actor has ended with it
            ray.kill(self._actor)


def look_at(answer: asyncio.Future[Any]) -> None:
    """Retrieve the error of a call that was given up, which asyncio reports otherwise."""
    if not answer.cancelled():
        answer.exception()


def connection_id() -> str | None:
    """A name of this process's connection to a cluster; None if there is none."""
    return str(ray.get_runtime_context().get_worker_id()) if ray.is_initialized() else None


def connect(address: str) -> None:
    """Connect this process to a cluster, unless it is connected. ConfigError if there is no such cluster,
    ModelLoadError if none can be started.

    Not called on the main thread, where Ray would replace the handler of SIGTERM. `sys.excepthook` is kept.
    """
    with _connecting:
        if ray.is_initialized():
            return

        hook = sys.excepthook
        options: dict[str, Any] = {"log_to_driver": True, "configure_logging": False}
        try:
            ray.init("auto" if address == "local" else address, **options)
        except ConnectionError as error:
            if address != "local":
                allowed = 'a cluster that is running, or "local" to start one'
                raise ConfigError.of("address", address, allowed) from error

            start_cluster(options)
        finally:
            sys.excepthook = hook


def start_cluster(options: dict[str, Any]) -> None:
    """Start Ray on this machine. ModelLoadError if that fails, for which Ray has no class of its own."""
    try:
        ray.init("local", include_dashboard=False, **options)
    except Exception as error:
        raise ModelLoadError(f"Ray cannot be started on this machine: {error}") from error


def short_message(error: BaseException) -> str:
    """The message of an error of Ray without the stack traces that it quotes: its first line, and the last
    one, which names the cause."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ... ".join(dict.fromkeys((*lines[:1], *lines[-1:])))
