"""Start of the graph executor. Only imported where there are Triton and a driver."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from drift_sdk._kernels.gemm.tuning import TunedTable
from drift_sdk.execution.device.device import GpuDevice
from drift_sdk.execution.device.errors import is_kept
from drift_sdk.execution.graph.gpu_graphs import GpuModel, GraphOptions, StartupHooks
from drift_sdk.execution.graph.graph_executor import GraphExecutor, ParallelExecutor
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
