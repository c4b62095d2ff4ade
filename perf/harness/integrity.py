"""Checks of an engine while it serves: the accounting of blocks and slots, and the memory in use."""

from __future__ import annotations

import gc

import psutil
from msgspec import Struct

from drift_sdk import Engine
from drift_sdk.scheduling.scheduler import Scheduler
from drift_sdk.steps import Executor, ExecutorLimits, StepPlan, StepResult
from perf.harness.startup_process import gpu_memory_gib

__all__ = ["IntegrityChecks", "Memory", "check_integrity_of"]


class IntegrityChecks:
    """An `Executor` that runs plans on another one, and checks the scheduler before the first plan of a load
    and before every `period`-th one.

    A failed check raises AssertionError on the engine's thread, which ends the engine with its reason.
    num_checks, peak_kv_use: how often the scheduler was checked in the load, and the largest share of the KV
    cache that sequences held when a plan was launched.
    """

    def __init__(self, executor: Executor, scheduler: Scheduler, period: int) -> None:
        self._executor, self._scheduler = executor, scheduler
        self._period = period
        self.begin()

    def begin(self) -> None:
        """Begin a load."""
        self._num_plans = self.num_checks = 0
        self.peak_kv_use = 0.0

    @property
    def limits(self) -> ExecutorLimits:
        return self._executor.limits

    def launch(self, plan: StepPlan) -> None:
        if self._num_plans % self._period == 0:
            self._scheduler.check_integrity()
            self.num_checks += 1
        self._num_plans += 1
        num_blocks = self._executor.limits.num_blocks
        kv_use = 1.0 - self._scheduler.num_free_blocks / num_blocks
        self.peak_kv_use = max(self.peak_kv_use, kv_use)
        self._executor.launch(plan)

    @property
    def is_done(self) -> bool:
        return self._executor.is_done

    def collect(self) -> StepResult:
        return self._executor.collect()

    def close(self) -> None:
        self._executor.close()


def check_integrity_of(engine: Engine, period: int) -> IntegrityChecks:
    """Check the scheduler of a started engine before every `period`-th step from now on. The engine is idle:
    it has not had a request yet."""
    # Read and replaced in private attributes: only measurements look at an engine's scheduler.
    driver = engine._driver
    assert driver is not None and driver._executor is not None
    checks = IntegrityChecks(driver._executor, driver._scheduler, period)
    driver._executor = checks
    return checks


class Memory(Struct, frozen=True):
    """MiB in use: by this process in main memory, and by all processes on the GPU (0 without one)."""

    process_mib: float
    gpu_mib: float

    @classmethod
    def now(cls, device: str) -> Memory:
        gc.collect()
        used = psutil.Process().memory_info().rss
        return cls(used / 2**20, (gpu_memory_gib(device) or 0.0) * 2**10)
