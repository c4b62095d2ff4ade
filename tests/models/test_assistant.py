"""Assistants of Gemma 4: drafts against transformers in float32, configs, and files that are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from assistant_zoo import draft_of_transformers, make_assistant
from decoder_parity import poisoned_cache, random_tokens, shuffled_blocks
from family_zoo import draw_model, own_decoder
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from tolerances import assert_near

from drift_sdk.errors import ModelLoadError
from drift_sdk.loading.source import resolve
from drift_sdk.models.assistant import AssistantConfig, AssistantDecoder, NewestRows, is_assistant
from drift_sdk.models.attention import AttentionBatch, SequenceRows
from drift_sdk.models.decoder import Decoder
from drift_sdk.quantised.weight import QuantisedWeight

NUM_MODELS, NUM_DRAFTS, NUM_CLUSTERS = 8, 4, 10
CHUNKS = (1, 20, 7, 15)
INNER = 128


def loaded(seed: int, folder: Path, **options: Any) -> tuple[Any, Any, Decoder, AssistantDecoder]:
    """A model and its assistant: of transformers, and of the package."""
    model = draw_model("gemma4", seed)
    assistant = make_assistant(seed, folder, model, **options)
    target = own_decoder(model)
    return model, assistant, target, AssistantDecoder.load(resolve(folder), target)


@torch.inference_mode()
def assert_parity(
    model: Any, assistant: Any, target: Decoder, draft: AssistantDecoder, *, shift: int = 0
) -> None:
    """Compare drafts behind every chunk of a sequence; slots that are not its own, and those of the newest
    token and later ones, hold NaN. shift: added to the positions of drafted rows."""
    tokens = random_tokens(target.spec, sum(CHUNKS) + 1, seed=3)
    cache, blocks, start = poisoned_cache(target.spec), shuffled_blocks(), 0
    for num_rows in CHUNKS:
        rows = slice(start, start + num_rows)
        batch = AttentionBatch([SequenceRows(blocks, start, num_rows)], cache)
        hidden, _ = target.forward(tokens[rows], batch, cache)
        start = rows.stop
        known = tokens[: start + 1]
        expected = draft_of_transformers(model, assistant, known.tolist(), NUM_DRAFTS)
        kept = [tensor.clone() for tensor in cache.tensors]
        feature, token = target.final_normed(hidden[-1:]), known[-1:]
        for depth, (wanted, next_feature) in enumerate(expected, 1):
            newest = NewestRows([SequenceRows(blocks, start - 1, 1)], cache)
            newest.positions += shift
            output = draft.forward(feature, token, newest, cache)
            logits = draft.logits(output)[0]
            # transformers has small numbers for tokens of other clusters.
            is_proposed = logits.isfinite()
            assert is_proposed.all() == (draft.config.num_clusters == 0)
            name = f"draft {depth} behind {start} tokens"
            assert_near(logits[is_proposed], wanted[is_proposed], inner=INNER, depth=16, name=name)
            token = wanted.argmax().view(1)
            assert is_proposed[token] and logits.argmax() == token
            handed_on, feature = draft.next_features(output)[0], next_feature[None]
            assert_near(handed_on, next_feature, inner=INNER, depth=16, name=f"feature of {name}")
        for one, other in zip(kept, cache.tensors, strict=True):
            assert torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))


@pytest.mark.parametrize("seed", range(NUM_MODELS))
def test_drafts_equal_those_of_transformers(seed: int, tmp_path: Path) -> None:
    """Of models whose layers share keys or not, with sequences longer than the window and shorter."""
    num_clusters = NUM_CLUSTERS if seed % 2 else 0
    assert_parity(*loaded(seed, tmp_path, num_clusters=num_clusters))


def test_models_cover_the_options() -> None:
    configs = [draw_model("gemma4", seed).config for seed in range(NUM_MODELS)]
    assert {config.num_kv_shared_layers > 0 for config in configs} == {True, False}
    assert {config.attention_k_eq_v for config in configs} == {True, False}
    assert min(config.sliding_window for config in configs) < 10 < sum(CHUNKS)


def wrong_position(parts: tuple[Any, Any, Decoder, AssistantDecoder]) -> None:
    assert_parity(*parts, shift=-1)


def wrong_layer(parts: tuple[Any, Any, Decoder, AssistantDecoder]) -> None:
    """Another layer of the type in place of the last."""
    model, assistant, target, draft = parts
    last = draft.config.shape.layers[0].mixer.kv_of
    other = next(index for index in target.spec.window_layers if index != last)
    layers = tuple(
        replace(layer, mixer=replace(layer.mixer, kv_of=other)) if layer.mixer.kv_of == last else layer
        for layer in draft.config.shape.layers
    )
    config = replace(draft.config, shape=replace(draft.config.shape, layers=layers))
    assert_parity(model, assistant, target, AssistantDecoder(config, draft.weights, target))


def wrong_feature(parts: tuple[Any, Any, Decoder, AssistantDecoder]) -> None:
    """The residual stream in place of the output after the norm."""
    target = parts[2]
    target.final_normed = lambda hidden: hidden
    assert_parity(*parts)


@pytest.mark.parametrize("fault", [wrong_position, wrong_layer, wrong_feature])
def test_planted_faults_are_found(
    fault: Callable[[tuple[Any, Any, Decoder, AssistantDecoder]], None], tmp_path: Path
) -> None:
    with pytest.raises(AssertionError, match="differ by"):
        fault(loaded(0, tmp_path))


def test_keys_are_of_the_last_layer_of_a_type_that_has_some(tmp_path: Path) -> None:
    """And not of layers that share them."""
    for seed in range(NUM_MODELS):
        model, _, target, draft = loaded(seed, tmp_path / str(seed))
        kinds = model.config.layer_types[: len(target.spec.layers) - model.config.num_kv_shared_layers]
        last = {kind: index for index, kind in enumerate(kinds)}
        own = ["sliding_attention", "sliding_attention", "full_attention"]
        assert [layer.mixer.kv_of for layer in draft.config.shape.layers] == [last[kind] for kind in own]


@pytest.mark.parametrize("form", ["fp8", "int4"])
def test_quantised_layers(form: str, tmp_path: Path) -> None:
    _, _, target, whole = loaded(0, tmp_path)
    draft = AssistantDecoder.load(resolve(tmp_path), target, form=form)
    for layer, expected in zip(draft.weights.layers, whole.weights.layers, strict=True):
        assert isinstance(layer.mixer.qkv, QuantisedWeight)
        difference = layer.mixer.qkv.dequantise(torch.float32) - expected.mixer.qkv
        assert 0 < difference.abs().max() < 0.3 * expected.mixer.qkv.abs().max()
    assert torch.equal(draft.weights.pre, whole.weights.pre)


def test_random_assistants_are_the_same_for_the_same_seed(tmp_path: Path) -> None:
    _, _, target, _ = loaded(0, tmp_path, num_clusters=NUM_CLUSTERS)
    (tmp_path / "model.safetensors").unlink()
    one, other = (AssistantDecoder.load(resolve(tmp_path), target, has_weights=False) for _ in range(2))
    assert torch.equal(one.weights.pre, other.weights.pre)
    assert one.weights.pre.std() > 0
    assert one.weights.clusters.tolist() == [token * NUM_CLUSTERS // 160 for token in range(160)]


@pytest.mark.parametrize("unified", [True, False])
def test_assistants_are_known_by_architecture_and_type(unified: bool, tmp_path: Path) -> None:
    _, _, target, draft = loaded(0, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    if unified:
        config |= {
            "architectures": ["Gemma4UnifiedAssistantForCausalLM"],
            "model_type": "gemma4_unified_assistant",
            "text_config": config["text_config"] | {"model_type": "gemma4_unified_text"},
        }
    assert is_assistant(config)
    assert is_assistant({"model_type": config["model_type"]})
    assert is_assistant({"architectures": config["architectures"]})
    assert not is_assistant(config["text_config"])
    assert not is_assistant({"model_type": {}, "architectures": "Gemma4AssistantForCausalLM"})
    assert AssistantConfig.from_hf(config, target.spec) == draft.config


def test_a_copy_of_the_head_is_not_read(tmp_path: Path) -> None:
    _, _, target, draft = loaded(0, tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, file)
    again = AssistantDecoder.load(resolve(tmp_path), target)
    assert torch.equal(again.weights.head, draft.weights.head)


TEXT = "text_config"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"backbone_hidden_size": 7}, "backbone_hidden_size=7, its target has a hidden size of"),
        ({"backbone_hidden_size": None}, "backbone_hidden_size=None, its target has"),
        ({TEXT: 3}, "text_config=3: expected a table"),
        ({"model_type": "gemma5_assistant"}, "model_type='gemma5_assistant': expected 'gemma4_assistant' or"),
        ({"model_type": []}, r"model_type=\[\]: expected 'gemma4_assistant' or"),
        ({TEXT: {"model_type": "llama"}}, "text_config: model_type='llama': expected 'gemma4_text'"),
        ({TEXT: {"num_kv_shared_layers": 1}}, "num_kv_shared_layers=1: expected 3, all layers"),
        ({TEXT: {"enable_moe_block": True}}, "enable_moe_block=True: only 0 or false is implemented"),
        ({TEXT: {"hidden_size_per_layer_input": 8}}, "hidden_size_per_layer_input=8: only 0 or false"),
        ({TEXT: {"vocab_size": 80}}, "the draft has vocab_size=80, its target 160"),
        ({TEXT: {"sliding_window": 5}}, "layer 0 has sliding_window=5, layer . of its target, .*: expected"),
        ({TEXT: {"head_dim": 4}}, "layer 0 has head_dim=4, layer . of its target"),
        ({TEXT: {"per_layer_config": {"2": {"head_dim": 64}}}}, "layer 2 has head_dim=64, layer . of its"),
        ({TEXT: {"per_layer_config": {"0": {"head_dim": 64}}}}, "per_layer_config="),
        ({TEXT: {"rope_parameters": "theta"}}, "layer 0 has rope_parameters=.*: expected the same"),
        ({"quantization_config": {"quant_method": "fp8"}}, r"quantised files \(fp8\) are refused"),
        ({TEXT: {"quantization_config": {"quant_method": "fp8"}}}, r"quantised files \(fp8\) are refused"),
        ({"quantization_config": 3}, "quantization_config=3: expected a mapping"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings=False: only True is implemented"),
        ({"use_ordered_embeddings": 1}, "use_ordered_embeddings=1: expected true or false"),
        ({"use_ordered_embeddings": True, "num_centroids": 7}, "num_centroids=7: expected a divisor of"),
        (
            {"use_ordered_embeddings": True, "num_centroids": 8, "centroid_intermediate_top_k": 9},
            "centroid_intermediate_top_k=9: expected 1 to 8",
        ),
    ],
)
def test_what_is_missing_or_does_not_fit_is_named(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    _, _, target, _ = loaded(0, tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    text = changes.pop(TEXT, {})
    if isinstance(text, dict):
        if text.get("rope_parameters") == "theta":
            ropes = config[TEXT]["rope_parameters"]
            windowed = ropes["sliding_attention"] | {"rope_theta": 3.0}
            text = {"rope_parameters": ropes | {"sliding_attention": windowed}}
        text = config[TEXT] | text
    file.write_text(json.dumps(config | changes | {TEXT: text}))
    with pytest.raises(ModelLoadError, match=message) as error:
        AssistantDecoder.load(resolve(tmp_path), target)
    assert str(error.value).startswith(f"draft: {tmp_path}: config: ")


def test_a_target_without_layers_of_a_type_is_named(tmp_path: Path) -> None:
    _, _, target, _ = loaded(0, tmp_path)
    model = draw_model("granite", 0, hidden_size=target.spec.hidden_size)
    with pytest.raises(
        ModelLoadError, match="layer 0 is of type 'sliding_attention': expected a target that"
    ):
        AssistantDecoder.load(resolve(tmp_path), own_decoder(model))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pre_projection.weight": None}, "tensor pre_projection.weight of shape .* is missing"),
        ({"post_projection.weight": torch.ones(3)}, r"post_projection.weight has shape \[3\], expected"),
        ({"model.layers.0.self_attn.k_proj.weight": torch.ones(3)}, "k_proj.weight .* is not part of"),
        ({"model.norm.weight": torch.full((40,), torch.nan)}, "model.norm.weight"),
        ({"masked_embedding.centroids.weight": None}, "masked_embedding.centroids.weight .* is missing"),
        ({"masked_embedding.token_ordering": None}, r"token_ordering of shape \[160\] is missing"),
        ({"masked_embedding.token_ordering": torch.zeros(160)}, "token_ordering is stored as"),
        ({"masked_embedding.token_ordering": torch.arange(3)}, r"token_ordering has shape \[3\], expected"),
        (
            {"masked_embedding.token_ordering": torch.arange(160) // 2},
            "values from 0 to 79, 80 different ones: expected each of 0 to 159 once",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    changes: dict[str, torch.Tensor | None], message: str, tmp_path: Path
) -> None:
    _, _, target, _ = loaded(1, tmp_path, num_clusters=NUM_CLUSTERS)
    file = tmp_path / "model.safetensors"
    kept = {name: tensor for name, tensor in load_file(file).items() if changes.get(name, tensor) is not None}
    save_file(kept | {name: tensor for name, tensor in changes.items() if tensor is not None}, file)
    with pytest.raises(ModelLoadError, match=message):
        AssistantDecoder.load(resolve(tmp_path), target)
