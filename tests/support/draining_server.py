"""The FastAPI example under uvicorn as a program of its own, for tests of its shutdown.

python draining_server.py FD DRAIN_S FILE: serves on an open socket. Answers are "la la la ..." and end when
the file exists.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import uvicorn

EXAMPLES = Path(__file__).parents[2] / "examples"


async def main(fd: int, drain_s: float, end: Path) -> None:
    from embed_fastapi import make_app
    from http_server import DrainingServer, LimitedHeads

    from drift_sdk import EngineConfig
    from drift_sdk.testing import EOS_TOKEN_ID, scripted_engine

    def next_token(prompt_ids: Sequence[int], output_ids: Sequence[int], seed: int) -> int:
        return EOS_TOKEN_ID if end.exists() else b"la "[len(output_ids) % 3]

    limits = EngineConfig(max_model_len=16_384, kv_cache_tokens=65_536)
    async with scripted_engine(next_token, config=limits, step_s=0.002) as engine:
        config = uvicorn.Config(
            make_app(engine, "small"), ws="none", http=LimitedHeads, timeout_graceful_shutdown=60
        )
        await DrainingServer(config, engine, drain_s).serve([socket.socket(fileno=fd)])


if __name__ == "__main__":
    sys.path.insert(0, str(EXAMPLES))
    asyncio.run(main(int(sys.argv[1]), float(sys.argv[2]), Path(sys.argv[3])))
