"""Opening of a model by its name, until it is ready to serve; findings about a model without its weights.

Models are opened on the engine's thread. Work for the graph executor begins before a model is loaded, on
threads of its own. It does not need the interpreter's lock, which loading a tokenizer and importing modules
do. The start waits for cuBLAS before it measures memory, and for the hash before it compiles.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from msgspec import Struct

from drift_sdk._cuda_driver import ignore_other_captures
from drift_sdk.config import EngineConfig, prefill_token_budget
from drift_sdk.driver.life_cycle import LoadedModel
from drift_sdk.errors import ConfigError, ModelLoadError
from drift_sdk.events import Report, ignore_progress
from drift_sdk.execution.device.stages import AcceptanceFactory, StageMarks
from drift_sdk.execution.drafter_factory import DrafterFactory
from drift_sdk.loading.source import Found, Source, check_kv_scheme, find, hub_settings, read_config, resolve
from drift_sdk.model_info import ModelInfo, RemoteFile
from drift_sdk.models.assistant import is_assistant
from drift_sdk.models.dflash import is_dflash
from drift_sdk.models.draft_config import is_head_config
from drift_sdk.models.draft_head import has_mtp
from drift_sdk.models.shard import Shard, shard_obstacles
from drift_sdk.models.weights import check_tensors, tensor_shapes, weight_bytes, with_stored_head
from drift_sdk.scheduling.planning import SchedulerConfig
from drift_sdk.spec.model import ModelSpec
from drift_sdk.startup.executor_factory import (
    OpenedExecutor,
    check_attention_room,
    check_views,
    choose_executor,
    kv_bytes_per_token,
    kv_demand,
    open_eager_executor,
    open_graph_executor,
    target_demand,
    view_costs,
    view_layout,
)
from drift_sdk.startup.model_parts import (
    ModelPart,
    StoredWeights,
    bytes_without_files,
    check_division,
    check_mtp,
    choose_weight_form,
    load_part,
    opening_locks,
    parallel_devices,
    shards_of,
    stored_scheme,
    with_weight_form,
)
from drift_sdk.startup.sizing import (
    DeviceMemory,
    KVDemand,
    KVSize,
    MemoryRoom,
    StateSize,
    bytes_of_slot,
    check_model_len,
    check_states,
    gib,
    size_kv,
    size_states,
)
from drift_sdk.startup.text_startup import checked, load_text, loaded_beside, model_text
from drift_sdk.steps import ExecutorLimits


@contextmanager
def prepared_graphs(
    config: EngineConfig,
    model: ModelSpec,
    dtype: torch.dtype,
    memories: Sequence[DeviceMemory],
) -> Iterator[None]:
    """Hash Triton's installation, and load kernels of cuBLAS on each GPU, while a `with` block makes a graph
    executor.

    memories: of the GPUs, measured before.
    """
    # Imported only here: they need Triton and the driver.
    from drift_sdk._kernels.launch.kernel import prepare_cache_keys
    from drift_sdk.execution.device.streams import prepared_stream
    from drift_sdk.execution.forward.products import library_loader
    from drift_sdk.execution.graph.buckets import prefill_buckets

    prepare_cache_keys()
    budget = prefill_token_budget(config, "cuda")
    row_counts = prefill_buckets(budget) if config.fast_prompts else ()
    with ExitStack() as stack:
        for memory in memories:
            device, room = memory.device, memory.left_to_others
            loader = partial(library_loader, model, dtype, row_counts, device, room)
            stack.enter_context(prepared_stream(device.index or 0, loader))
        yield


log: logging.Logger = logging.getLogger("drift_sdk")

BLOCK_SIZES = {"eager": 16, "graph": 64}
"""Tokens in a KV block by default."""


def open_model(
    model: str | Path,
    config: EngineConfig,
    report: Report,
    *,
    acceptance: AcceptanceFactory | None = None,
    stages: StageMarks | None = None,
) -> LoadedModel:
    """Find the model's files, load weights and tokenizer, and make the executor. Runs on the engine's thread.

    report:     called with each stage and the fraction of it that is done, 0 to 1.
    acceptance: for measurement with graphs: makes what accepts drafts in place of their comparison.
    stages:     for measurement with graphs: marks around the stages of a step.

    Raises ModelLoadError or ConfigError, and ExecutorError if the device fails.
    """
    use_threads(config.num_threads)
    report("find", 0.0)
    device = choose_device(config)
    if device.type == "cuda":
        ignore_other_captures()
    dtype = choose_dtype(config, device)
    choose_executor(config, device)  # raises before anything is downloaded
    devices = parallel_devices(config, device)
    source = resolve(
        model,
        **hub_settings(config),
        revision=config.revision,
        report=report,
        judge=lambda source: _check_before_download(source, config, device, dtype),
        has_weights=config.load == "auto",
    )
    chosen = _choose(source, config, device, dtype)
    config, spec, executor_name = chosen.config, chosen.spec, chosen.executor_name
    report("load tokenizer", 0.0)
    load = partial(load_text, source, config, spec.vocab_size)
    with ExitStack() as stack:
        stack.enter_context(opening_locks(devices, lambda: report("load tokenizer", 0.0)))
        weights = [
            StoredWeights(source, spec, dtype, shard, DeviceMemory(place, config))
            for place, shard in zip(devices, shards_of(config), strict=True)
        ]
        if executor_name == "graph":
            memories = [each.memory for each in weights]
            stack.enter_context(prepared_graphs(config, spec, dtype, memories))
        loading_text = stack.enter_context(loaded_beside(config, load, report))
        parts = _load_parts(weights, config, checked(report, loading_text))
        first, drafter_factory = parts[0], parts[0].drafter_factory
        text = loading_text.result()
        block_size = config.block_size or BLOCK_SIZES[executor_name]
        demand = kv_demand(config, first.decoder, drafter_factory, block_size, executor_name)
        if executor_name == "graph":
            opened = open_graph_executor(config, parts, demand, report, acceptance, stages)
        else:
            opened = open_eager_executor(config, first, demand)
    kv_dtype = first.decoder.kv_form or dtype_name(first.decoder.dtype)
    _log_sizes(opened, demand, kv_dtype)
    _log_drafts(drafter_factory)
    report("ready", 1.0)
    return LoadedModel(
        executor=opened.executor,
        executor_name=executor_name,
        fallback=chosen.fallback,
        num_tuned_shapes=opened.num_tuned,
        untuned_shapes=opened.untuned,
        kv_dtype=kv_dtype,
        kv_bytes=opened.executor.limits.num_blocks * demand.bytes_per_block,
        window_kv_bytes=demand.num_window_bytes(opened.executor.limits.num_window_blocks),
        scheduling=_scheduling(config, device, opened, drafter_factory, spec, demand),
        text=model_text(
            text,
            opened.executor.limits,
            has_drafts=bool(drafter_factory.draft_choices),
            has_states=opened.states is not None,
        ),
    )


def _load_parts(weights: Sequence[StoredWeights], config: EngineConfig, report: Report) -> list[ModelPart]:
    """The parts of a model, each on its GPU, one after the other."""
    parts = [load_part(each, config, report) for each in weights]
    if len({part.drafter_factory.draft_choices for part in parts}) > 1:
        raise ModelLoadError("the draft could be loaded on some GPUs alone")

    return parts


def _scheduling(
    config: EngineConfig,
    device: torch.device,
    opened: OpenedExecutor,
    drafter_factory: DrafterFactory,
    model: ModelSpec,
    demand: KVDemand,
) -> SchedulerConfig:
    limits = opened.executor.limits
    layout = view_layout(config, limits, drafter_factory.draft_choices)
    return SchedulerConfig(
        max_num_seqs=limits.max_num_seqs,
        num_blocks=limits.num_blocks,
        block_size=limits.block_size,
        prefill_token_budget=prefill_token_budget(config, device.type),
        draft_choices=drafter_factory.draft_choices,
        max_tree_depth=drafter_factory.max_tree_depth,
        is_draft_adaptive=drafter_factory.is_adaptive,
        round_costs=opened.round_costs,
        mixed_tokens=opened.mixed_tokens,
        max_expanded_tokens=opened.max_expanded_tokens,
        view_layout=layout,
        view_costs=None if layout is None else view_costs(layout, model, opened.refresh_costs),
        has_draft_kv=drafter_factory.needs_draft_kv,
        wants_history=drafter_factory.needs_history,
        num_checkpoints=0 if opened.states is None else opened.states.num_checkpoints,
        checkpoint_tokens=0 if opened.states is None else opened.states.checkpoint_tokens(limits.block_size),
        window=0 if demand.windows is None else demand.windows.window,
        num_window_blocks=limits.num_window_blocks,
        target_latency_ms_p50=config.target_latency_ms_p50,
        target_latency_ms_p95=config.target_latency_ms_p95,
        prefer_high_throughput=config.prefer_high_throughput,
    )


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype as configurations name it."""
    return str(dtype).removeprefix("torch.")


