"""The generated pages of floors and measurements are those of the committed results."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from perf import report
from perf.gating.gate import load_gates
from perf.harness.processes import ROOT

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
    assert set(shown) == set(files) >= {"drafts.png", "acceptance.png", "roofline.png", "peers.png"}
    assert max(files.values()) < 300_000


def report_folder(generator: ModuleType) -> Path:
    folder: Path = generator.RESULTS / generator.GPU
    return folder
