"""GGUF files of models with recurrent layers: the tokens of transformers, quantised or not."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Q
from hybrid_gguf import write_hybrid_gguf, write_mtp_gguf
from hybrid_parity import answer, load, logits_of, num_wrong
from hybrid_requests import answers_of
from hybrid_zoo import make_hybrid_model
from msgspec import structs
from mtp_zoo import add_mtp
from safetensors.torch import load_file
from slow_cases import slow_after, slow_rows_after

from drift_sdk import (
    Chain,
    ConfigError,
    Engine,
    EngineConfig,
    ModelLoadError,
    Speculation,
    inspect,
)
from drift_sdk.families import read_spec
from drift_sdk.loading import gguf as gguf_loading
from drift_sdk.loading.source import resolve
from drift_sdk.models.draft_head import load_mtp
from drift_sdk.models.weights import weight_bytes
from drift_sdk.quantised.weight import QuantisedWeight, TiledWeight, dequantised
from drift_sdk.spec.family import GGUFChange

NUM_MODELS = 6
FAMILIES = ("qwen3_5", "qwen3_5_moe", "qwen3_next")
GROUPED = {"linear_num_key_heads": 2, "linear_num_value_heads": 6}
"""With an order of value heads that is not its own inverse."""
LARGE = GROUPED | {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 64,
    "num_hidden_layers": 4,
}
"""With rows of whole blocks of 256."""
PARTS = ("gate", "up", "down")
EXPERT_SIZES = {"moe_intermediate_size": 256, "shared_expert_intermediate_size": 32}


def sizes(family: str, **more: int) -> dict[str, Any]:
    """Every layer of a file of Qwen3-Next has experts."""
    return more | ({"mlp_only_layers": [], "norm_topk_prob": True} if family == "qwen3_next" else {})


@pytest.mark.parametrize("seed", slow_after(1, [1, 0, *range(2, NUM_MODELS)]))
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_equal_those_of_transformers(family: str, seed: int, tmp_path: Path) -> None:
    model = make_hybrid_model(family, seed, tmp_path, **sizes(family, **(GROUPED if seed % 2 else {})))
    write_hybrid_gguf(model, tmp_path / "model.gguf")
    token_ids, expected = answer(model, seed)
    assert num_wrong(load(tmp_path / "model.gguf"), token_ids, expected, seed) == 0


@pytest.mark.parametrize(
    ("family", "form"),
    [
        ("qwen3_next", {"is_split": False}),
        ("qwen3_next", {"has_vector_gates": False}),
        ("qwen3_5_moe", {"has_fused_experts": True}),
        ("qwen3_5_moe", {"has_vector_gates": False}),
        ("qwen3_5", {"num_predicting": 1, "blk.4.nextn.eh_proj.weight": np.ones(8, np.float32)}),
    ],
)
def test_other_forms_of_files_are_equal(family: str, form: dict[str, Any], tmp_path: Path) -> None:
    model = make_hybrid_model(family, 0, tmp_path, **sizes(family, **GROUPED, num_hidden_layers=4))
    write_hybrid_gguf(model, tmp_path / "usual.gguf")
    write_hybrid_gguf(model, tmp_path / "other.gguf", **form)
    token_ids = torch.arange(3, 90)
    found, expected = (
        logits_of(load(tmp_path / f"{name}.gguf"), token_ids, [87]) for name in ("other", "usual")
    )
    assert torch.equal(found, expected)


KINDS: dict[str, Callable[[str], Q]] = {
    "Q8_0": lambda name: Q.Q8_0,
    "Q4_K": lambda name: Q.Q4_K,
    "mixed": lambda name: Q.Q6_K if re.search(r"attn_v|attn_qkv|ffn_down|output", name) else Q.Q4_K,
    "some": lambda name: Q.F32 if re.search(r"ssm_(alpha|beta|ba)|attn_k|attn_gate", name) else Q.Q8_0,
}


@pytest.mark.parametrize("kind", slow_after(1, KINDS))
@pytest.mark.parametrize("family", FAMILIES)
def test_quantised_tokens_equal_those_of_transformers(family: str, kind: str, tmp_path: Path) -> None:
    """Those of a model with the same numbers. What is quantised in the file is in memory, with the same
    bits in the logits."""
    experts = {} if family == "qwen3_5" else EXPERT_SIZES
    model = make_hybrid_model(family, 0, tmp_path, **sizes(family, **LARGE, **experts))
    file = tmp_path / "model.gguf"
    token_ids, expected = answer(write_hybrid_gguf(model, file, KINDS[kind]), 0)
    expanded = load(file)
    assert num_wrong(expanded, token_ids, expected, 0) == 0
    stored = load(file, "stored")
    assert torch.equal(*(logits_of(each, token_ids, [40, 25]) for each in (stored, expanded)))
    for layer in stored.weights.layers:
        for name, matrix in layer.mixer.matrices.items():
            assert isinstance(matrix, QuantisedWeight) or (name == "ba" and kind == "some")
    source = resolve(file)
    spec, tensors = read_spec(source.config), source.tensors()
    assert weight_bytes(spec, torch.float32, "stored", tensors) < 0.5 * weight_bytes(spec, torch.float32)


@pytest.mark.parametrize("value_dim", [64, 16])
def test_columns_in_another_order_are_integers_where_groups_stay_whole(
    value_dim: int, tmp_path: Path
) -> None:
    """Blocks of 256 columns have those of several heads."""
    shape = {**LARGE, "linear_num_value_heads": 256 // value_dim, "linear_value_head_dim": value_dim}
    model = make_hybrid_model("qwen3_5", 0, tmp_path, **shape)
    write_hybrid_gguf(model, tmp_path / "model.gguf", KINDS["Q4_K"])
    source = resolve(tmp_path / "model.gguf")
    name, tensors = "model.layers.0.linear_attn.out_proj.weight", source.tensors()
    assert read_spec(source.config).recurrent_layers
    weight, expected = tensors.quantised(name, torch.device("cpu")), tensors.get(name)
    assert isinstance(weight, TiledWeight)
    assert torch.equal(weight.dequantise(torch.float32), expected)
    assert torch.equal(weight.rows(torch.tensor([5, 3])).dequantise(torch.float32), expected[[5, 3]])
    integers = weight.integers()
    if value_dim == 16:
        assert integers is None
    else:
        assert integers is not None and torch.equal(integers.numbers(), expected)


def _drop(part: str, **fields: Any) -> Callable[[str, GGUFChange], GGUFChange]:
    """The change of tensors whose names end in `part`, without some of it."""
    return lambda name, change: structs.replace(change, **fields) if name.endswith(part) else change


FAULTS = {
    "values of qkv": _drop("in_proj_qkv.weight", rows=None),
    "queries and keys too": _drop("in_proj_qkv.weight", first_row=0),
    "gates": _drop("in_proj_z.weight", rows=None),
    "rates": _drop("in_proj_b.weight", rows=None),
    "steps": _drop("in_proj_a.weight", rows=None),
    "addends of steps": _drop("dt_bias", rows=None),
    "order of decays": _drop("A_log", rows=None),
    "channels": _drop("conv1d.weight", rows=None),
    "columns": _drop("out_proj.weight", columns=None),
    "decays as they are": _drop("A_log", numbers=None),
    "norms of layers": _drop("layernorm.weight", numbers=None),
    "norms of queries": _drop("q_norm.weight", numbers=None),
    "last norm": _drop("model.norm.weight", numbers=None),
    "norms of recurrent outputs": _drop("linear_attn.norm.weight", numbers=lambda weights: weights - 1),
}


@pytest.mark.parametrize("fault", slow_after(4, FAULTS))
def test_planted_fault_is_found(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "model.gguf"
    model = make_hybrid_model("qwen3_5", 0, tmp_path, **GROUPED, linear_key_head_dim=24)
    write_hybrid_gguf(model, file)
    token_ids, expected = answer(model, 0)
    unchanged, usual = load(file), gguf_loading.GGUFFile._change
    monkeypatch.setattr(
        gguf_loading.GGUFFile, "_change", lambda self, name: FAULTS[fault](name, usual(self, name))
    )
    errors = [
        (logits_of(decoder, token_ids, [len(token_ids)]) - expected).abs().max()
        for decoder in (load(file), unchanged)
    ]
    assert errors[0] > 100 * errors[1]


def write_with_mtp(
    family: str, folder: Path, kind: Callable[[str], Q] = lambda name: Q.F32, **form: bool
) -> Path:
    """A file of a model with the layer that predicts one more token, see `write_mtp_gguf`."""
    experts = {} if family == "qwen3_5" else EXPERT_SIZES
    more = {"tie_word_embeddings": False, "attention_bias": False}
    return write_mtp_gguf(family, 2, folder, kind, sizes(family, **LARGE, **experts, **more), **form)


def config_of(**fields: Any) -> EngineConfig:
    return EngineConfig(device="cpu", dtype="float32", max_model_len=128, **fields)


DRAFTS = Speculation(draft="mtp", shape=Chain(3), adaptive=False)


@pytest.mark.parametrize(
    ("family", "kind"),
    slow_rows_after(1, itertools.product(FAMILIES, ["mixed", "F32", "Q8_0", "Q4_K", "some"])),
)
def test_drafts_of_files_equal_those_of_their_numbers(family: str, kind: str, tmp_path: Path) -> None:
    """Of the layer behind the others, quantised as stored: tokens, drafts, and how many are accepted."""
    form = {"has_fused_experts": True} if family == "qwen3_5_moe" and kind == "mixed" else {}
    file = write_with_mtp(family, tmp_path, KINDS.get(kind, lambda name: Q.F32), **form)
    tokens, drafts, num_accepted = answers_of(file, config_of(weights="stored", speculation=DRAFTS))
    assert (tokens, drafts, num_accepted) == answers_of(tmp_path / "twin", config_of(speculation=DRAFTS))
    assert tokens == answers_of(file, config_of())[0]
    assert len(set(drafts)) > 8 and all(len(each) <= 3 for each in drafts)
    assert num_accepted > 0 or kind in ("mixed", "Q4_K"), "of weights that are not random blocks"


@pytest.mark.parametrize("kind", slow_after(1, ["Q4_K", "F32"]))
@pytest.mark.parametrize("family", FAMILIES)
def test_the_layer_has_the_numbers_of_the_file(family: str, kind: str, tmp_path: Path) -> None:
    """Its matrices are as quantised in memory as in the file."""
    file = write_with_mtp(family, tmp_path, KINDS.get(kind, lambda name: Q.F32))
    tensors, twin = resolve(file).tensors(), resolve(tmp_path / "twin").tensors()
    draft, expected = (load_mtp(load(each), resolve(each).tensors()) for each in (file, tmp_path / "twin"))
    stored = load_mtp(load(file, "stored"), tensors, form="stored")
    names = [name for name in tensors.names() if name.startswith("mtp.")]
    assert len(names) > 14 and not any("blk" in name for name in tensors.names())
    for name in names:
        if ".experts." not in name:
            assert torch.equal(tensors.get(name), twin.get(name)), name
    prefix = "mtp.layers.0.mlp.experts"
    for expert in range(6 if family != "qwen3_5" else 0):
        gate, up, down = (tensors.get(f"{prefix}.{expert}.{part}_proj.weight") for part in PARTS)
        assert torch.equal(torch.cat((gate, up)), twin.get(f"{prefix}.gate_up_proj")[expert])
        assert torch.equal(down, twin.get(f"{prefix}.down_proj")[expert])
    assert torch.equal(draft.weights.joint, expected.weights.joint)
    for name in ("embedding_norm", "hidden_norm", "final_norm"):
        assert torch.equal(getattr(draft.weights, name), getattr(expected.weights, name)), name
    layer = stored.weights.layers[0]
    matrices = [stored.weights.joint, *layer.mixer.matrices.values()]
    assert all(isinstance(matrix, QuantisedWeight) == (kind == "Q4_K") for matrix in matrices)
    for name, matrix in layer.mixer.matrices.items():
        assert torch.equal(
            dequantised(matrix, torch.float32), expected.weights.layers[0].mixer.matrices[name]
        )


@pytest.mark.parametrize("name", slow_after(1, ["mtp.pre_fc_norm_embedding.weight", "mtp.norm.weight"]))
def test_planted_faults_of_the_layer_are_found(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, usual = write_with_mtp("qwen3_5", tmp_path), gguf_loading.GGUFFile._change
    tokens, drafts, _ = answers_of(file, config_of(speculation=DRAFTS))
    monkeypatch.setattr(
        gguf_loading.GGUFFile, "_change", lambda self, own: _drop(name, numbers=None)(own, usual(self, own))
    )
    found = answers_of(file, config_of(speculation=DRAFTS))
    assert found[0] == tokens and found[1] != drafts


def test_inspection_tells_of_the_layer(tmp_path: Path) -> None:
    file = write_with_mtp("qwen3_5", tmp_path)
    info = inspect(file, config_of())
    assert info.has_mtp and info.is_supported and 'yes, for Speculation(draft="mtp")' in info.text()
    model = make_hybrid_model("qwen3_5", 0, tmp_path / "plain")
    write_hybrid_gguf(model, tmp_path / "plain.gguf")
    info = inspect(tmp_path / "plain.gguf", config_of())
    assert info.has_mtp is False and "MTP" not in info.text()


def start(file: Path, **fields: Any) -> None:
    async def main() -> None:
        async with Engine(file, config_of(**fields)):
            pass

    anyio.run(main)


def test_a_layer_that_is_not_used_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "drift_sdk")
    start(write_with_mtp("qwen3_5", tmp_path))
    assert "MTP layer that is not used" in caplog.text


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({}, "this model has no MTP layer"),
        ({"num_predicting": 2}, "this model has no MTP layer"),
        ({"num_predicting": 1}, r"model\.gguf has no tensor mtp\.fc\.weight"),
    ],
)
def test_files_without_the_layer_are_refused(
    form: dict[str, int], message: str, family: str, tmp_path: Path
) -> None:
    """Also where metadata alone tell of one, or of two."""
    model = make_hybrid_model(family, 0, tmp_path, **sizes(family, num_hidden_layers=4))
    write_hybrid_gguf(model, tmp_path / "model.gguf", **form)
    with pytest.raises(ConfigError, match=message) as caught:
        start(tmp_path / "model.gguf", speculation=Speculation(draft="mtp"))
    assert caught.value.field == "draft"


def test_layers_with_an_embedding_of_their_own_are_refused(tmp_path: Path) -> None:
    model = make_hybrid_model("qwen3_5", 0, tmp_path, num_hidden_layers=4)
    add_mtp(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    layer = {name: tensor for name, tensor in stored.items() if name.startswith("mtp.")}
    extra = {"blk.4.nextn.embed_tokens.weight": stored["model.embed_tokens.weight"].numpy()}
    file = tmp_path / "model.gguf"
    write_hybrid_gguf(model, file, num_predicting=1, mtp=layer, **extra)
    with pytest.raises(ConfigError, match="this model has no MTP layer"):
        start(file, speculation=Speculation(draft="mtp"))


def test_a_tensor_that_the_layer_lacks_is_named(tmp_path: Path) -> None:
    model = make_hybrid_model("qwen3_5", 0, tmp_path, num_hidden_layers=4)
    add_mtp(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    layer = {name: tensor for name, tensor in stored.items() if name.startswith("mtp.")}
    del layer["mtp.layers.0.self_attn.k_norm.weight"]
    write_hybrid_gguf(model, tmp_path / "model.gguf", num_predicting=1, mtp=layer)
    with pytest.raises(ModelLoadError, match=r"mtp\.layers\.0\.self_attn\.k_norm\.weight of shape"):
        start(tmp_path / "model.gguf", speculation=Speculation(draft="mtp"))


class _Writer(gguf.GGUFWriter):
    """Writes other sizes of states."""

    changed: tuple[str, int] = "", 0

    def add_uint32(self, key: str, value: int) -> None:
        name, other = self.changed
        if not key.endswith(name) or other:
            super().add_uint32(key, other if key.endswith(name) else value)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("ssm.inner_size", 49, r"qwen35\.ssm\.inner_size=49, expected a multiple of ssm\.time_step_rank=6"),
        ("ssm.group_count", 4, r"linear_num_value_heads=6: expected a multiple of linear_num_key_heads=4"),
        ("ssm.state_size", 0, r"qwen35\.ssm\.state_size is missing"),
        ("ssm.time_step_rank", 2**30, r"qwen35\.ssm\.inner_size=.* expected a multiple"),
        ("ssm.conv_kernel", 3, r"linear_attn\.conv1d\.weight has shape .*, expected .* 3\]"),
    ],
)
def test_broken_metadata_is_named(
    key: str, value: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_hybrid_model("qwen3_5", 0, tmp_path, **GROUPED)
    monkeypatch.setattr(gguf, "GGUFWriter", _Writer)
    monkeypatch.setattr(_Writer, "changed", (key, value))
    write_hybrid_gguf(model, tmp_path / "model.gguf")
    with pytest.raises(ModelLoadError, match=message):
        load(tmp_path / "model.gguf")


@pytest.mark.parametrize("change", [lambda rates: -rates, lambda rates: rates * 0])
def test_rates_that_are_not_negative_are_named(change: Any, tmp_path: Path) -> None:
    model = make_hybrid_model("qwen3_5", 0, tmp_path)
    file = tmp_path / "model.gguf"
    write_hybrid_gguf(model, file)
    tensor = gguf.GGUFReader(file, "r+")
    found = next(each for each in tensor.tensors if each.name == "blk.0.ssm_a")
    found.data[:] = change(found.data)
    tensor.data.flush()
    with pytest.raises(ModelLoadError, match=r"linear_attn\.A_log has NaN, infinity"):
        load(file)


def test_inspection_knows_files(tmp_path: Path) -> None:
    model = make_hybrid_model("qwen3_5_moe", 0, tmp_path)
    write_hybrid_gguf(model, tmp_path / "model.gguf", KINDS["Q8_0"])
    info = inspect(tmp_path / "model.gguf", EngineConfig(device="cpu"))
    assert not info.reasons and info.state_bytes


@pytest.mark.parametrize("number", [5, 2**40])
def test_more_layers_that_predict_than_a_file_has_are_named(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_with_mtp("qwen3_5", tmp_path)
    header = gguf_loading.GGUFFile(file)._parts.header
    assert header.metadata["qwen35.block_count"] == 5
    changed = structs.replace(header, metadata=header.metadata | {"qwen35.nextn_predict_layers": number})
    monkeypatch.setattr("drift_sdk.loading.gguf_file.read_header", lambda file: changed)
    with pytest.raises(ModelLoadError, match=rf"nextn_predict_layers={number}, expected less than block_c"):
        read_spec(resolve(file).config)
