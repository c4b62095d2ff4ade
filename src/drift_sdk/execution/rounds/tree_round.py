"""A decode round of trees on the device: one step, or two between which the host reads the drafted tokens.

Checks of the rounds of graphs, whose findings the host reads with the results.

Chains as trees without branches, for rounds that are checked.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from msgspec import Struct
from torch import Tensor

from drift_sdk._kernels.launch.launch_order import note_library_kernel
from drift_sdk._kernels.slots.slot_columns import SlotState
from drift_sdk._kernels.slots.step_inputs import show_drafts
from drift_sdk._kernels.trees.tree_accept import kv_rewind, tree_record_words
from drift_sdk._kernels.trees.tree_attention import TreePaths
from drift_sdk._kernels.trees.tree_checks import (
    FLAG_BITS,
    NUM_DROPPED,
    REASONS,
    check_acceptance,
    check_cache,
    check_drafts,
    check_hidden,
    check_paths,
    report_flags,
)
from drift_sdk._kernels.trees.tree_rows import LIMIT_WORDS, PATH_ENTRIES, RootTensors, tree_roots, tree_rows
from drift_sdk.execution.device.host_ring import Ring
from drift_sdk.execution.device.memory import Workspace
from drift_sdk.execution.device.slot_table import SlotTable
from drift_sdk.execution.device_resources import DeviceResources
from drift_sdk.execution.forward.caches import PagedKVCache
from drift_sdk.execution.forward.forward_pass import ForwardPass
from drift_sdk.execution.forward.rows import Rows
from drift_sdk.execution.rounds.drafter import RoundDrafter, TreeDrafter, VerifiedRows
from drift_sdk.execution.rounds.round import SampleCommit, TreeAcceptance
from drift_sdk.execution.rounds.tree_plan import TreePlan
from drift_sdk.execution.stages import forward_stage
from drift_sdk.steps import Violation

PLACES = ("node", "node", "block", "node", "node", "depth", "tokens", "node")
"""The meaning of the number beside each of `REASONS`."""


def violation_of(flag: int) -> Violation | None:
    """The violation that a flag stands for; None for 0."""
    if flag == 0:
        return None

    reason = flag % 2**FLAG_BITS - 1
    details = f"{PLACES[reason]} {flag >> FLAG_BITS}"
    return Violation(reason=REASONS[reason], details=details, is_fatal=reason >= NUM_DROPPED)


class TreeChecks:
    """Kernels that check a round of B trees, in the order of its parts.

    flags [B] int32: what they have found.
    """

    def __init__(
        self, workspace: Workspace, table: SlotTable, cache: PagedKVCache, num_trees: int, vocab_size: int
    ) -> None:
        self.flags: torch.Tensor = workspace.take("violations", (num_trees,), torch.int32)
        self._table, self._cache, self._vocab_size = table, cache, vocab_size

    def after_draft(self, rows: RootTensors) -> None:
        """Check drafts and block tables. Drop drafts that are wrong."""
        size = self._cache.block_size
        check_drafts(
            rows,
            self._table.block_table,
            self.flags,
            num_blocks=self._cache.first_tree_slot // size,
            block_size=size,
            vocab_size=self._vocab_size,
        )

    def after_place(self, rows: RootTensors, path: Tensor) -> None:
        """Check what the rows see."""
        check_paths(rows, path, self._table.state.length, self.flags)

    def after_forward(self, rows: RootTensors, hidden: Tensor) -> None:
        """Check hidden states [R, H]."""
        check_hidden(rows, hidden, self.flags)

    def after_commit(self, rows: RootTensors, chosen: Tensor, path: Tensor, emitted: Tensor) -> None:
        """Check acceptance and lengths."""
        state: SlotState = self._table.state
        ends = (state.length, state.last_token, state.finish)
        check_acceptance(rows, chosen, path, emitted, ends, self.flags)

    def after_rewind(self, rows: RootTensors, kv_slot: Tensor, path: Tensor) -> None:
        """Check keys and values, and overwrite those of rejected nodes."""
        cache = self._cache
        for group in cache.groups:
            check_cache(group.keys, group.values, self._table.block_table, rows, kv_slot, path, self.flags)

    def report(self, ring: Ring) -> None:
        """Write what was found behind the results of the round."""
        first_word = tree_record_words(self.flags.shape[0])
        report_flags(self.flags, ring.output, ring.current, first_word=first_word)


class ChainTreeDrafter:
    """A `TreeDrafter` whose trees are the chains of a `RoundDrafter`."""

    first_draft_slot = 0

    def __init__(self, drafter: RoundDrafter, plans: Mapping[int, TreePlan]) -> None:
        self.plans = plans
        self._drafter = drafter

    def grow(self, rows: RootTensors, plan: TreePlan) -> None:
        num_trees, num_nodes = rows.limits.shape[0], plan.num_nodes
        node = torch.arange(num_nodes, dtype=torch.int32, device=rows.slot.device)
        most = torch.minimum(rows.limits[:, :1], rows.limits[:, 1:2])
        columns = [each.view(num_trees, num_nodes) for each in (rows.slot, rows.parent, rows.position)]
        values = (
            rows.root_slot[:, None].where(node <= most, -1),
            node - 1,
            rows.root_position[:, None] + node,
        )
        for column, value in zip(columns, values, strict=True):
            column[:, 1:].copy_(value.expand(num_trees, num_nodes)[:, 1:])
            note_library_kernel(column)
        drafted = Rows(slot=rows.slot, token=rows.token, position=rows.position)
        self._drafter.propose(drafted, num_slots=num_trees, num_draft_tokens=plan.num_drafts)

    def extend(self, rows: RootTensors, plan: TreePlan, verified: VerifiedRows, path: Tensor) -> None:
        self._drafter.draft_extend(verified)


class TreeTensors(Struct, frozen=True):
    """The rows of B trees of T nodes.

    slots [2, B] int32: slots (-1: padding), then the most drafts of each. roots: as they grow.
    kv_slot [B * T] int64, bits [B * T] int64, path [B * T, PATH_ENTRIES] int32: as of `tree_rows`.
    accepted [B, PATH_ENTRIES] int32: as of `tree_accept`.
    """

    slots: Tensor
    roots: RootTensors
    kv_slot: Tensor
    bits: Tensor
    path: Tensor
    accepted: Tensor

    @classmethod
    def take(cls, workspace: Workspace, slots: Tensor, rows: Rows, num_draft_nodes: int) -> TreeTensors:
        """Tensors beside `slots` and the slots, tokens and positions of `rows`, in buffers that all rounds
        share."""
        num_rows, num_trees = rows.slot.shape[0], slots.shape[1]

        def take(name: str, dtype: torch.dtype, *shape: int) -> Tensor:
            return workspace.take(f"tree_{name}", shape, dtype)

        roots = RootTensors(
            slot=rows.slot,
            token=rows.token,
            position=rows.position,
            parent=take("parent", torch.int32, num_rows),
            root_slot=take("root_slot", torch.int32, num_trees),
            root_position=take("root_position", torch.int32, num_trees),
            limits=take("limits", torch.int32, num_trees, LIMIT_WORDS),
            draft_kv_slot=take("draft_kv_slot", torch.int64, num_trees * num_draft_nodes),
        )
        return cls(
            slots=slots,
            roots=roots,
            kv_slot=take("kv_slot", torch.int64, num_rows),
            bits=take("bits", torch.int64, num_rows),
            path=take("path", torch.int32, num_rows, PATH_ENTRIES),
            accepted=take("accepted", torch.int32, num_trees, PATH_ENTRIES),
        )

    @property
    def rows(self) -> Rows:
        """The rows as the forward pass and sampling take them."""
        roots = self.roots
        return Rows(roots.slot, roots.token, roots.position, kv_slot=self.kv_slot, path=self.path)

    @property
    def paths(self) -> TreePaths:
        """The rows' keys as attention takes them."""
        return TreePaths(self.roots.position, self.kv_slot, self.path)

    @property
    def acceptance(self) -> TreeAcceptance:
        return TreeAcceptance(self.roots.parent, self.accepted)


