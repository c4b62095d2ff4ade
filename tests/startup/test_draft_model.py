"""Loading of small models as drafts."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from assistant_zoo import make_assistant
from dflash_zoo import make_dflash
from draft_zoo import make_draft
from family_zoo import draw_model
from model_zoo import make_model, save_tokenizer
from mtp_zoo import make_mtp_model
from tiny_llama import tiny_llama

from drift_sdk import (
    Chain,
    ConfigError,
    DynamicTree,
    EngineConfig,
    ModelLoadError,
    NGram,
    Speculation,
    inspect,
)
from drift_sdk.events import ignore_progress
from drift_sdk.execution.drafter_factory import (
    NO_DRAFTER,
    DrafterFactory,
    HybridDrafterFactory,
    ModelDrafterFactory,
)
from drift_sdk.families import read_spec
from drift_sdk.loading.source import Source
from drift_sdk.models.channels import MlpWeights
from drift_sdk.models.decoder import Decoder
from drift_sdk.startup.executor_factory import kv_demand
from drift_sdk.startup.graph_startup import weights_to_tune
from drift_sdk.startup.model_parts import open_drafter_factory
from drift_sdk.startup.model_startup import open_model

VOCAB_SIZE = 320
TARGET = tiny_llama(vocab_size=VOCAB_SIZE, num_hidden_layers=2)


def make_folder(folder: Path, **changes: Any) -> Path:
    """A model's folder without weights."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TARGET | changes))
    save_tokenizer(folder, VOCAB_SIZE)
    return folder


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return make_folder(tmp_path / "target")


def opened(target: Path, draft: Path, **fields: Any) -> DrafterFactory:
    config = EngineConfig(load="random", speculation=Speculation(draft=draft, **fields))
    decoder = Decoder.random(read_spec(TARGET), device="cpu", dtype=torch.float32)
    return open_drafter_factory(config, decoder, lambda stage, fraction: None, Source(target))


def test_model_of_the_same_vocabulary_drafts(target: Path, tmp_path: Path) -> None:
    small = make_folder(tmp_path / "small", num_hidden_layers=1, hidden_size=16)
    factory = opened(target, small)
    assert isinstance(factory, ModelDrafterFactory)
    assert factory.needs_draft_kv and factory.needs_first_token and factory.always_drafts
    assert not factory.needs_history
    assert (factory.draft.spec.num_layers, factory.draft_choices) == (1, (1, 3))

    both = opened(target, small, ngrams=NGram())
    assert isinstance(both, HybridDrafterFactory)
    assert both.needs_draft_kv and both.needs_first_token and both.always_drafts and both.needs_history
    assert both.draft_choices == factory.draft_choices

    # Memory and tuning at start include it.
    decoder = Decoder.random(read_spec(TARGET), device="cpu", dtype=torch.float32)
    kv = [
        kv_demand(EngineConfig(), decoder, each, 4, "eager").bytes_per_block
        for each in (NO_DRAFTER, factory, both)
    ]
    assert kv[1] == kv[2] == kv[0] * 3 // 2
    assert factory.num_graph_layers == both.num_graph_layers == 3  # a layer for each of three drafts
    tuned = {weight.key for weight in weights_to_tune(decoder.weights, factory.draft.weights)}
    alone = {weight.key for weight in weights_to_tune(decoder.weights, None)}
    assert tuned > alone


def test_other_vocabularies_are_rejected(target: Path, tmp_path: Path) -> None:
    smaller = make_folder(tmp_path / "smaller", vocab_size=VOCAB_SIZE - 1)
    with pytest.raises(ModelLoadError) as caught:
        opened(target, smaller)
    expected = f"vocab_size={VOCAB_SIZE - 1}: expected {VOCAB_SIZE}, the vocabulary of the model"
    assert str(caught.value).startswith(f"draft: {smaller}: {expected}")

    other = make_folder(tmp_path / "other")
    tokens = json.loads((other / "tokenizer.json").read_text())
    vocab = tokens["model"]["vocab"]
    vocab["!"], vocab["#"] = vocab["#"], vocab["!"]
    (other / "tokenizer.json").write_text(json.dumps(tokens))
    with pytest.raises(ModelLoadError, match=r"token \d+ is '#': expected '!', as in the vocabulary"):
        opened(target, other)

    # Another order of the file, or no file, is no other vocabulary.
    vocab["!"], vocab["#"] = vocab["#"], vocab["!"]
    (other / "tokenizer.json").write_text(json.dumps(tokens, indent=1))
    assert isinstance(opened(target, other), ModelDrafterFactory)
    (other / "tokenizer.json").unlink()
    assert isinstance(opened(target, other), ModelDrafterFactory)


