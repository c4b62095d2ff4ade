"""The layer of a model's files that predicts one more token, against its formula in plain torch."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from decoder_parity import BLOCK_SIZE, poisoned_cache, shuffled_blocks
from family_zoo import draw_model
from hybrid_zoo import make_hybrid_model
from model_zoo import save_tokenizer
from msgspec.structs import replace
from mtp_form import LatentReference, Reference, ReferenceBehind
from mtp_zoo import LATENT_FAMILIES, add_mtp, make_mtp_model
from quantised_files import write_checkpoint
from safetensors.torch import load_file, save_file
from slow_cases import slow_after
from tolerances import assert_near

from drift_sdk import ConfigError, EngineConfig, ModelLoadError, NGram, Speculation
from drift_sdk.families import read_spec
from drift_sdk.loading.source import resolve
from drift_sdk.models.attention import AttentionBatch, SequenceRows
from drift_sdk.models.decoder import Decoder
from drift_sdk.models.draft_head import DRAFT_KV_OFFSET, DraftDecoder, DraftForm, load_mtp, random_mtp
from drift_sdk.models.kv_cache import SequenceState, StateRows
from drift_sdk.quantised.formats import Fp8Weight
from drift_sdk.quantised.weight import StackedWeight, dequantised
from drift_sdk.startup.model_parts import check_mtp, open_drafter_factory

NUM_MODELS = 16
NUM_PROMPT, NUM_DRAFTS, NUM_BLOCKS = 43, 5, 16
CHUNKS = (1, 20, 7, 15)
FAMILIES = ("qwen3_5", "qwen3_5_moe", "qwen3_next")
LATENT = {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 48}
LATENT |= {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
COPIES = (".shared_head.head.weight", ".2.embed_tokens.weight", ".3.embed_tokens.weight")
INNER = 144  # terms of the longest sum: embedding and feature of 72


def load(folder: Path) -> tuple[Decoder, DraftDecoder]:
    source = resolve(folder)
    tensors = source.tensors()
    target = Decoder.load(read_spec(source.config), tensors, device="cpu", dtype=torch.float32)
    return target, load_mtp(target, tensors)


@torch.inference_mode()
def features_of(target: Decoder, draft: DraftDecoder, tokens: torch.Tensor) -> torch.Tensor:
    cache, state = poisoned_cache(target.spec), SequenceState(target.spec, torch.float32, target.device)
    batch = AttentionBatch([SequenceRows(shuffled_blocks(), 0, len(tokens))], cache)
    rows = [StateRows.of(state, 0, len(tokens), is_final=True)]
    hidden, aux_hidden = target.forward(tokens, batch, cache, draft.aux_layers, rows)
    return draft.fuse(aux_hidden, hidden)


@torch.inference_mode()
def assert_drafts(target: Decoder, draft: DraftDecoder, reference: Reference, seed: int) -> None:
    """Rows of a prompt in chunks and of drafts after it, and their greedy tokens, equal the reference's."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, target.spec.vocab_size, (NUM_PROMPT + 1,), generator=generator)
    features = features_of(target, draft, tokens[:-1])
    cache, blocks = draft.empty_kv_cache(NUM_BLOCKS, BLOCK_SIZE), shuffled_blocks(NUM_BLOCKS)
    for tensor in cache.tensors:
        tensor.fill_(math.nan)

    def forward(features: torch.Tensor, tokens: torch.Tensor, start: int) -> torch.Tensor:
        rows = [SequenceRows(blocks, start, len(tokens))]
        batch = AttentionBatch(rows, cache, slot_offset=DRAFT_KV_OFFSET)
        return draft.forward(features, tokens, batch, cache)

    found, start = [], 0
    for length in CHUNKS:
        rows = slice(start, start + length)
        found.append(forward(features[rows], tokens[start + 1 : start + length + 1], start))
        start += length
    all_features, all_tokens = features.double(), tokens[1:]
    expected = reference.outputs(all_features, all_tokens)
    assert_near(torch.cat(found), expected, inner=INNER, depth=4, name="prompt")
    last = found[-1][-1:]
    for number in range(NUM_DRAFTS):
        logits, wanted = draft.logits(last), reference.logits(expected[-1:])
        depth = 6 + 4 * number
        assert_near(last, expected[-1:], inner=INNER, depth=depth, name=f"row {number}")
        assert_near(logits, wanted, inner=INNER, depth=depth, name=f"logits {number}")
        token = draft.target_ids[logits.argmax(-1)]
        assert int(token) == int(wanted.argmax())
        all_features = torch.cat((all_features, expected[-1:]))
        all_tokens = torch.cat((all_tokens, token))
        last = forward(last, token, NUM_PROMPT + number)
        expected = reference.outputs(all_features, all_tokens)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", slow_after(3, range(NUM_MODELS)))
