"""Engines with quantised weights give the tokens of engines with the dequantised numbers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest
from draft_zoo import make_draft
from family_zoo import draw_model
from gguf import GGMLQuantizationType as Q
from gguf_files import write_gguf
from hybrid_gguf import write_hybrid_gguf
from hybrid_parity import stacked_and_each
from hybrid_zoo import make_hybrid_model
from model_zoo import make_model
from quantised_files import write_checkpoint
from safetensors.torch import load_file, save_file
from slow_cases import slow_rows_after

from drift_sdk import ConfigError, Engine, EngineConfig, SamplingParams, Speculation, inspect

CONFIG = EngineConfig(device="cpu", dtype="float32", kv_cache_tokens=512, max_model_len=128)
PROMPTS = [[5, 17, 300], list(range(40, 90)), [7]]
SAMPLED = SamplingParams(max_tokens=12, temperature=0.8, seed=3, ignore_eos=True)


def generate(
    model: Path, params: SamplingParams, prompts: Sequence[Sequence[int]] = PROMPTS, **settings: Any
) -> list[tuple[int, ...]]:
    """The tokens of all prompts, in a batch; of the first one again after the engine has slept."""

    async def main() -> list[tuple[int, ...]]:
        async with Engine(model, CONFIG.replace(**settings)) as engine:
            streams = [engine.generate(prompt, params) for prompt in prompts]
            found = [(await stream).token_ids for stream in streams]
            await engine.sleep()
            await engine.wake()
            assert (await engine.generate(prompts[0], params)).token_ids == found[0]
            return found

    return anyio.run(main)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, the same with random quantised weights, and with their numbers."""
    root = tmp_path_factory.mktemp("models")
    make_model(1, root / "plain")
    write_checkpoint(root / "plain", "gptq", root / "quantised", root / "twin")
    make_draft("specforge", root / "draft", root / "plain")
    return root


def test_tokens_are_those_of_the_numbers(folder: Path) -> None:
    expected = generate(folder / "twin", SAMPLED)
    assert generate(folder / "quantised", SAMPLED, weights="stored") == expected
    assert generate(folder / "quantised", SAMPLED) == expected


@pytest.mark.parametrize("kind", ["fp8, blocks of 128", "nvfp4, modelopt", "gguf"])
def test_tokens_of_models_with_recurrent_layers(kind: str, tmp_path: Path) -> None:
    model = make_hybrid_model("qwen3_5", 0, tmp_path / "plain", hidden_size=64, intermediate_size=48)
    quantised, prompts = tmp_path / "quantised", [[5, 17, 30], list(range(40, 90)), [7]]
    if kind == "gguf":
        quantised = tmp_path / "model.gguf"
        write_hybrid_gguf(model, quantised, lambda name: Q.Q8_0).save_pretrained(tmp_path / "twin")
    else:
        ignored = ("lm_head", "embed_tokens", "in_proj_a", "in_proj_b")
        write_checkpoint(tmp_path / "plain", kind, quantised, tmp_path / "twin", ignored=ignored)
    expected = generate(tmp_path / "twin", SAMPLED, prompts)
    assert generate(quantised, SAMPLED, prompts, weights="stored") == expected


@pytest.mark.parametrize(
    ("family", "kind"),
    slow_rows_after(
        3,
        [
            ("gemma4", "gguf"),
            ("gemma4 experts", "packed"),
            ("gemma4", "fp8, channel"),
            ("gemma4 experts", "gguf"),
            ("gemma4", "packed"),
            ("gemma4 experts", "fp8, compressed blocks"),
        ],
    ),
)
def test_tokens_of_gemma_4(family: str, kind: str, tmp_path: Path) -> None:
    experts = {"moe_intermediate_size": 32} if "experts" in family else {}
    model = draw_model(family, 3, hidden_size=64, intermediate_size=96, **experts)
    model.save_pretrained(tmp_path / "plain")
    quantised = tmp_path / "quantised"
    if kind == "gguf":
        quantised = tmp_path / "model.gguf"
        write_gguf(model, quantised, Q.Q4_0).save_pretrained(tmp_path / "twin")
    else:
        file = tmp_path / "plain" / "model.safetensors"
        if experts:
            save_file(stacked_and_each(load_file(file))[1], file)
        ignored = ("embed_tokens", "router.")
        write_checkpoint(tmp_path / "plain", kind, quantised, tmp_path / "twin", ignored=ignored)
    prompts = [[5, 17, 30], list(range(40, 90)), [7]]
    expected = generate(tmp_path / "twin", SAMPLED, prompts)
    assert len({token for tokens in expected for token in tokens}) > 12
    assert generate(quantised, SAMPLED, prompts, weights="stored") == expected


@pytest.mark.parametrize("weights", ["stored", "fp8"])
def test_drafts_of_any_form_leave_tokens_as_they_are(folder: Path, weights: Any) -> None:
    model = folder / {"stored": "quantised", "fp8": "plain"}[weights]
    expected = generate(model, SAMPLED, weights=weights)
    for draft_weights in (None, "int4"):
        speculation = Speculation(draft=folder / "draft", draft_weights=draft_weights, adaptive=False)
        assert generate(model, SAMPLED, weights=weights, speculation=speculation) == expected


def test_inspect_counts_the_bytes_of_the_form(folder: Path) -> None:
    sizes = {
        weights: inspect(folder / "quantised", CONFIG.replace(weights=weights)).weight_bytes
        for weights in (None, "expanded", "stored")
    }
    twin = inspect(folder / "twin", CONFIG)
    assert sizes[None] == sizes["expanded"] == twin.weight_bytes
    assert sizes["stored"] is not None and twin.weight_bytes is not None
    assert sizes["stored"] < 0.6 * twin.weight_bytes  # embedding and head are numbers
    plain = inspect(folder / "plain", CONFIG.replace(weights="int4"))
    assert plain.is_supported and plain.weight_bytes is not None and plain.weight_bytes < twin.weight_bytes


def test_files_with_quantised_weights_are_not_quantised_again(folder: Path) -> None:
    config = CONFIG.replace(weights="fp8")
    message = r"weights='fp8': expected None, \"stored\" or \"expanded\": the files are quantised \(gptq\)"
    (reason,) = inspect(folder / "quantised", config).reasons
    assert reason.startswith("weights='fp8'")

    async def main() -> None:
        with pytest.raises(ConfigError, match=message):
            async with Engine(folder / "quantised", config):
                pass

    anyio.run(main)


@pytest.mark.slow
def test_smollm2_tokens_are_those_of_its_dequantised_weights(smollm2_file: Path) -> None:
    async def tokens(weights: Any) -> Sequence[int]:
        async with Engine(smollm2_file, CONFIG.replace(weights=weights)) as engine:
            return (await engine.generate("The quick brown fox", SamplingParams(max_tokens=4))).token_ids

    assert anyio.run(tokens, "stored") == anyio.run(tokens, "expanded")
