"""Engines in a program that uses the GPU itself, on another thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import anyio
import pytest
import torch
from model_zoo import make_model

from drift_sdk import ConfigError, Engine, EngineConfig, NGram, SamplingParams, Speculation

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

NUM_STARTS = 3
PARAMS = SamplingParams(max_tokens=150, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_model(0, folder)
    return folder


def capture_graphs() -> None:
    """Capture in the mode "global", torch's own, and replay."""
    x = torch.zeros(1000, device="cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x
        for _ in range(200):
            y = y + 1.0
    for _ in range(3):
        graph.replay()
    assert y.sum().item() == 200_000.0


def allocate_and_wait() -> None:
    tensors = [torch.ones(1 << 20, device="cuda") for _ in range(20)]
    torch.cuda.synchronize()
    assert sum(tensor.sum().item() for tensor in tensors) == 20 * 2**20
    del tensors
    torch.cuda.empty_cache()


class Repeated:
    """Work of the program that a thread repeats. num_done: how often it was done. num_refused: how often it
    failed because an engine was capturing."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.num_done = self.num_refused = 0
        self._work, self._has_ended = work, threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._repeat)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._has_ended.set()
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _repeat(self) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                while not self._has_ended.is_set():
                    self._attempt()
        except BaseException as error:
            self._error = error

    def _attempt(self) -> None:
        try:
            self._work()
        except RuntimeError as error:
            if "not permitted when stream is capturing" not in str(error):
                raise

            self.num_refused += 1
            self._has_ended.wait(0.05)
        else:
            self.num_done += 1


def engine_of(folder: Path, dtype: str = "float32") -> Engine:
    config = EngineConfig(
        device="cuda",
        executor="graph",
        dtype=dtype,
        max_num_seqs=8,
        max_model_len=256,
        kv_cache_tokens=4096,
        block_size=16,
        speculation=Speculation(draft=NGram()),
    )
    return Engine(folder, config)


async def answers(engine: Engine) -> list[tuple[int, ...]]:
    streams = [engine.generate([5, 6, 7 + index, 5, 6], PARAMS) for index in range(8)]
    return [(await stream).token_ids for stream in streams]


@contextmanager
def settings_of_a_trainer() -> Iterator[None]:
    """Torch's global settings as programs that also train set them."""
    torch.set_default_dtype(torch.float64)
    torch.set_float32_matmul_precision("medium")
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_float32_matmul_precision("highest")
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_answers_do_not_depend_on_settings_of_the_program(folder: Path, dtype: str) -> None:
    async def ask() -> list[tuple[int, ...]]:
        async with engine_of(folder, dtype) as engine:
            return await answers(engine)

    expected = anyio.run(ask)
    with settings_of_a_trainer():
        assert anyio.run(ask) == expected


@pytest.mark.parametrize("work", [capture_graphs, allocate_and_wait])
def test_program_and_serving_engine_do_not_disturb_each_other(folder: Path, work: Callable[[], None]) -> None:
    async def main() -> None:
        async with engine_of(folder) as engine:
            expected = await answers(engine)
            with Repeated(work) as program:
                while program.num_done < 20:
                    assert await answers(engine) == expected
            assert program.num_refused == 0

    anyio.run(main)


@pytest.mark.parametrize("work", [capture_graphs, allocate_and_wait])
def test_engine_starts_beside_a_program_that_waits_for_the_gpu(
    folder: Path, work: Callable[[], None], record_property: Callable[[str, object], None]
) -> None:
    async def ask() -> list[tuple[int, ...]]:
        async with engine_of(folder) as engine:
            return await answers(engine)

    expected = anyio.run(ask)
    with Repeated(work) as program:
        for _ in range(NUM_STARTS):
            assert anyio.run(ask) == expected
    record_property("refused", program.num_refused)
    assert program.num_done > NUM_STARTS


def share_a_stream() -> None:
    """Work of the program, which waits for its own stream, and copies without a stream of its own."""
    x = torch.ones(1 << 20, device="cuda")
    torch.cuda.current_stream().synchronize()
    event = torch.cuda.Event()
    event.record()
    event.synchronize()
    with torch.cuda.stream(torch.cuda.default_stream()):
        assert (x.cpu() + 1.0).sum().item() == 2**21
    torch.cuda.empty_cache()


def test_program_that_waits_for_streams_and_starting_engine_do_not_disturb_each_other(folder: Path) -> None:
    async def ask() -> list[tuple[int, ...]]:
        async with engine_of(folder) as engine:
            return await answers(engine)

    expected = anyio.run(ask)
    with Repeated(share_a_stream) as program:
        for _ in range(NUM_STARTS):
            assert anyio.run(ask) == expected
    assert program.num_done > NUM_STARTS and program.num_refused == 0


def test_engine_stays_within_the_memory_of_the_program(folder: Path) -> None:
    """A cache for which the GPU has room, and the program has not."""
    config = EngineConfig(device="cuda", dtype="float32", kv_cache_tokens=8_000_000)  # 12.3 GB

    async def start() -> None:
        async with Engine(folder, config):
            pass

    torch.cuda.set_per_process_memory_fraction(0.05)
    try:
        with pytest.raises(ConfigError, match="there is room for") as caught:
            anyio.run(start)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert caught.value.field == "kv_cache_tokens"
