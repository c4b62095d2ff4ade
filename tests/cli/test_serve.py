"""The command `serve` in a process of its own, as a user runs it."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from loops import WAIT_S

from drift_sdk import NGram
from drift_sdk.cli.command_line import main
from drift_sdk.cli.engine_start import RERANKER_NAMES
from drift_sdk.openai import RERANKERS

SCRIPTED = """
import sys
from drift_sdk.cli import command_line, engine_start
from drift_sdk.testing import Reply, ScriptedModel
reply = Reply("la", raises=MemoryError) if sys.argv.pop(1) == "failing" else "la " * 20
class Engine(engine_start.Engine):
    def __init__(self, model, config, **options):
        script = ScriptedModel(reply, config=config.replace(max_model_len=4096), step_s=0.002)
        super().__init__(model, script.config, open_model=script, **options)
engine_start.Engine = Engine
sys.exit(command_line.main())
"""
"""The command line with a scripted engine, whose kind is the first argument."""
BODY = {"model": "mine", "messages": [{"role": "user", "content": "sing"}]}

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="no signals to send")


@contextmanager
def serving(kind: str, *options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process of a server, and its URL."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-c", SCRIPTED, kind, "serve", "some/model", "--port", str(port), *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process, f"http://127.0.0.1:{port}"
        finally:
            process.kill()


async def ready(client: httpx.AsyncClient, process: subprocess.Popen[str]) -> None:
    while True:
        try:
            assert (await client.get("/health")).json()["status"] == "ok"
            return
        except httpx.ConnectError:
            assert process.poll() is None


async def test_serves_until_sigterm_and_lets_open_streams_end() -> None:
    options = ["--api-key", "k1", "--api-key", "k2", "--served-model-name", "mine"]
    headers = {"authorization": "Bearer k2"}
    with serving("singing", *options) as (process, url):
        async with httpx.AsyncClient(base_url=url, timeout=WAIT_S, headers=headers) as client:
            await ready(client, process)
            assert (await client.get("/v1/models")).json()["data"][0]["id"] == "mine"
            wrong = await client.get("/v1/models", headers={"authorization": "Bearer k3"})
            assert wrong.status_code == 401
            async with client.stream(
                "POST", "/v1/chat/completions", json={**BODY, "stream": True}
            ) as response:
                lines = response.aiter_lines()
                await anext(lines)
                process.send_signal(signal.SIGTERM)
                events = [line async for line in lines if line]
            assert events[-1] == "data: [DONE]" and '"finish_reason":"stop"' in events[-2]
        _, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0, err
    assert "Traceback" not in err
    assert "INFO:     ready in" in err, err


async def test_ctrl_c_ends_with_status_130() -> None:
    with serving("singing") as (process, url):
        async with httpx.AsyncClient(base_url=url, timeout=WAIT_S) as client:
            await ready(client, process)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 130, err
    assert "Traceback" not in err


async def test_ends_with_an_error_status_if_the_engine_fails() -> None:
    with serving("failing") as (process, url):
        async with httpx.AsyncClient(base_url=url, timeout=WAIT_S) as client:
            await ready(client, process)
            found = await client.post("/v1/chat/completions", json={**BODY, "model": "some/model"})
            assert found.status_code == 500 and found.json()["error"]["type"] == "server_error"
        _, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 1, err


def test_key_comes_from_the_environment_and_options_reach_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[Any] = []

    async def run_serve(*arguments: Any) -> int:
        given.extend(arguments)
        return 0

    monkeypatch.setattr("drift_sdk.cli.engine_start.run_serve", run_serve)
    monkeypatch.setenv("DRIFTSDK_API_KEY", "secret")
    options = ["--max-num-seqs", "3", "--drain", "1.5", "--draft", "ngram", "--gpu-memory-fraction", "0.5"]
    options += ["--reranker", "qwen3"]
    assert main(["serve", "some/model", *options]) == 0
    model, config, server = given
    assert (model, server.api_keys, server.names, server.drain) == ("some/model", ("secret",), (), 1.5)
    assert (config.max_num_seqs, config.max_queued_requests, config.gpu_memory_fraction) == (3, 256, 0.5)
    assert config.speculation is not None
    assert server.reranker == "qwen3" and RERANKER_NAMES == tuple(RERANKERS)


@pytest.mark.parametrize("name", ["engine.toml", "engine.json"])
def test_options_take_precedence_over_the_file(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []

    async def run_serve(*arguments: Any) -> int:
        given.append(arguments[1])
        return 0

    monkeypatch.setattr("drift_sdk.cli.engine_start.run_serve", run_serve)
    file = tmp_path / name
    fields = {"max_num_seqs": 3, "tool_format": "hermes", "max_queued_requests": 5}
    if file.suffix == ".json":
        text = json.dumps({**fields, "speculation": {"draft": "some/head"}})
    else:
        lines = [f"{name} = {json.dumps(value)}" for name, value in fields.items()]
        text = "\n".join([*lines, "[speculation]", 'draft = "some/head"'])
    file.write_text(text)
    assert main(["serve", "some/model", "--config", str(file), "--max-num-seqs", "4"]) == 0
    assert main(["serve", "some/model", "--config", str(file), "--draft", "ngram"]) == 0
    numbers = [(each.max_num_seqs, each.tool_format, each.max_queued_requests) for each in given]
    assert numbers == [(4, "hermes", 5), (3, "hermes", 5)]
    assert given[0].speculation.draft == "some/head"
    assert isinstance(given[1].speculation.draft, NGram)


@pytest.mark.parametrize(
    ("text", "field"),
    [("max_num_seqs = 0", "max_num_seqs"), ("seqs = 1", "seqs"), ("[", "config"), (None, "config")],
)
def test_wrong_files_are_named(
    text: str | None, field: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "engine.toml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(SystemExit) as ended:
        main(["serve", "some/model", "--config", str(file)])
    assert ended.value.code == 2
    assert field in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--port 65536", "--port 65536: expected 0 to 65535"),
        ("--drain nan", "--drain nan: expected 0 to"),
        ("--max-queued-requests -1", "--max-queued-requests -1: expected"),
    ],
)
def test_wrong_options_are_named(arguments: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", "some/model", *arguments.split()])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
