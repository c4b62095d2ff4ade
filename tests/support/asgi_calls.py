"""Calls of an ASGI application without a server, by clients that may be slow, endless, or leave."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterable
from typing import Any

import anyio
from msgspec import Struct

__all__ = ["Reply", "call", "endless", "streamed"]


class Reply(Struct):
    """What an application has sent. num_received: messages that it has read."""

    status: int = 0
    headers: dict[str, str] = {}
    body: bytes = b""
    num_received: int = 0

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        found: dict[str, Any] = self.json["error"]
        return found

    @property
    def events(self) -> list[Any]:
        """The data of server-sent events."""
        blocks = self.body.decode().removesuffix("\n\n").split("\n\n")
        data = [block.rpartition("data: ")[2] for block in blocks]
        return [each if each == "[DONE]" else json.loads(each) for each in data]


async def streamed(parts: Iterable[bytes]) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


async def endless(part: bytes) -> AsyncIterator[bytes]:
    """A body that stops, and does not end."""
    yield part
    await anyio.sleep_forever()


async def call(
    app: Any,
    path: str,
    body: Any = None,
    *,
    method: str = "POST",
    headers: dict[str, str] | None = None,
    leave_after: int | None = None,
) -> Reply:
    """Send a request, and read its answer.

    body:        JSON, bytes, or an iterator of parts; None = none.
    leave_after: number of parts of the answer that are read before the client leaves; None = all.
    """
    reply, has_left = Reply(), anyio.Event()
    parts = body if isinstance(body, AsyncIterator) else streamed([as_bytes(body)])
    num_parts = 0
    is_sent = False

    async def receive() -> dict[str, Any]:
        nonlocal is_sent
        if not is_sent:
            reply.num_received += 1
            part = await anext(parts, None)
            is_sent = part is None
            return {"type": "http.request", "body": part or b"", "more_body": not is_sent}

        await has_left.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        nonlocal num_parts
        if message["type"] == "http.response.start":
            reply.status = message["status"]
            reply.headers = {name.decode(): value.decode() for name, value in message["headers"]}
            return

        num_parts += 1
        reply.body += message.get("body", b"")
        if num_parts == leave_after or not message.get("more_body"):
            has_left.set()
        await anyio.lowlevel.checkpoint()

    given = {"content-type": "application/json", **(headers or {})}
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(name.encode(), value.encode()) for name, value in given.items()],
        "server": ("test", 80),
        "client": ("test", 1),
    }
    await app(scope, receive, send)
    return reply


def as_bytes(body: Any) -> bytes:
    if body is None or isinstance(body, bytes):
        return body or b""

    return json.dumps(body).encode()
