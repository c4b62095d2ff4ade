"""Start of the graph executor, and the tuned table of its products: shipped, the user's, or tuned shortly.

A weight without an entry for this GPU is tuned shortly at the first start, and the outcome is kept in the
user's cache. No fault of a table is an error: without measurements weights run with the heuristic's tiles.
Only imported where there are Triton and a driver.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from drift_sdk._kernels.gemm import tuning
from drift_sdk._kernels.gemm.heuristic import GemmShape
from drift_sdk._kernels.gemm.slices import num_slices
from drift_sdk._kernels.gemm.tuner import FULL, SHORT, Effort, WeightToTune, tune
from drift_sdk._kernels.gemm.tuning import (
    MeasuredOn,
    TunedTable,
    WatchedTable,
    add_to_user_table,
    gemm_key,
    gpu_key,
    measured_on,
    tuning_lock,
    user_table,
    user_table_path,
)
from drift_sdk._kernels.launch.kernel import is_interpreted
from drift_sdk.config import EngineConfig
from drift_sdk.events import Report
from drift_sdk.execution.device.device import GpuDevice, is_kept
from drift_sdk.execution.graph.gpu_graphs import GpuModel, GraphOptions, StartupHooks
from drift_sdk.execution.graph.graph_executor import GraphExecutor, ParallelExecutor
from drift_sdk.models.assistant import AssistantWeights
from drift_sdk.models.channels import ExpertWeights, ParallelWeights
from drift_sdk.models.decoder import Decoder
from drift_sdk.models.dflash import DFlashWeights
from drift_sdk.models.draft_head import DraftWeights
from drift_sdk.models.shard import Shard
from drift_sdk.models.weights import DecoderWeights, LayerWeights
from drift_sdk.startup.model_parts import ModelPart
from drift_sdk.steps import ExecutorLimits


def start_graph_executor(
    parts: Sequence[ModelPart],
    limits: ExecutorLimits,
    table: TunedTable,
    options: GraphOptions,
    hooks: StartupHooks,
) -> GraphExecutor:
    """Make the executor of a model, or of one whose parts are on several GPUs, and capture everything."""
    devices = [GpuDevice(part.decoder.device.index or 0) for part in parts]
    torch.cuda.set_device(devices[0].torch_device)
    try:
        if len(parts) == 1:
            decoder, factory = parts[0].decoder, parts[0].drafter_factory
            return GraphExecutor(
                devices[0], decoder, limits, table, options, drafter_factory=factory, hooks=hooks
            )

        models = [
            GpuModel(device=device, decoder=part.decoder, tuned=table, drafter_factory=part.drafter_factory)
            for device, part in zip(devices, parts, strict=True)
        ]
        return ParallelExecutor(models, limits, options, hooks=hooks)
    except BaseException:
        for device in devices:
            if not is_kept(device):
                device.close()  # gives its stream, with the stream's library workspaces, to the next engine
        raise


log: logging.Logger = logging.getLogger("drift_sdk")

EFFORTS: dict[str, Effort | None] = {"off": None, "short": SHORT, "full": FULL}
"""By `EngineConfig.tuning`."""

SlicesOf = Callable[[int, int], int]
"""Gives the slices of a weight of so many columns and inner indices."""


def engine_table(
    config: EngineConfig,
    decoder: Decoder,
    draft: DraftWeights | DFlashWeights | DecoderWeights | None,
    report: Report,
    shard: Shard | None = None,
) -> WatchedTable:
    """Return the table of an engine for the decoder's device, and tune what it lacks as the config says.

    Entries of the user's cache come before those that are shipped. report: called while weights are tuned.
    shard: the part of the model that the decoder is; None: all.
    """
    gpu = torch.cuda.get_device_name(decoder.device) if decoder.device.type == "cuda" else "none"
    shipped, machine = tuning.table_for(gpu_key(gpu)), measured_on(gpu)
    weights = list(weights_to_tune(decoder.weights, draft, shard))
    kept = user_table(machine)
    effort = EFFORTS[config.tuning]
    wanted = [weight for weight in weights if effort is FULL or not _is_tuned(weight, shipped, kept)]
    if effort is not None and wanted and decoder.dtype.itemsize == 2 and not is_interpreted():
        kept = _tuned(machine, shipped, kept, wanted, effort, report)
    gemms = {**shipped.gemms, **kept.gemms}
    log.info(
        "tuned products: %d entries for %s and %d of %s; %d of this model's %d weight shapes have one",
        *(len(shipped.gemms), gpu, len(kept.gemms), user_table_path(machine)),
        *(sum(weight.key in gemms for weight in weights), len(weights)),
    )
    return WatchedTable(gemms=gemms, element_bytes=decoder.dtype.itemsize)


def _is_tuned(weight: WeightToTune, *tables: TunedTable) -> bool:
    return any(weight.key in table.gemms for table in tables)


def _tuned(
    machine: MeasuredOn,
    shipped: TunedTable,
    kept: TunedTable,
    weights: Sequence[WeightToTune],
    effort: Effort,
    report: Report,
) -> TunedTable:
    """Tune weights, add the outcome to the user's cache, and return all that it holds then.

    Another process may tune at the same time: what it has measured meanwhile is taken, not measured again.
    """
    report("tune", 0.0)
    try:
        with tuning_lock(machine):
            kept = user_table(machine)
            if effort is not FULL:
                weights = [weight for weight in weights if not _is_tuned(weight, shipped, kept)]
            found = tune(weights, effort, on_progress=lambda fraction: report("tune", fraction))
            add_to_user_table(machine, found)
    except OSError as error:
        log.warning("products are not tuned, their measurements cannot be kept: %s", error)
        return kept
    finally:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # the memory belongs to the KV cache

    log.info("tuned %d of %d weight shapes: %s", len(found.gemms), len(weights), ", ".join(found.gemms))
    return TunedTable(gemms={**kept.gemms, **found.gemms})


def weights_to_tune(
    target: DecoderWeights,
    draft: DraftWeights | DFlashWeights | DecoderWeights | None,
    shard: Shard | None = None,
) -> Iterator[WeightToTune]:
    """Yield the weights of a model and its draft whose products run in tuned kernels, by shape.

    Weights that are not plain tensors of a floating-point type, such as quantised ones, are left out.
    shard: the part of the model that `target` is; None: all.
    """
    tensors: dict[str, list[Tensor]] = {}
    shapes: dict[str, GemmShape] = {}
    for weight, is_gated, is_whole, slices_of in _products(target, draft, shard):
        if not isinstance(weight, Tensor) or not weight.is_floating_point() or weight.numel() == 0:
            continue

        num_columns, inner = weight.shape
        key = gemm_key(num_columns, inner, is_gated=is_gated)
        tensors.setdefault(key, []).append(weight)
        shapes[key] = GemmShape(
            num_columns=num_columns,
            inner=inner,
            num_slices=1 if is_whole or is_gated else slices_of(num_columns, inner),
            is_gated=is_gated,
            element_bytes=weight.element_size(),
        )
    for key, shape in shapes.items():
        yield WeightToTune(shape=shape, tensors=tensors[key])


def _products(
    target: DecoderWeights, draft: DraftWeights | DFlashWeights | DecoderWeights | None, shard: Shard | None
) -> Iterator[tuple[object, bool, bool, SlicesOf]]:
    """Each weight, whether its product is gated, whether it is used whole, and the function of its shape that
    gives its slices."""
    yield from _layer_products(target.layers, shard)
    if target.layer_inputs is not None:
        yield target.layer_inputs.projection, False, False, num_slices
    yield target.head, False, True, num_slices
    if isinstance(target, AssistantWeights):
        for weight in (target.pre, target.post, target.centroids):
            yield weight, False, False, num_slices
    if isinstance(draft, DecoderWeights):
        yield from _products(draft, None, None)
    elif isinstance(draft, DFlashWeights):
        yield from _layer_products(draft.layers, None)
        for index in range(len(draft.layers)):
            yield draft.context_projection(index)[0], False, False, num_slices
        yield draft.fc, False, False, num_slices
        yield draft.head, False, False, num_slices
    elif draft is not None:
        yield from _layer_products(draft.layers, None)
        yield draft.fc, False, False, num_slices
        yield draft.joint, False, False, num_slices
        yield draft.head, False, False, num_slices


def _layer_products(
    layers: Iterable[LayerWeights], shard: Shard | None
) -> Iterator[tuple[object, bool, bool, SlicesOf]]:
    of_rows: SlicesOf = num_slices if shard is None else shard.row_slices
    of_columns: SlicesOf = num_slices if shard is None else shard.column_slices
    for layer in layers:
        mixer, channel = layer.mixer, layer.channel
        for name, matrix in mixer.matrices.items():
            yield matrix, False, False, of_columns if name == "output" else of_rows
        experts = channel.experts if isinstance(channel, ParallelWeights) else channel
        mlps = [experts.shared if isinstance(experts, ExpertWeights) else experts]
        if isinstance(channel, ParallelWeights):
            mlps.append(channel.mlp)
        for mlp in mlps:
            if mlp is not None:
                yield mlp.down, False, False, of_columns
                yield mlp.gate_up, mlp.gate_up_bias is None, False, of_rows
        if isinstance(experts, ExpertWeights):
            yield experts.router, False, False, num_slices
        if layer.input is not None:
            yield layer.input.gate, False, False, num_slices
            yield layer.input.projection, False, False, num_slices
