"""Count the variants of kernels that an engine with default settings compiles for an H200.

python -m perf.kernel_variants --model llama-3.1-8b

Prints two numbers for each kernel, and their sums: without speculation, and with an EAGLE-3 draft. A variant
is a kernel with one set of constants, types and options. Nothing is compiled or launched, and no GPU is
needed: the steps that an engine compiles when it starts are recorded, see perf.cross_compile. Weights have
shapes alone, and layers share kernels, so a few layers stand for all.

The first start of an engine on a machine compiles every variant, each later start loads every variant.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from unittest.mock import patch

from drift_sdk import Chain, EngineConfig
from drift_sdk._kernels.gemm.tuning import table_for
from drift_sdk._kernels.launch.parallel_compile import KernelToCompile
from drift_sdk.config import prefill_token_budget
from drift_sdk.execution.drafter_factory import NO_DRAFTER, DrafterFactory, EagleDrafterFactory
from drift_sdk.execution.forward import attention
from drift_sdk.execution.graph.gpu_graphs import GraphOptions
from drift_sdk.execution.graph.graph_executor import GraphExecutor
from drift_sdk.families import read_spec
from drift_sdk.models.decoder import Decoder
from drift_sdk.models.weights import meta_weights
from drift_sdk.steps import ExecutorLimits
from perf.cross_compile import RecordingDevice, target
from perf.harness.meta_models import META_DTYPE, NUM_META_LAYERS, meta_draft
from perf.harness.published import LLAMA, PUBLISHED

__all__ = ["default_variants", "main"]

CAPABILITY, GPU = 90, "nvidia-h200"
NUM_BLOCKS, BLOCK_SIZE = 4096, 64
SCRATCH_BYTES = 140 * 2**30 // attention.SCRATCH_SHARE
"""Memory of partial sums on an H200, on which the sizes of groups of sequences depend."""
PACKAGE = "drift_sdk._kernels."


def default_variants(name: str, *, has_draft: bool) -> list[KernelToCompile]:
    """Return the variants of kernels of a published model's default engine, each once.

    has_draft: whether it speculates with an EAGLE-3 draft.
    """
    settings = LLAMA | PUBLISHED[name] | {"num_hidden_layers": NUM_META_LAYERS}
    engine, spec = EngineConfig(), read_spec(settings)
    with target(CAPABILITY), patch.object(attention, "CPU_SCRATCH_BYTES", SCRATCH_BYTES):
        device = RecordingDevice(None)
        decoder = Decoder(spec, meta_weights(spec, META_DTYPE))
        factory: DrafterFactory = NO_DRAFTER
        if has_draft:
            factory = EagleDrafterFactory(meta_draft(settings, decoder), Chain().choices)
        limits = ExecutorLimits(
            max_num_seqs=engine.max_num_seqs,
            max_model_len=spec.max_position_embeddings,
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            vocab_size=spec.vocab_size,
        )
        options = GraphOptions(prefill_token_budget=prefill_token_budget(engine, "cuda"))
        GraphExecutor(device, decoder, limits, table_for(GPU), options, drafter_factory=factory).close()
    return list({repr(kernel): kernel for kernel in device.kernels}.values())


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    # Models with experts are left out: their kernels depend on scales, and the "meta" device has no values.
    dense = [name for name, settings in PUBLISHED.items() if "num_experts_per_tok" not in settings]
    parser.add_argument("--model", choices=dense, default="llama-3.1-8b")
    given = parser.parse_args(arguments)
    plain, eagle = (default_variants(given.model, has_draft=has_draft) for has_draft in (False, True))
    numbers = [
        Counter(f"{kernel.module.removeprefix(PACKAGE)}.{kernel.name}" for kernel in kernels)
        for kernels in (plain, eagle)
    ]
    for name, _ in (numbers[0] | numbers[1]).most_common():
        print(f"{numbers[0][name]:4} {numbers[1][name]:4}  {name}")
    print(f"{len(plain):4} {len(eagle):4}  in all")


if __name__ == "__main__":
    main()
