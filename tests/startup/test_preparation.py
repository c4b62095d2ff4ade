"""Work on threads while a model is loaded for the graph executor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from tiny_llama import tiny_llama

from drift_sdk.families import read_spec

pytest.importorskip("cuda.core")

from drift_sdk import EngineConfig
from drift_sdk._kernels.launch import kernel
from drift_sdk.execution.device import streams
from drift_sdk.startup import sizing
from drift_sdk.startup.model_startup import prepared_graphs
from drift_sdk.startup.sizing import DeviceMemory

MODEL = read_spec(tiny_llama())
FREE = 1000


@pytest.mark.parametrize(
    ("options", "indices", "row_counts"),
    [
        ({"fast_prompts": True}, [0], (16, 32, 64, 128, 256, 384, 512, 768, 1024, 1536, 2048)),
        ({"fast_prompts": True, "prefill_token_budget": 40}, [1], (16, 32, 48)),
        ({}, [0], ()),
        ({"tensor_parallel": 2}, [2, 3], ()),
    ],
)
def test_each_gpu_gets_the_products_of_its_prefill_steps(
    options: dict[str, Any],
    indices: Sequence[int],
    row_counts: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events: list[Any] = []
    prepared: dict[int, Any] = {}

    @contextmanager
    def prepare(index: int, work: Callable[[], Callable[[], None]]) -> Iterator[None]:
        prepared[index] = work
        yield
        events.append(index)

    monkeypatch.setattr(kernel, "prepare_cache_keys", lambda: events.append("hash"))
    monkeypatch.setattr(streams, "prepared_stream", prepare)
    monkeypatch.setattr(sizing, "available_bytes", lambda device: FREE)
    config = EngineConfig(gpu_memory_fraction=0.75, **options)
    memories = [DeviceMemory(torch.device("cuda", index), config) for index in indices]
    with prepared_graphs(config, MODEL, torch.bfloat16, memories):
        assert events == ["hash"] and [*prepared] == indices
    assert sorted(events[1:]) == indices
    for index, work in prepared.items():
        assert isinstance(work, partial)
        assert work.args == (MODEL, torch.bfloat16, row_counts, torch.device("cuda", index), FREE // 4)
