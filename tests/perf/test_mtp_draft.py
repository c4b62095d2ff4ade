"""Measurements of a model's own MTP layer as the draft: bytes, and runs of a tiny model on the CPU."""

from __future__ import annotations

import dataclasses
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from drift_sdk import Chain, EngineConfig, Speculation
from drift_sdk.models.decoder import Decoder
from drift_sdk.models.mtp import random_mtp
from drift_sdk.quantised.weight import QuantisedWeight
from perf import speculative
from perf.harness.decoding import DecodeOptions
from perf.harness.drafting import Drafting
from perf.harness.mtp_draft import MtpDraft
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


@pytest.fixture(autouse=True)
def quick_bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perf.harness.recording.read_bandwidth_tb_s", lambda device: 0.01)


@pytest.mark.parametrize("weights", [None, "fp8-blocks"])
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
