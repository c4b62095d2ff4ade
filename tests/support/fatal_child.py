"""A process whose GPU fails permanently while two engines have requests; prints their streams' errors.

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
from drift_sdk.execution.device.device import Device

FAR = 1 << 44


@triton.jit
def _write_astray(pointer, distance):
    tl.store(pointer + distance, 1)


class FailingReplay:
    """A step followed by a kernel that writes to an invalid address."""

    def __init__(self, device: Device, replay: Any, target: torch.Tensor) -> None:
        self._device, self._replay, self._target = device, replay, target

    def launch(self) -> None:
        self._replay.launch()
        with self._device.work():
            _write_astray[(1,)](self._target, FAR)

    def close(self) -> None:
        self._replay.close()


def break_decoding(engine: Engine, target: torch.Tensor) -> None:
    executor = engine._driver._executor
    graphs = executor._graphs
    graphs.decode = {
        bucket: FailingReplay(executor._device, replay, target) for bucket, replay in graphs.decode.items()
    }


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
    broken, other = engines
    healthy = await other.generate([5, 6, 7], SamplingParams(max_tokens=3, ignore_eos=True))
    assert len(healthy.token_ids) == 3
    await other.pause()
    target = torch.zeros(1, dtype=torch.int32, device="cuda")
    _write_astray.warmup(target, FAR, grid=(1,))  # compiled before the streams start
    streams = [[engine.generate([5, 6, 7 + index], endless) for index in range(3)] for engine in engines]
    for stream in streams[0]:
        await anext(stream)
    with anyio.fail_after(120):
        break_decoding(broken, target)
        failures = [await failure_of(stream) for stream in streams[0]]
        await other.resume()
        failures += [await failure_of(stream) for stream in streams[1]]
    late = []
    for engine in engines:
        try:
            engine.generate([5])
            late.append("none")
        except ExecutorError as error:
            late.append("unusable" if error.process_unusable else "usable")
    started_at = time.monotonic()
    with anyio.fail_after(120):
        for engine in engines:
            await engine.aclose()
    close_s = time.monotonic() - started_at
    print(json.dumps({"failures": failures, "late": late, "close_s": close_s}), flush=True)  # noqa: T201


if __name__ == "__main__":
    anyio.run(main, sys.argv[1:])
