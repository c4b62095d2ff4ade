"""The process of a measured service.

It reads commands from standard input, one JSON object per line, and answers each on standard output.

    {"do": "start", "settings": {...}}                               {"facts": {...}}
    {"do": "run", "case": {...}, "seed": "...", "limit_s": ...}      {"figures": {...}}
    {"do": "stop"}                                                   {}

A command that fails is answered with {"error": "..."}. When the input ends, the process kills its process
group, and with it all processes that the engine has started.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
import time
import traceback
from typing import Any, TextIO

import psutil

from perf.harness.host import LoopLag
from perf.service.client import drive, figures_of
from perf.service.load import Case, Lengths, requests_of

__all__ = ["main"]

LAG_PERIOD_S = 0.02  # long enough not to take time from the streams
WARM_UP_LIMIT_S = 120


class Process:
    """A service and the commands for it. job: the fields of `perf.service.engines.Job`."""

    def __init__(self, job: dict[str, Any]) -> None:
        self._job = job
        self._service: Any = None

    async def answer(self, command: dict[str, Any]) -> dict[str, Any]:
        if command["do"] == "start":
            return {"facts": await self._start(command["settings"])}
        if command["do"] == "run":
            case = case_of(command["case"])
            return {"figures": await self._measure(case, command["seed"], command["limit_s"])}

        await self._service.aclose()
        return {}

    async def _start(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Start the engine and warm it up, so that kernels compiled at their first use are compiled here."""
        facts = machine_facts() if self._job["measures_machine"] else {}
        self._service = await start_service(self._job, settings)
        for fields in self._job["warm_ups"]:
            figures = await self._measure(case_of(fields), "warm-up", WARM_UP_LIMIT_S)
            if figures["num_errors"] or figures["num_unfinished"]:
                raise RuntimeError(f"warm-up failed: {figures['first_error'] or 'out of time'}")

        facts |= self._service.facts
        return facts

    async def _measure(self, case: Case, seed: str, limit_s: float) -> dict[str, Any]:
        requests = requests_of(case, self._job["vocab_size"], seed)
        before, cpu_s = self._service.counts(), tree_cpu_seconds()
        async with LoopLag(LAG_PERIOD_S) as lag:
            driven = await drive(self._service, case, requests, limit_s)

        figures = figures_of(driven)
        figures["cpu_s"] = round(tree_cpu_seconds() - cpu_s, 3)
        figures["loop_lag_ms_p99"] = lag.ms_p99
        after = self._service.counts()
        figures["counts"] = {name: after[name] - before[name] for name in after}
        return figures


async def start_service(job: dict[str, Any], settings: dict[str, Any]) -> Any:
    """Start the job's service. Its module is imported here: each process imports only its own engine."""
    if job["service"] == "vllm":
        from perf.service.vllm import VllmService

        return await VllmService.start(job, settings)

    from perf.service.drift import DriftService

    return await DriftService.start(job, settings)


def case_of(fields: dict[str, Any]) -> Case:
    lengths = {name: Lengths(**fields[name]) for name in ("prompts", "outputs")}
    return Case(**fields | lengths)


def tree_cpu_seconds() -> float:
    """CPU time of this process and of its descendants that are still running."""
    total = time.process_time()
    for process in psutil.Process().children(recursive=True):
        try:
            times = process.cpu_times()
        except psutil.Error:
            continue
        total += times.user + times.system

    return total


def machine_facts() -> dict[str, Any]:
    """The GPU's name and its read bandwidth, measured before anything else uses it."""
    from perf.harness.bandwidth import read_bandwidth_tb_s
    from perf.harness.machine import default_device, gpu_name
    from perf.harness.recording import free_memory

    device = default_device()
    facts = {"gpu": gpu_name(device), "read_bandwidth_tb_s": read_bandwidth_tb_s(device)}
    free_memory()
    return facts


async def serve(job: dict[str, Any], replies: TextIO) -> None:
    """Answer commands from standard input until it ends."""
    process, loop = Process(job), asyncio.get_running_loop()
    commands: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    def read() -> None:
        with open(0, "rb", closefd=False) as stream:
            for line in stream:
                loop.call_soon_threadsafe(commands.put_nowait, json.loads(line))
        end_group()

    threading.Thread(target=read, name="commands", daemon=True).start()
    while True:
        try:
            answer = await process.answer(await commands.get())
        except Exception:
            answer = {"error": traceback.format_exc()}
        replies.write(json.dumps(answer) + "\n")
        replies.flush()


def end_group() -> None:
    """Kill this process and all processes that it has started."""
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)


def main() -> None:
    job = json.loads(sys.argv[1])
    if job["cores"]:
        os.sched_setaffinity(0, job["cores"])

    # Standard output is for answers; what an engine prints goes to standard error.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    asyncio.run(serve(job, replies))


if __name__ == "__main__":
    main()
