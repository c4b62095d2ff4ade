"""Engines in actors of Ray, on a cluster of two nodes on this machine. Needs the extra `ray`."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from loops import run, until
from model_zoo import make_model

from drift_sdk import (
    Completion,
    ConfigError,
    DriftError,
    Engine,
    EngineClosed,
    EngineConfig,
    EnginePool,
    ModelLoadError,
    ReplicaFailed,
    Routing,
    SamplingParams,
    TokenStream,
)
from drift_sdk.testing import ScriptedModel

# Read when Ray is imported. Without the first, Ray writes a token to the home folder.
os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
ray = pytest.importorskip("ray")

from ray.cluster_utils import Cluster  # noqa: E402

from drift_sdk.ray import Placement, RayEngine, ray_pool  # noqa: E402
from drift_sdk.ray.ray_engine import connect  # noqa: E402

pytestmark = pytest.mark.filterwarnings("default")
HEAD, OTHER = (Placement(num_gpus=0, num_cpus=0, resources={name: 1}) for name in ("head", "other"))
REPLAY = Routing(replay=True)


def letters(prompt_ids: Sequence[int], output_ids: Sequence[int], seed: int) -> int:
    """A model whose tokens depend on all that tokens may depend on."""
    return 97 + (sum(prompt_ids) + seed + 7 * sum(output_ids) + len(output_ids)) % 26


def tokens_of(prompt: str, seed: int, number: int) -> tuple[int, ...]:
    output: list[int] = []
    while len(output) < number:
        output.append(letters(prompt.encode(), output, seed))
    return tuple(output)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "resources": {"head": 9}})
    nodes.add_node(num_cpus=2, resources={"other": 9})
    yield nodes
    ray.shutdown()
    nodes.shutdown()


def engine_on(cluster: Any, placement: Placement, **options: Any) -> RayEngine:
    model = ScriptedModel(letters, **options)
    return RayEngine("scripted", model.config, address=cluster.address, placement=placement, open_model=model)


async def outcome(stream: TokenStream) -> tuple[tuple[int, ...], Completion | DriftError]:
    got: list[int] = []
    try:
        async for chunk in stream:
            got += chunk.token_ids
        return tuple(got), await stream
    except DriftError as error:
        return tuple(got), error


def actor_of(engine: RayEngine) -> Any:
    assert engine._link is not None
    return engine._link.channel._actor  # type: ignore[attr-defined]


def check_nothing_is_left(pool: EnginePool) -> None:
    assert not pool._traffic._live
    assert all((load.num_requests, load.num_tokens) == (0, 0) for load in pool._router.loads)


async def test_500_requests_over_two_nodes_end_once_each(cluster: Any) -> None:
    before = signal.getsignal(signal.SIGTERM), sys.excepthook
    async with EnginePool([engine_on(cluster, HEAD), engine_on(cluster, OTHER)]) as pool:
        assert (signal.getsignal(signal.SIGTERM), sys.excepthook) == before
        streams = [pool.generate(f"p{index}", max_tokens=1 + index % 20, seed=index) for index in range(500)]
        for stream in streams[::10]:
            stream.cancel()
        for index, (tokens, end) in enumerate(await asyncio.gather(*map(outcome, streams))):
            expected = tokens_of(f"p{index}", index, 1 + index % 20)
            assert isinstance(end, Completion)
            assert tokens == end.token_ids == expected[: len(tokens)]
            assert end.finish_reason == "cancelled" or tokens == expected
        await until(lambda: pool.stats().num_submitted == 500 and not pool.stats().num_running)
        assert all(each.num_routed > 100 for each in pool.replicas())
        check_nothing_is_left(pool)

        stream = pool.generate("a", max_tokens=None)
        await anext(stream)
        stream.cancel()
        assert (await stream).finish_reason == "cancelled"
        await until(lambda: not pool.stats().num_running)

        conversation = [{"role": "user", "content": "x" * 2000}]
        for _ in range(4):
            await pool.chat(conversation, max_tokens=2)
        assert sorted(each.num_by_prefix for each in pool.replicas()) == [0, 3]


async def test_actor_killed_in_mid_stream_is_replayed_on_the_other_node(cluster: Any) -> None:
    engines = [engine_on(cluster, HEAD), engine_on(cluster, OTHER, tokens_per_step=3)]
    async with EnginePool(engines, REPLAY) as pool:
        await pool.drain(1)
        await pool.pause()
        streams = [pool.generate(f"p{index}", max_tokens=600, seed=index) for index in range(20)]
        for stream in streams:
            await stream.accepted()
        pool.restore(1)
        await pool.resume()
        first = [await anext(stream) for stream in streams]
        ray.kill(actor_of(engines[0]))
        for index, (tokens, end) in enumerate(await asyncio.gather(*map(outcome, streams))):
            assert isinstance(end, Completion), end
            assert first[index].token_ids + tokens == end.token_ids == tokens_of(f"p{index}", index, 600)
        assert pool.replicas()[0].state == "closed"
        check_nothing_is_left(pool)


async def test_lost_node_ends_started_streams_and_the_pool_goes_on(cluster: Any) -> None:
    node = cluster.add_node(num_cpus=1, resources={"third": 1})
    third = Placement(num_gpus=0, num_cpus=0, resources={"third": 1})
    engines = [engine_on(cluster, third, step_s=0.01), engine_on(cluster, HEAD, step_s=0.01)]
    async with EnginePool(engines) as pool:
        await pool.drain(1)
        stream = pool.generate("a", max_tokens=None)
        await anext(stream)
        pool.restore(1)
        await asyncio.to_thread(cluster.remove_node, node, allow_graceful=False)
        _, end = await outcome(stream)
        assert isinstance(end, ReplicaFailed)
        assert end.replica == 0
        assert (await pool.generate("b", max_tokens=3, seed=0)).token_ids == tokens_of("b", 0, 3)
        check_nothing_is_left(pool)


@pytest.mark.parametrize("loop", ["asyncio", "trio"])
def test_real_model_in_an_actor_has_the_tokens_of_a_local_engine(
    loop: str, cluster: Any, tmp_path: Path
) -> None:
    make_model(0, tmp_path)
    config = EngineConfig(device="cpu", num_threads=1, max_model_len=64, kv_cache_tokens=512)
    params = SamplingParams(max_tokens=12, temperature=0.9, seed=3, ignore_eos=True)

    async def main() -> None:
        async with Engine(tmp_path, config) as local:
            expected = (await local.generate([5, 6, 7], params)).token_ids
        async with RayEngine(tmp_path, config, address=cluster.address, placement=HEAD) as engine:
            assert (await engine.generate([5, 6, 7], params)).token_ids == expected
            assert engine.executor == "eager"

    run(loop, main)


async def test_start_that_finds_no_node_is_given_up(cluster: Any) -> None:
    nowhere = Placement(num_gpus=0, num_cpus=0, resources={"nowhere": 1}, timeout_s=0.5)
    with pytest.raises(ModelLoadError, match=r"no node .* \{'nowhere': 1\} within 0.5 s"):
        await engine_on(cluster, nowhere).start()


async def test_errors_of_the_actor_are_those_of_the_engine(cluster: Any, tmp_path: Path) -> None:
    engine = RayEngine(tmp_path, EngineConfig(device="cpu"), address=cluster.address, placement=HEAD)
    with pytest.raises(ModelLoadError, match="config.json"):
        await engine.start()
    with pytest.raises(EngineClosed, match="not open"):
        engine.generate("a")


def test_wrong_address_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(address: str, **options: Any) -> None:
        raise ConnectionError("no cluster")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", refuse)
    with pytest.raises(ConfigError, match=r"address='auto': expected a cluster that is running"):
        connect("auto")


def test_failure_to_start_a_cluster_is_a_load_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(address: str, **options: Any) -> None:
        raise ConnectionError("no cluster") if address == "auto" else RuntimeError("timed out")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", refuse)
    with pytest.raises(ModelLoadError, match="Ray cannot be started on this machine: timed out"):
        connect("local")


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_gpus": -1.0},
        {"num_gpus": 2.0},
        {"num_cpus": -1.0},
        {"timeout_s": 0.0},
        {"resources": {"": 1.0}},
        {"resources": {"a": 0.0}},
        {"resources": 3},
    ],
)
def test_wrong_placements_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Placement(**wrong)


def test_wrong_arguments_are_refused() -> None:
    for options in ({"address": ""}, {"placement": 3}, {"open_model": 3}):
        with pytest.raises(ConfigError, match=next(iter(options))):
            RayEngine("m", **options)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="num_replicas=0"):
        ray_pool("m", num_replicas=0)
    assert len(ray_pool("m", num_replicas=3).engines) == 3
