"""The graph executor: every step is a few replays of captured CUDA graphs, launched without waiting.

A model that is divided between GPUs has the same graphs on each, launched together.
"""

from __future__ import annotations

import logging
import sys
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import chain, pairwise
from pathlib import Path
from statistics import median
from typing import TypeVar

import msgspec
from msgspec import Struct
from torch import Tensor

from drift_sdk._kernels.gemm.tuning import LoggedProduct, TunedTable, add_products
from drift_sdk.errors import ExecutorError, RequestError
from drift_sdk.events import ignore_progress
from drift_sdk.execution.device.device import (
    Device,
    DeviceGroup,
    Event,
    Replay,
    ServingDevice,
    is_kept,
    typed_errors,
)
from drift_sdk.execution.device.exchange import Exchange, ExchangeSizes, open_exchanges
from drift_sdk.execution.device.stages import NO_STAGE_MARKS, WatchedReplay
from drift_sdk.execution.drafter_factory import NO_DRAFTER, DrafterFactory
from drift_sdk.execution.forward.draft import MAX_MULTIPLY_ROWS
from drift_sdk.execution.forward.kernel_weights import arrange_part
from drift_sdk.execution.graph.buckets import GraphBuckets, max_expanded_tokens
from drift_sdk.execution.graph.gpu_graphs import (
    NO_HOOKS,
    CapturedGraphs,
    FitBlocks,
    GpuGraphs,
    GpuModel,
    GraphOptions,
    StartupHooks,
    graph_buckets,
    open_graphs,
    open_ring,
)
from drift_sdk.execution.graph.step_launcher import PromptOutputs, ResultPlaces, StepLauncher
from drift_sdk.models.assistant import AssistantWeights
from drift_sdk.models.channels import MlpWeights, ParallelWeights
from drift_sdk.models.decoder import Decoder
from drift_sdk.models.dflash import DFlashDecoder
from drift_sdk.models.draft_head import DraftDecoder, DraftWeights
from drift_sdk.models.shard import Shard
from drift_sdk.models.weight_update import update_weights
from drift_sdk.models.weights import LayerWeights
from drift_sdk.quantised.weight import dense
from drift_sdk.steps import ExecutorLimits, StepPlan, StepResult

log = logging.getLogger("drift_sdk")

Products = Counter[LoggedProduct]


