"""Trees of an EAGLE-3 draft, grown within the graphs that verify them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from drift_sdk._kernels.draft.draft_choose import num_draft_chunks
from drift_sdk._kernels.draft.draft_rows import keep_last_rows
from drift_sdk._kernels.trees.tree_attention import TreePaths
from drift_sdk._kernels.trees.tree_growth import (
    CandidateBuffers,
    CandidatePool,
    Frontier,
    StaticTables,
    expand_dynamic,
    grow_static,
    keep_best,
    rank_candidates,
)
from drift_sdk._kernels.trees.tree_rows import PATH_ENTRIES, RootTensors, gather_hidden, path_rows
from drift_sdk.execution.device.slot_table import SlotTable
from drift_sdk.execution.device.workspace import Workspace
from drift_sdk.execution.forward.attention_groups import AttentionGroups
from drift_sdk.execution.forward.draft import Attend
from drift_sdk.execution.forward.row_attention import TreeAttention
from drift_sdk.execution.forward.rows import Rows
from drift_sdk.execution.rounds.drafter import VerifiedRows
from drift_sdk.execution.rounds.eagle import EagleRoundDrafter
from drift_sdk.execution.rounds.tree_plan import TreePlan
from drift_sdk.execution.stages import NO_STAGE_MARKS, StageMarks
from drift_sdk.models.eagle3 import DraftDecoder

__all__ = ["EagleTreeDrafter"]


class EagleTreeDrafter:
    """A `TreeDrafter` that grows the trees that `TreeGrower` does, for slots and rows known only to the
    device.

    The node of depth d combines the draft's output for its parent with its own token. Its keys and values are
    kept only while the tree grows, behind the blocks. Those of accepted tokens are computed again, by
    `extend`, from the target's features.
    """

    def __init__(
        self,
        draft: DraftDecoder,
        chains: EagleRoundDrafter,
        table: SlotTable,
        workspace: Workspace,
        plans: Mapping[int, TreePlan],
        rounds: Sequence[tuple[int, int]],
        *,
        stages: StageMarks = NO_STAGE_MARKS,
    ) -> None:
        """chains: the draft's chains, whose cache and forward pass are shared. plans: by drafts. rounds:
        (slots, drafts) of those that draft trees."""
        device = draft.device
        self.plans = plans
        self._draft, self._chains = draft, chains
        self._block_table, self._columns = table.block_table, table.columns
        self._workspace, self._stages = workspace, stages
        self._target_ids = draft.target_ids.to(torch.int32)
        self._tables = {
            number: _static_tables(plan, device) for number, plan in plans.items() if plan.ranked is not None
        }
        most: dict[int, int] = {}  # trees, by the rows that each of them has at a depth
        for num_trees, number in rounds:
            for width in plans[number].widths if number in plans else ():
                most[width] = max(most.get(width, 0), num_trees)
        self._attention = {
            width: AttentionGroups(
                workspace, device, chains.attention_shape, num_sequences=num_trees, num_rows=width
            )
            for width, num_trees in sorted(most.items(), key=lambda item: -item[0] * item[1])
        }

    @property
    def first_draft_slot(self) -> int:
        return self._chains.kv_cache.first_tree_slot

    def grow(self, rows: RootTensors, plan: TreePlan) -> None:
        num_trees = rows.root_slot.shape[0]
        before = self._take_frontier(num_trees, 0)
        before = Frontier(
            rows.root_slot, before.token, rows.root_position, before.kv_slot, before.source, before.node,
            before.path,
        )  # fmt: skip
        self._chains.load_outputs(Rows(slot=rows.root_slot, token=before.token, position=rows.root_position))
        pool = self._take_pool(num_trees * plan.pool_size)
        first_node, first_candidate = 1, 0
        for depth in range(1, plan.depth + 1):
            candidates = self._rank(before, plan)
            is_last = depth == plan.depth
            width = 0 if is_last else plan.widths[depth - 1]
            after = None if is_last else self._take_frontier(num_trees * width, depth)
            if plan.ranked is not None:
                tables = self._tables[plan.num_drafts]
                grow_static(candidates, tables, rows, before, after, depth=depth, first_node=first_node)
            else:
                expand_dynamic(
                    candidates,
                    pool,
                    rows,
                    before,
                    after,
                    depth=depth,
                    first_candidate=first_candidate,
                    first_node=first_node,
                )
            first_candidate += before.slot.shape[0] // num_trees * plan.num_candidates
            first_node += width
            if after is not None:
                self._compute(after, before, rows, width)
                before = after

        if plan.ranked is None:
            keep_best(pool, rows)

    def extend(self, rows: RootTensors, plan: TreePlan, verified: VerifiedRows, path: Tensor) -> None:
        chains, rows_per_path = self._chains, plan.depth + 1
        num_rows = path.shape[0] * rows_per_path
        draft_rows = chains.take_rows(num_rows)
        source = self._workspace.take("draft_path_source", (num_rows,), torch.int32)
        out = (draft_rows.slot, draft_rows.token, draft_rows.position, source)
        path_rows(rows.slot, rows.position, verified.chosen, path, out, nodes_per_tree=plan.num_nodes)
        needs_final, hidden = self._draft.weights.fc is None, verified.hidden
        gathered = [
            self._gather(f"draft_path_hidden_{index}", source, tensor)
            for index, tensor in enumerate([hidden.final] if needs_final else hidden.aux)
        ]
        features = chains.fuse([] if needs_final else gathered, gathered[0])
        attend = chains.attend_few_rows(draft_rows, rows_per_path)
        chains.forward.run(draft_rows, features, attend, is_fused=True)
        keep_last_rows(draft_rows.slot, chains.forward.output(num_rows), chains.kv_cache.outputs)

    def _rank(self, rows: Frontier, plan: TreePlan) -> CandidateBuffers:
        """The best tokens after rows that the draft has just computed."""
        forward, num_rows = self._chains.forward, rows.slot.shape[0]
        buffers = self._take_candidates(num_rows, plan.num_candidates)
        with self._stages("draft_lm_head"):
            rank_candidates(
                forward.multiply(forward.normed(num_rows), self._draft.weights.head),
                self._target_ids,
                rows.slot,
                rows.position,
                self._columns.temperature,
                self._columns.seed,
                buffers,
            )
        return buffers

    def _compute(self, after: Frontier, before: Frontier, rows: RootTensors, width: int) -> None:
        """Compute a frontier from the outputs of the one before."""
        forward = self._chains.forward
        output = forward.output(before.slot.shape[0])
        features = self._gather("draft_parent_output", after.source, output)
        drafted = Rows(
            slot=after.slot,
            token=after.token,
            position=after.position,
            kv_slot=after.kv_slot,
        )
        paths = TreePaths(rows.root_position, rows.draft_kv_slot, after.path)
        with self._stages("draft_attention"):
            attend = self._attend(drafted, paths, width)
        forward.run(drafted, features, attend, is_fused=False)

    def _attend(self, rows: Rows, paths: TreePaths, width: int) -> Attend:
        """Attention of a frontier's rows, `width` of each tree."""
        attention = TreeAttention(self._attention[width], rows.planned(width), paths)
        attention.plan()
        return attention.attend

    def _gather(self, name: str, source: Tensor, hidden: Tensor) -> Tensor:
        """The rows of hidden [N, H] that source [M] names."""
        out = self._workspace.take(name, (source.shape[0], hidden.shape[1]), hidden.dtype)
        gather_hidden(source, hidden, out)
        return out

    def _take_frontier(self, num_rows: int, depth: int) -> Frontier:
        """Uninitialised rows. Those of the depth before are kept."""

        def take(name: str, dtype: torch.dtype, *more: int) -> Tensor:
            return self._workspace.take(f"frontier_{name}_{depth % 2}", (num_rows, *more), dtype)

        return Frontier(
            slot=take("slot", torch.int32),
            token=take("token", torch.int32),
            position=take("position", torch.int32),
            kv_slot=take("kv_slot", torch.int64),
            source=take("source", torch.int32),
            node=take("node", torch.int32),
            path=take("path", torch.int32, PATH_ENTRIES),
        )

    def _take_pool(self, size: int) -> CandidatePool:
        def take(name: str, dtype: torch.dtype) -> Tensor:
            return self._workspace.take(f"pool_{name}", (size,), dtype)

        return CandidatePool(
            cost=take("cost", torch.float32),
            token=take("token", torch.int32),
            parent=take("parent", torch.int32),
        )

    def _take_candidates(self, num_rows: int, number: int) -> CandidateBuffers:
        num_chunks = num_draft_chunks(self._draft.weights.head.shape[0])

        def take(name: str, dtype: torch.dtype, *shape: int) -> Tensor:
            return self._workspace.take(f"candidate_{name}", (num_rows, *shape), dtype)

        return CandidateBuffers(
            token=take("token", torch.int32, number),
            logprob=take("logprob", torch.float32, number),
            chunk_max=take("chunk_max", torch.float32, num_chunks),
            chunk_sum=take("chunk_sum", torch.float32, num_chunks),
            chunk_value=take("chunk_value", torch.float32, num_chunks, number),
            chunk_token=take("chunk_token", torch.int32, num_chunks, number),
        )


def _static_tables(plan: TreePlan, device: torch.device) -> StaticTables:
    """The tables of a static tree."""
    assert plan.ranked is not None
    tree, ranks = plan.ranked.tree.prefix(plan.num_nodes), plan.ranked.ranks[: plan.num_nodes]
    frontiers = [[0], *(plan.frontier(depth) for depth in range(1, plan.depth))]
    sources = [0] + [
        frontiers[tree.depths[node] - 1].index(tree.parents[node]) for node in range(1, plan.num_nodes)
    ]

    def tensor(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    return StaticTables(
        depth=tensor(tree.depths),
        parent=tensor(tree.parents),
        rank=tensor(ranks),
        source=tensor(sources),
        frontier=tuple(tensor(nodes) for nodes in frontiers[1:]),
    )
