"""Examination of a model's files, and of the room for it on a device, without loading its weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

from drift_sdk.config import EngineConfig
from drift_sdk.errors import ConfigError, ModelLoadError
from drift_sdk.loading.source import Found, find
from drift_sdk.model_info import ModelInfo, RemoteFile
from drift_sdk.models.shard import Shard, shard_obstacles
from drift_sdk.models.weights import check_tensors, tensor_shapes, weight_bytes, with_stored_head
from drift_sdk.progress import ignore_progress
from drift_sdk.spec.model import ModelSpec
from drift_sdk.startup.device_memory import DeviceMemory
from drift_sdk.startup.draft_startup import check_mtp
from drift_sdk.startup.executor_factory import choose_executor, kv_bytes_per_token, target_demand
from drift_sdk.startup.model_config import check_kv_scheme, hub_settings, read_config
from drift_sdk.startup.model_parts import (
    bytes_without_files,
    check_division,
    choose_weight_form,
    parallel_devices,
    stored_scheme,
    with_weight_form,
)
from drift_sdk.startup.model_startup import (
    BLOCK_SIZES,
    choose_device,
    choose_dtype,
    dtype_name,
)
from drift_sdk.startup.sizing import (
    KVDemand,
    KVSize,
    MemoryRoom,
    StateSize,
    bytes_of_slot,
    check_states,
    size_kv,
    size_states,
)
from drift_sdk.startup.text_startup import load_text

T = TypeVar("T")

PARTS = ("vision", "audio")
"""Parts of models beside the text's, each of which has a config of its own."""


def inspect_model(model: str | Path, config: EngineConfig) -> ModelInfo:
    """The findings about a model; see `drift_sdk.inspect`."""
    found = find(model, revision=config.revision, **hub_settings(config))
    return Inspection(model, found, config).info()