class ProductLog:
    """Counts the products of an executor's replays, and writes them to a file when the executor is closed.

    `drift_sdk tune --log` reads it. Products of the vendor's library, in prefill and in long draft
    extensions, have nothing to tune and are left out. So are steps that take little of the time: draft
    extensions of prompts, and refreshes of partial verification.
    """

    def __init__(
        self, path: Path, decoder: Decoder, draft: DraftDecoder | DFlashDecoder | Decoder | None
    ) -> None:
        self._path = path
        self._decoder, self._draft = decoder, draft
        self._num_launches: Counter[str] = Counter()
        self._products: dict[str, Products] = {}

    def watch(self, graphs: CapturedGraphs, *, is_exact: bool) -> None:
        """Count the launches of an executor's graphs. is_exact: prefill runs in the kernels of decoding."""
        for (num_slots, num_drafts), replay in graphs.decode.items():
            products = self._drafted(num_slots, num_drafts) + self._verified(num_slots, num_drafts)
            graphs.decode[num_slots, num_drafts] = self._watched(replay, products)
        for (num_slots, num_drafts), replay in graphs.draft.items():
            graphs.draft[num_slots, num_drafts] = self._watched(replay, self._drafted(num_slots, num_drafts))
        for (num_slots, num_drafts), replay in graphs.verify.items():
            graphs.verify[num_slots, num_drafts] = self._watched(
                replay, self._verified(num_slots, num_drafts)
            )
        for (num_slots, num_drafts), replay in graphs.partial.items():
            products = self._drafted(num_slots, num_drafts) + self._verified(num_slots, num_drafts)
            graphs.partial[num_slots, num_drafts] = self._watched(replay, products)
        for bucket, replay in graphs.mixed.items():
            products = self._layers(bucket.size) + self._head(bucket.num_round_rows)
            products += self._drafted(bucket.num_slots, bucket.num_drafts)
            products += self._extended(bucket.num_round_rows)
            graphs.mixed[bucket] = self._watched(replay, products)
        for num_slots, replay in graphs.first_tokens.items():
            graphs.first_tokens[num_slots] = self._watched(replay, self._head(num_slots))
        if is_exact:
            for num_rows, replay in graphs.prefill.items():
                graphs.prefill[num_rows] = self._watched(replay, self._layers(num_rows))
            for num_rows, replay in graphs.inner.items():
                inner = self._layers(num_rows, self._decoder.spec.first_reader)
                graphs.inner[num_rows] = self._watched(replay, inner)

    def reset(self) -> None:
        """Forget what was counted."""
        self._num_launches.clear()

    def write(self) -> None:
        """Add the counts to the file. A file that cannot be written is a warning."""
        total: Products = Counter()
        for name, number in self._num_launches.items():
            for product, count in self._products[name].items():
                total[product] += number * count
        try:
            add_products(self._path, total)
        except (OSError, ValueError) as error:
            log.warning("%s: the shapes of products were not written: %s", self._path, error)

    def _watched(self, replay: Replay, products: Products) -> Replay:
        name = str(len(self._products))
        self._products[name] = products
        return WatchedReplay(replay, lambda: self._num_launches.update((name,)))

    def _layers(self, num_rows: int, num_layers: int | None = None) -> Products:
        return Counter(_layer_products("", self._decoder.weights.layers[:num_layers], num_rows))

    def _head(self, num_rows: int) -> Products:
        return Counter(_product("head", self._decoder.weights.head, num_rows))

    def _drafted(self, num_slots: int, num_drafts: int) -> Products:
        """The products that draft: of each draft its head, and between drafts its layers."""
        if self._draft is None or num_drafts == 0:
            return Counter()

        weights = self._draft.weights
        is_assistant = isinstance(weights, AssistantWeights)
        found: Products = Counter()
        if isinstance(self._draft, DFlashDecoder):
            found.update(self._of_draft(_product("draft head", weights.head, num_slots * num_drafts)))
            return found + self._rows_of_draft(num_slots * (1 + self._draft.config.num_masks))

        for depth in range(num_drafts):
            found.update(self._of_draft(_product("draft head", weights.head, num_slots)))
            if depth > 0 or is_assistant:
                found.update(self._rows_of_draft(num_slots))
            if isinstance(weights, AssistantWeights):
                found.update(_product("draft centroids", weights.centroids, num_slots))
                if depth > 0:
                    found.update(_product("draft post", weights.post, num_slots))
        return found

    def _verified(self, num_slots: int, num_drafts: int) -> Products:
        """The products that verify drafts, and the draft extension."""
        num_rows = num_slots * (num_drafts + 1)
        return self._layers(num_rows) + self._head(num_rows) + self._extended(num_rows)

    def _extended(self, num_rows: int) -> Products:
        """The products of the draft extension of a round's rows."""
        if self._draft is None or isinstance(self._draft.weights, AssistantWeights):
            return Counter()

        weights = self._draft.weights
        if isinstance(self._draft, DFlashDecoder):
            head = self._draft.weights
            matrices = [head.context_projection(index)[0] for index in range(len(head.layers))]
            products = [_product("draft context", matrix, num_rows) for matrix in matrices]
            products.append(_product("draft fc", head.fc, num_rows))
            return Counter(self._of_draft(chain.from_iterable(products)))

        found = self._rows_of_draft(num_rows)
        if isinstance(weights, DraftWeights) and weights.fc is not None:
            found.update(self._of_draft(_product("draft fc", weights.fc, num_rows)))
        return found

    def _rows_of_draft(self, num_rows: int) -> Products:
        """The products of the draft's layers, and of the projection before them."""
        assert self._draft is not None
        weights = self._draft.weights
        found: Products = Counter(self._of_draft(_layer_products("draft ", weights.layers, num_rows)))
        if isinstance(weights, DraftWeights) and weights.joint is not None:
            found.update(self._of_draft(_product("draft joint", weights.joint, num_rows)))
        if isinstance(weights, AssistantWeights):
            found.update(_product("draft pre", weights.pre, num_rows))
        return found

    def _of_draft(self, products: Iterable[LoggedProduct]) -> list[LoggedProduct]:
        """The products of a draft that are not left to the library: for a head those of few rows."""
        most = sys.maxsize if isinstance(self._draft, Decoder) else MAX_MULTIPLY_ROWS
        return [product for product in products if product.num_rows <= most]


