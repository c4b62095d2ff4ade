"""Which executor runs a model on a device, and making it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

import torch
from msgspec import Struct

from drift_sdk.config import EngineConfig
from drift_sdk.errors import ConfigError, FieldError
from drift_sdk.execution.eager.executor import EagerExecutor
from drift_sdk.execution.stages import NO_STAGE_MARKS, StageMarks
from drift_sdk.execution.strict import StrictExecutor
from drift_sdk.models.decoder import Decoder
from drift_sdk.models.decoder_config import DecoderConfig
from drift_sdk.models.draft_config import DraftConfig
from drift_sdk.models.eagle3 import DraftDecoder
from drift_sdk.speculation import NGram
from drift_sdk.startup.device_memory import DeviceMemory
from drift_sdk.startup.draft_startup import make_drafter
from drift_sdk.startup.kv_sizing import KVDemand, MemoryRoom, size_kv
from drift_sdk.steps import Executor, ExecutorLimits

__all__ = [
    "OpenedExecutor",
    "choose_executor",
    "kv_demand",
    "open_eager_executor",
    "open_graph_executor",
]

MIN_CAPABILITY = (9, 0)

RESERVE_BYTES = 2**28
GRAPH_BYTES_PER_LAYER = 2**15
"""Memory kept free for what comes after the KV cache: a captured graph takes 0.6 MiB for the 32 layers of
Llama-3.1-8B, 19 KiB a layer (graphs by kind in perf/results/nvidia-h200/memory.json); smaller buckets load
kernels of their own, and log-probabilities of prompts are computed beside the graphs."""


class OpenedExecutor(Struct, frozen=True, kw_only=True):
    """An executor, and what came to light when it was made. `untuned`: weight shapes that run without
    measured configurations. `round_costs`: seconds by (slots, drafts), if somebody may choose."""

    executor: Executor
    untuned: tuple[str, ...] = ()
    round_costs: dict[tuple[int, int], float] = {}


def choose_executor(config: EngineConfig, device: torch.device) -> tuple[str, str | None]:
    """The executor's name, and why "auto" has to make do with a slower one than the device's kind allows.

    Raises ConfigError for an executor that cannot run there.
    """
    if config.executor == "eager":
        obstacle: str | None = 'executor="eager"'
    else:
        obstacle = _obstacle(config, device)
        if obstacle is None:
            return "graph", None

    if config.executor == "graph":
        raise ConfigError.of("executor", config.executor, f'"eager" or "auto" here: {obstacle}')

    if config.strict_performance:
        raise ConfigError.of("strict_performance", True, f"executor graph; here {obstacle}")

    if config.step_timeout_s is not None:
        # An eager step is over when it returns: nobody is there to give it up.
        raise ConfigError.of("step_timeout_s", config.step_timeout_s, f"executor graph; here {obstacle}")

    return "eager", obstacle if config.executor == "auto" and device.type == "cuda" else None


def kv_demand(decoder: Decoder, draft: DraftDecoder | NGram | None, block_size: int) -> KVDemand:
    """What KV of a model takes, with that of its draft and the features kept beside each block."""
    configs: list[DecoderConfig | DraftConfig] = [decoder.config]
    numbers_per_block = 0
    if isinstance(draft, DraftDecoder):
        configs.append(draft.config)
        numbers_per_block = draft.config.hidden_size
    for shapes in configs:
        numbers_per_block += 2 * shapes.num_layers * shapes.num_kv_heads * shapes.head_dim * block_size
    return KVDemand(
        context=decoder.config.max_position_embeddings,
        block_size=block_size,
        bytes_per_block=numbers_per_block * decoder.dtype.itemsize,
    )


def open_eager_executor(
    config: EngineConfig,
    decoder: Decoder,
    demand: KVDemand,
    memory: DeviceMemory,
    draft: DraftDecoder | NGram | None,
) -> OpenedExecutor:
    """Raises ConfigError for a KV cache that does not fit."""
    limits = _limits(config, decoder, demand, memory.room())
    return OpenedExecutor(executor=EagerExecutor(decoder, limits, make_drafter(draft, decoder, limits)))


def open_graph_executor(
    config: EngineConfig,
    decoder: Decoder,
    demand: KVDemand,
    memory: DeviceMemory,
    draft: DraftDecoder | NGram | None,
    report: Callable[[str, float], None],
    acceptance_trace: Sequence[int] | None = None,
    stages: StageMarks | None = None,
) -> OpenedExecutor:
    """Captures everything; ExecutorError if that fails, ConfigError if it would be slower than is allowed or
    the KV cache does not fit. `stages`: for measuring, see there."""
    # Only here, for they need Triton and the driver.
    from drift_sdk._kernels.gemm.tuning import WatchedTable, gpu_key, table_for
    from drift_sdk.execution.device.device import GpuDevice
    from drift_sdk.execution.device.errors import is_kept
    from drift_sdk.execution.graph.executor import GraphExecutor

    choices = config.speculation.shape.choices if config.speculation is not None else ()
    gpu = gpu_key(torch.cuda.get_device_name(decoder.device))
    table = WatchedTable(gemms=table_for(gpu).gemms)

    def fit_blocks(num_graphs: int) -> int:
        reserve = RESERVE_BYTES + num_graphs * decoder.config.num_layers * GRAPH_BYTES_PER_LAYER
        return size_kv(config, demand, memory.room(reserve=reserve)).num_blocks

    device = GpuDevice(decoder.device.index or 0)
    try:
        executor = GraphExecutor(
            device,
            decoder,
            # Buffers are made for the longest sequences there could be room for; less may be left.
            _limits(config, decoder, demand, memory.room(reserve=0)),
            table,
            fit_blocks=fit_blocks,
            prefill_token_budget=config.prefill_token_budget,
            exact_prefill=config.exact_prefill,
            draft=draft,
            draft_choices=choices if draft is not None else (),
            acceptance_trace=acceptance_trace,
            stages=stages or NO_STAGE_MARKS,
            step_timeout_s=config.step_timeout_s,
            report=report,
        )
    except BaseException:
        if not is_kept(device):
            device.close()  # its stream, and the library workspaces of that, are the next engine's
        raise

    untuned = tuple(sorted(table.untuned))
    if untuned and config.strict_performance:
        executor.close()
        raise untuned_error(gpu, untuned)

    round_costs = {}
    if draft is not None and config.speculation is not None and config.speculation.adaptive:
        report("measure rounds", 0.0)
        round_costs = executor.round_costs()
    return OpenedExecutor(
        executor=StrictExecutor(executor, must_draft=isinstance(draft, DraftDecoder))
        if config.strict_performance
        else executor,
        untuned=untuned,
        round_costs=round_costs,
    )


def _limits(config: EngineConfig, decoder: Decoder, demand: KVDemand, room: MemoryRoom) -> ExecutorLimits:
    size = size_kv(config, demand, room)
    return ExecutorLimits(
        max_num_seqs=config.max_num_seqs,
        max_model_len=size.max_model_len,
        num_blocks=size.num_blocks,
        block_size=demand.block_size,
        vocab_size=decoder.config.vocab_size,
    )


def untuned_error(gpu: str, untuned: Sequence[str]) -> FieldError:
    shapes = " ".join(shape.replace(" ", ":") for shape in untuned)
    table = Path(__file__).parents[1] / "_kernels" / "gemm" / "tuned" / f"{gpu}.json"
    command = f"python -m drift_sdk tune --out {table} {shapes}"
    allowed = f"measured configurations of all weights; {gpu} lacks {', '.join(untuned)}: run {command}"
    return ConfigError.of("strict_performance", True, allowed)


def _obstacle(config: EngineConfig, device: torch.device) -> str | None:
    """Why there can be no graphs."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return "CUDA graphs need an NVIDIA GPU"

    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        found = ".".join(map(str, capability))
        return f"the kernels need compute capability 9.0, {torch.cuda.get_device_name(device)} has {found}"

    missing = [package for package in ("triton", "cuda.core") if not _is_installed(package)]
    if missing:
        return f"{' and '.join(missing)} not installed"

    return None


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:
        return False
