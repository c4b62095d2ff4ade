"""Reading the `quantization_config` of a config.json."""

from __future__ import annotations

import re
from typing import Any

import pytest
from quantised_files import FORMATS

from drift_sdk.errors import ModelLoadError
from drift_sdk.quantised.scheme import BLOCK_SCHEME, Groups, config_scheme

AWQ, GPTQ, FP8 = (FORMATS[name].config for name in ("awq", "gptq", "fp8, blocks"))
MODELOPT = FORMATS["nvfp4, modelopt"].config
MIXED = MODELOPT | {"quant_algo": "MIXED_PRECISION"}


def compressed(name: str = "packed", **weights: Any) -> dict[str, Any]:
    """A config of compressed-tensors with some settings of the weights changed."""
    config = FORMATS[name].config
    group = config["config_groups"]["group_0"]
    return config | {"config_groups": {"group_0": group | {"weights": group["weights"] | weights}}}


def two_groups(*is_symmetric: bool) -> dict[str, Any]:
    """A config of compressed-tensors with groups of one size."""
    groups = [compressed(symmetric=each)["config_groups"]["group_0"] for each in is_symmetric]
    return FORMATS["packed"].config | {"config_groups": dict(enumerate(groups))}


def test_without_quantisation() -> None:
    for settings in (None, {}, {"quant_method": "mxfp4"}):
        assert config_scheme({"quantization_config": settings}) is None
    assert config_scheme({}) is None
    assert config_scheme({"quantization_config": {"quant_method": "gguf"}}) == BLOCK_SCHEME


def test_several_groups_of_a_checkpoint() -> None:
    groups = [
        compressed(name, **more)["config_groups"]["group_0"]
        for name, more in (("packed", {}), ("fp8, channel", {}), ("packed", {"group_size": 64}))
    ]
    config = FORMATS["packed"].config | {
        "format": "mixed-precision",
        "config_groups": dict(enumerate(groups)),
    }
    scheme = config_scheme({"quantization_config": config})
    assert scheme is not None
    assert scheme.storages == ("packed", "fp8") and scheme.scale_shapes == ("channel",)
    assert scheme.groups == (Groups(32, has_zeros=False), Groups(64, has_zeros=False))


@pytest.mark.parametrize(
    ("settings", "has_zeros"),
    [
        (AWQ, True),
        (GPTQ, True),
        (GPTQ | {"sym": True}, False),
        (GPTQ | {"sym": None}, None),
        (compressed(), False),
        (compressed(symmetric=False), True),
        (compressed(symmetric=None), None),
        (two_groups(True, False), None),
        (two_groups(False, False), True),
    ],
)
def test_zero_points_that_are_declared(settings: dict[str, Any], has_zeros: bool | None) -> None:
    scheme = config_scheme({"quantization_config": settings})
    assert scheme is not None and scheme.groups == (Groups(32, has_zeros),)


@pytest.mark.parametrize(
    ("name", "scale_shapes", "blocks"),
    [
        ("fp8, vector", ("tensor", "channel"), ()),
        ("fp8, blocks", (), ((32, 48),)),
        ("fp8, tensor", ("tensor",), ()),
        ("fp8, channel", ("channel",), ()),
        ("fp8, compressed blocks", (), ((32, 48),)),
        ("fp8, modelopt", ("tensor",), ()),
    ],
)
def test_shapes_of_scales_that_are_declared(name: str, scale_shapes: object, blocks: object) -> None:
    scheme = config_scheme({"quantization_config": FORMATS[name].config})
    assert scheme is not None and (scheme.scale_shapes, scheme.blocks) == (scale_shapes, blocks)


def test_schemes_of_modelopt() -> None:
    layers = {"a": {"quant_algo": "FP8"}, "b": {"quant_algo": "W4A16_NVFP4", "group_size": 16}}
    nested = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"}
    cases: list[tuple[dict[str, Any], tuple[str, ...], str]] = [
        (MODELOPT, ("modelopt_nvfp4",), ""),
        (MODELOPT | {"quant_method": "modelopt_fp4"}, ("modelopt_nvfp4",), ""),
        (MIXED | {"quantized_layers": layers}, ("fp8", "modelopt_nvfp4"), ""),
        ({"quant_method": "modelopt", "quantization": nested}, ("modelopt_nvfp4",), ""),
        (MODELOPT | {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}, ("modelopt_nvfp4",), ""),
        (MODELOPT | {"kv_cache_scheme": "NVFP4"}, ("modelopt_nvfp4",), "kv_cache_scheme='NVFP4'"),
        (
            {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "NVFP4"},
            (),
            "kv_cache_quant_algo='NVFP4'",
        ),
    ]
    for config, storages, obstacle in cases:
        scheme = config_scheme({"quantization_config": config})
        assert scheme is not None
        assert (scheme.storages, scheme.kv_obstacle) == (storages, obstacle)