def test_drafts_equal_the_formula(family: str, seed: int, tmp_path: Path) -> None:
    make_hybrid_model(family, seed, tmp_path)
    add_mtp(tmp_path, seed, is_stacked=seed % 2 == 1)
    target, draft = load(tmp_path)
    assert draft.weights.embedding is target.weights.embedding and draft.weights.head is target.weights.head
    assert_drafts(target, draft, Reference(tmp_path), seed)


@pytest.mark.parametrize("family", LATENT_FAMILIES)
@pytest.mark.parametrize("seed", slow_after(3, range(NUM_MODELS)))
def test_drafts_with_latents_equal_the_formula(family: str, seed: int, tmp_path: Path) -> None:
    """With copies of embedding and head in the files, which are not read."""
    make_mtp_model(family, seed, tmp_path, is_stacked=seed % 2 == 1, **LATENT)
    copies = [name for name in load_file(tmp_path / "model.safetensors") if name.endswith(COPIES)]
    edit(tmp_path, **{name: torch.full((160, 48), math.nan) for name in copies})
    target, draft = load(tmp_path)
    assert draft.weights.embedding is target.weights.embedding and draft.weights.head is target.weights.head
    assert draft.empty_kv_cache(1, 16).tensors[0].numel() == 16 * target.spec.attention.kv.size
    assert len(copies) == 2
    assert_drafts(target, draft, LatentReference(tmp_path), seed)


@pytest.mark.parametrize("seed", slow_after(3, range(NUM_MODELS)))
def test_drafts_behind_layers_of_plain_attention_equal_the_formula(seed: int, tmp_path: Path) -> None:
    make_mtp_model("glm4_moe", seed, tmp_path, is_stacked=seed % 2 == 1)
    target, draft = load(tmp_path)
    assert draft.weights.embedding is target.weights.embedding and draft.weights.head is target.weights.head
    assert_drafts(target, draft, ReferenceBehind(tmp_path), seed)


@pytest.mark.parametrize("name", ["joint", "hidden_norm", "latent_norm", "correction"])
def test_planted_faults_with_latents_are_found(name: str, tmp_path: Path) -> None:
    make_mtp_model("deepseek_v3", 0, tmp_path, **LATENT)
    target, draft = load(tmp_path)
    (layer,) = draft.weights.layers
    mixer, channel = layer.mixer, layer.channel
    if name == "latent_norm":
        mixer = dataclasses.replace(mixer, latent_norm=mixer.latent_norm * 1.01)
    if name == "correction":
        channel = dataclasses.replace(channel, correction=channel.correction.roll(1))
    weights = dataclasses.replace(
        draft.weights, layers=(dataclasses.replace(layer, mixer=mixer, channel=channel),)
    )
    if name == "joint":  # the feature first
        weights = dataclasses.replace(weights, joint=weights.joint.roll(draft.config.hidden_size, 1))
    if name == "hidden_norm":
        weights = dataclasses.replace(weights, hidden_norm=weights.embedding_norm)
    draft.weights = weights
    with pytest.raises(AssertionError):
        assert_drafts(target, draft, LatentReference(tmp_path), 0)


def test_the_output_after_the_norm_is_the_next_feature(tmp_path: Path) -> None:
    make_mtp_model("glm4_moe_lite", 0, tmp_path, **LATENT)
    target, draft = load(tmp_path)
    assert draft.config.is_output_normed
    draft.config = replace(draft.config, is_output_normed=False)
    with pytest.raises(AssertionError):
        assert_drafts(target, draft, LatentReference(tmp_path), 0)


