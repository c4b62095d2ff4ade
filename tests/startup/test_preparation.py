"""What is begun on threads before a model is loaded for the graph executor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from tiny_llama import tiny_llama

pytest.importorskip("cuda.core")

from drift_sdk import EngineConfig
from drift_sdk._kernels.common import cache_keys
from drift_sdk.execution.device import streams
from drift_sdk.models.decoder_config import DecoderConfig
from drift_sdk.startup.preparation import prepare_graphs

MODEL = DecoderConfig.from_hf(tiny_llama())


@pytest.mark.parametrize(
    ("options", "indices", "row_counts"),
    [
        ({}, [0], (16, 32, 64, 128, 256, 384, 512, 768, 1024, 1536, 2048)),
        ({"prefill_token_budget": 40}, [1], (16, 32, 48)),
        ({"exact_prefill": True}, [0], ()),
        ({"tensor_parallel": 2}, [2, 3], ()),  # whose prompts are exact
    ],
)
def test_each_gpu_gets_the_products_of_its_prefill_steps(
    options: dict[str, Any],
    indices: Sequence[int],
    row_counts: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hashed: list[bool] = []
    prepared: dict[int, Any] = {}

    def prepare(index: int, work: Callable[[], None]) -> None:
        prepared[index] = work

    monkeypatch.setattr(cache_keys, "prepare_cache_keys", lambda: hashed.append(True))
    monkeypatch.setattr(streams, "prepare_stream", prepare)
    devices = [torch.device("cuda", index) for index in indices]
    prepare_graphs(EngineConfig(**options), MODEL, torch.bfloat16, devices)
    assert hashed == [True]
    assert [*prepared] == indices
    for device, work in zip(devices, prepared.values(), strict=True):
        assert isinstance(work, partial)
        assert work.args == (MODEL, torch.bfloat16, row_counts, device)
