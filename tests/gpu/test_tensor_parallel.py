"""A model divided between two GPUs: the tokens of one, to the last bit, and failures in bounded time."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from random_folder import make_random_draft_folder, make_random_folder

from drift_sdk import (
    Chain,
    Completion,
    DynamicTree,
    Engine,
    EngineConfig,
    ExecutorError,
    NGram,
    SamplingParams,
    Speculation,
)
from drift_sdk.execution.device.device import GpuDevice, Replay
from perf.harness.simulation import simulated_engine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.xdist_group("two gpus"),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

VOCAB_SIZE = 32_000
LENGTHS = (1, 2, 17, 64, 100, 255, 700, 1500, 5000)
LLAMA_8B = {
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
Case = tuple[list[int], SamplingParams]


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models whose products have four slices and two; with norms of heads, biases and a tied head."""
    path = tmp_path_factory.mktemp("model")
    if request.param == "llama 8b":
        return make_random_folder(path, "llama", max_position_embeddings=8192, **LLAMA_8B)

    fields = {"tie_word_embeddings": request.param == "qwen3", "max_position_embeddings": 8192}
    return make_random_folder(path, request.param, **fields)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_folder(tmp_path_factory.mktemp("llama"), "llama", max_position_embeddings=8192)


def speculation_of(drafts: str, folder: Path) -> Speculation | None:
    """Drafts that are always made: a policy would choose by times of this machine."""
    if drafts == "none":
        return None

    if drafts == "ngram":
        return Speculation(draft=NGram(), adaptive=False)

    draft = make_random_draft_folder(folder / "draft", folder)
    shape = DynamicTree(depth=3, top_k=4, num_draft_tokens=7) if drafts == "tree" else Chain(3)
    return Speculation(draft=draft, shape=shape, adaptive=False, checks=drafts == "checked chain")


def config_on(num_gpus: int, **fields: Any) -> EngineConfig:
    config = EngineConfig(
        device="cuda",
        executor="graph",
        load="random",
        dtype="bfloat16",
        max_num_seqs=32,
        max_model_len=5200,
        kv_cache_tokens=32 * 1024,
        prefill_token_budget=1024,
        tensor_parallel=num_gpus,
    )
    return config.replace(**fields)


def engine_on(folder: Path, num_gpus: int, **fields: Any) -> Engine:
    return Engine(folder, config_on(num_gpus, **fields))


def cases(number: int, seed: int, num_tokens: int) -> list[Case]:
    """Greedy and seeded requests in turn, with prompts of all lengths, some with repetitions."""
    rng = random.Random(seed)
    found = []
    for index in range(number):
        length = LENGTHS[index % len(LENGTHS)]
        words = [rng.randrange(3, 3000) for _ in range(min(length, 50))]
        prompt = (words * length)[:length]
        ways: list[dict[str, Any]] = [
            {},
            {"temperature": 0.8, "top_p": 0.9},
            {"temperature": 1.0, "top_k": 40},
        ]
        params = SamplingParams(
            max_tokens=num_tokens, ignore_eos=True, seed=index, logprobs=2, **ways[index % len(ways)]
        )
        found.append((prompt, params))
    return found


async def answers(engine: Engine, requests: list[Case]) -> list[Completion]:
    """The answers to requests that run at the same time."""
    found: dict[int, Completion] = {}

    async def ask(index: int) -> None:
        found[index] = await engine.generate(*requests[index])

    async with engine:
        async with anyio.create_task_group() as group:
            for index in range(len(requests)):
                group.start_soon(ask, index)
        assert (engine.stats().num_draft_rounds > 0) == (engine.config.speculation is not None)
    return [found[index] for index in range(len(requests))]


CASES = cases(32, seed=1, num_tokens=100)


def same(ones: list[Completion], others: list[Completion]) -> None:
    for one, other in zip(ones, others, strict=True):
        assert one.token_ids == other.token_ids
        assert one.logprobs == other.logprobs


async def alone(engine: Engine, requests: list[Case]) -> list[Completion]:
    """The answers to requests that run one after the other."""
    async with engine:
        found = [await engine.generate(*case) for case in requests]
        assert (engine.stats().num_draft_rounds > 0) == (engine.config.speculation is not None)
    return found


@pytest.fixture(scope="module")
def of_one(folder: Path) -> list[Completion]:
    """The answers of one GPU."""
    return anyio.run(answers, engine_on(folder, 1), CASES)


@pytest.mark.parametrize(
    ("folder", "drafts"),
    [("llama", drafts) for drafts in ("none", "ngram", "chain", "checked chain", "tree")]
    + [("qwen3", "none"), ("qwen3", "tree"), ("qwen2", "chain"), ("llama 8b", "none"), ("llama 8b", "chain")],
    indirect=["folder"],
)
def test_two_gpus_give_the_tokens_of_one(folder: Path, drafts: str, of_one: list[Completion]) -> None:
    """Drafts are made on both GPUs."""
    same(of_one, anyio.run(answers, engine_on(folder, 2, speculation=speculation_of(drafts, folder)), CASES))


