"""Families that are known: a file each, those that are registered, and those of entry points."""

from __future__ import annotations

import json
import sys
import threading
import time
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
import torch
from model_zoo import save_tokenizer
from msgspec.structs import replace
from safetensors.torch import save_file

import drift_sdk.families
from drift_sdk import ConfigError, Engine, EngineConfig, ModelLoadError, inspect
from drift_sdk.families import GROUP, Registry, families, gguf_architecture, read_spec, register
from drift_sdk.models.attention import AttentionBatch, SequenceRows
from drift_sdk.models.decoder import Decoder, random_tensors
from drift_sdk.spec.family import Family, GGUFArchitecture
from drift_sdk.spec.model import AttentionNames, ExpertNames, Mlp, MlpNames, ModelSpec, Names, Norm, Router
from drift_sdk.spec.settings import (
    Settings,
    attention_layers,
    read_attention,
    read_decoder,
    read_int,
    read_mlp,
    read_norm,
)

PROMPT = list(range(3, 20))
NUM_TOKENS = 12
SEED = 6
"""Weights with which no two tokens are nearly equally likely: the logits of the best two differ by 0.06."""
SETTINGS: dict[str, Any] = {
    "architectures": ["ToyForCausalLM"],
    "model_type": "toy",
    "vocab_size": 400,
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "toy_cap": 5,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def toy_spec(settings: Settings) -> ModelSpec:
    norm = read_norm(settings, "offset")
    attention = replace(read_attention(settings, head_norm=norm), has_gate=True)
    return read_decoder(
        settings,
        attention_layers(settings, attention),
        read_mlp(settings),
        norm=norm,
        logits_cap=float(read_int(settings, "toy_cap")),
        names=Names(
            embedding="toy.words.weight",
            final_norm="toy.end.weight",
            head="toy.head.weight",
            layer="toy.{}",
            attention=AttentionNames(module="mix", fused="qkv"),
            mlp=MlpNames(module="ffn", gate="a", up="b", down="c"),
        ),
    )


TOY = Family(
    model_type="toy",
    architectures=("ToyForCausalLM",),
    spec=toy_spec,
    defaults={"rms_norm_eps": 1e-5},
    gguf=(GGUFArchitecture(name="toy"),),
)


def entry_point(value: str) -> EntryPoint:
    return EntryPoint(name="toy", value=value, group=GROUP)


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> Registry:
    """Families without those that other tests or installed packages add."""
    registry = Registry()
    monkeypatch.setattr(drift_sdk.families, "REGISTRY", registry)
    install(monkeypatch)
    return registry


def install(monkeypatch: pytest.MonkeyPatch, *values: str, **modules: Any) -> None:
    """Let packages have entry points with these values, and modules."""
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    entries = {GROUP: [entry_point(value) for value in values]}
    monkeypatch.setattr(drift_sdk.families, "entry_points", lambda *, group: entries[group])


def test_each_file_of_the_folder_is_a_family() -> None:
    folder = Path(drift_sdk.families.__file__).parent
    modules = sorted(file.stem for file in folder.glob("*.py") if file.stem != "__init__")
    assert len(modules) > 10
    assert [family.spec.__module__.rpartition(".")[2] for family in families()] == modules
    names = [name for family in families() for name in (family.model_type, *family.architectures)]
    assert len(set(names)) == len(names)


def test_threads_that_ask_first_at_once_know_all_families(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the engines of a pool, which start together."""
    registry, found = Registry(), list[tuple[Family, ...]]()
    load = drift_sdk.families.import_module

    def slowly(name: str) -> Any:
        time.sleep(0.01)
        return load(name)

    monkeypatch.setattr(drift_sdk.families, "import_module", slowly)
    threads = [threading.Thread(target=lambda: found.append(registry.all())) for _ in range(3)]
    for thread in threads:
        thread.start()
        time.sleep(0.02)
    for thread in threads:
        thread.join()
    names = [{family.model_type for family in each} for each in found]
    assert len(names) == 3 and len(names[0]) > 20 and names[0] == names[1] == names[2]


def test_registered_family_is_read() -> None:
    with pytest.raises(ModelLoadError, match="ToyForCausalLM"):
        read_spec(SETTINGS)
    num_families = len(families())
    register(TOY)
    register(TOY)
    assert families()[-1] == TOY and len(families()) == num_families + 1
    spec = read_spec(SETTINGS)
    assert spec == read_spec({name: value for name, value in SETTINGS.items() if name != "architectures"})
    assert (spec.logits_cap, spec.num_layers, spec.final_norm.eps) == (5.0, 3, 1e-5)
    assert gguf_architecture({"general.architecture": "toy"}, "FILE") == (TOY, TOY.gguf[0])
    with pytest.raises(ModelLoadError, match="toy_cap=0: expected an integer from 1"):
        read_spec(SETTINGS | {"toy_cap": 0})


@torch.inference_mode()
def greedy(decoder: Decoder) -> list[int]:
    tokens = list(PROMPT)
    for _ in range(NUM_TOKENS):
        cache = decoder.empty_kv_cache(8, 8)
        batch = AttentionBatch([SequenceRows(range(8), 0, len(tokens))], cache)
        hidden, _ = decoder.forward(torch.tensor(tokens), batch, cache)
        tokens.append(int(decoder.logits(hidden[-1:]).argmax()))
    return tokens[len(PROMPT) :]


def test_registered_family_is_served(tmp_path: Path) -> None:
    register(TOY)
    spec = read_spec(SETTINGS)
    tensors = random_tensors(spec, device=torch.device("cpu"), dtype=torch.float32, seed=SEED)
    assert "toy.2.mix.qkv.weight" in tensors.names() and "toy.0.mix.gate_proj.weight" in tensors.names()
    save_file({name: tensors.get(name) for name in tensors.names()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(SETTINGS))
    save_tokenizer(tmp_path, SETTINGS["vocab_size"])
    config = EngineConfig(device="cpu", dtype="float32", max_model_len=64)
    assert inspect(tmp_path, config).is_supported
    expected = greedy(Decoder.load(spec, tensors, device="cpu", dtype=torch.float32))

    async def main() -> list[int]:
        async with Engine(tmp_path, config) as engine:
            answer = await engine.generate(PROMPT, max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
            return list(answer.token_ids)

    assert anyio.run(main) == expected


def test_random_weights_of_a_registered_family_are_served(tmp_path: Path) -> None:
    register(TOY)
    (tmp_path / "config.json").write_text(json.dumps(SETTINGS))
    save_tokenizer(tmp_path, SETTINGS["vocab_size"])

    async def main() -> int:
        async with Engine(tmp_path, EngineConfig(device="cpu", load="random", max_model_len=64)) as engine:
            return len((await engine.generate(PROMPT, max_tokens=4, ignore_eos=True)).token_ids)

    assert anyio.run(main) == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "llama"}, "model_type='llama': expected a name that no other family has"),
        ({"architectures": ("ToyForCausalLM", "Qwen3Model")}, "architectures='Qwen3Model': expected a name"),
        ({"gguf": (GGUFArchitecture(name="qwen3"),)}, r"gguf=\('qwen3', ''\): expected a name"),
        ({"gguf": (GGUFArchitecture(name="llama", mark="expert_count"),)}, r"gguf=\('llama', 'expert_count'"),
    ],
)
def test_names_that_another_family_has_are_refused(changes: dict[str, Any], message: str) -> None:
    before = families()
    with pytest.raises(ConfigError, match=message):
        register(replace(TOY, **changes))
    assert families() == before


def test_another_family_of_a_registered_name_is_refused() -> None:
    register(TOY)
    with pytest.raises(ConfigError, match="model_type='toy'"):
        register(replace(TOY, has_mxfp4=True))
    assert read_spec(SETTINGS).logits_cap == 5.0


def test_what_is_no_family_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"family=.*: expected a drift_sdk\.spec\.Family"):
        register(toy_spec)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("architectures", "ToyForCausalLM"),
        ("architectures", ()),
        ("outer", ["ToyForImages"]),
        ("spec", None),
        ("defaults", [1]),
    ],
)
def test_fields_of_other_types_are_refused(field: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        register(replace(TOY, **{field: value}))
    assert caught.value.field == field
    with pytest.raises(ModelLoadError, match="ToyForCausalLM"):
        read_spec(SETTINGS)


def two_layers(settings: Settings) -> ModelSpec:
    mixers = attention_layers(settings, read_attention(settings))
    return read_decoder(settings, mixers[:2], read_mlp(settings))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (lambda settings: None, "the family toy of .*test_registry read it as None: expected a ModelSpec"),
        (lambda settings: settings["nope"], r"the family toy of .*test_registry cannot read it: KeyError"),
        (two_layers, "num_hidden_layers=3: the family describes 2"),
        (lambda settings: Mlp(intermediate_size=8, activation="relu2"), "activation='relu2': expected one"),
        (lambda settings: Norm(1e-5, "layernorm"), "kind='layernorm': expected one of 'rounded', "),
        (lambda settings: ExpertNames(layout="rows"), "layout='rows': expected one of 'each', 'stacked'"),
        (lambda settings: Router(kind="argmax"), "kind='argmax': expected one of 'softmax', 'sigmoid'"),
    ],
)
def test_faults_of_descriptions_are_named(spec: Any, message: str) -> None:
    register(replace(TOY, spec=spec))
    with pytest.raises(ModelLoadError, match=message):
        read_spec(SETTINGS)


def test_files_of_the_same_name_are_told_apart_by_their_mark() -> None:
    register(replace(TOY, gguf=(GGUFArchitecture(name="llama", mark="toy_cap"),)))
    marked = {"general.architecture": "llama", "llama.toy_cap": 5}
    assert gguf_architecture(marked, "FILE")[0].model_type == "toy"
    assert gguf_architecture({"general.architecture": "llama"}, "FILE")[0].model_type == "llama"


def test_entry_point_adds_a_family(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    install(monkeypatch, "toy_package:FAMILY", toy_package=SimpleNamespace(FAMILY=TOY))
    assert read_spec(SETTINGS).logits_cap == 5.0
    assert families()[-1] == TOY and caplog.messages == []


BROKEN = {
    "no_such_toy:FAMILY": "ModuleNotFoundError",
    "toy_package:MISSING": "AttributeError",
    "toy_package:NUMBER": "family=3: expected a drift_sdk.spec.Family",
    "toy_package:TAKEN": "model_type='llama'",
    "exiting_toy:FAMILY": "SystemExit",
}


@pytest.mark.parametrize("value", BROKEN)
def test_broken_entry_point_is_named_and_harms_no_other_family(
    value: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    taken = replace(TOY, model_type="llama")
    (tmp_path / "exiting_toy.py").write_text("raise SystemExit('no licence')")
    monkeypatch.syspath_prepend(tmp_path)
    package = SimpleNamespace(NUMBER=3, TAKEN=taken)
    good = replace(TOY, model_type="good", architectures=("GoodForCausalLM",), gguf=())
    install(
        monkeypatch,
        value,
        "good_package:FAMILY",
        toy_package=package,
        good_package=SimpleNamespace(FAMILY=good),
    )
    llama = {**SETTINGS, "architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    assert read_spec(llama).logits_cap is None
    (message,) = caplog.messages
    assert message.startswith(f"the family toy of {value} could not be loaded: ") and BROKEN[value] in message
    assert (
        read_spec(SETTINGS | {"architectures": ["GoodForCausalLM"], "model_type": "good"}).logits_cap == 5.0
    )
    with pytest.raises(ModelLoadError) as caught:
        read_spec(SETTINGS)
    assert "ToyForCausalLM" in str(caught.value) and message in str(caught.value)
    with pytest.raises(ModelLoadError) as caught:
        gguf_architecture({"general.architecture": "toy"}, "FILE")
    assert message in str(caught.value)
    assert len(caplog.messages) == 1  # it is loaded once