class TreeRound:
    """A round of B trees with K drafts each. Each public method is a step to capture.

    Its payload: slots [B], then the most drafts of each slot [B].
    """

    def __init__(
        self,
        resources: DeviceResources,
        tensors: TreeTensors,
        forward: ForwardPass,
        sample_commit: SampleCommit,
        drafter: TreeDrafter,
        plan: TreePlan,
        checks: TreeChecks | None,
    ) -> None:
        """checks: None: the round is not checked."""
        self._resources, self._tensors, self._forward = resources, tensors, forward
        self._sample_commit, self._drafter, self._plan = sample_commit, drafter, plan
        self._cache, self._checks = forward.cache, checks
        self._slots, self._max_drafts = tensors.slots
        self._block_size = forward.cache.block_size

    def whole(self) -> None:
        """Draft, verify and commit without the host."""
        self._draft()
        self._verify(has_draft_masks=False)

    def draft(self) -> None:
        """The first half of a split round: leaves the drafted tokens in the ring, see `show_drafts`. Those of
        a slot under a constraint are a chain."""
        self._draft()
        ring, rows = self._resources.ring, self._tensors.roots
        show_drafts(rows.slot, rows.token, ring.output, ring.current, ring.next_index)

    def verify(self) -> None:
        """The second half, the next replay after the first. Slots under a constraint have a mask for every
        row."""
        self._resources.payload.enter(0)
        self._verify(has_draft_masks=True)

    def _draft(self) -> None:
        table = self._resources.table
        self._resources.payload.enter(2 * self._slots.shape[0])
        tree_roots(
            self._slots,
            self._max_drafts,
            table.state,
            table.columns.flags,
            table.block_table,
            self._tensors.roots,
            max_depth=self._plan.depth,
            block_size=self._block_size,
            first_draft_slot=self._drafter.first_draft_slot,
        )
        self._drafter.grow(self._tensors.roots, self._plan)
        if self._checks is not None:
            self._checks.after_draft(self._tensors.roots)

    def _verify(self, *, has_draft_masks: bool) -> None:
        tensors, forward, stages = self._tensors, self._forward, self._resources.stages
        roots, sample_commit, plan = tensors.roots, self._sample_commit, self._plan
        checks, hidden = self._checks, forward.hidden_states
        if plan.num_drafts > 0:
            forward.share_drafts(roots.parent)
        with stages(forward_stage(plan.num_drafts)):
            self._place()
            if checks is not None:
                checks.after_place(roots, tensors.path)
            forward.run()
        if checks is not None:
            checks.after_forward(roots, hidden.final)
        sample_commit.run(forward.normed, has_draft_masks=has_draft_masks)
        if checks is not None:
            checks.after_commit(roots, sample_commit.chosen, tensors.accepted, sample_commit.emitted)
        with stages("commit"):
            self._rewind()
        if checks is not None:
            checks.after_rewind(roots, tensors.kv_slot, tensors.accepted)
            checks.report(self._resources.ring)
        with stages("draft_extend"):
            self._drafter.extend(roots, plan, sample_commit.verified(hidden), tensors.accepted)

    def _place(self) -> None:
        """Find positions, places and paths of all nodes."""
        tensors, table = self._tensors, self._resources.table
        roots = tensors.roots
        tree_rows(
            roots.slot,
            roots.parent,
            table.state.length,
            table.block_table,
            (roots.position, tensors.bits, tensors.kv_slot, tensors.path),
            nodes_per_tree=self._plan.num_nodes,
            block_size=self._block_size,
            first_tree_slot=self._cache.first_tree_slot,
        )

    def _rewind(self) -> None:
        """Move keys and values of accepted nodes to their positions."""
        tensors, cache = self._tensors, self._cache
        for group in cache.groups:
            kv_rewind(
                group.keys,
                group.values,
                self._resources.table.block_table,
                tensors.roots.slot,
                tensors.roots.position,
                tensors.kv_slot,
                tensors.accepted,
                nodes_per_tree=self._plan.num_nodes,
            )