def wrong_token(draft: DraftDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = draft.forward
    monkeypatch.setattr(draft, "forward", lambda x, ids, *rest: forward(x, ids.roll(1), *rest))


def halves(draft: DraftDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    joint = draft.weights.joint.roll(draft.config.hidden_size, 1)
    draft.weights = dataclasses.replace(draft.weights, joint=joint)


@pytest.mark.parametrize("fault", [wrong_token, halves])
def test_planted_faults_are_found(
    fault: Callable[[DraftDecoder, pytest.MonkeyPatch], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_hybrid_model("qwen3_5", 0, tmp_path)
    add_mtp(tmp_path)
    target, draft = load(tmp_path)
    fault(draft, monkeypatch)
    with pytest.raises(AssertionError):
        assert_drafts(target, draft, Reference(tmp_path), 0)


def test_features_are_outputs_after_the_final_norm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_hybrid_model("qwen3_5", 1, tmp_path)
    add_mtp(tmp_path)
    target, draft = load(tmp_path)
    tokens = torch.arange(3, 40)
    with torch.no_grad():
        expected = model.model(tokens[None], use_cache=False).last_hidden_state[0]
    assert_near(features_of(target, draft, tokens), expected.double(), inner=INNER, depth=16)
    monkeypatch.setattr(draft, "fuse", lambda aux_hidden, hidden: hidden)  # before the norm
    with pytest.raises(AssertionError):
        assert_near(features_of(target, draft, tokens), expected.double(), inner=INNER, depth=16)


@pytest.mark.parametrize("family", FAMILIES)
def test_random_layers(family: str, tmp_path: Path) -> None:
    make_hybrid_model(family, 0, tmp_path)
    add_mtp(tmp_path)
    target, _ = load(tmp_path)
    first, again, other = (random_mtp(target, seed) for seed in (4, 4, 5))
    assert torch.equal(first.weights.joint, again.weights.joint)
    assert not torch.equal(first.weights.joint, other.weights.joint)
    assert first.weights.final_norm.abs().max() < 0.2
    output = first.weights.layers[0].mixer.output
    assert output.std() == pytest.approx(output.shape[1] ** -0.5, rel=0.3)


def edit(folder: Path, **tensors: torch.Tensor | None) -> None:
    file = folder / "model.safetensors"
    stored: dict[str, Any] = load_file(file) | tensors
    save_file({name: tensor for name, tensor in stored.items() if tensor is not None}, file)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"mtp.layers.0.self_attn.q_norm.weight": None}, r"tensor mtp\.layers\.0\.self_attn\.q_norm\.weight"),
        ({"mtp.norm.weight": torch.ones(5)}, r"mtp\.norm\.weight has shape \[5\], expected"),
        ({"mtp.embed_tokens.weight": torch.ones(5)}, r"mtp\.embed_tokens\.weight of shape \[5\] is not part"),
    ],
)
def test_wrong_tensors_are_named(tensors: dict[str, Any], message: str, tmp_path: Path) -> None:
    make_hybrid_model("qwen3_5", 0, tmp_path)
    add_mtp(tmp_path)
    edit(tmp_path, **tensors)
    with pytest.raises(ModelLoadError, match=message):
        load(tmp_path)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("self_attn.kv_b_proj.weight", None, r"kv_b_proj\.weight of shape \[.*\] is missing"),
        ("shared_head.norm.weight", torch.ones(5), r"shared_head\.norm\.weight has shape \[5\], expected"),
        ("more.weight", torch.ones(5), r"layers\.2\.more\.weight of shape \[5\] is not part of this draft"),
        (
            "embed_tokens.weight",
            torch.ones(160, 5),
            r"embed_tokens\.weight has shape \[160, 5\], expected \[160, 48\], as model\.embed_tokens",
        ),
        (
            "shared_head.head.weight",
            torch.ones(9, 48),
            r"shared_head\.head\.weight has shape \[9, 48\], expected \[160, 48\], as lm_head\.weight",
        ),
    ],
)
def test_wrong_tensors_with_latents_are_named(
    name: str, tensor: torch.Tensor | None, message: str, tmp_path: Path
) -> None:
    """Tensors of the model's other layers, which have the same prefix, are none of the layer's."""
    make_mtp_model("deepseek_v3", 0, tmp_path, num_hidden_layers=2, **LATENT)
    load(tmp_path)
    edit(tmp_path, **{f"model.layers.2.{name}": tensor})
    with pytest.raises(ModelLoadError, match=message):
        load(tmp_path)


