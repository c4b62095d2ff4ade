"""Perplexity by form of the weights, on a tiny model and the CPU."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from model_zoo import make_model
from quantised_files import write_checkpoint

from drift_sdk import EngineConfig
from drift_sdk.families import read_spec
from drift_sdk.loading.source import resolve
from perf.harness.shapes import Model, prepare
from perf.perplexity import measure

SETTINGS = EngineConfig(device="cpu", dtype="float32")


@pytest.fixture
def tiny(tmp_path: Path) -> Model:
    return prepare("tiny", tmp_path / "tiny")


async def test_forms_differ_from_the_first_by_their_rounding(tiny: Model, tmp_path: Path) -> None:
    reported: list[Any] = []
    runs = await measure(tiny, ("expanded", "fp8", "int4", "fp8-kv"), SETTINGS, tmp_path, reported.append)
    assert reported == runs
    expanded, fp8, int4, fp8_kv = runs
    assert 0 < fp8_kv.mean_difference < 1 and fp8_kv.weight_bytes == expanded.weight_bytes
    assert expanded.max_difference == expanded.mean_difference == 0
    assert 0 < fp8.mean_difference < int4.mean_difference <= int4.max_difference
    assert expanded.weight_bytes > fp8.weight_bytes > int4.weight_bytes
    assert expanded.num_tokens == tiny.spec.max_position_embeddings - 2


async def test_perplexity_is_that_of_the_tokens(
    tiny: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def logprobs(engine: Any, tokens: Any) -> list[float]:
        return [math.log(0.5), math.log(0.125)]

    monkeypatch.setattr("perf.perplexity.token_logprobs", logprobs)
    (run,) = await measure(tiny, ("expanded",), SETTINGS, tmp_path)
    assert run.perplexity == pytest.approx(4.0)


async def test_stored_weights_are_their_numbers_and_are_quantised_anew_from_them(tmp_path: Path) -> None:
    make_model(1, tmp_path / "plain")
    write_checkpoint(tmp_path / "plain", "gptq", tmp_path / "quantised", tmp_path / "twin")
    path = tmp_path / "quantised"
    spec = read_spec(resolve(path).config)
    model = Model(name="gptq", path=path, load="auto", spec=spec)
    expanded, stored, fp8 = await measure(model, ("expanded", "stored", "fp8"), SETTINGS, tmp_path)
    assert stored.perplexity == expanded.perplexity and stored.max_difference == 0
    assert stored.weight_bytes < fp8.weight_bytes < expanded.weight_bytes
    assert 0 < fp8.mean_difference < 1
