"""DFlash heads: drafts against the formula in float64, configs of all formats, and files that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from decoder_parity import load_decoder, poisoned_cache, random_tokens, shuffled_blocks
from dflash_zoo import NUM_HEADS, DFlashReference, draw_dflash, make_dflash
from model_zoo import make_model
from safetensors.torch import load_file, save_file
from tolerances import assert_near

from drift_sdk.errors import ModelLoadError
from drift_sdk.loading.source import resolve
from drift_sdk.models.attention import AttentionBatch, ParallelAttentionBatch, SequenceRows
from drift_sdk.models.decoder import Decoder
from drift_sdk.models.dflash import DFlashConfig, DFlashDecoder, is_dflash
from drift_sdk.quantised.weight import QuantisedWeight

BLOCK_SIZE, NUM_BLOCKS = 8, 16
CHUNKS = (1, 20, 7, 15)
INNER = 128
TARGET, SCALED = 1, 32
"""Models of the zoo: a Llama, and one whose embedding is multiplied."""


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    make_model(TARGET, folder)
    return folder


@pytest.fixture(scope="module")
def target(target_folder: Path) -> Decoder:
    return load_decoder(target_folder)


@torch.inference_mode()
def assert_parity(draft: DFlashDecoder, target: Decoder, reference: DFlashReference) -> None:
    """Compare a draft behind every chunk of a sequence; slots that are not its own hold NaN."""
    tokens = random_tokens(target.spec, sum(CHUNKS) + 1, seed=3)
    cache, blocks = poisoned_cache(target.spec), shuffled_blocks()
    batch = AttentionBatch([SequenceRows(blocks, 0, len(tokens))], cache)
    _, streams = target.forward(tokens, batch, cache, range(target.spec.num_layers + 1))
    assert torch.equal(draft.target_ids, reference.ids)
    assert draft.config.num_masks == reference.num_masks
    own = draft.empty_kv_cache(NUM_BLOCKS, BLOCK_SIZE)
    for tensor in own.tensors:
        tensor.fill_(float("nan"))
    blocks, start = shuffled_blocks(NUM_BLOCKS), 0
    for num_rows in CHUNKS:
        rows = slice(start, start + num_rows)
        start = rows.stop
        features = draft.features([streams[layer][rows] for layer in draft.aux_layers])
        draft.store(features, AttentionBatch([SequenceRows(blocks, rows.start, num_rows)], own), own)
        size = 1 + reference.num_masks
        batch = ParallelAttentionBatch(
            [SequenceRows(blocks, start, size)], own, is_causal=draft.config.is_causal
        )
        inputs = torch.full((size,), draft.config.mask_token_id)
        inputs[0] = tokens[start]
        kept = [tensor.clone() for tensor in own.tensors]
        logits = draft.logits(draft.forward(inputs, batch, own)[1:])
        for one, other in zip(kept, own.tensors, strict=True):
            assert torch.equal(one.nan_to_num(), other.nan_to_num())
        expected = reference.draft([stream[:start] for stream in streams[1:]], int(tokens[start]))
        assert logits.dtype == torch.float32
        depth = 2 + draft.config.shape.num_layers
        assert_near(logits, expected, inner=INNER, depth=depth, name=f"logits at {start}")


@pytest.mark.parametrize("seed", range(NUM_HEADS))
def test_draft_equals_the_formula(seed: int, target: Decoder, target_folder: Path, tmp_path: Path) -> None:
    make_dflash(seed, tmp_path, target_folder)
    draft = DFlashDecoder.load(resolve(tmp_path), target)
    embedding, head = target.weights.embedding, target.weights.head
    assert isinstance(embedding, torch.Tensor) and isinstance(head, torch.Tensor)
    assert_parity(draft, target, DFlashReference(tmp_path, embedding, head))


def test_heads_cover_the_options(target_folder: Path) -> None:
    settings = json.loads((target_folder / "config.json").read_text())
    configs = [draw_dflash(seed, settings) for seed in range(NUM_HEADS)]
    layers = [config.get("transformer_layer_config", config) for config in configs]
    assert {"transformer_layer_config" in config for config in configs} == {True, False}
    assert {layer["attention_bias"] for layer in layers} == {True, False}
    assert {"layer_types" in layer for layer in layers} == {True, False}
    assert {config.get("dflash_config", {}).get("causal") for config in configs} == {True, None}
    assert {"rope_parameters" in layer for layer in layers} == {True, False}


def test_the_embedding_is_what_the_target_makes_of_it(tmp_path: Path) -> None:
    """In a target whose embedding is multiplied."""
    make_model(SCALED, tmp_path / "target")
    make_dflash(0, tmp_path / "draft", tmp_path / "target")
    target = load_decoder(tmp_path / "target")
    assert target.embedding_multiplier != 1.0
    draft = DFlashDecoder.load(resolve(tmp_path / "draft"), target)
    embedding = target.weights.embedding * target.embedding_multiplier
    assert_parity(draft, target, DFlashReference(tmp_path / "draft", embedding, target.weights.head))


@pytest.mark.parametrize("form", ["fp8", "int4"])
def test_quantised_matrices(form: str, target: Decoder, target_folder: Path, tmp_path: Path) -> None:
    make_dflash(1, tmp_path, target_folder)
    whole = DFlashDecoder.load(resolve(tmp_path), target)
    draft = DFlashDecoder.load(resolve(tmp_path), target, form=form)
    for layer, expected in zip(draft.weights.layers, whole.weights.layers, strict=True):
        assert isinstance(layer.mixer.qkv, QuantisedWeight)
        difference = layer.mixer.qkv.dequantise(torch.float32) - expected.mixer.qkv
        assert 0 < difference.abs().max() < 0.3 * expected.mixer.qkv.abs().max()


def test_random_heads_are_the_same_for_the_same_seed(
    target: Decoder, target_folder: Path, tmp_path: Path
) -> None:
    make_dflash(1, tmp_path, target_folder)
    (tmp_path / "model.safetensors").unlink()
    source = resolve(tmp_path, has_weights=False)
    one, other = (DFlashDecoder.load(source, target, has_weights=False) for _ in range(2))
    assert torch.equal(one.weights.fc, other.weights.fc)
    assert one.weights.fc.std() > 0


@pytest.mark.parametrize(
    ("seed", "convention", "shift"),
    [(0, None, 1), (0, "output", 1), (0, "boundary", 0), (1, None, 0), (1, "boundary", 0)],
)
def test_layer_ids(
    seed: int, convention: str | None, shift: int, target: Decoder, target_folder: Path
) -> None:
    config = draw_dflash(seed, json.loads((target_folder / "config.json").read_text()))
    ids = config.get("aux_hidden_state_layer_ids") or config["dflash_config"]["target_layer_ids"]
    found = DFlashConfig.from_hf(config, target.spec, aux_layer_convention=convention)
    assert found.aux_layers == tuple(one + shift for one in ids)


FLAT, NESTED = 0, 1


@pytest.mark.parametrize(
    ("seed", "changes", "message"),
    [
        (FLAT, {"architectures": ["Qwen3DSparkModel"]}, "DSpark, whose Markov head chooses .* not implem"),
        (NESTED, {"speculators_model_type": None, "speculators_config": {"algorithm": "dspark"}}, "DSpark"),
        (FLAT, {"projector_type": "dspark"}, "DSpark"),
        (NESTED, {"speculators_model_type": "dflash2", "speculators_config": None}, "DFlash 2, whose layers"),
        (
            NESTED,
            {"speculators_model_type": "eagle3"},
            "algorithm='dflash', but speculators_model_type='eagle3'",
        ),
        (FLAT, {"model_type": "llama"}, "model_type='llama': expected 'qwen3'"),
        (FLAT, {"layer_types": False}, "layer_types=False: expected 2 of 'full_attention'"),
        (FLAT, {"architectures": True}, "architectures=True: expected a list"),
        (NESTED, {"sample_from_anchor": True}, "sample_from_anchor=True: only False is implemented"),
        (FLAT, {"logit_scale": 0.5}, "logit_scale=0.5: only 1.0 is implemented"),
        (NESTED, {"block_size": None}, "block_size is missing"),
        (NESTED, {"mask_token_id": None}, "mask_token_id is missing"),
        (NESTED, {"mask_token_id": 500}, "mask_token_id=500: expected one token id below vocab_size=500"),
        (NESTED, {"is_causal": True, "causal": False}, "is_causal=True, but causal=False: expected the same"),
        (NESTED, {"block_size": 1}, "block_size=1: expected 2 to 256"),
        (FLAT, {"block_size": "8"}, "block_size='8': expected 2 to 256"),
        (FLAT, {"dflash_config": {"mask_token_id": 3}}, "no layers of the target: expected target_layer_ids"),
        (NESTED, {"aux_hidden_state_layer_ids": []}, r"aux_hidden_state_layer_ids=\[\]: expected one layer"),
        (NESTED, {"aux_hidden_state_layer_ids": [9]}, r"=\[9\] as boundary ids: expected different ones"),
        (NESTED, {"target_layer_ids": [1]}, "target_layer_ids and aux_hidden_state_layer_ids: expected"),
        (FLAT, {"num_target_layers": 7}, "num_target_layers=7, its target has 3: expected the same"),
        (FLAT, {"vocab_size": 400}, "the draft has vocab_size=400, its target 500"),
        (FLAT, {"mask_token_id": 1}, "mask_token_id=1, but .* in dflash_config: expected the same"),
        (FLAT, {"dflash_config": {"selector": 2}}, "dflash_config has selector=2, which is not known"),
        (FLAT, {"hidden_act": "gelu_new"}, "only 'silu' is implemented in drafts"),
        (FLAT, {"layer_types": ["sliding_attention"] * 3}, "sliding_window"),
    ],
)
def test_what_is_missing_or_does_not_fit_is_named(
    seed: int, changes: dict[str, Any], message: str, target: Decoder, target_folder: Path, tmp_path: Path
) -> None:
    make_dflash(seed, tmp_path, target_folder)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    if changes.get("layer_types"):
        changes = {"layer_types": ["sliding_attention"] * config["num_hidden_layers"]}
    file.write_text(json.dumps(config | changes))
    assert is_dflash(config | changes)
    with pytest.raises(ModelLoadError, match=message) as error:
        DFlashDecoder.load(resolve(tmp_path), target)
    assert str(error.value).startswith(f"draft: {tmp_path}: config: ")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fc.weight": None}, "tensor fc.weight of shape .* is missing"),
        ({"hidden_norm.weight": torch.ones(3)}, r"hidden_norm.weight has shape \[3\], expected \[64\]"),
        ({"markov_head.markov_w1": torch.ones(3)}, "markov_head.markov_w1 of shape .* is not part of"),
        ({"norm.weight": torch.full((64,), torch.nan)}, "norm.weight"),
        ({"d2t": None}, r"tensor d2t of shape \[96\] is missing"),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    changes: dict[str, torch.Tensor | None],
    message: str,
    target: Decoder,
    target_folder: Path,
    tmp_path: Path,
) -> None:
    make_dflash(1, tmp_path, target_folder)
    file = tmp_path / "model.safetensors"
    kept = {name: tensor for name, tensor in load_file(file).items() if changes.get(name, tensor) is not None}
    save_file(kept | {name: tensor for name, tensor in changes.items() if tensor is not None}, file)
    with pytest.raises(ModelLoadError, match=message):
        DFlashDecoder.load(resolve(tmp_path), target)
