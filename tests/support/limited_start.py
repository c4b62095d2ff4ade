"""Starts engines under limits of this process, and prints as JSON what became of each, by name.

Arguments: a model's folder, and one of a model whose weights and KV cache take more than `ROOM`.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil

from drift_sdk import Engine, EngineConfig, SyncEngine, inspect

__all__: list[str] = []

ROOM = 2**28
CONFIG = EngineConfig(device="cpu", max_model_len=64, kv_cache_tokens=64)
LARGE_KV = EngineConfig(device="cpu", max_model_len=64, kv_cache_tokens=10**7)
RANDOM = EngineConfig(device="cpu", max_model_len=64, kv_cache_tokens=64, load="random")


@contextmanager
def limited(kind: int, limit: int) -> Iterator[None]:
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, before)


@contextmanager
def few_descriptors(number: int) -> Iterator[None]:
    """Leave so many file descriptors."""
    opened = []
    with limited(resource.RLIMIT_NOFILE, 256):
        try:
            while True:
                opened.append(os.open(os.devnull, os.O_RDONLY))
        except OSError:
            pass
        try:
            for _ in range(number):
                os.close(opened.pop())
            yield
        finally:
            for descriptor in opened:
                os.close(descriptor)


def outcome(act: Callable[[], object]) -> str:
    try:
        return f"done: {act()}"
    except BaseException as error:
        return f"{type(error).__name__}: {error}"


def start(folder: str, config: EngineConfig) -> None:
    with SyncEngine(folder, config):
        pass


async def start_on_loop(folder: str, number: int) -> None:
    with few_descriptors(number):
        async with Engine(folder, CONFIG):
            pass


def main(folder: str, large: str) -> None:
    start(folder, CONFIG)  # what is loaded once is not to be limited
    inspect(folder, CONFIG)
    found = {}
    for number in (0, 2):
        with few_descriptors(number):
            found[f"descriptors, start, {number}"] = outcome(lambda: start(folder, CONFIG))
        with few_descriptors(number):
            found[f"descriptors, inspect, {number}"] = outcome(lambda: inspect(folder, CONFIG).reasons)
        started = outcome(lambda number=number: asyncio.run(start_on_loop(folder, number)))  # type: ignore[misc]
        found[f"descriptors, loop, {number}"] = started
    with limited(resource.RLIMIT_AS, psutil.Process().memory_info().vms + ROOM):
        found["KV cache"] = outcome(lambda: start(folder, LARGE_KV))
        found["weights"] = outcome(lambda: start(large, RANDOM))
        found["inspect"] = outcome(lambda: inspect(large, RANDOM).reasons)
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
