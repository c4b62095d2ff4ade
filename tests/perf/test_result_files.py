"""Result files: their content, merging of new and old runs, tables and pictures."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import UNSET

from drift_sdk.errors import ConfigError
from perf import merge
from perf.harness import machine, record
from perf.harness.record import DecodeRun, Results, Run, read, write
from perf.harness.recording import check_place
from perf.harness.scenario import Scenario
from perf.harness.table import decode_table
from perf.roofline import bars, draw

SCHEMA = {
    "engine", "model", "dtype", "scenario", "batch", "context", "num_draft_tokens", "tree", "acceptance",
    "acceptance_length", "tokens_per_s", "ms_per_round", "roofline_fraction",
}  # fmt: skip


def results(**changes: Any) -> Results:
    fields = {
        "commit": "abc",
        "date": "2026-01-02",
        "gpu": "NVIDIA H200",
        "driver": "580.1",
        "versions": {"torch": "2.11"},
        "read_bandwidth_tb_s": 4.0,
        "runs": [],
    }
    return Results(**(fields | changes))


def decode_run(scenario: str = "single-512", round_s: float = 4e-3, **fields: Any) -> DecodeRun:
    given: dict[str, Any] = {
        "engine": "drift", "executor": "graph", "model": "llama-3.1-8b", "dtype": "bfloat16", **fields,
    }  # fmt: skip
    rounds_s = [round_s * share for share in (1.0, 0.5, 2.0)]
    return DecodeRun.of_rounds(rounds_s, 12e9, 4.0, scenario=Scenario.parse(scenario), **given)


def test_run_computes_its_figures() -> None:
    run = decode_run("batch8-512")
    assert (run.tokens_per_s, run.tokens_per_s_min, run.tokens_per_s_max) == (2000.0, 1000.0, 4000.0)
    assert run.ms_per_round == 4.0
    assert run.roofline_fraction == 0.75
    assert run.num_repeats == 3
    with pytest.raises(ValueError, match="above 0"):
        decode_run(round_s=0.0)


def test_results_are_written_and_read_back(tmp_path: Path) -> None:
    found, path = results(), tmp_path / "gpu" / "decode.json"
    found.add(decode_run())
    found.add(Run(engine="drift", model="m", dtype="float32", scenario="startup", batch=1, context=8))
    write(found, path)
    assert read(path) == found
    raw = msgspec.json.decode(path.read_bytes())
    assert set(raw) == {"commit", "date", "gpu", "driver", "versions", "read_bandwidth_tb_s", "runs"}
    assert raw["runs"][1].keys() == SCHEMA
    extras = {"num_repeats", "tokens_per_s_min", "tokens_per_s_max", "bytes_per_round", "executor"}
    assert raw["runs"][0].keys() == SCHEMA | extras  # fields that were not measured are left out


def test_process_that_ends_while_it_writes_leaves_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, path = results(), tmp_path / "decode.json"
    found.add(decode_run())
    write(found, path)
    before = path.read_bytes()

    def half(target: Path, content: bytes) -> None:
        with target.open("wb") as file:
            file.write(content[: len(content) // 2])
        raise KeyboardInterrupt

    found.add(decode_run("single-32k"))
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Path, "write_bytes", half)
        write(found, path)
    assert path.read_bytes() == before
    write(found, path)
    assert read(path) == found and list(tmp_path.iterdir()) == [path]


def test_new_run_replaces_the_old_one_of_the_same_kind(tmp_path: Path) -> None:
    path = tmp_path / "decode.json"
    old, new = results(), results(commit="def", read_bandwidth_tb_s=4.2)
    for run in (decode_run(), decode_run("single-32k"), decode_run(executor="eager")):
        old.add(run)
    new.add(decode_run(round_s=2e-3))
    write(old, path)
    merged = write(new, path)
    assert merged == read(path)
    assert (merged.commit, merged.read_bandwidth_tb_s) == ("def", 4.2)
    kept, also_kept, added = merged.runs
    assert (kept["scenario"], also_kept["executor"], added["tokens_per_s"]) == ("single-32k", "eager", 500.0)
    assert (kept["commit"], kept["read_bandwidth_tb_s"]) == ("abc", 4.0)
    assert "versions" not in kept and "commit" not in added


def service_run(repeat: int, context: int, tokens_per_s: float) -> dict[str, Any]:
    given = {"case": "closed-64", "repeat": repeat, "context": context, "tokens_per_s": tokens_per_s}
    return msgspec.to_builtins(decode_run()) | given


def test_new_run_replaces_all_repeats_of_another_commit() -> None:
    old = results(runs=[service_run(0, 571, 5400.0), service_run(1, 558, 5200.0)])
    new = results(commit="def", runs=[service_run(0, 562, 6100.0)])
    merged = record.merge(old, new)
    assert [run["tokens_per_s"] for run in merged.runs] == [6100.0]
    again = results(commit="def", runs=[service_run(1, 563, 6000.0)])
    assert [run["tokens_per_s"] for run in record.merge(merged, again).runs] == [6100.0, 6000.0]


def test_field_that_is_false_is_as_if_it_were_missing() -> None:
    plain = msgspec.to_builtins(decode_run())
    new = results(commit="def", runs=[plain | {"is_adaptive": False, "draft": None}])
    assert len(record.merge(results(runs=[plain]), new).runs) == 1


def test_old_run_keeps_its_commit_over_several_merges() -> None:
    first, second, third = results(commit="1"), results(commit="2"), results(commit="3")
    first.add(decode_run())
    second.add(decode_run("single-32k"))
    third.add(decode_run("batch4-16k"))
    runs = record.merge(record.merge(first, second), third).runs
    assert [run.get("commit") for run in runs] == ["1", "2", None]


def test_results_of_different_machines_are_not_merged(tmp_path: Path) -> None:
    path = tmp_path / "decode.json"
    write(results(), path)
    before = path.read_bytes()
    with pytest.raises(ValueError, match="H100"):
        write(results(gpu="NVIDIA H100"), path)
    assert path.read_bytes() == before


def test_merge_finds_the_file_by_gpu_and_topic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "RESULTS", tmp_path / "results")
    found = results()
    found.add(decode_run())
    write(found, tmp_path / "decode.json")
    merge.main([str(tmp_path / "decode.json")])
    assert read(tmp_path / "results" / "nvidia-h200" / "decode.json") == found


@pytest.mark.parametrize("content", [None, "{", '{"commit": 1}'], ids=["missing", "cut off", "another type"])
def test_what_is_no_result_file_is_not_merged(
    content: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "decode.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(SystemExit) as caught:
        merge.main([str(file)])
    assert caught.value.code == 2
    assert f"{file}: expected a result file" in capsys.readouterr().err


def test_place_of_results_is_checked_before_anything_is_measured(tmp_path: Path) -> None:
    check_place(tmp_path / "new" / "decode.json", "CPU")
    file = tmp_path / "decode.json"
    write(results(), file)
    check_place(file, results().gpu)
    with pytest.raises(ConfigError, match="a file of results of CPU, not of"):
        check_place(file, "CPU")
    file.write_text("garbage")
    for wrong in (file, tmp_path, file / "decode.json"):
        with pytest.raises(ConfigError, match="out='.*': expected a result file, or none: "):
            check_place(wrong, "CPU")


def test_commit_is_read_from_the_environment_without_history(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DRIFT_COMMIT", "given")
    assert machine.commit() == "given"
    monkeypatch.delenv("DRIFT_COMMIT")
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert machine.commit() == "unknown"


def test_commit_of_changed_code_is_marked_dirty(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("DRIFT_COMMIT", raising=False)
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "code.py").write_text("1")
    identity = ("-c", "user.name=n", "-c", "user.email=e")
    for command in (("init", "-q"), ("add", "."), (*identity, "commit", "-qm", "m")):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    (tmp_path / "notes").write_text("not measured")
    clean = machine.commit()
    (tmp_path / "src" / "code.py").write_text("2")
    assert machine.commit() == f"{clean}-dirty"


def test_ratio_is_to_the_measured_peer_or_its_anchor() -> None:
    found = results()
    found.add(decode_run())  # 250 tokens/s
    assert decode_table(found)[2][0][-1] == "1.22x (anchor)"
    found.add(decode_run(engine="vllm", executor=UNSET, round_s=5e-3))
    assert [row[-1] for row in decode_table(found)[2]] == ["1.25x", "0.98x of its anchor"]
    found.runs.pop()
    found.add(decode_run(engine="vllm", executor=UNSET, round_s=6e-3))
    ratios = [row[-1] for row in decode_table(found)[2]]
    assert ratios == ["1.22x (anchor)", "0.81x of its anchor (void)"]
    found = results(gpu="NVIDIA H100")
    found.add(decode_run())
    assert decode_table(found)[2][0][-1] == ""


def test_roofline_bars_are_computed_from_runs() -> None:
    found = results()
    found.add(decode_run())  # 4 ms a round; 3 ms to read its bytes
    drift, *anchors = bars(found)
    assert (drift.engine, drift.share, drift.tokens_per_s, drift.is_anchor) == (
        "drift graph", 0.75, 250.0, False
    )  # fmt: skip
    assert {bar.engine: (bar.share, bar.tokens_per_s) for bar in anchors} == {
        "vllm": (pytest.approx(0.003 * 205), 205.0),
        "transformers": (pytest.approx(0.003 * 203), 203.0),
    }
    assert all(bar.is_anchor for bar in anchors)
    found.add(decode_run(round_s=8e-3, config="processor=machine"))
    assert bars(found) == [drift, *anchors]
    quantised = decode_run()
    quantised.dtype = "fp8"
    found.add(quantised)
    assert {bar.model for bar in bars(found)} == {drift.model, f"{drift.model}, fp8"}
    found.add(decode_run(engine="vllm", executor=UNSET, round_s=5e-3))
    vllm = [bar for bar in bars(found) if bar.engine == "vllm" and bar.model == drift.model]
    assert [(bar.share, bar.is_anchor) for bar in vllm] == [(0.6, False)]


@pytest.mark.slow
def test_roofline_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = results()
    for name in ("single-512", "batch64-512"):
        found.add(decode_run(name))
    draw(found, tmp_path / "roofline.png")
    assert (tmp_path / "roofline.png").read_bytes().startswith(b"\x89PNG")