def _layer_products(prefix: str, layers: Sequence[LayerWeights], num_rows: int) -> Iterator[LoggedProduct]:
    for layer in layers:
        assert not isinstance(layer.channel, ParallelWeights)
        mlp = layer.channel if isinstance(layer.channel, MlpWeights) else layer.channel.shared
        for name, matrix in layer.mixer.matrices.items():
            yield from _product(f"{prefix}{name}", matrix, num_rows)
        if mlp is not None:
            is_gated = mlp.gate_up_bias is None
            yield from _product(f"{prefix}gate_up", mlp.gate_up, num_rows, is_gated=is_gated)
            yield from _product(f"{prefix}down", mlp.down, num_rows)


def _product(role: str, weight: object, num_rows: int, *, is_gated: bool = False) -> list[LoggedProduct]:
    """The product by a weight; none by an empty or a quantised one, which has no tuned table."""
    if not isinstance(weight, Tensor) or weight.numel() == 0:
        return []

    num_columns, inner = weight.shape
    dtype = str(weight.dtype).removeprefix("torch.")
    return [
        LoggedProduct(
            role=role,
            num_rows=num_rows,
            num_columns=num_columns,
            inner=inner,
            is_gated=is_gated,
            dtype=dtype,
        )
    ]


ALLOCATION_COUNT_INTERVAL = 256
"""Steps between two counts of allocations: asking torch takes as long as launching a step."""
NUM_TIMED_REPLAYS = 3
"""Replays of each round that are timed at start."""

Bucket = TypeVar("Bucket")
"""Key of a captured round."""


class _LaunchedStep(Struct):
    """A step in flight: the marks before and after it on the device, and where its results will be."""

    plan: StepPlan
    started: Event
    ended: Event
    results: ResultPlaces


