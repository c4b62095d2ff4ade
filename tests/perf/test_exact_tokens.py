"""Counting tokens that differ from those of requests alone, on a tiny model and the CPU."""

from __future__ import annotations

from pathlib import Path

import anyio
import msgspec
import pytest

from drift_sdk import EngineConfig
from perf import exact_tokens
from perf.exact_tokens import Conditions, Mode, ModeResult, Report, different, main, make_cases, modes_of
from perf.harness.shapes import prepare

SMALL = ["--model", "tiny", "--requests", "4", "--longest-prompt", "20", "--device", "cpu"]


@pytest.fixture
def few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact_tokens, "NUM_TOKENS", (6,))
    monkeypatch.setattr(exact_tokens, "SHARED_TOKENS", 16)


@pytest.mark.usefixtures("few_tokens")
def test_report_counts_tokens_and_what_was_exercised(tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    assert main([*SMALL, "--modes", "crowd", "n-gram drafts", "--out", str(out)]) == 0
    report = msgspec.json.decode(out.read_bytes(), type=Report)
    assert [(result.mode, result.is_exact) for result in report.results] == [
        ("crowd", True), ("n-gram drafts", True)
    ]  # fmt: skip
    assert all(result.num_requests == 8 and result.num_tokens == 48 for result in report.results)
    assert report.results[0].num_cached_tokens > 0
    assert report.results[1].num_accepted_tokens + report.results[1].num_rejected_tokens > 0
    assert report.results[0].num_distinct > 1


@pytest.mark.usefixtures("few_tokens")
def test_differences_are_counted(tmp_path: Path) -> None:
    """Requests are compared with tokens of which some were changed."""
    model = prepare("tiny", tmp_path)
    fields = {"device": "cpu", "executor": "eager", "load": "random", "kv_cache_tokens": 512}
    conditions = Conditions(model=model, fields=fields)
    cases = make_cases(3, model.spec.vocab_size, 5, seed=1)
    mode = Mode(name="plain", fields={}, subjects=("num_preemptions",), is_untuned=True)

    async def found() -> ModeResult:
        one, two, three = await exact_tokens.alone(conditions, cases, True)
        changed = [one, (*two[:-2], -1, -1), three[:-1]]
        return await exact_tokens.run_mode(conditions, mode, cases, changed, True)

    result = anyio.run(found)
    assert (result.num_different, result.num_different_requests) == (3, 2)
    assert result.not_exercised == ("num_preemptions",) and not result.is_good


def test_different_places_are_counted() -> None:
    assert different((1, 2, 3), (1, 2, 3)) == 0
    assert different((1, 2, 3), (1, 0, 3)) == 1
    assert different((1, 2, 3), (1, 0)) == 2


def test_requests_are_of_all_kinds_and_reproducible() -> None:
    cases = make_cases(60, 320, 700, seed=1)
    assert cases == make_cases(60, 320, 700, seed=1) != make_cases(60, 320, 700, seed=2)
    temperatures = {params.temperature for _, params in cases}
    assert 0.0 in temperatures and len(temperatures) > 2
    assert len({tuple(prompt[:192]) for prompt, _ in cases if len(prompt) > 192}) < 40
    for mode in modes_of("draft", 100):
        assert EngineConfig(**mode.fields)


def test_unknown_modes_are_rejected(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        main([*SMALL, "--modes", "crowded", "--out", str(tmp_path / "report.json")])
    assert "--modes: crowded: expected crowd, budget 256" in capsys.readouterr().err
