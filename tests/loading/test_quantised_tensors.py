"""Checkpoints with quantised weights, against the numbers that they were written from; and damaged ones."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from model_zoo import make_model
from quantised_files import FORMATS, write_checkpoint
from safetensors.torch import load_file, save_file

from drift_sdk.errors import ModelLoadError
from drift_sdk.loading.quantised_tensors import QuantisedSource
from drift_sdk.loading.source import Source
from drift_sdk.loading.tensors import CheckedSource
from drift_sdk.quantised.scheme import config_scheme

CPU = torch.device("cpu")
ODD_SHAPES = 6
"""A model of the zoo with matrices of 24, 72 and 80 rows and columns: the last groups are short."""
LAYER = "model.layers.1."
DOWN = f"{LAYER}mlp.down_proj"

Tensors = dict[str, torch.Tensor]
Changes = dict[str, torch.Tensor | None]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    make_model(ODD_SHAPES, folder)
    return folder


@pytest.fixture(scope="module")
def folders(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a format, and beside it "twin" and the numbers."""
    made: dict[str, Path] = {}

    def folder(kind: str) -> Path:
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp("format")
            numbers = write_checkpoint(plain, kind, made[kind] / "quantised", made[kind] / "twin")
            save_file({name: torch.from_numpy(a) for name, a in numbers.items()}, made[kind] / "numbers")
        return made[kind]

    return folder


def open_folder(folder: Path) -> QuantisedSource:
    tensors = Source(folder).tensors()
    assert isinstance(tensors, QuantisedSource)
    return tensors


@pytest.mark.parametrize("kind", FORMATS)
def test_weights_have_names_shapes_and_numbers_of_the_model(
    folders: Callable[[str], Path], plain: Path, kind: str
) -> None:
    numbers = load_file(folders(kind) / "numbers")
    tensors = open_folder(folders(kind) / "quantised")
    expected = load_file(plain / "model.safetensors") | numbers
    assert sorted(tensors.names()) == sorted(expected)
    assert len(numbers) > 20
    for name, tensor in expected.items():
        assert tensors.shape(name) == tensor.shape
        assert torch.equal(tensors.get(name), tensor), name
        weight = tensors.quantised(name, CPU)
        assert (weight is None) == (name not in numbers)
        if weight is not None:
            assert weight.shape == tensor.shape
            assert torch.equal(weight.dequantise(torch.float32), tensor)
            num_bytes = tensors.quantised_bytes(name)
            assert num_bytes is not None and weight.nbytes <= num_bytes < 2 * tensor.numel()


def scales_of_groups(tensors: Tensors) -> tuple[str, torch.Tensor]:
    """The name of the scales, and the scales in rows."""
    parts = (".scales", ".weight_scale", ".weight_scale_inv")
    name = next(n for n in tensors if n.startswith(DOWN) and n.endswith(parts))
    return name, tensors[name].T if name.endswith(".scales") else tensors[name]


def roll_scales(tensors: Tensors) -> None:
    """Scales off by one group."""
    name, scales = scales_of_groups(tensors)
    rolled = scales.view(torch.uint8 if scales.itemsize == 1 else scales.dtype).roll(1, dims=1)
    scales.copy_(rolled.view(scales.dtype))


def swap_nibbles(tensors: Tensors) -> None:
    """The high four bits of each byte of the codes and its low ones in the other order."""
    parts = ("qweight", "weight_packed", "weight")
    name = next(n for n in tensors if n.startswith(DOWN) and n.endswith(parts))
    pairs = tensors[name].view(torch.uint8)
    tensors[name] = ((pairs >> 4) | (pairs << 4)).view(tensors[name].dtype)


def move_zero_point(tensors: Tensors) -> None:
    """The zero point of one group off by one."""
    name = next(n for n in tensors if n.startswith(DOWN) and n.endswith(("qzeros", "zero_point")))
    tensors[name].view(torch.uint8)[-1, -1] ^= 1


def change_ragged_end(tensors: Tensors) -> None:
    """The scale of the last group, which is short."""
    _, scales = scales_of_groups(tensors)
    scales[0, -1] = 2 * scales[0, -1].float()