class GraphExecutor:
    """Runs a `Decoder` by CUDA graphs. Everything is captured by the constructor, nothing while serving.

    `launch` writes to pinned memory and starts replays; lengths, tokens and finished flags live on the
    device. It waits for nothing but drafts after which a constraint must be asked, and a free ring entry.

    limits: what the executor has room for; known only once the KV cache has been sized. mixed_tokens,
    max_expanded_tokens: as in SchedulerConfig.
    """

    def __init__(
        self,
        device: Device,
        decoder: Decoder,
        limits: ExecutorLimits,
        tuned: TunedTable,
        options: GraphOptions,
        *,
        drafter_factory: DrafterFactory = NO_DRAFTER,
        hooks: StartupHooks = NO_HOOKS,
    ) -> None:
        """Raises ExecutorError if a step cannot be captured, and what hooks.fit_blocks raises."""
        self.limits: ExecutorLimits = limits
        model = GpuModel(device=device, decoder=decoder, tuned=tuned, drafter_factory=drafter_factory)
        buckets = graph_buckets(model, limits, options)
        with typed_errors(device), device.work():
            ring = open_ring(device, limits, buckets, options)
            gpu = open_graphs(model, limits, options, buckets, ring, hooks.report)
            gpu.graphs.capture(self._fit(hooks.fit_blocks, gpu.graphs.num_graphs))
        self._prepare_serving(device, model, [gpu], buckets, options)

    def _prepare_serving(
        self,
        device: ServingDevice,
        model: GpuModel,
        gpus: Sequence[GpuGraphs],
        buckets: GraphBuckets,
        options: GraphOptions,
    ) -> None:
        """Prepare for serving with the captured graphs of each GPU.

        device: all GPUs. model: on the first GPU, whose results are read.
        """
        first, *others = gpus
        first.graphs.join([gpu.graphs for gpu in others])
        self._device, self._gpus, self._decoder = device, gpus, model.decoder
        self._resources = first.resources
        self._graphs: CapturedGraphs | None = first.graphs
        self._step_timeout_s = options.step_timeout_s
        self.mixed_tokens = buckets.mixed_tokens
        # By the limits that are left, which an engine that wakes up begins with; graphs have room for more.
        most = max_expanded_tokens(model.decoder, self.limits)
        self.max_expanded_tokens = most if options.expands_latents else 0
        self._product_log: ProductLog | None = None
        if options.shape_log is not None:
            self._product_log = ProductLog(options.shape_log, model.decoder, model.drafter_factory.draft)
            self._product_log.watch(self._graphs, is_exact=not options.fast_prompts)
        prompt_outputs = PromptOutputs(first.steps.prompt_head, first.steps.prefill_hidden.final)
        mirrors = [gpu.resources for gpu in others]
        self._launcher = StepLauncher(
            self._resources,
            self._graphs,
            buckets,
            prompt_outputs,
            mirrors,
            first.states,
            needs_first_token=model.drafter_factory.needs_first_token,
        )
        self._launched: deque[_LaunchedStep] = deque()
        self._events: list[Event] = []  # of collected steps, to be used again
        self._last_ended: Event | None = None  # of the latest collected step
        self._allocations = AllocationCount(device)

    def _fit(self, fit_blocks: FitBlocks | None, num_graphs: int) -> ExecutorLimits:
        """The limits with the numbers of blocks that the cache gets. A sequence can be no longer than all of
        them together."""
        limits = self.limits
        if fit_blocks is not None:
            num_blocks, num_window_blocks = fit_blocks(num_graphs)
            self.limits = msgspec.structs.replace(
                limits,
                num_blocks=num_blocks,
                num_window_blocks=num_window_blocks,
                max_model_len=min(limits.max_model_len, num_blocks * limits.block_size),
            )
        return self.limits

    def round_costs(self) -> dict[tuple[int, int], float]:
        """Seconds that rounds of (slots, drafts) take without any context. Call it before anything is
        launched."""
        assert self._graphs is not None and not self._launched
        with typed_errors(self), self._device.work():
            costs = time_rounds(self._device, self._graphs.decode)
        self._forget_timed()
        return costs

    def refresh_costs(self) -> dict[int, float]:
        """Seconds that rounds which refresh views take, by slots, as `round_costs`; empty without partial
        verification."""
        assert self._graphs is not None and not self._launched
        with typed_errors(self), self._device.work():
            costs = time_rounds(self._device, self._graphs.refresh)
        self._forget_timed()
        return costs

    def _forget_timed(self) -> None:
        """Reset what replays that were timed have changed."""
        for gpu in self._gpus:
            with typed_errors(self), gpu.device.work():
                gpu.resources.ring.reset()
        if self._product_log is not None:
            self._product_log.reset()  # what was timed served nobody

    def launch(self, plan: StepPlan) -> None:
        if self._graphs is None:
            raise ExecutorError("the executor is closed")

        with typed_errors(self):
            step = _LaunchedStep(plan, self._event(), self._event(), ResultPlaces())
            self._launched.append(step)
            step.started.record()
            step.results = self._launcher.launch(plan)
            step.ended.record()

    @property
    def is_done(self) -> bool:
        with typed_errors(self):
            return not self._launched or self._launched[0].ended.is_done

    def collect(self) -> StepResult:
        step = self._launched.popleft()
        with typed_errors(self):
            step.ended.wait(self._step_timeout_s)
            self._check_ended()
        prefill, decode = self._launcher.read(step.plan, step.results)
        last, self._last_ended = self._last_ended, step.ended
        idle_s = 0.0 if last is None else step.started.seconds_since(last)
        self._events += [step.started] if last is None else [step.started, last]
        return StepResult(
            step_id=step.plan.step_id,
            prefill=prefill,
            decode=decode,
            duration_s=step.ended.seconds_since(step.started),
            idle_s=idle_s,
            host_work=self._resources.ring.take_work(self._allocations.step()),
        )

    def update_weights(self, tensors: Mapping[str, Tensor]) -> None:
        """See `TakesWeights`. The graphs read the weights where they were."""
        if self._graphs is None:
            raise ExecutorError("the executor is closed")

        if len(self._gpus) > 1:
            raise RequestError.of("tensors", f"{len(tensors)} tensors", "an engine without tensor_parallel")

        with typed_errors(self), self._device.work():
            update_weights(self._decoder, tensors, arrange_part)
            (event := self._event()).record()
            event.wait(self._step_timeout_s)

    def close(self) -> None:
        if self._graphs is None or is_kept(self):
            return

        try:
            self._finish()
        except ExecutorError as error:
            if not error.process_unusable:
                raise
            return  # the driver cannot free anything any more

        if self._product_log is not None:
            self._product_log.write()
        self._launched.clear()
        self._graphs.close()
        self._graphs = None
        del self._resources, self._launcher, self._gpus, self._decoder
        self._device.close()

    def _finish(self) -> None:
        """Wait for the steps in flight: the memory they write to belongs to another engine as soon as it is
        freed."""
        with typed_errors(self):
            (event := self._event()).record()
            timeout_s = self._step_timeout_s
            event.wait(timeout_s and timeout_s * (len(self._launched) + 1))

    def _check_ended(self) -> None:
        """Raise ExecutorError if a step that has ended has no valid results. On one GPU it has."""

    def _event(self) -> Event:
        return self._events.pop() if self._events else self._device.event()