def _log_sizes(opened: OpenedExecutor, demand: KVDemand, kv_dtype: str) -> None:
    _log_kv_cache(opened.executor.limits, demand, kv_dtype)
    if opened.states is not None:
        _log_states(opened.states)


def _log_kv_cache(limits: ExecutorLimits, demand: KVDemand, kv_dtype: str) -> None:
    log.info(
        "KV cache: %d tokens in %s, %s, for up to %d sequences of up to %d tokens",
        limits.num_blocks * limits.block_size,
        kv_dtype,
        gib(limits.num_blocks * demand.bytes_per_block),
        limits.max_num_seqs,
        limits.max_model_len,
    )
    if demand.windows is not None:
        log.info(
            "KV cache of layers with windows: %d tokens, %s, of which a sequence takes %d",
            limits.num_window_blocks * limits.block_size,
            gib(demand.num_window_bytes(limits.num_window_blocks)),
            demand.windows.window,
        )


def _log_states(states: StateSize) -> None:
    log.info(
        "states: %s for %d sequences, %s for %d checkpoints",
        gib(states.num_slots * states.slot_bytes),
        states.num_slots,
        gib(states.num_checkpoints * states.checkpoint_bytes),
        states.num_checkpoints,
    )


def _log_drafts(factory: DrafterFactory) -> None:
    if factory.draft_choices:
        form = "chains" if factory.max_tree_depth is None else "trees"
        log.info("drafts of %s, in %s of up to %d tokens", factory.kind, form, factory.draft_choices[-1])


