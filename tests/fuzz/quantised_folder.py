"""Checkpoints with quantised weights: tensors of other shapes and dtypes, or none, and any settings."""

from __future__ import annotations

import copy
import math
import tempfile
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from safetensors.torch import save_file

from drift_sdk.loading.quantised_tensors import QuantisedTensors
from drift_sdk.loading.safetensors import SINGLE_FILE, SafetensorsFolder
from drift_sdk.quantised.scheme import config_scheme

FOLDER = tempfile.TemporaryDirectory()
PLACE = Path(FOLDER.name)
ROWS, COLUMNS, GROUP = 16, 40, 16
NUM_GROUPS = -(-COLUMNS // GROUP)

Tensors = dict[str, torch.Tensor]


def _words(*shape: int) -> torch.Tensor:
    return torch.full(shape, 0x12345678, dtype=torch.int32)


def _scales(*shape: int) -> torch.Tensor:
    return torch.full(shape, 0.5, dtype=torch.float16)


WEIGHTS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": False}
NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": GROUP}
AWQ_TENSORS: Tensors = {
    "qweight": _words(COLUMNS, ROWS // 8),
    "qzeros": _words(NUM_GROUPS, ROWS // 8),
    "scales": _scales(NUM_GROUPS, ROWS),
}
FORMATS: tuple[tuple[dict[str, Any], Tensors], ...] = (
    ({"quant_method": "awq", "bits": 4, "group_size": GROUP}, AWQ_TENSORS),
    (
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP},
        AWQ_TENSORS
        | {"qweight": _words(COLUMNS // 8, ROWS), "g_idx": torch.arange(COLUMNS, dtype=torch.int32) // GROUP},
    ),
    (
        {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": WEIGHTS}}},
        {
            "weight_packed": _words(ROWS, COLUMNS // 8),
            "weight_scale": _scales(ROWS, NUM_GROUPS),
            "weight_zero_point": _words(ROWS // 8, NUM_GROUPS),
            "weight_shape": torch.tensor([ROWS, COLUMNS]),
        },
    ),
    (
        {"quant_method": "fp8", "weight_block_size": [8, GROUP]},
        {
            "weight": torch.ones((ROWS, COLUMNS)).to(torch.float8_e4m3fn),
            "weight_scale_inv": torch.ones(ROWS // 8, NUM_GROUPS),
            "input_scale": torch.ones(()),
        },
    ),
    (
        {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": NVFP4}}},
        {
            "weight_packed": torch.full((ROWS, COLUMNS // 2), 0x5A, dtype=torch.uint8),
            "weight_scale": torch.ones(ROWS, NUM_GROUPS).to(torch.float8_e4m3fn),
            "weight_global_scale": torch.ones(1),
        },
    ),
    (
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": GROUP},
        {
            "weight": torch.full((ROWS, COLUMNS // 2), 0x5A, dtype=torch.uint8),
            "weight_scale": torch.ones(ROWS, NUM_GROUPS).to(torch.float8_e4m3fn),
            "weight_scale_2": torch.ones(()),
        },
    ),
)
OTHER_PARTS = {"weight", "weight_scale", "weight_g_idx"}
PARTS = sorted({part for _, tensors in FORMATS for part in tensors} | OTHER_PARTS)
DTYPES = (
    *(torch.int32, torch.int64, torch.int8, torch.uint8, torch.float16, torch.float32, torch.bfloat16),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu),
)
KEYS = (
    *("quant_method", "bits", "group_size", "desc_act", "checkpoint_format", "version", "zero_point", "fmt"),
    *("weight_block_size", "format", "config_groups", "sparsity_config", "group_0", "weights", "num_bits"),
    *("type", "strategy", "actorder", "block_structure", "quant_algo", "quantization", "quantized_layers"),
)
LIKELY = (
    *("awq", "gptq", "gptq_v2", "fp8", "gemm", "e4m3", "float", "int", "block", "channel", "tensor", "dense"),
    *("modelopt", "NVFP4", "FP8", "MIXED_PRECISION", "tensor_group", NVFP4),
    *(-1, 1, 2, 3, 4, 8, 16, 20, 32, 2**20, 2**63, 10**400, [16, 16], [1, 2**20], [0, 1], [True, 1], WEIGHTS),
)

values = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 64) | st.floats() | st.sampled_from(LIKELY),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=3),
    max_leaves=5,
)
changes = st.dictionaries(st.sampled_from(KEYS), values, max_size=2)
shapes = st.lists(st.integers(0, 48) | st.sampled_from([ROWS, COLUMNS, NUM_GROUPS, 2, 5]), max_size=3)
tensors = st.none() | st.tuples(shapes, st.sampled_from(DTYPES), st.integers(0, 255))
edits = st.dictionaries(st.sampled_from(PARTS), tensors, max_size=2)
strategy = st.tuples(st.integers(0, len(FORMATS) - 1), changes, changes, edits)


def run(data: tuple[int, dict[str, Any], dict[str, Any], dict[str, Any]]) -> None:
    index, outer, inner, edited = data
    settings, stored = copy.deepcopy(FORMATS[index])
    settings |= outer
    groups = settings.get("config_groups")
    if inner and isinstance(groups, dict) and isinstance(groups.get("group_0"), dict):
        groups["group_0"]["weights"] = WEIGHTS | inner
    for part, change in edited.items():
        stored.pop(part, None)
        if change is not None:
            shape, dtype, byte = change
            bits = torch.full((math.prod(shape) * dtype.itemsize,), byte, dtype=torch.uint8)
            stored[part] = bits.view(dtype).reshape(shape)
    named = {f"a.{part}": tensor.clone() for part, tensor in stored.items()}
    save_file(named | {"b": torch.ones(2)}, PLACE / SINGLE_FILE)

    scheme = config_scheme({"quantization_config": settings})
    if scheme is None:
        return

    tensors = QuantisedTensors(SafetensorsFolder(PLACE), scheme)
    assert "b" in tensors.names()
    for name in tensors.names():
        shape = tensors.shape(name)
        assert tensors.file(name)
        weight = tensors.quantised(name, torch.device("cpu"))
        num_bytes = tensors.quantised_bytes(name)
        assert (weight is None) == (num_bytes is None)
        if weight is not None and num_bytes is not None:
            assert weight.shape == shape and weight.nbytes <= num_bytes
            assert tuple(weight.dequantise(torch.float32).shape) == shape
