"""Stress on a tiny model and the CPU: loads, random requests, and the faults that it has to find."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from drift_sdk import NGram
from drift_sdk.execution.graph.buckets import MAX_PLAIN_ROWS
from drift_sdk.scheduling.blocks import BlockManager
from perf import stress
from perf.harness import stress_load
from perf.harness.drafting import Drafting
from perf.harness.integrity import Memory
from perf.harness.record import Results, identity_of
from perf.harness.shapes import Model, prepare
from perf.harness.stress_load import Leg, Stress
from perf.stress import measure, problems_of, stress_table

TINY = Stress(device="cpu", contexts=(64,), fills=(0.5, 0.6), num_long=2)
DRAFTING = Drafting(draft=NGram(), num_draft_tokens=2)


@pytest.fixture
def tiny(tmp_path: Path) -> Model:
    return prepare("tiny", tmp_path / "tiny")


@pytest.mark.slow
def test_cache_is_filled_and_random_requests_leave_no_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("perf.harness.recording.read_bandwidth_tb_s", lambda device: 0.01)
    monkeypatch.setattr(stress_load, "MOST_SLEEP_S", 0.002)
    out = tmp_path / "stress.json"
    arguments = ["--model", "tiny", "--device", "cpu", "--context", "64", "128", "--num-long", "2"]
    seconds = ["--fill", "0.9", "--minutes", str(0.5 / 60), "--num-draft-tokens", "2", "--out", str(out)]
    code = stress.main([*arguments, *seconds])
    problems = [run["problems"] for run in json.loads(out.read_text())["runs"]]
    assert (code, problems) == (0, [[], [], []])
    runs = json.loads(out.read_text())["runs"]
    assert [(run["scenario"], run["fill"]) for run in runs] == [
        ("context-64", 0.9), ("context-128", 0.9), ("random", 0.0),
    ]  # fmt: skip
    for run in runs[:2]:
        assert run["fill"] - 0.02 <= run["peak_kv_use"] <= 1
        assert run["num_requests"] >= 2 and run["num_errors"] == 0
    assert runs[2]["num_cancelled"] > 0
    assert all(run["num_checks"] > 0 and run["problems"] == [] for run in runs)


async def test_lost_block_is_found(tiny: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block manager that forgets to free a block after a request."""
    release = BlockManager.release

    def forgetful(blocks: BlockManager, sequence: Any) -> None:
        release(blocks, sequence)
        blocks.pool.allocate(1)

    monkeypatch.setattr(BlockManager, "release", forgetful)
    monkeypatch.setattr(stress, "CHECK_PERIOD", 1)
    (run,) = await measure(tiny, [DRAFTING], TINY)
    assert "owned of" in run.problems[0] and run.problems[-1] == "the engine has ended by itself"
    monkeypatch.setattr(stress, "CHECK_PERIOD", 1000)
    run, _ = await measure(tiny, [DRAFTING], TINY)
    assert "blocks held and 0 sequences left" in run.problems[-1]


async def test_growing_memory_is_found(tiny: Model) -> None:
    readings = iter([Memory(100.0, 10.0), Memory(400.0, 80.0)])
    first, second = await measure(tiny, [DRAFTING], TINY, memory=lambda device: next(readings))
    assert first.problems == []
    assert second.problems == [
        "process memory grew by 300 MiB: expected at most 256",
        "gpu memory grew by 70 MiB: expected at most 64",
    ]
    unfilled = replace(first, peak_kv_use=0.3, num_checks=0)
    assert problems_of(unfilled) == [
        "sequences held 0.30 of the cache: expected 0.5", "the scheduler was never checked"
    ]  # fmt: skip


def test_random_requests_are_divided_into_minutes() -> None:
    for minutes, expected in ((0.0, []), (0.5, [30.0]), (2.5, [50.0] * 3), (3.0, [60.0] * 3)):
        legs = replace(TINY, minutes=minutes).legs
        assert [leg.number for leg in legs] == list(range(len(expected)))
        assert [leg.seconds for leg in legs] == pytest.approx(expected)


async def test_each_part_of_the_random_requests_is_a_run_of_its_own(
    tiny: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault in the second leaves the first on record."""
    monkeypatch.setattr(stress_load, "MOST_SLEEP_S", 0.002)
    monkeypatch.setattr(Stress, "legs", [Leg(0, 0.05), Leg(1, 0.05)])
    readings = iter([Memory(100.0, 10.0), Memory(101.0, 10.0), Memory(400.0, 10.0)])
    noted: list[Any] = []
    stressed = replace(TINY, fills=(0.5,))
    runs = await measure(tiny, [DRAFTING], stressed, noted.append, memory=lambda device: next(readings))
    assert noted == runs
    assert [run.scenario for run in runs] == ["context-64", "random", "random"]
    results = Results.of("cpu", 0.01)
    for run in runs:
        results.add(run)
    assert len({identity_of(run) for run in results.runs}) == 3
    assert [run.get("repeat") for run in results.runs] == [None, 0, 1]
    grown = ["process memory grew by 300 MiB: expected at most 256"]
    assert [run.problems for run in runs] == [[], [], grown]
    assert [row[0] for row in stress_table(results)[2]] == ["context-64", "random 0", "random 1"]


@pytest.mark.parametrize("num_drafts", [2, 5])
def test_sequences_decode_until_the_last_prompt_is_computed(num_drafts: int) -> None:
    """Also if every draft is accepted, and a step has the fewest rows for prompts."""
    load = Stress(device="cuda", contexts=(32_768, 65_536), fills=(0.75, 0.9))
    num_rows = MAX_PLAIN_ROWS - 8 * (num_drafts + 1)
    num_steps = (load.num_long - 1) * 65_536 / num_rows
    assert load.num_tokens(num_drafts) >= num_steps * (num_drafts + 1)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--fill", "1.5"], "shares between 0 and 1"),
        (["--num-draft-tokens", "17"], "expected 1 to 16"),
        (["--context", "0"], "at least 1"),
        (["--minutes", "-1"], "--minutes: 0 to 1440"),
        (["--minutes", "nan"], "--minutes: 0 to 1440"),
        (["--minutes", "inf"], "--minutes: 0 to 1440"),
        (["--context", "many"], "invalid length value"),
    ],
)
def test_wrong_argument_is_rejected(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        stress.main(arguments)
    assert message in capsys.readouterr().err
