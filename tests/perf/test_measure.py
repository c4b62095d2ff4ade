"""The list of all measurements, and the queue that makes them, with commands in place of measurements."""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from interrupts import one_interrupt

from drift_sdk.errors import ConfigError
from perf import measure
from perf.gating.gate import load_gates
from perf.harness.gpu_queue import Job, Outcome, run_jobs
from perf.harness.recording import Recording
from perf.measure import Measurement, load_measurements

GPU_TOPICS = {gate.topic for gate in load_gates().gates}


class ParsedError(Exception):
    """The arguments of a script are accepted."""


def job(name: str, code: str, folder: Path, *, num_gpus: int = 1, seconds: float = 0.0) -> Job:
    """A job that runs Python code, in which `folder` is a folder."""
    line = sys.executable, "-c", f"from pathlib import Path; folder = Path({str(folder)!r})\n{code}"
    log = folder / name / "log.txt"
    return Job(name=name, line=line, num_gpus=num_gpus, seconds=seconds, log=log)


def waits_for(name: str) -> str:
    """Code that ends when a file is there."""
    return f"import time\nwhile not (folder / {name!r}).exists(): time.sleep(0.01)\n"


@pytest.mark.parametrize("name", load_measurements())
def test_scripts_accept_their_arguments(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def parsed(*_: Any, **__: Any) -> None:
        raise ParsedError

    measurement = load_measurements()[name]
    module = importlib.import_module(measurement.module)
    monkeypatch.setattr(tempfile, "TemporaryDirectory", parsed)
    monkeypatch.setattr(Recording, "__init__", parsed)
    monkeypatch.setattr("perf.harness.recording.default_device", lambda: "cuda")
    with pytest.raises(ParsedError):
        module.main(measurement.line(tmp_path)[3:])


def test_every_topic_of_the_gates_is_measured() -> None:
    assert {measurement.topic for measurement in load_measurements().values()} >= GPU_TOPICS


def test_files_without_measurements_are_refused(tmp_path: Path) -> None:
    one = '[[measurement]]\nname = "a b"\nmodule = "perf.decode"\ntopic = "decode"\nseconds = 1\n'
    for text in ("", "measurement = 1", one + "speed = 1", one + one, one + one.replace("a b", "a-b")):
        path = tmp_path / "file.toml"
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"file\.toml"):
            load_measurements(path)
    path.write_text(one)
    assert load_measurements(path)["a b"].folder == "a-b"


def test_jobs_run_side_by_side_on_gpus_of_their_own(tmp_path: Path) -> None:
    """Two that end each other's wait; one that waits for both GPUs, though a later one needs one alone."""
    says = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])\n"
    jobs = [
        job("first", f"{says}(folder / '1').touch()\n{waits_for('2')}", tmp_path),
        job("both", f"{says}assert (folder / '3').exists()", tmp_path, num_gpus=2),
        job("second", f"{says}{waits_for('1')}(folder / '2').touch()\n{waits_for('3')}", tmp_path),
        job("third", f"{says}(folder / '3').touch()", tmp_path),
    ]
    outcomes = run_jobs(jobs, ["4", "7"], None)
    assert [(one.name, one.state) for one in outcomes] == [(one.name, "done") for one in jobs]
    gpus = {one.name: one.log.read_text().strip() for one in jobs}
    assert {gpus["first"], gpus["second"]} == {"4", "7"} and sorted(gpus["both"]) == [",", "4", "7"]
    assert gpus["third"] in ("4", "7")


def test_what_does_not_end_in_time_is_ended_or_left_out(tmp_path: Path) -> None:
    jobs = [
        job("too long", "raise AssertionError", tmp_path, seconds=1e6),
        job("too large", "raise AssertionError", tmp_path, num_gpus=2),
        job("failing", "import sys; sys.exit(3)", tmp_path),
        job("endless", "import time\nprint('running', flush=True)\nwhile True: time.sleep(1)", tmp_path),
    ]
    seen: list[tuple[str, Outcome | None]] = []
    outcomes = run_jobs(jobs, ["0"], 3.0, lambda job, outcome: seen.append((job.name, outcome)))
    assert [one.state for one in outcomes] == ["left out", "left out", "failed", "late"]
    assert [name for name, outcome in seen if outcome is None] == ["failing", "endless"]
    assert outcomes[3].seconds > 0


def test_processes_of_a_job_end_with_it(tmp_path: Path) -> None:
    """A child that its job leaves behind, and that ignores the request to end."""
    child = (
        "import signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        "print('ready', flush=True); time.sleep(1000)"
    )
    code = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {child!r}], stdout=subprocess.PIPE)
assert child.stdout.readline()
(folder / "pid").write_text(str(child.pid))
"""
    (outcome,) = run_jobs([job("parent", code, tmp_path)], ["0"], None)
    assert outcome.state == "done"
    pid = int((tmp_path / "pid").read_text())
    assert_ended(pid)


def assert_ended(pid: int) -> None:
    """A killed process ends soon: it is gone, or nobody has waited for it."""
    while True:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return

        if state == "Z":
            return

        time.sleep(0.01)


def test_interrupted_queue_ends_its_jobs(tmp_path: Path) -> None:
    code = f"import os; (folder / 'pid').write_text(str(os.getpid()))\n{waits_for('never')}"

    def interrupt_when_it_runs(interrupt: Callable[[], None]) -> None:
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            time.sleep(0.01)
        interrupt()

    with one_interrupt() as interrupt:
        thread = threading.Thread(target=interrupt_when_it_runs, args=(interrupt,))
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            run_jobs([job("waiting", code, tmp_path)], ["0"], None)
        thread.join()
    assert_ended(int((tmp_path / "pid").read_text()))


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> dict[str, Measurement]:
    """A measurement that prints the help of a script that starts quickly, and one of a script that does not
    exist."""
    made = (
        Measurement(name="fine one", module="json.tool", topic="decode", seconds=1, arguments="--help"),
        Measurement(name="none", module="perf.no_such_script", topic="decode", seconds=1),
    )
    known = {one.name: one for one in made}
    monkeypatch.setattr(measure, "load_measurements", lambda: known)
    monkeypatch.setenv("DRIFT_COMMIT", "abc")
    return known


@pytest.mark.usefixtures("two")
def test_done_measurements_are_not_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run() -> str:
        assert measure.main(["run", "--gpus", "0", "--out", str(tmp_path), "fine one", "none"]) == 1
        return capsys.readouterr().out

    first = run()
    assert "fine one: done" in first and "none: failed" in first
    assert "No module named perf.no_such_script" in first
    assert "usage: " in (tmp_path / "fine-one" / "log.txt").read_text()
    assert "fine one" not in run()
    monkeypatch.setenv("DRIFT_COMMIT", "def")
    assert "fine one: done" in run()


def test_names_and_vllm_are_checked(
    two: dict[str, Measurement], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert measure.main(["list"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in two)
    with pytest.raises(SystemExit):
        measure.main(["run", "fine"])
    assert "NAME 'fine': expected one of 'fine one', 'none'" in capsys.readouterr().err
    two["fine one"] = Measurement(
        name="fine one", module="perf.decode", topic="decode", seconds=1, arguments="--peer vllm"
    )
    monkeypatch.delenv("VLLM_PATH", raising=False)
    monkeypatch.setattr(measure, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        measure.main(["run", "fine one"])
    assert "VLLM_PATH" in capsys.readouterr().err
    assert os.environ["DRIFT_COMMIT"] == "abc"
