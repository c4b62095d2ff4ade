"""Findings of `inspect` against engines that are started; weights are neither loaded nor fetched."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from family_zoo import draw_model
from gguf_model import write_gguf
from hub_server import HubServer, hub_server
from model_zoo import make_model
from quantised_files import write_checkpoint
from random_folder import make_random_folder
from safetensors.torch import load_file, save_file

from drift_sdk import (
    Chain,
    ConfigError,
    DriftError,
    Engine,
    EngineConfig,
    ModelInfo,
    ModelLoadError,
    NGram,
    PartialVerification,
    Speculation,
    SyncEngine,
    inspect,
)
from drift_sdk.cli.command_line import main
from drift_sdk.families import read_spec
from drift_sdk.loading.source import Source
from drift_sdk.models import decoder
from drift_sdk.models.channels import MlpWeights
from drift_sdk.startup import model_startup

CONFIG = EngineConfig(device="cpu", dtype="float32", kv_cache_tokens=1024, max_model_len=256)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    make_model(0, root / "sharded")
    qwen3 = make_model(18, root / "qwen3")
    (root / "gguf").mkdir()
    write_gguf(qwen3, root / "gguf" / "m-Q8_0.gguf", max_tensors=9)
    return root


@pytest.fixture
def folder(models: Path, tmp_path: Path) -> Path:
    """The model "qwen3", whose config may be changed."""
    for file in (models / "qwen3").iterdir():
        if file.suffix == ".json":
            (tmp_path / file.name).write_bytes(file.read_bytes())
        else:
            (tmp_path / file.name).symlink_to(file)
    return tmp_path


@pytest.fixture
def hub(models: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with hub_server(monkeypatch, tmp_path / "cache") as hub:
        hub.folders = {f"org/{name}": models / name for name in ("sharded", "gguf")}
        yield hub


def change(folder: Path, file: str, **settings: Any) -> None:
    old = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps(old | settings))


def test_findings_are_those_of_an_engine(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, file in (("sharded", "sharded"), ("gguf", "gguf/m-Q8_0-00002-of-00004.gguf")):
        with monkeypatch.context() as patch:
            patch.setattr(decoder, "load_weights", lambda *_, **__: pytest.fail("weights are loaded"))
            info = inspect(models / file, CONFIG)
        assert info.reasons == () and info.is_supported
        suffix = "*.safetensors" if name == "sharded" else "*.gguf"
        assert info.stored_bytes == sum(f.stat().st_size for f in (models / name).glob(suffix))
        assert info.num_parameters is not None and info.weight_bytes == 4 * info.num_parameters
        assert (info.has_tokenizer, info.has_chat_template) == (True, False)
        assert (info.device, info.dtype, info.executor) == ("cpu", "float32", "eager")
        assert (info.max_model_len, info.context, info.num_full_sequences) == (256, 512, 4)
        assert (info.downloads, info.download_bytes) == ((), 0)

        async def start(path: Path, found: ModelInfo) -> None:
            async with Engine(path, CONFIG) as engine:
                assert found.kv_cache_tokens == engine.stats().num_blocks * 16 == 1024
                assert found.max_model_len == engine.max_model_len
                assert found.executor == engine.executor
                cache = engine._driver._executor._cache
                assert found.kv_bytes_per_token * 1024 == sum(tensor.nbytes for tensor in cache.tensors)

        anyio.run(start, models / file, info)


def test_each_reason_names_file_field_and_value(folder: Path) -> None:
    """Reasons of independent parts are all found at once, and are those that starting raises."""
    wrong = CONFIG.replace(device="cuda:7", max_model_len=None)
    change(folder, "config.json", rms_norm_eps="x")
    (folder / "tokenizer_config.json").write_text("[]")
    info = inspect(folder, wrong)
    assert not info.is_supported
    device, shapes = info.reasons
    assert device.startswith("device='cuda:7': expected a device of this machine")
    assert shapes.startswith(f"{folder / 'config.json'}: config: rms_norm_eps='x': expected a number")
    assert info.architecture == "Qwen3ForCausalLM" and info.num_parameters is None

    change(folder, "config.json", rms_norm_eps=1e-6, intermediate_size=81)
    tensor, text, length = inspect(folder, CONFIG.replace(max_model_len=4096)).reasons
    assert str(folder / "model.safetensors") in tensor and "has shape" in tensor
    assert text.startswith(f"{folder / 'tokenizer_config.json'}: not a JSON object")
    assert length == "max_model_len=4096: expected at most the model's context of 512"


@pytest.mark.parametrize(
    "changes, config",
    [
        ({"architectures": ["FooForCausalLM"]}, {}),
        ({"num_hidden_layers": 4}, {}),
        ({"hidden_act": "relu"}, {}),
        ({}, {"max_model_len": 1000}),
        ({}, {"executor": "graph"}),
        ({}, {"dtype": "float16"}),
        ({}, {"kv_cache_tokens": 2**31 - 1}),
    ],
    ids=lambda value: ",".join(value),
)
def test_the_reason_is_the_error_of_starting(
    changes: dict[str, Any], config: dict[str, Any], folder: Path
) -> None:
    if changes:
        change(folder, "config.json", **changes)
    given = CONFIG.replace(device="auto").replace(**config) if "dtype" in config else CONFIG.replace(**config)
    if torch.cuda.is_available() and ("dtype" in config or "executor" in config):
        pytest.skip("allowed on a GPU")

    async def start() -> str:
        with pytest.raises(DriftError) as caught:
            await Engine(folder, given).start()
        return str(caught.value)

    said = anyio.run(start)
    (reason,) = inspect(folder, given).reasons
    if "kv_cache_tokens" in config:  # the free memory is measured by each
        reason, said = (text.partition("expected")[0] for text in (reason, said))
    assert reason == said


DOWN = "model.layers.1.mlp.down_proj"


def quantised_folder(models: Path, out: Path, kind: str) -> Path:
    write_checkpoint(models / "qwen3", kind, out / "quantised", out / "twin")
    return out / "quantised"


@pytest.mark.parametrize(
    ("kind", "part", "tensor"),
    [
        ("nvfp4", "weight_global_scale", None),
        ("gptq", "qzeros", None),
        ("packed, zero points", "weight_zero_point", None),
        ("fp8, channel", "weight_scale", None),
        ("fp8, channel", "weight_scale", torch.ones(5, 1)),
        ("fp8, blocks", "weight_scale_inv", torch.ones(1)),
        ("fp8, channel", "weight", torch.float8_e5m2),
        ("fp8, channel", "weight", torch.int64),
    ],
)
@pytest.mark.parametrize("weights", ["stored", "expanded"])
def test_damage_that_headers_show_is_the_error_of_starting(
    kind: str,
    part: str,
    tensor: torch.Tensor | torch.dtype | None,
    weights: str,
    models: Path,
    tmp_path: Path,
) -> None:
    folder = quantised_folder(models, tmp_path, kind)
    tensors = load_file(folder / "model.safetensors")
    old = tensors.pop(f"{DOWN}.{part}")
    if isinstance(tensor, torch.dtype):
        tensor = old.float().to(tensor)
    if tensor is not None:
        tensors[f"{DOWN}.{part}"] = tensor
    save_file(tensors, folder / "model.safetensors")
    config = CONFIG.replace(weights=weights)
    with (
        pytest.raises(ModelLoadError, match=rf"tensor {DOWN}\.{part} ") as caught,
        SyncEngine(folder, config),
    ):
        pass
    assert inspect(folder, config).reasons == (str(caught.value),)


def test_plain_tensors_of_integers_are_reasons(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors[f"{DOWN}.weight"] = tensors[f"{DOWN}.weight"].to(torch.int64)
    (folder / "model.safetensors").unlink()
    save_file(tensors, folder / "model.safetensors")
    (reason,) = inspect(folder, CONFIG).reasons
    assert f"tensor {DOWN}.weight is stored as torch.int64, expected float32" in reason


PARTIAL = PartialVerification(sink_tokens=16, retrieved_tokens=32, window_tokens=16, refresh_tokens=8)


@pytest.mark.parametrize("family", ["gemma4", "glm4_moe_lite"])
def test_drafts_that_an_engine_refuses_are_reasons(family: str, tmp_path: Path) -> None:
    draw_model(family, 1).save_pretrained(tmp_path)
    speculation = Speculation(draft=NGram(), shape=Chain(3), partial_verification=PARTIAL)
    config = CONFIG.replace(speculation=speculation)
    with (
        pytest.raises(ConfigError, match="expected None for a model with") as caught,
        SyncEngine(tmp_path, config),
    ):
        pass
    assert inspect(tmp_path, config).reasons == (str(caught.value),)
    assert inspect(tmp_path, CONFIG).is_supported


def test_settings_that_graphs_refuse_are_reasons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, whose place the CPU takes."""
    draw_model("glm4_moe_lite", 1, kv_lora_rank=32, qk_rope_head_dim=32).save_pretrained(tmp_path)
    config = CONFIG.replace(fast_prompts=True)
    assert inspect(tmp_path, config).is_supported
    monkeypatch.setattr(model_startup, "choose_executor", lambda *_: ("graph", None))
    (reason,) = inspect(tmp_path, config).reasons
    assert "fast_prompts=True: expected False for latent attention on CUDA graphs" in reason


