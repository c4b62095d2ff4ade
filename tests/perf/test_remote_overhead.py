"""Overhead of remote engines: the figures of short runs, and wrong options."""

from __future__ import annotations

from pathlib import Path

import pytest

from perf import remote_overhead
from perf.harness.record import read


def test_command_compares_an_engine_a_pool_and_a_child(tmp_path: Path) -> None:
    out = tmp_path / "overhead.json"
    arguments = ["--kinds", "engine", "pool", "process", "--streams", "3", "--step-ms", "1", "--repeats", "1"]
    remote_overhead.main([*arguments, "--tokens", "12", "--out", str(out)])
    runs = read(out).runs
    assert [run["engine"] for run in runs] == ["engine", "pool", "process"]
    for run in runs:
        assert run["request_ms"] >= 1 and run["token_ms"]["p99"] >= run["token_ms"]["p50"] > 0
        assert run["tokens_per_chunk"] >= 1 and run["tokens_per_s"] > 0
    here, _, child = (run["cpu_us_per_token"] for run in runs)
    assert here["all"] == here["here"] and child["all"] >= child["here"]


def test_wrong_options_are_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--repeats", "0"], ["--tokens", "1"], ["--step-ms", "-1"], ["--kinds", "vllm"]):
        with pytest.raises(SystemExit):
            remote_overhead.arguments_of(arguments)
        assert arguments[0] in capsys.readouterr().err
