"""A server for tests of client libraries, and a record of their requests."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from loops import until
from openai_server import client_engine, serving

from drift_sdk import Engine


class Recorder:
    """Middleware that records requests by the test that sends them."""

    def __init__(self) -> None:
        self.test = ""
        self.requests: list[dict[str, Any]] = []

    def wrap(self, app: Any) -> Any:
        async def recording(scope: Any, receive: Any, send: Any) -> None:
            async def noted() -> Any:
                message = await receive()
                if message["type"] == "http.request":
                    data.extend(message["body"])
                    if not message.get("more_body"):
                        self._note(scope, bytes(data))
                return message

            data = bytearray()
            await app(scope, noted if scope["type"] == "http" else receive, send)

        return recording

    def _note(self, scope: Any, data: bytes) -> None:
        if (
            scope["method"] != "POST"
            or len(data) > 10_000
            or self.test.endswith(("_disconnect", "_complete"))
            or self.test.partition("[")[0].endswith("_disconnects")
        ):
            return

        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        kept = {name: headers[name] for name in ("accept", "content-type") if name in headers}
        request = {"test": self.test, "path": scope["path"], "headers": kept, "body": json.loads(data)}
        self.requests.append(request)

    def write(self, path: Path, clients: Sequence[str]) -> None:
        found = {"versions": {name: version(name) for name in clients}, "requests": self.requests}
        path.write_text(json.dumps(found, indent=1) + "\n")


@pytest.fixture(scope="module")
def server(request: pytest.FixtureRequest) -> Iterator[tuple[Engine, str, Recorder]]:
    """The engine, the base URL and the recorder. With CLIENT_REQUESTS=FOLDER, the requests of a test module
    are written to its `RECORDED` in this folder."""
    engine, recorder = client_engine(max_model_len=65_536, kv_cache_tokens=262_144), Recorder()
    with serving(engine, recorder.wrap) as url:
        yield engine, f"{url}/v1", recorder
    if "CLIENT_REQUESTS" in os.environ:
        module = request.module
        recorder.write(Path(os.environ["CLIENT_REQUESTS"], module.RECORDED), module.CLIENTS)


@pytest_asyncio.fixture(loop_scope="module")
async def url(server: tuple[Engine, str, Recorder], request: pytest.FixtureRequest) -> AsyncIterator[str]:
    """The base URL. After the test, no request may be left."""
    engine, base_url, recorder = server
    recorder.test = request.node.name.removeprefix("test_")
    yield base_url
    await until(lambda: engine.stats().num_running == engine.stats().num_waiting == 0)


@pytest.fixture
def num_cancelled(server: tuple[Engine, str, Recorder]) -> Callable[[], int]:
    """A function: the number of requests cancelled since."""
    before = server[0].stats().num_cancelled
    return lambda: server[0].stats().num_cancelled - before