def test_copies_may_be_left_out(tmp_path: Path) -> None:
    make_mtp_model("deepseek_v3", 0, tmp_path, **LATENT)
    _, expected = load(tmp_path)
    copies = [name for name in load_file(tmp_path / "model.safetensors") if name.endswith(COPIES)]
    edit(tmp_path, **dict.fromkeys(copies))
    _, draft = load(tmp_path)
    assert torch.equal(draft.weights.joint, expected.weights.joint)


@pytest.mark.parametrize("form", ["fp8", "int4"])
def test_quantised_layers_are_near(form: DraftForm, tmp_path: Path) -> None:
    make_hybrid_model("qwen3_5", 0, tmp_path, intermediate_size=48)
    add_mtp(tmp_path)
    target, draft = load(tmp_path)
    quantised = load_mtp(target, resolve(tmp_path).tensors(), form=form)
    expected = draft.weights.joint
    found = quantised.weights.joint.dequantise(torch.float32)
    error = (found - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    assert 0.0 < error < 0.2
    assert quantised.weights.embedding is target.weights.embedding


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_are_kept_as_files_store_them(family: str, tmp_path: Path) -> None:
    """In a model that is kept as stored: FP8 in blocks, of the same numbers as the expanded layer."""
    make_hybrid_model(family, 0, tmp_path / "plain", hidden_size=160, intermediate_size=144)
    add_mtp(tmp_path / "plain")
    ignored = (
        "lm_head",
        "embed_tokens",
        "in_proj_a",
        "in_proj_b",
        "mlp.gate.",
        "shared_expert_gate",
        "mtp.fc",
    )
    write_checkpoint(
        tmp_path / "plain", "fp8, blocks of 128", tmp_path / "fp8", tmp_path / "twin", ignored=ignored
    )
    _, expected = load(tmp_path / "twin")
    draft = factory_of(tmp_path / "fp8", weights="stored").draft
    layer, twin = draft.weights.layers[0], expected.weights.layers[0]
    for name, matrix in layer.mixer.matrices.items():
        assert isinstance(matrix, Fp8Weight | StackedWeight), name
        assert torch.equal(matrix.dequantise(torch.float32), twin.mixer.matrices[name])
    assert isinstance(draft.weights.joint, torch.Tensor)
    if family == "qwen3_5":
        assert torch.equal(dequantised(layer.channel.gate_up, torch.float32), twin.channel.gate_up)
        assert isinstance(layer.channel.down, Fp8Weight)
    else:
        assert all(isinstance(expert, Fp8Weight) for expert in layer.channel.down)


def test_layers_with_latents_are_kept_as_files_store_them(tmp_path: Path) -> None:
    """Matrices of heads are expanded, as in the model's other layers."""
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 2, "hidden_size": 160, "q_lora_rank": 144}
    heads = {"kv_lora_rank": 136, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 130}
    experts = {"moe_intermediate_size": 136, "n_group": 1, "topk_group": 1}
    make_mtp_model("deepseek_v3", 0, tmp_path / "plain", num_hidden_layers=2, **sizes, **heads, **experts)
    write_checkpoint(
        tmp_path / "plain",
        "fp8, blocks of 128",
        tmp_path / "fp8",
        tmp_path / "twin",
        ignored=("lm_head", "embed_tokens", "mlp.gate.", "eh_proj", "shared_head"),
    )
    _, expected = load(tmp_path / "twin")
    draft = factory_of(tmp_path / "fp8", weights="stored").draft
    layer, twin = draft.weights.layers[0], expected.weights.layers[0]
    for name, matrix in layer.mixer.matrices.items():
        assert isinstance(matrix, Fp8Weight | StackedWeight), name
        assert torch.equal(matrix.dequantise(torch.float32), twin.mixer.matrices[name])
    assert torch.equal(layer.mixer.up, twin.mixer.up)
    assert all(isinstance(expert, Fp8Weight) for expert in layer.channel.down)
    assert isinstance(draft.weights.joint, torch.Tensor)


