"""Engines on the graph executor: answers, several engines on a GPU, closing, sleeping and failing."""

from __future__ import annotations

import gc
import itertools
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import anyio
import fatal_child
import pytest
import torch
from loops import on_every_loop, run, until
from model_zoo import make_model

from drift_sdk import (
    Completion,
    ConfigError,
    Engine,
    EngineConfig,
    ExecutorError,
    JsonSchema,
    Regex,
    SamplingParams,
)
from drift_sdk.execution.device.device import GpuDevice, Instantiation, Replay

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

VOCAB_SIZE = 500
ROOM = 8 << 20
"""Bytes that torch may reserve for good: of its workspaces."""
ENDLESS = SamplingParams(max_tokens=None, ignore_eos=True)

Case = tuple[list[int], SamplingParams]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_model(0, folder)
    return folder


@pytest.fixture(scope="module")
def other_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("other")
    make_model(19, folder)
    return folder


def engine_of(folder: Path, executor: str = "graph", **fields: Any) -> Engine:
    options = {"max_num_seqs": 8, "max_model_len": 256, "kv_cache_tokens": 4096, "block_size": 16} | fields
    return Engine(folder, EngineConfig(device="cuda", executor=executor, dtype="float32", **options))


def random_prompt(rng: random.Random, most: int = 90) -> list[int]:
    return [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(1, most))]


async def answers(engine: Engine, cases: Sequence[Case]) -> list[Completion]:
    streams = [engine.generate(*case) for case in cases]
    return [await stream for stream in streams]


