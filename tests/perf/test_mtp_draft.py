"""Measurements of a model's own MTP layer, or of its assistant, as the draft: bytes, and runs of a tiny model
on the CPU."""

from __future__ import annotations

import dataclasses
import json
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from slow_cases import slow_after

from drift_sdk import Chain, EngineConfig, Speculation
from drift_sdk.models.decoder import Decoder
from drift_sdk.models.draft_head import random_mtp
from drift_sdk.quantised.formats import Fp8Weight
from drift_sdk.quantised.weight import QuantisedWeight
from perf import speculative
from perf.harness import mtp_draft
from perf.harness.decoding import DecodeOptions
from perf.harness.drafting import Drafting
from perf.harness.mtp_draft import CLUSTERS, Assistant, MtpDraft, assistant_settings
from perf.harness.published import PUBLISHED
from perf.harness.scenario import Scenario
from perf.harness.shapes import Model, prepare
from perf.harness.speculative_options import arguments_of

EXPERTS: dict[str, Any] = {
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "model_type": "qwen3_5_moe_text",
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24,
}


LATENTS: dict[str, Any] = {
    "architectures": ["Glm4MoeLiteForCausalLM"],
    "model_type": "glm4_moe_lite",
    "num_nextn_predict_layers": 1,
    "mlp_layer_types": ["dense", *["sparse"] * 3],
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}


@pytest.fixture(autouse=True)
def quick_bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perf.harness.recording.read_bandwidth_tb_s", lambda device: 0.01)


@pytest.mark.usefixtures("even_clock")
@pytest.mark.parametrize("weights", slow_after(1, [None, "fp8-blocks"]))
def test_the_layer_drafts(weights: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculative, "DecodeOptions", partial(DecodeOptions, lengths=(8, 40)))
    out = tmp_path / "speculative.json"
    form = [] if weights is None else ["--weights", weights]
    speculative.main(
        [
            *("--model", "tiny-hybrid", "--device", "cpu", "--draft", "mtp", "--repeats", "1", *form),
            *("--num-draft-tokens", "2", "--scenario", "batch3-16", "--out", str(out)),
        ]
    )
    plain, drafted = json.loads(out.read_text())["runs"]
    assert plain["dtype"] == drafted["dtype"] == (weights or "float32")
    assert (plain["num_draft_tokens"], drafted["num_draft_tokens"]) == (0, 2)
    assert drafted["draft"] == "mtp"
    assert 1.0 <= drafted["measured_acceptance_length"] <= 3.0 and 0 < drafted["mean_drafts"] <= 2.0


