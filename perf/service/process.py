"""The process of a service that is measured: takes commands on its standard input, one JSON object a line,
and answers each on its standard output.

    {"do": "start", "settings": {...}}                               {"facts": {...}}
    {"do": "run", "case": {...}, "seed": "...", "limit_s": ...}      {"figures": {...}}
    {"do": "stop"}                                                   {}

A command that fails is answered with {"error": "..."}. When the input ends the process kills its group, and
with it whatever processes the engine has started.
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
from perf.service.driver import drive
from perf.service.figures import figures_of
from perf.service.load import Case, Lengths, requests_of

__all__ = ["main"]

LAG_PERIOD_S = 0.02  # rare enough to take no time from the streams
WARM_UP_LIMIT_S = 120


class Process:
    """A service and what it is told to do. job: see `serving_children.Job`."""

    def __init__(self, job: dict[str, Any]) -> None:
        self._job = job
        self._service: Any = None

    async def obey(self, command: dict[str, Any]) -> dict[str, Any]:
        if command["do"] == "start":
            return {"facts": await self._start(command["settings"])}
        if command["do"] == "run":
            case = case_of(command["case"])
            return {"figures": await self._measure(case, command["seed"], command["limit_s"])}

        await self._service.aclose()
        return {}

    async def _start(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Start the engine and warm it up: kernels that are compiled at their first use are compiled then."""
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
    """One side's modules are not imported in the other's process."""
    if job["service"] == "vllm":
        from perf.service.vllm import VllmService

        return await VllmService.start(job, settings)

    from perf.service.drift import DriftService

    return await DriftService.start(job, settings)


def case_of(fields: dict[str, Any]) -> Case:
    lengths = {name: Lengths(**fields[name]) for name in ("prompts", "outputs")}
    return Case(**fields | lengths)


def tree_cpu_seconds() -> float:
    """CPU time of this process and of all that it has started and that still run."""
    total = time.process_time()
    for process in psutil.Process().children(recursive=True):
        try:
            times = process.cpu_times()
        except psutil.Error:
            continue
        total += times.user + times.system

    return total


def machine_facts() -> dict[str, Any]:
    """The GPU and its read bandwidth, before anything else uses it."""
    from perf.harness.bandwidth import read_bandwidth_tb_s
    from perf.harness.machine import default_device, gpu_name
    from perf.harness.recording import free_memory

    device = default_device()
    facts = {"gpu": gpu_name(device), "read_bandwidth_tb_s": read_bandwidth_tb_s(device)}
    free_memory()
    return facts


async def serve(job: dict[str, Any], replies: TextIO) -> None:
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
            answer = await process.obey(await commands.get())
        except Exception:
            answer = {"error": traceback.format_exc()}
        replies.write(json.dumps(answer) + "\n")
        replies.flush()


def end_group() -> None:
    """End this process and all that it has started."""
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)


def main() -> None:
    job = json.loads(sys.argv[1])
    if job["cores"]:
        os.sched_setaffinity(0, job["cores"])

    # What an engine prints goes with the errors.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    asyncio.run(serve(job, replies))


if __name__ == "__main__":
    main()
