"""Speculative measurements on a tiny model and the CPU, where acceptance is real."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from drift_sdk import Chain, EngineConfig, NGram, Speculation
from drift_sdk.measurement import AcceptanceTrace
from perf import speculative
from perf.harness.decoding import DecodeOptions
from perf.harness.drafting import Drafting
from perf.harness.record import read
from perf.harness.rounds import Counts, Rounds
from perf.harness.scenario import Scenario
from perf.harness.shapes import Model, prepare, prepare_drafts
from perf.harness.speculative_options import arguments_of
from perf.harness.table import speculative_table


@pytest.fixture(autouse=True)
def quick_bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perf.harness.recording.read_bandwidth_tb_s", lambda device: 0.01)


@pytest.mark.usefixtures("even_clock")
def test_speculative_writes_drafted_and_plain_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculative, "DecodeOptions", partial(DecodeOptions, lengths=(8, 72)))
    out = tmp_path / "speculative.json"
    speculative.main(
        [
            *("--model", "tiny", "--device", "cpu", "--draft", "ngram", "--repeats", "1"),
            *("--num-draft-tokens", "0", "2", "--scenario", "batch3-16", "--out", str(out)),
        ]
    )
    plain, drafted = json.loads(out.read_text())["runs"]
    assert (plain["num_draft_tokens"], drafted["num_draft_tokens"]) == (0, 2)
    assert plain["several_share"] == 0 and plain["num_active"] > 2.9
    assert (plain["num_active_max"], drafted["num_active_max"]) == (3, 3)
    assert 1 <= drafted["num_active_min"] <= drafted["num_active"] <= 3
    # A tiny model soon repeats its tokens, so that some drafts are right.
    assert 0 < drafted["several_share"] <= drafted["measured_acceptance_length"] - 1
    assert drafted["acceptance"] == "real" and drafted["draft"] == "ngram"
    assert len(speculative_table(read(out))[2]) == 2


def test_recorded_rounds_are_simulated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = AcceptanceTrace(((1, 4), (2, 2, 3)))
    trace.save(tmp_path / "trace.json")
    arguments = ["--trace", str(tmp_path / "trace.json"), "--device", "cuda"]
    given = arguments_of(arguments, None)
    assert given.executor == "graph"
    model = prepare("smollm2-shapes", tmp_path / "model")
    (drafting,) = speculative.draftings_of(given, model)
    assert (drafting.acceptance, drafting.simulated_length) == ("simulated", 2.4)
    simulated: list[object] = []
    monkeypatch.setattr(
        "perf.harness.drafting.simulated_engine", lambda *given, acceptance: simulated.append(acceptance)
    )
    drafting.engine(model, EngineConfig(executor="graph"))
    assert simulated == [(1, 4, 2, 2, 3)]


def test_small_models_and_ngrams_beside_them_are_drafts(tmp_path: Path) -> None:
    model = prepare("smollm2-shapes", tmp_path / "smollm2-shapes")
    assert prepare_drafts(model, "ngram") == NGram()
    small = prepare_drafts(model, "tiny", "fp8")
    assert isinstance(small, Model) and (small.path / "config.json").exists()
    drafting = Drafting(draft=small, ngrams=NGram(), num_draft_tokens=2)
    assert drafting.name == "tiny fp8 and ngrams"
    speculation = drafting.config(EngineConfig()).speculation
    assert speculation == Speculation(
        draft=small.path, ngrams=NGram(), shape=Chain(2), adaptive=False, draft_weights="fp8"
    )
    # Each drafted token reads the small model once.
    options, scenario = DecodeOptions(), Scenario.parse("single-16")
    step = small.decode_bytes(1, scenario.mean_context(options.lengths), options.itemsize)
    assert drafting.round_bytes(2.0, scenario, options) == 2 * step


def test_text_that_is_not_utf8_is_rejected(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(b"tides \xff")
    with pytest.raises(SystemExit, match=r"--text .*text.txt: expected UTF-8: .* 0xff in position 6"):
        speculative.read_text(prepare("smollm2-shapes", tmp_path / "model"), text)


def test_numbers_of_gpus_are_measured_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[int] = []

    async def note(model: object, draftings: object, scenarios: object, options: Any, *others: Any) -> None:
        found.append(options.tensor_parallel if options.compares_gpus else 0)

    monkeypatch.setattr("perf.speculative.measure", note)
    arguments = [*("--model", "tiny", "--device", "cpu", "--draft", "ngram"), "--out", str(tmp_path / "out")]
    speculative.main([*arguments, "--tensor-parallel", "1", "2"])
    speculative.main(arguments)
    assert found == [1, 2, 0]


def test_shares_of_rounds_are_computed_from_statistics() -> None:
    counts = Counts(num_steps=3, num_rounds=6, num_drafted=18, num_accepted=5)
    rounds = Rounds(num_tokens=9, seconds=(1.0,), counts=(counts,), emitted=((3, 1), (4, 1, 1), (1,)))
    assert rounds.several_share == 2 / 6
    assert rounds.num_active == [2, 3, 1]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--num-draft-tokens", "17"], "expected 0 to 16"),
        (["--acceptance-length", "4.5"], "expected 1 to 4"),
        (["--acceptance-length", "3.2", "0.5"], "expected 1 to 4"),
        (["--acceptance-length", "2", "--device", "cpu"], "on a GPU"),
        (["--draft", "ngram", "--ngrams"], "expected a draft head or a model"),
        (["--policy-sweep", "--acceptance-length", "2"], "sets the acceptance lengths"),
        (["--policy-sweep", "--tensor-parallel", "2"], "no --tensor-parallel"),
        (["--trace", "nowhere.json"], "--trace: "),
        (["--trace", "trace.json", "--acceptance-length", "2"], "--trace: expected no --acceptance-length"),
        (["--text", "nowhere.txt"], "--text nowhere.txt: expected a file that is not empty"),
        (["--model", "nowhere"], "expected a path that exists, or one of"),
        (["--model", "smollm2-135m"], "expected a --draft"),
    ],
)
def test_contradicting_arguments_are_rejected(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        speculative.main(arguments)
    assert message in capsys.readouterr().err
