"""The warning about cores that other processes use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from model_zoo import make_model

from drift_sdk import Engine, EngineConfig
from drift_sdk.execution.eager import eager_executor
from drift_sdk.execution.eager.eager_executor import BusyCores, CoreTimes, core_times


def use_times(monkeypatch: pytest.MonkeyPatch, *, busy: float, own: float, num_cores: int = 4) -> None:
    """Each reading is six seconds after the one before, in which so many cores were busy on average, with
    this process and with others."""
    num_read = 0

    def read() -> CoreTimes:
        nonlocal num_read
        num_read += 1
        at_s = 6.0 * num_read
        return CoreTimes(at_s, busy * at_s, own * at_s, num_cores)

    monkeypatch.setattr(eager_executor, "core_times", read)
    monkeypatch.setattr(eager_executor, "monotonic", lambda: 6.0 * (num_read + 1))


@pytest.mark.parametrize(
    ("num_threads", "busy", "own", "advised"),
    [
        (4, 4.0, 4.0, None),
        (4, 4.0, 3.6, None),
        (4, 4.0, 3.0, 3),
        (4, 4.0, 2.0, 2),
        (4, 4.0, 0.5, 1),
        (4, 1.0, 0.0, 3),
        (2, 3.0, 1.0, None),
        (2, 4.0, 1.0, 1),
        (1, 4.0, 0.1, None),
    ],
)
def test_warns_once_if_threads_and_other_processes_need_more_cores_than_there_are(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    num_threads: int,
    busy: float,
    own: float,
    advised: int | None,
) -> None:
    use_times(monkeypatch, busy=busy, own=own)
    cores = BusyCores(num_threads)
    for _ in range(3):
        cores.look()
    said = [record.getMessage() for record in caplog.records]
    if advised is None:
        assert said == []
    else:
        (message,) = said
        assert f"use {busy - own:.1f} of 4 cores" in message and f"over {num_threads} threads" in message
        assert f"EngineConfig(num_threads={advised})" in message


def test_nothing_is_read_within_five_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    use_times(monkeypatch, busy=4.0, own=0.0)
    cores = BusyCores(4)
    monkeypatch.setattr(eager_executor, "monotonic", lambda: 6.0 + 4.9)
    monkeypatch.setattr(eager_executor, "core_times", lambda: pytest.fail("read"))
    cores.look()


def test_nothing_is_said_where_the_system_does_not_tell(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert core_times() is None
    BusyCores(4).look()
    assert not caplog.records


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="no /proc/stat")
def test_times_are_those_of_this_machine() -> None:
    before, after = core_times(), core_times()
    assert before is not None and after is not None
    assert before.num_cores == after.num_cores == len(os.sched_getaffinity(0))
    assert before.at_s <= after.at_s and before.busy_s <= after.busy_s and before.own_s <= after.own_s


async def test_engine_on_a_busy_cpu_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    make_model(0, tmp_path)
    readings = iter(CoreTimes(-100.0 + 10 * i, 20.0 * i, 1.0 * i, 2) for i in range(100))
    monkeypatch.setattr(eager_executor, "core_times", lambda: next(readings))
    config = EngineConfig(device="cpu", num_threads=2, max_model_len=64, kv_cache_tokens=128)
    async with Engine(tmp_path, config) as engine:
        await engine.generate("a", max_tokens=4)
    said = [record.getMessage() for record in caplog.records if "other processes" in record.getMessage()]
    assert len(said) == 1 and "num_threads=1" in said[0]
