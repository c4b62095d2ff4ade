"""Checks of `EngineConfig.tensor_parallel`, and the GPUs and parts that it stands for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import permutations

import torch

from drift_sdk.config import EngineConfig
from drift_sdk.errors import ConfigError
from drift_sdk.models.shard import Shard, shard_obstacles
from drift_sdk.spec.model import ModelSpec
from drift_sdk.startup.device_memory import opening_lock
from drift_sdk.startup.weight_form import choose_weight_form

__all__ = ["check_division", "opening_locks", "parallel_devices", "shards_of"]

POLL_S = 0.05
MOST_SUGGESTED = 64
"""The largest number of GPUs that an error names as possible."""


def shards_of(config: EngineConfig) -> list[Shard | None]:
    """The part of each GPU, in order of rank; None: the whole model."""
    size = config.tensor_parallel
    return [None] if size == 1 else [Shard(rank=rank, size=size) for rank in range(size)]


def check_division(config: EngineConfig, model: ModelSpec, executor: str) -> None:
    """Raise ConfigError if the model, with these settings, cannot be divided between so many GPUs."""
    if config.tensor_parallel == 1:
        return

    if config.fast_prompts:
        raise ConfigError.of("fast_prompts", True, "False for a model divided between GPUs")

    size, form = config.tensor_parallel, choose_weight_form(config, model)
    if form != "expanded":
        raise ConfigError.of("tensor_parallel", size, f'1 for weights="{form}"')

    obstacles = " and ".join(shard_obstacles(model, size))
    if obstacles:
        sizes = [each for each in range(2, MOST_SUGGESTED + 1) if not any(shard_obstacles(model, each))]
        allowed = f"{', '.join(map(str, [1, *sizes]))} for this model: it has {obstacles}"
        raise ConfigError.of("tensor_parallel", size, allowed)

    if executor != "graph":
        raise ConfigError.of("tensor_parallel", size, f"1 for executor {executor}")


def parallel_devices(config: EngineConfig, first: torch.device) -> Sequence[torch.device]:
    """The GPUs of an engine, the first one given. Raises ConfigError if this machine lacks one of them, or if
    they differ or do not reach each other's memory."""
    size = config.tensor_parallel
    if size == 1:
        return [first]

    if first.type != "cuda":
        raise ConfigError.of("tensor_parallel", size, f"1 on {first}")

    index, number = first.index or 0, torch.cuda.device_count()
    if index + size > number:
        allowed = f"at most {number - index} from {first} on: this machine has {number} GPUs"
        raise ConfigError.of("tensor_parallel", size, allowed)

    indices = range(index, index + size)
    names = {torch.cuda.get_device_name(each) for each in indices}
    if len(names) > 1:
        found = " and ".join(sorted(names))
        raise ConfigError.of("tensor_parallel", size, f"1, or GPUs of one kind; here {found}")

    for one, other in permutations(indices, 2):
        if not torch.cuda.can_device_access_peer(one, other):
            allowed = f"1, or GPUs that reach each other's memory: cuda:{one} does not reach cuda:{other}"
            raise ConfigError.of("tensor_parallel", size, allowed)

    return [torch.device("cuda", each) for each in indices]


@contextmanager
def opening_locks(devices: Sequence[torch.device], check: Callable[[], object]) -> Iterator[None]:
    """The `opening_lock` of all devices, which are in ascending order.

    check: called again and again while it waits for a lock; what it raises ends the waiting. Another engine
           may have the lock for as long as its draft is downloaded.
    """
    with ExitStack() as stack:
        for device in devices:
            lock = opening_lock(device)
            while not lock.acquire(timeout=POLL_S):
                check()
            stack.callback(lock.release)
        yield