def time_rounds(device: ServingDevice, rounds: Mapping[Bucket, Replay]) -> dict[Bucket, float]:
    """Seconds that each replay takes on an idle device, the median of a few. All their rows are padding, so
    attention is not included."""
    marks = [device.event() for _ in range(NUM_TIMED_REPLAYS + 1)]
    costs: dict[Bucket, float] = {}
    for bucket, replay in rounds.items():
        marks[0].record()
        for mark in marks[1:]:
            replay.launch()
            mark.record()
        marks[-1].wait()
        costs[bucket] = median(later.seconds_since(earlier) for earlier, later in pairwise(marks))

    return costs


class AllocationCount:
    """Counts allocations on a device from its construction on, by all code of the process. While an executor
    serves there should be none."""

    def __init__(self, device: ServingDevice) -> None:
        self._device = device
        self._num_counted = device.num_allocations
        self._num_steps = 0

    def step(self) -> int:
        """Allocations since the last count every ALLOCATION_COUNT_INTERVAL steps, else 0. To be called once a
        step."""
        self._num_steps += 1
        if self._num_steps % ALLOCATION_COUNT_INTERVAL:
            return 0

        before, self._num_counted = self._num_counted, self._device.num_allocations
        return self._num_counted - before


PEER_TIMEOUT_S = 30.0
"""Seconds that a GPU waits for another one without a step_timeout_s. Launches on two GPUs are microseconds
apart; a process that is stopped for longer just then ends with ExecutorError."""


