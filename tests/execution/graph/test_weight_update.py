"""New weights on the graph executor: captured steps read them where the old ones were."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from interpreted_device import InterpretedDevice
from scheduled_run import run_scheduled, sampling_of
from tiny_llama import tiny_llama

from drift_sdk import RequestError
from drift_sdk._kernels.gemm.tuning import TunedTable
from drift_sdk.execution.device.device import GpuDevice
from drift_sdk.execution.forward.kernel_weights import (
    KernelExperts,
    KernelWeight,
    arrange_decoder,
    arrange_part,
)
from drift_sdk.execution.graph.gpu_graphs import GraphOptions
from drift_sdk.execution.graph.graph_executor import GraphExecutor
from drift_sdk.families import read_spec
from drift_sdk.models.allocation import WeightForm
from drift_sdk.models.channels import ExpertWeights
from drift_sdk.models.decoder import Decoder, random_tensors
from drift_sdk.models.weight_update import leaves, tensors_in, update_weights
from drift_sdk.steps import ExecutorLimits

pytestmark = pytest.mark.kernel

IS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if IS_GPU else "cpu")
LIMITS = ExecutorLimits(max_num_seqs=2, max_model_len=40, num_blocks=24, block_size=4, vocab_size=96)
SIZES = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
SPEC = read_spec(tiny_llama(vocab_size=96, num_hidden_layers=2, **SIZES))


def decoder_of(seed: int, form: WeightForm) -> Decoder:
    decoder = Decoder.random(SPEC, device=DEVICE, dtype=torch.float32, form=form, seed=seed)
    arrange_decoder(decoder)
    return decoder


def executor_of(decoder: Decoder) -> GraphExecutor:
    device = GpuDevice(0) if IS_GPU else InterpretedDevice()
    return GraphExecutor(device, decoder, LIMITS, TunedTable(), GraphOptions(prefill_token_budget=8))


def tokens_of(executor: GraphExecutor) -> list[list[int]]:
    rng = random.Random(3)
    prompts = [[rng.randrange(3, 90) for _ in range(length)] for length in (9, 3)]
    requests = [(prompt, sampling_of(len(prompt), 4)) for prompt in prompts]
    return run_scheduled(executor, requests, prefill_token_budget=8)


@pytest.mark.parametrize("form", ["expanded", "int4"])
def test_steps_are_those_of_an_executor_of_the_new_weights(form: WeightForm, tmp_path: Path) -> None:
    new = decoder_of(5, form)
    expected = tokens_of(other := executor_of(new))
    other.close()
    executor = executor_of(old := decoder_of(2, form))
    assert tokens_of(executor) != expected
    has_kernel_weights = any(isinstance(leaf, KernelWeight) for leaf in leaves(old.weights))
    assert has_kernel_weights == (form == "int4")
    source = random_tensors(SPEC, device=DEVICE, dtype=torch.float32, seed=5)
    tensors = {name: source.get(name) for name in source.names()}
    with pytest.raises(RequestError, match="missing" if form == "int4" else "not finite"):
        name = "model.layers.0.mlp.up_proj.weight"
        executor.update_weights({name: tensors[name] if form == "int4" else tensors[name] / 0})
    executor.update_weights(tensors)
    assert tokens_of(executor) == expected
    if form == "int4":
        old.form = "stored"  # as if files had them so
        with pytest.raises(RequestError, match='another form than weights="stored"'):
            executor.update_weights(tensors)
    executor.close()


JOINED = read_spec(
    {
        "model_type": "glm4_moe",
        "vocab_size": 96,
        "num_hidden_layers": 1,
        "first_k_dense_replace": 0,
        "head_dim": 32,
        "max_position_embeddings": 64,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        **SIZES,
    }
)


@pytest.mark.parametrize("form", ["expanded", "fp8"])
def test_shared_experts_are_written_where_they_are_joined(form: WeightForm) -> None:
    """All tensors; and without quantisation the shared expert's alone."""

    def drawn(seed: int) -> Decoder:
        decoder = Decoder.random(JOINED, device=DEVICE, dtype=torch.float32, form=form, seed=seed)
        arrange_decoder(decoder)
        channel = decoder.weights.layers[0].channel
        assert isinstance(channel, ExpertWeights) and channel.num_joined == 1
        assert isinstance(channel.gate_up, KernelExperts) == (form == "fp8")
        return decoder

    def tensors_of(decoder: Decoder) -> list[torch.Tensor]:
        return [tensor.cpu().clone() for leaf in leaves(decoder.weights) for tensor in tensors_in(leaf)]

    def are_same(one: list[torch.Tensor], other: list[torch.Tensor]) -> list[bool]:
        return [torch.equal(*pair) for pair in zip(one, other, strict=True)]

    decoder, wanted = drawn(2), tensors_of(drawn(5))
    before = tensors_of(decoder)
    source = random_tensors(JOINED, device=DEVICE, dtype=torch.float32, seed=5)
    tensors = {name: source.get(name) for name in source.names()}
    if form == "expanded":
        update_weights(decoder, {name: new for name, new in tensors.items() if ".shared_experts." in name})
        assert are_same(tensors_of(decoder), before).count(False) == 2
        channel = decoder.weights.layers[0].channel
        assert isinstance(channel, ExpertWeights) and isinstance(channel.down, torch.Tensor)
        assert torch.equal(channel.down[4], tensors["model.layers.0.mlp.shared_experts.down_proj.weight"])
        assert any(torch.equal(channel.down[:4].cpu(), tensor[:4]) for tensor in before if tensor.dim() == 3)
    update_weights(decoder, tensors, arrange_part)
    assert all(are_same(tensors_of(decoder), wanted))
    assert not all(are_same(before, wanted))
