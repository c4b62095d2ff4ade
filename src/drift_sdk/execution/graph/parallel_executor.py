"""The executor of a model that is divided between GPUs: the same graphs on each, launched together."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import msgspec

from drift_sdk.execution.device.device import DeviceGroup
from drift_sdk.execution.device.errors import typed_errors
from drift_sdk.execution.device.exchange import Exchange, ExchangeSizes, open_exchanges
from drift_sdk.execution.graph.buckets import GraphBuckets
from drift_sdk.execution.graph.executor import GraphExecutor
from drift_sdk.execution.graph.gpu_graphs import GpuGraphs, GpuModel, graph_buckets, open_graphs, open_ring
from drift_sdk.execution.graph.options import NO_HOOKS, GraphOptions, StartupHooks
from drift_sdk.execution.stages import NO_STAGE_MARKS
from drift_sdk.models.channels.mlp import MlpWeights
from drift_sdk.models.shard import Shard
from drift_sdk.progress import ignore_progress
from drift_sdk.quantised.weight import dense
from drift_sdk.steps import ExecutorLimits

__all__ = ["PEER_TIMEOUT_S", "ParallelExecutor"]

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
            num_blocks = self._fit(hooks.fit_blocks, gpus[0].graphs.num_graphs)
            for gpu in gpus:
                with gpu.device.work():
                    gpu.graphs.capture(num_blocks)
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