@pytest.mark.parametrize(("folder", "drafts"), [("llama", "none"), ("llama", "chain")], indirect=["folder"])
def test_a_request_alone_gets_the_tokens_of_one_gpu_in_a_batch(
    folder: Path, drafts: str, of_one: list[Completion]
) -> None:
    engine = engine_on(folder, 2, max_num_seqs=1, speculation=speculation_of(drafts, folder))
    same(of_one[:18], anyio.run(alone, engine, CASES[:18]))


@pytest.mark.parametrize("drafts", ["chain", "tree"])
def test_drafts_are_those_of_one_gpu(drafts: str, llama: Path) -> None:
    """Acceptance is simulated: drafts are emitted, rounds have all lengths, and the draft runs on them."""
    requests, found = cases(9, seed=2, num_tokens=100), []
    for num_gpus in (1, 2):
        config = config_on(num_gpus, max_num_seqs=1, speculation=speculation_of(drafts, llama))
        engine = simulated_engine(llama, config, acceptance=[1, 3, 2, 4, 4, 1, 2])
        found.append(anyio.run(alone, engine, requests))
        assert engine.rounds.trace().mean > 1.5  # a tree of random drafts is wide, and its paths are short
    same(*found)


class Instead:
    """A replay that does something else than its graph."""

    def __init__(self, launch: Callable[[], None]) -> None:
        self.launch = launch

    def close(self) -> None:
        pass


def launch_only(engine: Engine, rank: int, instead: Callable[[], None] = lambda: None) -> None:
    """Have rounds launched on one GPU alone, and call `instead` for the other one."""
    for replay in engine._driver._executor._graphs.decode.values():
        replay._replays = [
            each if index == rank else Instead(instead) for index, each in enumerate(replay._replays)
        ]


def fail() -> None:
    raise RuntimeError("not launched")


def test_a_gpu_that_fails_at_start_leaves_the_others_usable(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    capture, num_captures = GpuDevice.capture, 0

    def failing(device: GpuDevice, step: Callable[[], None]) -> Replay:
        nonlocal num_captures
        num_captures += device.torch_device.index == 1
        if num_captures == 3:
            raise RuntimeError("no capture")
        return capture(device, step)

    monkeypatch.setattr(GpuDevice, "capture", failing)
    engine = engine_on(llama, 2)
    with pytest.raises(ExecutorError, match="no capture") as found:
        anyio.run(engine.start)
    assert not found.value.process_unusable
    monkeypatch.undo()
    requests = cases(3, seed=4, num_tokens=4)
    first = anyio.run(answers, engine, requests)
    same(first, anyio.run(answers, engine_on(llama, 1), requests))


def test_closing_while_a_gpu_waits_in_vain_takes_bounded_time(llama: Path) -> None:
    engine = engine_on(llama, 2, step_timeout_s=2.0)

    async def main() -> float:
        await engine.start()
        stream = engine.generate([1, 2, 3], SamplingParams(max_tokens=2000, ignore_eos=True))
        async for _ in stream:
            break
        launch_only(engine, 0)
        begun = time.monotonic()
        await engine.aclose()
        return time.monotonic() - begun

    assert anyio.run(main) < 20.0


@pytest.mark.parametrize("instead", [lambda: None, fail], ids=["silent", "error"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_gpu_without_a_launch_ends_streams_in_bounded_time(
    llama: Path, instead: Callable[[], None], rank: int
) -> None:
    engine = engine_on(llama, 2, step_timeout_s=2.0)
    prompt, params = [1, 2, 3], SamplingParams(max_tokens=2000, ignore_eos=True)

    async def serve() -> float:
        await engine.start()
        stream = engine.generate(prompt, params)
        begun = 0.0
        with pytest.raises(ExecutorError):
            async for _ in stream:
                if not begun:
                    begun = time.monotonic()
                    launch_only(engine, 1 - rank, instead)
        taken = time.monotonic() - begun
        await engine.aclose()
        return taken

    assert anyio.run(serve) < 20.0
    # The GPUs are as they were: a new engine gives the tokens of one GPU.
    requests = cases(4, seed=3, num_tokens=8)
    same(
        anyio.run(answers, engine_on(llama, 2), requests),
        anyio.run(answers, engine_on(llama, 1), requests),
    )


def test_a_gpu_that_hangs_ends_streams_in_bounded_time(llama: Path) -> None:
    """The process is unusable then; here the GPU goes on after some seconds."""
    engine = engine_on(llama, 2, step_timeout_s=1.0)

    async def main() -> None:
        async with engine:
            stream = engine.generate([1, 2, 3], SamplingParams(max_tokens=2000, ignore_eos=True))
            await anext(stream)
            device = engine._driver._executor._gpus[1].device

            def hang() -> None:
                with device.work():
                    torch.cuda._sleep(6_000_000_000)  # clock cycles, about three seconds

            begun = time.monotonic()
            launch_only(engine, 0, hang)
            with anyio.fail_after(20.0), pytest.raises(ExecutorError, match="within 1 s") as caught:
                await stream
            assert caught.value.process_unusable
        assert time.monotonic() - begun < 20.0

    anyio.run(main)
    torch.cuda.synchronize(1)