def test_model_that_is_not_required_is_left_out(
    target: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    smaller = make_folder(tmp_path / "smaller", vocab_size=VOCAB_SIZE - 1)
    assert opened(target, smaller, required=False) is NO_DRAFTER
    assert "decoding without speculation" in caplog.text


@pytest.mark.parametrize(
    "fields, said",
    [
        ({"shape": DynamicTree()}, "shape=.*expected a Chain with a model as the draft"),
        ({"aux_layer_convention": "output"}, "aux_layer_convention='output': expected None with a model"),
    ],
)
def test_settings_of_heads_are_rejected(
    target: Path, tmp_path: Path, fields: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        opened(target, make_folder(tmp_path / "small"), **fields)


def test_quantised_files_are_not_quantised_again(target: Path, tmp_path: Path) -> None:
    table = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    small = make_folder(tmp_path / "small", quantization_config=table)
    with pytest.raises(ConfigError, match="draft_weights='int4': expected None: the draft's files are"):
        opened(target, small, draft_weights="int4")


def test_quantised_draft_keeps_its_head(target: Path, tmp_path: Path) -> None:
    factory = opened(target, make_folder(tmp_path / "small", hidden_size=64), draft_weights="fp8")
    weights = factory.draft.weights
    channel = weights.layers[0].channel
    assert isinstance(weights.head, torch.Tensor) and isinstance(channel, MlpWeights)
    assert not isinstance(channel.down, torch.Tensor)


def test_short_context_is_a_warning(target: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    small = make_folder(tmp_path / "small", max_position_embeddings=32)
    with caplog.at_level(logging.WARNING, "drift_sdk"):
        opened(target, small)
    assert "a context of 32 tokens" in caplog.text


def make_drafts(folder: Path, kind: str) -> Path | str:
    """Save a model, and what drafts for it."""
    if kind == "mtp":
        make_mtp_model("glm4_moe", 0, folder)
        return kind

    if kind == "assistant":
        model = draw_model("gemma4", 0)
        model.save_pretrained(folder)
        make_assistant(0, folder / kind, model)
        return folder / kind

    make_model(1, folder)
    if kind == "dflash":
        make_dflash(3, folder / kind, folder)
    elif kind == "model":
        return folder
    else:
        make_draft(kind, folder / kind, folder)
    return folder / kind


@pytest.mark.parametrize(
    ("kind", "options", "line"),
    [
        ("specforge", {}, "drafts of an EAGLE-3 head, in chains of up to 2 tokens"),
        (
            "specforge",
            {"shape": DynamicTree(top_k=2, depth=2, num_draft_tokens=3)},
            "drafts of an EAGLE-3 head, in trees of up to 3 tokens",
        ),
        ("peagle", {}, "drafts of a P-EAGLE head, in chains of up to 2 tokens"),
        ("dflash", {"ngrams": NGram()}, "drafts of a DFlash head and n-grams, in chains of up to 2 tokens"),
        ("mtp", {}, "drafts of the model's MTP layer, in chains of up to 2 tokens"),
        ("assistant", {}, "drafts of an assistant, in chains of up to 2 tokens"),
        ("model", {}, "drafts of a small model, in chains of up to 2 tokens"),
        ("model", {"draft": NGram()}, "drafts of n-grams, in chains of up to 2 tokens"),
        ("model", None, ""),
    ],
)
def test_the_log_says_what_drafts(
    kind: str, options: dict[str, Any] | None, line: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "drift_sdk")
    draft = make_drafts(tmp_path, kind)
    fields: dict[str, Any] = {"draft": draft, "shape": Chain(2)}
    speculation = None if options is None else Speculation(**fields | options)
    config = EngineConfig(device="cpu", max_model_len=32, kv_cache_tokens=64, speculation=speculation)
    open_model(tmp_path, config, ignore_progress)
    assert [one for one in caplog.messages if one.startswith("drafts of")] == ([line] if line else [])


@pytest.mark.parametrize(
    ("kind", "found"),
    [("assistant", "an assistant"), ("dflash", "a draft head"), ("peagle", "a draft head")],
)
def test_drafts_in_the_place_of_models_are_named(kind: str, found: str, tmp_path: Path) -> None:
    draft = make_drafts(tmp_path, kind)
    message = f"{draft} holds {found}: expected the model that it drafts for"
    with pytest.raises(ModelLoadError, match=message):
        open_model(draft, EngineConfig(device="cpu"), ignore_progress)
    assert message in inspect(draft, EngineConfig(device="cpu")).reasons[0]
