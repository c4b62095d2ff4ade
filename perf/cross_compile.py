"""Compile the kernels of a model for GPUs that are not here, and check their shared memory and instructions.

python -m perf.cross_compile --model llama-3.1-8b --capability 80 86 89 90 120
python -m perf.cross_compile --covering

Nothing is launched, and no GPU is needed: an executor is made on torch's "meta" device for the limits of each
GPU, its steps are recorded, and their kernels are compiled by the ptxas that comes with Triton. The exit
status is 1 if a kernel takes more shared memory than a CTA of the GPU may have, does not compile, may end
without having waited where there is programmatic dependent launch, or uses instructions that the GPU lacks:
that launch, wgmma or TMA below compute capability 9.0. It is 1 too if a product has an order of its own, or
if nothing was compiled.
"""

from __future__ import annotations

import argparse
import itertools
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Literal

import torch
import triton
from msgspec import Struct
from triton.backends.compiler import GPUTarget

from drift_sdk._kernels.attention.softmax import WIDE_HEAD
from drift_sdk._kernels.gemm.tuning import WatchedTable
from drift_sdk._kernels.launch.gpu_limits import GpuLimits, limited_gpu
from drift_sdk._kernels.launch.launch_order import LaunchOrderError, access_of
from drift_sdk._kernels.launch.parallel_compile import KernelToCompile, recorded_kernels
from drift_sdk.execution.device.device import Event, Replay
from drift_sdk.execution.drafter_factory import (
    NO_DRAFTER,
    AssistantDrafterFactory,
    DFlashDrafterFactory,
    DrafterFactory,
    EagleDrafterFactory,
    NGramDrafterFactory,
)
from drift_sdk.execution.graph.gpu_graphs import GpuModel, GraphOptions
from drift_sdk.execution.graph.graph_executor import GraphExecutor, ParallelExecutor
from drift_sdk.families import read_spec
from drift_sdk.models.decoder import Decoder
from drift_sdk.models.kv_cache import KVScales
from drift_sdk.models.shard import Shard, cut_head
from drift_sdk.models.weights import meta_weights
from drift_sdk.spec.model import ModelSpec
from drift_sdk.speculation import Chain, DynamicTree, NGram
from drift_sdk.steps import ExecutorLimits
from perf.harness.meta_models import META_DTYPE, NUM_META_LAYERS, meta_assistant, meta_dflash, meta_draft
from perf.harness.mtp_draft import ASSISTANT
from perf.harness.numbers import at_least
from perf.harness.published import LLAMA, PUBLISHED

__all__ = ["GPUS", "Found", "kernels_of", "main", "violations"]

KIB = 1024


