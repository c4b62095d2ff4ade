"""Trees of drafts on the graph executor do not change a bit of the output, whatever is drafted."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from msgspec.structs import replace
from random_folder import make_random_draft_folder, make_random_folder

from drift_sdk import (
    Chain,
    Completion,
    DynamicTree,
    Engine,
    EngineConfig,
    EngineStats,
    ExecutorError,
    JsonSchema,
    SamplingParams,
    Speculation,
    StaticTree,
)
from drift_sdk._kernels.commit import CommitTensors
from drift_sdk._kernels.trees.tree_rows import RootTensors
from drift_sdk.execution.drafter_factory import EagleDrafterFactory
from drift_sdk.execution.graph.graph_executor import GraphExecutor
from drift_sdk.execution.rounds import round as round_module
from drift_sdk.execution.rounds.drafters import TreeDrafter
from drift_sdk.execution.rounds.round import TreeSteps
from drift_sdk.speculation import TreePlan
from drift_sdk.steps import StepPlan
from drift_sdk.trees import rank_tree

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.xdist_group("trees"),  # tests of a group do not run together
]

MAX_SEQS, MAX_MODEL_LEN, VOCAB_SIZE = 16, 2304, 32_000
BATCHES = {1: 2000, 4: 300, 16: 100}
"""Number of requests that run together, and tokens of each."""
STATIC = StaticTree([[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 1, 0]])
DYNAMIC = DynamicTree(top_k=4, depth=4, num_draft_tokens=15)

Case = tuple[list[int], SamplingParams]


class TreeOracle:
    """Drafts static trees with the tokens of plain decoding on a path that depends on slot and position, and
    ends with the probability `corruption` at each depth. Other tokens are wrong. Also a RoundDrafter.

    stories [MAX_SEQS, MAX_MODEL_LEN] int64: the tokens of each slot's sequence.
    """

    aux_layers: Sequence[int] = ()
    kv_cache = None
    is_ngram = None
    first_draft_slot = 0

    def __init__(self) -> None:
        self.stories = torch.zeros(MAX_SEQS, MAX_MODEL_LEN, dtype=torch.int64, device="cuda")
        self.corruption = torch.zeros((), device="cuda")
        self.known: dict[int, torch.Tensor] = {}
        self.plans: dict[int, TreePlan] = {}
        self._tables: dict[int, list[torch.Tensor]] = {}

    def right(self, slot: torch.Tensor, position: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The tokens at positions, and whether the drafts for them are all wrong."""
        token = self.stories[slot.clamp(min=0), position.clamp(max=MAX_MODEL_LEN - 1)]
        return token, (position * 7919 + slot * 104_729) % 1009 < self.corruption * 1009

    def propose(self, rows: Any, *, num_slots: int, num_draft_tokens: int) -> None:
        if num_draft_tokens:
            slot, position = (each.view(num_slots, -1)[:, 1:].long() for each in (rows.slot, rows.position))
            token, is_wrong = self.right(slot, position)
            rows.token.view(num_slots, -1)[:, 1:].copy_((token + is_wrong) % VOCAB_SIZE)

    def draft_extend(self, verified: Any) -> None:
        pass

    def draft_extend_prefill(self, chunks: Any) -> None:
        pass

    def grow(self, rows: RootTensors, plan: TreePlan) -> None:
        depth, parent, child, num_siblings = self.tables_of(plan)
        num_nodes = plan.num_nodes
        slots = rows.root_slot[:, None].long()
        most, deepest, is_chain = (rows.limits[:, index, None] for index in range(3))
        node = torch.arange(num_nodes, device="cuda")
        depth = torch.where(is_chain > 0, node, depth)
        position = rows.root_position[:, None] + depth
        token, is_wrong = self.right(slots, position)
        wanted = (position * 31 + slots * 17) % num_siblings
        is_right = (is_chain > 0) | (child == wanted)
        token = torch.where(is_right & ~is_wrong, token, (token + 1 + child) % VOCAB_SIZE)
        is_kept = (slots >= 0) & (node > 0) & (node <= most) & (depth <= deepest)
        views = [each.view(-1, num_nodes) for each in (rows.slot, rows.token, rows.parent)]
        parent = torch.where(is_chain > 0, node - 1, parent)
        for view, value in zip(views, (slots, token, parent), strict=True):
            view.copy_(torch.where(is_kept, value.to(torch.int32), view))

    def tables_of(self, plan: TreePlan) -> list[torch.Tensor]:
        """Of each node: its depth, its parent, which child it is and of how many."""
        if plan.num_drafts not in self._tables:
            assert plan.ranked is not None
            tree = plan.ranked.tree.prefix(plan.num_nodes)
            children = [list(tree.children(parent)) for parent in range(plan.num_nodes)]
            own = [[0], *(children[tree.parents[node]] for node in range(1, plan.num_nodes))]
            columns = (
                tree.depths,
                tree.parents,
                [each.index(node) for node, each in enumerate(own)],
                [len(each) for each in own],
            )
            self._tables[plan.num_drafts] = [torch.tensor(column, device="cuda") for column in columns]
        return self._tables[plan.num_drafts]

    def extend(self, rows: RootTensors, plan: TreePlan, verified: Any, path: Any) -> None:
        pass

    def learn(self, cases: Sequence[Case], completions: Sequence[Completion]) -> None:
        for (prompt, params), completion in zip(cases, completions, strict=True):
            assert params.seed is not None
            self.known[params.seed] = torch.tensor([*prompt, *completion.token_ids], device="cuda")
        torch.cuda.synchronize()

    def watch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Become the drafter of all engines; recognise the sequence that enters a slot by its seed."""
        launch: Callable[[GraphExecutor, StepPlan], None] = GraphExecutor.launch

        def watched(executor: GraphExecutor, plan: StepPlan) -> None:
            with executor._device.work():
                for assignment in plan.assignments:
                    story = self.known[assignment.sampling.seed]
                    self.stories[assignment.slot, : len(story)].copy_(story)
            launch(executor, plan)

        def tree_drafter(factory: EagleDrafterFactory, *_: object) -> TreeOracle:
            self.plans = factory.tree_plans
            for plan in self.plans.values():
                self.tables_of(plan)
            return self

        monkeypatch.setattr(GraphExecutor, "launch", watched)
        monkeypatch.setattr(EagleDrafterFactory, "round_drafter", lambda *_: self)
        monkeypatch.setattr(EagleDrafterFactory, "tree_drafter", tree_drafter)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target and a draft."""
    folder = tmp_path_factory.mktemp("trees")
    target = make_random_folder(folder / "target", "llama", vocab_size=VOCAB_SIZE)
    return target, make_random_draft_folder(folder / "draft", target)


