"""Kernels that grow trees: roots, candidates, static and dynamic growth, accepted rows, simulated choices."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from msgspec import structs
from references.simulated import simulate_choices_reference
from references.trees import (
    expand_dynamic_reference,
    gather_hidden_reference,
    grow_static_reference,
    keep_best_reference,
    path_rows_reference,
    rank_candidates_reference,
    tree_roots_reference,
)

from drift_sdk._kernels.draft.draft_choose import num_draft_chunks
from drift_sdk._kernels.slots import SlotFlag, SlotState
from drift_sdk._kernels.trees.tree_growth import (
    CandidateBuffers,
    CandidatePool,
    Frontier,
    expand_dynamic,
    grow_static,
    keep_best,
    rank_candidates,
)
from drift_sdk._kernels.trees.tree_rows import (
    LIMIT_WORDS,
    PATH_ENTRIES,
    RootTensors,
    gather_hidden,
    path_rows,
    tree_roots,
)
from drift_sdk.execution.rounds.eagle import _static_tables
from drift_sdk.speculation import DynamicTree, StaticTree, TreePlan, tree_plan
from drift_sdk.trees import DraftLimit, DynamicGrowth, StaticGrowth, TreeGrowth, rank_tree
from perf.harness.simulated_acceptance import SimulatedRounds, simulate_choices

pytestmark = pytest.mark.kernel

POISON = 2**30
STATIC = StaticTree(
    [[0], [1], [2], [0, 0], [0, 1], [2, 0], [0, 0, 0], [0, 1, 0], [0, 1, 0, 1]][:8] + [[0, 1, 0, 0]]
)
DYNAMIC = DynamicTree(top_k=3, depth=4, num_draft_tokens=9)
NUM_TREES = 5
LIMITS = [(9, 4, False), (4, 4, False), (9, 2, False), (3, 4, True), (9, 4, False)]
"""Most drafts, most depth and whether it is a chain, of each tree; the last one has no root."""


def full(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.full(shape, POISON, dtype=dtype)


def moved(struct: Any, device: str) -> Any:
    return structs.replace(
        struct,
        **{
            name: getattr(struct, name).to(device)
            for name in struct.__struct_fields__
            if isinstance(getattr(struct, name), torch.Tensor)
        },
    )


def frontier_of(num_rows: int, device: str) -> Frontier:
    columns = {name: full(torch.int32, num_rows) for name in ("token", "position", "source", "node")}
    kv_slot, path = full(torch.int64, num_rows), full(torch.int32, num_rows, PATH_ENTRIES)
    slot = torch.full((num_rows,), -1, dtype=torch.int32)
    return moved(Frontier(slot=slot, kv_slot=kv_slot, path=path, **columns), device)


class Growth:
    """Trees that grow by random candidates, by kernels or by references. has_ties: candidates of which many
    are equally likely, and some certain."""

    def __init__(self, plan: TreePlan, device: str, seed: int, *, has_ties: bool) -> None:
        generator = torch.Generator().manual_seed(seed)
        num_rows = NUM_TREES * plan.num_nodes
        self.plan, self.device = plan, device
        self.candidates: list[CandidateBuffers] = []
        for width in (1, *plan.widths):
            shape = (NUM_TREES * width, plan.num_candidates)
            logprob = -torch.rand(shape, generator=generator)
            if has_ties:
                logprob = (logprob * 3).ceil()
            token = torch.rand(shape[0], 90, generator=generator).argsort(-1)[:, : shape[1]].int()
            logprob = logprob.sort(-1, descending=True).values
            scratch = torch.zeros(1)
            self.candidates.append(
                moved(CandidateBuffers(token, logprob, scratch, scratch, scratch, scratch), device)
            )
        root = torch.arange(NUM_TREES, dtype=torch.int32)
        root[-1] = -1
        slot = torch.full((NUM_TREES, plan.num_nodes), -1, dtype=torch.int32)
        slot[:, 0] = root
        self.rows: RootTensors = moved(
            RootTensors(
                slot=slot.flatten(),
                token=full(torch.int32, num_rows),
                position=torch.arange(num_rows, dtype=torch.int32) + 7,
                parent=full(torch.int32, num_rows),
                root_slot=root,
                root_position=root,
                limits=torch.tensor(LIMITS, dtype=torch.int32),
                draft_kv_slot=torch.arange(NUM_TREES * plan.num_draft_nodes) + 1000,
            ),
            device,
        )
        self.frontiers: list[Frontier] = []

    def run(self, grow: Any, expand: Any, keep: Any) -> None:
        plan = self.plan
        before = frontier_of(NUM_TREES, self.device)
        pool = moved(
            CandidatePool(
                full(torch.float32, NUM_TREES * plan.pool_size),
                full(torch.int32, NUM_TREES * plan.pool_size),
                full(torch.int32, NUM_TREES * plan.pool_size),
            ),
            self.device,
        )
        first_node, first_candidate = 1, 0
        for depth in range(1, plan.depth + 1):
            width = plan.widths[depth - 1] if depth < plan.depth else 0
            after = frontier_of(NUM_TREES * width, self.device) if width else None
            places: dict[str, Any] = {"depth": depth, "first_node": first_node}
            candidates = self.candidates[depth - 1]
            if plan.ranked is not None:
                tables = _static_tables(plan, torch.device(self.device))
                grow(candidates, tables, self.rows, before, after, **places)
            else:
                expand(candidates, pool, self.rows, before, after, first_candidate=first_candidate, **places)
            first_candidate += len(before.slot) // NUM_TREES * plan.num_candidates
            first_node += width
            if after is not None:
                self.frontiers.append(after)
                before = after
        if plan.ranked is None:
            keep(pool, self.rows)

    def tree(self, index: int) -> list[tuple[int, int, int]]:
        """Node, parent and token of the drafts of a tree."""
        rows = self.rows
        return [
            (node, int(rows.parent[row]), int(rows.token[row]))
            for node in range(1, self.plan.num_nodes)
            if int(rows.slot[row := index * self.plan.num_nodes + node]) >= 0
        ]


KERNELS = (grow_static, expand_dynamic, keep_best)
REFERENCES = (grow_static_reference, expand_dynamic_reference, keep_best_reference)


@pytest.mark.parametrize("shape", [STATIC, DYNAMIC], ids=["static", "dynamic"])
def test_growth_equals_the_reference_and_the_eager_growth(shape: Any, device: str) -> None:
    for seed, has_ties in enumerate((False, True)):
        plan = tree_plan(shape, 9)
        assert plan is not None
        found = Growth(plan, device, seed, has_ties=has_ties)
        twin = Growth(plan, "cpu", seed, has_ties=has_ties)
        found.run(*KERNELS)
        twin.run(*REFERENCES)
        for name in ("slot", "token", "parent"):
            assert getattr(found.rows, name).tolist() == getattr(twin.rows, name).tolist(), name
        for one, other in zip(found.frontiers, twin.frontiers, strict=True):
            assert one.slot.tolist() == other.slot.tolist()
            live = (other.slot >= 0).nonzero().flatten()
            assert len(live) > 0
            for name in ("token", "position", "kv_slot", "source", "path"):
                ours = getattr(one, name).cpu()[live].tolist()
                assert ours == getattr(other, name)[live].tolist(), name
        for index, (num_tokens, depth, is_chain) in enumerate(LIMITS[:3]):
            assert not is_chain
            assert found.tree(index) == eager_tree(shape, found, index, DraftLimit(num_tokens, depth, False))
        assert [parent for _, parent, _ in found.tree(3)] == [0, 1, 2]  # the chain
        assert found.tree(4) == []


def eager_tree(shape: Any, grown: Growth, index: int, limit: DraftLimit) -> list[tuple[int, int, int]]:
    """The tree that the eager executor grows from the same candidates. Of a static tree, nodes that are too
    deep are left out here, where their rows have no slot there."""
    growth: TreeGrowth
    if isinstance(shape, StaticTree):
        growth = StaticGrowth(rank_tree(shape.paths), limit)
    else:
        growth = DynamicGrowth(shape.top_k, shape.depth, limit)
    depth = 0
    while growth.num_candidates:
        candidates, num_rows = grown.candidates[depth], max(len(growth.frontier), 1)
        first = index * (len(candidates.token) // NUM_TREES)
        rows = [*range(first, first + num_rows)]
        if isinstance(shape, StaticTree) and depth:
            listed = grown.plan.frontier(depth)
            kept = [place for place, node in enumerate(listed) if 0 <= node <= limit.num_tokens]
            rows = [first + place for place in kept][:num_rows]
        growth.expand(candidates.token[rows].tolist(), candidates.logprob[rows].tolist())
        depth += 1
    tree, tokens, _ = growth.draft()
    numbers = {0: 0}
    if isinstance(shape, StaticTree):
        full_tree = rank_tree(shape.paths).tree
        kept_nodes = [
            node for node, own in enumerate(full_tree.depths[: limit.num_tokens + 1]) if own <= limit.depth
        ]
        numbers = dict(enumerate(kept_nodes))
    return [
        (numbers.get(node, node), numbers.get(tree.parents[node], tree.parents[node]), tokens[node - 1])
        for node in range(1, tree.num_nodes)
    ]


@pytest.mark.parametrize("num_slices", [0, 2])
def test_candidates_equal_the_reference(num_slices: int, device: str) -> None:
    generator = torch.Generator().manual_seed(num_slices)
    num_rows, vocab_size, number = 4, 1100, 5
    target_ids = (torch.arange(vocab_size) * 3 + 1).int()
    shape = (num_slices, num_rows, vocab_size) if num_slices else (num_rows, vocab_size)
    logits = torch.randn(shape, generator=generator) * 2
    slot = torch.tensor([2, 0, -1, 1], dtype=torch.int32)
    position = torch.tensor([5, 900, 0, 31], dtype=torch.int32)
    temperature, seed = torch.tensor([0.0, 0.7, 1.3]), torch.tensor([1, 2**40, 5])
    num_chunks = num_draft_chunks(vocab_size)
    buffers = moved(
        CandidateBuffers(
            full(torch.int32, num_rows, number),
            full(torch.float32, num_rows, number),
            full(torch.float32, num_rows, num_chunks),
            full(torch.float32, num_rows, num_chunks),
            full(torch.float32, num_rows, num_chunks, number),
            full(torch.int32, num_rows, num_chunks, number),
        ),
        device,
    )
    given = (logits, target_ids, slot, position, temperature, seed)
    rank_candidates(*(each.to(device) for each in given), buffers)
    total, own = logits.sum(0) if num_slices else logits, slot.clamp(min=0).long()
    token, logprob = rank_candidates_reference(
        total, target_ids, position, temperature[own], seed[own], number
    )
    live = [0, 1, 3]
    assert buffers.token.cpu()[live].tolist() == token[live].tolist()
    assert torch.allclose(buffers.logprob.cpu()[live], logprob[live], atol=1e-4)
    assert buffers.token[2].tolist() == [POISON] * number


def test_equal_candidates_are_ranked_by_their_ids(device: str) -> None:
    """Ties, signed zeros and -inf, in two chunks, the second one with fewer tokens than candidates."""
    vocab_size, number = 1026, 6
    logits = torch.full((2, vocab_size), -torch.inf)
    logits[0, [1025, 3, 700, 2, 1024]] = torch.tensor([1.0, 1.0, -0.0, 0.0, -2.0])
    logits[1, :] = -3.5
    num_chunks = num_draft_chunks(vocab_size)
    by_chunk = (2, num_chunks, number)
    buffers = moved(
        CandidateBuffers(
            full(torch.int32, 2, number), full(torch.float32, 2, number), full(torch.float32, 2, num_chunks),
            full(torch.float32, 2, num_chunks), full(torch.float32, *by_chunk), full(torch.int32, *by_chunk),
        ),
        device,
    )  # fmt: skip
    slot, ids = torch.zeros(2, dtype=torch.int32), torch.arange(vocab_size, dtype=torch.int32)
    given = (logits, ids, slot, slot, torch.zeros(1), torch.zeros(1, dtype=torch.int64))
    rank_candidates(*(each.to(device) for each in given), buffers)
    assert buffers.token.tolist() == [[3, 1025, 2, 700, 1024, 0], [0, 1, 2, 3, 4, 5]]
    assert buffers.logprob[0, 5] == -torch.inf and buffers.logprob[1].isfinite().all()


def test_roots_equal_the_reference(device: str) -> None:
    slots = torch.tensor([3, -1, 0, 1, 2], dtype=torch.int32)
    state = SlotState(
        length=torch.tensor([9, 20, 5, 33], dtype=torch.int32),
        last_token=torch.tensor([7, 8, 9, 10], dtype=torch.int32),
        finish=torch.tensor([0, 1, 0, 0], dtype=torch.int32),
        max_length=torch.tensor([10, 40, 8, 100], dtype=torch.int32),
    )
    flags = torch.tensor([0, 0, SlotFlag.CONSTRAINT.value, 0], dtype=torch.int32)
    table = torch.randperm(40).view(4, 10).int()

    def out() -> RootTensors:
        columns = {name: full(torch.int32, 5 * 4) for name in ("slot", "token", "position", "parent")}
        small = {name: full(torch.int32, 5) for name in ("root_slot", "root_position")}
        limits = full(torch.int32, 5, LIMIT_WORDS)
        return RootTensors(**columns, **small, limits=limits, draft_kv_slot=full(torch.int64, 5 * 3))

    found, expected = moved(out(), device), out()
    given = (slots, torch.tensor([3, 3, 3, 3, 2], dtype=torch.int32), state, flags, table)
    sizes = {"max_depth": 6, "block_size": 4, "first_draft_slot": 500}
    tree_roots_reference(*given, expected, **sizes)
    on_device = [each.to(device) if isinstance(each, torch.Tensor) else moved(each, device) for each in given]
    tree_roots(*on_device, found, **sizes)
    for name in ("slot", "token", "parent", "root_slot"):
        assert getattr(found, name).tolist() == getattr(expected, name).tolist(), name
    for tree in (0, 2, 4):
        assert found.limits[tree].tolist() == expected.limits[tree].tolist()
        assert (
            int(found.position[tree * 4])
            == int(expected.position[tree * 4])
            == int(found.root_position[tree])
        )
        places = slice(tree * 3, tree * 3 + 3)
        assert found.draft_kv_slot[places].tolist() == expected.draft_kv_slot[places].tolist()
    assert expected.limits[[0, 2, 4]].tolist() == [[3, 6, 0], [0, 0, 0], [2, 2, 1]]


def test_path_rows_and_hidden_states_equal_the_reference(device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    slot = torch.tensor([2, 2, 2, -1, 1, 1, 1, 1, -1, -1, -1, -1], dtype=torch.int32)
    position = torch.randint(0, 50, (12,), generator=generator).int()
    chosen = torch.randint(0, 50, (12,), generator=generator).int()
    path = torch.full((3, PATH_ENTRIES), -1, dtype=torch.int32)
    path[0, :2], path[1, :3] = torch.tensor([0, 2]), torch.tensor([0, 1, 3])
    out = tuple(full(torch.int32, 3 * 4).to(device) for _ in range(4))
    path_rows(*(each.to(device) for each in (slot, position, chosen, path)), out, nodes_per_tree=4)  # type: ignore[arg-type]
    expected = path_rows_reference(slot, position, chosen, path, nodes_per_tree=4)
    for one, other in zip(out, expected, strict=True):
        assert one.tolist() == other.view(3, PATH_ENTRIES)[:, :4].flatten().tolist()
    assert out[3].tolist() == [0, 2, -1, -1, 4, 5, 7, -1, -1, -1, -1, -1]
    hidden = torch.randn(12, 24, generator=generator).to(device)
    found, twin = torch.full((12, 48), torch.nan).to(device), torch.empty(12, 24).to(device)
    gather_hidden(out[3], hidden, found[:, 24:])
    gather_hidden_reference(out[3], hidden, twin)
    assert torch.equal(found[:, 24:], twin) and bool(found[:, :24].isnan().all())


def test_simulated_choices_follow_the_trace(device: str) -> None:
    rng = random.Random(0)
    parents = [-1, 0, 0, 1, 2, 2, 4, 0]
    slot = torch.tensor([1] * 8 + [-1] * 8 + [0] * 6 + [-1] * 2, dtype=torch.int32)
    parent = torch.tensor(parents * 3, dtype=torch.int32)
    token = torch.tensor([*range(8)] * 3, dtype=torch.int32)
    chosen = torch.tensor([rng.randrange(8) for _ in range(24)], dtype=torch.int32)
    rounds = SimulatedRounds(
        trace=torch.tensor([3, 1, 9], dtype=torch.int32), num_rounds=torch.zeros(2, dtype=torch.int32)
    )
    twin = chosen.clone(), copy.deepcopy(rounds)
    found = chosen.to(device), moved(rounds, device)
    rows = [each.to(device) for each in (slot, parent, token)]
    for _ in range(4):
        simulate_choices(*rows, *found, nodes_per_tree=8)
        simulate_choices_reference(slot, parent, token, *twin, nodes_per_tree=8)
        assert found[0].tolist() == twin[0].tolist()
    assert found[1].num_rounds.tolist() == twin[1].num_rounds.tolist() == [4, 4]
