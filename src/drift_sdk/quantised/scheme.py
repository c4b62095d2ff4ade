"""The quantisation of a checkpoint, from the `quantization_config` of its config.json.

Which tensors are quantised is read from the files: a weight without scales beside it is not. The scheme gives
what the tensors do not show.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from msgspec import Struct

from drift_sdk.errors import ModelLoadError, short_repr

Storage = Literal["fp8", "awq", "gptq", "packed", "compressed_nvfp4", "modelopt_nvfp4", "blocks"]
ScaleShape = Literal["tensor", "channel"]
"""The extent of an FP8 scale: a whole weight, or a row of it."""

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
MODELOPT_ALGORITHMS = ("FP8", "NVFP4", "W4A16_NVFP4")
NVFP4_GROUPS = (None, 16)
"""Sizes of groups in settings of ModelOpt, the default being NVFP4's own."""


METHODS = ("fp8", "awq", "gptq", "compressed-tensors", "modelopt", "modelopt_fp4")
"""Values of `quant_method` of folders whose weights are quantised, but for MXFP4 experts."""


class Groups(Struct, frozen=True):
    """The groups of 4-bit codes that share a scale.

    size:      columns of a group; None: all columns of a row.
    has_zeros: whether weights have zero points, else these are the middle of the codes; None: some have them,
               or the config does not say it.
    """

    size: int | None
    has_zeros: bool | None = None


class Scheme(Struct, frozen=True, kw_only=True):
    """The form in which a checkpoint stores quantised weights.

    name:          as config.json names the method, with its format.
    storages:      "fp8": e4m3 with scales beside them. "awq", "gptq": 4-bit codes packed along the outputs,
                   along the inputs. "packed": compressed-tensors' pack-quantized. "compressed_nvfp4",
                   "modelopt_nvfp4": NVFP4, as these tools store it. "blocks": those of GGUF.
    groups:        of 4-bit codes, each size once. A checkpoint of compressed-tensors may have several.
    scale_shapes:  of FP8 without blocks.
    blocks:        rows and columns that share a scale in blocks of FP8, of which a checkpoint of
                   compressed-tensors may have several, too.
    kv_obstacle:   why scales of the KV cache beside the weights are not those of e4m3; "" if they are.
    stored_offset: what is added to stored zero points: 1 for the first format of GPTQ.
    """

    name: str
    storages: tuple[Storage, ...]
    groups: tuple[Groups, ...] = ()
    scale_shapes: tuple[ScaleShape, ...] = ()
    blocks: tuple[tuple[int, int], ...] = ()
    stored_offset: int = 0
    kv_obstacle: str = ""


BLOCK_SCHEME = Scheme(name="gguf", storages=("blocks",))
"""The scheme of a GGUF file. Each tensor has its own format."""


def config_scheme(config: Mapping[str, Any]) -> Scheme | None:
    """The scheme of a config.json; None if its weights are not quantised, or are MXFP4 experts alone.

    Raises ModelLoadError naming the setting that is wrong or not implemented.
    """
    settings = quantisation_settings(config)
    if not settings:
        return None

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
            raise _wrong("quant_method", method, _one_of(METHODS))


