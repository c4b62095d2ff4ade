"""Scales of a KV cache of e4m3, from the files of checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from family_zoo import draw_model
from hybrid_zoo import make_hybrid_model
from safetensors.torch import load_file, save_file
from tiny_llama import tiny_llama

from drift_sdk import EngineConfig, ModelLoadError, SyncEngine, inspect
from drift_sdk.families import read_spec
from drift_sdk.loading.source import Source
from drift_sdk.models.decoder import Decoder, random_tensors
from drift_sdk.models.kv_cache import KVCache, KVScales, kv_heads
from drift_sdk.models.shard import Shard, load_shard
from drift_sdk.quantised.formats import quantise_e4m3
from drift_sdk.spec.model import KVShape
from drift_sdk.startup.model_parts import choose_weight_form

CPU = torch.device("cpu")
NUM_LAYERS, NUM_KV_HEADS = 2, 4
SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
COMPRESSED = {"quant_method": "compressed-tensors", "kv_cache_scheme": SCHEME}
PAIR = ("k_scale", "v_scale")
CONFIG = EngineConfig(
    device="cpu", dtype="float32", kv_dtype="fp8", weights="stored", kv_cache_tokens=256, max_model_len=64
)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    sizes = {"num_hidden_layers": NUM_LAYERS, "num_attention_heads": 4, "num_key_value_heads": NUM_KV_HEADS}
    shapes = tiny_llama() | sizes | {"hidden_size": 32}
    tensors = random_tensors(read_spec(shapes), device=CPU, dtype=torch.float32)
    save_file({name: tensors.get(name) for name in tensors.names()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(shapes))
    return folder


def source_of(
    plain: Path,
    folder: Path,
    scales: dict[str, torch.Tensor],
    settings: dict[str, Any] | None = COMPRESSED,
) -> Source:
    """The model's files with scales, by the parts of their names behind those of each layer's attention.

    settings: of the quantisation; None: the config has none.
    """
    tensors = load_file(plain / "model.safetensors")
    for layer in range(NUM_LAYERS):
        for part, scale in scales.items():
            tensors[f"model.layers.{layer}.self_attn.{part}"] = (scale * (layer + 1)).to(scale.dtype)
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((plain / "config.json").read_text())
    if settings is not None:
        config["quantization_config"] = settings
    (folder / "config.json").write_text(json.dumps(config))
    return Source(folder)


def load(source: Source, **options: Any) -> Decoder:
    config = read_spec(source.config)
    return Decoder.load(config, source.tensors(), device=CPU, dtype=torch.float32, kv_form="fp8", **options)


@pytest.mark.parametrize(
    ("names", "settings"),
    [
        (PAIR, COMPRESSED),
        (("k_proj.k_scale", "v_proj.v_scale"), {"quant_method": "fp8"}),
        (("k_proj.output_scale", "v_proj.output_scale"), COMPRESSED),
        (("kv_scale", "kv_scale"), {"quant_method": "fp8"}),
        (PAIR, None),
        (("k_proj.output_scale", "v_proj.output_scale"), None),
    ],
    ids=["layer", "projections", "outputs", "both", "layer, not quantised", "outputs, not quantised"],
)
def test_scales_of_all_naming_schemes_are_read(
    names: tuple[str, str], settings: dict[str, Any] | None, plain: Path, tmp_path: Path
) -> None:
    scales = {names[0]: torch.tensor([0.25]), names[1]: torch.tensor([0.75])}
    found = load(source_of(plain, tmp_path, scales, settings)).weights.kv_scales
    assert found is not None
    for tensor, name in zip((found.keys, found.values), names, strict=True):
        assert tensor.dtype == torch.float32
        rows = [[number] * NUM_KV_HEADS for number in (scales[name].item(), 2 * scales[name].item())]
        assert tensor.tolist() == rows


@pytest.mark.parametrize("shape", [(), (NUM_KV_HEADS,), (NUM_KV_HEADS, 1, 1)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_scales_may_be_of_the_tensor_or_of_heads(
    shape: tuple[int, ...], dtype: torch.dtype, plain: Path, tmp_path: Path
) -> None:
    keys = torch.arange(1, 1 + torch.Size(shape).numel()).reshape(shape).to(dtype) / 8
    scales = {"k_scale": keys, "v_scale": torch.ones((), dtype=dtype)}
    settings = COMPRESSED | {"kv_cache_scheme": SCHEME | {"strategy": "attn_head"}}
    found = load(source_of(plain, tmp_path, scales, settings)).weights.kv_scales
    assert found is not None
    assert torch.equal(found.keys[0], keys.float().reshape(-1).expand(NUM_KV_HEADS))


def test_scales_are_1_where_files_have_none(plain: Path, tmp_path: Path) -> None:
    for source in (Source(plain), source_of(plain, tmp_path, {})):
        found = load(source).weights.kv_scales
        assert found is not None
        assert found.keys.tolist() == found.values.tolist() == [[1.0] * NUM_KV_HEADS] * NUM_LAYERS


def test_layers_without_attention_have_no_scales(tmp_path: Path) -> None:
    make_hybrid_model("qwen3_5", 1, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    spec = read_spec(Source(tmp_path).config)
    attended = [name.removesuffix(".q_proj.weight") for name in tensors if name.endswith(".q_proj.weight")]
    assert 0 < len(attended) == len(spec.attention_layers) < spec.num_layers
    for name in attended:
        tensors |= {f"{name}.k_scale": torch.tensor([0.25]), f"{name}.v_scale": torch.tensor([0.75])}
    save_file(tensors, tmp_path / "model.safetensors")

    found = load(Source(tmp_path)).weights.kv_scales
    assert found is not None
    for scales, expected in ((found.keys, 0.25), (found.values, 0.75)):
        assert (scales[list(spec.attention_layers)] == expected).all()

    del tensors[f"{attended[-1]}.k_scale"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match="k_scale"):
        load(Source(tmp_path))


def test_scales_of_layers_with_other_heads(tmp_path: Path) -> None:
    """A layer has the scales of its own KV heads. Layers with the keys of another one have none, though files
    may have some."""
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 4, "num_global_key_value_heads": 2}
    model = draw_model("gemma4", 4, **sizes)
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors, spec = load_file(file), read_spec(Source(tmp_path).config)
    heads = kv_heads(spec)
    assert set(heads.values()) == {2, 4} and list(heads) == [0, 1, 2] and spec.num_layers == 5
    for layer, number in (heads | {4: 1}).items():
        prefix = f"model.layers.{layer}.self_attn"
        tensors |= {f"{prefix}.k_scale": torch.arange(1.0, number + 1), f"{prefix}.v_scale": torch.ones(1)}
    save_file(tensors, file)
    found = load(Source(tmp_path)).weights.kv_scales
    assert found is not None
    for layer, number in heads.items():
        assert found.keys[layer].tolist() == [*range(1, number + 1), *[1] * (4 - number)]

    name = "model.layers.1.self_attn.k_scale"
    wrong = torch.ones(heads[1] + 1)
    for changed, message in (({}, f"{name} is missing"), ({name: wrong}, rf"{name} has shape \[")):
        save_file({each: tensor for each, tensor in tensors.items() if each != name} | changed, file)
        with pytest.raises(ModelLoadError, match=message):
            load(Source(tmp_path))


@pytest.mark.parametrize("settings", [COMPRESSED, None], ids=["quantised", "not quantised"])
def test_scales_are_not_read_for_other_caches(
    settings: dict[str, Any] | None, plain: Path, tmp_path: Path
) -> None:
    scales = {"k_scale": torch.zeros(1), "v_scale": torch.zeros(3)}
    source = source_of(plain, tmp_path, scales, settings)
    config = read_spec(source.config)
    decoder = Decoder.load(config, source.tensors(), device=CPU, dtype=torch.bfloat16)
    assert decoder.weights.kv_scales is None
    expected = load_file(plain / "model.safetensors")
    assert sorted(source.tensors().names()) == sorted(expected)
    assert torch.equal(decoder.weights.head, expected["lm_head.weight"].bfloat16())
    assert decoder.kv_dtype == torch.bfloat16
    assert choose_weight_form(EngineConfig(weights="fp8"), config) == "fp8"  # the weights are numbers


def test_scales_do_not_hide_what_is_not_part_of_the_model(plain: Path, tmp_path: Path) -> None:
    scales = dict.fromkeys((*PAIR, "q_proj.input_scale"), torch.ones(1))
    with pytest.raises(ModelLoadError, match="0.self_attn.q_proj.input_scale .* is not part of this model"):
        load(source_of(plain, tmp_path, scales, None))


@pytest.mark.parametrize("settings", [COMPRESSED, None], ids=["quantised", "not quantised"])
def test_parts_of_a_model_have_the_scales_of_their_heads(
    settings: dict[str, Any] | None, plain: Path, tmp_path: Path
) -> None:
    scales = {"k_scale": torch.arange(1.0, 5.0), "v_scale": torch.arange(5.0, 9.0)}
    source = source_of(plain, tmp_path, scales, settings)
    config = read_spec(source.config)
    for rank in range(2):
        shard = Shard(rank=rank, size=2)
        options = {"device": CPU, "dtype": torch.float32, "kv_form": "fp8"}
        found = load_shard(config, source.tensors(), shard, **options).weights.kv_scales
        assert found is not None
        assert found.keys[0].tolist() == [1.0 + 2 * rank, 2.0 + 2 * rank]
        assert found.values[1].tolist() == [10.0 + 4 * rank, 12.0 + 4 * rank]


@pytest.mark.parametrize(
    ("part", "scale", "message"),
    [
        ("v_scale", None, "tensor model.layers.0.self_attn.v_scale is missing"),
        ("k_scale", torch.ones(3), r"tensor .*0.self_attn.k_scale has shape \[3\], expected \[1\] or \[4\]"),
        ("k_scale", torch.ones(2, 2), r"k_scale has shape \[2, 2\], expected \[1\] or \[4\]"),
        ("v_scale", torch.tensor([0.0]), "tensor .*v_scale has 0, expected 2.*-64 to 2"),
        ("v_scale", torch.tensor([1.0, -1.0, 1.0, 1.0]), "v_scale has -1, expected"),
        ("k_scale", torch.tensor([torch.nan]), "k_scale has nan, expected"),
        ("k_scale", torch.tensor([torch.inf]), "k_scale has inf, expected"),
        ("k_scale", torch.ones(1, dtype=torch.int32), "k_scale is stored as torch.int32, expected float32"),
    ],
)
def test_wrong_scales_are_refused(
    part: str, scale: torch.Tensor | None, message: str, plain: Path, tmp_path: Path
) -> None:
    scales = {"k_scale": torch.ones(1), "v_scale": torch.ones(1)} | {part: scale}
    given = {name: value for name, value in scales.items() if value is not None}
    with pytest.raises(ModelLoadError, match=message):
        load(source_of(plain, tmp_path, given))


@pytest.mark.parametrize("layer", range(NUM_LAYERS))
def test_scales_of_some_layers_are_refused(layer: int, plain: Path, tmp_path: Path) -> None:
    source = source_of(plain, tmp_path, dict.fromkeys(PAIR, torch.ones(1)))
    tensors = load_file(tmp_path / "model.safetensors")
    for part in PAIR:
        del tensors[f"model.layers.{layer}.self_attn.{part}"]
    save_file(tensors, tmp_path / "model.safetensors")
    expected = f"model.layers.{layer}.self_attn.k_scale is missing"
    for config in (
        source.config,
        {"quantization_config": None} | json.loads((plain / "config.json").read_text()),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(ModelLoadError, match=expected):
            load(Source(tmp_path))
    (reason,) = inspect(tmp_path, CONFIG).reasons
    assert reason.endswith(expected)
    assert inspect(tmp_path, CONFIG.replace(kv_dtype=None)).is_supported


@pytest.mark.parametrize("part", ["attn.k_scale", "kv_cache.v_scale", "qkv_proj.kv_scale"])
@pytest.mark.parametrize("known", [(), PAIR], ids=["alone", "beside known ones"])
def test_scales_of_unknown_names_are_refused(
    part: str, known: tuple[str, ...], plain: Path, tmp_path: Path
) -> None:
    source = source_of(plain, tmp_path, dict.fromkeys((*known, part), torch.ones(1)))
    expected = f"model.safetensors: tensor model.layers.0.self_attn.{part} is a scale of the KV cache, "
    with pytest.raises(ModelLoadError, match=f"{expected}expected one of self_attn.k_scale, self_attn.v_sca"):
        load(source)
    (reason,) = inspect(tmp_path, CONFIG).reasons
    assert expected in reason
    assert inspect(tmp_path, CONFIG.replace(kv_dtype=None)).is_supported


@pytest.mark.parametrize("settings", [COMPRESSED, None], ids=["quantised", "not quantised"])
@pytest.mark.parametrize(("part", "changed"), [("k_proj.k_scale", 0.5), ("v_proj.output_scale", 3.0)])
def test_scales_that_contradict_each_other_are_refused(
    part: str, changed: float, settings: dict[str, Any] | None, plain: Path, tmp_path: Path
) -> None:
    own = {"k_scale": torch.tensor(0.25), "v_scale": torch.tensor([0.75] * NUM_KV_HEADS)}
    repeated = own[f"{part[0]}_scale"].reshape(-1)[:1].clone()
    found = load(source_of(plain, tmp_path, own | {part: repeated}, settings)).weights.kv_scales
    assert found is not None and found.keys[1].tolist() == [0.5] * NUM_KV_HEADS
    expected = f"{part} differs from tensor model.layers.0.self_attn.{part[0]}_scale, expected equal scales"
    with pytest.raises(ModelLoadError, match=expected):
        load(source_of(plain, tmp_path, own | {part: torch.tensor([changed])}, settings))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_bits": 4}, "num_bits=4"),
        ({"type": "int"}, "type='int'"),
        ({"dynamic": True}, "dynamic=True"),
        ({"symmetric": False}, "symmetric=False"),
        ({"strategy": "channel"}, "strategy='channel'"),
        (None, "='static'"),
    ],
)
def test_scales_of_other_schemes_are_refused(
    change: dict[str, Any] | None, message: str, plain: Path, tmp_path: Path
) -> None:
    scheme: Any = "static" if change is None else SCHEME | change
    settings = {"config_groups": {}, "quant_method": "compressed-tensors", "kv_cache_scheme": scheme}
    if change is None:
        weights = {"type": "float", "num_bits": 8, "strategy": "tensor"}
        settings["config_groups"] = {"group_0": {"weights": weights}}
    source_of(plain, tmp_path, {}, settings)
    file = tmp_path / "config.json"
    expected = f"{file}: config: quantization_config with .*kv_cache_scheme.*{message} is not implemented for"
    with pytest.raises(ModelLoadError, match=expected) as caught, SyncEngine(tmp_path, CONFIG):
        pass
    assert inspect(tmp_path, CONFIG).reasons == (str(caught.value),)
    for other in ({"kv_dtype": None}, {"kv_dtype": "nvfp4"}, {"load": "random"}):
        assert inspect(tmp_path, CONFIG.replace(**other)).is_supported


def test_random_weights_have_scales_of_1() -> None:
    decoder = Decoder.random(read_spec(tiny_llama()), device=CPU, dtype=torch.float32, kv_form="fp8")
    assert decoder.weights.kv_scales is not None and decoder.weights.kv_scales.keys.eq(1).all()
    assert decoder.kv_dtype == torch.float8_e4m3fn


def test_eager_caches_store_codes_and_read_their_numbers() -> None:
    scales = KVScales(torch.tensor([[0.5, 4.0]]), torch.tensor([[3.0, 0.125]]))
    cache = KVCache([KVShape(2, 8, 8)], 2, 4, torch.bfloat16, CPU, scales)
    generator = torch.Generator().manual_seed(1)
    key, value = torch.randn(2, 3, 2, 8, generator=generator)
    slots = torch.tensor([5, 0, 2])
    cache.store(0, slots, key, value)
    expected = tuple(
        (quantise_e4m3(x, scale[0, :, None]).float() * scale[0, :, None]).bfloat16()
        for x, scale in ((key, scales.keys), (value, scales.values))
    )
    for found, wanted in zip(cache.read(0, slots), expected, strict=True):
        assert torch.equal(found, wanted)
    assert (cache.read(0, slots)[0] - key).abs().max() > 0.01
    cache.move(slots, torch.tensor([0, 1, 7]))
    for found, wanted in zip(cache.read(0, torch.tensor([0, 1, 7])), expected, strict=True):
        assert torch.equal(found, wanted)
