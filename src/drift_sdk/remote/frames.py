"""Frames: messages between two processes over a socket, each with its length before it."""

from __future__ import annotations

import asyncio
import pickle
from typing import Any

__all__ = ["read_frame", "write_frame"]

LENGTH_BYTES = 8
MAX_FRAME_BYTES = 2**30
"""Largest message. A greater length is read only from a process that sends something else."""


async def read_frame(reader: asyncio.StreamReader) -> Any:
    """The next message; EOFError or OSError if the other process has ended. Any other exception for what is
    no message."""
    length = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "big")
    check_length(length)
    return pickle.loads(await reader.readexactly(length))


async def write_frame(writer: asyncio.StreamWriter, message: tuple[Any, ...]) -> None:
    """Send a message, and wait while too much has not been taken by the other process. OSError if that has
    ended, and ValueError before anything is sent if the message is too large."""
    packed = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    check_length(len(packed))
    writer.write(len(packed).to_bytes(LENGTH_BYTES, "big") + packed)
    await writer.drain()


def check_length(length: int) -> None:
    """ValueError for a message that is too large."""
    if length > MAX_FRAME_BYTES:
        raise ValueError(f"a message of {length} bytes: expected at most {MAX_FRAME_BYTES}")
