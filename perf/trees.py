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
import itertools
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from drift_sdk import DynamicTree, StaticTree
from drift_sdk._kernels.gemm.tuning import gpu_key, table_for
from drift_sdk.execution.device.device import GpuDevice
from drift_sdk.execution.drafter_factory import NO_DRAFTER, DrafterFactory, EagleDrafterFactory
from drift_sdk.execution.graph.gpu_graphs import GraphOptions
from drift_sdk.execution.graph.graph_executor import GraphExecutor
from drift_sdk.models.decoder import Decoder
from drift_sdk.models.draft_head import DraftDecoder
from drift_sdk.steps import ExecutorLimits
from drift_sdk.trees import MAX_PATH_LENGTH, max_batch_drafts, rank_tree
from perf.harness.manual_driver import ManualDriver
from perf.harness.numbers import at_least
from perf.harness.record import Run
from perf.harness.recording import Recording, free_memory, parser
from perf.harness.shapes import Model, prepare, prepare_draft
from perf.harness.simulation import acceptance_of
from perf.harness.table import show

__all__ = ["TreeRun", "best_tree", "break_even", "chain_paths", "first_paths", "main", "tokens_of_tree"]

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
    """Rounds of a shape with `num_draft_tokens` drafts. `tree` is "static", "dynamic", or None for a chain.

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


def first_paths(shape: StaticTree, num_drafts: int) -> Paths:
    """The paths of the first nodes of a tree, which a round with fewer drafts has."""
    ranked = rank_tree(shape.paths)
    return tuple(
        tuple(ranked.ranks[each] for each in ranked.tree.path(node)[1:]) for node in range(1, num_drafts + 1)
    )


def chain_paths(num_drafts: int) -> Paths:
    """The paths of a chain."""
    return tuple((0,) * length for length in range(1, num_drafts + 1))


def tokens_of_tree(paths: Paths, rate: float) -> float:
    """Tokens that a round with a tree emits on average."""
    total = 1.0
    for path in paths:
        probability = 1.0
        for rank in path:
            probability *= rate * (1 - rate) ** rank
        total += probability
    return total


def break_even(
    tokens: Callable[[float], float], seconds: float, others: Callable[[float], float]
) -> float | None:
    """The least rate at which rounds of `seconds` emit more tokens a second than others(rate)."""
    return next(
        (rate / 100 for rate in range(1, 100) if tokens(rate / 100) / seconds > others(rate / 100)), None
    )


class Kind(NamedTuple):
    """Rounds of one shape. tree: as of `TreeRun`, or "plain". numbers: of drafts. depth: most drafts on a
    path; None: the drafts are chains. paths: of a tree or chain of so many drafts."""

    tree: str | None
    numbers: Sequence[int]
    depth: int | None
    factory: DrafterFactory
    paths: Callable[[int], Paths]


def round_seconds(
    executor: GraphExecutor, depth: int | None, batch: int, context: int, num_drafts: int
) -> float:
    """The median seconds of a round."""
    most = context + 2 + (NUM_WARM_UP + NUM_ROUNDS) * (max(TRACE) + 1) + MAX_PATH_LENGTH
    driver = ManualDriver(executor, prefill_token_budget=BUDGET)
    driver.fill(context, [most] * batch)
    rounds = [driver.round(num_drafts, max_depth=depth) for _ in range(NUM_WARM_UP + NUM_ROUNDS)]
    return statistics.median(each.duration_s for each in rounds[NUM_WARM_UP:])


def kinds_of(draft: DraftDecoder, nodes: Sequence[int]) -> list[Kind]:
    """Plain decoding, chains, static and dynamic trees."""
    drafts = [number - 1 for number in nodes]
    chains = [number for number in drafts if number <= MAX_PATH_LENGTH]
    static = StaticTree(best_tree(max(drafts)))
    dynamic = DynamicTree(top_k=8, depth=MAX_DEPTH, num_draft_tokens=max(drafts))
    factory_of_static = EagleDrafterFactory(draft, drafts, tree=static)
    return [
        Kind("plain", [0], None, NO_DRAFTER, chain_paths),
        Kind(None, chains, None, EagleDrafterFactory(draft, chains), chain_paths),
        Kind("static", drafts, static.depth, factory_of_static, partial(first_paths, static)),
        Kind("dynamic", drafts, dynamic.depth, EagleDrafterFactory(draft, drafts, tree=dynamic), best_tree),
    ]


def measure(
    model: Model, nodes: Sequence[int], batches: Sequence[int], context: int, device: str
) -> Iterator[TreeRun]:
    """Runs of all kinds, each on an executor of its own."""
    target = Decoder.random(model.spec, device=device, dtype=torch.bfloat16)
    draft = DraftDecoder.load_random(prepare_draft(model).path, target)
    comparison = Comparison()
    for kind in kinds_of(draft, nodes):
        executor = open_executor(target, kind.factory, max(batches), context, device)
        for batch, number in itertools.product(batches, kind.numbers):
            if kind.depth is not None and number > max_batch_drafts(batch):
                continue

            seconds = round_seconds(executor, kind.depth, batch, context, number)
            yield comparison.run(model.name, kind, batch, context, number, seconds)
        executor.close()
        free_memory()


class Comparison:
    """Rounds compared with those without drafts, and trees also with the best chain. Plain rounds come
    first, then chains, then trees."""

    def __init__(self) -> None:
        self._plain: dict[int, float] = {}  # seconds by batch
        self._chains: dict[tuple[int, int], float] = {}  # tokens a second of the best, by batch and percent

    def run(
        self, model: str, kind: Kind, batch: int, context: int, num_drafts: int, seconds: float
    ) -> TreeRun:
        """The run of rounds that take so many seconds."""
        paths = kind.paths(num_drafts)

        def tokens(rate: float) -> float:
            return tokens_of_tree(paths, rate)

        def others(rate: float) -> float:
            of_chains = self._chains.get((batch, round(rate * 100)), 0.0) if kind.depth is not None else 0.0
            return max(1 / self._plain[batch], of_chains)

        if kind.tree == "plain":
            self._plain[batch] = seconds
        elif kind.tree is None:
            for percent in range(1, 100):
                key = batch, percent
                self._chains[key] = max(self._chains.get(key, 0.0), tokens(percent / 100) / seconds)
        return TreeRun(
            engine="drift",
            model=model,
            dtype="bfloat16",
            scenario=f"batch{batch}-{context}" if batch > 1 else f"single-{context}",
            batch=batch,
            context=context,
            num_draft_tokens=num_drafts,
            tree=None if kind.tree == "plain" else kind.tree,
            acceptance="simulated" if num_drafts else "none",
            acceptance_length=statistics.mean(TRACE) if num_drafts else None,
            ms_per_round=seconds * 1e3,
            num_nodes=num_drafts + 1,
            break_even_rate=break_even(tokens, seconds, others) if num_drafts else None,
            tokens={f"{rate:.1f}": tokens(rate) for rate in RATES},
        )


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
        vocab_size=target.spec.vocab_size,
    )
    table = table_for(gpu_key(torch.cuda.get_device_name(device)))
    options = GraphOptions(prefill_token_budget=BUDGET, acceptance=acceptance_of(TRACE))
    return GraphExecutor(GpuDevice(0), target, limits, table, options, drafter_factory=factory)


def table_rows(runs: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """A row of the table for each run."""
    return [
        (
            run["scenario"],
            (run["tree"] or "chain") if run["num_draft_tokens"] else "plain",
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
    made.add_argument(
        "--nodes", type=at_least(1), nargs="+", default=NODES, help="verified tokens of a sequence"
    )
    made.add_argument("--batch", type=at_least(1), nargs="+", default=[1, 4])
    made.add_argument("--context", type=at_least(1), default=512)
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