class Inspection:
    """The parts of an examination: each adds to `reasons` what it finds to be wrong, and is None then."""

    def __init__(self, model: str | Path, found: Found, config: EngineConfig) -> None:
        self._model = model
        self._found = found
        self._config = config
        self._reasons: list[str] = []

    def info(self) -> ModelInfo:
        """All findings. Longer than other methods because each is looked for although others are missing."""
        device = self._try(lambda: choose_device(self._config))
        dtype = None if device is None else self._try(lambda: choose_dtype(self._config, device))
        shapes = self._try(lambda: read_config(self._found.source, self._config))
        executor = None
        if device is not None:
            executor = self._try(lambda: choose_executor(self._config, device, shapes)[0])
        if shapes is not None and executor is not None and device is not None and dtype is not None:
            self._config = with_weight_form(self._config, shapes, executor, device, dtype)
        if shapes is not None:
            self._try(lambda: check_kv_scheme(self._found.source, self._config, shapes))
            self._try(lambda: check_states(self._config, shapes, executor, dtype))
            self._try(lambda: check_mtp(self._config, shapes))
        has_weights = self._config.load == "auto" and not self._found.missing
        if shapes is not None and has_weights:
            self._try(lambda: check_tensors(shapes, self._found.source.tensors(), self._config.kv_dtype))

        has_tokenizer = self._try(lambda: self._has_tokenizer)
        has_template = None if shapes is None else self._try(lambda: self._has_template(shapes))
        if device is not None:
            self._try(lambda: parallel_devices(self._config, device))
        if shapes is not None and executor is not None:
            self._try(lambda: check_division(self._config, shapes, executor))
        stored = None if shapes is None else self._as_stored(shapes)
        part = None if stored is None else self._part(stored)
        held = None if part is None or dtype is None else self._try(lambda: self._held(part, dtype))
        kv_form = self._config.kv_dtype
        kv_bytes = None if part is None or dtype is None else kv_bytes_per_token(part, dtype, kv_form)
        size: KVSize | None = None
        states: StateSize | None = None
        if device is not None and held is not None and kv_bytes is not None and part is not None:
            memory = self._try(lambda: self._room(device, held))
            if memory is not None and dtype is not None:
                chosen = executor or "eager"
                states = self._try(lambda: size_states(self._config, part, dtype, memory, chosen))
                room = memory if states is None else states.left(memory)
                size = self._try(lambda: self._kv_size(part, dtype, chosen, room))

        block_size = self._block_size(executor or "eager")
        demand = None
        if part is not None and dtype is not None:
            demand = self._demand(part, dtype, executor or "eager")
        window_bytes = 0 if demand is None or demand.windows is None else demand.windows.bytes_per_block
        return ModelInfo(
            model=str(self._model),
            reasons=tuple(self._reasons),
            architecture=self._architecture(),
            unread=self._unread(),
            num_parameters=None if stored is None else sum(map(math.prod, tensor_shapes(stored).values())),
            stored_bytes=self._try(self._found.stored_bytes) if self._config.load == "auto" else None,
            weight_bytes=held,
            kv_bytes_per_token=kv_bytes,
            kv_dtype=None if dtype is None else kv_form or dtype_name(dtype),
            state_bytes=None
            if shapes is None or dtype is None
            else bytes_of_slot(self._config, shapes, dtype, executor or "eager"),
            num_checkpoints=None if states is None else states.num_checkpoints,
            context=None if shapes is None else shapes.max_position_embeddings,
            has_tokenizer=has_tokenizer,
            has_chat_template=has_template,
            device=None if device is None else str(device),
            dtype=None if dtype is None else dtype_name(dtype),
            executor=executor,
            kv_cache_tokens=None if size is None else size.num_blocks * block_size,
            window_bytes_per_token=None if demand is None else window_bytes // block_size,
            window_cache_tokens=None if size is None else size.num_window_blocks * block_size,
            max_model_len=None if size is None else size.max_model_len,
            max_num_seqs=self._config.max_num_seqs if states is None else states.num_slots,
            downloads=self._downloads(),
        )

    def _unread(self) -> tuple[str, ...]:
        settings = self._settings()
        is_nested = "text_config" in settings
        return tuple(name for name in PARTS if is_nested and settings.get(f"{name}_config"))

    def _try(self, examine: Callable[[], T]) -> T | None:
        """The result of `examine`; None if it raises, and the reason is kept."""
        try:
            return examine()
        except (ConfigError, ModelLoadError) as error:
            if str(error) not in self._reasons:
                self._reasons.append(str(error))
            return None

    def _as_stored(self, shapes: ModelSpec) -> ModelSpec:
        """The shapes with the head that files have, if the files are there and nothing is wrong with them:
        numbers are read, which takes long."""
        if self._reasons or self._config.load != "auto" or self._found.missing:
            return shapes

        found = self._try(lambda: with_stored_head(shapes, self._found.source.tensors()))
        return shapes if found is None else found

    def _part(self, shapes: ModelSpec) -> ModelSpec | None:
        """The shapes of what a GPU has; None if the model cannot be divided between so many."""
        size = self._config.tensor_parallel
        if size > 1 and any(shard_obstacles(shapes, size)):
            return None

        return Shard(rank=0, size=size).spec(shapes)

    def _held(self, shapes: ModelSpec, dtype: torch.dtype) -> int:
        """Bytes of the weights in memory. Of quantised weights that are not downloaded: the size of their
        files."""
        form = choose_weight_form(self._config, shapes)
        if form != "stored" or stored_scheme(self._config, shapes) is None:
            return bytes_without_files(self._config, shapes, dtype)

        stored = self._found.stored_bytes() if self._found.missing else None
        return stored or weight_bytes(shapes, dtype, form, self._found.source.tensors())

    @property
    def _has_tokenizer(self) -> bool:
        return self._config.tokenizer is not None or self._found.source.has_tokenizer

    def _has_template(self, shapes: ModelSpec) -> bool:
        """Whether there is a chat template. Reads all that concerns text."""
        text = load_text(self._found.source, self._config, shapes.vocab_size, ignore_progress)
        return text.chat_template is not None

    def _room(self, device: torch.device, held: int) -> MemoryRoom:
        """The room beside weights of so many bytes."""
        memory = DeviceMemory(device, self._config)
        memory.check_weights(held)
        return memory.room(to_load=held)

    def _kv_size(self, shapes: ModelSpec, dtype: torch.dtype, executor: str, room: MemoryRoom) -> KVSize:
        return size_kv(self._config, self._demand(shapes, dtype, executor), room)

    def _demand(self, shapes: ModelSpec, dtype: torch.dtype, executor: str) -> KVDemand:
        block_size, form = self._block_size(executor), self._config.kv_dtype
        return target_demand(self._config, shapes, dtype, form, block_size, executor)

    def _block_size(self, executor: str) -> int:
        return self._config.block_size or BLOCK_SIZES[executor]

    def _architecture(self) -> str | None:
        names = self._settings().get("architectures")
        return str(names[0]) if isinstance(names, list) and names else None

    def _settings(self) -> Mapping[str, Any]:
        """The contents of config.json, empty if they cannot be read."""
        try:
            return self._found.source.config
        except ModelLoadError:
            return {}

    def _downloads(self) -> tuple[RemoteFile, ...]:
        if self._config.load == "random":
            return ()

        return tuple(RemoteFile(name=file.name, num_bytes=file.num_bytes) for file in self._found.missing)
