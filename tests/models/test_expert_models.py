"""Models with experts equal transformers, for any division of a prompt into steps, and past their windows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from decoder_parity import assert_parity, load_decoder, random_tokens
from expert_zoo import EXPERT_MODELS, QUANTISED, make_expert_model, quantise_folder
from transformers.models.gpt_oss import modeling_gpt_oss

from drift_sdk.models import attention, channels
from drift_sdk.models import decoder as decoder_module
from drift_sdk.models.decoder import Decoder
from drift_sdk.models.layers import normalise, rms_norm
from drift_sdk.spec.model import ClampedGate

NUM_TOKENS = 53
CHUNKINGS = ((45, *(1,) * 8), (1, 44, 3, 5), (16, 17, 12, 8))


class Recorded:
    """A model's output for some tokens, computed once, as a model."""

    def __init__(self, model: Any, token_ids: torch.Tensor) -> None:
        with torch.inference_mode():
            self._output = model(token_ids[None], output_hidden_states=True, use_cache=False)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._output


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Recorded, torch.Tensor]]:
    """Folder, transformers' output and tokens of each model, and of the quantised one."""
    found = {}
    for name in EXPERT_MODELS:
        folder = tmp_path_factory.mktemp("model")
        model = make_expert_model(name, folder)
        tokens = random_tokens(load_decoder(folder).spec, NUM_TOKENS)
        found[name] = folder, Recorded(model, tokens), tokens
        if name == QUANTISED:
            quantise_folder(model, folder, folder / "mxfp4")
            found["mxfp4"] = folder / "mxfp4", Recorded(model, tokens), tokens
    return found


@pytest.mark.parametrize("name", [*EXPERT_MODELS, "mxfp4"])
def test_decoder_equals_transformers(name: str, models: dict[str, Any]) -> None:
    folder, recorded, tokens = models[name]
    decoder = load_decoder(folder)
    for chunks in CHUNKINGS:
        assert_parity(decoder, recorded, tokens, chunks)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_of_gpt_oss_round_as_transformers(dtype: torch.dtype, models: dict[str, Any]) -> None:
    """Once, after the product with the weight: another result in bfloat16 than that of other families."""
    decoder = load_decoder(models["gpt_oss"][0])
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(9, 64, generator=generator).to(dtype)
    spec = decoder.spec.final_norm
    assert spec.kind == "wide" and {layer.norm for layer in decoder.spec.layers} == {spec}
    norm = modeling_gpt_oss.GptOssRMSNorm(64, eps=spec.eps).to(dtype)
    torch.nn.init.normal_(norm.weight, 1.0, 0.3, generator=generator)
    with torch.inference_mode():
        found = normalise(x, norm.weight, spec)
        assert torch.equal(found, norm(x))
        plain = rms_norm(x, norm.weight, spec.eps)
    assert torch.equal(found, plain) == (dtype == torch.float32)


def _no_sinks(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = attention.AttentionBatch.attend
    monkeypatch.setattr(
        attention.AttentionBatch,
        "attend",
        lambda *args, **options: attend(*args, **options | {"sinks": None}),
    )


def _sinks_with_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sink's key has the value of the last key, instead of none."""
    with_sinks = attention.with_sinks

    def planted(*args: torch.Tensor) -> tuple[torch.Tensor, ...]:
        query, key, value = with_sinks(*args)
        value[:, :, -1] = value[:, :, 0]
        return query, key, value

    monkeypatch.setattr(attention, "with_sinks", planted)


def _window_off_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = attention.AttentionBatch.attend

    def planted(*args: Any, **options: Any) -> torch.Tensor:
        window = options["window"]
        return attend(*args, **options | {"window": None if window is None else window + 1})

    monkeypatch.setattr(attention.AttentionBatch, "attend", planted)


def _one_magnitude(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = decoder_module.rotary_tables
    monkeypatch.setattr(decoder_module, "rotary_tables", lambda *args: tables(*args[:3], 1.0))


def _other_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last of the chosen experts is the next after it."""
    choose = channels.choose_experts

    def planted(logits: torch.Tensor, num_active: int, *, is_normalised: bool) -> tuple[torch.Tensor, ...]:
        experts, shares = choose(logits, num_active + 1, is_normalised=is_normalised)
        kept = [*range(num_active - 1), num_active]
        return experts[:, kept], shares[:, kept]

    monkeypatch.setattr(channels, "choose_experts", planted)


def _gate_after_up(monkeypatch: pytest.MonkeyPatch) -> None:
    gated = channels.gated
    monkeypatch.setattr(
        channels,
        "gated",
        lambda gate_up, gate, _: gated(gate_up.unflatten(1, (-1, 2)).flip(2).flatten(1), gate),
    )


def _no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    gated = channels.gated
    monkeypatch.setattr(
        channels, "gated", lambda gate_up, gate, _: gated(gate_up, ClampedGate(alpha=1.702, limit=1e6))
    )


def _other_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of all experts where those of the chosen add up to 1, and the other way round."""
    choose = channels.choose_experts
    monkeypatch.setattr(
        channels,
        "choose_experts",
        lambda logits, num_active, *, is_normalised: choose(
            logits, num_active, is_normalised=not is_normalised
        ),
    )


@pytest.mark.parametrize(
    ("plant", "name"),
    [
        (_no_sinks, "gpt_oss"),
        (_sinks_with_value, "gpt_oss"),
        (_window_off_by_one, "gpt_oss"),
        (_window_off_by_one, "mixtral"),
        (_one_magnitude, "gpt_oss"),
        (_one_magnitude, "qwen3_moe, some MLPs"),
        (_other_experts, "gpt_oss"),
        (_other_experts, "qwen3_moe"),
        (_gate_after_up, "gpt_oss"),
        (_no_limit, "gpt_oss, other layers"),
        (_other_weights, "gpt_oss"),
        (_other_weights, "qwen3_moe"),
        (_other_weights, "qwen3_moe, some MLPs"),
        (_other_weights, "mixtral"),
    ],
)
def test_planted_fault_is_found(
    plant: Callable[[pytest.MonkeyPatch], None],
    name: str,
    models: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder, recorded, tokens = models[name]
    decoder: Decoder = load_decoder(folder)
    plant(monkeypatch)
    with pytest.raises(AssertionError, match="differ by"):
        assert_parity(decoder, recorded, tokens, CHUNKINGS[0])
