"""The kernels that compute experts, by kind of pass, number of rows and weights."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import msgspec.structs
import pytest
import torch

from drift_sdk._kernels.experts.expert_gemm import ExpertMatrix
from drift_sdk._kernels.gemm.tuning import TunedTable
from drift_sdk.execution.device.memory import Workspace
from drift_sdk.execution.forward.channels import ExpertForward
from drift_sdk.execution.forward.kernel_weights import KernelExperts, KernelWeight, arrange_decoder
from drift_sdk.families import read_spec
from drift_sdk.models.allocation import Allocation
from drift_sdk.models.channels import ExpertWeights, MlpWeights, QuantisedMatrices, allocate_experts
from drift_sdk.models.decoder import Decoder
from drift_sdk.quantised.formats import quantise_fp8, quantise_int4
from drift_sdk.quantised.weight import QuantisedWeight
from drift_sdk.spec.model import ExpertNames, Experts, Mlp

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SETTINGS: dict[str, Any] = {
    "model_type": "gpt_oss",
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}


def make_decoder(*, is_quantised: bool) -> Decoder:
    quantisation = {"quantization_config": {"quant_method": "mxfp4"}} if is_quantised else {}
    config = read_spec(SETTINGS | quantisation)
    return Decoder.random(config, device="cpu", dtype=torch.bfloat16)


def test_largest_scale_of_experts_is_found() -> None:
    assert make_decoder(is_quantised=False).max_expert_scale == 0
    decoder = make_decoder(is_quantised=True)
    experts = decoder.weights.layers[1].channel
    assert isinstance(experts, ExpertWeights) and isinstance(experts.down, QuantisedMatrices)
    with torch.inference_mode():
        experts.down.scales[3, 5, 0] = 200
    assert decoder.max_expert_scale == 200


@pytest.mark.parametrize(
    "num_rows, is_decoding, is_used",
    [(1, True, True), (100, True, True), (32, False, True), (33, False, False)],
)
def test_kernels_for_few_rows_are_chosen(
    num_rows: int, is_decoding: bool, is_used: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decode passes always ask for them, prefill passes with up to 16 rows of an expert on average."""
    asked: list[int] = []

    def has_cuda_product(matrix: ExpertMatrix, dtype: torch.dtype, max_scale: int) -> bool:
        asked.append(max_scale)
        return True

    monkeypatch.setattr("drift_sdk.execution.forward.channels.has_cuda_product", has_cuda_product)
    decoder = make_decoder(is_quantised=True)
    resources = cast(Any, SimpleNamespace(decoder=decoder, tuned=TunedTable()))
    workspace = Workspace(torch.device("cpu"))
    slot, normed = torch.zeros(num_rows, dtype=torch.int32), torch.zeros(num_rows, 64, dtype=torch.bfloat16)
    experts = decoder.spec.experts
    assert experts is not None
    forward = ExpertForward.take(resources, experts, slot, normed, workspace, is_decoding=is_decoding)
    matrix = ExpertMatrix(torch.empty(4, 64, 32, dtype=torch.uint8), None, None)
    assert forward._has_cuda_product(matrix) == is_used
    assert asked == [decoder.max_expert_scale] * is_used


