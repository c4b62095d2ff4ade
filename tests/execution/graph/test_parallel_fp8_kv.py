"""A model that GPUs divide, with a KV cache of e4m3: each GPU has the scales of its heads."""

from __future__ import annotations

from collections.abc import Collection

import pytest
import torch
from interpreted_device import InterpretedDevice
from lockstep_devices import Lockstep
from scheduled_run import run_scheduled, sampling_of
from tiny_llama import tiny_llama

from drift_sdk._kernels.gemm.tuning import TunedTable
from drift_sdk.execution.graph.gpu_graphs import GpuModel, GraphOptions
from drift_sdk.execution.graph.graph_executor import GraphExecutor, ParallelExecutor
from drift_sdk.families import read_spec
from drift_sdk.models.decoder import Decoder, random_tensors
from drift_sdk.models.shard import Shard, cut_head, load_shard
from drift_sdk.spec.model import ModelSpec
from drift_sdk.steps import ExecutorLimits

pytestmark = [pytest.mark.kernel, pytest.mark.interpreter]

CPU = torch.device("cpu")
OPTIONS = GraphOptions(prefill_token_budget=8)
SHAPES = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 128}


class ScaledTensors:
    """Random weights, and scales that differ between heads."""

    def __init__(self, config: ModelSpec) -> None:
        self._tensors = random_tensors(config, device=CPU, dtype=torch.float32)
        self.location = self._tensors.location
        self.file, self.shape, self.get = self._tensors.file, self._tensors.shape, self._tensors.get

    def names(self) -> Collection[str]:
        return self._tensors.names()

    def kv_scales(self, num_layers: int, num_kv_heads: int) -> tuple[torch.Tensor, torch.Tensor]:
        assert (num_layers, num_kv_heads) == (1, 2)
        return torch.tensor([[0.05, 0.0001]]), torch.tensor([[0.0001, 0.02]])  # the small ones saturate


def test_tokens_are_those_of_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    config = read_spec(tiny_llama() | SHAPES)
    limits = ExecutorLimits(
        vocab_size=config.vocab_size, max_num_seqs=2, max_model_len=32, num_blocks=16, block_size=4
    )
    requests = [([5, 17, 3, 40, 8, 21], sampling_of(6, 3)), ([7], sampling_of(1, 3, temperature=0.8, seed=3))]
    placement = {"device": CPU, "dtype": torch.float32, "kv_form": "fp8"}
    decoder = Decoder.load(config, ScaledTensors(config), **placement)
    one = GraphExecutor(InterpretedDevice(), decoder, limits, TunedTable(), OPTIONS)
    expected = run_scheduled(one, requests, prefill_token_budget=8)
    one.close()

    group, models = Lockstep(2, monkeypatch), []
    for device in group.devices:
        shard = Shard(rank=device.rank, size=2)
        part = load_shard(config, ScaledTensors(config), shard, **placement)
        cut_head(part, shard)
        models.append(GpuModel(device=device, decoder=part, tuned=TunedTable()))
    executor = ParallelExecutor(models, limits, OPTIONS)
    assert run_scheduled(executor, requests, prefill_token_budget=8) == expected
    executor.close()
