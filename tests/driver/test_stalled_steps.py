"""The warning about steps that stall."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from model_zoo import make_model
from placement import engine_config

from drift_sdk import Engine
from drift_sdk.driver import stats_recorder
from drift_sdk.driver.stats_recorder import StalledSteps

NORMAL = [0.01, 0.012, 0.008] * 4


def warnings_of(
    durations: Sequence[float], caplog: pytest.LogCaptureFixture, *, num_rows: Sequence[int] = (1,)
) -> list[str]:
    steps = StalledSteps()
    for index, duration_s in enumerate(durations):
        steps.note(num_rows[index % len(num_rows)], duration_s)
    return [record.getMessage() for record in caplog.records]


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)


def test_warns_once_when_steps_have_lost_five_seconds(
    threads: None, caplog: pytest.LogCaptureFixture
) -> None:
    (said,) = warnings_of([*NORMAL, *[1.0, *NORMAL] * 12], caplog)
    assert said.startswith("steps have stalled for 6 s in all: with 1 rows one usually takes 10 ms")
    assert "torch's 4 threads (OMP_NUM_THREADS)" in said and "num_threads" in said
    assert caplog.records[0].levelname == "WARNING"


@pytest.mark.parametrize(
    "durations",
    [
        [0.01] * 1000,
        [*NORMAL, *[1.0, *NORMAL] * 4],  # four seconds
        [*NORMAL, *[0.07, *NORMAL] * 400],  # a step of seven times the median
        [1.0, *NORMAL, 5.0],  # the first one, and one that no normal one follows
        [*NORMAL, *[1.0] * 1000],  # slower from some step on
        [*NORMAL, *[1.0] * 20, *NORMAL, *[1.0] * 20],
    ],
)
def test_other_steps_are_no_stalls(
    threads: None, caplog: pytest.LogCaptureFixture, durations: list[float]
) -> None:
    assert warnings_of(durations, caplog) == []


def test_steps_of_other_rows_are_not_compared(threads: None, caplog: pytest.LogCaptureFixture) -> None:
    assert warnings_of([0.01, 2.0] * 1000, caplog, num_rows=(1, 64)) == []


@pytest.mark.parametrize(("num_threads", "has_cuda"), [(1, False), (4, True)])
def test_nothing_is_said_where_no_threads_wait(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, num_threads: int, has_cuda: bool
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: has_cuda)
    assert warnings_of([*NORMAL, *[6.0, *NORMAL] * 3], caplog) == []


async def test_an_engine_on_the_cpu_notes_its_decoding_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted: list[int] = []
    monkeypatch.setattr(StalledSteps, "note", lambda self, num_rows, duration_s: noted.append(num_rows))
    make_model(0, tmp_path)
    async with Engine(tmp_path, engine_config(max_model_len=64, device="cpu")) as engine:
        await engine.generate([1, 2, 3], max_tokens=5, ignore_eos=True)
    assert noted == [1, 1, 1, 1]  # the first token comes with the prompt
    assert stats_recorder.NUM_STEPS > 1
