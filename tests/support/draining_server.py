"""drift_sdk.openai.server.serve as a program of its own, for tests of its shutdown.

python draining_server.py FD DRAIN_S FILE: serves on an open socket. Answers are "la la la ..." and end when
the file exists.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import drift_sdk.openai
from drift_sdk import EngineConfig
from drift_sdk.openai.server import serve
from drift_sdk.testing import EOS_TOKEN_ID, scripted_engine


async def main(fd: int, drain_s: float, end: Path) -> None:
    def next_token(prompt_ids: Sequence[int], output_ids: Sequence[int], seed: int) -> int:
        return EOS_TOKEN_ID if end.exists() else b"la "[len(output_ids) % 3]

    limits = EngineConfig(max_model_len=16_384, kv_cache_tokens=65_536)
    async with scripted_engine(next_token, config=limits, step_s=0.002) as engine:
        app = drift_sdk.openai.app(engine)
        await serve(app, [engine], drain_s=drain_s, sockets=[socket.socket(fileno=fd)])


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), float(sys.argv[2]), Path(sys.argv[3])))