def _limits(capability: int, multiprocessors: int, cta_kib: int, all_kib: int, l2_mib: int) -> GpuLimits:
    return GpuLimits(
        capability=(capability // 10, capability % 10),
        num_multiprocessors=multiprocessors,
        shared_bytes=cta_kib * KIB,
        multiprocessor_shared_bytes=all_kib * KIB,
        l2_bytes=l2_mib * 2**20,
    )


GPUS = {
    80: _limits(80, 108, 163, 164, 40),  # A100
    86: _limits(86, 84, 99, 100, 6),  # RTX A6000
    89: _limits(89, 142, 99, 100, 96),  # L40S
    90: _limits(90, 132, 227, 228, 50),  # H100
    120: _limits(120, 170, 99, 100, 96),  # RTX 5090
}
"""Limits of a GPU of each compute capability, from the CUDA programming guide and data sheets."""

FORBIDDEN = re.compile(r"griddepcontrol|wgmma|cp\.async\.bulk|mbarrier\.try_wait")
"""Instructions of compute capability 9.0 and later."""

JOINED = re.compile(r"tt\.dot .*16, #ttg\.dot_op<\{[^}]*kWidth = (?!2)\d")
"""A product by mma.sync of 16-bit numbers of which threads have other than two neighbouring ones, as Triton
does where rows were joined from parts: it has another order of summation than all other products."""
FAST_PROMPTS = "_prefill_attention"
"""The kernel that promises no bits."""

Drafts = NGram | DynamicTree | Chain | Literal["assistant"] | None
"""N-grams, the tree of an EAGLE-3 draft, all that a DFlash head drafts, an assistant, or no drafts, with
exact prompts."""

EXCHANGE = "drift_sdk._kernels.exchange"
"""The module of kernels of several GPUs."""

NUM_LARGEST = 3
"""The largest step of each kind: prefill, round and first tokens."""

LARGE_HEADS = LLAMA | {
    "vocab_size": 32_000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "max_position_embeddings": 4096,
    "rope_theta": 10_000.0,
}
"""Heads of 256 dimensions, those that need most shared memory."""


class Found(Struct, frozen=True, kw_only=True):
    """A compiled kernel. error: why it does not compile, or how it breaks the rules of dependent launch; None
    if neither. shared_bytes: that a CTA takes."""

    kernel: KernelToCompile
    shared_bytes: int = 0
    forbidden: tuple[str, ...] = ()
    error: str | None = None


class MetaEvent:
    is_done = True

    def record(self) -> None:
        pass

    def wait(self, timeout_s: float | None = None) -> None:
        pass

    def seconds_since(self, earlier: Event) -> float:
        return 0.0


class RecordingDevice:
    """A device of an executor that captures nothing and records the kernels of its steps.

    num_steps: of the steps to record, the largest ones; None: all.
    """

    torch_device = torch.device("meta")
    num_allocations = 0

    def __init__(self, num_steps: int | None) -> None:
        self.kernels: list[KernelToCompile] = []
        self._num_steps = num_steps

    def work(self) -> AbstractContextManager[None]:
        return torch.inference_mode()

    def compile_kernels(
        self, steps: Iterable[Callable[[], None]], on_progress: Callable[[float], None]
    ) -> None:
        with self.work(), recorded_kernels() as kernels:
            for step in itertools.islice(steps, self._num_steps):
                step()
        self.kernels += [kernel for kernel in kernels if isinstance(kernel, KernelToCompile)]

    def mapped_memory(self, num_bytes: int, peers: Sequence[torch.device]) -> torch.Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8, device=self.torch_device)

    def warm_up(self, step: Callable[[], None]) -> None:
        pass

    def capture(self, step: Callable[[], None]) -> Replay:
        return MetaReplay()

    def finish_captures(self) -> None:
        pass

    def event(self) -> Event:
        return MetaEvent()

    def close(self) -> None:
        pass


class MetaReplay:
    def launch(self) -> None:
        pass

    def close(self) -> None:
        pass


class TargetDriver:
    """Triton's driver of a GPU that is not here.

    The number of the device is its capability: Triton keeps a kernel's options by the number.
    """

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_device(self) -> int:
        return int(self._target.arch)

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target


@contextmanager
def target(capability: int) -> Iterator[GpuLimits]:
    """Have Triton compile for a GPU of this compute capability, within its limits."""
    limits, runtime = GPUS[capability], triton.runtime.driver
    before = runtime._active if hasattr(runtime, "_active") else None
    runtime.set_active(TargetDriver(capability))
    try:
        with limited_gpu(limits):
            yield limits
    finally:
        runtime._active = before


