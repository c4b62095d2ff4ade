"""Exit of the interpreter, and forks, while an engine is running.

DRIFT_TEST_REPEATS says how often everything is done; once unless set.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from model_zoo import save_tokenizer
from slow_cases import slow_after
from tiny_llama import tiny_llama

SUPPORT = Path(__file__).parent.parent / "support"
REPEATS = int(os.environ.get("DRIFT_TEST_REPEATS", "1"))

STATUS = {"normal": 0, "exit": 3, "exception": 1, "interrupt": -signal.SIGINT, "hard": 4}
LAST_LINE = {"exception": "ValueError: unhandled", "interrupt": "KeyboardInterrupt"}


def run_child(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=300)


def leave(work: str, end: str, *arguments: str) -> list[str]:
    """The lines that the process writes to stderr. Its exit status must be that of `end`."""
    done = run_child(str(SUPPORT / "leaving_child.py"), work, end, *arguments)
    assert done.returncode == STATUS[end], done
    return done.stderr.splitlines()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose steps are many short operations."""
    folder = tmp_path_factory.mktemp("model")
    config = tiny_llama(vocab_size=300, num_hidden_layers=4, max_position_embeddings=512)
    (folder / "config.json").write_text(json.dumps(config))
    save_tokenizer(folder, 300)
    return folder


@pytest.mark.parametrize("end", STATUS)
def test_exit_status_is_kept_with_a_step_in_flight(end: str) -> None:
    for _ in range(REPEATS):
        lines = leave("step", end)
        assert lines[-1:] == ([LAST_LINE[end]] if end in LAST_LINE else [])


@pytest.mark.parametrize("end", slow_after(1, ["exit", "exception"]))
def test_exit_status_is_kept_with_torch_in_flight(end: str, folder: Path) -> None:
    for _ in range(REPEATS):
        lines = leave("eager", end, str(folder))
        assert lines[-1:] == ([LAST_LINE[end]] if end in LAST_LINE else [])


@pytest.mark.parametrize("work", ["tokenize", "grammar", "loading", "process"])
def test_exit_status_is_kept_with_other_work_in_flight(work: str) -> None:
    for _ in range(REPEATS):
        assert leave(work, "exit") == []


def test_hanging_work_does_not_keep_the_interpreter() -> None:
    assert leave("hanging_step", "exit") == []
    (warning,) = leave("hanging_text", "exit")
    assert "busy text threads: prompt of req-0" in warning


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_forked_child_finds_the_engine_closed_and_can_start_it() -> None:
    done = run_child(str(SUPPORT / "fork_child.py"), str(6 * REPEATS))
    assert (done.returncode, done.stderr) == (0, "")
