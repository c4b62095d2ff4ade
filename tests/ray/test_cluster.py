"""Engines in actors of Ray, on a cluster of two nodes on this machine. Needs the extra `ray`."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

import failing_models
import letters as letter_model
import pytest
from letters import letters, outcome, outcomes, tokens_of
from loops import WAIT_S, run, until
from smollm2 import path as smollm2_path

from drift_sdk import (
    Completion,
    Engine,
    EngineClosed,
    EngineConfig,
    EnginePool,
    ExecutorError,
    ModelLoadError,
    ReplicaFailed,
    Routing,
    SamplingParams,
)
from drift_sdk.testing import ScriptedModel

# Read when Ray is imported. Without the first, Ray writes a token to the home folder.
os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
ray = pytest.importorskip("ray")

from ray.cluster_utils import Cluster  # noqa: E402

from drift_sdk.ray import (  # noqa: E402
    Placement,
    RayChannel,
    RayEngine,
)

pytestmark = pytest.mark.filterwarnings("default")
GPU = Placement(num_cpus=0, timeout_s=WAIT_S)
HEAD, OTHER, THIRD = (
    Placement(num_gpus=0, num_cpus=0, resources={name: 1}, timeout_s=WAIT_S)
    for name in ("head", "other", "third")
)
# The end of a node is noticed in 2 seconds instead of 15. A slow node has 10 seconds for each answer.
HEALTH = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_failure_threshold": 4,
}


class TwoNodes:
    """A cluster with a node that has the resource "head" and one that has the resource "other". Ray believes
    that each has a GPU."""

    def __init__(self) -> None:
        for module in (letter_model, failing_models):
            ray.cloudpickle.register_pickle_by_value(module)
        self._cluster = Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": 1,
                "num_gpus": 1,
                "resources": {"head": 9},
                "_system_config": HEALTH,
            },
        )
        self.add_node("other", num_gpus=1)

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def add_node(self, resource: str, num_gpus: int = 0) -> Any:
        return self._cluster.add_node(num_cpus=1, num_gpus=num_gpus, resources={resource: 9})

    async def lose(self, node: Any) -> None:
        await asyncio.to_thread(self._cluster.remove_node, node, allow_graceful=False)

    def engine(self, placement: Placement, open_model: Any = None, **options: Any) -> RayEngine:
        """An engine in an actor: a scripted one, or one with `open_model`."""
        model = open_model or ScriptedModel(letters, **options)
        config = model.config if open_model is None else EngineConfig()
        return RayEngine("scripted", config, address=self.address, placement=placement, open_model=model)

    def close(self) -> None:
        ray.shutdown()
        self._cluster.shutdown()


@pytest.fixture(scope="module")
def nodes() -> Iterator[TwoNodes]:
    found = TwoNodes()
    yield found
    found.close()


@pytest.fixture(scope="module")
def engines(nodes: TwoNodes) -> Iterator[list[RayEngine]]:
    """Two engines that need a GPU each, for pools of one test after the other."""
    found = [nodes.engine(GPU), nodes.engine(GPU, tokens_per_step=3)]
    yield found
    asyncio.run(EnginePool(found).aclose())


def actor_of(engine: RayEngine) -> Any:
    assert engine._link is not None
    return engine._link.channel._actor  # type: ignore[attr-defined]


async def check_nothing_is_left(pool: EnginePool) -> None:
    """Neither here nor in the actors that live."""
    assert not pool._state.traffic._live
    assert all((load.num_requests, load.num_tokens) == (0, 0) for load in pool._state.router.loads)
    for engine in pool.engines:
        assert isinstance(engine, RayEngine) and engine._link is not None
        assert not engine._link.connection._live

    def is_idle() -> bool:
        stats = pool.stats()
        return (stats.num_running, stats.num_waiting, stats.num_free_blocks) == (0, 0, stats.num_blocks)

    await until(is_idle)


async def test_500_requests_over_two_nodes_end_once_each(engines: list[RayEngine]) -> None:
    """Some are cancelled, and some are read when they have ended."""
    before = signal.getsignal(signal.SIGTERM), sys.excepthook
    pool = EnginePool(engines)
    await pool.start()
    assert (signal.getsignal(signal.SIGTERM), sys.excepthook) == before
    streams = [pool.generate(f"p{index}", max_tokens=1 + index % 20, seed=index) for index in range(500)]
    for stream in streams[::10]:
        stream.cancel()
    for stream in streams[5::10]:
        await stream
    for index, (tokens, end) in enumerate(await outcomes(streams)):
        expected = tokens_of(f"p{index}", index, 1 + index % 20)
        assert isinstance(end, Completion)
        assert tokens == end.token_ids == expected[: len(tokens)]
        assert end.finish_reason == "cancelled" or tokens == expected
    assert all(each.num_routed > 100 for each in pool.replicas())
    await check_nothing_is_left(pool)
    assert pool.stats().num_submitted >= 500


async def test_cancelled_stream_ends_in_the_actor(engines: list[RayEngine]) -> None:
    pool = EnginePool(engines)
    await pool.start()
    stream = pool.generate("a", max_tokens=None)
    await anext(stream)
    stream.cancel()
    assert (await stream).finish_reason == "cancelled"
    await check_nothing_is_left(pool)
    conversation = [{"role": "user", "content": "x" * 2000}]
    for _ in range(4):
        await pool.chat(conversation, max_tokens=2)
    assert sorted(each.num_by_prefix for each in pool.replicas()) == [0, 3]


async def test_actor_killed_in_mid_stream_is_replayed_on_the_other_node(engines: list[RayEngine]) -> None:
    pool = EnginePool(engines, Routing(replay=True))
    await pool.start()
    await pool.drain(1)
    await pool.pause()
    streams = [pool.generate(f"p{index}", max_tokens=400, seed=index) for index in range(20)]
    for stream in streams:
        await stream.accepted()
    pool.restore(1)
    await pool.resume()
    first = [await anext(stream) for stream in streams]
    ray.kill(actor_of(engines[0]))
    for index, (tokens, end) in enumerate(await outcomes(streams)):
        assert isinstance(end, Completion), end
        assert first[index].token_ids + tokens == end.token_ids == tokens_of(f"p{index}", index, 400)
    assert pool.replicas()[0].state == "closed"
    await check_nothing_is_left(pool)
    await pool.restart(0)
    assert (await pool.generate("b", max_tokens=3, seed=0)).token_ids == tokens_of("b", 0, 3)


async def test_lost_node_ends_started_streams_and_the_pool_goes_on(
    nodes: TwoNodes, engines: list[RayEngine]
) -> None:
    node = nodes.add_node("third")
    lost = nodes.engine(THIRD)
    pool = EnginePool([lost, engines[0]])
    await pool.start()
    await pool.drain(1)
    stream = pool.generate("a", max_tokens=4000, seed=0)
    first = await anext(stream)
    await pool.pause()
    waiting = pool.generate("b", max_tokens=3, seed=1)
    await waiting.accepted()
    pool.restore(1)
    await nodes.lose(node)
    tokens, end = await outcome(stream)
    assert isinstance(end, ReplicaFailed) and end.replica == 0
    assert end.num_tokens == len(first.token_ids + tokens) < 4000
    assert first.token_ids + tokens == tokens_of("a", 0, end.num_tokens)
    await pool.resume()
    assert (await waiting).token_ids == tokens_of("b", 1, 3)
    await check_nothing_is_left(pool)
    await lost.aclose()


@pytest.mark.slow
def test_smollm2_in_an_actor_has_the_tokens_of_a_local_engine(nodes: TwoNodes) -> None:
    model = smollm2_path()
    config = EngineConfig(device="cpu", num_threads=1, max_model_len=64, kv_cache_tokens=512)
    params = SamplingParams(max_tokens=8, temperature=0.9, seed=3, ignore_eos=True)
    local, remote = Engine(model, config), RayEngine(model, config, address=nodes.address, placement=OTHER)

    async def main() -> None:
        async with local, remote:
            expected = await local.generate("Once upon a time", params)
            found = await remote.generate("Once upon a time", params)
            assert (found.text, found.token_ids) == (expected.text, expected.token_ids)
            assert remote.executor == "eager"

    run("trio", main)


async def test_starts_that_fail_are_reported(nodes: TwoNodes, engines: list[RayEngine]) -> None:
    await EnginePool(engines).start()  # they have both GPUs
    nowhere = Placement(num_gpus=0, num_cpus=0, resources={"nowhere": 1}, timeout_s=0.2)
    third_gpu = Placement(num_cpus=0, timeout_s=0.2)
    for placement, wanted in ((nowhere, r"0 GPUs, \{'nowhere': 1\}"), (third_gpu, "1 GPUs")):
        with pytest.raises(ModelLoadError, match=rf"no node .* {wanted}.* within 0.2 s"):
            await nodes.engine(placement).start()
    engine = nodes.engine(HEAD, failing_models.fail_to_open)
    with pytest.raises(ModelLoadError, match="no such file"):
        await engine.start()
    with pytest.raises(EngineClosed, match="not open"):
        engine.generate("a")


async def test_cancelled_start_ends_the_actor(nodes: TwoNodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that waits for a node, and one that opens its model."""
    killed: list[Any] = []
    called: list[str] = []
    kill, call = ray.kill, RayChannel.call

    def noted(self: RayChannel, method: str, *arguments: Any) -> Any:
        called.append(method)
        return call(self, method, *arguments)

    monkeypatch.setattr(ray, "kill", lambda actor: (killed.append(actor), kill(actor)))
    monkeypatch.setattr(RayChannel, "call", noted)
    nowhere = Placement(num_gpus=0, num_cpus=0, resources={"nowhere": 1}, timeout_s=WAIT_S)
    waiting, loading = nodes.engine(nowhere), nodes.engine(HEAD, failing_models.hang)
    task = asyncio.create_task(waiting.start())
    await until(lambda: "__ray_ready__" in called)  # open engines of other tests call, too
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(killed) == 1
    task = asyncio.create_task(loading.start())
    await until(lambda: loading._link is not None and loading._link.channel is not None)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(killed) == 2 and not loading.is_open


@pytest.mark.slow
async def test_shutdown_of_ray_ends_streams_and_a_start_connects_again(nodes: TwoNodes) -> None:
    engine = nodes.engine(OTHER)
    await engine.start()
    stream = engine.generate("a", max_tokens=None)
    await anext(stream)
    ray.shutdown()
    _, end = await outcome(stream)
    assert isinstance(end, ExecutorError) and "host is lost" in str(end)
    with pytest.raises(ExecutorError, match="host is lost"):
        await engine.pause()
    assert not ray.is_initialized()  # no cluster was started by a call
    await engine.start()
    assert (await engine.generate("a", max_tokens=3, seed=0)).token_ids == tokens_of("a", 0, 3)
    await engine.aclose()
