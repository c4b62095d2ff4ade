"""Before a model is loaded, cuBLAS is given the products that its prefill steps make later."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from interpreted_device import FirstRunDevice
from msgspec import structs
from tiny_llama import tiny_llama
from torch import Tensor

from drift_sdk._kernels.gemm.tuning import TunedTable
from drift_sdk.execution.forward import products
from drift_sdk.execution.forward.products import library_loader
from drift_sdk.execution.graph.buckets import prefill_buckets
from drift_sdk.execution.graph.gpu_graphs import GraphOptions
from drift_sdk.execution.graph.graph_executor import GraphExecutor
from drift_sdk.families import read_spec
from drift_sdk.models.decoder import Decoder
from drift_sdk.spec.model import ModelSpec
from drift_sdk.steps import ExecutorLimits

BUDGET = 40
CPU = torch.device("cpu")
LIMITS = ExecutorLimits(max_num_seqs=1, max_model_len=64, num_blocks=16, block_size=4, vocab_size=64)
MODELS = {
    "llama": read_spec(tiny_llama()),
    "biased": read_spec(tiny_llama(architectures=["Qwen2ForCausalLM"], model_type="qwen2")),
}
MODELS["biased and gated"] = structs.replace(
    MODELS["biased"],
    layers=tuple(
        structs.replace(layer, mixer=structs.replace(layer.mixer, has_gate=True))
        for layer in MODELS["biased"].layers
    ),
)

Product = tuple[Any, ...]


class Products:
    """Records products instead of computing them."""

    def __init__(self) -> None:
        self.found: list[Product] = []

    def __call__(self, x: Tensor, columns: Tensor, bias: Tensor | None, out: Tensor) -> None:
        form = [None if each is None else (each.shape, each.stride(), each.dtype) for each in (bias, out)]
        self.found.append((x.shape, x.stride(), columns.shape, columns.stride(), columns.dtype, *form))


def loaded(config: ModelSpec, monkeypatch: pytest.MonkeyPatch, *, room: int = 2**40) -> list[Product]:
    made = Products()
    monkeypatch.setattr(products, "library_product", made)
    library_loader(config, torch.float32, prefill_buckets(BUDGET), CPU, room)()
    return made.found


@pytest.mark.interpreter
@pytest.mark.parametrize("model", MODELS)
def test_products_are_those_of_prefill_steps(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = MODELS[model]
    found = Products()
    monkeypatch.setattr(products, "library_product", found)
    decoder = Decoder.random(config, device="cpu", dtype=torch.float32)
    options = GraphOptions(prefill_token_budget=BUDGET, fast_prompts=True)
    GraphExecutor(FirstRunDevice(), decoder, LIMITS, TunedTable(), options).close()
    made = loaded(config, monkeypatch)
    assert set(made) == set(found.found)
    assert len(made) == len(set(made))  # each once
    assert any(bias is not None for *_, bias, _ in made) == (model != "llama")


def test_larger_products_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    found = loaded(read_spec(tiny_llama()), monkeypatch)
    rows = [product[0][0] for product in found]
    assert rows == sorted(rows, reverse=True) and rows[0] == 48


def test_products_that_would_take_too_much_memory_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    config = read_spec(tiny_llama())
    every = loaded(config, monkeypatch)
    rows = max(x[0] for x, *_ in every)
    columns, inner = (max(weight[dim] for _, _, weight, *_ in every) for dim in (1, 0))
    largest = max(weight.numel() for _, _, weight, *_ in every)
    num_bytes = 4 * (rows * (inner + columns) + largest + columns)
    assert loaded(config, monkeypatch, room=num_bytes) == every
    assert loaded(config, monkeypatch, room=num_bytes - 1) == []


def test_without_row_counts_nothing_is_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Products()
    monkeypatch.setattr(products, "library_product", made)
    library_loader(read_spec(tiny_llama()), torch.float32, (), CPU, 2**40)()
    assert made.found == []


def test_in_two_bytes_a_number_cublas_is_started_by_a_product_in_slices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[Any] = []
    device, config = torch.device("meta"), read_spec(tiny_llama())

    def bmm(rows: Tensor, others: Tensor, *, out_dtype: torch.dtype) -> None:
        assert rows.dtype == others.dtype == torch.bfloat16 and rows.device == others.device == device
        calls.append(out_dtype)

    def product(x: Tensor, columns: Tensor, bias: Tensor | None, out: Tensor) -> None:
        assert {(each.dtype, each.device) for each in (x, columns, out)} == {(torch.bfloat16, device)}
        calls.append(x.shape[0])

    monkeypatch.setattr(torch, "bmm", bmm)
    monkeypatch.setattr(products, "library_product", product)
    load = library_loader(config, torch.bfloat16, (16, 32), device, 2**40)
    assert calls == []  # nothing runs on the thread that prepares
    load()
    assert calls == [torch.float32, *[32] * 4, *[16] * 4]
    num_bytes = 2 * (32 * (32 + 64) + 64 * 32 + 64)  # rows, columns and the matrix of qkv
    calls.clear()
    library_loader(config, torch.bfloat16, (16, 32), device, num_bytes)()
    assert len(calls) == 9