def varied_cases() -> list[Case]:
    """Requests that use every sampling field that the device reads."""
    rng = random.Random(12)
    ways: list[dict[str, Any]] = [
        {},
        {"logprobs": 5},
        {"prompt_logprobs": 2, "logprobs": 0},
        {"temperature": 0.8, "top_p": 0.9, "top_k": 30, "logprobs": 2},
        {"temperature": 1.1, "min_p": 0.05, "stop_token_ids": tuple(rng.sample(range(VOCAB_SIZE), 40))},
        {"logit_bias": {token: rng.uniform(-6, 6) for token in range(3, VOCAB_SIZE)}, "logprobs": 1},
        {"repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.7},
        {"allowed_token_ids": tuple(rng.sample(range(3, VOCAB_SIZE), 60)), "temperature": 0.7},
        {"min_tokens": 12, "stop_token_ids": tuple(rng.sample(range(VOCAB_SIZE), 60))},
        {"stop": ("e", "qu", "a "), "temperature": 0.9},
        {"stop": "o", "include_stop": True, "min_tokens": 5},
    ]
    return [
        (
            random_prompt(rng),
            SamplingParams(
                max_tokens=rng.randint(15, 40),
                seed=index,
                ignore_eos=index % 5 > 0,
                **ways[index % len(ways)],
            ),
        )
        for index in range(3 * len(ways))
    ]


def constrained_cases() -> list[Case]:
    rng = random.Random(13)
    item = {"type": "object", "properties": {"id": {"type": "integer"}, "on": {"type": "boolean"}}}
    grammars = [
        Regex("[a-z]{4,30}"),
        JsonSchema({"type": "array", "items": {"enum": ["ab", "cd", 7]}, "minItems": 2, "maxItems": 8}),
        JsonSchema({**item, "required": ["id", "on"], "additionalProperties": False}),
        None,
    ]
    return [
        (
            random_prompt(rng),
            SamplingParams(
                max_tokens=30,
                seed=index,
                temperature=index % 3 * 0.7,
                grammar=grammars[index % len(grammars)],
            ),
        )
        for index in range(16)
    ]


def assert_near(found: Any, expected: Any) -> None:
    """Compare log-probabilities of tokens or of a prompt: equal ids, numbers within float32 rounding."""
    assert (found is None) == (expected is None)
    for entry, other in zip(found or (), expected or (), strict=True):
        if other is None:
            assert entry is None
            continue

        assert entry.token_id == other.token_id
        assert abs(entry.logprob - other.logprob) < 1e-3
        # Two tokens that float32 cannot tell apart may change places.
        assert all(abs(a - b) < 1e-3 for (_, a), (_, b) in zip(entry.top, other.top, strict=True))
        expected = dict(other.top)
        least = min(expected.values(), default=0.0)
        assert all(abs(a - expected.get(token, least)) < 1e-3 for token, a in entry.top)


@pytest.mark.parametrize("fast_prompts", [False, True])
@pytest.mark.parametrize("kind", ["varied", "constrained"])
def test_answers_equal_those_of_the_eager_executor(folder: Path, kind: str, fast_prompts: bool) -> None:
    """In float32: texts, tokens, finish reasons and log-probabilities, with prompts in chunks and more
    requests than slots."""
    if kind == "constrained":
        pytest.importorskip("llguidance")
    cases = varied_cases() if kind == "varied" else constrained_cases()

    async def main(executor: str) -> list[Completion]:
        fields = {"fast_prompts": fast_prompts} if executor == "graph" else {}
        async with engine_of(folder, executor, prefill_token_budget=64, **fields) as engine:
            return await answers(engine, cases)

    expected = anyio.run(main, "eager")
    found = anyio.run(main, "graph")
    for index, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert one.token_ids == other.token_ids, f"request {index}"
        assert (one.text, one.finish_reason, one.stop_reason) == (
            other.text,
            other.finish_reason,
            other.stop_reason,
        )
        assert one.parsed == other.parsed
        assert_near(one.logprobs, other.logprobs)
        assert_near(one.prompt_logprobs, other.prompt_logprobs)
    assert len({one.finish_reason for one in found}) == 2


def test_many_slot_updates_do_not_affect_other_requests(folder: Path) -> None:
    """Updates of sequences that are assigned in one step may need more replays than the ring has entries,
    while results of other sequences are still in it."""
    rng = random.Random(14)
    bias = {token: rng.uniform(-6, 6) for token in range(3, VOCAB_SIZE)}

    def params(max_tokens: int, seed: int, **fields: Any) -> SamplingParams:
        return SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=1.0, seed=seed, **fields)

    async def main(executor: str) -> list[tuple[int, ...]]:
        found = []
        async with engine_of(folder, executor, max_num_seqs=24, kv_cache_tokens=16_384) as engine:
            for num_heavy in range(11, 20):
                cases = [([5, 6, 7 + index], params(40, index)) for index in range(4)]
                # These end in one step and free slots for all requests with many updates.
                cases += [([8, index], params(6, index)) for index in range(20)]
                cases += [([9, index], params(3, index, logit_bias=bias)) for index in range(num_heavy)]
                await engine.pause()
                streams = [engine.generate(*case) for case in cases]
                await until(lambda: engine.stats().num_waiting == 24 + num_heavy)  # noqa: B023
                await engine.resume()
                found += [(await stream).token_ids for stream in streams]
        return found

    assert anyio.run(main, "graph") == anyio.run(main, "eager")


@on_every_loop
def test_cancelled_requests_do_not_affect_others(folder: Path, loop: str) -> None:
    rng = random.Random(15)
    cases = [
        (random_prompt(rng), SamplingParams(max_tokens=40, seed=index, temperature=0.8)) for index in range(6)
    ]
    long = SamplingParams(max_tokens=160, ignore_eos=True)

    async def main() -> None:
        async with engine_of(folder) as engine:
            expected = await answers(engine, cases)
            num_blocks = engine.stats().num_blocks
            for num_chunks in (0, 1, 3, 10):
                doomed = [engine.generate(prompt, long) for prompt, _ in cases[:3]]
                streams = [engine.generate(*case) for case in cases]
                for stream in doomed:
                    for _ in range(num_chunks):
                        await anext(stream)
                    stream.cancel()
                for stream, completion in zip(streams, expected, strict=True):
                    found = await stream
                    assert (found.token_ids, found.text) == (completion.token_ids, completion.text)
                for stream in doomed:
                    found = await stream
                    # On a busy machine it may reach its length before it is cancelled.
                    is_whole = len(found.token_ids) == long.max_tokens
                    assert found.finish_reason == ("length" if is_whole else "cancelled")
                await until(lambda: engine.stats().num_running == engine.stats().num_waiting == 0)
                assert engine.stats().num_free_blocks == num_blocks

    run(loop, main)


