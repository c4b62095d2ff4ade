"""Writes checkpoints with quantised weights: random codes, packed as each format's specification says, beside
the numbers that they stand for.

Codes, scales and zero points are drawn; nothing is quantised. The numbers are computed in numpy, without the
package's code.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file

from drift_sdk.quantised.formats import BLOCK_FORMATS, BlockFormat, BlockWeight, quantise_fp8

__all__ = [
    "FORMATS",
    "GROUP",
    "Format",
    "Stored",
    "e2m1_table",
    "e4m3_table",
    "random_blocks",
    "quantise_folder",
    "write_checkpoint",
]

GROUP = 32
NVFP4_GROUP = 16
BLOCK = (32, 48)
IGNORED = ("lm_head", "embed_tokens")
Array = npt.NDArray[Any]


@dataclass
class Stored:
    """The tensors of one weight, by the last part of their names, and the numbers [out, in] in float32."""

    tensors: dict[str, torch.Tensor]
    numbers: Array


@dataclass(frozen=True)
class Format:
    """A format: its `quantization_config`, and a function that draws a weight of so many rows and columns."""

    config: dict[str, Any]
    draw: Callable[[int, int, np.random.Generator], Stored]


def random_blocks(name: BlockFormat, rows: int = 24, columns: int = 512, seed: int = 0) -> BlockWeight:
    """Blocks of any bytes: codes, scales and numbers of all sizes, infinity and NaN among them."""
    size, num_bytes = BLOCK_FORMATS[name]
    shape = rows, columns // size, num_bytes
    blocks = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    return BlockWeight(torch.from_numpy(blocks), name)


def e4m3_table() -> Array:
    """The numbers of all codes of e4m3 (finite, NaN for 0x7f and 0xff): one sign bit, four of the exponent
    with bias 7, three of the mantissa."""
    numbers = []
    for code in range(256):
        sign, exponent, mantissa = -1.0 if code & 128 else 1.0, (code >> 3) & 15, code & 7
        size = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
        numbers.append(float("nan") if exponent == 15 and mantissa == 7 else sign * size)
    return np.array(numbers, np.float32)


def e2m1_table() -> Array:
    """The numbers of all codes of e2m1: a sign bit, two of the exponent with bias 1, one of the mantissa."""
    numbers = []
    for code in range(16):
        sign, exponent, mantissa = -1.0 if code & 8 else 1.0, (code >> 1) & 3, code & 1
        size = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
        numbers.append(sign * size)
    return np.array(numbers, np.float32)


def _groups(columns: int, size: int | None) -> Array:
    """The group of each column."""
    return np.arange(columns) // (size or columns)


def _int4(
    rows: int, columns: int, rng: np.random.Generator, size: int | None, zeros: Array | None = None
) -> tuple[Array, Array, Array, Array]:
    """Codes [out, in], scales and zero points [out, groups], and the numbers."""
    group = _groups(columns, size)
    codes = rng.integers(0, 16, (rows, columns))
    scales = rng.uniform(0.002, 0.03, (rows, group[-1] + 1)).astype(np.float16)
    if zeros is None:
        zeros = rng.integers(1, 16, scales.shape)
    numbers = (codes - zeros[:, group]).astype(np.float32) * scales[:, group].astype(np.float32)
    return codes, scales, zeros, numbers


def _words(codes: Array, places: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """Eight neighbouring codes of a row in one int32: number `places[i]` of them in bits 4 i to 4 i + 3."""
    padded = np.pad(codes, ((0, 0), (0, -codes.shape[1] % 8))).reshape(len(codes), -1, 8).astype(np.uint32)
    words = np.zeros(padded.shape[:2], np.uint32)
    for bits, place in enumerate(places):
        words |= padded[:, :, place] << np.uint32(4 * bits)
    return torch.from_numpy(words.view(np.int32).copy())


def _awq(rows: int, columns: int, rng: np.random.Generator) -> Stored:
    codes, scales, zeros, numbers = _int4(rows, columns, rng, GROUP)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    return Stored(
        {
            "qweight": _words(codes.T, order),
            "qzeros": _words(zeros.T, order),
            "scales": torch.from_numpy(scales.T.copy()),
        },
        numbers,
    )


def _gptq(*, has_zeros: bool, offset: int, size: int | None = GROUP) -> Callable[..., Stored]:
    def draw(rows: int, columns: int, rng: np.random.Generator) -> Stored:
        shape = rows, _groups(columns, size)[-1] + 1
        codes, scales, zeros, numbers = _int4(
            rows, columns, rng, size, None if has_zeros else np.full(shape, 8)
        )
        group = torch.from_numpy(_groups(columns, size).astype(np.int32))
        return Stored(
            {
                "qweight": _words_down(codes.T),
                "qzeros": _words(zeros.T - offset),
                "scales": torch.from_numpy(scales.T.copy()),
                "g_idx": group,
            },
            numbers,
        )

    return draw


def _words_down(codes: Array) -> torch.Tensor:
    """Eight neighbouring codes of a column in one int32."""
    return _words(codes.T).T.contiguous()


def _packed(
    *, zeros: str, size: int | None = GROUP, dtype: torch.dtype = torch.bfloat16
) -> Callable[..., Stored]:
    def draw(rows: int, columns: int, rng: np.random.Generator) -> Stored:
        shape = rows, _groups(columns, size)[-1] + 1
        codes, scales, points, _ = _int4(rows, columns, rng, size, None if zeros else np.full(shape, 8))
        stored = torch.from_numpy(scales).to(dtype)
        group = _groups(columns, size)
        numbers = (codes - points[:, group]).astype(np.float32) * stored.float().numpy()[:, group]
        tensors = {
            "weight_packed": _words(codes),
            "weight_scale": stored,
            "weight_shape": torch.tensor([rows, columns]),
        }
        if zeros == "packed":
            tensors["weight_zero_point"] = _words_down(points)
        elif zeros == "int8":
            tensors["weight_zero_point"] = torch.from_numpy((points - 8).astype(np.int8))
        return Stored(tensors, numbers)

    return draw


def _fp8(
    strategy: str, name: str, block: tuple[int, int] = BLOCK, **more: torch.Tensor
) -> Callable[..., Stored]:
    height, width = block

    def draw(rows: int, columns: int, rng: np.random.Generator) -> Stored:
        codes = rng.integers(0, 0x78, (rows, columns)) | (rng.integers(0, 2, (rows, columns)) << 7)
        shapes = {
            "scalar": (),
            "tensor": (1,),
            "channel": (rows, 1),
            "vector": (rows,),
            "block": (-(-rows // height), -(-columns // width)),
        }
        scales = rng.uniform(1e-4, 1e-3, shapes[strategy]).astype(np.float32)
        numbers = np.empty((rows, columns), np.float32)
        table = e4m3_table()
        for row in range(rows):
            for first in range(0, columns, width):
                piece = slice(first, first + width)
                scale = {
                    "scalar": lambda: scales,
                    "tensor": lambda: scales[0],
                    "channel": lambda row=row: scales[row, 0],
                    "vector": lambda row=row: scales[row],
                    "block": lambda row=row, first=first: scales[row // height, first // width],
                }[strategy]()
                numbers[row, piece] = table[codes[row, piece]] * scale
        values = torch.from_numpy(codes.astype(np.uint8)).view(torch.float8_e4m3fn)
        return Stored({"weight": values, name: torch.from_numpy(np.array(scales)), **more}, numbers)

    return draw


def _nvfp4(*, is_modelopt: bool) -> Callable[..., Stored]:
    names = ("weight", "weight_scale_2") if is_modelopt else ("weight_packed", "weight_global_scale")

    def draw(rows: int, columns: int, rng: np.random.Generator) -> Stored:
        group = _groups(columns, NVFP4_GROUP)
        codes = rng.integers(0, 16, (rows, columns)).astype(np.uint8)
        scales = rng.integers(0x28, 0x4F, (rows, group[-1] + 1)).astype(np.uint8)
        whole = np.float32(rng.uniform(30, 90))
        if is_modelopt:
            whole = np.float32(1) / whole
            factors = e4m3_table()[scales] * whole
        else:
            factors = e4m3_table()[scales] / whole
        tensors = {
            names[0]: torch.from_numpy(codes[:, 0::2] | (codes[:, 1::2] << 4)),
            "weight_scale": torch.from_numpy(scales).view(torch.float8_e4m3fn),
            names[1]: torch.tensor(whole) if is_modelopt else torch.tensor([whole]),
            **(STATIC if is_modelopt else {"input_global_scale": torch.tensor([8.0])}),
        }
        return Stored(tensors, e2m1_table()[codes] * factors[:, group])

    return draw


def _compressed(outer: str, weights: dict[str, Any], **group: Any) -> dict[str, Any]:
    defaults = {"symmetric": True, "dynamic": False, "actorder": None, "block_structure": None}
    return {
        "quant_method": "compressed-tensors",
        "format": outer,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": defaults | weights, **group}},
    }


INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}
FP8 = {"num_bits": 8, "type": "float"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False}
NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": NVFP4_GROUP}
MODELOPT = {"quant_method": "modelopt", "ignore": ["lm_head"], "producer": {"name": "modelopt"}}
STATIC = {"input_scale": torch.tensor(0.5)}

FORMATS: dict[str, Format] = {
    "awq": Format({"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}, _awq),
    "gptq": Format(GPTQ, _gptq(has_zeros=True, offset=1)),
    "gptq, version 2": Format(GPTQ | {"checkpoint_format": "gptq_v2"}, _gptq(has_zeros=True, offset=0)),
    "gptq, symmetric": Format(GPTQ | {"sym": True}, _gptq(has_zeros=False, offset=1)),
    "gptq, whole rows": Format(GPTQ | {"group_size": -1}, _gptq(has_zeros=True, offset=1, size=None)),
    "packed": Format(_compressed("pack-quantized", INT4), _packed(zeros="")),
    "packed, zero points": Format(
        _compressed("pack-quantized", INT4 | {"symmetric": False}), _packed(zeros="packed")
    ),
    "packed, int8 zero points": Format(
        _compressed("pack-quantized", INT4 | {"symmetric": False}),
        _packed(zeros="int8", dtype=torch.float16),
    ),
    "packed, whole rows": Format(
        _compressed("pack-quantized", INT4 | {"strategy": "channel", "group_size": None}),
        _packed(zeros="", size=None),
    ),
    "fp8, tensor": Format(
        _compressed("float-quantized", FP8 | {"strategy": "tensor"}, input_activations={"dynamic": False}),
        _fp8("tensor", "weight_scale", **STATIC),
    ),
    "fp8, channel": Format(
        _compressed("float-quantized", FP8 | {"strategy": "channel"}, input_activations={"dynamic": True}),
        _fp8("channel", "weight_scale"),
    ),
    "fp8, compressed blocks": Format(
        _compressed("float-quantized", FP8 | {"strategy": "block", "block_structure": list(BLOCK)}),
        _fp8("block", "weight_scale"),
    ),
    "fp8, blocks": Format(
        {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(BLOCK)},
        _fp8("block", "weight_scale_inv"),
    ),
    "fp8, blocks of 128": Format(
        {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
        _fp8("block", "weight_scale_inv", (128, 128)),
    ),
    "fp8, scalar": Format(
        {"quant_method": "fp8", "activation_scheme": "static"}, _fp8("scalar", "weight_scale", **STATIC)
    ),
    "fp8, vector": Format({"quant_method": "fp8"}, _fp8("vector", "weight_scale")),
    "fp8, modelopt": Format(MODELOPT | {"quant_algo": "FP8"}, _fp8("scalar", "weight_scale", **STATIC)),
    "nvfp4": Format(
        _compressed("nvfp4-pack-quantized", NVFP4, input_activations={"dynamic": "local"}),
        _nvfp4(is_modelopt=False),
    ),
    "nvfp4, modelopt": Format(MODELOPT | {"quant_algo": "NVFP4"}, _nvfp4(is_modelopt=True)),
}


def write_checkpoint(
    folder: Path,
    kind: str,
    quantised: Path,
    twin: Path,
    *,
    ignored: tuple[str, ...] = ("lm_head", "embed_tokens"),
) -> dict[str, Array]:
    """Write two folders from that of a model: `quantised` has random weights of a format in place of all
    matrices but the ignored ones, and `twin` the numbers of the same weights in float32.

    ignored: parts of the names of matrices that stay as they are.
    Returns the numbers by name.
    """
    kind_format = FORMATS[kind]
    rng = np.random.default_rng(0)
    plain = load_file(folder / "model.safetensors")
    stored: dict[str, torch.Tensor] = {}
    numbers: dict[str, Array] = {}
    for name, tensor in plain.items():
        if tensor.ndim != 2 or any(part in name for part in ignored):
            stored[name] = tensor
            continue

        drawn = kind_format.draw(*tensor.shape, rng)
        prefix = name.removesuffix(".weight")
        stored.update(
            {f"{prefix}.{part}": value.clone().contiguous() for part, value in drawn.tensors.items()}
        )
        numbers[name] = drawn.numbers

    config = json.loads((folder / "config.json").read_text())
    for out, tensors, settings in (
        (quantised, stored, {"quantization_config": kind_format.config}),
        (twin, plain | {name: torch.from_numpy(array) for name, array in numbers.items()}, {}),
    ):
        shutil.copytree(folder, out)
        save_file(tensors, out / "model.safetensors")
        (out / "config.json").write_text(json.dumps(config | settings))
    return numbers


def quantise_folder(folder: Path, quantised: Path, *, ignored: tuple[str, ...]) -> None:
    """Write a folder with a model's own matrices, but for the ignored ones, in FP8 with a scale for each
    128 rows and columns. ignored: parts of names."""
    stored: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if tensor.ndim != 2 or any(part in name for part in ignored):
            stored[name] = tensor
            continue

        weight = quantise_fp8(tensor, (128, 128))
        stored |= {name: weight.values, f"{name}_scale_inv": weight.scales}
    shutil.copytree(folder, quantised)
    save_file(stored, quantised / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    settings = {"quantization_config": FORMATS["fp8, blocks of 128"].config}
    (quantised / "config.json").write_text(json.dumps(config | settings))
