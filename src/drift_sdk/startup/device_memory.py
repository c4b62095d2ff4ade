"""Memory of an engine's device: how much is free, how much the engine may take and how much it has taken."""

from __future__ import annotations

import sys
import threading
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import psutil
import torch

from drift_sdk.config import EngineConfig
from drift_sdk.errors import ConfigError
from drift_sdk.startup.sizing import MemoryRoom, gib

CPU_KV_SHARE = 1 / 8
"""Share of the main memory that is available once the weights are loaded, for the default KV cache."""
CPU_KV_MOST = 3 / 4
"""The same share, for a configured context or KV cache that takes more."""
EAGER_RESERVE = 1 / 10
"""Share of what is left of an engine's memory on a GPU, kept for the eager executor's allocations in
steps."""
CGROUP_FOLDER, OWN_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


class GroupFiles(NamedTuple):
    """Files of a control group, and the line of `details` that counts files which may leave memory."""

    limit: str
    used: str
    details: str
    cached: str


GROUP_FILES = GroupFiles("memory.max", "memory.current", "memory.stat", "inactive_file")
"""Of version 2."""
OLD_GROUP_FILES = GroupFiles(
    "memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat", "total_inactive_file"
)
"""Of version 1."""

_opening_locks: defaultdict[torch.device, threading.Lock] = defaultdict(threading.Lock)


def opening_lock(device: torch.device) -> threading.Lock:
    """A lock to hold while an engine takes its memory. Without it, engines of a process that start at the
    same time on one GPU would count each other's weights as their own."""
    return _opening_locks[device]


class DeviceMemory:
    """A device's memory, measured when an engine starts. Memory that others free or take after that is
    counted as the engine's.

    On a GPU an engine may use `gpu_memory_fraction` of what is free at the start.
    """

    def __init__(self, device: torch.device, config: EngineConfig) -> None:
        self.device = device
        self._config = config
        self._at_start = available_bytes(device)

    @property
    def _is_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def _budget(self) -> int:
        return int(self._config.gpu_memory_fraction * self._at_start)

    @property
    def left_to_others(self) -> int:
        """Bytes that were free at the start and that the engine does not take."""
        return self._at_start - self._budget

    def check_weights(self, num_bytes: int) -> None:
        """Raise ConfigError for weights of so many bytes that do not fit. Called before any is loaded."""
        if self._is_gpu and num_bytes > self._budget:
            raise ConfigError.of(
                "gpu_memory_fraction",
                self._config.gpu_memory_fraction,
                f"more, or another EngineConfig.weights: the weights take {gib(num_bytes)}, and of "
                f"{gib(self._at_start)} free at start this engine may use {gib(self._budget)}",
            )

        if not self._is_gpu and num_bytes > self._at_start:
            raise ConfigError.of(
                "dtype",
                self._config.dtype,
                "a smaller one, another EngineConfig.weights or a smaller model: the weights take "
                f"{gib(num_bytes)}, {gib(self._at_start)} of memory are available",
            )

    def room(self, *, reserve: int | None = None, to_load: int = 0) -> MemoryRoom:
        """Memory that the KV cache may take.

        to_load: bytes of weights that are not loaded yet.

        reserve: bytes of a GPU to keep free for later allocations other than the KV cache; None = a tenth of
                 the rest, for an executor that allocates in its steps. Without effect on a CPU.
        """
        available = max(available_bytes(self.device) - to_load, 0)
        if not self._is_gpu:
            return MemoryRoom(
                share=int(available * CPU_KV_SHARE),
                for_length=int(available * CPU_KV_MOST),
                most=int(available * CPU_KV_MOST),
                share_field="",
                account=f"of {gib(available)} of memory that are available",
            )

        taken = self._at_start - available
        left = self._budget - taken
        if reserve is None:
            reserve = max(int(left * EAGER_RESERVE), 0)
        share = min(left, available) - reserve
        return MemoryRoom(
            share=share,
            for_length=share,
            most=available - reserve,
            share_field="gpu_memory_fraction",
            account=(
                f"{gib(self._at_start)} were free at start, this engine may use {gib(self._budget)}; "
                f"weights and buffers take {gib(taken)}, {gib(reserve)} are kept for graphs and steps"
            ),
        )


def available_bytes(device: torch.device) -> int:
    """Bytes that can be allocated. On a GPU: the free memory, after torch has returned the memory that it
    only keeps for later, within the limit of `torch.cuda.set_per_process_memory_fraction`. On the CPU: the
    available memory, within the limits of the process and of its control groups."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        permitted = int(torch.cuda.get_per_process_memory_fraction(device) * total)
        return max(min(free, permitted - torch.cuda.memory_reserved(device)), 0)

    available = int(psutil.virtual_memory().available)
    limits = [left for left in (_available_to_group(), _available_to_process()) if left is not None]
    return min([available, *limits])


def _available_to_process() -> int | None:
    """Bytes left of the limits of the process's address space and data (`ulimit -v`, `ulimit -d`); None
    without a limit."""
    if sys.platform == "win32":
        return None

    import resource

    memory = psutil.Process().memory_info()
    used = {resource.RLIMIT_AS: memory.vms, resource.RLIMIT_DATA: getattr(memory, "data", 0)}
    most = {kind: resource.getrlimit(kind)[0] for kind in used}
    left = [max(most[kind] - used[kind], 0) for kind in used if most[kind] != resource.RLIM_INFINITY]
    return min(left, default=None)


def _available_to_group(folder: Path = CGROUP_FOLDER, groups: Path = OWN_GROUPS) -> int | None:
    """Bytes left of the memory limits of the process's control group and of those that it is in (v2 and v1);
    None without a limit.

    folder: where control groups are mounted. groups: the file that names those of this process.
    """
    try:
        lines = [line.split(":", 2) for line in groups.read_text().splitlines()]
    except OSError:
        lines = []
    paths = {name: path for _, controllers, path in lines for name in controllers.split(",")}
    left = [
        found
        for mounted, own, files in (
            (folder, paths.get("", "/"), GROUP_FILES),
            (folder / "memory", paths.get("memory", "/"), OLD_GROUP_FILES),
        )
        for group in (Path(own.strip("/")), *Path(own.strip("/")).parents)
        if (found := _left_of_group(mounted / group, files)) is not None
    ]
    return min(left, default=None)


def _left_of_group(folder: Path, files: GroupFiles) -> int | None:
    """Bytes left of the memory limit of one control group; None without a limit."""
    try:
        most, now = (int((folder / name).read_text()) for name in (files.limit, files.used))
        lines = dict(line.split() for line in (folder / files.details).read_text().splitlines())
    except (OSError, ValueError):  # no such group, or "max", which means no limit
        return None

    # Cached files count as used, and are freed when memory runs short.
    return max(most - now + int(lines.get(files.cached, 0)), 0)