def kernels_of(
    settings: Mapping[str, object],
    capability: int,
    *,
    drafts: Drafts = None,
    has_kv_scales: bool = False,
    num_steps: int | None = None,
) -> list[KernelToCompile]:
    """Return the kernels that an engine of this model runs on a GPU of a compute capability, each once.

    settings: the model's config.json. has_kv_scales: whether the KV cache is of e4m3. num_steps: of the
    largest steps alone; None: of all.
    """
    dtype, spec = META_DTYPE, read_spec(settings)
    limits = ExecutorLimits(
        max_num_seqs=64, max_model_len=4096, num_blocks=64, block_size=64, vocab_size=spec.vocab_size
    )
    with target(capability):
        device = RecordingDevice(num_steps)
        weights = meta_weights(spec, dtype)
        if has_kv_scales:
            scales = torch.empty(spec.num_layers, spec.attention.num_kv_heads, device="meta")
            weights = replace(weights, kv_scales=KVScales(scales, scales))
        decoder = Decoder(spec, weights)
        factory: DrafterFactory = NO_DRAFTER
        if isinstance(drafts, NGram):
            factory = NGramDrafterFactory(drafts, (1, 3))
        elif drafts == ASSISTANT:
            factory = AssistantDrafterFactory(meta_assistant(settings, decoder), (1, 3))
        elif isinstance(drafts, Chain):
            head = meta_dflash(settings, decoder, drafts.num_draft_tokens + 1)
            factory = DFlashDrafterFactory(head, drafts.choices)
        elif drafts is not None:
            factory = EagleDrafterFactory(meta_draft(settings, decoder), drafts.choices, tree=drafts)
        is_fast = drafts is not None and not spec.has_latents
        options = GraphOptions(prefill_token_budget=512, fast_prompts=is_fast)
        table = WatchedTable(element_bytes=dtype.itemsize)
        GraphExecutor(device, decoder, limits, table, options, drafter_factory=factory).close()
    return unique(device.kernels)


def unique(kernels: Iterable[KernelToCompile]) -> list[KernelToCompile]:
    """Return each kernel once, by its `repr`: constants may be of types without a hash."""
    return list({repr(kernel): kernel for kernel in kernels}.values())


def exchange_kernels(spec: ModelSpec, capability: int, num_gpus: int) -> list[KernelToCompile]:
    """Return the kernels with which so many GPUs of a compute capability, that divide a model between them,
    exchange anything."""
    limits = ExecutorLimits(
        max_num_seqs=4, max_model_len=256, num_blocks=4, block_size=64, vocab_size=spec.vocab_size
    )
    with target(capability):
        devices, models = [RecordingDevice(None) for _ in range(num_gpus)], []
        for rank, device in enumerate(devices):
            shard = Shard(rank=rank, size=num_gpus)
            part = shard.spec(spec)
            decoder = Decoder(part, meta_weights(part, torch.bfloat16))
            cut_head(decoder, shard)
            factory = NGramDrafterFactory(NGram(), (1,))
            models.append(
                GpuModel(device=device, decoder=decoder, tuned=WatchedTable(), drafter_factory=factory)
            )
        options = GraphOptions(prefill_token_budget=16)
        ParallelExecutor(models, limits, options).close()
        kernels = [kernel for device in devices for kernel in device.kernels]
    return unique(kernel for kernel in kernels if kernel.module == EXCHANGE)


def violations(kernels: Sequence[KernelToCompile]) -> Iterator[Found]:
    """Compile kernels, and yield those that do not compile or fit, or use what their GPU lacks."""
    for kernel in kernels:
        found = examined(kernel)
        limits = GPUS[kernel.arch]
        if found.error is not None or found.forbidden or found.shared_bytes > limits.shared_bytes:
            yield found


def examined(kernel: KernelToCompile) -> Found:
    """Compile a kernel and examine it."""
    try:
        binary = kernel.compile()
    except Exception as error:  # whatever Triton and ptxas raise is the finding
        return Found(kernel=kernel, error=repr(error))

    shared_bytes, names = binary.metadata.shared, set[str]()
    if kernel.name != FAST_PROMPTS and JOINED.search(binary.asm["ttgir"]):
        return Found(kernel=kernel, shared_bytes=shared_bytes, error="products in an order of their own")

    if GPUS[kernel.arch].has_pdl:
        try:
            access_of(binary.asm["ttir"])
        except LaunchOrderError as error:
            return Found(kernel=kernel, shared_bytes=shared_bytes, error=str(error))
    else:
        names = set(FORBIDDEN.findall(binary.asm["ptx"]))
    return Found(kernel=kernel, shared_bytes=shared_bytes, forbidden=tuple(sorted(names)))


