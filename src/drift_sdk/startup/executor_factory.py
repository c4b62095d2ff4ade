"""Choice and construction of the executor that runs a model on a device, and checks of what it needs."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from msgspec import Struct
from msgspec.structs import replace

from drift_sdk.config import EngineConfig, prefill_token_budget
from drift_sdk.draft_policy import ViewCosts
from drift_sdk.errors import ConfigError, ExecutorError, FieldError
from drift_sdk.events import Report
from drift_sdk.execution.device.stages import NO_STAGE_MARKS, AcceptanceFactory, StageMarks
from drift_sdk.execution.drafter_factory import DrafterFactory
from drift_sdk.execution.eager.eager_executor import EagerExecutor
from drift_sdk.execution.eager.rounds import PartialRounds, RoundChecks
from drift_sdk.models.decoder import Decoder
from drift_sdk.models.kv_cache import KVForm, bytes_of_head
from drift_sdk.quantised.formats import E4M3
from drift_sdk.spec.model import Attention, GatedDelta, LatentAttention, ModelSpec, experts_of
from drift_sdk.speculation import Chain, PartialVerification, Speculation, ViewLayout, tree_plan
from drift_sdk.startup.model_parts import ModelPart, shards_of
from drift_sdk.startup.sizing import (
    KVDemand,
    MemoryRoom,
    StateSize,
    kv_layers,
    size_kv,
    size_states,
    window_demand,
)
from drift_sdk.steps import Executor, ExecutorLimits, HostWork, StepPlan, StepResult

if TYPE_CHECKING:
    from drift_sdk.execution.graph.gpu_graphs import GraphOptions


class OpenedExecutor(Struct, frozen=True, kw_only=True):
    """An executor, and what was found while it was made.

    num_tuned:   weight shapes that run with measured configurations.
    untuned:     those that do not.
    round_costs: seconds of a round by (slots, drafts); empty unless the number of drafts is adaptive.
    refresh_costs: seconds of a refresh of views by slots; empty likewise, and without partial verification.
    mixed_tokens, max_expanded_tokens: as in SchedulerConfig.
    states:      of a model with recurrent layers.
    """

    executor: Executor
    num_tuned: int = 0
    untuned: tuple[str, ...] = ()
    round_costs: dict[tuple[int, int], float] = {}
    refresh_costs: dict[int, float] = {}
    mixed_tokens: dict[int, tuple[tuple[int, tuple[int, ...]], ...]] = {}
    max_expanded_tokens: int = 0
    states: StateSize | None = None


def choose_executor(
    config: EngineConfig,
    device: torch.device,
    model: ModelSpec | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[str, str | None]:
    """The executor's name, and the reason if "auto" chooses a slower executor than a GPU allows, else None.

    model, dtype: None before they are known: what graphs do not support of the model, or have no room for on
    the GPU, is not found then.

    Raises ConfigError for an executor that cannot run on the device or with the config, and for settings that
    need the graph executor where it cannot run.
    """
    if config.executor == "eager":
        obstacle: str | None = 'executor="eager"'
    else:
        obstacle = _device_obstacle(device) or _config_obstacle(config) or _model_obstacle(model)
        if obstacle is None and model is not None and dtype is not None:
            obstacle = _room_obstacle(config, model, dtype, device)
        if obstacle is None:
            return "graph", None

    if config.executor == "graph":
        raise ConfigError.of("executor", config.executor, f'"eager" or "auto" here: {obstacle}')

    if config.strict_performance:
        raise ConfigError.of("strict_performance", True, f"executor graph; here {obstacle}")

    if config.step_timeout_s is not None and device.type == "cuda":
        # An eager step runs on the engine's thread until it returns, so it cannot be abandoned.
        raise ConfigError.of("step_timeout_s", config.step_timeout_s, f"executor graph; here {obstacle}")

    return "eager", obstacle if config.executor == "auto" and device.type == "cuda" else None


class StrictExecutor:
    """Wraps an executor and raises ExecutorError from `collect` for steps in which the host did work that the
    device should not depend on.

    That is: the host waited, took part in a round, copied results or allocated device memory. With
    `must_draft` also: a slot that was planned to draft did not, although its sequence goes on.
    """

    def __init__(self, executor: Executor, *, must_draft: bool) -> None:
        self._executor = executor
        self._must_draft = must_draft
        self._launched: deque[StepPlan] = deque()

    @property
    def limits(self) -> ExecutorLimits:
        return self._executor.limits

    def launch(self, plan: StepPlan) -> None:
        self._launched.append(plan)
        self._executor.launch(plan)

    @property
    def is_done(self) -> bool:
        return self._executor.is_done

    def collect(self) -> StepResult:
        result = self._executor.collect()
        plan = self._launched.popleft()
        check_host_work(result.host_work)
        if self._must_draft:
            check_drafts(plan, result)
        return result

    def close(self) -> None:
        self._executor.close()


def check_host_work(work: HostWork) -> None:
    """Raise ExecutorError for any host work."""
    for number, what in (
        (work.num_waits, "waits for room in the ring of inputs: too much was admitted at once"),
        (work.num_split_rounds, "rounds in which the host computed which tokens may follow the drafts"),
        (work.num_copies, "results copied to make room in the ring"),
        (work.num_allocations, "allocations of device memory while serving"),
    ):
        if number:
            raise ExecutorError(f"strict_performance: {number} {what}")


def check_drafts(plan: StepPlan, result: StepResult) -> None:
    """Raise ExecutorError for a row that was planned to draft, drafted nothing, and did not finish."""
    for row, output in zip(plan.decode, result.decode, strict=True):
        # In its last round a slot may have room for a single token, which needs no draft.
        goes_on = bool(output.token_ids) and output.finish is None
        if goes_on and row.num_draft_tokens > 0 and output.num_drafted == 0:
            planned = f"{row.num_draft_tokens} planned tokens"
            raise ExecutorError(f"strict_performance: slot {row.slot} drafted none of {planned}")


def check_attention_room(
    config: EngineConfig, model: ModelSpec, dtype: torch.dtype, device: torch.device
) -> None:
    """Raise ConfigError for settings that attention on graphs does not have, and for drafts that it has no
    room for on a GPU."""
    check_wide_heads(config, model)
    if model.has_latents:
        check_latents(config)
    elif config.speculation is not None:
        with _on_gpu(device):
            check_chain(_longest_chain(config.speculation), model, dtype)


def _on_gpu(device: torch.device) -> AbstractContextManager[object]:
    """A block in which kernels are configured for a GPU, or for one that is assumed where there is none."""
    return torch.cuda.device(device) if torch.cuda.is_available() else nullcontext()


def _longest_chain(speculation: Speculation) -> int:
    """Most drafts of a round that are no tree."""
    shape = speculation.shape
    if isinstance(shape, Chain):
        return shape.num_draft_tokens

    return max((number for number in shape.choices if tree_plan(shape, number) is None), default=0)


KEY_ALIGNMENT = 16
"""Bytes. Where keys with latents took no multiple of it, a kernel read a misaligned address on a GPU. No
published model has such keys."""


def check_latents(config: EngineConfig) -> None:
    """Raise ConfigError for settings that latent attention on graphs does not have."""
    where = 'for latent attention on CUDA graphs, or executor="eager"'
    if config.fast_prompts:
        raise ConfigError.of("fast_prompts", True, f"False {where}")

    speculation = config.speculation
    if speculation is not None and not isinstance(speculation.shape, Chain):
        raise ConfigError.of("shape", speculation.shape, f"a Chain {where}")

    if speculation is not None and speculation.checks:
        raise ConfigError.of("checks", True, f"False {where}")


def check_wide_heads(config: EngineConfig, model: ModelSpec) -> None:
    """Raise ConfigError for trees and views of a model with wide heads, for which these have no kernels."""
    from drift_sdk._kernels.attention.softmax import WIDE_HEAD

    speculation = config.speculation
    if speculation is None or model.has_latents or model.max_head_dim <= WIDE_HEAD:
        return

    where = f'with heads of {model.max_head_dim} dimensions on CUDA graphs, or executor="eager"'
    if not isinstance(speculation.shape, Chain):
        raise ConfigError.of("shape", speculation.shape, f"a Chain {where}")

    if speculation.checks:
        raise ConfigError.of("checks", True, f"False {where}")

    if speculation.partial_verification is not None:
        raise ConfigError.of("partial_verification", speculation.partial_verification, f"None {where}")


def check_chain(num_drafts: int, model: ModelSpec, dtype: torch.dtype) -> None:
    """Raise ConfigError for a chain of more drafts than attention can verify at once on the current GPU."""
    from drift_sdk._kernels.attention.decode import most_query_rows
    from drift_sdk._kernels.attention.softmax import Partitions

    mixers = (layer.mixer for layer in model.layers)
    sizes = {(mixer.head_dim, mixer.group) for mixer in mixers if isinstance(mixer, Attention)}
    for head_dim, group in sorted(sizes):
        room = most_query_rows(head_dim, dtype, Partitions().tile)
        most = num_drafts if room is None else max(room // group - 1, 0)
        if num_drafts > most:
            reason = f"attention of {num_drafts + 1} rows for {group} heads each has no room on this GPU"
            raise ConfigError.of("num_draft_tokens", num_drafts, f"at most {most} here: {reason}")


SCORING_READS = 0.5
"""Reads of keys and values by which a refresh chooses blocks: the keys, which are half of them, once."""


def _configured(config: EngineConfig) -> PartialVerification | None:
    """The configured partial verification, if any."""
    return None if config.speculation is None else config.speculation.partial_verification


def check_views(config: EngineConfig, model: ModelSpec) -> None:
    """Raise ConfigError if partial verification is configured and the model has layers with windows, which
    read few keys anyway."""
    partial = _configured(config)
    if partial is not None and model.has_latents:
        raise ConfigError.of("partial_verification", partial, "None for a model with latent attention")

    if partial is not None and any(window is not None for window in model.windows):
        allowed = "None for a model with sliding windows"
        raise ConfigError.of("partial_verification", partial, allowed)


def view_layout(
    config: EngineConfig, limits: ExecutorLimits, draft_choices: tuple[int, ...]
) -> ViewLayout | None:
    """The layout of views; None without partial verification, if nothing is drafted, or if no sequence can be
    longer than a view."""
    partial = _configured(config)
    if partial is None or not draft_choices:
        return None

    layout = partial.layout(limits.block_size, draft_choices[-1])
    return layout if layout.capacity < limits.max_model_len else None


def view_costs(layout: ViewLayout, model: ModelSpec, refresh_costs: Mapping[int, float]) -> ViewCosts:
    """The costs of partial verification. refresh_costs: as measured, empty if they were not."""
    num_tiles, _ = layout.refresh_tiles(model.attention.group)
    return ViewCosts(
        refresh_tokens=layout.refresh_tokens,
        view_tokens=layout.capacity,
        refresh_reads=num_tiles + SCORING_READS,
        refresh_costs=refresh_costs,
    )


log: logging.Logger = logging.getLogger("drift_sdk")

MIN_CAPABILITY = (8, 0)
"""The least CUDA compute capability that the kernels are compiled for. They are measured on 9.0 alone."""

MAX_HEAD_DIM = 512
"""The most dimensions of a head for which attention fits the registers and the shared memory of the GPUs that
kernels are compiled for."""

MAX_KEY_DIM = 128
"""The most dimensions of a key of recurrent layers for which a state fits the registers of a warp."""

RESERVE_BYTES = 2**28
GRAPH_BYTES_PER_LAYER = 2**15
"""Memory kept free for what is allocated after the KV cache. A captured graph takes 0.6 MiB for the 32 layers
of Llama-3.1-8B, which is 19 KiB a layer (graphs by kind in perf/results/nvidia-h200/memory.json). Smaller
buckets load kernels that larger ones do not use, and log-probabilities of prompts are computed outside the
graphs."""


def kv_demand(
    config: EngineConfig, decoder: Decoder, drafter_factory: DrafterFactory, block_size: int, executor: str
) -> KVDemand:
    """KV cache demand of a model, including what its drafter keeps for each block. executor: "graph" or
    "eager"."""
    demand = target_demand(config, decoder.spec, decoder.dtype, decoder.kv_form, block_size, executor)
    draft_bytes = drafter_factory.num_values_per_block(block_size) * decoder.dtype.itemsize
    return replace(demand, bytes_per_block=demand.bytes_per_block + draft_bytes)


def target_demand(
    config: EngineConfig,
    spec: ModelSpec,
    dtype: torch.dtype,
    form: KVForm | None,
    block_size: int,
    executor: str,
) -> KVDemand:
    """KV cache demand of a model of `dtype` without a drafter."""
    layers, windows = kv_layers(config, spec)
    each, of_windows = (kv_bytes_per_token(spec, dtype, form, some) for some in (layers, windows))
    return KVDemand(
        context=spec.max_position_embeddings,
        block_size=block_size,
        bytes_per_block=each * block_size,
        windows=window_demand(config, spec, of_windows, block_size, executor) if windows else None,
    )


def kv_bytes_per_token(
    spec: ModelSpec, dtype: torch.dtype, form: KVForm | None, layers: Sequence[int] | None = None
) -> int:
    """Bytes in the KV cache for a token of a model of `dtype`, of some layers; None: of all."""
    chosen = spec.layers if layers is None else [spec.layers[index] for index in layers]
    shapes = [layer.kv for layer in chosen if layer.kv is not None]
    return sum(
        shape.num_kv_heads * bytes_of_head(size, dtype, form)
        for shape in shapes
        for size in shape.stored_dims
    )


def open_eager_executor(config: EngineConfig, model: ModelPart, demand: KVDemand) -> OpenedExecutor:
    """Make an eager executor. Raises ConfigError for a KV cache that does not fit. Warns of settings of the
    graph executor alone."""
    for name in ("tuning", "shape_log", "fast_prompts", "step_timeout_s"):
        if getattr(config, name) != getattr(EngineConfig(), name):
            log.warning("%s has no effect on the eager executor", name)
    decoder, drafter_factory = model.decoder, model.drafter_factory
    room = model.memory.room()
    states = size_states(config, decoder.spec, decoder.dtype, room, "eager")
    config = _with_slots(config, states)
    limits = _limits(config, decoder, demand, room if states is None else states.left(room))
    drafter = drafter_factory.eager_drafter(decoder, limits)
    has_checks = config.speculation is not None and config.speculation.checks
    checks = RoundChecks(limits) if has_checks and drafter is not None else None
    layout = view_layout(config, limits, drafter_factory.draft_choices)
    partial = None if layout is None else PartialRounds(layout, decoder.spec.num_layers)
    return OpenedExecutor(executor=EagerExecutor(decoder, limits, drafter, checks, partial), states=states)


def open_graph_executor(
    config: EngineConfig,
    parts: Sequence[ModelPart],
    demand: KVDemand,
    report: Report,
    acceptance: AcceptanceFactory | None = None,
    stages: StageMarks | None = None,
) -> OpenedExecutor:
    """Make a graph executor and capture everything.

    parts: of the model, one on each GPU, in order of rank. acceptance, stages: for measuring, see
    `GraphOptions`.

    Raises ExecutorError if a capture fails, and ConfigError if steps would be slower than the configuration
    allows, the KV cache does not fit, or it cannot draft as configured.
    """
    # Imported only here: they need Triton and the driver.
    from drift_sdk.execution.device.streams import wait_for_preparation
    from drift_sdk.execution.forward.kernel_weights import arrange_decoder
    from drift_sdk.execution.graph.gpu_graphs import StartupHooks
    from drift_sdk.startup.graph_startup import engine_table, start_graph_executor

    decoder, drafter_factory = parts[0].decoder, parts[0].drafter_factory
    drafter_factory.check_graphs()
    draft = drafter_factory.draft
    for part in parts:
        arrange_decoder(part.decoder, part.drafter_factory.draft)
    for part in parts:  # from here on, memory and times are measured
        wait_for_preparation(part.decoder.device.index or 0)

    def least_room(reserve: int) -> MemoryRoom:
        """The room on the GPU that has least."""
        return min((part.memory.room(reserve=reserve) for part in parts), key=lambda room: room.share)

    def fit_blocks(num_graphs: int) -> tuple[int, int]:
        num_layers = decoder.spec.num_layers + drafter_factory.num_graph_layers
        reserve = RESERVE_BYTES + num_graphs * num_layers * GRAPH_BYTES_PER_LAYER
        size = size_kv(config, demand, least_room(reserve))
        return size.num_blocks, size.num_window_blocks

    shard = shards_of(config)[0]
    table = engine_table(config, decoder, None if draft is None else draft.weights, report, shard)
    # Buffers are made for the longest sequences that there could be room for; less room may be left.
    room = least_room(0)
    states = size_states(config, decoder.spec, decoder.dtype, room, "graph")
    config = _with_slots(config, states)
    limits = _limits(config, decoder, demand, room if states is None else states.left(room))
    options = _graph_options(config, acceptance, stages or NO_STAGE_MARKS)
    layout = view_layout(config, limits, drafter_factory.draft_choices)
    num_checkpoints = 0 if states is None else states.num_checkpoints
    options = replace(options, view_layout=layout, num_checkpoints=num_checkpoints)
    hooks = StartupHooks(fit_blocks=fit_blocks, report=report)
    executor = start_graph_executor(parts, limits, table, options, hooks)
    untuned = tuple(sorted(table.untuned))
    round_costs, refresh_costs = {}, {}
    try:
        if untuned and config.strict_performance:
            raise untuned_error(torch.cuda.get_device_name(decoder.device), untuned)

        if drafter_factory.is_adaptive:
            report("measure rounds", 0.0)
            round_costs, refresh_costs = executor.round_costs(), executor.refresh_costs()
    except BaseException:
        executor.close()
        raise

    strict = StrictExecutor(executor, must_draft=drafter_factory.always_drafts)
    return OpenedExecutor(
        executor=strict if config.strict_performance else executor,
        num_tuned=len(table.used) - len(untuned),
        untuned=untuned,
        round_costs=round_costs,
        refresh_costs=refresh_costs,
        mixed_tokens=executor.mixed_tokens,
        max_expanded_tokens=executor.max_expanded_tokens,
        states=states,
    )


def _with_slots(config: EngineConfig, states: StateSize | None) -> EngineConfig:
    """The config for as many sequences as the memory holds states of."""
    if states is None or states.num_slots >= config.max_num_seqs:
        return config

    log.warning("max_num_seqs=%d: the memory holds the states of %d", config.max_num_seqs, states.num_slots)
    return replace(config, max_num_seqs=states.num_slots)


def _graph_options(
    config: EngineConfig, acceptance: AcceptanceFactory | None, stages: StageMarks
) -> GraphOptions:
    from drift_sdk.execution.graph.gpu_graphs import GraphOptions

    return GraphOptions(
        prefill_token_budget=prefill_token_budget(config, "cuda"),
        fast_prompts=config.fast_prompts,
        step_timeout_s=config.step_timeout_s,
        acceptance=acceptance,
        stages=stages,
        has_checks=config.speculation is not None and config.speculation.checks,
        expands_latents=config.target_latency_ms_p50 is None and config.target_latency_ms_p95 is None,
        shape_log=None if config.shape_log is None else Path(config.shape_log),
    )


def _limits(config: EngineConfig, decoder: Decoder, demand: KVDemand, room: MemoryRoom) -> ExecutorLimits:
    """Limits of an executor whose KV cache takes its memory from `room`; ConfigError if it does not fit."""
    size = size_kv(config, demand, room)
    return ExecutorLimits(
        max_num_seqs=config.max_num_seqs,
        max_model_len=size.max_model_len,
        num_blocks=size.num_blocks,
        num_window_blocks=size.num_window_blocks,
        block_size=demand.block_size,
        vocab_size=decoder.spec.vocab_size,
    )


def untuned_error(gpu: str, untuned: Sequence[str]) -> FieldError:
    """The ConfigError of strict_performance for weight shapes without measured configurations on `gpu`."""
    shapes = " ".join(shape.replace(" ", ":") for shape in untuned)
    command = f"python -m drift_sdk tune {shapes}"
    allowed = f"measured configurations of all weights; {gpu} lacks {', '.join(untuned)}: run {command}"
    return ConfigError.of("strict_performance", True, allowed)


def _device_obstacle(device: torch.device) -> str | None:
    """Why the graph executor cannot run on the device; None if it can."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return "CUDA graphs need an NVIDIA GPU"

    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        found = ".".join(map(str, capability))
        return f"the kernels need compute capability 8.0, {torch.cuda.get_device_name(device)} has {found}"

    # Others do not keep the memory of captured steps from being used for anything else.
    if (allocator := torch.cuda.get_allocator_backend()) != "native":
        return f"CUDA graphs need torch's native allocator, here it is {allocator} (PYTORCH_ALLOC_CONF)"

    missing = [package for package in ("triton", "cuda.core") if not _is_installed(package)]
    if missing:
        return f"{' and '.join(missing)} not installed"

    return None


