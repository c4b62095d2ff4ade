"""Every example runs as it is, in a process of its own."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import smollm2

EXAMPLES = Path(__file__).parent.parent / "examples"
SUPPORT = {"smollm2", "openai_protocol"}

# A SmolLM2 that is not there yet is fetched by the first test.
pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="session", autouse=True)
def model() -> str:
    return str(smollm2.path())


@contextmanager
def running(name: str, *arguments: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), *arguments]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env={**os.environ, **environment}
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def run(name: str, *arguments: str, stdin: str = "") -> tuple[str, str]:
    """What it wrote to stdout and to stderr."""
    with running(name, *arguments) as process:
        out, err = process.communicate(stdin, timeout=120)
    assert process.returncode == 0, err
    assert "Warning" not in err and "Traceback" not in err, err
    return out, err


def test_hello() -> None:
    out, _ = run("hello")
    assert "Paris" in out
    assert re.search(r"\[\d+ tokens, first after \d+ ms, [\d.]+ tok/s\]", out)


def test_chat() -> None:
    out, _ = run("chat", stdin="Say hello in one word.\n")
    assert len(out.removeprefix("> ").strip()) > 3
    assert out.count("> ") == 2


def test_concurrent_streams(model: str) -> None:
    out, _ = run("concurrent_streams", model, "3")
    assert [line[:5] for line in out.splitlines()[:3]] == ["  0  ", "  1  ", "  2  "]
    assert re.search(r"3 streams, \d+ tokens in [\d.]+ s", out)


def test_speculate() -> None:
    out, _ = run("speculate")
    assert "the same tokens: True" in out
    assert float(re.search(r"tokens a round: ([\d.]+)", out)[1]) > 2


def test_cancel() -> None:
    out, _ = run("cancel")
    assert "cancel(): cancelled" in out
    assert "timed out: True" in out
    assert "running: 0 " in out


def test_dashboard() -> None:
    out, _ = run("dashboard", "--seconds", "3", "--streams", "3", "--max-tokens", "8")
    for word in ("drift_sdk", "running", "KV cache", "tokens/s", "streams"):
        assert word in out
    assert out.count("Write ") == 3
    assert re.search(r"[▁▂▃▄▅▆▇█]", out)


@pytest.mark.skipif(sys.platform == "win32", reason="no signals to send")
def test_dashboard_ends_quietly_at_ctrl_c() -> None:
    # As if in a terminal, where every frame is drawn and not the last alone.
    with running("dashboard", "--streams", "2", "--max-tokens", "8", FORCE_COLOR="1") as process:
        while "streams" not in process.stdout.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")


def test_batch_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    prompts, answers = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    lines = (EXAMPLES / "prompts.jsonl").read_text().splitlines()[:5]
    options = ("--input", str(prompts), "--output", str(answers), "--max-tokens", "6")
    prompts.write_text("\n".join(lines[:3]) + "\n")
    _, err = run("batch", *options)
    assert "3/3" in err
    first = answers.read_text()
    assert len(first.splitlines()) == 3

    prompts.write_text("\n".join(lines) + "\n")
    answers.write_text(first + '{"text": "half a li')
    _, err = run("batch", *options)
    assert "3 of 5 are in" in err
    assert "4/5" in err and "5/5" in err and "3/5" not in err
    assert answers.read_text().startswith(first)
    assert [json.loads(line)["finish_reason"] for line in answers.read_text().splitlines()] == ["length"] * 5

    again = answers.read_text()
    run("batch", *options)
    assert answers.read_text() == again


def test_structured() -> None:
    out, _ = run("structured")
    assert "decoded: Recipe(" in out
    assert re.search(r"a date: \d{4}-\d\d-\d\d", out)


def test_tools() -> None:
    out, _ = run("tools")
    assert "call:  get_weather {" in out
    assert "result: {" in out


@pytest.mark.skipif(sys.platform == "win32", reason="no signals to send")
def test_embed_fastapi_serves_until_it_is_interrupted() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60)
    with running("embed_fastapi", "--port", str(port)) as process, client:
        while True:
            try:
                assert client.get("/health").json()["status"] == "ok"
                break
            except httpx.ConnectError:
                assert process.poll() is None
                time.sleep(0.1)
        question = {"role": "user", "content": "What is the capital of France?"}
        body = {"messages": [question], "temperature": 0, "max_tokens": 12}
        answer = client.post("/v1/chat/completions", json=body).json()
        assert "Paris" in answer["choices"][0]["message"]["content"]
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode in (0, -signal.SIGINT), err
    assert "Application shutdown complete" in err


def test_no_example_is_left_out() -> None:
    names = {file.stem for file in EXAMPLES.glob("*.py")} - SUPPORT
    tests = "\n".join(name for name in globals() if name.startswith("test_"))
    assert not [name for name in names if f"test_{name}" not in tests]