@pytest.mark.parametrize("weights", ["int4", "nvfp4"])
@pytest.mark.parametrize("load", ["auto", "random"])
def test_odd_columns_are_a_reason(weights: str, load: str, tmp_path: Path) -> None:
    folder = make_random_folder(tmp_path, "llama", hidden_size=64, intermediate_size=33, head_dim=8)
    config = CONFIG.replace(weights=weights, load=load)
    reasons = inspect(folder, config).reasons
    (reason,) = [reason for reason in reasons if "weights=" in reason]
    assert reason == (
        f'weights=\'{weights}\': expected None, "expanded" or "fp8": model.layers.0.mlp.down_proj.weight has '
        "33 columns, an odd number"
    )
    if load == "random":
        with pytest.raises(ConfigError) as caught, SyncEngine(folder, config):
            pass
        assert (str(caught.value),) == reasons
    assert not any("weights=" in reason for reason in inspect(folder, config.replace(weights="fp8")).reasons)


def test_head_that_is_stored_counts(folder: Path) -> None:
    """Whether the config says that it is the embedding or not."""
    expected = inspect(folder, CONFIG)
    with SyncEngine(folder, CONFIG) as engine:
        tokens = engine.generate([5, 6, 7], max_tokens=8, temperature=0.0).result().token_ids
    change(folder, "config.json", tie_word_embeddings=True)
    found = inspect(folder, CONFIG)
    assert found.is_supported
    assert (found.num_parameters, found.weight_bytes) == (expected.num_parameters, expected.weight_bytes)
    with SyncEngine(folder, CONFIG) as engine:
        assert engine.generate([5, 6, 7], max_tokens=8, temperature=0.0).result().token_ids == tokens