def _config_obstacle(config: EngineConfig) -> str | None:
    """Why the graph executor cannot run with a config; None if it can."""
    return "CUDA graphs do not support a KV cache in NVFP4" if config.kv_dtype == "nvfp4" else None


def _model_obstacle(model: ModelSpec | None) -> str | None:
    """Why the graph executor cannot run a model; None if it can, or if the model is not known yet."""
    if model is None:
        return None

    if model.has_latents:
        return _latent_obstacle(model)

    if (recurrent := _recurrent_obstacle(model)) is not None:
        return recurrent

    mixers = [layer.mixer for layer in model.layers if isinstance(layer.mixer, Attention)]
    if any(mixer.has_bias and mixer.is_gate_interleaved for mixer in mixers):
        return "CUDA graphs do not support gates of attention with a bias"

    for mixer in mixers:
        if mixer.head_dim != mixer.value_dim:
            sizes = f"{mixer.head_dim} and {mixer.value_dim}"
            return f"CUDA graphs support keys and values of one size, this model has {sizes} dimensions"

    if model.max_head_dim <= MAX_HEAD_DIM:
        return None

    return (
        f"CUDA graphs support heads of up to {MAX_HEAD_DIM} dimensions, this model has {model.max_head_dim}"
    )


def _room_obstacle(
    config: EngineConfig, model: ModelSpec, dtype: torch.dtype, device: torch.device
) -> str | None:
    """Why kernels of attention cannot be laid out in the shared memory of a GPU; None if they can."""
    with _on_gpu(device):
        if model.has_latents:
            kv_dtype = dtype if config.kv_dtype is None else E4M3
            return latent_room_obstacle(model.attention.head_dim, dtype, kv_dtype)

        return head_room_obstacle(model.max_head_dim, dtype)


