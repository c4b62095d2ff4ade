"""The command `tune` with shapes: lots of several, whose outcome is kept one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
import torch

from drift_sdk._kernels.gemm.gemm import GemmTiles
from drift_sdk._kernels.gemm.heuristic import GemmShape
from drift_sdk._kernels.gemm.tuner import WeightToTune
from drift_sdk._kernels.gemm.tuning import TunedTable, TunedTiles
from drift_sdk.cli import tune as command
from drift_sdk.cli.command_line import main

SHAPES = [(128, 64, False), (256, 64, True), (320, 128, False)]


def test_shapes_are_tuned_in_lots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An interruption of the second lot leaves the first one in the table."""
    lots: list[list[str]] = []

    def tune(weights: Sequence[WeightToTune], *arguments: object, **options: object) -> TunedTable:
        lots.append([weight.key for weight in weights])
        if len(lots) == 2:
            raise KeyboardInterrupt
        entry = TunedTiles(((16, GemmTiles()),))
        return TunedTable(
            gemms=dict.fromkeys(lots[-1], entry), provenance=dict.fromkeys(lots[-1], "measured")
        )

    def random_weight(shape: GemmShape, number: int) -> WeightToTune:
        assert number >= 2
        return WeightToTune(shape=shape, tensors=[torch.empty(0)])

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(command, "SHAPES_AT_ONCE", 2)
    monkeypatch.setattr(command, "tune", tune)
    monkeypatch.setattr(command, "random_weight", random_weight)
    monkeypatch.setattr(command, "check_gpu", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "GPU of tests")
    out = tmp_path / "table.json"
    with pytest.raises(KeyboardInterrupt):
        command.tune_shapes(SHAPES, out, 1)

    assert lots == [["128x64", "256x64 gated"], ["320x128"]]
    assert set(msgspec.json.decode(out.read_bytes(), type=TunedTable).gemms) == set(lots[0])
    assert capsys.readouterr().out.count("measured") == 2


def test_table_of_another_gpu_names_shapes_and_their_only_candidates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned: list[tuple[list[tuple[int, int, bool]], TunedTable | None]] = []
    monkeypatch.setattr(
        command, "tune_shapes", lambda shapes, out, num_jobs, known: tuned.append((shapes, known))
    )
    entry = TunedTiles(((16, GemmTiles()),))
    table = TunedTable(gemms={"128x64": entry, "256x64 gated": entry})
    file = tmp_path / "table.json"
    file.write_bytes(msgspec.json.encode(table))
    assert main(["tune", "--from", str(file)]) == 0
    assert main(["tune", "--from", str(file), "320x128"]) == 0
    assert tuned == [(SHAPES[:2], table), (SHAPES[2:], table)]
    for text in ("{", '{"other":' + "[" * 10**5 + "]" * 10**5 + "}"):
        file.write_text(text)
        assert main(["tune", "--from", str(file)]) == 1
