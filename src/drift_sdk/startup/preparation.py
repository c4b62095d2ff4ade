"""Work for the graph executor on threads of its own, begun before a model is loaded.

It does not need the interpreter's lock, which loading a tokenizer and importing modules do. The start waits
for cuBLAS before it measures memory, and for the hash before it compiles.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import torch

from drift_sdk.config import EngineConfig, prefill_token_budget
from drift_sdk.spec.model import ModelSpec
from drift_sdk.startup.device_memory import DeviceMemory

__all__ = ["prepared_graphs"]


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