def latent_room_obstacle(head_dim: int, dtype: torch.dtype, kv_dtype: torch.dtype) -> str | None:
    """Why keys with latents, `head_dim` numbers, cannot be read on the current GPU; None if they can."""
    from drift_sdk._kernels.attention.latent import latent_config
    from drift_sdk._kernels.attention.softmax import Partitions

    if (num_bytes := head_dim * kv_dtype.itemsize) % KEY_ALIGNMENT:
        return f"a key takes {num_bytes} bytes, not a multiple of {KEY_ALIGNMENT}"

    try:
        latent_config(1, head_dim, dtype, kv_dtype, Partitions().tile)
    except ValueError as error:
        return f"CUDA graphs have no room on this GPU for latent attention: {error}"

    return None


def head_room_obstacle(head_dim: int, dtype: torch.dtype) -> str | None:
    """Why attention of chunks has no room for heads on the current GPU; None if it has."""
    from drift_sdk._kernels.attention.exact_prefill import WIDE_FLOAT32_SHARED_BYTES
    from drift_sdk._kernels.attention.softmax import WIDE_HEAD
    from drift_sdk._kernels.launch.gpu_limits import gpu_limits

    is_large = head_dim > 128 and gpu_limits().shared_bytes < WIDE_FLOAT32_SHARED_BYTES
    if dtype != torch.float32 or not (is_large or head_dim > WIDE_HEAD):
        return None

    return f"CUDA graphs have no room on this GPU for heads of {head_dim} dimensions in float32"