def engine_of(folders: tuple[Path, Path], shape: Any, *, checks: bool = False, **fields: Any) -> Engine:
    speculation = None
    if shape is not None:
        speculation = Speculation(draft=folders[1], shape=shape, adaptive=False, checks=checks)
    sizes = {"max_num_seqs": MAX_SEQS, "max_model_len": MAX_MODEL_LEN, "kv_cache_tokens": 8192}
    config = EngineConfig(
        device="cuda",
        executor="graph",
        load="random",
        speculation=speculation,
        **{**sizes, **fields},
    )
    return Engine(folders[0], config)


def cases_of(batch: int) -> list[Case]:
    rng = random.Random(batch)
    ways: list[dict[str, Any]] = [
        {},
        {"temperature": 0.8, "top_p": 0.9},
        {"repetition_penalty": 1.2, "frequency_penalty": 0.3},
        {"temperature": 1.0, "top_k": 50, "logprobs": 2},
        {"temperature": 1.0, "stop_token_ids": tuple(range(0, VOCAB_SIZE, 500))},
    ]
    return [
        (
            [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.choice((1, 30, 64, 129)))],
            SamplingParams(
                max_tokens=BATCHES[batch],
                ignore_eos=True,
                seed=rng.randrange(2**62),
                **ways[(index + batch // 4) % len(ways)],
            ),
        )
        for index in range(batch)
    ]


async def at_once(engine: Engine, cases: Sequence[Case]) -> list[Completion]:
    streams = [engine.generate(*case) for case in cases]
    return [await stream for stream in streams]


def assert_same(found: Sequence[Completion], expected: Sequence[Completion]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.token_ids == other.token_ids
        assert one.logprobs == other.logprobs
        assert (one.text, one.finish_reason) == (other.text, other.finish_reason)


@pytest.fixture(scope="module")
def plain(folders: tuple[Path, Path]) -> dict[int, list[Completion]]:
    async def main() -> dict[int, list[Completion]]:
        async with engine_of(folders, None) as engine:
            return {batch: await at_once(engine, cases_of(batch)) for batch in BATCHES}

    return anyio.run(main)


def oracle_of(plain: dict[int, list[Completion]], monkeypatch: pytest.MonkeyPatch) -> TreeOracle:
    oracle = TreeOracle()
    oracle.watch(monkeypatch)
    for batch, completions in plain.items():
        oracle.learn(cases_of(batch), completions)
    return oracle


def test_oracle_trees_do_not_change_the_output(
    folders: tuple[Path, Path], plain: dict[int, list[Completion]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16, greedy and sampled, with stops and penalties, and with so many wrong drafts that every
    acceptance length occurs."""
    oracle = oracle_of(plain, monkeypatch)

    async def main() -> EngineStats:
        async with engine_of(folders, STATIC) as engine:
            for corruption in (0.0, 0.2, 0.5):
                oracle.corruption.fill_(corruption)
                for batch, completions in plain.items():
                    assert_same(await at_once(engine, cases_of(batch)), completions)
            return engine.stats()

    stats = anyio.run(main)
    histogram = stats.speculation.acceptance_histogram
    assert all(histogram[: STATIC.depth + 1]) and not any(histogram[STATIC.depth + 1 :])
    assert stats.speculation.acceptance_length > 1.5
    assert stats.num_host_waits == stats.num_host_copies == stats.num_split_rounds == 0


def test_preemption_and_small_blocks_do_not_change_the_output(
    folders: tuple[Path, Path], plain: dict[int, list[Completion]], monkeypatch: pytest.MonkeyPatch
) -> None:
    oracle = oracle_of(plain, monkeypatch)
    oracle.corruption.fill_(0.2)

    async def main() -> int:
        fields = {"kv_cache_tokens": 1024, "max_model_len": 512, "block_size": 16}
        async with engine_of(folders, STATIC, **fields) as engine:
            assert_same(await at_once(engine, cases_of(16)), plain[16])
            return engine.stats().num_preemptions

    assert anyio.run(main) > 0


@pytest.mark.parametrize("shape", [STATIC, DYNAMIC], ids=["static", "dynamic"])
def test_trees_of_a_draft_do_not_change_the_output(
    folders: tuple[Path, Path], plain: dict[int, list[Completion]], shape: Any
) -> None:
    """Requests are admitted and cancelled while others decode."""

    async def main() -> EngineStats:
        async with engine_of(folders, shape) as engine:
            for batch in (4, 16):
                streams = [engine.generate(*case) for case in cases_of(batch)]
                others = [engine.generate([5, 6, 7 + n], SamplingParams(max_tokens=400)) for n in range(3)]
                async with others[0] as stream:
                    async for _ in stream:
                        break
                assert_same([await stream for stream in streams], plain[batch])
                for other in others[1:]:
                    other.cancel()
            return engine.stats()

    stats = anyio.run(main)
    assert stats.num_draft_rounds > 100
    assert stats.num_drafted_tokens > 5 * stats.num_draft_rounds


def test_trees_with_grammars_and_caps_do_not_change_the_output(folders: tuple[Path, Path]) -> None:
    pytest.importorskip("llguidance")
    cases: list[Case] = [
        ([9], SamplingParams(max_tokens=40, grammar=JsonSchema({"type": "boolean"}), seed=4)),
        ([5, 6, 7], SamplingParams(max_tokens=60, seed=1, num_draft_tokens=4)),
        ([5, 6], SamplingParams(max_tokens=60, temperature=1.0, seed=2, stop=("a", "e"))),
        ([5, 6, 8], SamplingParams(max_tokens=60, seed=3, num_draft_tokens=0)),
    ]

    async def main(shape: Any) -> list[Completion]:
        async with engine_of(folders, shape) as engine:
            return await at_once(engine, cases)

    expected = anyio.run(main, None)
    for shape in (STATIC, DYNAMIC):
        found = anyio.run(main, shape)
        assert_same(found, expected)
        capped = found[1].speculation
        assert capped is not None and 0 < capped.num_drafted <= 4 * capped.num_rounds


def test_tree_without_branches_runs_as_the_chain(folders: tuple[Path, Path]) -> None:
    shapes = [
        Chain(3),
        StaticTree([[0], [0, 0], [0, 0, 0]]),
        DynamicTree(top_k=1, depth=3, num_draft_tokens=3),
    ]

    async def main(shape: Any) -> list[Completion]:
        async with engine_of(folders, shape) as engine:
            return await at_once(engine, cases_of(4))

    chain, *others = [anyio.run(main, shape) for shape in shapes]
    for found in others:
        assert_same(found, chain)
        assert [each.speculation for each in found] == [each.speculation for each in chain]


place, rewind = TreeSteps._place, TreeSteps._rewind


def mask_one_off(tree_steps: Any) -> None:
    """Fault: each node sees the ancestors of the node before it."""
    place(tree_steps)
    tree_steps._tensors.path[1:].copy_(tree_steps._tensors.path[:-1].clone())


def wrong_ancestor(tree_steps: Any) -> None:
    """Fault: nodes of depth 2 or more see the sibling after their parent."""
    place(tree_steps)
    path = tree_steps._tensors.path
    path[:, 1].copy_(torch.where(path[:, 2] >= 0, path[:, 1] % 3 + 1, path[:, 1]))


def rewind_one_short(tree_steps: Any) -> None:
    """Fault: the last accepted row is not moved."""
    accepted = tree_steps._tensors.accepted
    kept = accepted.clone()
    accepted[:, :-1].copy_(torch.where(accepted[:, 1:] < 0, -1, accepted[:, :-1]))
    rewind(tree_steps)
    accepted.copy_(kept)


def accept_next_sibling(tensors: CommitTensors, row_parent: torch.Tensor, path: torch.Tensor) -> None:
    """Fault: drafts are compared with the tokens of the nodes before them."""
    shifted = tensors.row_token.view(-1, tensors.rows_per_slot).roll(1, 1).flatten().contiguous()
    tree_accept(replace(tensors, row_token=shifted), row_parent, path)


tree_accept = round_module.tree_accept
FAULTS = {
    "mask": (TreeSteps, "_place", mask_one_off, "mask"),
    "ancestor": (TreeSteps, "_place", wrong_ancestor, "mask"),
    "rewind": (TreeSteps, "_rewind", rewind_one_short, "kv"),
    "sibling": (round_module, "tree_accept", accept_next_sibling, "acceptance"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_changes_the_output_and_is_found_by_the_checks(
    folders: tuple[Path, Path],
    plain: dict[int, list[Completion]],
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
) -> None:
    oracle = oracle_of(plain, monkeypatch)
    owner, name, function, reason = FAULTS[fault]
    monkeypatch.setattr(owner, name, function)
    oracle.corruption.fill_(0.2)
    cases = cases_of(4)

    async def main(checks: bool) -> tuple[list[Any], EngineStats]:
        async with engine_of(folders, STATIC, checks=checks, max_num_seqs=4) as engine:
            results: list[Any] = []
            for stream in [engine.generate(*case) for case in cases]:
                try:
                    results.append(await stream)
                except ExecutorError as error:
                    results.append(error)
            return results, engine.stats()

    found, _ = anyio.run(main, False)
    assert [each.token_ids for each in found] != [each.token_ids for each in plain[4]]
    checked, stats = anyio.run(main, True)
    assert dict(stats.violations)[reason] > 0
    for one, other in zip(checked, plain[4], strict=True):
        assert isinstance(one, ExecutorError) or one.token_ids == other.token_ids


def test_checks_find_nothing_in_rounds_without_faults(
    folders: tuple[Path, Path], plain: dict[int, list[Completion]]
) -> None:
    async def main(shape: Any) -> EngineStats:
        async with engine_of(folders, shape, checks=True) as engine:
            assert_same(await at_once(engine, cases_of(4)), plain[4])
            return engine.stats()

    for shape in (STATIC, Chain(3)):
        stats = anyio.run(main, shape)
        assert stats.violations == () and stats.num_draft_rounds > 50


def test_oracle_is_a_tree_drafter() -> None:
    drafter: TreeDrafter = TreeOracle()
    assert rank_tree(STATIC.paths).tree.num_drafts == STATIC.num_draft_tokens
    assert drafter.first_draft_slot == 0
