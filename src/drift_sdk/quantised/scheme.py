"""The quantisation of a checkpoint, from the `quantization_config` of its config.json.

Which tensors are quantised is read from the files: a weight without scales beside it is not. The scheme gives
what the tensors do not show.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from msgspec import Struct

from drift_sdk.errors import ModelLoadError, short_repr

__all__ = ["BLOCK_SCHEME", "Scheme", "Storage", "config_scheme"]

Storage = Literal["fp8", "awq", "gptq", "packed", "compressed_nvfp4", "modelopt_nvfp4", "blocks"]

MAX_GROUP = 2**20
KV_SCHEME: dict[str, tuple[object, ...]] = {
    "num_bits": (8,),
    "type": ("float",),
    "strategy": ("tensor", "attn_head"),
    "dynamic": (False,),
    "symmetric": (True,),
}
"""Settings of a `kv_cache_scheme` whose scales are those of e4m3, the default of each being the first."""

COMPRESSED_FORMATS = (
    *("dense", "float-quantized", "naive-quantized", "pack-quantized", "nvfp4-pack-quantized"),
    "mixed-precision",
)
NVFP4_GROUPS = (None, 16)
"""Sizes of groups in settings of ModelOpt, the default being NVFP4's own."""


class Scheme(Struct, frozen=True, kw_only=True):
    """The form in which a checkpoint stores quantised weights.

    name:          as config.json names the method, with its format.
    storages:      "fp8": e4m3 with scales beside them. "awq", "gptq": 4-bit codes packed along the outputs,
                   along the inputs. "packed": compressed-tensors' pack-quantized. "compressed_nvfp4",
                   "modelopt_nvfp4": NVFP4, as these tools store it. "blocks": those of GGUF.
    group_sizes:   columns that share a scale, for 4-bit codes; None: all columns of a row. A checkpoint of
                   compressed-tensors may have several.
    blocks:        rows and columns that share a scale in blocks of FP8, of which a checkpoint of
                   compressed-tensors may have several, too.
    kv_obstacle:   why scales of the KV cache beside the weights are not those of e4m3; "" if they are.
    stored_offset: what is added to stored zero points: 1 for the first format of GPTQ.
    """

    name: str
    storages: tuple[Storage, ...]
    group_sizes: tuple[int | None, ...] = ()
    blocks: tuple[tuple[int, int], ...] = ()
    stored_offset: int = 0
    kv_obstacle: str = ""


BLOCK_SCHEME = Scheme(name="gguf", storages=("blocks",))
"""The scheme of a GGUF file. Each tensor has its own format."""


def config_scheme(config: Mapping[str, Any]) -> Scheme | None:
    """The scheme of a config.json; None if its weights are not quantised, or are MXFP4 experts alone.

    Raises ModelLoadError naming the setting that is wrong or not implemented.
    """
    settings = config.get("quantization_config")
    if not settings:
        return None

    if not isinstance(settings, Mapping):
        raise _not_implemented("quant_method", settings)

    match settings.get("quant_method"):
        case "mxfp4":
            return None
        case "gguf":  # written by loading, for a file whose tensors are blocks
            return BLOCK_SCHEME
        case "fp8":
            return _read_fp8(settings)
        case "awq":
            return _read_awq(settings)
        case "gptq":
            return _read_gptq(settings)
        case "compressed-tensors":
            return _read_compressed(settings)
        case "modelopt" | "modelopt_fp4":
            return _read_modelopt(settings)
        case method:
            raise _not_implemented("quant_method", method)


def _read_fp8(settings: Mapping[str, Any]) -> Scheme:
    _require(settings, "fmt", (None, "e4m3", "float8_e4m3fn"))
    block = settings.get("weight_block_size")
    return Scheme(name="fp8", storages=("fp8",), blocks=() if block is None else (_read_block(block),))


def _read_awq(settings: Mapping[str, Any]) -> Scheme:
    _require(settings, "bits", (4,))
    _require(settings, "version", (None, "gemm", "GEMM"))
    _require(settings, "zero_point", (None, True))
    return Scheme(name="awq", storages=("awq",), group_sizes=(_read_group(settings.get("group_size")),))


def _read_gptq(settings: Mapping[str, Any]) -> Scheme:
    _require(settings, "bits", (4,))
    _require(settings, "desc_act", (None, False))
    _require(settings, "checkpoint_format", (None, "gptq", "gptq_v2"))
    _require(settings, "is_marlin_format", (None, False))
    _require(settings, "pack_dtype", (None, "int32"))
    return Scheme(
        name="gptq",
        storages=("gptq",),
        group_sizes=(_read_group(settings.get("group_size")),),
        stored_offset=0 if settings.get("checkpoint_format") == "gptq_v2" else 1,
    )


