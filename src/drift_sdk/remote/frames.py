"""Frames: messages between two processes over a socket, each with its length before it."""

from __future__ import annotations

import asyncio
import pickle
from typing import Any

__all__ = ["read_frame", "write_frame"]

LENGTH_BYTES = 8


async def read_frame(reader: asyncio.StreamReader) -> Any:
    """The next message; EOFError or OSError if the other process has ended."""
    length = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "big")
    return pickle.loads(await reader.readexactly(length))


async def write_frame(writer: asyncio.StreamWriter, message: tuple[Any, ...]) -> None:
    """Send a message, and wait while too much has not been taken by the other process. OSError if that has
    ended."""
    packed = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    writer.write(len(packed).to_bytes(LENGTH_BYTES, "big") + packed)
    await writer.drain()