def invert_global_scale(tensors: Tensors) -> None:
    """The scale of the tensor as the other tool stores it."""
    name = next(n for n in tensors if n.startswith(DOWN) and n.endswith(("weight_global_scale", "scale_2")))
    tensors[name].reciprocal_()


SYMMETRIC = [kind for kind in FORMATS if kind in ("packed", "packed, whole rows", "gptq, symmetric")]
ZEROS = [
    kind
    for kind in FORMATS
    if ("gptq" in kind or "awq" in kind or "zero points" in kind) and kind not in SYMMETRIC
]
GROUPS = [kind for kind in FORMATS if "whole" not in kind and "fp8" not in kind]
BLOCKS = ["fp8, blocks", "fp8, compressed blocks"]
FAULTS = [
    *((roll_scales, kind) for kind in (*GROUPS, *BLOCKS)),
    *((swap_nibbles, kind) for kind in FORMATS if "fp8" not in kind),
    *((move_zero_point, kind) for kind in ZEROS),
    *((change_ragged_end, kind) for kind in (*GROUPS, *BLOCKS)),
    *((invert_global_scale, kind) for kind in ("nvfp4", "nvfp4, modelopt")),
]


@pytest.mark.parametrize("fault, kind", FAULTS)
def test_faults_change_the_numbers_of_their_weight_alone(
    folders: Callable[[str], Path], tmp_path: Path, fault: Callable[[Tensors], None], kind: str
) -> None:
    tensors = load_file(folders(kind) / "quantised" / "model.safetensors")
    fault(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    config = (folders(kind) / "quantised" / "config.json").read_text()
    (tmp_path / "config.json").write_text(config)
    found = open_folder(tmp_path)
    numbers = load_file(folders(kind) / "numbers")
    layer = [name for name in numbers if name.startswith(LAYER)]
    assert [name for name in layer if not torch.equal(found.get(name), numbers[name])] == [f"{DOWN}.weight"]


def write_changed(
    folder: Path, out: Path, changes: dict[str, torch.Tensor | None], **settings: object
) -> str:
    """A copy of a folder with tensors of the weight DOWN replaced, or without them; returns the file."""
    out.mkdir(exist_ok=True)
    tensors = load_file(folder / "model.safetensors")
    for part, tensor in changes.items():
        tensors.pop(f"{DOWN}.{part}", None)
        if tensor is not None:
            tensors[f"{DOWN}.{part}"] = tensor
    save_file(tensors, out / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= settings
    (out / "config.json").write_text(json.dumps(config))
    return str(out / "model.safetensors")


def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def halves(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.float16)


WIDE = torch.int64
E4M3 = torch.float8_e4m3fn
INT8_ZEROS, MODELOPT = "packed, int8 zero points", "nvfp4, modelopt"
FP8_KINDS = {
    "fp8, blocks": "[3, 2]",
    "fp8, compressed blocks": "[3, 2]",
    "fp8, channel": "[72, 1] or [72]",
    "fp8, tensor": "[1] or [] or [1, 1]",
    "fp8, modelopt": "[1] or [] or [1, 1]",
    "fp8, vector": "[1] or [] or [1, 1] or [72, 1] or [72]",
}
"""Shapes of scales that are allowed for a weight of 72 rows and 80 columns."""


def other_shapes(kind: str) -> list[tuple[str, str, torch.Tensor | None, str]]:
    """Cases of scales with shapes of other kinds."""
    part = "weight_scale_inv" if kind == "fp8, blocks" else "weight_scale"
    shapes: tuple[tuple[int, ...], ...] = ((), (1,), (1, 1), (72,), (72, 1), (3, 2), (2, 2), (1, 1, 1))
    return [
        (kind, part, torch.ones(shape), f"has shape {list(shape)}, expected {FP8_KINDS[kind]}")
        for shape in shapes
        if str(list(shape)) not in FP8_KINDS[kind].split(" or ")
    ]


DAMAGED: list[tuple[str, str, torch.Tensor | None, str]] = [
    ("gptq", "scales", halves(2, 72), "has shape [2, 72], expected [3, 72]"),
    ("gptq", "scales", zeros(3, 72), "is stored as torch.int32, expected float16"),
    ("gptq", "qzeros", zeros(3, 8), "has shape [3, 8], expected [3, 9]"),
    ("gptq", "qzeros", None, "is missing"),
    ("gptq", "scales", None, "is missing"),
    ("gptq", "g_idx", zeros(9), "has shape [9], expected [80]"),
    ("gptq", "qweight", torch.zeros(10, 72), "is stored as torch.float32, expected int32"),
    ("gptq", "qweight", zeros(10), "has shape [10], expected a matrix"),
    ("awq", "scales", halves(3, 64), "has shape [3, 64], expected [3, 72]"),
    ("awq", "qzeros", zeros(3, 9, dtype=WIDE), "is stored as torch.int64, expected int32"),
    ("awq", "qzeros", None, "is missing"),
    ("awq", "scales", None, "is missing"),
    ("packed", "weight_shape", torch.tensor([72, 96]), "is [72, 96], expected [72, 80]"),
    ("packed", "weight_shape", torch.tensor([72, 79]), "is [72, 79], expected [72, 80]"),
    ("packed", "weight_shape", torch.tensor([72, 80, 1]), "has shape [3], expected [2]"),
    ("packed", "weight_g_idx", zeros(80), "reorders the columns (actorder)"),
    ("packed", "weight_scale", None, "is missing"),
    ("packed", "weight_zero_point", zeros(9, 2), "has shape [9, 2], expected [9, 3]"),
    ("packed, zero points", "weight_zero_point", None, "is missing"),
    (INT8_ZEROS, "weight_zero_point", None, "is missing"),
    (INT8_ZEROS, "weight_zero_point", zeros(9, 3, dtype=torch.int8), "has shape [9, 3], expected [72, 3]"),
    *(case for kind in FP8_KINDS for case in other_shapes(kind)),
    ("fp8, blocks", "weight_scale_inv", None, "is missing"),
    *((kind, "weight_scale", None, "is missing") for kind in FP8_KINDS if kind != "fp8, blocks"),
    ("fp8, channel", "weight_scale", torch.ones(71, 1), "has shape [71, 1], expected [72, 1]"),
    ("fp8, channel", "weight_scale", zeros(72, 1, dtype=WIDE), "is stored as torch.int64"),
    ("fp8, channel", "weight", zeros(72, 80, dtype=torch.int8), "is stored as torch.int8"),
    ("fp8, channel", "weight", zeros(72, 80).to(torch.float8_e5m2), "is stored as torch.float8_e5m2"),
    ("nvfp4", "weight_packed", zeros(72, 40), "is stored as torch.int32, expected uint8"),
    ("nvfp4", "weight_packed", zeros(72, 2, 20, dtype=torch.uint8), "expected a matrix"),
    ("nvfp4", "weight_scale", zeros(72, 4).to(E4M3), "has shape [72, 4], expected [72, 5]"),
    ("nvfp4", "weight_scale", halves(72, 5), "is stored as torch.float16, expected float8_e4m3fn"),
    ("nvfp4", "weight_global_scale", None, "is missing"),
    ("nvfp4", "weight_global_scale", torch.ones(72), "has shape [72], expected [1]"),
    ("nvfp4", "weight_global_scale", halves(1), "is stored as torch.float16, expected float32"),
    ("nvfp4", "weight_scale", None, "is missing"),
    (MODELOPT, "weight", zeros(72, 40, dtype=torch.int8), "is stored as torch.int8, expected uint8"),
    (MODELOPT, "weight_scale", torch.ones(()), "has shape [], expected [72, 5]"),
    (MODELOPT, "weight_scale", None, "is missing"),
    (MODELOPT, "weight_scale_2", None, "is missing"),
]
NAN, INF = float("nan"), float("inf")
NO_CODE = torch.full((72, 5), 0x7F, dtype=torch.uint8).view(E4M3)
WRONG_NUMBERS: list[tuple[str, str, torch.Tensor | None, str]] = [
    ("gptq", "qzeros", ~zeros(3, 9), "has the zero point 15 of checkpoint_format='gptq'"),
    ("gptq", "g_idx", torch.arange(80, dtype=torch.int32) % 3, "reorders the columns (desc_act)"),
    ("gptq", "scales", halves(3, 72) * NAN, "has NaN or infinity"),
    ("gptq, symmetric", "qzeros", zeros(3, 9), "has zero points other than 8, expected none"),
    ("awq", "scales", halves(3, 72) * INF, "has NaN or infinity"),
    ("packed", "weight_scale", halves(72, 3) * NAN, "has NaN or infinity"),
    ("packed", "weight_zero_point", zeros(9, 3), "has zero points other than 8, expected none"),
    (INT8_ZEROS, "weight_zero_point", zeros(72, 3, dtype=torch.int8) + 9, "expected -8 to 7"),
    ("fp8, channel", "weight_scale", torch.full((72, 1), INF), "has NaN or infinity"),
    ("fp8, blocks", "weight_scale_inv", torch.full((3, 2), NAN), "has NaN or infinity"),
    ("nvfp4", "weight_scale", NO_CODE, "has NaN or infinity"),
    ("nvfp4", "weight_global_scale", torch.zeros(1), "has 0, expected a positive finite number"),
    ("nvfp4", "weight_global_scale", torch.tensor([INF]), "has inf, expected a positive"),
    (MODELOPT, "weight_scale", NO_CODE, "has NaN or infinity"),
    (MODELOPT, "weight_scale_2", torch.tensor(NAN), "has nan, expected a positive finite number"),
    (MODELOPT, "weight_scale_2", torch.tensor(-1.0), "has -1, expected a positive finite number"),
]


@pytest.mark.parametrize("kind, part, tensor, message", [*DAMAGED, *WRONG_NUMBERS])
def test_damaged_weights_are_named(
    folders: Callable[[str], Path],
    tmp_path: Path,
    kind: str,
    part: str,
    tensor: torch.Tensor | None,
    message: str,
) -> None:
    file = write_changed(folders(kind) / "quantised", tmp_path, {part: tensor})
    with pytest.raises(ModelLoadError) as caught:
        open_folder(tmp_path).get(f"{DOWN}.weight")
    place = tmp_path if tensor is None else file
    assert str(caught.value).startswith(f"{place}: tensor {DOWN}.{part} ")
    assert message in str(caught.value)


@pytest.mark.parametrize("kind, part, tensor, message", DAMAGED)
def test_headers_show_damage(
    folders: Callable[[str], Path],
    tmp_path: Path,
    kind: str,
    part: str,
    tensor: torch.Tensor | None,
    message: str,
) -> None:
    write_changed(folders(kind) / "quantised", tmp_path, {part: tensor})
    tensors = open_folder(tmp_path)
    assert isinstance(tensors, CheckedSource)
    tensors.check("model.layers.0.mlp.down_proj.weight", torch.float32)
    with pytest.raises(ModelLoadError, match=re.escape(message)) as caught:
        tensors.check(f"{DOWN}.weight", torch.float32)
    with pytest.raises(ModelLoadError, match=re.escape(str(caught.value))):
        tensors.get(f"{DOWN}.weight")


@pytest.mark.parametrize("kind", SYMMETRIC)
def test_symmetric_weights_take_no_bytes_for_zero_points(folders: Callable[[str], Path], kind: str) -> None:
    tensors = open_folder(folders(kind) / "quantised")
    weight = tensors.quantised(f"{DOWN}.weight", CPU)
    assert weight is not None and weight.nbytes == tensors.quantised_bytes(f"{DOWN}.weight")


@pytest.mark.parametrize("is_first_symmetric", [True, False])
def test_zero_points_are_those_of_the_groups_that_fit(tmp_path: Path, is_first_symmetric: bool) -> None:
    """A checkpoint of two sizes of groups, of which one has zero points."""
    asymmetric = FORMATS["packed, zero points"].config["config_groups"]["group_0"]
    other = {"weights": asymmetric["weights"] | {"symmetric": True, "group_size": 16}}
    groups = dict(enumerate([other, asymmetric] if is_first_symmetric else [asymmetric, other]))
    settings = FORMATS["packed"].config | {"config_groups": groups}
    write_mixed(tmp_path, {"quantization_config": settings}, {"a": "packed"})
    with pytest.raises(ModelLoadError, match="tensor a.weight_zero_point is missing"):
        open_folder(tmp_path).get("a.weight")


def test_codes_beside_a_plain_weight_are_rejected(folders: Callable[[str], Path], tmp_path: Path) -> None:
    write_changed(folders("gptq") / "quantised", tmp_path, {"weight": torch.zeros(72, 80)})
    with pytest.raises(ModelLoadError, match=rf"tensors {DOWN}.qweight and {DOWN}.weight, expected one"):
        open_folder(tmp_path)


def test_weights_without_scales_are_not_quantised(folders: Callable[[str], Path], tmp_path: Path) -> None:
    write_changed(
        folders("fp8, channel") / "quantised", tmp_path, {"weight": torch.ones(72, 80), "weight_scale": None}
    )
    tensors = open_folder(tmp_path)
    assert tensors.quantised(f"{DOWN}.weight", CPU) is None
    assert tensors.quantised_bytes(f"{DOWN}.weight") is None
    assert torch.equal(tensors.get(f"{DOWN}.weight"), torch.ones(72, 80))


def test_groups_of_two_sizes_that_both_fit_are_rejected(
    folders: Callable[[str], Path], tmp_path: Path
) -> None:
    kind = "packed"
    groups = FORMATS[kind].config["config_groups"]
    other = {"group_1": {"weights": groups["group_0"]["weights"] | {"group_size": 30}}}
    write_changed(folders(kind) / "quantised", tmp_path, {}, config_groups=groups | other)
    with pytest.raises(ModelLoadError, match="weight_scale fits groups of 30 and of 32 columns"):
        open_folder(tmp_path).get(f"{DOWN}.weight")


BLOCKS = {"type": "float", "num_bits": 8, "strategy": "block"}


@pytest.mark.parametrize("is_reversed", [False, True])
def test_blocks_of_two_sizes_are_told_apart(is_reversed: bool, tmp_path: Path) -> None:
    sizes = ([16, 16], [24, 24])[:: -1 if is_reversed else 1]
    groups = {str(size): {"weights": BLOCKS | {"block_structure": size}} for size in sizes}
    settings = {"quant_method": "compressed-tensors", "config_groups": groups}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": settings}))
    values = torch.ones(96, 40).to(torch.float8_e4m3fn)
    scales = {"a": torch.arange(1.0, 19.0).view(6, 3), "b": torch.arange(1.0, 9.0).view(4, 2)}
    tensors = {f"{name}.weight_scale": each for name, each in scales.items()}
    save_file(tensors | {f"{name}.weight": values.clone() for name in "ab"}, tmp_path / "model.safetensors")
    source = open_folder(tmp_path)
    for name, size in (("a", 16), ("b", 24)):
        each = scales[name].repeat_interleave(size, dim=0).repeat_interleave(size, dim=1)
        assert torch.equal(source.get(f"{name}.weight"), each[:96, :40])
    both = {"c.weight": values[:30, :30].contiguous(), "c.weight_scale": torch.ones(2, 2)}
    save_file(both, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"weight_scale fits blocks of \d+x\d+ and of \d+x\d+"):
        open_folder(tmp_path).get("c.weight")


def test_scales_under_two_names_are_rejected(tmp_path: Path) -> None:
    parts = {part: torch.ones(1) for part in ("a.weight_scale", "a.weight_scale_inv")}
    save_file(parts | {"a.weight": torch.ones(4, 4).to(torch.float8_e4m3fn)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(ModelLoadError, match="a.weight_scale_inv is beside weight_scale, expected one"):
        open_folder(tmp_path).get("a.weight")


def test_quantisation_of_gguf_files_in_a_folder_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "gguf"}}))
    with pytest.raises(ModelLoadError, match=r"config\.json: quant_method='gguf' in quantization_config"):
        _ = Source(tmp_path).config


