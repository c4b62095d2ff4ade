"""The part of a graph executor on one GPU: resources, steps, and a captured graph for each kind of step and
each bucket of sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from drift_sdk._kernels.gemm.tuning import TunedTable
from drift_sdk._kernels.slots.slot_columns import num_mask_words
from drift_sdk.execution.acceptance import AcceptanceFactory
from drift_sdk.execution.device.device import Device, GroupReplay, Replay, ServingDevice
from drift_sdk.execution.device.exchange import Exchange
from drift_sdk.execution.device.host_ring import PayloadBuffer, Ring, RingSizes
from drift_sdk.execution.device.memory import Workspace
from drift_sdk.execution.device.slot_table import SlotTable
from drift_sdk.execution.device_resources import DeviceResources
from drift_sdk.execution.drafter_factory import NO_DRAFTER, DrafterFactory
from drift_sdk.execution.forward.caches import ModelResources, PagedKVCache, RecurrentStates
from drift_sdk.execution.graph.buckets import GraphBuckets, MixedBucket
from drift_sdk.execution.graph.graph_steps import GraphSteps, Step
from drift_sdk.execution.stages import NO_STAGE_MARKS, StageMarks
from drift_sdk.models.decoder import Decoder
from drift_sdk.progress import Report, ignore_progress
from drift_sdk.speculation import ViewLayout
from drift_sdk.steps import ExecutorLimits

FitBlocks = Callable[[int], tuple[int, int]]
"""Takes the number of graphs to be captured and returns how many KV blocks there is room for beside them.
Called once everything else has its memory."""


class GraphOptions(Struct, frozen=True, kw_only=True):
    """Settings of a graph executor.

    prefill_token_budget: most tokens of a prefill step.
    fast_prompts:         prompts are computed in the fastest orders of summation instead of decoding's.
    step_timeout_s:       most seconds that the device may take for a step; None = no limit.
    acceptance:           for measuring: makes what accepts drafts in place of their comparison.
    stages:               for measuring: marks around the stages of steps.
    has_checks:           rounds of speculation are checked.
    view_layout:          of partial verification; None without it.
    num_checkpoints:      places for checkpoints of recurrent layers.
    shape_log:            file to which the products that ran are added when the executor is closed.
    """

    prefill_token_budget: int
    fast_prompts: bool = False
    step_timeout_s: float | None = None
    acceptance: AcceptanceFactory | None = None
    stages: StageMarks = NO_STAGE_MARKS
    has_checks: bool = False
    view_layout: ViewLayout | None = None
    num_checkpoints: int = 0
    shape_log: Path | None = None


class StartupHooks(Struct, frozen=True, kw_only=True):
    """Called while an executor starts.

    fit_blocks: how many KV blocks there is room for, and how many of layers with windows, beside so many
    graphs; None = those of the limits. report: progress.
    """

    fit_blocks: FitBlocks | None = None
    report: Report = ignore_progress


NO_HOOKS = StartupHooks()


class CapturedGraphs:
    """All graphs of an executor on a GPU. `capture` captures them, the largest of each kind first.

    The constructor runs the largest steps once, so that everything but KV caches and graphs has its memory
    and the caches can be given what is left.

    update: applies updates and nothing else. decode[B, K]: a round of B slots with K drafts each. draft[B, K]
    and verify[B, K]: its halves, if there is a drafter and K is not 0. prefill[N]: chunks of N rows.
    mixed[N, B, K]: chunks of N rows and a round of B slots with K drafts each, in one pass.
    partial[B, K], refresh[B]: rounds of partial verification, if that is configured.
    first_tokens[B]: samples the first tokens of B finished prompts. draft_extend[N]: updates the drafter
    after a prefill step and its first tokens; empty without a drafter.
    num_graphs: to be captured.
    """

    update: Replay

    def __init__(
        self,
        resources: DeviceResources,
        steps: GraphSteps,
        buckets: GraphBuckets,
        *,
        report: Report,
    ) -> None:
        self._resources, self._buckets = resources, buckets
        self._steps = steps  # the buffers that graphs use stay allocated as long as the graphs
        self._report = report
        self.prefill: dict[int, Replay] = {}
        self.mixed: dict[MixedBucket, Replay] = {}
        self.draft_extend: dict[int, Replay] = {}
        self.decode: dict[tuple[int, int], Replay] = {}
        self.draft: dict[tuple[int, int], Replay] = {}
        self.verify: dict[tuple[int, int], Replay] = {}
        self.partial: dict[tuple[int, int], Replay] = {}
        self.refresh: dict[int, Replay] = {}
        self.first_tokens: dict[int, Replay] = {}
        self._replays: list[Replay] = []
        self.num_graphs: int = self._count_graphs()
        self._compile()
        self._warm_up()

    def capture(self, limits: ExecutorLimits) -> None:
        """Capture all graphs, with KV caches of as many blocks as the limits have. To be called once."""
        resources, steps, buckets = self._resources, self._steps, self._buckets
        with resources.device.work():
            steps.allocate_caches(limits)
        self._capture_prefill()
        self._capture_mixed()
        self._capture_rounds()
        self._capture_partial()
        for num_slots in reversed(buckets.first_tokens):
            self.first_tokens[num_slots] = self._capture(steps.first_tokens(num_slots))
        self.update = self._capture(steps.update)
        resources.device.finish_captures()
        with resources.device.work():
            resources.ring.reset()

    def join(self, others: Sequence[CapturedGraphs]) -> None:
        """Launch the graphs of other GPUs, which were captured for the same sizes, together with these. There
        are none of partial verification, which runs on one GPU."""
        if not others:
            return

        every = (self, *others)
        for kind in ("prefill", "mixed", "draft_extend", "decode", "draft", "verify", "first_tokens"):
            graphs: dict[Any, Replay] = getattr(self, kind)
            for bucket in graphs:
                graphs[bucket] = GroupReplay([getattr(each, kind)[bucket] for each in every])
        self.update = GroupReplay([each.update for each in every])
        self._replays += [replay for other in others for replay in other._replays]

    def close(self) -> None:
        """Free all graphs."""
        for replay in self._replays:
            replay.close()

    def _count_graphs(self) -> int:
        """The number of graphs to capture."""
        buckets, has_drafter = self._buckets, self._steps.drafter is not None
        num_prefill = len(buckets.prefill) * (2 if has_drafter else 1)
        # A round without drafts is never split.
        num_decode = sum(3 if number and has_drafter else 1 for _, number in buckets.rounds)
        num_decode += len(buckets.partial_rounds) + len(buckets.refreshes)
        num_first_tokens = len(buckets.first_tokens)
        return num_prefill + len(buckets.mixed) + num_decode + num_first_tokens + 1  # and `update`

    def _compile(self) -> None:
        """Compile the kernels of all steps, unless that was done on this machine before."""
        self._report("compile", 0.0)
        device = self._resources.device
        device.compile_kernels(self._every_step(), lambda fraction: self._report("compile", fraction))

    def _every_step(self) -> Iterator[Step]:
        """All steps that are captured. The largest of each kind come first, as they do when they run: steps
        take their buffers even where their kernels are only compiled."""
        steps, buckets = self._steps, self._buckets
        yield from steps.largest()
        for num_slots, num_drafts in reversed(buckets.rounds):
            decode_round = steps.round(num_slots, num_drafts)
            yield decode_round.whole
            if steps.drafter is not None and num_drafts > 0:
                yield decode_round.draft
                yield decode_round.verify
        yield from (step for _, step in self._partial_steps())
        yield from (step for _, step in self._refresh_steps())
        for num_slots in reversed(buckets.first_tokens):
            yield steps.first_tokens(num_slots)
        for num_rows in reversed(buckets.prefill):
            yield steps.prefill(num_rows)
            if steps.drafter is not None:
                yield steps.draft_extend(num_rows, steps.drafter)
        for bucket in reversed(buckets.mixed):
            yield steps.mixed(bucket)
        yield steps.update

    def _warm_up(self) -> None:
        """Run the largest step of each kind, so that later ones need no more memory."""
        self._report("warm up", 0.0)
        for step in self._steps.largest():
            self._resources.device.warm_up(step)

    def _capture_prefill(self) -> None:
        steps = self._steps
        for num_rows in reversed(self._buckets.prefill):
            self.prefill[num_rows] = self._capture(steps.prefill(num_rows))
            if steps.drafter is not None:
                self.draft_extend[num_rows] = self._capture(steps.draft_extend(num_rows, steps.drafter))

    def _capture_mixed(self) -> None:
        for bucket in reversed(self._buckets.mixed):
            self.mixed[bucket] = self._capture(self._steps.mixed(bucket))

    def _capture_rounds(self) -> None:
        for bucket in reversed(self._buckets.rounds):
            decode_round = self._steps.round(*bucket)
            self.decode[bucket] = self._capture(decode_round.whole)
            if self._steps.drafter is not None and bucket[1] > 0:
                self.draft[bucket] = self._capture(decode_round.draft)
                self.verify[bucket] = self._capture(decode_round.verify)

    def _partial_steps(self) -> Iterator[tuple[tuple[int, int], Step]]:
        if (views := self._steps.views) is not None:
            for bucket in reversed(self._buckets.partial_rounds):
                yield bucket, self._steps.partial_round(*bucket, views)

    def _refresh_steps(self) -> Iterator[tuple[int, Step]]:
        views, drafter = self._steps.views, self._steps.drafter
        if views is not None and drafter is not None:
            for num_slots in reversed(self._buckets.refreshes):
                yield num_slots, self._steps.refresh(num_slots, drafter, views)

    def _capture_partial(self) -> None:
        for bucket, step in self._partial_steps():
            self.partial[bucket] = self._capture(step)
        for num_slots, step in self._refresh_steps():
            self.refresh[num_slots] = self._capture(step)

    def _capture(self, step: Step) -> Replay:
        self._report("capture graphs", len(self._replays) / self.num_graphs)
        self._replays.append(self._resources.stages.capture(self._resources.device, step))
        return self._replays[-1]


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
        window_table=table.window_table if limits.num_window_blocks else None,
        cache=PagedKVCache(decoder, limits, num_tree_rows),
        tuned=model.tuned,
        limits=limits,
        states=states,
        exchange=model.exchange,
    )
    steps = GraphSteps(resources, target, buckets, factory, acceptance=options.acceptance)
    graphs = CapturedGraphs(resources, steps, buckets, report=report)
    return GpuGraphs(device=device, resources=resources, steps=steps, graphs=graphs, states=states)