class Choices(Struct, frozen=True, kw_only=True):
    """Choices for opening a model, made from its config.

    config: with the form of the weights. executor_name: "graph" or "eager". fallback: why it is not that of
    graphs; None if it is, or if the config names it.
    """

    config: EngineConfig
    spec: ModelSpec
    executor_name: str
    fallback: str | None


def read_model(source: Source, config: EngineConfig) -> ModelSpec:
    """The model's description; errors as of `read_config`, which say so if the files are a draft's."""
    try:
        return read_config(source, config)
    except ModelLoadError as error:
        if is_assistant(source.config):
            found = "an assistant"
        elif is_dflash(source.config) or is_head_config(source.config):
            found = "a draft head"
        else:
            raise

        allowed = "the model that it drafts for, with Speculation(draft=...) naming it"
        raise ModelLoadError(f"{source.path} holds {found}: expected {allowed}") from error


def _choose(source: Source, config: EngineConfig, device: torch.device, dtype: torch.dtype) -> Choices:
    """Choose how to open a model. Raises ModelLoadError or ConfigError for what cannot be served."""
    spec = read_model(source, config)
    check_kv_scheme(source, config, spec)
    executor_name, fallback = choose_executor(config, device, spec, dtype)
    config = with_weight_form(config, spec, executor_name, device, dtype)
    check_division(config, spec, executor_name)
    check_views(config, spec)
    check_states(config, spec, executor_name, dtype)
    check_mtp(config, spec)
    if executor_name == "graph":
        check_attention_room(config, spec, dtype, device)
    return Choices(config=config, spec=spec, executor_name=executor_name, fallback=fallback)