def test_two_engines_at_once_answer_as_each_alone(folder: Path, other_folder: Path) -> None:
    """Both are opened, used and closed at the same time."""
    rng = random.Random(16)
    folders = (folder, other_folder)
    cases = [
        (
            random_prompt(rng),
            SamplingParams(max_tokens=40, seed=index, temperature=index % 2 * 0.8, logprobs=1),
        )
        for index in range(20)
    ]

    async def ask(folder: Path, found: dict[Path, list[Completion]]) -> None:
        async with engine_of(folder, prefill_token_budget=64) as engine:
            for _ in range(3):
                found[folder] = await answers(engine, cases)

    async def main() -> None:
        alone: dict[Path, list[Completion]] = {}
        together: dict[Path, list[Completion]] = {}
        for folder in folders:
            await ask(folder, alone)
        async with anyio.create_task_group() as tasks:
            for folder in folders:
                tasks.start_soon(ask, folder, together)
        for folder in folders:
            for one, other in zip(together[folder], alone[folder], strict=True):
                assert (one.token_ids, one.logprobs) == (other.token_ids, other.logprobs)

    anyio.run(main)


def test_engines_close_while_others_start(folder: Path, other_folder: Path) -> None:
    """Memory that one frees belongs to the allocator that the other one captures with."""
    params = SamplingParams(max_tokens=20, ignore_eos=True)

    async def ask_again(folder: Path, found: list[tuple[int, ...]]) -> None:
        for _ in range(5):
            async with engine_of(folder) as engine:
                found.append((await engine.generate([5, 6, 7], params)).token_ids)

    async def main() -> None:
        found: dict[Path, list[tuple[int, ...]]] = {folder: [], other_folder: []}
        async with anyio.create_task_group() as tasks:
            for each in found:
                tasks.start_soon(ask_again, each, found[each])
        for answers in found.values():
            assert len(answers) == 5 and len(set(answers)) == 1

    anyio.run(main)


def test_stream_continues_after_sleep_and_wake(folder: Path) -> None:
    """Weights, graphs and KV cache are freed and made again."""

    async def main() -> None:
        async with engine_of(folder) as engine:
            params = SamplingParams(max_tokens=200, temperature=0.9, seed=4, ignore_eos=True)
            expected = await engine.generate([5, 6, 7], params)
            stream = engine.generate([5, 6, 7], params)
            await anext(stream)
            await engine.sleep()
            await engine.wake()
            assert (await stream).token_ids == expected.token_ids

    anyio.run(main)


def test_too_large_cache_raises_and_leaves_the_process_usable(folder: Path) -> None:
    async def main() -> None:
        for _ in range(2):
            with pytest.raises(ConfigError, match="there is room for") as caught:
                await engine_of(folder, kv_cache_tokens=2**31 - 1).start()
            assert caught.value.field == "kv_cache_tokens"
            del caught
        async with engine_of(folder) as engine:
            assert (
                len((await engine.generate([5, 6], SamplingParams(max_tokens=8, ignore_eos=True))).token_ids)
                == 8
            )

    anyio.run(main)


def fail_compiling(patch: pytest.MonkeyPatch) -> None:
    def failing(device: GpuDevice, steps: Iterable[Callable[[], None]], on_progress: object) -> None:
        def fail() -> None:
            raise RuntimeError("planted")

        compile_kernels(device, (*itertools.islice(steps, 1), fail), on_progress)
        device.warm_up(fail)  # if nothing had to be compiled

    compile_kernels = GpuDevice.compile_kernels
    patch.setattr(GpuDevice, "compile_kernels", failing)


