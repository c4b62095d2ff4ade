"""The suite and its report, on recorded results instead of measurements."""

from __future__ import annotations

import importlib
import io
import json
import re
import shutil
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from perf import report, suite
from perf.gating.figures import read_folder
from perf.gating.history import Place
from perf.harness.commands import Command, CommandFailed
from perf.harness.record import UNFINISHED
from perf.report import draft_lines, ratios, write_report
from perf.suite import State, View

RECORDED = Path(__file__).parent / "recorded" / "nvidia-h200"
HERE = Place(commit="abc", machine="m", gpu="NVIDIA H200")


class Runner:
    """Copies recorded results instead of measuring; fails or is interrupted at a topic's command."""

    def __init__(self, failing: str = "", error: BaseException | None = None) -> None:
        self.seen: list[str] = []
        self._failing, self._error = failing, error

    def __call__(self, command: Command, device: str, folder: Path, on_line: Callable[[str], None]) -> None:
        text = " ".join(command.arguments)
        self.seen.append(f"{command.module} {text}")
        if self._failing and self._failing in self.seen[-1] and self._error is not None:
            raise self._error
        on_line("a line of output")
        folder.mkdir(parents=True, exist_ok=True)
        if (RECORDED / f"{command.topic}.json").exists():
            shutil.copy(RECORDED / f"{command.topic}.json", folder)


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite.machine, "gpu_name", lambda device: "NVIDIA H200")
    monkeypatch.setenv("DRIFT_COMMIT", "abc")
    monkeypatch.setattr(report, "find_spec", lambda name: None)  # drawn in a test of its own


def run_suite(out: Path, runner: Runner, *arguments: str) -> int:
    return suite.main(["--device", "cuda", "--out", str(out), *arguments], runner)


def test_all_topics_are_measured_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, again = Runner(), Runner()
    assert run_suite(tmp_path, first) == 0
    assert len(first.seen) == sum(map(len, suite.TOPICS.values()))
    assert all("--model llama-3.1-8b" in line for line in first.seen)
    printed = capsys.readouterr().out
    for topic in suite.TOPICS:
        assert f"{topic}: done" in printed
    assert "# Measurements" in (tmp_path / "report.md").read_text()
    assert run_suite(tmp_path, again) == 0
    assert again.seen == []


