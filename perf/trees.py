"""Rounds of chains and of trees with equally many verified tokens: their time, and when trees pay.

python -m perf.trees --nodes 4 6 8 16 32 64 --batch 1 4

Needs a GPU. Rounds are run with simulated acceptance, in which every round accepts a draft or two along the
last children of a tree, so that keys and values are moved. What a round emits on average is computed: the
draft's candidate of rank r is right with probability p * (1 - p) ** r, whatever was accepted before it (at
p = 0.6: 60%, 24%, 10%). The break-even rate is the least p at which a round emits more tokens in its time
than rounds without drafts do, and than the best chain does.
"""

from __future__ import annotations

import heapq
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from drift_sdk import DynamicTree, StaticTree
from drift_sdk._kernels.gemm.tuning import gpu_key, table_for
from drift_sdk.execution.device.device import GpuDevice
from drift_sdk.execution.drafter_factory import NO_DRAFTER, DrafterFactory, EagleDrafterFactory
from drift_sdk.execution.graph.executor import GraphExecutor, GraphOptions
from drift_sdk.models.decoder import Decoder
from drift_sdk.models.eagle3 import DraftDecoder
from drift_sdk.profiling.manual_driver import ManualDriver
from drift_sdk.steps import ExecutorLimits
from drift_sdk.trees.limits import MAX_PATH_LENGTH, max_batch_drafts
from perf.harness.record import Run
from perf.harness.recording import Recording, free_memory, parser
from perf.harness.shapes import Model, prepare, prepare_draft
from perf.harness.table import show

__all__ = ["TreeRun", "best_tree", "break_even", "main", "tokens_of_chain", "tokens_of_tree"]

NODES = (4, 6, 8, 16, 32, 64)
RATES = (0.5, 0.6, 0.7, 0.8)
TREE_RATE = 0.6
"""The rate for which static trees are chosen."""
MAX_DEPTH, NUM_RANKS = 8, 8
BUDGET, BLOCK_SIZE = 2048, 64
NUM_WARM_UP, NUM_ROUNDS = 4, 24
TRACE = (2, 3)
"""Tokens of simulated rounds, in turn."""

Paths = tuple[tuple[int, ...], ...]


class TreeRun(Run, kw_only=True):
    """Rounds of a shape with `num_draft_tokens` drafts. `tree` is "static", "dynamic" or None for a chain.

    num_nodes: verified tokens of a sequence. break_even_rate: see the module; None if no rate below 1 is
    enough. tokens: emitted on average, by rate of the draft's best candidate.
    """

    num_nodes: int
    break_even_rate: float | None
    tokens: dict[str, float]


def best_tree(num_drafts: int, rate: float = TREE_RATE) -> Paths:
    """The paths of the tree of so many drafts that emits most at a rate."""
    found: list[tuple[int, ...]] = []
    waiting: list[tuple[float, tuple[int, ...]]] = [(-rate, (0,))]
    while len(found) < num_drafts:
        cost, path = heapq.heappop(waiting)
        found.append(path)
        if len(path) < MAX_DEPTH:
            heapq.heappush(waiting, (cost * rate, (*path, 0)))
        if path[-1] + 1 < NUM_RANKS:
            heapq.heappush(waiting, (cost * (1 - rate), (*path[:-1], path[-1] + 1)))

    return tuple(found)


def tokens_of_tree(paths: Paths, rate: float) -> float:
    """Tokens that a round with a tree emits on average."""
    total = 1.0
    for path in paths:
        probability = 1.0
        for rank in path:
            probability *= rate * (1 - rate) ** rank
        total += probability
    return total


def tokens_of_chain(num_drafts: int, rate: float) -> float:
    """Tokens that a round with a chain emits on average."""
    return sum(rate**length for length in range(num_drafts + 1))


def break_even(
    tokens: Callable[[float], float], seconds: float, others: Callable[[float], float]
) -> float | None:
    """The least rate at which rounds of `seconds` emit more tokens a second than others(rate)."""
    return next(
        (rate / 100 for rate in range(1, 100) if tokens(rate / 100) / seconds > others(rate / 100)), None
    )


def round_seconds(
    executor: GraphExecutor, batch: int, context: int, num_drafts: int, depth: int | None
) -> float:
    """The median seconds of a round."""
    slots = ManualDriver(executor, prefill_token_budget=BUDGET)
    most = context + 2 + (NUM_WARM_UP + NUM_ROUNDS) * (max(TRACE) + 1) + MAX_PATH_LENGTH
    slots.fill(context, [most] * batch)
    for _ in range(NUM_WARM_UP):
        slots.round(num_drafts, max_depth=depth)
    return statistics.median(slots.round(num_drafts, max_depth=depth).duration_s for _ in range(NUM_ROUNDS))


