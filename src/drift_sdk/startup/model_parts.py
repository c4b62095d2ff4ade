"""A model's weights on its devices: their form in memory, their division between GPUs, and loading."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import permutations

import msgspec
import torch
from msgspec import Struct

from drift_sdk.config import EngineConfig
from drift_sdk.errors import ConfigError
from drift_sdk.execution.device.memory import return_freed_memory
from drift_sdk.execution.drafter_factory import DrafterFactory
from drift_sdk.loading.source import Source
from drift_sdk.loading.tensors import TensorSource
from drift_sdk.models.allocation import QUANTISERS, WeightForm
from drift_sdk.models.decoder import Decoder, random_tensors
from drift_sdk.models.shard import Shard, cut_head, load_shard, shard_obstacles
from drift_sdk.models.weights import odd_columns, weight_bytes
from drift_sdk.progress import Report
from drift_sdk.quantised.scheme import Scheme
from drift_sdk.spec.model import ModelSpec
from drift_sdk.startup.device_memory import DeviceMemory, opening_lock
from drift_sdk.startup.draft_startup import open_drafter_factory


def with_weight_form(
    config: EngineConfig, model: ModelSpec, executor: str, device: torch.device, dtype: torch.dtype
) -> EngineConfig:
    """The config with the form of the weights that `EngineConfig.weights` = None stands for: "stored" if
    kernels multiply by the quantised weights of the files, which takes the least time and memory; else
    "expanded", because dequantising a weight at each use takes longer than a step of decoding does."""
    if config.weights is not None:
        return config

    is_multiplied = (
        stored_scheme(config, model) is not None
        and config.tensor_parallel == 1
        and executor == "graph"
        and _has_products(device, dtype)
    )
    return msgspec.structs.replace(config, weights="stored" if is_multiplied else "expanded")


def _has_products(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether kernels multiply by quantised weights on a device, for a model of `dtype`."""
    from drift_sdk._kernels.quantised.dequantise import programs_run  # needs the packages of a GPU

    return programs_run(device, dtype)


def choose_weight_form(config: EngineConfig, model: ModelSpec) -> WeightForm:
    """The form of a model's weights, for a config of `with_weight_form` or for what is known before: None
    counts as "expanded".

    Raises ConfigError for quantising a model whose files are quantised, or whose matrices cannot have the
    form.
    """
    form = config.weights or "expanded"
    scheme = stored_scheme(config, model)
    if form in QUANTISERS and scheme is not None:
        allowed = f'None, "stored" or "expanded": the files are quantised ({scheme.name})'
        raise ConfigError.of("weights", form, allowed)

    if reason := odd_columns(model, form):
        raise ConfigError.of("weights", form, f'None, "expanded" or "fp8": {reason}')

    return form


def bytes_without_files(config: EngineConfig, model: ModelSpec, dtype: torch.dtype) -> int:
    """Bytes of weights that do not depend on files: of all but those that files store quantised. Raises
    ConfigError as `choose_weight_form`."""
    form = choose_weight_form(config, model)
    if config.load == "random" and form == "stored":
        tensors = random_tensors(model, device=torch.device("cpu"), dtype=dtype, form=form)
        return weight_bytes(model, dtype, form, tensors)

    return weight_bytes(model, dtype, form)


def stored_scheme(config: EngineConfig, model: ModelSpec) -> Scheme | None:
    """The scheme of the files that are loaded; None if they have no quantised weights but MXFP4 experts."""
    scheme = model.quantisation
    # A scheme without storages has scales of the KV cache alone.
    return scheme if config.load == "auto" and scheme is not None and scheme.storages else None


POLL_S = 0.05
MOST_SUGGESTED = 64
"""The largest number of GPUs that an error names as possible."""


def shards_of(config: EngineConfig) -> list[Shard | None]:
    """The part of each GPU, in order of rank; None: the whole model."""
    size = config.tensor_parallel
    return [None] if size == 1 else [Shard(rank=rank, size=size) for rank in range(size)]


def check_division(config: EngineConfig, model: ModelSpec, executor: str) -> None:
    """Raise ConfigError if the model, with these settings, cannot be divided between so many GPUs."""
    if config.tensor_parallel == 1:
        return

    if config.fast_prompts:
        raise ConfigError.of("fast_prompts", True, "False for a model divided between GPUs")

    size, form = config.tensor_parallel, choose_weight_form(config, model)
    if form != "expanded":
        raise ConfigError.of("tensor_parallel", size, f'1 for weights="{form}"')

    obstacles = " and ".join(shard_obstacles(model, size))
    if obstacles:
        sizes = [each for each in range(2, MOST_SUGGESTED + 1) if not any(shard_obstacles(model, each))]
        allowed = f"{', '.join(map(str, [1, *sizes]))} for this model: it has {obstacles}"
        raise ConfigError.of("tensor_parallel", size, allowed)

    if executor != "graph":
        raise ConfigError.of("tensor_parallel", size, f"1 for executor {executor}")


