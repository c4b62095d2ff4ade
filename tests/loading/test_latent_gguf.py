"""GGUF files of models with latent attention, equal to the folders that they were written from, quantised or
not."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from family_zoo import draw_model
from gguf import GGMLQuantizationType as Q
from hybrid_parity import load, logits_of
from hybrid_requests import answers_of
from latent_gguf import write_latent_gguf
from model_zoo import save_tokenizer
from msgspec import structs
from mtp_zoo import LATENT_FAMILIES, make_mtp_model, make_often_right
from safetensors.torch import load_file, save_file
from slow_cases import slow_after, slow_rows_after

from drift_sdk import Chain, ConfigError, EngineConfig, ModelLoadError, Speculation, inspect
from drift_sdk.cli.command_line import main as run_command
from drift_sdk.families import read_spec
from drift_sdk.loading import gguf as gguf_loading
from drift_sdk.loading.gguf_file import GGUFHeader, GGUFTensor
from drift_sdk.loading.source import resolve
from drift_sdk.models.draft_head import load_mtp
from drift_sdk.models.mixers.latent_attention import LatentWeights
from drift_sdk.models.weight_update import leaves
from drift_sdk.models.weights import weight_bytes
from drift_sdk.quantised.weight import QuantisedWeight
from drift_sdk.spec.model import Experts, LatentAttention

FAMILIES = ("glm4_moe_lite", "deepseek_v3", "deepseek_v2")
ARCHITECTURES = dict(
    zip(FAMILIES, ("Glm4MoeLiteForCausalLM", "DeepseekV3ForCausalLM", "DeepseekV2ForCausalLM"), strict=True)
)
FORMS: dict[str, dict[str, Any]] = {
    "glm4_moe_lite": {
        "num_hidden_layers": 3,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "rope_interleave": True,
    },
    "deepseek_v3": {"num_hidden_layers": 3, "first_k_dense_replace": 1, "rope_interleave": True},
    "deepseek_v2": {"num_hidden_layers": 3, "first_k_dense_replace": 1},
}
"""What every file has: the first layers have MLPs, and neighbours are rotated."""
YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 32.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
ROPES = {
    "yarn of V2": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
    "yarn of other turns": YARN
    | {"factor": 4.0, "original_max_position_embeddings": 128, "beta_fast": 2.0, "beta_slow": 0.5}
    | {"mscale": 1.0, "mscale_all_dim": 1.0},
    "plain": {"rope_type": "default", "rope_theta": 10_000.0},
    "yarn": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
    "yarn without scores": YARN | {"mscale": 1.0, "mscale_all_dim": 0.0},
}
ROUTERS: dict[str, list[dict[str, Any]]] = {
    "deepseek_v2": [
        {"topk_method": "greedy", "n_group": 1, "topk_group": 1},
        {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 1},
    ],
    **dict.fromkeys(
        LATENT_FAMILIES,
        [
            {"n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.8},
            {"n_group": 4, "topk_group": 2, "norm_topk_prob": False, "routed_scaling_factor": 1.8},
        ],
    ),
}
NOT_GROUPED = {"topk_method": "greedy", "n_group": 1, "topk_group": 1}
TOKENS = torch.arange(3, 93) % 150
CHUNKS = [50, 1, 39]
CONFIG = EngineConfig(device="cpu", dtype="float32", max_model_len=128)


def make(family: str, seed: int, folder: Path, **changes: Any) -> None:
    draw_model(family, seed, **FORMS[family] | changes).save_pretrained(folder)
    save_tokenizer(folder, 160)


def assert_equal(file: Path, form: Any = "expanded") -> None:
    """A file has the logits of its twin, which change from row to row."""
    found, expected = (
        logits_of(load(file, form), TOKENS, CHUNKS),
        logits_of(load(file.parent / "twin"), TOKENS, CHUNKS),
    )
    assert torch.equal(found, expected)
    assert len(set(found.argmax(-1).tolist())) > 20


@pytest.mark.parametrize("router", [0, 1])
@pytest.mark.parametrize("rope", slow_after(2, ROPES))
@pytest.mark.parametrize("family", FAMILIES)
def test_files_equal_their_folders(family: str, rope: str, router: int, tmp_path: Path) -> None:
    """Queries with and without latents, routers with and without groups."""
    rank = (None, 20)[(router + len(rope)) % 2]
    options = {"rope_parameters": ROPES[rope], "q_lora_rank": rank, "qk_rope_head_dim": 8}
    make(family, 2 + router, tmp_path, **options, **ROUTERS[family][router])
    file = tmp_path / "model.gguf"
    write_latent_gguf(tmp_path, file)
    assert resolve(file).config["architectures"] == [ARCHITECTURES[family]]
    assert_equal(file)
    spec = read_spec(resolve(file).config)
    experts = [layer.channel for layer in spec.layers[1:] if isinstance(layer.channel, Experts)]
    assert len(experts) == 2 and experts[0].router.num_groups == ROUTERS[family][router]["n_group"]


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_equal_those_of_the_folder(family: str, tmp_path: Path) -> None:
    make(family, 4, tmp_path, rope_parameters=ROPES["yarn of V2"], **ROUTERS[family][1])
    write_latent_gguf(tmp_path, tmp_path / "model.gguf")
    tokens = answers_of(tmp_path / "model.gguf", CONFIG)[0]
    assert tokens == answers_of(tmp_path / "twin", CONFIG)[0]
    assert len({token for each in tokens for token in each}) > 20


@pytest.mark.parametrize("rope", slow_after(1, ["yarn of V2", "plain"]))
@pytest.mark.parametrize("family", FAMILIES)
def test_old_files_equal_their_folders(family: str, rope: str, tmp_path: Path) -> None:
    """Keys and values of heads are one matrix, and the lengths of heads are others."""
    make(family, 6, tmp_path, rope_parameters=ROPES[rope], **ROUTERS[family][0])
    write_latent_gguf(tmp_path, tmp_path / "model.gguf", is_old=True)
    assert_equal(tmp_path / "model.gguf")


@pytest.mark.parametrize("family", FAMILIES)
def test_groups_that_are_not_named_are_none(family: str, tmp_path: Path) -> None:
    make(family, 4, tmp_path, **ROUTERS[family][1])
    file = tmp_path / "model.gguf"
    write_latent_gguf(tmp_path, file, is_old=True)
    grouped = logits_of(load(tmp_path / "twin"), TOKENS, CHUNKS)
    settings = tmp_path / "twin" / "config.json"
    changed = json.loads(settings.read_text()) | NOT_GROUPED
    if family != "deepseek_v2":
        del changed["topk_method"]
    settings.write_text(json.dumps(changed))
    assert_equal(file)
    assert not torch.equal(logits_of(load(file), TOKENS, CHUNKS), grouped)


@pytest.mark.parametrize("scale", [None, 0.0])
def test_a_scale_that_is_not_named_is_one(scale: float | None, tmp_path: Path) -> None:
    make("deepseek_v3", 4, tmp_path, **ROUTERS["deepseek_v3"][0] | {"routed_scaling_factor": 1.0})
    write_latent_gguf(tmp_path, tmp_path / "model.gguf", metadata={"expert_weights_scale": scale})
    assert_equal(tmp_path / "model.gguf")


def test_parts_beside_the_whole_matrix_are_left_out(tmp_path: Path) -> None:
    """Some tools write both, with parts of two dimensions."""
    make("deepseek_v3", 6, tmp_path, **ROUTERS["deepseek_v3"][0])
    parts = {f"blk.1.attn_{part}_b.weight": np.ones((6, 4), np.float32) for part in "kv"}
    write_latent_gguf(tmp_path, tmp_path / "model.gguf", is_old=True, **parts)
    assert_equal(tmp_path / "model.gguf")


def test_biases_are_read(tmp_path: Path) -> None:
    make("deepseek_v3", 6, tmp_path, attention_bias=True, **ROUTERS["deepseek_v3"][0])
    write_latent_gguf(tmp_path, tmp_path / "model.gguf")
    assert_equal(tmp_path / "model.gguf")
    mixer = read_spec(resolve(tmp_path / "model.gguf").config).layers[0].mixer
    assert isinstance(mixer, LatentAttention) and mixer.has_bias


FAULTS: dict[str, dict[str, Any]] = {
    "groups": {"n_group": 1, "topk_group": 1},
    "scale of experts": {"routed_scaling_factor": 1.0},
    "sum of experts": {"norm_topk_prob": False},
    "pairs": {"rope_interleave": False},
    "magnitude of scores": {"rope_parameters": ROPES["yarn without scores"]},
    "weight of scores": {"rope_parameters": ROPES["yarn"]},
    "no scaling": {"rope_parameters": ROPES["plain"] | {"rope_theta": 500.0}},
}


JOINTS: dict[str, Callable[[Any], Any]] = {
    "keys as stored": lambda parts: np.concatenate(parts, axis=1).reshape(-1, 16),
    "keys before values": lambda parts: np.concatenate(
        (parts[0].swapaxes(1, 2).reshape(-1, 16), parts[1].reshape(-1, 16))
    ),
}


@pytest.mark.parametrize("fault", slow_after(4, [*JOINTS, "biases", *FAULTS]))
def test_planted_fault_is_found(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    router = ROUTERS["deepseek_v3"][1] | {"norm_topk_prob": True}
    sizes = {"kv_lora_rank": 16, "qk_nope_head_dim": 16, "v_head_dim": 16}
    make("deepseek_v3", 4, tmp_path, rope_parameters=ROPES["yarn of V2"], **sizes, **router)
    file = tmp_path / "model.gguf"
    write_latent_gguf(tmp_path, file)
    assert_equal(file)
    read, join, get = gguf_loading.read_gguf_config, gguf_loading.join_parts, gguf_loading.GGUFFile.get

    def join_wrongly(*inputs: Any) -> Any:
        tensors, joined = join(*inputs)
        numbers = JOINTS[fault]
        return tensors, {
            name: structs.replace(each, join=structs.replace(each.join, numbers=numbers))
            for name, each in joined.items()
        }

    def get_no_biases(self: Any, name: str) -> torch.Tensor:
        return get(self, name) * (not name.endswith("correction_bias"))

    if fault in JOINTS:
        monkeypatch.setattr(gguf_loading, "join_parts", join_wrongly)
    elif fault == "biases":
        monkeypatch.setattr(gguf_loading.GGUFFile, "get", get_no_biases)
    else:
        monkeypatch.setattr(gguf_loading, "read_gguf_config", lambda *inputs: read(*inputs) | FAULTS[fault])
    found, expected = (logits_of(load(each), TOKENS, CHUNKS).argmax(-1) for each in (file, tmp_path / "twin"))
    assert (found != expected).sum() > 4


LARGE = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 256,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 64,
    "moe_intermediate_size": 256,
    "n_shared_experts": 1,
    "attention_bias": False,
    "tie_word_embeddings": False,
}
"""With rows of whole blocks of 256, in matrices of keys of 32."""
KINDS: dict[str, Callable[[str], Q]] = {
    "mixed": lambda name: Q.Q6_K if re.search(r"attn_kv_a|attn_v_b|ffn_down|output", name) else Q.Q4_K,
    "Q8_0": lambda name: Q.Q8_0,
    "Q4_K": lambda name: Q.Q4_K,
    "some": lambda name: Q.F32 if re.search(r"attn_q_a|attn_k_b|ffn_up", name) else Q.Q8_0,
}


@pytest.mark.parametrize(
    ("kind", "family", "is_old"), slow_rows_after(2, itertools.product(KINDS, FAMILIES, [False, True]))
)
def test_quantised_files_equal_their_numbers(kind: str, family: str, is_old: bool, tmp_path: Path) -> None:
    """What is quantised in the file is in memory, but keys and values of heads."""
    make(family, 2, tmp_path, rope_parameters=ROPES["yarn of V2"], **LARGE, **ROUTERS[family][0])
    file = tmp_path / "model.gguf"
    write_latent_gguf(tmp_path, file, KINDS[kind], is_old=is_old)
    assert_equal(file)
    assert_equal(file, "stored")
    stored = load(file, "stored")
    names = {"output", "query_up"} | ({"down"} if kind != "some" else set())
    for layer in stored.weights.layers:
        assert isinstance(layer.mixer, LatentWeights)
        for name, matrix in layer.mixer.matrices.items():
            assert isinstance(matrix, QuantisedWeight) or name not in names
    source = resolve(file)
    spec, tensors = read_spec(source.config), source.tensors()
    num_bytes = weight_bytes(spec, torch.float32, "stored", tensors)
    assert num_bytes < 0.6 * weight_bytes(spec, torch.float32)


DRAFTS = Speculation(draft="mtp", shape=Chain(3), adaptive=False)


def make_drafting(family: str, folder: Path, **sizes: Any) -> None:
    """Save a model with the layer that predicts one more token, often right."""
    options = FORMS[family] | {"rope_parameters": ROPES["plain"]} | sizes | ROUTERS[family][0]
    make_mtp_model(family, 2, folder, is_stacked=True, **options)
    make_often_right(folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["model.embed_tokens.weight"] *= 8  # layers of many columns add more
    save_file(tensors, file, {"format": "pt"})


@pytest.mark.parametrize(("family", "kind"), slow_rows_after(2, itertools.product(LATENT_FAMILIES, KINDS)))
def test_drafts_of_files_equal_those_of_their_numbers(family: str, kind: str, tmp_path: Path) -> None:
    """Of the layer behind the others, quantised as stored: tokens, drafts, and how many are accepted."""
    make_drafting(family, tmp_path, **LARGE)
    file = tmp_path / "model.gguf"
    write_latent_gguf(tmp_path, file, KINDS[kind])
    config = CONFIG.replace(speculation=DRAFTS)
    tokens, drafts, num_accepted = answers_of(file, config.replace(weights="stored"))
    assert (tokens, drafts, num_accepted) == answers_of(tmp_path / "twin", config)
    assert tokens == answers_of(file, CONFIG)[0]
    assert len(set(drafts)) > 8 and all(len(each) <= 3 for each in drafts)
    assert num_accepted > 0 or kind in ("mixed", "Q4_K"), "of weights that are not random blocks"


@pytest.mark.parametrize("family", LATENT_FAMILIES)
def test_the_layer_has_the_numbers_of_the_file(family: str, tmp_path: Path) -> None:
    """Also its matrices of keys and values, which the file has in parts."""
    make_drafting(family, tmp_path)
    file = tmp_path / "model.gguf"
    write_latent_gguf(tmp_path, file)
    draft, expected = (load_mtp(load(each), resolve(each).tensors()) for each in (file, tmp_path / "twin"))
    assert torch.equal(draft.weights.joint, expected.weights.joint)
    for name in ("embedding_norm", "hidden_norm", "final_norm"):
        assert torch.equal(getattr(draft.weights, name), getattr(expected.weights, name)), name
    found, other = (each.weights.layers[0].mixer for each in (draft, expected))
    assert isinstance(found, LatentWeights) and isinstance(other, LatentWeights)
    for name in ("down", "query_norm", "query_up", "latent_norm", "up", "output"):
        part, wanted = getattr(found, name), getattr(other, name)
        assert (part is None and wanted is None) or torch.equal(part, wanted), name


@pytest.mark.parametrize("family", FAMILIES)
def test_files_without_the_layer_are_refused(family: str, tmp_path: Path) -> None:
    make(family, 2, tmp_path, **ROUTERS[family][0])
    write_latent_gguf(tmp_path, tmp_path / "model.gguf")
    with pytest.raises(ConfigError, match="this model has no MTP layer") as caught:
        answers_of(tmp_path / "model.gguf", CONFIG.replace(speculation=DRAFTS))
    assert caught.value.field == "draft"


def test_more_layers_that_predict_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_drafting("glm4_moe_lite", tmp_path)
    extra = {"blk.4.nextn.enorm.weight": np.ones(8, np.float32)}
    write_latent_gguf(tmp_path, tmp_path / "model.gguf", **extra)
    assert_equal(tmp_path / "model.gguf")
    assert "layer 4 and later are left out" in caplog.text


@pytest.mark.parametrize("family", FAMILIES)
def test_inspection_knows_files(family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Sizes equal the sizes of the folder; matrices of keys and values are numbers."""
    has_mtp = family in LATENT_FAMILIES
    if has_mtp:
        make_drafting(family, tmp_path, **LARGE)
    else:
        make(family, 2, tmp_path, **LARGE, **ROUTERS[family][0])
    file = tmp_path / "model.gguf"
    write_latent_gguf(tmp_path, file, KINDS["Q8_0"])
    info, expected = (inspect(each, CONFIG.replace(weights="stored")) for each in (file, tmp_path / "twin"))
    assert info.is_supported and info.architecture == ARCHITECTURES[family]
    assert info.has_mtp is has_mtp
    for name in ("num_parameters", "kv_bytes_per_token", "max_model_len"):
        assert getattr(info, name) == getattr(expected, name), name
    assert info.weight_bytes is not None and expected.weight_bytes is not None
    assert 0.25 * expected.weight_bytes < info.weight_bytes < 0.4 * expected.weight_bytes
    assert info.weight_bytes == sum(leaf.nbytes for leaf in leaves(load(file, "stored").weights))
    assert run_command(["inspect", str(file), "--device", "cpu"]) == 0
    shown = capsys.readouterr().out
    assert ARCHITECTURES[family] in shown and f"{info.kv_bytes_per_token:,} bytes a token" in shown
    assert ('Speculation(draft="mtp")' in shown) == has_mtp


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "scores": ({"expert_gating_func": 3}, r"deepseek2\.expert_gating_func=3, expected 1, the softmax, or 2"),
    "groups": ({"expert_group_used_count": None}, r"deepseek2\.expert_group_used_count is missing"),
    "odd groups": ({"expert_group_count": 3}, r"n_group=3: expected a divisor of 8"),
    "no latent": ({"attention.kv_lora_rank": None}, r"deepseek2\.attention\.kv_lora_rank is missing"),
    "no experts": ({"expert_count": None}, r"deepseek2\.expert_count is missing"),
    "no values": (
        {"attention.value_length_mla": None},
        r"deepseek2\.attention\.value_length_mla=None, expected a positive integer",
    ),
    "keys": (
        {"attention.key_length_mla": 4},
        r"deepseek2\.attention\.key_length_mla=4, expected more than rope\.dimension_count=8",
    ),
    "queries": ({"attention.q_lora_rank": 28}, r"q_a_layernorm\.weight has shape \[20\], expected \[28\]"),
    "temperature": (
        {"attention.temperature_scale": 0.1},
        r"deepseek2\.attention\.temperature_scale=0\.1.* is not implemented",
    ),
    "magnitude": (
        {"rope.scaling.yarn_attn_factor": 0.5},
        r"deepseek2\.rope\.scaling\.yarn_attn_factor=0\.5 is not implemented",
    ),
    "multiplier": (
        {"rope.scaling.yarn_log_multiplier": -0.5},
        r"mscale_all_dim=-5\.0 in the rope settings: expected",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_metadata_that_is_wrong_is_named(change: str, tmp_path: Path) -> None:
    metadata, message = CHANGES[change]
    sizes = {"q_lora_rank": 20, "qk_rope_head_dim": 8}
    make("deepseek_v3", 4, tmp_path, rope_parameters=ROPES["yarn"], **sizes, **ROUTERS["deepseek_v3"][1])
    write_latent_gguf(tmp_path, tmp_path / "model.gguf", metadata=metadata)
    with pytest.raises(ModelLoadError, match=message):
        load(tmp_path / "model.gguf")


PARTS: dict[str, tuple[Callable[[GGUFTensor], GGUFTensor | None], str]] = {
    "missing": (
        lambda tensor: None,
        r"tensor blk\.1\.attn_v_b\.weight is missing beside blk\.1\.attn_k_b\.weight",
    ),
    "flat": (
        lambda tensor: structs.replace(tensor, shape=(tensor.shape[0] * tensor.shape[1], tensor.shape[2])),
        r"blk\.1\.attn_k_b\.weight of shape \[.*\] and blk\.1\.attn_v_b\.weight of shape .* do not fit",
    ),
    "another latent": (
        lambda tensor: structs.replace(tensor, shape=(tensor.shape[0], tensor.shape[2], tensor.shape[1])),
        r"blk\.1\.attn_v_b\.weight of shape \[3, 16, 12\] do not fit together",
    ),
}


@pytest.mark.parametrize("part", PARTS)
def test_parts_that_do_not_fit_are_named(part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"num_attention_heads": 3, "num_key_value_heads": 3, "kv_lora_rank": 16, "v_head_dim": 12}
    make("deepseek_v3", 4, tmp_path, **sizes, **ROUTERS["deepseek_v3"][1])
    file = tmp_path / "model.gguf"
    write_latent_gguf(tmp_path, file)
    header = gguf_loading.GGUFFile(file)._parts.header
    change, message = PARTS[part]
    changed = {n: change(t) if n == "blk.1.attn_v_b.weight" else t for n, t in header.tensors.items()}
    kept = {name: tensor for name, tensor in changed.items() if tensor is not None}
    found = GGUFHeader(metadata=header.metadata, tensors=kept)
    monkeypatch.setattr("drift_sdk.loading.gguf_file.read_header", lambda file: found)
    with pytest.raises(ModelLoadError, match=message):
        gguf_loading.GGUFFile(file)