@pytest.mark.parametrize("weights", slow_after(1, ["fp8-blocks", None]))
def test_a_layer_with_latents_drafts(
    weights: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = LATENTS | {"moe_intermediate_size": 128}
    monkeypatch.setitem(PUBLISHED, "tiny-hybrid", PUBLISHED["tiny-hybrid"] | sizes)
    test_the_layer_drafts(weights, tmp_path, monkeypatch)


def test_acceptance_is_simulated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = arguments_of(
        [
            *("--model", "tiny-hybrid", "--draft", "mtp", "--acceptance-length", "3", "--device", "cuda"),
            *("--weights", "fp8-blocks", "--peer", "vllm"),
        ],
        None,
    )
    model = prepare(given.model, tmp_path, given.weights)
    (drafting,) = speculative.draftings_of(given, model)
    assert (drafting.acceptance, drafting.simulated_length) == ("simulated", 3.0)
    simulated: list[EngineConfig] = []
    monkeypatch.setattr(
        "perf.harness.drafting.simulated_engine", lambda path, config, acceptance: simulated.append(config)
    )
    drafting.engine(model, EngineConfig(executor="graph", load=model.load, weights=model.weights))
    (config,) = simulated
    assert (config.load, config.weights) == ("random", "stored")
    assert config.speculation == Speculation(draft="mtp", shape=Chain(3), adaptive=False)


def with_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Model:
    monkeypatch.setitem(PUBLISHED, "tiny-hybrid", PUBLISHED["tiny-hybrid"] | EXPERTS)
    return prepare("tiny-hybrid", tmp_path)


@pytest.mark.parametrize("weights", [None, "fp8"])
def test_bytes_of_a_round(weights: Any, tmp_path: Path) -> None:
    """Each draft reads the layer, the model's head, and the keys and values of the layer."""
    model = prepare("tiny-hybrid", tmp_path)
    layer = bytes_of_layer(model, weights)
    head, kv = 2 * 320 * 128, 2 * 2 * 2 * 32  # kv: of a token
    draft = MtpDraft(model=model, weights=weights)
    assert draft.round_bytes(3, 0, 0, 2) == 3 * (layer + head)
    assert draft.round_bytes(3, 4, 50, 2) == 3 * (layer + head + 4 * 50 * kv)
    scenario = Scenario.parse("batch4-16")
    options = DecodeOptions(dtype="bfloat16")
    drafting = Drafting(draft=draft, num_draft_tokens=3)
    context = scenario.mean_context(options.lengths)
    assert drafting.round_bytes(2.5, scenario, options) == draft.round_bytes(2.5, 4, context, 2)


def test_bytes_of_a_stored_layer(tmp_path: Path) -> None:
    """Rows of queries and of gates, which files interleave, have a scale each in memory: not in the bytes."""
    model = prepare("tiny-hybrid", tmp_path, "fp8-blocks")
    scales = 4 * 2 * 4 * 32 - 4 * 2
    found = MtpDraft(model=model).round_bytes(1, 0, 0, 2)
    assert found == bytes_of_layer(model, "stored") - scales + 2 * 320 * 128


def test_bytes_of_a_round_with_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = with_experts(tmp_path, monkeypatch)
    expert, head = 3 * 2 * 16 * 128, 2 * 320 * 128
    shared = bytes_of_layer(model, None) - 6 * expert
    found = MtpDraft(model=model).round_bytes(1, 1, 0, 2)
    assert found == pytest.approx(shared + 2 * expert + head)


@pytest.mark.parametrize("batch", [1, 4])
def test_bytes_of_a_round_with_latents(batch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token of the cache is a latent and a rotated part."""
    monkeypatch.setitem(PUBLISHED, "tiny-hybrid", PUBLISHED["tiny-hybrid"] | LATENTS)
    model = prepare("tiny-hybrid", tmp_path)
    expert, head, kv = 3 * 2 * 16 * 128, 2 * 320 * 128, 2 * (32 + 8)
    corrections = 6 * 2  # in float32 in memory: not in the bytes
    shared = bytes_of_layer(model, None) - 6 * expert - corrections
    read = 6 * (1 - (1 - 2 / 6) ** batch)
    found = MtpDraft(model=model).round_bytes(3, batch, 50, 2)
    assert found == pytest.approx(3 * (shared + read * expert + head + batch * 50 * kv))


def test_bytes_of_stored_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In blocks of FP8, with random weights too."""
    sizes = LATENTS | {"moe_intermediate_size": 128}
    monkeypatch.setitem(PUBLISHED, "tiny-hybrid", PUBLISHED["tiny-hybrid"] | sizes)
    model = prepare("tiny-hybrid", tmp_path, "fp8-blocks")
    target = Decoder.random(model.spec, device="cpu", dtype=torch.bfloat16)
    experts: Any = random_mtp(target, form="stored").weights.layers[0].channel
    expert = experts.gate_up[0].nbytes + experts.down[0].nbytes
    assert isinstance(experts.down[0], Fp8Weight) and expert < 1.1 * 3 * 128 * 128
    draft = MtpDraft(model=model)
    assert draft.round_bytes(1, 1, 0, 2) - draft.round_bytes(1, 0, 0, 2) == pytest.approx(2 * expert)


def test_bytes_of_a_layer_that_is_not_quantised_with_its_model(tmp_path: Path) -> None:
    plain, quantised = (prepare("tiny-hybrid", tmp_path, weights) for weights in (None, "fp8"))
    found, expected = (MtpDraft(model=model).round_bytes(2, 3, 40, 2) for model in (quantised, plain))
    assert found == expected


def test_the_layer_of_a_published_model(tmp_path: Path) -> None:
    """0.64 billion numbers, of which an expert has 9.4 million, and 1,152 bytes of a token."""
    draft = MtpDraft(model=prepare("glm-4.7-flash", tmp_path))
    head, expert = 2 * 154_880 * 2048, 2 * 3 * 1536 * 2048
    first = draft.round_bytes(1, 1, 0, 2)
    assert (first - head + 60 * expert) / 2 == pytest.approx(0.64e9, rel=0.02)
    assert draft.round_bytes(1, 1, 100, 2) - first == 100 * 1152


def bytes_of_layer(model: Model, form: Any) -> int:
    """Bytes of all tensors of the layer but the model's own."""
    target = Decoder.random(model.spec, device="cpu", dtype=torch.bfloat16)
    weights = random_mtp(target, form=form or "expanded").weights
    own = *weights.layers, weights.joint, weights.embedding_norm, weights.hidden_norm, weights.final_norm
    return sum(map(bytes_of, own))


def bytes_of(weights: Any) -> int:
    if isinstance(weights, torch.Tensor | QuantisedWeight):
        return weights.nbytes

    if not dataclasses.is_dataclass(weights):
        return 0

    return sum(bytes_of(getattr(weights, field.name)) for field in dataclasses.fields(weights))


GEMMA = PUBLISHED["gemma-4-shapes"] | {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 16,
    "max_position_embeddings": 512,
}


@pytest.mark.usefixtures("even_clock")
def test_an_assistant_drafts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculative, "DecodeOptions", partial(DecodeOptions, lengths=(8, 40)))
    monkeypatch.setitem(PUBLISHED, "tiny-hybrid", GEMMA)
    monkeypatch.setitem(mtp_draft.LARGE, "hidden_size", 32)
    monkeypatch.setitem(mtp_draft.LARGE, "intermediate_size", 48)
    out = tmp_path / "speculative.json"
    speculative.main(
        [
            *("--model", "tiny-hybrid", "--device", "cpu", "--draft", "assistant", "--repeats", "1"),
            *("--num-draft-tokens", "2", "--scenario", "batch3-16", "--out", str(out)),
        ]
    )
    plain, drafted = json.loads(out.read_text())["runs"]
    assert (plain["num_draft_tokens"], drafted["num_draft_tokens"]) == (0, 2)
    assert drafted["draft"] == "tiny-hybrid-assistant"
    assert 1.0 <= drafted["measured_acceptance_length"] <= 3.0 and 0 < drafted["mean_drafts"] <= 2.0


@pytest.mark.parametrize("weights", slow_after(1, [None, "fp8"]))
def test_bytes_of_an_assistant(weights: str | None, tmp_path: Path) -> None:
    """For each draft all weights, and the keys and values that three windows and a full layer see."""
    draft = Assistant.prepare(prepare("gemma-4-31b", tmp_path / "model"), weights)
    head, around = 262_144 * 1024, 3 * 5376 * 1024
    each = {dim: 2 * 32 * dim * 1024 + 3 * 8192 * 1024 for dim in (256, 512)}
    layers = 3 * each[256] + each[512]
    itemsize = 2 if weights is None else 1
    num_bytes = 2 * (head + around) + itemsize * layers
    assert draft.round_bytes(3, 0, 0, 2) == pytest.approx(3 * num_bytes, rel=1e-3)
    kv = 3 * 1023 * 2 * 16 * 256 + 5000 * 2 * 4 * 512
    found = draft.round_bytes(3, 7, 5000, 2) - draft.round_bytes(3, 0, 0, 2)
    assert found == pytest.approx(3 * 7 * 2 * kv)


def test_small_models_have_assistants_with_clusters() -> None:
    small = GEMMA | {"hidden_size_per_layer_input": 16, "num_kv_shared_layers": 2}
    settings = assistant_settings(small)
    assert settings | CLUSTERS == settings
    assert settings["text_config"]["hidden_size"] == 256
    assert assistant_settings(GEMMA)["text_config"]["hidden_size"] == 1024


def test_an_assistant_of_a_model_with_real_weights_is_refused(tmp_path: Path) -> None:
    model = msgspec.structs.replace(prepare("tiny", tmp_path), load="auto")
    with pytest.raises(ValueError, match="expected one with random weights, or a path as the draft"):
        Assistant.prepare(model)


def test_a_model_without_the_layer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="model='tiny': expected one with an MTP layer"):
        MtpDraft(model=prepare("tiny", tmp_path))


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--draft-weights", "fp8"], "expected no --draft-weights: peers have drafts as files store them"),
        (["--weights", "fp8"], "expected no --kv-dtype, and --weights fp8-blocks or none"),
    ],
)
def test_a_peer_has_the_layer_as_files_have_it(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--model", "tiny-hybrid", "--draft", "mtp", "--acceptance-length", "3", "--device", "cuda"]
    with pytest.raises(SystemExit):
        arguments_of([*given, "--peer", "vllm", *arguments], None)
    assert message in capsys.readouterr().err