def write_mixed(folder: Path, settings: dict[str, object], kinds: dict[str, str]) -> dict[str, torch.Tensor]:
    """A folder with a weight of each kind, by module; returns their numbers."""
    rng = np.random.default_rng(0)
    drawn = {name: FORMATS[kind].draw(24, 40, rng) for name, kind in kinds.items()}
    tensors = {
        f"{name}.{part}": tensor.clone()
        for name, stored in drawn.items()
        for part, tensor in stored.tensors.items()
    }
    save_file(tensors | {"plain.weight": torch.ones(4, 4)}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(settings))
    return {f"{name}.weight": torch.from_numpy(stored.numbers) for name, stored in drawn.items()}


COMPRESSED_KINDS = {"a": "packed, zero points", "b": "nvfp4", "c": "fp8, channel"}
MODELOPT_KINDS = {"a": "fp8, modelopt", "b": MODELOPT}


@pytest.mark.parametrize("kinds", [COMPRESSED_KINDS, MODELOPT_KINDS], ids=["compressed", "modelopt"])
@pytest.mark.parametrize("is_reversed", [False, True])
def test_weights_of_several_storages_are_told_apart(
    tmp_path: Path, kinds: dict[str, str], is_reversed: bool
) -> None:
    order = list(kinds.items())[:: -1 if is_reversed else 1]
    settings: dict[str, object]
    if kinds is MODELOPT_KINDS:
        layers = {name: {"quant_algo": FORMATS[kind].config["quant_algo"]} for name, kind in order}
        settings = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    else:
        groups = {name: FORMATS[kind].config["config_groups"]["group_0"] for name, kind in order}
        settings = FORMATS["packed"].config | {"format": "mixed-precision", "config_groups": groups}
    numbers = write_mixed(tmp_path, {"quantization_config": settings}, kinds)
    tensors = open_folder(tmp_path)
    assert sorted(tensors.names()) == sorted([*numbers, "plain.weight"])
    for name, expected in numbers.items():
        assert torch.equal(tensors.get(name), expected), name


