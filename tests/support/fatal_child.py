"""A process whose GPU fails for good while two engines are generating; it prints what their streams said.

python fatal_child.py MODEL_FOLDER OTHER_FOLDER
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import anyio
import torch
import triton
import triton.language as tl

from drift_sdk import Engine, EngineConfig, ExecutorError, SamplingParams, TokenStream


@triton.jit
def _write_astray(pointer, distance):
    tl.store(pointer + distance, 1)


class FailingReplay:
    """A step behind which a kernel writes where no memory is."""

    def __init__(self, replay: Any, target: torch.Tensor) -> None:
        self._replay, self._target = replay, target

    def launch(self) -> None:
        self._replay.launch()
        _write_astray[(1,)](self._target, 1 << 44)

    def close(self) -> None:
        self._replay.close()


def break_decoding(engine: Engine) -> None:
    executor = engine._driver._executor
    target = torch.zeros(1, dtype=torch.int32, device="cuda")
    graphs = executor._graphs
    graphs.decode = {bucket: FailingReplay(replay, target) for bucket, replay in graphs.decode.items()}


async def failure_of(stream: TokenStream) -> dict[str, Any]:
    try:
        await stream
    except ExecutorError as error:
        return {"type": "ExecutorError", "is_unusable": error.process_unusable, "message": str(error)}
    except Exception as error:
        return {"type": type(error).__name__, "is_unusable": False, "message": str(error)}

    return {"type": "none", "is_unusable": False, "message": ""}


async def main(folders: list[str]) -> None:
    config = EngineConfig(
        device="cuda",
        executor="graph",
        dtype="float32",
        max_num_seqs=4,
        max_model_len=512,
        kv_cache_tokens=4096,
    )
    endless = SamplingParams(max_tokens=400, ignore_eos=True, prompt_logprobs=1)
    engines = [Engine(folder, config) for folder in folders]
    for engine in engines:
        await engine.start()
    streams = [engine.generate([5, 6, 7 + index], endless) for engine in engines for index in range(3)]
    for stream in streams:
        await anext(stream)
    with anyio.fail_after(20):
        break_decoding(engines[0])
        failures = [await failure_of(stream) for stream in streams]
    late = []
    for engine in engines:
        try:
            engine.generate([5])
            late.append("none")
        except ExecutorError as error:
            late.append("unusable" if error.process_unusable else "usable")
    started_at = time.monotonic()
    with anyio.fail_after(20):
        for engine in engines:
            await engine.aclose()
    close_s = time.monotonic() - started_at
    print(json.dumps({"failures": failures, "late": late, "close_s": close_s}), flush=True)  # noqa: T201


if __name__ == "__main__":
    anyio.run(main, sys.argv[1:])
