"""The part of a graph executor on one GPU: resources, steps and the graphs captured from them."""

from __future__ import annotations

from msgspec import Struct

from drift_sdk._kernels.gemm.tuning import TunedTable
from drift_sdk._kernels.slots.slot_columns import num_mask_words
from drift_sdk.execution.device.device import Device, ServingDevice
from drift_sdk.execution.device.exchange import Exchange
from drift_sdk.execution.device.host_ring import PayloadBuffer, Ring, RingSizes
from drift_sdk.execution.device.memory import Workspace
from drift_sdk.execution.device.slot_table import SlotTable
from drift_sdk.execution.drafter_factory import NO_DRAFTER, DrafterFactory
from drift_sdk.execution.forward.caches import ModelResources, PagedKVCache, RecurrentStates
from drift_sdk.execution.graph.buckets import GraphBuckets
from drift_sdk.execution.graph.captured_graphs import CapturedGraphs
from drift_sdk.execution.graph.graph_steps import GraphSteps
from drift_sdk.execution.graph.options import GraphOptions
from drift_sdk.execution.resources import DeviceResources
from drift_sdk.models.decoder import Decoder
from drift_sdk.progress import Report
from drift_sdk.steps import ExecutorLimits

__all__ = ["GpuGraphs", "GpuModel", "graph_buckets", "open_graphs", "open_ring"]

NUM_ENTRIES = 16
"""Replays that can be in flight at once. A step has up to five, and one more for each MAX_UPDATES updates:
with eight entries, a request with a bias for 4,000 tokens would wait for the device."""
MAX_UPDATES = 512
"""Slot table updates of one replay. A step with more of them starts replays that do nothing else."""


class GpuModel(Struct, frozen=True, kw_only=True):
    """A model, or a part of one, on a GPU.

    drafter_factory: its draft is on the same GPU. exchange: with the GPUs that have the other parts.
    """

    device: Device
    decoder: Decoder
    tuned: TunedTable
    drafter_factory: DrafterFactory = NO_DRAFTER
    exchange: Exchange | None = None


class GpuGraphs(Struct, frozen=True, kw_only=True):
    """The graphs of a model on a GPU, which are captured by `graphs.capture`, and what they use.

    states: of recurrent layers; None: the model has none.
    """

    device: Device
    resources: DeviceResources
    steps: GraphSteps
    graphs: CapturedGraphs
    states: RecurrentStates | None = None


def graph_buckets(model: GpuModel, limits: ExecutorLimits, options: GraphOptions) -> GraphBuckets:
    """The sizes that graphs of a model are captured for."""
    factory = model.drafter_factory
    return GraphBuckets.of(
        model.decoder,
        limits,
        options.prefill_token_budget,
        is_exact=not options.fast_prompts,
        draft_choices=factory.draft_choices,
        tree_choices=tuple(factory.tree_plans),
        shares_rows=factory.max_tree_depth is not None,
        has_checks=options.has_checks and bool(factory.draft_choices),
        view_layout=options.view_layout if factory.draft_choices else None,
    )


def open_ring(
    device: ServingDevice, limits: ExecutorLimits, buckets: GraphBuckets, options: GraphOptions
) -> Ring:
    """The ring of an executor. To be called inside `device.work()`."""
    sizes = RingSizes(
        num_entries=NUM_ENTRIES,
        max_updates=MAX_UPDATES,
        payload_words=buckets.payload_words,
        record_words=buckets.record_words,
        max_slots=buckets.decode[-1],
        num_draft_masks=buckets.num_draft_masks,
        mask_words=num_mask_words(limits.vocab_size),
    )
    return Ring(device, sizes, timeout_s=options.step_timeout_s)


def open_graphs(
    model: GpuModel,
    limits: ExecutorLimits,
    options: GraphOptions,
    buckets: GraphBuckets,
    ring: Ring,
    report: Report,
) -> GpuGraphs:
    """Allocate all but the KV cache, and compile and run the largest steps. To be called inside
    `model.device.work()`.

    Raises ConfigError for more slots than the slot table can address.
    """
    device, decoder, factory = model.device, model.decoder, model.drafter_factory
    table = SlotTable(
        limits,
        device.torch_device,
        has_history=factory.needs_history,
        has_views=buckets.view_layout is not None,
    )
    resources = DeviceResources(
        device=device,
        ring=ring,
        payload=PayloadBuffer(ring, table.words, buckets.payload_words),
        table=table,
        workspace=Workspace(device.torch_device),
        stages=options.stages,
    )
    num_tree_rows = max((buckets.max_slots(number) * (number + 1) for number in buckets.trees), default=0)
    states = None
    if buckets.has_states:
        most = buckets.max_chain + 1
        states = RecurrentStates(decoder, limits.max_num_seqs, most, options.num_checkpoints)
    target = ModelResources(
        decoder=decoder,
        cache=PagedKVCache(decoder, limits, num_tree_rows),
        tuned=model.tuned,
        limits=limits,
        states=states,
        exchange=model.exchange,
    )
    steps = GraphSteps(resources, target, buckets, factory, acceptance=options.acceptance)
    graphs = CapturedGraphs(resources, steps, buckets, report=report)
    return GpuGraphs(device=device, resources=resources, steps=steps, graphs=graphs, states=states)
