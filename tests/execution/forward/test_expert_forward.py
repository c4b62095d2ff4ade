"""The kernels that compute experts, by kind of pass, number of rows and weights."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from drift_sdk._kernels.experts.expert_gemm import ExpertMatrix
from drift_sdk._kernels.gemm.tuning import TunedTable
from drift_sdk.execution.device.memory import Workspace
from drift_sdk.execution.forward.channels import ExpertForward
from drift_sdk.families import read_spec
from drift_sdk.models.channels import ExpertWeights, QuantisedMatrices
from drift_sdk.models.decoder import Decoder

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
