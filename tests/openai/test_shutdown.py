"""SIGTERM while drift_sdk.openai streams answers."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from loops import WAIT_S

import drift_sdk.openai
from drift_sdk import ConfigError
from drift_sdk.openai.server import serve
from drift_sdk.testing import scripted_engine

PROGRAM = Path(__file__).parents[1] / "support" / "draining_server.py"
BODY = {"messages": [{"role": "user", "content": "sing"}], "stream": True}

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="no signals to send")


@contextmanager
def server(drain_s: float, end: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process of a server, and its URL."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        command = [sys.executable, str(PROGRAM), str(listener.fileno()), str(drain_s), str(end)]
        process = subprocess.Popen(command, pass_fds=[listener.fileno()], stderr=subprocess.PIPE, text=True)
    with process:
        try:
            yield process, url
        finally:
            process.kill()


def events_of(lines: Iterator[str]) -> list[Any]:
    """The rest of a stream of events. A broken connection would raise."""
    data = [line.removeprefix("data: ") for line in lines if line]
    return [each if each == "[DONE]" else json.loads(each) for each in data]


def wait_until_closing(client: httpx.Client) -> None:
    """Return when a server takes no more requests. On a slow machine the client's connection may have been
    idle for so long that it has to be made again, which is refused by then."""
    with suppress(httpx.ConnectError):
        while client.get("/health").status_code != 503:
            pass


def check_exit(process: subprocess.Popen[str]) -> None:
    _, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0, err
    assert "Application shutdown complete" in err
    assert "Traceback" not in err and "ERROR" not in err


def test_open_streams_end_before_the_server_does(tmp_path: Path) -> None:
    """New requests are refused meanwhile."""
    end = tmp_path / "end"
    with (
        server(WAIT_S, end) as (process, url),
        httpx.Client(base_url=url, timeout=WAIT_S) as client,
        httpx.Client(base_url=url, timeout=WAIT_S) as other,
        client.stream("POST", "/v1/chat/completions", json=BODY) as response,
    ):
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        assert other.get("/health").status_code == 200
        process.send_signal(signal.SIGTERM)
        wait_until_closing(other)
        refused = other.post("/v1/chat/completions", json=BODY)
        assert (refused.status_code, refused.json()["error"]["type"]) == (503, "server_error")
        with pytest.raises(httpx.ConnectError), httpx.Client(base_url=url) as new:
            new.get("/health")
        end.touch()
        *events, last, done = events_of(lines)
        assert (last["choices"][0]["finish_reason"], done) == ("stop", "[DONE]")
        text = "".join(each["choices"][0]["delta"].get("content", "") for each in events)
        assert "la la" in text
        check_exit(process)


def test_streams_that_take_longer_end_with_an_error(tmp_path: Path) -> None:
    with (
        server(0.2, tmp_path / "never") as (process, url),
        httpx.Client(base_url=url, timeout=WAIT_S) as client,
        client.stream("POST", "/v1/chat/completions", json=BODY) as response,
    ):
        lines = response.iter_lines()
        next(lines)
        process.send_signal(signal.SIGTERM)
        last = events_of(lines)[-1]
        assert last["error"]["type"] == "server_error" and "closed" in last["error"]["message"]
        check_exit(process)


def test_a_second_ctrl_c_ends_the_wait(tmp_path: Path) -> None:
    with (
        server(1e6, tmp_path / "never") as (process, url),
        httpx.Client(base_url=url, timeout=WAIT_S) as client,
        httpx.Client(base_url=url, timeout=WAIT_S) as other,
        client.stream("POST", "/v1/chat/completions", json=BODY) as response,
    ):
        next(response.iter_lines())
        other.get("/health").raise_for_status()
        process.send_signal(signal.SIGINT)
        wait_until_closing(other)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=WAIT_S)
        assert process.returncode != 0


async def test_a_cancelled_server_lets_answers_end() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        async with scripted_engine("la " * 40, step_s=0.01) as engine:
            serving = serve(drift_sdk.openai.app(engine), [engine], drain_s=WAIT_S, sockets=[listener])
            task = asyncio.create_task(serving)
            async with (
                httpx.AsyncClient(base_url=url, timeout=WAIT_S) as client,
                client.stream("POST", "/v1/chat/completions", json=BODY) as response,
            ):
                lines = response.aiter_lines()
                assert (await anext(lines)).startswith("data: ")
                task.cancel()
                events = [line async for line in lines if line]
            assert events[-1] == "data: [DONE]" and "error" not in "".join(events)
            with pytest.raises(asyncio.CancelledError):
                await task
            async with httpx.AsyncClient(base_url=url) as client:
                with pytest.raises(httpx.ConnectError):
                    await client.get("/health")


async def test_a_taken_port_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        async with scripted_engine("la") as engine:
            with pytest.raises(ConfigError, match=f"port={port}"):
                await serve(drift_sdk.openai.app(engine), [engine], port=port)
            assert (await engine.generate("x")).text == "la"