def quantisation_settings(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The `quantization_config` of a config.json; empty if there is none. Raises ModelLoadError for a value
    that is no mapping."""
    settings = config.get("quantization_config")
    if settings is None:
        return {}

    if not isinstance(settings, Mapping):
        raise ModelLoadError(f"config: quantization_config={short_repr(settings)}: expected a mapping")

    return settings


def join_groups(groups: Iterable[Groups]) -> tuple[Groups, ...]:
    """Groups of which each size is there once."""
    joined: dict[int | None, Groups] = {}
    for each in groups:
        other = joined.setdefault(each.size, each)
        if other.has_zeros is not each.has_zeros:
            joined[each.size] = Groups(each.size)
    return tuple(joined.values())


def _read_fp8(settings: Mapping[str, Any]) -> Scheme:
    _require(settings, "fmt", (None, "e4m3", "float8_e4m3fn"))
    block = settings.get("weight_block_size")
    if block is None:
        return Scheme(name="fp8", storages=("fp8",), scale_shapes=("tensor", "channel"))

    return Scheme(name="fp8", storages=("fp8",), blocks=(_read_block(block),))


def _read_awq(settings: Mapping[str, Any]) -> Scheme:
    _require(settings, "bits", (4,))
    _require(settings, "version", (None, "gemm", "GEMM"))
    _require(settings, "zero_point", (None, True))
    groups = Groups(_read_group(settings.get("group_size")), has_zeros=True)
    return Scheme(name="awq", storages=("awq",), groups=(groups,))


def _read_gptq(settings: Mapping[str, Any]) -> Scheme:
    _require(settings, "bits", (4,))
    _require(settings, "desc_act", (None, False))
    _require(settings, "checkpoint_format", (None, "gptq", "gptq_v2"))
    _require(settings, "is_marlin_format", (None, False))
    _require(settings, "pack_dtype", (None, "int32"))
    is_symmetric = _require(settings, "sym", (None, True, False))
    groups = Groups(_read_group(settings.get("group_size")), _has_zeros(is_symmetric))
    return Scheme(
        name="gptq",
        storages=("gptq",),
        groups=(groups,),
        stored_offset=0 if settings.get("checkpoint_format") == "gptq_v2" else 1,
    )


def _read_compressed(settings: Mapping[str, Any]) -> Scheme:
    """Activations are not quantised, whatever the config says of them: the weights alone are read."""
    for name in ("transform_config", "sparsity_config"):
        found = settings.get(name)
        if found and not (isinstance(found, Mapping) and found.get("format") == "dense"):
            raise _wrong(name, found, "none, or the format 'dense'")

    outer = _require(settings, "format", (None, *COMPRESSED_FORMATS))
    kv_cache = settings.get("kv_cache_scheme")
    groups = settings.get("config_groups")
    if not groups and isinstance(kv_cache, Mapping):
        groups = {}
    elif not isinstance(groups, Mapping) or not groups:
        raise _wrong("config_groups", groups, "a mapping of groups")

    storages: dict[Storage, None] = {}
    int4_groups: list[Groups] = []
    scale_shapes: dict[ScaleShape, None] = {}
    blocks: dict[tuple[int, int], None] = {}
    for group in groups.values():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if not isinstance(weights, Mapping):
            raise _wrong("config_groups", groups, "the settings of weights in each group")

        _require(group, "format", (None, *COMPRESSED_FORMATS))
        storage = _compressed_storage(weights)
        storages[storage] = None
        strategy = weights["strategy"]
        if storage == "packed":
            size = _read_group(weights.get("group_size")) if strategy == "group" else None
            int4_groups.append(Groups(size, _has_zeros(weights.get("symmetric"))))
        elif strategy == "block":
            blocks[_read_block(weights.get("block_structure"))] = None
        elif storage == "fp8":
            scale_shapes[strategy] = None

    name = "compressed-tensors" if outer is None else f"compressed-tensors, {outer}"
    return Scheme(
        name=name,
        storages=tuple(storages),
        groups=join_groups(int4_groups),
        scale_shapes=tuple(scale_shapes),
        blocks=tuple(blocks),
        kv_obstacle=_kv_obstacle(kv_cache),
    )


def _compressed_storage(weights: Mapping[str, Any]) -> Storage:
    """The storage of a group of weights."""
    if weights.get("type") == "float":
        _require(weights, "symmetric", (None, True))
        if _require(weights, "num_bits", (4, 8)) == 8:
            _require(weights, "strategy", ("tensor", "channel", "block"))
            return "fp8"

        _require(weights, "strategy", ("tensor_group",))
        _require(weights, "group_size", NVFP4_GROUPS[1:])
        return "compressed_nvfp4"

    _require(weights, "type", ("int", "float"))
    _require(weights, "num_bits", (4,))
    _require(weights, "symmetric", (None, True, False))
    _require(weights, "strategy", ("group", "channel"))
    # "static" and "weight" leave the columns in place; "group" and "dynamic" reorder them.
    _require(weights, "actorder", (None, False, "static", "weight"))
    return "packed"


def _read_modelopt(settings: Mapping[str, Any]) -> Scheme:
    """The settings of hf_quant_config.json under "quantization", or the same without that name, as ModelOpt
    writes them into config.json. Those of several layers are in `quantized_layers`."""
    inner = settings.get("quantization", settings)
    if not isinstance(inner, Mapping):
        raise _wrong("quantization", inner, "a mapping")

    algorithm = _require(inner, "quant_algo", (None, *MODELOPT_ALGORITHMS, "MIXED_PRECISION"))
    layers: Any = {"": inner}
    if algorithm is None:  # scales of the KV cache alone
        layers = {}
    elif algorithm == "MIXED_PRECISION":
        layers = inner.get("quantized_layers")
        if not isinstance(layers, Mapping) or not all(isinstance(each, Mapping) for each in layers.values()):
            raise _wrong("quantized_layers", layers, "the settings of each layer")

    storages: dict[Storage, None] = {}
    for layer in layers.values():
        if _require(layer, "quant_algo", MODELOPT_ALGORITHMS) == "FP8":
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
    return Scheme(name=name, storages=tuple(storages), scale_shapes=("tensor",), kv_obstacle=kv_obstacle)


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


def _has_zeros(is_symmetric: object) -> bool | None:
    """Whether weights have zero points, by the setting that says whether they are symmetric."""
    return None if is_symmetric is None else not is_symmetric


def _require(settings: Mapping[str, Any], name: str, allowed: tuple[object, ...]) -> object:
    """The value of a setting; ModelLoadError if it is not among the implemented ones."""
    value = settings.get(name)
    if not any(type(value) is type(choice) and value == choice for choice in allowed):
        raise _wrong(name, value, _one_of(allowed))

    return value


def _one_of(allowed: tuple[object, ...]) -> str:
    """Implemented values in words. None stands for a setting that is missing."""
    values = [repr(value) for value in allowed if value is not None]
    return values[0] if len(values) == 1 else f"one of {', '.join(values)}"


def _wrong(name: str, value: object, allowed: str) -> ModelLoadError:
    return ModelLoadError(f"config: quantization_config with {name}={short_repr(value)}: expected {allowed}")


def _read_group(value: object) -> int | None:
    if type(value) is int and value == -1:
        return None

    if type(value) is not int or not 2 <= value <= MAX_GROUP or value % 2:
        raise _wrong("group_size", value, f"-1 or an even number from 2 to {MAX_GROUP}")

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
