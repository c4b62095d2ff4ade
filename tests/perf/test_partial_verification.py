"""Measurements of partial verification on a tiny model and the CPU, where acceptance is real."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from drift_sdk import Chain, NGram, PartialVerification
from perf import partial_verification
from perf.harness.drafting import Drafting
from perf.harness.recording import Recording
from perf.harness.shapes import prepare
from perf.partial_verification import Measuring, arguments_of

SIZES = ["--sink-tokens", "16", "--retrieved-tokens", "16", "--window-tokens", "8", "--refresh-tokens", "9"]


@pytest.fixture(autouse=True)
def quick_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partial_verification, "LENGTHS", (8, 72))
    monkeypatch.setattr("perf.harness.recording.read_bandwidth_tb_s", lambda device: 0.01)


def test_speed_and_agreement_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "partial.json"
    partial_verification.main(
        [
            *("--model", "tiny", "--device", "cpu", "--draft", "ngram", "--repeats", "1", *SIZES),
            *("--num-draft-tokens", "2", "--scenario", "single-100", "--agreement", "8", "--out", str(out)),
        ]
    )
    plain, whole, partial = json.loads(out.read_text())["runs"][:3]
    assert [run["verification"] for run in (plain, whole, partial)] == ["none", "whole", "partial"]
    assert whole["speedup"] > 0 and partial["whole_speedup"] > 0
    assert 0 < partial["num_refresh_rounds"] < partial["num_partial_rounds"]
    agreement = json.loads(out.read_text())["runs"][-1]
    assert 0 <= agreement["agreement"] <= 1
    assert 0 <= agreement["num_equal"][0] <= 8
    assert "x whole" in capsys.readouterr().out


def test_sizes_are_those_of_the_setting() -> None:
    given = arguments_of(["--device", "cpu", *SIZES])
    assert given.partial == PartialVerification(
        sink_tokens=16, retrieved_tokens=16, window_tokens=8, refresh_tokens=9
    )
    assert arguments_of(["--device", "cpu"]).partial == PartialVerification()
    assert [scenario.context for scenario in given.scenario] == [16_384, 32_768, 65_536]


def test_engines_draft_the_number_that_is_measured(tmp_path: Path) -> None:
    """A request cannot limit the drafts of a simulated round."""
    given = arguments_of(["--model", "tiny", "--device", "cpu", *SIZES])
    recording = Recording("partial-verification", "cpu", tmp_path / "out.json")
    drafting = Drafting(draft=NGram(), num_draft_tokens=5)
    measuring = Measuring(given, prepare("tiny", tmp_path / "model"), drafting, recording)
    assert measuring.config(0, None).speculation is None
    for number in (3, 5):
        speculation = measuring.config(number, given.partial).speculation
        assert speculation is not None and speculation.shape == Chain(number)
        assert speculation.partial_verification == given.partial and not speculation.adaptive


@pytest.mark.slow
def test_sizes_identify_a_run(tmp_path: Path) -> None:
    out = tmp_path / "partial.json"
    for window in ("8", "16"):
        partial_verification.main(
            [
                *("--model", "tiny", "--device", "cpu", "--draft", "ngram", "--repeats", "1", *SIZES),
                *("--window-tokens", window, "--num-draft-tokens", "2", "--scenario", "single-100"),
                *("--out", str(out)),
            ]
        )
    configs = [
        run["config"] for run in json.loads(out.read_text())["runs"] if run["verification"] == "partial"
    ]
    assert len(configs) == 2 and "window_tokens=8" in configs[0] and "window_tokens=16" in configs[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--num-draft-tokens", "0"], "--num-draft-tokens: 0: expected a whole number of 1 or more"),
        (["--num-draft-tokens", "17"], "num_draft_tokens=17"),
        (["--sink-tokens", "0"], "sink_tokens=0"),
        (["--refresh-tokens", "5"], "expected more than 5 drafts"),
        (["--acceptance-length", "5"], "expected 1 to 4"),
        (["--acceptance-length", "2"], "needs the graph executor on a GPU"),
        (["--no-speed"], "--agreement 0"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        arguments_of(["--device", "cpu", *arguments])
    assert message in capsys.readouterr().err
