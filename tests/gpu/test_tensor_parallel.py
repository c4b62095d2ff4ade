"""A model divided between two GPUs: the tokens of one, to the last bit, and failures in bounded time."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
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
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
Case = tuple[list[int], SamplingParams]


@pytest.fixture(scope="module", params=["llama", "qwen3", "qwen2", "llama 8b"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Models whose products have four slices and two; with norms of heads, biases and a tied head."""
    path = tmp_path_factory.mktemp("model")
    if request.param == "llama 8b":
        make_random_folder(path, "llama", max_position_embeddings=8192, **LLAMA_8B)
    else:
        fields = {"tie_word_embeddings": request.param == "qwen3", "max_position_embeddings": 8192}
        make_random_folder(path, request.param, **fields)
    return path


def engine_on(folder: Path, num_gpus: int, **fields: Any) -> Engine:
    config = EngineConfig(
        device="cuda",
        executor="graph",
        load="random",
        dtype="bfloat16",
        max_num_seqs=32,
        max_model_len=5200,
        kv_cache_tokens=32 * 1024,
        prefill_token_budget=1024,
        exact_prefill=True,
        tensor_parallel=num_gpus,
    )
    return Engine(folder, config.replace(**fields))


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

    async with engine, anyio.create_task_group() as group:
        for index in range(len(requests)):
            group.start_soon(ask, index)
    return [found[index] for index in range(len(requests))]


CASES = cases(32, seed=1, num_tokens=24)


def same(ones: list[Completion], others: list[Completion]) -> None:
    for one, other in zip(ones, others, strict=True):
        assert one.token_ids == other.token_ids
        assert one.logprobs == other.logprobs


@pytest.fixture(scope="module")
def of_one(folder: Path) -> list[Completion]:
    """The answers of one GPU."""
    return anyio.run(answers, engine_on(folder, 1), CASES)


@pytest.mark.parametrize("drafts", ["none", "ngram", "chain", "tree"])
def test_two_gpus_give_the_tokens_of_one(drafts: str, folder: Path, of_one: list[Completion]) -> None:
    """Drafts are made on both GPUs."""
    speculation = None
    if drafts == "ngram":
        speculation = Speculation(draft=NGram())
    elif drafts != "none":
        draft = make_random_draft_folder(folder / "draft", folder)
        shape = DynamicTree(depth=3, top_k=4, num_draft_tokens=7) if drafts == "tree" else Chain(3)
        speculation = Speculation(draft=draft, shape=shape, checks=drafts == "chain")
    same(of_one, anyio.run(answers, engine_on(folder, 2, speculation=speculation), CASES))


def test_a_request_alone_gets_the_tokens_that_it_gets_in_a_batch(folder: Path) -> None:
    requests = cases(18, seed=2, num_tokens=16)

    async def alone(engine: Engine) -> list[Completion]:
        async with engine:
            return [await engine.generate(*case) for case in requests]

    together = anyio.run(answers, engine_on(folder, 2), requests)
    same(anyio.run(alone, engine_on(folder, 2, max_num_seqs=1)), together)


class Failing:
    """A replay whose graph is not launched: with an error, or silently."""

    def __init__(self, error: Exception | None) -> None:
        self._error = error

    def launch(self) -> None:
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        pass


def launch_only(engine: Engine, rank: int, error: Exception | None = None) -> None:
    """Have rounds launched on one GPU alone; the launch on the other one raises an error, if given."""
    for replay in engine._driver._executor._graphs.decode.values():
        replay._replays = [
            each if index == rank else Failing(error) for index, each in enumerate(replay._replays)
        ]


def test_a_gpu_that_fails_at_start_leaves_the_others_usable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_random_folder(tmp_path, "llama", max_position_embeddings=8192)
    capture, num_captures = GpuDevice.capture, 0

    def failing(device: GpuDevice, step: Callable[[], None]) -> Replay:
        nonlocal num_captures
        num_captures += device.torch_device.index == 1
        if num_captures == 3:
            raise RuntimeError("no capture")
        return capture(device, step)

    monkeypatch.setattr(GpuDevice, "capture", failing)
    engine = engine_on(tmp_path, 2)
    with pytest.raises(ExecutorError, match="no capture") as found:
        anyio.run(engine.start)
    assert not found.value.process_unusable
    monkeypatch.undo()
    requests = cases(3, seed=4, num_tokens=4)
    first = anyio.run(answers, engine, requests)
    same(first, anyio.run(answers, engine_on(tmp_path, 2), requests))


def test_closing_while_a_gpu_waits_in_vain_takes_bounded_time(tmp_path: Path) -> None:
    make_random_folder(tmp_path, "llama", max_position_embeddings=8192)
    engine = engine_on(tmp_path, 2, step_timeout_s=2.0)

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


@pytest.mark.parametrize("error", [None, RuntimeError("not launched")], ids=["silent", "error"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_gpu_without_a_launch_ends_streams_in_bounded_time(
    tmp_path: Path, error: Exception | None, rank: int
) -> None:
    make_random_folder(tmp_path, "llama", max_position_embeddings=8192)
    engine = engine_on(tmp_path, 2, step_timeout_s=2.0)
    prompt, params = [1, 2, 3], SamplingParams(max_tokens=2000, ignore_eos=True)

    async def serve() -> float:
        await engine.start()
        stream = engine.generate(prompt, params)
        begun = 0.0
        with pytest.raises(ExecutorError):
            async for _ in stream:
                if not begun:
                    begun = time.monotonic()
                    launch_only(engine, 1 - rank, error)
        taken = time.monotonic() - begun
        await engine.aclose()
        return taken

    assert anyio.run(serve) < 20.0
    # The GPUs are as they were: a new engine gives the tokens of one GPU.
    requests = cases(4, seed=3, num_tokens=8)
    same(
        anyio.run(answers, engine_on(tmp_path, 2), requests),
        anyio.run(answers, engine_on(tmp_path, 1), requests),
    )