class ParallelExecutor(GraphExecutor):
    """A `GraphExecutor` over several GPUs, of which each has a part of the model.

    Every GPU has all that an executor has on one: slot table, ring indices, workspace, KV cache (of its
    heads), drafter. They run the same steps with the same input, add partial sums of products with each other
    inside steps, and sample the same tokens. The results of the first one are read.
    """

    def __init__(
        self,
        models: Sequence[GpuModel],
        limits: ExecutorLimits,
        options: GraphOptions,
        *,
        hooks: StartupHooks = NO_HOOKS,
    ) -> None:
        """models: the parts, in order of rank, whose GPUs reach each other's memory.

        Raises ExecutorError if a step cannot be captured, and what hooks.fit_blocks raises.
        """
        self.limits = limits
        group = DeviceGroup([model.device for model in models])
        buckets = graph_buckets(models[0], limits, options)
        with ExitStack() as stack:
            for model in models:
                stack.enter_context(typed_errors(model.device))
            with group.work():
                ring = open_ring(group, limits, buckets, options)
            sizes = exchange_sizes(models[0], buckets, limits, len(models))
            self._exchanges: Sequence[Exchange] = open_exchanges([model.device for model in models], sizes)
            gpus: list[GpuGraphs] = []
            for model, exchange in zip(models, self._exchanges, strict=True):
                is_first = not gpus
                with model.device.work():
                    gpus.append(
                        open_graphs(
                            msgspec.structs.replace(model, exchange=exchange),
                            limits,
                            options if is_first else msgspec.structs.replace(options, stages=NO_STAGE_MARKS),
                            buckets,
                            ring if is_first else ring.on(model.device),
                            hooks.report if is_first else ignore_progress,
                        )
                    )
            fitted = self._fit(hooks.fit_blocks, gpus[0].graphs.num_graphs)
            for gpu in gpus:
                with gpu.device.work():
                    gpu.graphs.capture(fitted)
            self._arm(group, options, gpus)
        self._prepare_serving(group, models[0], gpus, buckets, options)

    def close(self) -> None:
        super().close()
        if self._graphs is None:
            self._exchanges = ()

    def _check_ended(self) -> None:
        """Raise ExecutorError if a GPU has waited too long for another one."""
        for exchange in self._exchanges:
            exchange.check()

    def _arm(self, group: DeviceGroup, options: GraphOptions, gpus: Sequence[GpuGraphs]) -> None:
        """Let the GPUs wait for each other from now on. None of them is still busy when it is armed, and none
        starts before all are."""
        mark = group.event()
        mark.record()
        mark.wait()
        for gpu, exchange in zip(gpus, self._exchanges, strict=True):
            with gpu.device.work():
                exchange.arm(peer_timeout(options.step_timeout_s))
        mark.record()
        mark.wait()


def peer_timeout(step_timeout_s: float | None) -> float:
    """Seconds that a GPU waits for another one: less than the host waits for a step, so that the step ends
    before that and the GPUs stay usable."""
    return PEER_TIMEOUT_S if step_timeout_s is None else min(PEER_TIMEOUT_S, step_timeout_s / 2)


def exchange_sizes(
    model: GpuModel, buckets: GraphBuckets, limits: ExecutorLimits, num_gpus: int
) -> ExchangeSizes:
    """Sizes of what the steps of these buckets exchange. model: one part."""
    weights, spec = model.decoder.weights, model.decoder.spec
    num_rows = max(buckets.prefill[-1], buckets.most_mixed_rows, buckets.max_rows)
    shard = Shard(rank=0, size=num_gpus)
    layer, head = weights.layers[0], dense(weights.head)
    assert isinstance(layer.channel, MlpWeights)
    matrices = layer.mixer.output, layer.channel.down
    num_slices = max(shard.column_slices(*dense(matrix).shape) for matrix in matrices)
    is_divided = head.shape[0] < limits.vocab_size
    return ExchangeSizes(
        num_sums=2 * spec.num_layers,
        sum_size=num_slices * num_rows * spec.hidden_size,
        logits_size=buckets.max_rows * head.shape[0] if is_divided else 0,
        num_drafts=max(buckets.max_rows, buckets.most_mixed_rows) if len(buckets.drafts) > 1 else 0,
    )