def largest(kernels: Sequence[KernelToCompile]) -> list[KernelToCompile]:
    """Return, of each kernel with a pipeline, the one with the largest tiles and most stages."""
    found: dict[str, tuple[int, KernelToCompile]] = {}
    for kernel in kernels:
        names = kernel.source().fn.arg_names
        constants = {names[path[0]]: value for path, value in kernel.constants.items()}
        if "NUM_STAGES" in constants:
            sizes = [value for name, value in constants.items() if name.startswith(("TILE_", "NUM_STAGES"))]
            size = math.prod(sizes) * constants.get("PADDED_DIM", 1)
            found[kernel.name] = max(
                found.get(kernel.name, (0, kernel)), (size, kernel), key=lambda one: one[0]
            )
    return [kernel for _, kernel in found.values()]


def configurations(
    names: Sequence[str], *, is_covering: bool
) -> Iterator[tuple[dict[str, object], Sequence[Drafts]]]:
    """Settings of models with few layers, and the drafts with which their kernels are compiled."""
    layers = {"num_hidden_layers": NUM_META_LAYERS}
    for name in names:
        settings = LLAMA | PUBLISHED[name] | layers
        spec = read_spec(settings)
        is_wide = spec.max_head_dim > WIDE_HEAD
        has_trees = not (spec.recurrent_layers or spec.has_latents or is_wide)
        kinds: list[Drafts] = [NGram(), None]
        kinds += [DynamicTree()] if has_trees else []
        kinds += [ASSISTANT] if settings["model_type"] == "gemma4_text" else []
        kinds += [] if is_wide else [Chain(7)]  # a DFlash head has as many dimensions as the model's
        yield settings, kinds
    if is_covering:
        yield LARGE_HEADS | layers, (NGram(), DynamicTree())


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    # Models of MXFP4 are left out: their kernels depend on scales, and the "meta" device has no values.
    models = [name for name, settings in PUBLISHED.items() if "quantization_config" not in settings]
    parser.add_argument("--model", nargs="*", choices=models, default=())
    parser.add_argument("--capability", nargs="+", type=int, choices=GPUS, default=list(GPUS))
    parser.add_argument("--covering", action="store_true", help="a model whose heads need most shared memory")
    parser.add_argument("--kv-dtype", choices=("fp8",), help="as in EngineConfig")
    parser.add_argument("--largest", action="store_true", help="only the largest kernels with a pipeline")
    parser.add_argument(
        "--tensor-parallel", type=at_least(1), help="only the kernels with which so many GPUs exchange sums"
    )
    given = parser.parse_args(arguments)
    num_found = num_kernels = 0
    for capability in given.capability:
        for settings, kinds in configurations(given.model, is_covering=given.covering):
            if given.tensor_parallel is not None:
                spec = read_spec(settings)
                kernels = exchange_kernels(spec, capability, given.tensor_parallel)
            else:
                has_scales = given.kv_dtype is not None
                num_steps = NUM_LARGEST if given.largest else None
                of_kinds = (
                    kernels_of(
                        settings, capability, drafts=drafts, has_kv_scales=has_scales, num_steps=num_steps
                    )
                    for drafts in kinds
                )
                kernels = unique(itertools.chain.from_iterable(of_kinds))
            if given.largest:
                kernels = largest(kernels)
            num_kernels += len(kernels)
            for found in violations(kernels):
                num_found += 1
                text = found.error or f"{found.shared_bytes} bytes of shared memory, {found.forbidden}"
                print(f"{capability}: {found.kernel.name} {found.kernel.constants}: {text}", flush=True)
        print(f"{capability}: {num_kernels} kernels compiled so far, {num_found} violations", flush=True)
    return 1 if num_found or not num_kernels else 0


if __name__ == "__main__":
    sys.exit(main())
