"""The generated pages of floors and measurements are those of the committed results."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest

from perf import report
from perf.gates import Report, Timing
from perf.gating.gate import load_gates
from perf.gating.judging import Verdict
from perf.harness.processes import ROOT
from perf.planted_faults import Outcome

RUN = "run python docs/generate_report.py"


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_report", ROOT / "docs" / "generate_report.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_page_of_floors_matches_the_committed_results(generator: ModuleType) -> None:
    page = generator.FILE.read_text()
    assert page == generator.render(), RUN
    assert all(f"| {gate.name} | {gate.suite} |" in page for gate in load_gates().gates)


def test_report_matches_the_committed_results(
    generator: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but the pictures, whose bytes depend on the library that draws them."""
    monkeypatch.setattr(report, "find_spec", lambda name: None)
    path = report.write_report(report_folder(generator), tmp_path)
    text = (generator.REPORT / report.REPORT).read_text()
    assert re.sub(r"\n!\[.*\]\(.*\)\n", "", text) == path.read_text(), RUN
    shown = re.findall(r"!\[.*\]\((.*)\)", text)
    files = {file.name: file.stat().st_size for file in generator.REPORT.iterdir() if file.suffix == ".png"}
    assert set(shown) == set(files) >= {"drafts.png", "roofline.png", "peers.png"}
    assert max(files.values()) < 300_000


def test_runs_of_the_gates_are_listed_with_their_wall_time(generator: ModuleType, tmp_path: Path) -> None:
    own = tmp_path / "gates"
    own.mkdir()
    green = Verdict(gate="g", topic="decode", state="green")
    red = Verdict(gate="h", topic="decode", state="red", reason="under the floor")
    common: dict[str, Any] = {
        "commit": "abc",
        "date": "2026-01-02",
        "machine": "m",
        "gpu": "g",
        "driver": None,
    }
    common |= {"read_bandwidth_tb_s": 4.3, "verdicts": (green, green, red)}
    timings = (Timing(command="perf.decode --repeats 3", seconds=40.2),)
    Report(suite="full", is_complete=True, seconds=41.6, timings=timings, **common).write(
        own / "gates-full.json"
    )
    Report(suite="micro", is_complete=False, seconds=9.0, timings=(), **common).write(
        own / "gates-micro-1.json"
    )
    outcomes = [
        Outcome(fault="none", is_right=True, seconds=20.0, verdicts=(green,)),
        Outcome(fault="slowed kernel", is_right=True, seconds=21.0, verdicts=(green, red)),
        Outcome(fault="raised floor", is_right=False, seconds=0.0, verdicts=(green,)),
    ]
    (own / "faults.json").write_bytes(msgspec.json.encode(outcomes))
    page = generator.render(tmp_path)
    for line in (
        "| full | abc | 2026-01-02 | 2 green, 1 red | 42 s | perf.decode 40 s |",
        "| micro, interrupted | abc | 2026-01-02 | 2 green, 1 red | 9 s |  |",
        "| none | green |  | 20 s |",
        "| slowed kernel | red | under the floor | 21 s |",
        "| raised floor | green, wrong |  | 0 s |",
    ):
        assert line in page.splitlines()


LARGE_DENSE = ("llama-3.1-8b", "qwen2.5-7b", "qwen3-8b", "qwen3-14b", "qwen3.6-27b", "gemma-4-31b")


def test_chart_of_the_readme_has_runs_beside_the_peer_alone(generator: ModuleType, tmp_path: Path) -> None:
    found = generator.speed_ratios()
    assert len(found) == 16 and len(found["llama-3.1-8b"]) == 4
    ratios = [ratio for values in found.values() for ratio in values.values()]
    page = (ROOT / "README.md").read_text()
    assert f"{min(ratios):.2f} to {max(ratios):.2f} times" in page
    large = [ratio for model in LARGE_DENSE for ratio in found[model].values()]
    assert f"dense ones of 7B and more {min(large):.2f} to {max(large):.2f} times" in page
    pytest.importorskip("matplotlib")
    generator.draw_speed(found, tmp_path / generator.CHART.name)
    assert "<svg" in (tmp_path / generator.CHART.name).read_text()


def report_folder(generator: ModuleType) -> Path:
    folder: Path = generator.RESULTS / generator.GPU
    return folder
