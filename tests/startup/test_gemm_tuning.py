"""The table of a starting engine: shipped and kept entries, short tuning of the others, and its failures."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_llama import tiny_llama

from drift_sdk import EngineConfig
from drift_sdk._kernels.gemm import tuning
from drift_sdk._kernels.gemm.gemm import GemmTiles
from drift_sdk._kernels.gemm.tuner import FULL, SHORT, Effort, WeightToTune
from drift_sdk._kernels.gemm.tuning import TunedTable, TunedTiles, add_to_user_table, measured_on, user_table
from drift_sdk.families import read_spec
from drift_sdk.models.decoder import Decoder
from drift_sdk.models.shard import Shard
from drift_sdk.models.weights import meta_weights
from drift_sdk.startup import graph_startup
from drift_sdk.startup.graph_startup import engine_table, weights_to_tune

SHIPPED, KEPT, FOUND = (TunedTiles(((rows, GemmTiles()),)) for rows in (1, 2, 3))
KEYS = {"64x32", "32x32", "48x32 gated", "32x24"}
"""Of qkv, output, gate and up, and down; the head is the embedding, of the same shape as qkv."""


@pytest.fixture(autouse=True)
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One weight is in the shipped table, one in the user's cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(graph_startup, "EFFORTS", {"off": None, "short": SHORT, "full": FULL})
    monkeypatch.setattr(tuning, "table_for", lambda gpu: TunedTable(gemms={"64x32": SHIPPED}))
    add_to_user_table(measured_on("none"), TunedTable(gemms={"32x32": KEPT}))


class Tuner:
    """Stands in for the measurement: notes what it is asked for, and finds FOUND."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[Effort, set[str]]] = []
        monkeypatch.setattr(graph_startup, "is_interpreted", lambda: False)
        monkeypatch.setattr(graph_startup, "tune", self._tune)

    def _tune(self, weights: Sequence[WeightToTune], effort: Effort, *, on_progress: Any) -> TunedTable:
        on_progress(0.5)
        self.calls.append((effort, {weight.key for weight in weights}))
        return TunedTable(gemms={weight.key: FOUND for weight in weights})


def decoder(dtype: torch.dtype = torch.bfloat16) -> Decoder:
    config = read_spec(tiny_llama(num_hidden_layers=2, tie_word_embeddings=True))
    return Decoder.random(config, device="cpu", dtype=dtype)


def start(tuning: str, report: Any = lambda stage, fraction: None, **options: Any) -> TunedTable:
    return engine_table(EngineConfig(tuning=tuning), decoder(**options), None, report)


def test_short_tuning_measures_what_no_table_has_and_keeps_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tuner, reports = Tuner(monkeypatch), []
    with caplog.at_level(logging.INFO, "drift_sdk"):
        table = start("short", lambda stage, fraction: reports.append((stage, fraction)))
    assert tuner.calls == [(SHORT, {"48x32 gated", "32x24"})]
    assert reports == [("tune", 0.0), ("tune", 0.5)]
    expected = {"64x32": SHIPPED, "32x32": KEPT, "48x32 gated": FOUND, "32x24": FOUND}
    assert table.gemms == expected
    lines = [record.message for record in caplog.records if record.message.startswith("tuned products")]
    assert len(lines) == 1 and "1 entries for none and 3 of" in lines[0]
    assert lines[0].endswith("4 of this model's 4 weight shapes have one")
    assert start("short").gemms == expected and len(tuner.calls) == 1  # the second start measures nothing


def test_full_tuning_measures_all_weights_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tuner = Tuner(monkeypatch)
    assert set(start("full").gemms.values()) == {FOUND}
    assert tuner.calls == [(FULL, KEYS)]


@pytest.mark.parametrize("options", [{"tuning": "off"}, {"tuning": "short", "dtype": torch.float32}])
def test_nothing_is_measured_when_off_or_for_float32(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    tuner = Tuner(monkeypatch)
    assert start(**options).gemms == {"64x32": SHIPPED, "32x32": KEPT}
    assert tuner.calls == []


def test_what_another_process_measured_meanwhile_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    tuner = Tuner(monkeypatch)
    machine = measured_on("none")

    def report(stage: str, fraction: float) -> None:
        if not tuner.calls and fraction == 0.0:  # between the first look and the lock
            add_to_user_table(machine, TunedTable(gemms={"32x24": KEPT}))

    assert start("short", report).gemms["32x24"] is not FOUND
    assert tuner.calls == [(SHORT, {"48x32 gated"})]
    assert user_table(machine).gemms == {"32x32": KEPT, "32x24": KEPT, "48x32 gated": FOUND}


def test_cache_that_cannot_be_written_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tuner = Tuner(monkeypatch)
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with caplog.at_level(logging.WARNING, "drift_sdk"):
        assert start("short").gemms == {"64x32": SHIPPED}
    assert tuner.calls == []
    assert [record.message.split(":")[0] for record in caplog.records] == [
        "products are not tuned, their measurements cannot be kept"
    ]


def test_weights_of_a_shape_are_tuned_together() -> None:
    weights = {weight.key: weight for weight in weights_to_tune(decoder().weights, None)}
    assert set(weights) == KEYS
    assert [len(weights[key].tensors) for key in ("32x32", "48x32 gated", "32x24", "64x32")] == [2, 2, 2, 3]
    assert weights["48x32 gated"].shape.num_slices == 1


def test_parts_of_a_model_are_tuned_with_the_slices_that_they_run_with() -> None:
    """Half of the columns of a weight with two slices is one slice; half of its rows has two."""
    settings = {"hidden_size": 4096, "intermediate_size": 14_336, "head_dim": 128}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 1}
    shard = Shard(rank=1, size=2)
    part = shard.spec(read_spec(tiny_llama(**settings, **heads)))
    weights = weights_to_tune(meta_weights(part, torch.bfloat16), None, shard)
    slices = {weight.key: weight.shape.num_slices for weight in weights}
    assert {"3072x4096": 2, "4096x2048": 1, "14336x4096 gated": 1, "4096x7168": 1}.items() <= slices.items()
