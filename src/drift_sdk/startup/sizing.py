"""Memory of an engine's device, and the sizes of KV cache and recurrent states that it has room for.

Sizes of the KV cache are blocks and context length; of recurrent states, those of running sequences and of
checkpoints in the prefix cache.
"""

from __future__ import annotations

import math
import sys
import threading
from bisect import bisect_right
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import psutil
import torch
from msgspec import Struct
from msgspec.structs import replace

from drift_sdk.config import EngineConfig, prefill_token_budget
from drift_sdk.errors import ConfigError, FieldError
from drift_sdk.scheduling.planning import least_window_blocks
from drift_sdk.spec.model import BORDER, ModelSpec, checkpoint_bytes, graph_slot_bytes, slot_bytes
from drift_sdk.speculation import Chain

MIN_DEFAULT_MODEL_LEN = 512
"""Tokens. Without a max_model_len, an engine whose KV cache cannot hold a sequence of this length, or of the
model's own context if that is shorter, does not start."""


SEQUENCE_WINDOWS = 4
"""Windows in a sequence for which the blocks of layers with windows are in proportion to those of the others.
Shorter sequences leave blocks of the others unused, longer ones blocks of the windows, which keep more of the
prefix cache then."""
KEPT_WINDOWS = 2
"""Most windows for each sequence that runs at once: its own, and another one in the prefix cache."""
STEPS_IN_FLIGHT = 2
ATTENTION_TILE = 64
"""Keys that kernels read at once. They may read keys before a window, in the tile of its first one."""


class WindowDemand(Struct, frozen=True, kw_only=True):
    """Memory that layers with windows take which have blocks of their own.

    window:          tokens that they keep: the longest window, and what kernels may read before it.
    bytes_per_block: bytes of a block of these layers.
    row_tokens:      most tokens that a row emits.
    chunk_tokens:    most tokens of prompts that steps in flight compute.
    """

    window: int
    bytes_per_block: int
    row_tokens: int
    chunk_tokens: int


class KVDemand(Struct, frozen=True, kw_only=True):
    """Memory that a model's KV takes.

    context:         the model's own context, in tokens.
    block_size:      tokens in a block.
    bytes_per_block: bytes of a block, those of a draft model included: of all layers, or of the ones that
                     keep all tokens, if those with windows have blocks of their own.
    windows:         of these; None: they have none.
    """

    context: int
    block_size: int
    bytes_per_block: int
    windows: WindowDemand | None = None

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks that hold this many tokens of one sequence."""
        return -(-num_tokens // self.block_size)

    def num_window_blocks(self, config: EngineConfig, num_blocks: int) -> int:
        """Blocks of layers with windows beside `num_blocks` of the others: as many as sequences of
        SEQUENCE_WINDOWS windows use, at least those of one sequence and its chunks, and at most KEPT_WINDOWS
        windows for each sequence that runs at once."""
        windows = self.windows
        if windows is None:
            return 0

        length = min(config.max_model_len or self.context, num_blocks * self.block_size)
        ratio = min(max(length / windows.window, 1.0), SEQUENCE_WINDOWS)
        each = self.num_blocks(windows.window + windows.row_tokens) + 1
        chunks = self.num_blocks(windows.chunk_tokens) + 1
        wanted = max(math.ceil(num_blocks / ratio), each + chunks)
        least = least_window_blocks(windows.window, self.block_size, windows.row_tokens)
        return max(min(wanted, KEPT_WINDOWS * config.max_num_seqs * each + chunks, num_blocks), least)

    def num_bytes(self, config: EngineConfig, num_blocks: int) -> int:
        """Bytes of `num_blocks` blocks, and of the blocks of layers with windows beside them."""
        beside = self.num_window_bytes(self.num_window_blocks(config, num_blocks))
        return num_blocks * self.bytes_per_block + beside

    def num_window_bytes(self, num_window_blocks: int) -> int:
        """Bytes of so many blocks of layers with windows."""
        return 0 if self.windows is None else num_window_blocks * self.windows.bytes_per_block

    def num_fitting(self, config: EngineConfig, num_bytes: int) -> int:
        """The most blocks that fit into so many bytes."""
        numbers = range(max(num_bytes, 0) // self.bytes_per_block + 1)
        # The number of window blocks does not fall.
        return max(bisect_right(numbers, num_bytes, key=lambda number: self.num_bytes(config, number)) - 1, 0)


class MemoryRoom(Struct, frozen=True, kw_only=True):
    """Bytes of memory that a KV cache may take.

    share:       for the default size.
    for_length:  for one sequence of the configured max_model_len, if the default size cannot hold it.
    most:        for a configured kv_cache_tokens.
    share_field: the configuration's field that sets the share; empty if there is none.
    account:     how these numbers come about, in words for error messages.
    """

    share: int
    for_length: int
    most: int
    share_field: str
    account: str


class KVSize(Struct, frozen=True, kw_only=True):
    """Blocks of the KV cache, and most tokens of a sequence. num_window_blocks: of layers with windows; 0:
    they share those of the others."""

    num_blocks: int
    max_model_len: int
    num_window_blocks: int = 0


def size_kv(config: EngineConfig, demand: KVDemand, room: MemoryRoom) -> KVSize:
    """The size of the KV cache and the length of a sequence, so that the longest sequence fits into the
    cache.

    There are as many blocks as kv_cache_tokens needs; without it, as many as fit into the share, and at most
    as many as max_num_seqs sequences of full length can use. Blocks of layers with windows are in proportion
    to them. If that is less than the model's context and no
    max_model_len is given, the context is cut to it. Raises ConfigError, with the numbers, for a cache that
    does not fit."""
    check_model_len(config, demand.context)
    if config.kv_cache_tokens is not None:
        return _configured_size(config, config.kv_cache_tokens, demand, room)

    max_model_len = config.max_model_len or demand.context
    num_used = config.max_num_seqs * demand.num_blocks(max_model_len)
    num_blocks = min(demand.num_fitting(config, room.share), num_used)
    least = config.max_model_len or min(demand.context, MIN_DEFAULT_MODEL_LEN)
    if num_blocks < demand.num_blocks(least):
        num_blocks = demand.num_blocks(least)
        most = room.for_length if config.max_model_len is not None else room.share
        if demand.num_bytes(config, num_blocks) > most:
            raise _room_error(config, demand, room, least, max(most, 0))

    num_tokens = num_blocks * demand.block_size
    return KVSize(
        num_blocks=num_blocks,
        max_model_len=min(max_model_len, num_tokens),
        num_window_blocks=demand.num_window_blocks(config, num_blocks),
    )


def check_model_len(config: EngineConfig, context: int) -> None:
    """Raise ConfigError for a max_model_len over the model's own context."""
    if config.max_model_len is not None and config.max_model_len > context:
        allowed = f"at most the model's context of {context}"
        raise ConfigError.of("max_model_len", config.max_model_len, allowed)