@pytest.mark.parametrize("kind", ["packed", "gptq, symmetric"])
def test_bytes_of_symmetric_weights_are_those_in_memory(kind: str, models: Path, tmp_path: Path) -> None:
    folder = quantised_folder(models, tmp_path, kind)
    found = inspect(folder, CONFIG.replace(weights="stored")).weight_bytes
    source = Source(folder)
    shapes = read_spec(source.config)
    model = decoder.Decoder.load(
        shapes, source.tensors(), device="cpu", dtype=torch.float32, form="stored"
    ).weights
    matrices = {id(each): each for each in (model.embedding, model.head)}.values()
    vectors = [tensor for tensor in load_file(folder / "model.safetensors").values() if tensor.ndim == 1]
    norms = sum(4 * len(tensor) for tensor in vectors if tensor.dtype == torch.float32)
    layers = []
    for layer in model.layers:
        assert isinstance(layer.channel, MlpWeights)
        layers += [layer.mixer.qkv, layer.mixer.output, layer.channel.gate_up, layer.channel.down]
    assert found == norms + sum(each.nbytes for each in (*matrices, *layers))


def test_broken_files_of_weights_are_reasons(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").symlink_to("nowhere")
    index = folder / "model.safetensors.index.json"
    for shard in ("../model.safetensors", "\0", "missing.safetensors", 5):
        index.write_text(json.dumps({"weight_map": {"lm_head.weight": shard}}))
        info = inspect(folder, CONFIG)
        assert [reason for reason in info.reasons if str(folder) in reason] == list(info.reasons)
        assert (
            len(info.reasons) == 2 and info.stored_bytes is None
        )  # one of the weights, one of the tokenizer


def test_model_without_room_is_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drift_sdk.startup.sizing.available_bytes", lambda device: 100_000)
    info = inspect(folder, EngineConfig(device="cpu"))
    assert [reason.partition(",")[0] for reason in info.reasons] == ["dtype='auto': expected a smaller one"]
    held = info.weight_bytes
    monkeypatch.setattr("drift_sdk.startup.sizing.available_bytes", lambda device: held + 8_000_000)
    info = inspect(folder, EngineConfig(device="cpu"))
    assert info.reasons == ()
    assert info.kv_cache_tokens == 1_000_000 // (16 * info.kv_bytes_per_token) * 16


def test_of_a_hub_id_only_small_files_are_fetched(hub: HubServer) -> None:
    info = inspect("org/sharded", CONFIG)
    assert info.is_supported
    weights = {file.name: file.stat().st_size for file in hub.folders["org/sharded"].glob("*.safetensors")}
    assert {file.name: file.num_bytes for file in info.downloads} == weights
    assert info.download_bytes == info.stored_bytes == sum(weights.values())
    assert not weights.keys() & set(hub.names())

    info = inspect("org/gguf:q8_0", CONFIG)
    assert info.is_supported and info.architecture == "Qwen3ForCausalLM"
    assert len(info.downloads) == 4 and info.download_bytes == info.stored_bytes
    with pytest.raises(ModelLoadError, match="no .gguf file is named Q2_K"):
        inspect("org/gguf:Q2_K")


def test_wrong_arguments_are_rejected() -> None:
    for wrong in ("", None, 7):
        with pytest.raises(ConfigError, match="model="):
            inspect(wrong)
    with pytest.raises(ConfigError, match="config="):
        inspect("folder", {})
    with pytest.raises(ModelLoadError, match="does not exist"):
        inspect(Path("no/such/folder"))


def test_command_prints_the_findings(
    models: Path, hub: HubServer, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--device", "cpu", "--kv-cache-tokens", "1024", "--max-model-len", "256"]
    assert main(["inspect", "org/sharded", *options]) == 0
    lines = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines()[:-1])
    found = {name: value.strip() for name, value in lines.items()}
    assert found["architecture"] == "LlamaForCausalLM"
    assert found["runs on"] == "cpu float32 eager"
    assert found["KV cache"].startswith("float32, ")
    assert found["KV cache"].endswith("bytes a token; room for 1,024 tokens (1.50 MiB), 4 sequences of 256")
    assert found["to download"].startswith("9 files, 0.6")

    assert main(["inspect", str(models / "qwen3"), "--max-model-len", "9999", "--json"]) == 1
    shown = json.loads(capsys.readouterr().out)
    assert shown["is_supported"] is False and "max_model_len=9999" in shown["reasons"][0]
    assert shown["downloads"] == []
    assert main(["inspect", "/nowhere/at/all"]) == 1
    assert capsys.readouterr().err.startswith("ModelLoadError: ")