def test_commands_are_accepted_by_their_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command lines of all topics are parsed up to the first measurement."""

    def stop(*arguments: object) -> None:
        raise InterruptedError

    for command in chain.from_iterable(suite.TOPICS.values()):
        module = importlib.import_module(command.module)
        monkeypatch.setattr(module, "Recording", stop)
        with pytest.raises(InterruptedError):
            module.main(suite.of_model(command, "llama-3.1-8b").line("cuda", Path("nowhere"))[3:])
    minutes = [float(command.arguments[-1]) for command in suite.TOPICS["stress"]]
    assert sum(minutes) == 10


def test_interrupted_suite_goes_on_with_the_interrupted_command(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run_suite(tmp_path, Runner("batch64-512", KeyboardInterrupt()))
    done = json.loads((tmp_path / suite.STATE).read_text())["topics"]
    assert {topic: (one["state"], one["num_done"]) for topic, one in done.items()} == {
        "baseline": ("done", 1), "single": ("done", 1), "batch": ("waiting", 1),
    }  # fmt: skip
    with pytest.raises(KeyboardInterrupt):
        run_suite(tmp_path, Runner("--num-draft-tokens 4 --minutes", KeyboardInterrupt()))
    runner = Runner()
    assert run_suite(tmp_path, runner) == 0
    assert [re.findall("tokens ([45])", line) for line in runner.seen] == [["4"], ["5"]]


def test_killed_suite_goes_on_with_the_interrupted_command(tmp_path: Path) -> None:
    """The state of a process that has ended without a chance to write it."""
    killed = Runner("batch64-512", KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        run_suite(tmp_path, killed)
    (tmp_path / f"{suite.STATE}{UNFINISHED}").write_text("{half of a st")  # killed while it was written
    runner = Runner()
    assert run_suite(tmp_path, runner) == 0
    assert "batch64-512" in runner.seen[0]
    assert len(killed.seen) + len(runner.seen) == 1 + sum(map(len, suite.TOPICS.values()))


def test_failed_topic_does_not_stop_the_others_and_is_tried_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_suite(tmp_path, Runner("perf.decode", CommandFailed("perf.decode: out of memory"))) == 1
    assert "baseline: failed in 0 s: perf.decode: out of memory" in capsys.readouterr().out
    runner = Runner()
    assert run_suite(tmp_path, runner) == 0
    assert [line.split()[0] for line in runner.seen] == ["perf.decode"]


def test_results_of_another_commit_are_not_mixed_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_suite(tmp_path, Runner(), "--topics", "baseline") == 0
    monkeypatch.setenv("DRIFT_COMMIT", "def")
    with pytest.raises(SystemExit):
        run_suite(tmp_path, Runner(), "--topics", "baseline")
    assert "results of llama-3.1-8b on commit abc" in capsys.readouterr().err
    runner = Runner()
    assert run_suite(tmp_path, runner, "--topics", "baseline", "--fresh") == 0
    assert len(runner.seen) == 1


def test_fresh_refuses_a_folder_with_other_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_suite(tmp_path, Runner()) == 0
    other = tmp_path / "figures" / "mine.png"
    other.parent.mkdir()
    other.write_text("a")
    with pytest.raises(SystemExit):
        run_suite(tmp_path, Runner(), "--fresh")
    assert f"--fresh: out='{other.parent}'" in capsys.readouterr().err
    assert other.exists() and (tmp_path / "decode.json").exists()
    shutil.rmtree(other.parent)
    runner = Runner()
    assert run_suite(tmp_path, runner, "--fresh") == 0
    assert len(runner.seen) == sum(map(len, suite.TOPICS.values()))


def test_suite_needs_a_gpu(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        suite.main(["--device", "cpu", "--out", str(tmp_path)])


def test_view_shows_states_and_last_lines() -> None:
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, width=100)
    topics = {"single": suite.Progress(), "batch": suite.Progress(state="failed", reason="no memory")}
    with View(topics, console) as view:
        topics["single"].state = "running"
        view.changed("single")
        view.said("single", "drift single-512: 240 tok/s")
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text.getvalue())
    assert "running" in shown and "240 tok/s" in shown and "no memory" in shown


def test_state_is_read_back(tmp_path: Path) -> None:
    state = State(place=HERE, model="tiny", topics={"single": suite.Progress(state="done", seconds=2.0)})
    state.write(tmp_path)
    assert State.load(tmp_path, HERE, "tiny") == state
    with pytest.raises(ValueError, match="tiny on commit abc"):
        State.load(tmp_path, HERE, "llama-3.1-8b")


def test_ratios_are_to_measured_peers_or_anchors() -> None:
    results = read_folder(RECORDED)
    found = ratios(results)
    measured = [ratio for ratio in found if not ratio.is_anchor and "prefill" not in ratio.case]
    assert [(ratio.case, ratio.peer) for ratio in measured] == [("llama-3.1-8b\nsingle-512", "vllm")]
    assert measured[0].value == pytest.approx(239.88 / 201.98)
    drafted = [ratio for ratio in found if "single-32k\n3, llama-3.1-8b-eagle3, AL 3.2" in ratio.case]
    assert [(ratio.peer, ratio.is_anchor) for ratio in drafted] == [("vllm", True)]
    (run, *_) = [run for run in results["decode"].runs if run["engine"] == "drift"]
    results["decode"].runs.append(run | {"config": "processor=bias", "tokens_per_s": 1.0})
    assert ratios(results) == found


def test_lines_over_drafts_begin_with_plain_decoding() -> None:
    results = read_folder(RECORDED)["speculative"]
    name, expected = (
        "llama-3.1-8b single-8k, simulated, llama-3.1-8b-eagle3",
        [(0, 220.11), (2, 591.29), (3, 594.17), (4, 548.71), (5, 522.68)],
    )
    lines = draft_lines(results)
    assert lines[name] == expected
    assert name.replace("8k", "512") not in lines  # one number of drafts alone
    (three,) = [run for run in results.runs if (run["scenario"], run["num_draft_tokens"]) == ("single-8k", 3)]
    results.runs.append(three | {"acceptance_length": 3.0, "tokens_per_s": 500.0})
    assert draft_lines(results)[name] == expected


def test_quantised_runs_are_told_apart(tmp_path: Path) -> None:
    results = read_folder(RECORDED)["speculative"]
    before = draft_lines(results)
    quantised = [run | {"dtype": "fp8", "tokens_per_s": 2 * run["tokens_per_s"]} for run in results.runs]
    results.runs = [*results.runs, *quantised]
    found = draft_lines(results)
    assert {name: found[name] for name in before} == before
    of_plain = dict(found["llama-3.1-8b, fp8 single-8k, simulated, llama-3.1-8b-eagle3"])
    assert of_plain[0] == 2 * dict(before["llama-3.1-8b single-8k, simulated, llama-3.1-8b-eagle3"])[0]
    folder = tmp_path / "results"
    folder.mkdir()
    (folder / "speculative.json").write_bytes(msgspec.json.encode(results))
    assert "## Decoding with drafts: llama-3.1-8b, fp8" in write_report(folder, tmp_path).read_text()


def test_report_has_tables_pictures_and_gates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.undo()
    folder, out = tmp_path / "results", tmp_path / "report"
    folder.mkdir()
    for topic in ("decode", "speculative"):
        shutil.copy(RECORDED / f"{topic}.json", folder)
    found = read_folder(folder)["speculative"]
    found.runs = [run for run in found.runs if run["scenario"] in ("single-8k", "single-32k")]
    (folder / "speculative.json").write_bytes(msgspec.json.encode(found))
    text = write_report(folder, out).read_text()
    for name in ("roofline.png", "drafts.png", "peers.png"):
        assert f"]({name})" in text
        assert (out / name).read_bytes().startswith(b"\x89PNG") and (out / name).stat().st_size > 10_000
    for heading in ("Plain decoding: llama-3.1-8b", "Decoding with drafts: llama-3.1-8b", "Floors and goals"):
        assert f"## {heading}" in text
    name = "8B plain, share of the roofline: single-32k"
    assert f"| {name} | micro | 0.8693 | 0.82 | 0.88 | 1.2% to go |" in text


def test_folder_without_results_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        report.main([str(tmp_path), "--out", str(tmp_path)])
    assert "expected one with result files" in capsys.readouterr().err