def _room_error(
    config: EngineConfig, demand: KVDemand, room: MemoryRoom, num_tokens: int, most: int
) -> FieldError:
    needed = gib(demand.num_bytes(config, demand.num_blocks(num_tokens)))
    fitting = demand.num_fitting(config, most) * demand.block_size
    figures = (
        f"KV of {num_tokens} tokens takes {needed}, there is room for {gib(most)} or {fitting} tokens "
        f"({room.account})"
    )
    if room.share_field and config.max_model_len is None:
        value = getattr(config, room.share_field)
        return ConfigError.of(room.share_field, value, f"more, or more free memory: {figures}")

    length = config.max_model_len or demand.context
    return ConfigError.of("max_model_len", length, f"less, or more free memory: {figures}")


def _configured_size(config: EngineConfig, num_tokens: int, demand: KVDemand, room: MemoryRoom) -> KVSize:
    if config.max_model_len is not None and num_tokens < config.max_model_len:
        allowed = f"at least max_model_len={config.max_model_len}"
        raise ConfigError.of("kv_cache_tokens", num_tokens, allowed)

    num_blocks = demand.num_blocks(num_tokens)
    most = demand.num_fitting(config, room.most)
    if num_blocks > most:
        needed = gib(demand.num_bytes(config, num_blocks))
        allowed = (
            f"at most {most * demand.block_size}: {num_tokens} tokens take {needed}, "
            f"there is room for {gib(max(room.most, 0))} ({room.account})"
        )
        raise ConfigError.of("kv_cache_tokens", num_tokens, allowed)

    return KVSize(
        num_blocks=num_blocks,
        max_model_len=min(config.max_model_len or demand.context, num_tokens),
        num_window_blocks=demand.num_window_blocks(config, num_blocks),
    )