def fail_capturing(patch: pytest.MonkeyPatch) -> None:
    """In the middle of a capture, after others."""
    numbers = itertools.count()

    def failing(device: GpuDevice, step: Callable[[], None]) -> Replay:
        is_last = next(numbers) == 4

        def fail() -> None:
            step()
            if is_last and torch.cuda.is_current_stream_capturing():
                raise RuntimeError("planted")

        return capture(device, fail)

    capture = GpuDevice.capture
    patch.setattr(GpuDevice, "capture", failing)


def fail_instantiating(patch: pytest.MonkeyPatch) -> None:
    numbers = itertools.count()

    def failing(instantiation: Instantiation, builder: Any) -> Any:
        if next(numbers) == 3:
            raise RuntimeError("planted")

        return instantiate(instantiation, builder)

    instantiate = Instantiation._instantiate
    patch.setattr(Instantiation, "_instantiate", failing)


@pytest.mark.parametrize("fail", [fail_compiling, fail_capturing, fail_instantiating])
def test_failed_start_leaves_the_process_usable(
    folder: Path, fail: Callable[[pytest.MonkeyPatch], None]
) -> None:
    """Memory of the failed engine is free again, also while its error is kept."""
    params = SamplingParams(max_tokens=8, ignore_eos=True)

    async def ask() -> tuple[int, ...]:
        async with engine_of(folder) as engine:
            return (await engine.generate([5, 6], params)).token_ids

    async def start() -> None:
        async with engine_of(folder):
            pass

    expected = anyio.run(ask)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(0)
    for _ in range(2):
        with pytest.MonkeyPatch.context() as patch:
            fail(patch)
            with pytest.raises(ExecutorError, match="planted"):
                anyio.run(start)
        assert anyio.run(ask) == expected
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved(0) <= before + ROOM


def test_failed_step_closes_only_its_engine(folder: Path) -> None:
    """An error that CUDA recovers from, in the middle of a round."""

    async def main() -> None:
        async with engine_of(folder) as healthy, engine_of(folder) as broken:
            params = SamplingParams(max_tokens=100, ignore_eos=True)
            expected = (await healthy.generate([5, 6], params)).token_ids
            streams = [broken.generate([5, 6], ENDLESS) for _ in range(3)]
            others = [healthy.generate([5, 6], params) for _ in range(3)]
            for stream in streams:
                await anext(stream)

            def failing() -> None:
                raise RuntimeError("CUDA error: invalid configuration argument")

            for replay in broken._driver._executor._graphs.decode.values():
                replay.launch = failing
            for stream in streams:
                with pytest.raises(ExecutorError, match="invalid configuration argument") as caught:
                    await stream
                assert not caught.value.process_unusable
            for other in others:
                assert (await other).token_ids == expected
        async with engine_of(folder) as engine:
            assert (await engine.generate([5, 6], params)).token_ids == expected

    anyio.run(main)


def test_fatal_error_reaches_every_stream_and_the_process_exits(folder: Path, other_folder: Path) -> None:
    """Streams of both engines get it, because the context that they share is lost."""
    command = [sys.executable, fatal_child.__file__, str(folder), str(other_folder)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        line = child.stdout.readline()
        told_at = time.monotonic()
        _, stderr = child.communicate(timeout=30)
        end_s = time.monotonic() - told_at
    finally:
        child.kill()
    assert line, stderr
    report = json.loads(line)
    assert len(report["failures"]) == 6
    for failure in report["failures"]:
        assert failure["type"] == "ExecutorError" and failure["is_unusable"], (failure, stderr)
        assert "no engine of this process" in failure["message"]
    assert report["late"] == ["unusable", "unusable"]
    assert report["close_s"] < 5.0
    assert child.returncode == 0, stderr
    assert end_s < 15.0
    assert "terminate called" not in stderr