def measure(
    model: Model, nodes: Sequence[int], batches: Sequence[int], context: int, device: str
) -> Iterator[TreeRun]:
    """Runs of plain decoding, chains, static and dynamic trees, each kind on an executor of its own."""
    target = Decoder.random(model.config, device=device, dtype=torch.bfloat16)
    draft = DraftDecoder.load_random(prepare_draft(model).path, target)
    static = StaticTree(best_tree(max(nodes) - 1))
    dynamic = DynamicTree(top_k=8, depth=MAX_DEPTH, num_draft_tokens=max(nodes) - 1)
    drafts = [number - 1 for number in nodes]
    chains = [number for number in drafts if number <= MAX_PATH_LENGTH]
    plain: dict[int, float] = {}
    best: dict[tuple[int, int], float] = {}  # tokens a second of chains, by batch and percent
    kinds: list[tuple[str | None, Sequence[int], int | None, DrafterFactory]] = [
        ("plain", [0], None, NO_DRAFTER),
        (None, chains, None, EagleDrafterFactory(draft, chains)),
        ("static", drafts, static.depth, EagleDrafterFactory(draft, drafts, tree=static)),
        ("dynamic", drafts, dynamic.depth, EagleDrafterFactory(draft, drafts, tree=dynamic)),
    ]
    for kind, numbers, depth, factory in kinds:
        executor = open_executor(target, factory, max(batches), context, device)
        for batch in batches:
            for number in (each for each in numbers if each <= max_batch_drafts(batch) or not depth):
                seconds = round_seconds(executor, batch, context, number, depth)
                paths = best_tree(number) if depth else tuple((0,) * n for n in range(1, number + 1))

                def tokens(rate: float, paths: Paths = paths) -> float:
                    return tokens_of_tree(paths, rate)

                def others(rate: float, batch: int = batch, depth: int | None = depth) -> float:
                    of_chains = best.get((batch, round(rate * 100)), 0.0) if depth else 0.0
                    return max(1 / plain[batch], of_chains)

                if kind == "plain":
                    plain[batch] = seconds
                rate = break_even(tokens, seconds, others) if number else None
                if kind is None:
                    for percent in range(1, 100):
                        key = batch, percent
                        best[key] = max(best.get(key, 0.0), tokens(percent / 100) / seconds)
                yield TreeRun(
                    engine="drift",
                    model=model.name,
                    dtype="bfloat16",
                    scenario=f"batch{batch}-{context}" if batch > 1 else f"single-{context}",
                    batch=batch,
                    context=context,
                    num_draft_tokens=number,
                    tree=kind if depth else None,
                    acceptance="simulated" if number else "none",
                    ms_per_round=seconds * 1e3,
                    num_nodes=number + 1,
                    break_even_rate=rate,
                    tokens={f"{rate:.1f}": tokens(rate) for rate in RATES},
                )
        executor.close()
        free_memory()


def open_executor(
    target: Decoder, factory: DrafterFactory, max_num_seqs: int, context: int, device: str
) -> GraphExecutor:
    """An executor with simulated acceptance, and blocks for `max_num_seqs` sequences."""
    length = context + 1024
    limits = ExecutorLimits(
        max_num_seqs=max_num_seqs,
        max_model_len=length,
        num_blocks=max_num_seqs * (length // BLOCK_SIZE + 1),
        block_size=BLOCK_SIZE,
        vocab_size=target.config.vocab_size,
    )
    table = table_for(gpu_key(torch.cuda.get_device_name(device)))
    options = GraphOptions(prefill_token_budget=BUDGET, acceptance_trace=TRACE)
    return GraphExecutor(GpuDevice(0), target, limits, table, options, drafter_factory=factory)


def table_rows(runs: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """A row of the table for each run."""
    return [
        (
            run["scenario"],
            run["tree"] or ("chain" if run["num_draft_tokens"] else "plain"),
            str(run["num_nodes"]),
            f"{run['ms_per_round']:.3f}",
            *(
                f"{tokens:.2f} ({tokens / run['ms_per_round'] * 1e3:.0f})"
                for tokens in run["tokens"].values()
            ),
            "" if run["break_even_rate"] is None else f"{run['break_even_rate']:.2f}",
        )
        for run in runs
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    made = parser(__doc__)
    made.add_argument("--nodes", type=int, nargs="+", default=NODES, help="verified tokens of a sequence")
    made.add_argument("--batch", type=int, nargs="+", default=[1, 4])
    made.add_argument("--context", type=int, default=512)
    given = made.parse_args(arguments)
    if not given.device.startswith("cuda"):
        made.error(f"device={given.device!r}: rounds are CUDA graphs, expected a GPU")

    if not 3 <= min(given.nodes) <= max(given.nodes) <= 64:
        made.error(f"--nodes {given.nodes}: expected 3 to 64")

    recording = Recording("trees", given.device, given.out)
    with tempfile.TemporaryDirectory() as folder:
        model = prepare(given.model, Path(folder) / given.model)
        for run in measure(model, sorted(given.nodes), given.batch, given.context, given.device):
            recording.add(run)

    columns = ("scenario", "drafts", "verified", "ms", *(f"tokens (tok/s) at {rate}" for rate in RATES))
    show(f"{recording.results.gpu}", (*columns, "break-even"), table_rows(recording.results.runs))
    print(f"written to {recording.path}")


if __name__ == "__main__":
    main()