def kv_layers(config: EngineConfig, spec: ModelSpec) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The layers that keep keys and values of all tokens, and those that keep them of a window, in blocks of
    their own.

    There are none of the latter in a model without layers of both kinds or with recurrent ones, if no
    sequence is longer than the longest window, and for drafts that are trees or checked: what moves and
    checks their rows knows one block table.
    """
    kept = tuple(index for index, layer in enumerate(spec.layers) if layer.kv is not None)
    windows = spec.window_layers
    others = tuple(index for index in kept if index not in windows)
    speculation = config.speculation
    is_chain = speculation is None or (isinstance(speculation.shape, Chain) and not speculation.checks)
    longest = max((window for window in spec.windows if window is not None), default=0)
    is_longer = (config.max_model_len or spec.max_position_embeddings) > longest
    if not (windows and others and is_chain and is_longer) or spec.recurrent_layers:
        return kept, ()

    return others, windows


def window_demand(
    config: EngineConfig, spec: ModelSpec, bytes_per_token: int, block_size: int, executor: str
) -> WindowDemand:
    """Memory of the layers of `kv_layers` with windows. bytes_per_token: of these. executor: "graph" or
    "eager"."""
    speculation = config.speculation
    longest = max(window for window in spec.windows if window is not None)
    is_cut = executor == "graph" and block_size % ATTENTION_TILE != 0
    budget = prefill_token_budget(config, "cuda" if executor == "graph" else "cpu")
    return WindowDemand(
        window=longest + (ATTENTION_TILE - 1 if is_cut else 0),
        bytes_per_block=bytes_per_token * block_size,
        row_tokens=1 + (0 if speculation is None else speculation.shape.num_draft_tokens),
        chunk_tokens=STEPS_IN_FLIGHT * budget,
    )


def gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"


CHECKPOINT_SHARE = 1 / 4
"""Share of the memory for the KV cache that goes to checkpoints."""
CHECKPOINTS_PER_SLOT = 8
"""Most checkpoints for each sequence that runs at once."""


class StateSize(Struct, frozen=True, kw_only=True):
    """slot_bytes, checkpoint_bytes: of a running sequence, and of a checkpoint.
    num_slots, num_checkpoints: of each, for which there is room."""

    slot_bytes: int
    checkpoint_bytes: int
    num_slots: int
    num_checkpoints: int

    @property
    def num_bytes(self) -> int:
        return self.num_slots * self.slot_bytes + self.num_checkpoints * self.checkpoint_bytes

    def left(self, room: MemoryRoom) -> MemoryRoom:
        """The room for keys and values beside the states."""
        taken = self.num_bytes
        account = f"{room.account}; states take {gib(taken)}"
        return replace(
            room,
            share=room.share - taken,
            for_length=room.for_length - taken,
            most=room.most - taken,
            account=account,
        )

    def checkpoint_tokens(self, block_size: int) -> int:
        """Checkpoints lie at multiples of so many tokens."""
        return math.lcm(BORDER, block_size)


def bytes_of_slot(config: EngineConfig, spec: ModelSpec, dtype: torch.dtype, executor: str) -> int:
    """Bytes of the states of a running sequence. executor: "graph" or "eager"."""
    if executor != "graph":
        return slot_bytes(spec, dtype)

    speculation = config.speculation
    most = 0 if speculation is None else speculation.shape.num_draft_tokens
    return graph_slot_bytes(spec, dtype, most + 1)


def size_states(
    config: EngineConfig, spec: ModelSpec, dtype: torch.dtype, room: MemoryRoom, executor: str
) -> StateSize | None:
    """The states of a model; None if it has none. They have room for as many of `max_num_seqs` sequences as
    half of the memory holds. executor: "graph" or "eager". Raises ConfigError if it holds none."""
    if not spec.recurrent_layers:
        return None

    each = bytes_of_slot(config, spec, dtype, executor)
    num_slots = min(config.max_num_seqs, max(room.most, 0) // 2 // each)
    if not num_slots:
        found = f"the states of one take {gib(each)}, there is room for {gib(room.most)} ({room.account})"
        raise ConfigError.of("max_num_seqs", config.max_num_seqs, f"memory for a sequence: {found}")

    checkpoint = checkpoint_bytes(spec, dtype)
    left = max(room.share - num_slots * each, 0)
    num_checkpoints = min(int(left * CHECKPOINT_SHARE) // checkpoint, CHECKPOINTS_PER_SLOT * num_slots)
    return StateSize(
        slot_bytes=each,
        checkpoint_bytes=checkpoint,
        num_slots=num_slots,
        num_checkpoints=num_checkpoints,
    )


def check_states(
    config: EngineConfig, spec: ModelSpec, executor: str | None, dtype: torch.dtype | None
) -> None:
    """Raise ConfigError for settings that models with recurrent layers do not have: a state has one path of
    rows, and follows from all of them. executor: "graph" or "eager"; dtype: of the model. None: not known.
    """
    if not spec.recurrent_layers:
        return

    if executor == "graph" and dtype is not None and dtype != torch.bfloat16:
        name = str(dtype).removeprefix("torch.")
        allowed = 'bfloat16 for a model with recurrent layers on CUDA graphs, or executor="eager"'
        raise ConfigError.of("dtype", name, allowed)

    speculation = config.speculation
    if speculation is None:
        return

    if executor == "graph" and speculation.checks:
        allowed = 'False for a model with recurrent layers on CUDA graphs, or executor="eager"'
        raise ConfigError.of("checks", True, allowed)

    if not isinstance(speculation.shape, Chain):
        raise ConfigError.of("shape", speculation.shape, "a Chain for a model with recurrent layers")

    if speculation.partial_verification is not None:
        allowed = "None for a model with recurrent layers"
        raise ConfigError.of("partial_verification", speculation.partial_verification, allowed)


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