def test_settings_of_modelopt_are_read_from_their_own_file(tmp_path: Path) -> None:
    numbers = write_mixed(tmp_path, {"architectures": ["A"]}, {"a": MODELOPT})
    quantisation = {"quant_algo": "NVFP4", "kv_cache_quant_algo": None, "group_size": 16}
    file = tmp_path / "hf_quant_config.json"
    file.write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": quantisation}))
    assert torch.equal(open_folder(tmp_path).get("a.weight"), numbers["a.weight"])
    scheme = config_scheme(Source(tmp_path).config)
    assert scheme is not None and scheme.name == "modelopt, NVFP4"
    other = FORMATS["fp8, channel"].config
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": other}))
    assert Source(tmp_path).config["quantization_config"] == other
    file.write_text("[")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelLoadError, match=r"hf_quant_config.json: not a JSON object"):
        _ = Source(tmp_path).config


@pytest.mark.parametrize(
    ("kind", "rows", "columns"),
    [
        ("packed, zero points", 8, 64),
        ("packed, zero points", 3, 64),
        ("gptq", 8, 8),
        ("gptq, version 2", 24, 8),
    ],
)
def test_weights_of_one_word_are_read(tmp_path: Path, kind: str, rows: int, columns: int) -> None:
    """In one dimension, or in that of the zero points."""
    stored = FORMATS[kind].draw(rows, columns, np.random.default_rng(0))
    parts = {f"a.{part}": tensor.clone().contiguous() for part, tensor in stored.tensors.items()}
    save_file(parts, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": FORMATS[kind].config}))
    assert torch.equal(open_folder(tmp_path).get("a.weight"), torch.from_numpy(stored.numbers))


@pytest.mark.parametrize("columns", [42, 44, 46])
@pytest.mark.parametrize("kind", ["packed", "packed, zero points", "packed, whole rows"])
def test_packed_rows_may_end_within_a_word(tmp_path: Path, kind: str, columns: int) -> None:
    stored = FORMATS[kind].draw(20, columns, np.random.default_rng(0))
    save_file(
        {f"a.{part}": tensor for part, tensor in stored.tensors.items()}, tmp_path / "model.safetensors"
    )
    settings = {"quantization_config": FORMATS[kind].config}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    tensors = open_folder(tmp_path)
    assert tensors.shape("a.weight") == (20, columns)
    assert torch.equal(tensors.get("a.weight"), torch.from_numpy(stored.numbers))


def test_scales_of_the_kv_cache_are_not_used(folders: Callable[[str], Path], tmp_path: Path) -> None:
    write_changed(folders("fp8, channel") / "quantised", tmp_path, {"k_scale": torch.ones(1)})
    assert f"{DOWN}.k_scale" not in open_folder(tmp_path).names()
