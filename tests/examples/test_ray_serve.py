"""The example of Ray Serve. Needs "ray[serve]": `make ray-test`."""

from __future__ import annotations

import signal
import socket
import time
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest
from ray_example import LIMIT_S, chat_model, running

HAS_SERVE = find_spec("ray") is not None and find_spec("grpc") is not None


@pytest.mark.slow
@pytest.mark.skipif(not HAS_SERVE, reason='"ray[serve]" is not installed')
def test_ray_serve_streams_openais_protocol_and_ends_on_ctrl_c(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with running("ray_serve", chat_model(tmp_path), "--device", "cpu", "--port", str(port)) as process:
        assert process.stdout is not None
        deadline = time.monotonic() + LIMIT_S
        while not process.stdout.readline().startswith("serving on"):
            assert process.poll() is None and time.monotonic() < deadline
        body = {"messages": [{"role": "user", "content": "Hi"}], "stream": True, "max_tokens": 4}
        url = f"http://127.0.0.1:{port}/v1/chat/completions"
        with httpx.stream("POST", url, json=body, timeout=LIMIT_S) as response:
            events = [line for line in response.iter_lines() if line]
        assert response.status_code == 200
        assert events[-1] == "data: [DONE]"
        assert '"finish_reason":"length"' in "".join(events)
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        assert process.wait(LIMIT_S) == 130
