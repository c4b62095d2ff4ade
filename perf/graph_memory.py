"""Memory of each captured graph, as the driver counts it. Needs a GPU.

python -m perf.graph_memory --batch 64 --num-draft-tokens 3
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from msgspec import Struct

from drift_sdk._kernels.gemm.tuning import gpu_key, table_for
from drift_sdk.execution.device.device import Device, GpuDevice, Replay
from drift_sdk.execution.device.stages import NoStageMarks, StageMarks
from drift_sdk.execution.drafter_factory import NO_DRAFTER, DrafterFactory, EagleDrafterFactory
from drift_sdk.execution.graph.gpu_graphs import GraphOptions
from drift_sdk.execution.graph.graph_executor import GraphExecutor
from drift_sdk.models.decoder import Decoder
from drift_sdk.models.draft_head import DraftDecoder
from drift_sdk.steps import ExecutorLimits
from perf.harness.numbers import at_least
from perf.harness.record import Run
from perf.harness.recording import Recording, dtype_name, free_memory, parser
from perf.harness.shapes import Model, prepare, prepare_draft
from perf.harness.table import show, title_of

__all__ = ["Captured", "GraphRun", "NotesMemory", "captured_graphs", "main", "measure"]

BLOCK_SIZE = 64
KINDS = ("prefill", "mixed", "draft_extend", "decode", "draft", "verify", "first_tokens")


class GraphRun(Run, kw_only=True):
    """Memory of one graph, or of all graphs of one kind.

    graph: kind and size: the rows of a prefill step; slots and drafts of a round; or "all" and the kind.
    mib: MiB that were allocated while the graph was run once and captured, by its kernels, by buffers that no
    larger graph had allocated before, and by the graph itself.
    num_graphs: number of graphs of the kind, where `graph` names a kind.
    """

    graph: str
    mib: float
    num_graphs: int = 1


class Captured(Struct, frozen=True):
    """A captured graph: its kind, its size as text, and the MiB that its capture allocated."""

    kind: str
    size: str
    mib: float


class NotesMemory(NoStageMarks):
    """Records the bytes that each capture allocates.

    taken: bytes by the id of the capture's replay. free_bytes: reads how many bytes the device has free.
    """

    def __init__(self, free_bytes: Callable[[], int]) -> None:
        self._free_bytes = free_bytes
        self.taken: dict[int, int] = {}

    def capture(self, device: Device, step: Callable[[], None]) -> Replay:
        before = self._free_bytes()
        replay = super().capture(device, step)
        device.finish_captures()
        self.taken[id(replay)] = before - self._free_bytes()
        return replay


def captured_graphs(executor: Any, taken: dict[int, int]) -> list[Captured]:
    """Every graph of a GraphExecutor with the memory that its capture allocated, in the order of captures.

    taken: `NotesMemory.taken` of the executor's stage marks.
    """
    # Read from a private attribute: only measurements need to know which graph a replay belongs to.
    graphs = executor._graphs
    names = {id(graphs.update): ("update", "")}
    for kind in KINDS:
        for size, replay in getattr(graphs, kind).items():
            names[id(replay)] = (kind, "x".join(map(str, size)) if isinstance(size, tuple) else str(size))

    return [Captured(*names[key], num_bytes / 2**20) for key, num_bytes in taken.items() if key in names]


def measure(captured: Sequence[Captured], **fields: Any) -> Iterator[GraphRun]:
    """A run for each graph, then one for each kind. fields: of every run."""
    for graph in captured:
        yield GraphRun(**fields, graph=f"{graph.kind} {graph.size}".strip(), mib=graph.mib)

    for kind, group in itertools.groupby(sorted(captured, key=lambda one: one.kind), lambda one: one.kind):
        graphs = list(group)
        total = sum(one.mib for one in graphs)
        yield GraphRun(**fields, graph=f"all {kind}", mib=total, num_graphs=len(graphs))


def open_executor(
    model: Model,
    device: Device,
    limits: ExecutorLimits,
    dtype: torch.dtype,
    num_drafts: int,
    stages: StageMarks,
) -> GraphExecutor:
    """A graph executor of the model with random weights. num_drafts: tokens that a round may draft; 0 without
    a draft."""
    decoder = Decoder.random(model.spec, device=device.torch_device, dtype=dtype)
    drafter_factory: DrafterFactory = NO_DRAFTER
    if num_drafts:
        draft = DraftDecoder.load_random(prepare_draft(model).path, decoder)
        drafter_factory = EagleDrafterFactory(draft, (num_drafts,))
    is_gpu = device.torch_device.type == "cuda"
    name = torch.cuda.get_device_name(device.torch_device) if is_gpu else "cpu"
    return GraphExecutor(
        device,
        decoder,
        limits,
        table_for(gpu_key(name)),
        GraphOptions(prefill_token_budget=2048 if is_gpu else 16, stages=stages),
        drafter_factory=drafter_factory,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    made = parser(__doc__)
    made.add_argument("--batch", type=at_least(1), default=64, help="most sequences")
    made.add_argument("--max-model-len", type=at_least(1), default=4096)
    made.add_argument("--num-draft-tokens", type=at_least(0), default=3, help="0: without a draft")
    given = made.parse_args(arguments)
    if not given.device.startswith("cuda"):
        made.error(f"device={given.device!r}: graphs are captured on a GPU")

    recording = Recording("memory", given.device, given.out)
    name = dtype_name(given.dtype, given.device)
    with tempfile.TemporaryDirectory() as folder:
        model = prepare(given.model, Path(folder) / given.model)
        limits = ExecutorLimits(
            max_num_seqs=given.batch,
            max_model_len=given.max_model_len,
            num_blocks=2 * -(-given.max_model_len // BLOCK_SIZE),
            block_size=BLOCK_SIZE,
            vocab_size=model.spec.vocab_size,
        )
        index = torch.device(given.device).index or 0
        memory = NotesMemory(lambda: torch.cuda.mem_get_info(index)[0])
        print(f"opening {model.name}", flush=True)
        dtype = getattr(torch, name)
        executor = open_executor(model, GpuDevice(index), limits, dtype, given.num_draft_tokens, memory)
        captured = captured_graphs(executor, memory.taken)
        executor.close()
        free_memory()

    fields: dict[str, Any] = {
        "engine": "drift",
        "model": model.name,
        "dtype": name,
        "scenario": "graphs",
        "batch": given.batch,
        "context": given.max_model_len,
        "num_draft_tokens": given.num_draft_tokens,
    }
    for run in measure(captured, **fields):
        recording.add(run)
    rows = [(run["graph"], str(run["num_graphs"]), f"{run['mib']:.1f}") for run in recording.results.runs]
    show(title_of(recording.results), ("graph", "graphs", "MiB"), rows)
    print(f"written to {recording.path}")


if __name__ == "__main__":
    main()