def _check_before_download(
    source: Source, config: EngineConfig, device: torch.device, dtype: torch.dtype
) -> None:
    """Raise the errors of opening a model that its config shows, before its weights are downloaded."""
    chosen = _choose(source, config, device, dtype)
    config, spec = chosen.config, chosen.spec
    check_model_len(config, spec.max_position_embeddings)
    form = choose_weight_form(config, spec)
    spec = Shard(rank=0, size=config.tensor_parallel).spec(spec)
    if form != "stored" or stored_scheme(config, spec) is None:  # else files have the sizes
        DeviceMemory(device, config).check_weights(bytes_without_files(config, spec, dtype))


def use_threads(num_threads: int | None) -> None:
    """Have torch split operations of the calling thread over so many threads; None changes nothing.

    torch keeps the number in each thread that uses it, and gives threads that begin later the number that was
    set last: that is set to what it was, by a thread that ends at once.
    """
    if num_threads is None or num_threads == torch.get_num_threads():
        return

    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    restorer = threading.Thread(target=torch.set_num_threads, args=(before,))
    restorer.start()
    restorer.join()


def choose_device(config: EngineConfig) -> torch.device:
    """The device of a configuration; ConfigError if this machine does not have it."""
    has_gpu = torch.cuda.is_available()
    if config.device == "auto":
        return torch.device("cuda", 0) if has_gpu else torch.device("cpu")

    device = torch.device(config.device)
    if device.type != "cuda":
        return device

    index = device.index or 0
    if not has_gpu or index >= torch.cuda.device_count():
        found = f"{torch.cuda.device_count()} GPUs" if has_gpu else "no GPU"
        raise ConfigError.of("device", config.device, f"a device of this machine, which has {found}")

    return torch.device("cuda", index)  # one GPU, one name: engines of a process lock it by that


def choose_dtype(config: EngineConfig, device: torch.device) -> torch.dtype:
    if config.dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32

    if config.dtype == "float16" and device.type == "cpu":
        raise ConfigError.of("dtype", config.dtype, "float32 or bfloat16 on the CPU")

    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[config.dtype]


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
        shapes = self._try(lambda: read_model(self._found.source, self._config))
        executor = None
        if device is not None:
            executor = self._try(lambda: choose_executor(self._config, device, shapes, dtype)[0])
        if shapes is not None and executor is not None and device is not None and dtype is not None:
            self._config = with_weight_form(self._config, shapes, executor, device, dtype)
        if shapes is not None:
            self._try(lambda: check_kv_scheme(self._found.source, self._config, shapes))
            self._try(lambda: check_views(self._config, shapes))
            self._try(lambda: check_states(self._config, shapes, executor, dtype))
            self._try(lambda: check_mtp(self._config, shapes))
        if shapes is not None and executor == "graph" and device is not None and dtype is not None:
            self._try(lambda: check_attention_room(self._config, shapes, dtype, device))
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
            has_mtp=None if shapes is None else self._try(lambda: self._has_mtp(shapes)),
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

    def _has_mtp(self, shapes: ModelSpec) -> bool | None:
        """Whether there is an MTP layer; None where files that would tell are still to be downloaded."""
        if self._config.load == "random":
            return shapes.mtp is not None

        return None if self._found.missing else has_mtp(shapes, self._found.source.tensors())

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