def test_odd_columns_are_named(tmp_path: Path) -> None:
    make_hybrid_model("qwen3_5", 0, tmp_path, intermediate_size=47)
    add_mtp(tmp_path)
    target, _ = load(tmp_path)
    message = r'down_proj\.weight has 47 columns, an odd number: expected draft_weights other than "int4"'
    with pytest.raises(ModelLoadError, match=message):
        load_mtp(target, resolve(tmp_path).tensors(), form="int4")


def factory_of(folder: Path, **fields: Any) -> Any:
    source = resolve(folder)
    config = EngineConfig(
        **{"device": "cpu", "dtype": "float32", "speculation": Speculation(draft="mtp")} | fields
    )
    spec = read_spec(source.config)
    check_mtp(config, spec)
    target = Decoder.random(spec, device="cpu", dtype=torch.float32)
    return open_drafter_factory(config, target, lambda *_: None, source)


@pytest.mark.parametrize(
    ("settings", "tensors"),
    [
        ({"mtp_num_hidden_layers": 0}, {}),
        ({"mtp_num_hidden_layers": 2}, {}),
        ({"mtp_use_dedicated_embeddings": True}, {}),
        ({}, {"mtp.fc.weight": None}),
    ],
)
def test_models_without_the_layer_are_refused(
    settings: dict[str, Any], tensors: dict[str, Any], tmp_path: Path
) -> None:
    make_hybrid_model("qwen3_5", 0, tmp_path)
    add_mtp(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    edit(tmp_path, **tensors)
    with pytest.raises(ConfigError, match="MTP layer|no tensor mtp.fc.weight") as caught:
        factory_of(tmp_path)
    assert caught.value.field == "draft"


@pytest.mark.parametrize("number", [0, 2, None])
def test_models_with_latents_without_the_layer_are_refused(number: int | None, tmp_path: Path) -> None:
    """None: the files have no tensor of it."""
    make_mtp_model("glm4_moe_lite", 0, tmp_path, **LATENT)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    joint = f"model.layers.{config['num_hidden_layers']}.eh_proj.weight"
    if number is None:
        edit(tmp_path, **{joint: None})
    else:
        file.write_text(json.dumps(config | {"num_nextn_predict_layers": number}))
    with pytest.raises(ConfigError, match="has no MTP layer" if number is not None else f"no tensor {joint}"):
        factory_of(tmp_path)


def test_draft_weights_of_experts_are_refused(tmp_path: Path) -> None:
    make_hybrid_model("qwen3_5_moe", 0, tmp_path)
    add_mtp(tmp_path)
    with pytest.raises(ConfigError) as caught:
        factory_of(tmp_path, speculation=Speculation(draft="mtp", draft_weights="fp8"))
    assert caught.value.field == "draft_weights"


def test_settings_of_heads_are_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        Speculation(draft="mtp", aux_layer_convention="output")
    assert caught.value.field == "aux_layer_convention"


@pytest.mark.parametrize("family", ["qwen3_5", "glm4_moe_lite"])
@pytest.mark.parametrize("load_form", ["auto", "random"])
def test_a_layer_that_is_not_used_is_logged(
    load_form: str, family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if family == "qwen3_5":
        make_hybrid_model(family, 0, tmp_path)
    else:
        draw_model(family, 0, num_nextn_predict_layers=0).save_pretrained(tmp_path)
        save_tokenizer(tmp_path, 160)
    caplog.set_level(logging.INFO, "drift_sdk")
    factory_of(tmp_path, speculation=None, load=load_form)
    assert "MTP" not in caplog.text
    add_mtp(tmp_path)
    factory_of(tmp_path, load=load_form)
    assert "MTP" not in caplog.text
    for speculation in (None, Speculation(draft=NGram())):
        caplog.clear()
        factory_of(tmp_path, speculation=speculation, load=load_form)
        assert "MTP layer that is not used" in caplog.text