GLM: dict[str, Any] = {
    "model_type": "glm4_moe_lite",
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "first_k_dense_replace": 0,
    "num_attention_heads": 2,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 16,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "max_position_embeddings": 64,
}
QWEN = {key: GLM[key] for key in ("vocab_size", "hidden_size", "num_attention_heads", "num_experts_per_tok")}
QWEN |= {"model_type": "qwen3_next", "num_hidden_layers": 1, "num_key_value_heads": 1, "head_dim": 32}
QWEN |= {"num_experts": 6, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
QWEN |= {"max_position_embeddings": 64, "layer_types": ["full_attention"]}


@pytest.mark.kernel
@pytest.mark.parametrize("form", ["expanded", "fp8"])
@pytest.mark.parametrize("settings", [GLM, QWEN], ids=("weight 1", "gate"))
def test_a_crowd_changes_no_bit_of_a_row_with_a_joined_expert(settings: dict[str, Any], form: Any) -> None:
    """Alone, and among others and padding rows."""
    spec = read_spec(settings)
    names = msgspec.structs.replace(
        spec.names, experts=msgspec.structs.replace(spec.names.experts, layout="each")
    )
    spec = msgspec.structs.replace(spec, names=names)
    decoder = Decoder.random(spec, device=DEVICE, dtype=torch.bfloat16, form=form)
    arrange_decoder(decoder)
    weights, experts = decoder.weights.layers[-1].channel, decoder.spec.experts
    assert isinstance(weights, ExpertWeights) and weights.num_joined == 1 and experts is not None
    assert isinstance(weights.down, torch.Tensor if form == "expanded" else KernelExperts)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(37, 64, generator=generator).to(DEVICE, torch.bfloat16)
    slot = torch.arange(37, dtype=torch.int32, device=DEVICE)
    slot[3::4] = -1

    @torch.inference_mode()
    def run(rows: slice) -> torch.Tensor:
        resources = cast(Any, SimpleNamespace(decoder=decoder, tuned=TunedTable()))
        forward = ExpertForward.take(
            resources, experts, slot[rows], x[rows], Workspace(torch.device(DEVICE)), is_decoding=True
        )
        return forward.run(weights, 0).clone()

    together = run(slice(None))
    assert together.shape == (3, 37, 64)
    for row in (0, 1, 14, 36):
        assert torch.equal(run(slice(row, row + 1))[:, 0], together[:, row])
    assert torch.equal(run(slice(5, 22))[:, slot[5:22] >= 0], together[:, 5:22][:, slot[5:22] >= 0])
    assert together[0, slot >= 0].abs().max() > 0.01


def test_joined_expert_of_another_format_becomes_an_mlp_again() -> None:
    """As in files whose shared experts are not quantised."""
    plain = Decoder.random(read_spec(GLM), device=DEVICE, dtype=torch.float32)
    weights, spec = plain.weights.layers[0].channel, plain.spec.experts
    assert isinstance(weights, ExpertWeights) and spec is not None

    def fp8(matrices: Any) -> tuple[QuantisedWeight, ...]:
        return tuple(quantise_fp8(matrix) for matrix in matrices)

    gate_up, down = weights.gate_up, weights.down
    assert isinstance(gate_up, torch.Tensor) and isinstance(down, torch.Tensor)
    for last_gate_up, last_down in (
        (gate_up[-1], down[-1]),
        (quantise_int4(gate_up[-1]), quantise_int4(down[-1])),
        (quantise_fp8(gate_up[-1]), down[-1]),
    ):
        parts = (*fp8(gate_up[:-1]), last_gate_up), (*fp8(down[:-1]), last_down)
        channel = replace(weights, gate_up=parts[0], down=parts[1])
        layer = replace(plain.weights.layers[0], channel=channel)
        decoder = Decoder(plain.spec, replace(plain.weights, layers=(layer,)))
        arrange_decoder(decoder)
        found = decoder.weights.layers[0].channel
        assert isinstance(found, ExpertWeights) and found.num_joined == 0 and found.shared is not None
        for matrices in (found.gate_up, found.down):
            assert isinstance(matrices, KernelExperts) and matrices.packed.num_experts == 16
        is_packed = isinstance(last_gate_up, QuantisedWeight), isinstance(last_down, QuantisedWeight)
        matrices = found.shared.gate_up, found.shared.down
        assert tuple(isinstance(matrix, KernelWeight) for matrix in matrices) == is_packed


@pytest.mark.parametrize("has_gate", [False, True])
@pytest.mark.parametrize("layout", ["each", "stacked", "transposed"])
def test_a_shared_expert_is_joined_where_both_can_be_one_weight(layout: Any, has_gate: bool) -> None:
    """Its tensors fill the last of the matrices; an expert of another shape or form keeps an MLP."""
    spec = Experts(
        num_experts=4,
        num_active=2,
        intermediate_size=8,
        shared=Mlp(intermediate_size=8),
        has_shared_gate=has_gate,
    )
    names = ExpertNames(layout=layout)

    def allocated(spec: Experts, *quantised: str) -> tuple[ExpertWeights, dict[str, torch.Tensor]]:
        def read(name: str, is_projection: bool) -> QuantisedWeight | None:
            is_found = any(part in name for part in quantised)
            return (
                quantise_fp8(torch.ones(8, 16) if "down" not in name else torch.ones(16, 8))
                if is_found
                else None
            )

        allocation = Allocation(torch.device("cpu"), torch.float32, read)
        weights = allocate_experts(spec, names, "layer", 16, allocation)
        return weights, allocation.places

    weights, places = allocated(spec)
    assert (
        weights.num_joined == 1 and weights.shared is None and (weights.shared_gate is not None) == has_gate
    )
    gate_up, down = weights.gate_up, weights.down
    assert isinstance(gate_up, torch.Tensor) and isinstance(down, torch.Tensor)
    for number, place in enumerate(places.values()):
        place.fill_(number)
    shared = {
        name.split(".")[3]: float(place[0, 0]) for name, place in places.items() if ".shared_experts." in name
    }
    assert set(gate_up[4, :8].unique().tolist()) == {shared["gate_proj"]}
    assert set(gate_up[4, 8:].unique().tolist()) == {shared["up_proj"]}
    assert set(down[4].unique().tolist()) == {shared["down_proj"]}
    numbers = set(range(len(places)))
    assert {float(number) for matrices in (gate_up, down) for number in matrices.unique()} <= numbers

    wide, _ = allocated(msgspec.structs.replace(spec, shared=Mlp(intermediate_size=16)))
    assert wide.num_joined == 0 and wide.shared is not None and (wide.shared_gate is not None) == has_gate
    alone, _ = allocated(spec, ".shared_experts.")
    assert isinstance(alone.gate_up, torch.Tensor) and len(alone.gate_up) == 4
    assert isinstance(alone.shared, MlpWeights) and isinstance(alone.shared.down, QuantisedWeight)
    if layout == "each":
        both, _ = allocated(spec, ".shared_experts.", ".experts.")
        assert both.num_joined == 1 and isinstance(both.gate_up, tuple) and len(both.gate_up) == 5