@pytest.mark.parametrize(
    "config, message",
    [
        (
            {"quant_method": "bitsandbytes"},
            "quant_method='bitsandbytes': expected one of 'fp8', 'awq', 'gptq'",
        ),
        ({"bits": 4}, "quant_method=None: expected one of 'fp8'"),
        (AWQ | {"bits": 8}, "bits=8: expected 4$"),
        (AWQ | {"bits": True}, "bits=True"),
        (AWQ | {"version": "gemv"}, "version='gemv': expected one of 'gemm', 'GEMM'$"),
        (AWQ | {"version": "marlin"}, "version='marlin'"),
        (AWQ | {"zero_point": False}, "zero_point=False: expected True$"),
        (AWQ | {"group_size": 0}, "group_size=0: expected -1 or an even number"),
        (AWQ | {"group_size": "128"}, "group_size='128': expected -1 or an even number"),
        (GPTQ | {"bits": 3}, "bits=3"),
        (GPTQ | {"desc_act": True}, "desc_act=True: expected False$"),
        (GPTQ | {"sym": "no"}, "sym='no': expected one of True, False$"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format='marlin'"),
        (GPTQ | {"is_marlin_format": True}, "is_marlin_format=True"),
        (FP8 | {"fmt": "e5m2"}, "fmt='e5m2'"),
        (FP8 | {"weight_block_size": [128]}, r"a block of \[128\]: expected two sizes"),
        (FP8 | {"weight_block_size": [0, 128]}, r"a block of \[0, 128\]: expected two sizes"),
        (
            compressed() | {"format": "int-quantized"},
            "format='int-quantized': expected one of 'dense', 'float-q",
        ),
        (compressed() | {"format": "mxfp4-pack-quantized"}, "format='mxfp4-pack-quantized'"),
        (compressed() | {"config_groups": {}}, "config_groups={}: expected a mapping of"),
        (compressed() | {"config_groups": {"group_0": {"weights": None}}}, "config_groups=.*: expected the"),
        (compressed() | {"transform_config": {"config_groups": {"v": {}}}}, "transform_config="),
        (compressed() | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config="),
        (compressed(num_bits=8), "num_bits=8: expected 4$"),
        (compressed(symmetric="yes"), "symmetric='yes': expected one of True, False$"),
        (compressed("fp8, channel", symmetric=False), "symmetric=False: expected True$"),
        (compressed("nvfp4", symmetric=False), "symmetric=False: expected True$"),
        (compressed(actorder="group"), "actorder='group'"),
        (compressed(strategy="token"), "strategy='token'"),
        (compressed(type="codebook"), "type='codebook'"),
        (compressed("fp8, channel", num_bits=6), "num_bits=6"),
        (compressed("fp8, channel", num_bits=4), "strategy='channel'"),
        (compressed("fp8, channel", strategy="group"), "strategy='group'"),
        (compressed("nvfp4", group_size=32), "group_size=32"),
        (compressed("nvfp4", group_size=None), "group_size=None"),
        (MODELOPT | {"quant_algo": "NVFP4_AWQ"}, "quant_algo='NVFP4_AWQ'"),
        (MODELOPT | {"quant_algo": "W4A8_MXFP4_FP8"}, "quant_algo='W4A8_MXFP4_FP8'"),
        (MODELOPT | {"quant_algo": ["NVFP4"]}, r"quant_algo=\['NVFP4'\]"),
        (MODELOPT | {"group_size": 32}, "group_size=32"),
        (MODELOPT | {"quantization": 4}, "quantization=4"),
        ({"quant_method": "modelopt", "quantization": {"quant_algo": "INT8"}}, "quant_algo='INT8'"),
        (MIXED, "quantized_layers=None"),
        (MIXED | {"quantized_layers": {"a": "NVFP4"}}, "quantized_layers="),
        (MIXED | {"quantized_layers": {"a": {"quant_algo": "W4A8_AWQ"}}}, "quant_algo='W4A8_AWQ'"),
    ],
)
def test_schemes_that_are_not_implemented_are_named(config: object, message: str) -> None:
    with pytest.raises(ModelLoadError, match=message) as caught:
        config_scheme({"quantization_config": config})
    assert str(caught.value).startswith("config: quantization_config with ")
    assert ": expected " in str(caught.value)


@pytest.mark.parametrize("settings", ["fp8", [], [1], 0, False, ""])
def test_settings_that_are_no_mapping_are_refused(settings: object) -> None:
    expected = rf"^config: quantization_config={re.escape(repr(settings))}: expected a mapping$"
    with pytest.raises(ModelLoadError, match=expected):
        config_scheme({"quantization_config": settings})
