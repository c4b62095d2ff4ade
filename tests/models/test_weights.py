"""Loading weights: all tensors are checked; random weights; process-wide settings are not used."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from decoder_parity import assert_parity, load_decoder, poisoned_cache, random_tokens
from model_zoo import make_model
from quantised_files import write_checkpoint
from safetensors.torch import load_file, save_file
from tolerances import assert_near

from drift_sdk.errors import ModelLoadError
from drift_sdk.families import read_spec
from drift_sdk.loading.random import RandomTensors
from drift_sdk.loading.safetensors import SafetensorsFolder
from drift_sdk.loading.source import resolve
from drift_sdk.loading.tensors import InPlaceSource
from drift_sdk.models import weights
from drift_sdk.models.attention import AttentionBatch, SequenceRows
from drift_sdk.models.decoder import Decoder
from drift_sdk.models.layers import MIN_ONEDNN_ELEMENTS, linear
from drift_sdk.models.weights import LayerWeights, tensor_shapes
from drift_sdk.quantised.formats import Fp8Weight
from drift_sdk.quantised.weight import dequantised

GEMMA3 = 30  # a model of the zoo
DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_model(1, tmp_path)
    return tmp_path


@pytest.fixture
def tied_folder(tmp_path: Path) -> Path:
    make_model(2, tmp_path)
    return tmp_path


def _change(folder: Path, **changes: torch.Tensor | None) -> str:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in changes.items():
        tensors.pop(name, None)
        if tensor is not None:
            tensors[name] = tensor

    save_file(tensors, file)
    return str(file)


def test_missing_tensor(folder: Path) -> None:
    _change(folder, **{DOWN: None, "model.norm.weight": None})
    with pytest.raises(ModelLoadError) as caught:
        load_decoder(folder)

    for part in (str(folder), DOWN, "[64, 80]", "missing", "1 more"):
        assert part in str(caught.value)


def test_extra_tensor(folder: Path) -> None:
    file = _change(folder, **{"model.layers.0.self_attn.sinks": torch.ones(4)})
    with pytest.raises(ModelLoadError) as caught:
        load_decoder(folder)

    for part in (file, "model.layers.0.self_attn.sinks", "[4]", "not part of this model"):
        assert part in str(caught.value)


def test_misshapen_tensor(folder: Path) -> None:
    file = _change(folder, **{DOWN: torch.ones(80, 64)})
    with pytest.raises(ModelLoadError) as caught:
        load_decoder(folder)

    for part in (file, DOWN, "[80, 64]", "expected [64, 80]"):
        assert part in str(caught.value)


def test_tensor_of_quantised_bytes(folder: Path) -> None:
    file = _change(folder, **{DOWN: torch.ones(64, 80).to(torch.float8_e4m3fn)})
    with pytest.raises(ModelLoadError) as caught:
        load_decoder(folder)

    for part in (file, DOWN, "float8_e4m3fn", "expected float32"):
        assert part in str(caught.value)


def test_stored_frequencies_are_ignored(folder: Path) -> None:
    expected = load_decoder(folder)
    _change(folder, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})
    assert torch.equal(load_decoder(folder).weights.head, expected.weights.head)


def test_tied_head_shares_memory_and_may_be_stored(tied_folder: Path) -> None:
    embedding = load_file(tied_folder / "model.safetensors")["model.embed_tokens.weight"]
    _change(tied_folder, **{"lm_head.weight": embedding.clone()})
    decoder = load_decoder(tied_folder)
    assert decoder.weights.head.data_ptr() == decoder.weights.embedding.data_ptr()


def _edit(folder: Path, **settings: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


def _other_head(folder: Path) -> None:
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    _change(folder, **{"lm_head.weight": embedding.flip(0).contiguous()})


def _no_prefix(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file({name.removeprefix("model."): tensors[name] for name in tensors}, folder / "model.safetensors")
    _edit(folder, architectures=["LlamaModel"])


def _constants(folder: Path) -> None:
    _edit(folder, largest=float("inf"), smallest=float("-inf"), none=float("nan"))


def _dynamic(folder: Path) -> None:
    _edit(folder, rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4})


def _older_dynamic(folder: Path) -> None:
    _edit(folder, rope_parameters=None, rope_theta=5e3, rope_scaling={"type": "dynamic", "factor": 2.0})


@pytest.mark.parametrize(
    ("index", "change"),
    [
        (2, _other_head),
        (2, _no_prefix),
        (1, lambda folder: _edit(folder, num_hidden_layers=1)),
        (1, _constants),
        (1, _dynamic),
        (1, _older_dynamic),
        (1, lambda folder: _edit(folder, hidden_act="swish")),
        (GEMMA3, lambda folder: _edit(folder, hidden_activation="gelu_new")),
        (GEMMA3, lambda folder: _edit(folder, hidden_activation="gelu_fast")),
    ],
)
def test_folders_that_transformers_loads(
    index: int, change: Callable[[Path], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_model(index, tmp_path)
    change(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    caplog.clear()
    decoder = load_decoder(tmp_path)
    assert_parity(decoder, model, random_tokens(decoder.spec, 24), (17, 1, 6))
    if change is _other_head:
        assert "lm_head.weight differs from model.embed_tokens.weight, so it is the head" in caplog.text
    if decoder.spec.num_layers == 1:
        assert "layer 1 and later are left out: the config says num_hidden_layers=1" in caplog.text


def write_tied(folder: Path, out: Path) -> None:
    """The files of a model with a tied head, all matrices in FP8, the head stored as well."""
    write_checkpoint(folder, "fp8, channel", out, out.parent / "twin", ignored=())
    tensors = load_file(out / "model.safetensors")
    for part in ("weight", "weight_scale"):
        tensors[f"lm_head.{part}"] = tensors[f"model.embed_tokens.{part}"].clone()
    save_file(tensors, out / "model.safetensors")


def load_quantised(folder: Path, **options: Any) -> Decoder:
    source = resolve(folder)
    config = read_spec(source.config)
    options = {"device": "cpu", "dtype": torch.float32, "form": "stored"} | options
    return Decoder.load(config, source.tensors(), **options)


@pytest.mark.parametrize("form", ["stored", "expanded"])
def test_quantised_tied_head_is_compared_in_parts(
    form: str, tied_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tied(tied_folder, tmp_path / "quantised")
    monkeypatch.setattr(weights, "COMPARED_ROWS", 7)
    expanded: list[int] = []
    dequantise = Fp8Weight.dequantise

    def noted(weight: Fp8Weight, dtype: torch.dtype) -> torch.Tensor:
        expanded.append(weight.shape[0])
        return dequantise(weight, dtype)

    monkeypatch.setattr(Fp8Weight, "dequantise", noted)
    decoder = load_quantised(tmp_path / "quantised", form=form)
    rows = decoder.spec.vocab_size
    num_parts = 2 * -(-rows // 7)
    assert max(expanded[:num_parts]) == 7 and sum(expanded[:num_parts]) == 2 * rows

    tensors = load_file(tmp_path / "quantised" / "model.safetensors")
    tensors["lm_head.weight_scale"][-1] *= 2
    save_file(tensors, tmp_path / "quantised" / "model.safetensors")
    untied = load_quantised(tmp_path / "quantised", form=form).weights
    head, embedding = (dequantised(each, torch.float32) for each in (untied.head, untied.embedding))
    assert torch.equal(head[:-1], embedding[:-1]) and torch.equal(head[-1], 2 * embedding[-1])


def test_room_for_weights_is_checked_before_a_tied_head_is_read(
    tied_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tied(tied_folder, tmp_path / "quantised")

    class NoRoom(Exception):
        pass

    def refuse(num_bytes: int) -> None:
        raise NoRoom

    def no_memory(*_: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(SafetensorsFolder, "read_into", no_memory)
    with pytest.raises(NoRoom):
        load_quantised(tmp_path / "quantised", check_bytes=refuse)
    monkeypatch.setattr(SafetensorsFolder, "get", no_memory)
    with pytest.raises(ModelLoadError, match="not enough memory on cpu for .* of weights"):
        load_quantised(tmp_path / "quantised")


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("gptq", r"weight of shape .* is missing \(and \d+ more\): model\S+qweight is of a quantised weight"),
        (
            "packed",
            r"weight of shape .* is missing \(and \d+ more\): model\S+weight_packed is of a quantised",
        ),
        ("fp8, channel", r"not part of this model \(and \d+ more\): model\S+weight_scale is of a quantised"),
    ],
)
def test_missing_quantisation_is_said(folder: Path, tmp_path: Path, kind: str, expected: str) -> None:
    write_checkpoint(folder, kind, tmp_path / "quantised", tmp_path / "twin")
    config = json.loads((tmp_path / "quantised" / "config.json").read_text())
    settings = config.pop("quantization_config")
    (tmp_path / "quantised" / "config.json").write_text(json.dumps(config))
    (tmp_path / "quantised" / "quantize_config.json").write_text(json.dumps(settings))
    with pytest.raises(ModelLoadError, match=f"{expected}.* but config.json has no quantization_config"):
        load_decoder(tmp_path / "quantised")


def test_loading_reports_each_tensor(folder: Path) -> None:
    source = resolve(folder)
    spec = read_spec(source.config)
    seen: list[tuple[int, int]] = []
    Decoder.load(
        spec,
        source.tensors(),
        device="cpu",
        dtype=torch.float32,
        on_tensor=lambda done, total: seen.append((done, total)),
    )
    num_tensors = len(tensor_shapes(spec))
    assert seen == [(index, num_tensors) for index in range(1, num_tensors + 1)]


def test_dtype_is_converted(folder: Path) -> None:
    full, half = load_decoder(folder), load_decoder(folder, torch.bfloat16)
    assert half.dtype == torch.bfloat16 and half.device == torch.device("cpu")
    assert torch.equal(
        half.weights.layers[1].channel.down, full.weights.layers[1].channel.down.to(torch.bfloat16)
    )


def test_random_weights_are_drawn_in_place() -> None:
    shapes = {"a.weight": (33, 20), "norm.weight": (20,)}
    tensors = RandomTensors(shapes, device=torch.device("cpu"), dtype=torch.bfloat16, seed=3)
    assert isinstance(tensors, InPlaceSource)
    for name in ("norm.weight", "a.weight"):
        place = torch.zeros(3, *shapes[name], dtype=torch.bfloat16)
        tensors.read_into(name, place[1])
        assert torch.equal(place[1], tensors.get(name))
        assert not place[0].any() and not place[2].any()


def tensors_of(layer: LayerWeights) -> list[torch.Tensor | None]:
    parts = (layer, layer.mixer, layer.channel)
    values = [getattr(part, field.name) for part in parts for field in dataclasses.fields(part)]
    return [value for value in values if not dataclasses.is_dataclass(value)]


@pytest.mark.parametrize("index", [0, 3, 13, 20, GEMMA3])
def test_random_weights(index: int, tmp_path: Path) -> None:
    make_model(index, tmp_path)
    spec = read_spec(resolve(tmp_path).config)
    first, again, other = (
        Decoder.random(spec, device="cpu", dtype=torch.float32, seed=seed) for seed in (5, 5, 6)
    )
    layers = [tensors_of(decoder.weights.layers[0]) for decoder in (first, again, other)]
    for tensors in zip(*layers, strict=True):
        if tensors[0] is not None:
            assert torch.equal(tensors[0], tensors[1])
            assert not torch.equal(tensors[0], tensors[2])
            assert tensors[0].abs().max() > 0

    mean = 0.0 if index == GEMMA3 else 1.0  # Gemma's norms multiply by 1 + weight
    assert (first.weights.final_norm - mean).abs().max() < 0.2
    cache = poisoned_cache(spec)
    batch = AttentionBatch([SequenceRows(range(32), 0, 40)], cache)
    hidden, _ = first.forward(random_tokens(spec, 40), batch, cache)
    logits = first.logits(hidden)
    assert logits.dtype == torch.float32 and logits.isfinite().all()
    assert 0.1 < logits.std() < 10


def test_process_wide_settings_are_neither_used_nor_changed(folder: Path) -> None:
    def run() -> torch.Tensor:
        decoder = load_decoder(folder)
        cache = poisoned_cache(decoder.spec)
        batches = [
            AttentionBatch([SequenceRows([3, 1, 4], 0, 6), SequenceRows([9, 2], 0, 6)], cache),
            AttentionBatch([SequenceRows([3, 1, 4], 6, 3), SequenceRows([9, 2], 6, 1)], cache),
        ]
        tokens = torch.arange(12, dtype=torch.int64, device="cpu")
        decoder.forward(tokens, batches[0], cache)
        hidden, _ = decoder.forward(tokens[:4], batches[1], cache)
        assert Decoder.random(decoder.spec, device="cpu", dtype=torch.float32).dtype == torch.float32
        return decoder.logits(hidden)

    expected = run()
    num_threads, state = torch.get_num_threads(), torch.get_rng_state()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            found = run()

        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)

    assert torch.equal(found, expected)
    assert torch.get_num_threads() == num_threads
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("num_rows", [1, 2, 7, 64])
@pytest.mark.parametrize("has_bias", [False, True])
def test_linear_equals_torch(num_rows: int, has_bias: bool) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    x = torch.randn(num_rows, 2 * 192, generator=generator)[:, :192]
    weight = torch.randn(512, 192, generator=generator)
    bias = torch.randn(512, generator=generator) if has_bias else None
    assert weight.numel() >= MIN_ONEDNN_ELEMENTS
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert_near(linear(x, weight, bias), exact, inner=192)
    small = weight[:8]
    assert torch.equal(linear(x, small), F.linear(x, small))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("index", [0, -1])
def test_weights_that_are_not_finite(folder: Path, value: float, index: int) -> None:
    tensor = load_file(folder / "model.safetensors")[DOWN]
    tensor.view(-1)[index] = value
    file = _change(folder, **{DOWN: tensor})
    with pytest.raises(ModelLoadError, match="has NaN, infinity or numbers too large for float32") as caught:
        load_decoder(folder)
    assert f"{file}: tensor {DOWN}" in str(caught.value)


def test_all_weights_are_nan(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    _change(folder, **{name: torch.full_like(tensor, torch.nan) for name, tensor in tensors.items()})
    with pytest.raises(ModelLoadError, match=f"model.embed_tokens.weight .*and {len(tensors) - 1} more"):
        load_decoder(folder)


def test_weights_too_large_for_half_precision(folder: Path) -> None:
    tensor = load_file(folder / "model.safetensors")[DOWN]
    tensor[3, 5] = 70_000.0
    _change(folder, **{DOWN: tensor})
    for dtype in (torch.float32, torch.bfloat16):
        assert load_decoder(folder, dtype).weights.layers[1].channel.down[3, 5] > 69_000
    with pytest.raises(ModelLoadError, match=f"tensor {DOWN} has .*too large for float16"):
        load_decoder(folder, torch.float16)


def test_no_memory_for_weights(folder: Path) -> None:
    """The config asks for more memory than the device has, as random weights may."""
    shapes = resolve(folder).config | {"hidden_size": 2**22, "vocab_size": 2**24}
    with pytest.raises(ModelLoadError, match=r"not enough memory on cpu for \d+\.\d GiB of weights"):
        Decoder.random(read_spec(shapes), device="cpu", dtype=torch.float32)


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")])
def test_no_memory_while_weights_are_read(
    error: Exception, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(found: Exception) -> Callable[..., None]:
        def read_into(*_: object) -> None:
            raise found

        return read_into

    monkeypatch.setattr(SafetensorsFolder, "read_into", failing(error))
    with pytest.raises(ModelLoadError, match="not enough memory on cpu for .* of weights"):
        load_decoder(folder)
    monkeypatch.setattr(SafetensorsFolder, "read_into", failing(RuntimeError("another")))
    with pytest.raises(RuntimeError, match="another"):
        load_decoder(folder)
