"""The loss of a replica: short runs with scripted engines, and the faults that they have to find."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from drift_sdk import ExecutorError
from perf import replica_loss
from perf.harness.killed_replica import KilledReplica, Seen, requests_of
from perf.harness.record import read


def test_command_kills_a_replica_with_and_without_replay(tmp_path: Path) -> None:
    out = tmp_path / "loss.json"
    arguments = ["--model", "scripted", "--devices", "cpu", "cpu", "--streams", "8", "--tokens", "64"]
    assert replica_loss.main([*arguments, "--out", str(out)]) == 0
    undisturbed, replayed, failed = read(out).runs
    assert (undisturbed["num_killed"], undisturbed["has_replay"]) == (0, None)
    assert 0 < replayed["num_killed"] < 8 and replayed["num_failed"] == 0
    assert replayed["num_replayed"] + replayed["num_moved"] == replayed["num_killed"]
    assert failed["num_failed"] == failed["num_killed"] > 0
    assert min(replayed["tokens_before"]) >= 8 and replayed["restart_s"] > 0
    assert not any(run["problems"] for run in (undisturbed, replayed, failed))


@pytest.mark.parametrize(
    ("seen", "problem"),
    [
        (Seen(tokens=[1, 2, 2, 3], was_killed=True), "other tokens"),
        (Seen(tokens=[1, 2]), "2 tokens"),
        (Seen(tokens=[1, 2], error=ExecutorError("gone")), "gone"),
    ],
)
def test_wrong_streams_are_found(seen: Seen, problem: str) -> None:
    bench = KilledReplica([], requests_of(1, 4, 128), 4, "scripted")
    bench._expected = [Seen(tokens=[1, 2, 3, 4])]
    found: Any = bench._problems([seen], has_replay=True)
    assert len(found) == 1 and problem in found[0]


def test_wrong_options_are_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--devices", "cpu"], ["--streams", "1"], ["--tokens", "8"]):
        with pytest.raises(SystemExit):
            replica_loss.arguments_of(arguments)
        assert arguments[0] in capsys.readouterr().err