def _read_compressed(settings: Mapping[str, Any]) -> Scheme:
    """Activations are not quantised, whatever the config says of them: the weights alone are read."""
    for name in ("transform_config", "sparsity_config"):
        found = settings.get(name)
        if found and not (isinstance(found, Mapping) and found.get("format") == "dense"):
            raise _not_implemented(name, found)

    outer = _require(settings, "format", (None, *COMPRESSED_FORMATS))
    kv_cache = settings.get("kv_cache_scheme")
    groups = settings.get("config_groups")
    if not groups and isinstance(kv_cache, Mapping):
        groups = {}
    elif not isinstance(groups, Mapping) or not groups:
        raise ModelLoadError(
            f"config: quantization_config with config_groups={short_repr(groups)}: expected a table of groups"
        )

    storages: dict[Storage, None] = {}
    group_sizes: dict[int | None, None] = {}
    blocks: dict[tuple[int, int], None] = {}
    for group in groups.values():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if not isinstance(weights, Mapping):
            raise _not_implemented("config_groups", groups)

        _require(group, "format", (None, *COMPRESSED_FORMATS))
        storage = _compressed_storage(weights)
        storages[storage] = None
        if storage == "packed":
            is_grouped = weights["strategy"] == "group"
            group_sizes[_read_group(weights.get("group_size")) if is_grouped else None] = None
        elif weights["strategy"] == "block":
            blocks[_read_block(weights.get("block_structure"))] = None

    name = "compressed-tensors" if outer is None else f"compressed-tensors, {outer}"
    return Scheme(
        name=name,
        storages=tuple(storages),
        group_sizes=tuple(group_sizes),
        blocks=tuple(blocks),
        kv_obstacle=_kv_obstacle(kv_cache),
    )


def _compressed_storage(weights: Mapping[str, Any]) -> Storage:
    """The storage of a group of weights."""
    if weights.get("type") == "float":
        if _require(weights, "num_bits", (4, 8)) == 8:
            _require(weights, "strategy", ("tensor", "channel", "block"))
            return "fp8"

        _require(weights, "strategy", ("tensor_group",))
        _require(weights, "group_size", NVFP4_GROUPS[1:])
        return "compressed_nvfp4"

    _require(weights, "type", ("int",))
    _require(weights, "num_bits", (4,))
    _require(weights, "strategy", ("group", "channel"))
    # "static" and "weight" leave the columns in place; "group" and "dynamic" reorder them.
    _require(weights, "actorder", (None, False, "static", "weight"))
    return "packed"


def _read_modelopt(settings: Mapping[str, Any]) -> Scheme:
    """The settings of hf_quant_config.json under "quantization", or the same without that name, as ModelOpt
    writes them into config.json. Those of several layers are in `quantized_layers`."""
    inner = settings.get("quantization", settings)
    if not isinstance(inner, Mapping):
        raise _not_implemented("quantization", inner)

    algorithm = inner.get("quant_algo")
    layers: Any = {"": inner}
    if algorithm is None:  # scales of the KV cache alone
        layers = {}
    elif algorithm == "MIXED_PRECISION":
        layers = inner.get("quantized_layers")
        if not isinstance(layers, Mapping) or not all(isinstance(each, Mapping) for each in layers.values()):
            raise _not_implemented("quantized_layers", layers)

    storages: dict[Storage, None] = {}
    for layer in layers.values():
        if _require(layer, "quant_algo", ("FP8", "NVFP4", "W4A16_NVFP4")) == "FP8":
            storages["fp8"] = None
        else:
            _require(layer, "group_size", NVFP4_GROUPS)
            storages["modelopt_nvfp4"] = None

    kv_cache = inner.get("kv_cache_quant_algo")
    if kv_cache not in (None, "FP8"):
        kv_obstacle = f"kv_cache_quant_algo={short_repr(kv_cache)}"
    else:
        kv_obstacle = _kv_obstacle(inner.get("kv_cache_scheme"))
    name = "modelopt" if algorithm is None else f"modelopt, {algorithm}"
    return Scheme(name=name, storages=tuple(storages), kv_obstacle=kv_obstacle)


def _kv_obstacle(scheme: object) -> str:
    """The reason for which the scales of a `kv_cache_scheme` are not those of e4m3; "" if they are."""
    if scheme is None:
        return ""

    if not isinstance(scheme, Mapping):
        return f"kv_cache_scheme={short_repr(scheme)}"

    for name, expected in KV_SCHEME.items():
        found = scheme.get(name, expected[0])
        if not any(type(found) is type(each) and found == each for each in expected):
            return f"a kv_cache_scheme of {name}={short_repr(found)}"

    return ""


def _require(settings: Mapping[str, Any], name: str, allowed: tuple[object, ...]) -> object:
    """The value of a setting; ModelLoadError if it is not among the implemented ones."""
    value = settings.get(name)
    if not any(type(value) is type(choice) and value == choice for choice in allowed):
        raise _not_implemented(name, value)

    return value


def _not_implemented(name: str, value: object) -> ModelLoadError:
    return ModelLoadError(f"config: quantization_config with {name}={short_repr(value)} is not implemented")


def _read_group(value: object) -> int | None:
    if type(value) is int and value == -1:
        return None

    if type(value) is not int or not 2 <= value <= MAX_GROUP or value % 2:
        raise ModelLoadError(
            f"config: quantization_config with group_size={short_repr(value)}: expected -1 or an even number "
            f"from 2 to {MAX_GROUP}"
        )

    return value


def _read_block(value: object) -> tuple[int, int]:
    if (
        isinstance(value, list | tuple)
        and len(value) == 2
        and all(type(size) is int and 1 <= size <= MAX_GROUP for size in value)
    ):
        return value[0], value[1]

    raise ModelLoadError(
        f"config: quantization_config with a block of {short_repr(value)}: expected two sizes from 1 to "
        f"{MAX_GROUP}"
    )