def parallel_devices(config: EngineConfig, first: torch.device) -> Sequence[torch.device]:
    """The GPUs of an engine, the first one given. Raises ConfigError if this machine lacks one of them, or if
    they differ or do not reach each other's memory."""
    size = config.tensor_parallel
    if size == 1:
        return [first]

    if first.type != "cuda":
        raise ConfigError.of("tensor_parallel", size, f"1 on {first}")

    index, number = first.index or 0, torch.cuda.device_count()
    if index + size > number:
        allowed = f"at most {number - index} from {first} on: this machine has {number} GPUs"
        raise ConfigError.of("tensor_parallel", size, allowed)

    indices = range(index, index + size)
    names = {torch.cuda.get_device_name(each) for each in indices}
    if len(names) > 1:
        found = " and ".join(sorted(names))
        raise ConfigError.of("tensor_parallel", size, f"1, or GPUs of one kind; here {found}")

    for one, other in permutations(indices, 2):
        if not torch.cuda.can_device_access_peer(one, other):
            allowed = f"1, or GPUs that reach each other's memory: cuda:{one} does not reach cuda:{other}"
            raise ConfigError.of("tensor_parallel", size, allowed)

    return [torch.device("cuda", each) for each in indices]


@contextmanager
def opening_locks(devices: Sequence[torch.device], check: Callable[[], object]) -> Iterator[None]:
    """The `opening_lock` of all devices, which are in ascending order.

    check: called again and again while it waits for a lock; what it raises ends the waiting. Another engine
           may have the lock for as long as its draft is downloaded.
    """
    with ExitStack() as stack:
        for device in devices:
            lock = opening_lock(device)
            while not lock.acquire(timeout=POLL_S):
                check()
            stack.callback(lock.release)
        yield


class ModelPart(Struct, frozen=True, kw_only=True):
    """A model on a device, or the part of one that a GPU has, and its draft. memory: of the device."""

    decoder: Decoder
    memory: DeviceMemory
    drafter_factory: DrafterFactory


class StoredWeights(Struct, frozen=True):
    """Source, configuration and dtype of the decoder's weights, the part of them to load (None: all), and the
    memory of the device to load them on."""

    source: Source
    spec: ModelSpec
    dtype: torch.dtype
    shard: Shard | None
    memory: DeviceMemory

    @property
    def device(self) -> torch.device:
        return self.memory.device


def load_part(weights: StoredWeights, config: EngineConfig, report: Report) -> ModelPart:
    """Load the decoder, or its part, and the draft on a device."""
    memory = weights.memory
    decoder = _load_decoder(weights, config, memory, report)
    drafter_factory = open_drafter_factory(config, decoder, report, weights.source, memory.check_weights)
    if weights.shard is not None:
        cut_head(decoder, weights.shard)
    if weights.device.type == "cpu":  # of tensors that were quantised or converted: the KV cache may have it
        return_freed_memory(weights.device)
    return ModelPart(decoder=decoder, memory=memory, drafter_factory=drafter_factory)


def _load_decoder(
    weights: StoredWeights, config: EngineConfig, memory: DeviceMemory, report: Report
) -> Decoder:
    report("load weights", 0.0)
    form = choose_weight_form(config, weights.spec)
    if weights.shard is not None:
        return _load_shard(weights, weights.shard, config, memory, report)

    if config.load == "random":
        return Decoder.random(
            weights.spec,
            device=weights.device,
            dtype=weights.dtype,
            form=form,
            kv_form=config.kv_dtype,
            check_bytes=memory.check_weights,
        )

    return Decoder.load(
        weights.spec,
        weights.source.tensors(),
        device=weights.device,
        dtype=weights.dtype,
        form=form,
        kv_form=config.kv_dtype,
        on_tensor=lambda done, total: report("load weights", done / total),
        check_bytes=memory.check_weights,
    )


def _load_shard(
    weights: StoredWeights, shard: Shard, config: EngineConfig, memory: DeviceMemory, report: Report
) -> Decoder:
    tensors: TensorSource
    if config.load == "random":
        tensors = random_tensors(weights.spec, device=weights.device, dtype=weights.dtype)
    else:
        tensors = weights.source.tensors()
    return load_shard(
        weights.spec,
        tensors,
        shard,
        device=weights.device,
        dtype=weights.dtype,
        kv_form=config.kv_dtype,
        on_tensor=lambda done, total: report("load weights", (shard.rank + done / total) / shard.size),
        check_bytes=memory.check_weights,
    )