def _latent_obstacle(model: ModelSpec) -> str | None:
    """Why kernels cannot compute a model with latent attention; None if they can."""
    mixers = [layer.mixer for layer in model.layers if isinstance(layer.mixer, LatentAttention)]
    if len(mixers) < model.num_layers:
        return "CUDA graphs do not support latent attention beside other layers"

    routers = [experts.router for layer in model.layers if (experts := experts_of(layer.channel)) is not None]
    if any(router.kind == "wide" and router.num_groups > 1 for router in routers):
        return "CUDA graphs do not support groups of experts by a softmax"

    forms = {(mixer.num_heads, mixer.kv) for mixer in mixers}
    return None if len(forms) == 1 else f"CUDA graphs support heads of one form, this model has {len(forms)}"


def _recurrent_obstacle(model: ModelSpec) -> str | None:
    """Why kernels cannot compute the recurrent layers of a model; None if they can, or there are none."""
    mixers = [layer.mixer for layer in model.layers if isinstance(layer.mixer, GatedDelta)]
    for mixer in mixers:
        if mixer.key_dim % 32 or mixer.key_dim > MAX_KEY_DIM or mixer.value_dim % 16:
            return (
                "CUDA graphs support recurrent layers with keys of 32, 64, 96 or 128 dimensions and values "
                f"of a multiple of 16, this model has {mixer.key_dim} and {mixer.value_dim}"
            )

    return None


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:
        return False
