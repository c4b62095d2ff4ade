"""Decode rounds on the device: drafting, the forward pass, sampling, acceptance and commit.

`SampleCommit` is the end of every step: logits from the last layer, a token behind each row, and the commit
of the slots. A round is one step, or two between which the host reads the drafted tokens; a mixed step
computes chunks of prompts and a round in one forward pass; rounds of partial verification read views, or
refresh them. Rounds that are checked have chains as trees without branches; the host reads the findings with
the results.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from msgspec import Struct
from torch import Tensor

from drift_sdk._kernels.commit import CommitTensors, commit
from drift_sdk._kernels.exchange import PeerTensor, gather_logits
from drift_sdk._kernels.launch.launch_order import note_library_kernel
from drift_sdk._kernels.layers.norm import add_norm
from drift_sdk._kernels.sampling.logits import count_tokens
from drift_sdk._kernels.sampling.rows import SampleBuffers
from drift_sdk._kernels.sampling.sample import sample_rows
from drift_sdk._kernels.slots import SlotState, copy_masks, gather_rows, show_drafts
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
from drift_sdk._kernels.trees.tree_rows import (
    LIMIT_WORDS,
    PATH_ENTRIES,
    RootTensors,
    kv_rewind,
    tree_accept,
    tree_record_words,
    tree_roots,
    tree_rows,
)
from drift_sdk._kernels.views import note_round, refresh_rows
from drift_sdk.execution.device.memory import Workspace
from drift_sdk.execution.device.resources import DeviceResources, Ring
from drift_sdk.execution.device.slot_table import SlotTable
from drift_sdk.execution.device.stages import NO_STAGE_MARKS, Acceptance, forward_stage
from drift_sdk.execution.forward.attention import Views
from drift_sdk.execution.forward.caches import ModelResources, PagedKVCache
from drift_sdk.execution.forward.forward_pass import ForwardPass
from drift_sdk.execution.forward.products import multiply_head
from drift_sdk.execution.forward.rows import HiddenStates, Rows
from drift_sdk.execution.rounds.drafters import ComputedChunks, RoundDrafter, TreeDrafter, VerifiedRows
from drift_sdk.speculation import TreePlan
from drift_sdk.steps import Violation


class TreeAcceptance(Struct, frozen=True):
    """Tensors that the acceptance of B trees needs besides their rows. parent [R] int32: of each node, see
    `tree_rows`. path [B, PATH_ENTRIES] int32, written: the nodes that tokens were emitted behind."""

    parent: Tensor
    path: Tensor


class SampleCommit:
    """Chooses a token behind each of R rows and commits it; `rows_per_slot` rows of each of B slots.

    chosen [R] int32: the token behind each row. emitted [B] int32: how many of them each slot got. Both are
    written by `run`.
    """

    def __init__(
        self,
        resources: DeviceResources,
        model: ModelResources,
        rows: Rows,
        buffers: SampleBuffers,
        *,
        rows_per_slot: int,
        acceptance: Acceptance | None,
        tree: TreeAcceptance | None = None,
        is_ngram: Tensor | None = None,
    ) -> None:
        """buffers: for at least as many rows as `rows`. acceptance: of a measurement; None: drafts that
        are equal to the tokens chosen are accepted. tree: of rows that are nodes of trees. is_ngram: see
        `RoundDrafter`."""
        head, workspace = model.decoder.weights.head, resources.workspace
        num_rows, vocab_size = rows.slot.shape[0], model.limits.vocab_size
        self._head, self._rows, self._table, self._ring = head, rows, resources.table, resources.ring
        self._buffers, self._rows_per_slot, self._stages = buffers, rows_per_slot, resources.stages
        self._tree, self._acceptance = tree, acceptance
        self._is_ngram = None if is_ngram is None else is_ngram[: num_rows // rows_per_slot]
        # Which of the two kernels a graph has is decided here, before it is captured.
        self._commit_rows = commit if acceptance is None else acceptance.commit
        self._logits = workspace.take("logits", (2, num_rows, vocab_size), torch.float32)
        self.emitted = workspace.take("emitted", (num_rows // rows_per_slot,), torch.int32)
        self.chosen = buffers.chosen[:num_rows]
        num_words = resources.table.columns.stop_bits.shape[1]
        self._masks = workspace.take("masks", (num_rows, num_words), torch.int32)
        self._tuned, self._logits_cap = model.tuned, model.decoder.spec.logits_cap
        self._part: PeerTensor | None = None
        if model.exchange is not None and head.shape[0] < vocab_size:
            self._part = model.exchange.logits((num_rows, head.shape[0]))

    def verified(self, hidden: HiddenStates) -> VerifiedRows:
        """The rows as a drafter takes them after `run`. hidden: of the rows."""
        return VerifiedRows(rows=self._rows, hidden=hidden, chosen=self.chosen, emitted=self.emitted)

    def run(self, normed: Tensor, *, has_draft_masks: bool = False) -> None:
        """Launch everything from the product with `head` to the commit.

        normed [R, H]: the normalised residual stream after the last layer. Slots under a constraint have one
        mask each in the ring; with has_draft_masks they have one for every row, in the ring's draft masks.
        """
        with self._stages(forward_stage(self._rows_per_slot - 1)):
            self._multiply(normed)
        with self._stages("accept"):
            self._choose(has_draft_masks)
        with self._stages("commit"):
            self._commit()

    def _multiply(self, normed: Tensor) -> None:
        """Fill the logits of rows [R, H]."""
        part = self._part
        logits = self._logits[0] if part is None else part.own
        multiply_head(normed, self._head, logits, self._tuned, self._logits_cap)
        if part is not None:
            gather_logits(part, self._logits[0])

    def _choose(self, has_draft_masks: bool) -> None:
        rows, columns, ring = self._rows, self._table.columns, self._ring
        if has_draft_masks:
            copy_masks(rows.slot, columns.flags, ring.draft_masks, None, self._masks, rows_per_mask=1)
        else:
            # Only the first row of such a slot is in use.
            copy_masks(
                rows.slot,
                columns.flags,
                ring.masks,
                ring.current,
                self._masks,
                rows_per_mask=self._rows_per_slot,
            )
        sample_rows(
            self._logits,
            rows.slot,
            rows.position,
            rows.token,
            columns,
            self._masks,
            self._buffers,
            rows_per_slot=self._rows_per_slot,
            row_path=rows.path,
        )

    def _commit(self) -> None:
        rows, ring, table, tree = self._rows, self._ring, self._table, self._tree
        tensors = CommitTensors(
            row_slot=rows.slot,
            row_token=rows.token,
            buffers=self._buffers,
            state=table.state,
            slots=table.columns,
            emitted=self.emitted,
            output_ring=ring.output,
            current_entry=ring.current,
            next_entry=ring.next_index,
            rows_per_slot=self._rows_per_slot,
            is_ngram=self._is_ngram,
        )
        if tree is None:
            self._commit_rows(tensors)
            return

        if self._acceptance is not None:
            nodes = self._rows_per_slot
            self._acceptance.choose(rows.slot, tree.parent, rows.token, self.chosen, nodes_per_tree=nodes)
        tree_accept(tensors, tree.parent, tree.path)


MAX_HEAD_ROWS = 64
"""Most rows of `PromptHead`. A product with the head of fewer rows takes about as long."""


class PromptHead:
    """The final norm and the logits of rows of prompts, computed outside of graphs, for requests that report
    them. A row has the bits that it has in a round.

    num_rows: most rows at a time.
    """

    def __init__(self, model: ModelResources, workspace: Workspace, max_rows: int) -> None:
        """max_rows: the most rows of a round, whose memory this uses."""
        self._decoder, self._tuned, self._workspace = model.decoder, model.tuned, workspace
        self.num_rows: int = min(MAX_HEAD_ROWS, max_rows)
        self._logits_shape = self.num_rows, model.limits.vocab_size

    def normed(self, hidden: Tensor) -> Tensor:
        """hidden [N, H], N at most `num_rows`: the residual stream after the last layer, normalised. Valid
        until the next call."""
        return self._normalise(hidden, 1.0)[: hidden.shape[0]]

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [N, V] fp32 of rows [N, H], N at most `num_rows`. Valid until the next step."""
        normed = self._normalise(hidden, 1.0 / self._decoder.spec.logits_divisor)
        # All rows, so that one kernel serves any number; the others have what was there before.
        logits = self._workspace.take("logits", self._logits_shape, torch.float32)
        multiply_head(normed, self._decoder.weights.head, logits, self._tuned, self._decoder.spec.logits_cap)
        return logits[: hidden.shape[0]]

    def stored_logits(self, num_rows: int) -> Tensor:
        """The logits [num_rows, V] fp32 of the step that was launched last, before its rules: those behind
        each row of its round, or of its first tokens. num_rows: as many as the graph has."""
        return self._workspace.take("logits", (num_rows, self._logits_shape[1]), torch.float32)

    def _normalise(self, hidden: Tensor, multiplier: float) -> Tensor:
        norm, num_rows = self._decoder.spec.final_norm, hidden.shape[0]
        normed = self._workspace.take("head_normed", (self.num_rows, hidden.shape[1]), hidden.dtype)
        add_norm(
            hidden,
            None,
            self._decoder.weights.final_norm,
            normed[:num_rows],
            eps=norm.eps,
            normed_multiplier=multiplier,
            norm_kind=norm.kind,
        )
        return normed


class MixedTensors(Struct, frozen=True, kw_only=True):
    """The payload of a mixed step: chunks of N rows in all, and a round of B slots with K drafts each.

    rows [N + B * (K + 1)]: those of chunks, then those of the round. slots [2, B]: slots (-1: padding), then
    the most drafts of each. following [N], hits [C]: next_token and hits of `ComputedChunks`. All int32.
    num_words: of the payload.

    A prompt that ends in the step is a slot of the round: its last token is the slot's newest one, without
    drafts, and the chunk has the tokens before it. So its first token is committed as a round's tokens are.
    """

    rows: Rows
    slots: Tensor
    following: Tensor
    hits: Tensor
    num_chunk_rows: int
    num_words: int

    @property
    def chunk_rows(self) -> Rows:
        """The rows of chunks."""
        return self._part(slice(self.num_chunk_rows))

    @property
    def round_rows(self) -> Rows:
        """The rows of the round."""
        return self._part(slice(self.num_chunk_rows, None))

    def _part(self, part: slice) -> Rows:
        rows = self.rows
        return Rows(slot=rows.slot[part], token=rows.token[part], position=rows.position[part])


class RefreshedRows(Struct, frozen=True):
    """The rows that a refresh computes, T' of each of B slots: pending ones, then those of the round.

    every [B * T']: all rows. normed, hidden: of the round's rows.
    """

    every: Rows
    normed: Tensor
    hidden: HiddenStates


class Round:
    """A round of B slots with K drafts each, T = K + 1 rows a slot. Each public method is a step to capture.

    Its payload: slots [B], then the most drafts of each slot [B]. That of a mixed step, which computes chunks
    of prompts in the same pass, is `MixedTensors`.
    """

    def __init__(
        self,
        resources: DeviceResources,
        slots: Tensor,
        rows: Rows,
        forward: ForwardPass,
        sample_commit: SampleCommit,
        drafter: RoundDrafter | None,
        *,
        tree: TreeSteps | None = None,
        views: Views | None = None,
        refreshed: RefreshedRows | None = None,
        chunks: MixedTensors | None = None,
    ) -> None:
        """slots [2, B] int32: slots (-1: padding), then the most drafts. rows [B * T]: they are drafted and
        verified in the same buffers. forward: of all rows of the step. drafter: of chains.

        tree: the rows are nodes of trees. views: of partial verification: the round reads them, and what it
        accepts is pending. refreshed: it reads all keys and values instead, so that those of pending rows get
        the bits of plain decoding, and chooses the blocks of views anew. chunks: of a mixed step.
        """
        self._resources, self._rows, self._forward = resources, rows, forward
        self._sample_commit, self._drafter = sample_commit, drafter
        self._tree, self._views, self._refreshed, self._chunks = tree, views, refreshed, chunks
        self._slots, self._max_drafts = slots
        self._num_slots = slots.shape[1]
        self._num_drafts = rows.slot.shape[0] // self._num_slots - 1
        self._num_words = 2 * self._num_slots if chunks is None else chunks.num_words
        # The forward pass of a mixed step is not the round's alone.
        self._stages = resources.stages if chunks is None else NO_STAGE_MARKS

    def whole(self) -> None:
        """Draft, verify and commit without the host."""
        self._draft()
        self._verify(has_draft_masks=False)

    def draft(self) -> None:
        """The first half of a split round: leaves the drafted tokens in the ring, see `show_drafts`. Those of
        a slot under a constraint are a chain."""
        self._draft()
        ring, rows = self._resources.ring, self._rows
        show_drafts(rows.slot, rows.token, ring.output, ring.current, ring.next_index)

    def verify(self) -> None:
        """The second half, the next replay after the first. Slots under a constraint have a mask for every
        row."""
        self._resources.payload.enter(0)
        self._verify(has_draft_masks=True)

    def _draft(self) -> None:
        table, rows = self._resources.table, self._rows
        self._resources.payload.enter(self._num_words)
        if self._tree is not None:
            self._tree.grow(self._slots, self._max_drafts)
            return

        if self._chunks is not None:
            # The payload's rows of the round are the last tokens of prompts.
            every = self._chunks.rows
            count_tokens(every.slot, every.token, every.position, table.columns)
        columns = (rows.slot, rows.token, rows.position)
        gather_rows(self._slots, self._max_drafts, table.state, *columns)
        if self._drafter is not None:
            self._drafter.propose(rows, num_slots=self._num_slots, num_draft_tokens=self._num_drafts)
        if self._views is not None and self._refreshed is not None:
            refreshed = self._refreshed.every
            refresh_rows(
                columns,
                self._views.retrieval,
                (refreshed.slot, refreshed.token, refreshed.position),
                self._views.layout,
                num_sequences=self._num_slots,
            )

    def _verify(self, *, has_draft_masks: bool) -> None:
        forward, sample_commit, tree = self._forward, self._sample_commit, self._tree
        if self._num_drafts > 0:
            forward.share_drafts(None if tree is None else tree.parent)
        with self._stages(forward_stage(self._num_drafts)):
            if tree is not None:
                tree.place()
            forward.run()
        normed, hidden = self._own_rows()
        if tree is not None:
            tree.check_forward(hidden)
        sample_commit.run(normed, has_draft_masks=has_draft_masks)
        if tree is not None:
            tree.finish(sample_commit)
        if tree is not None or self._drafter is not None:
            with self._stages("draft_extend"):
                self._extend(hidden)
        if (views := self._views) is not None:
            rows = self._rows
            note_round(
                (rows.slot, rows.token, rows.position),
                sample_commit.emitted,
                views.retrieval,
                views.layout,
                is_refresh=self._refreshed is not None,
            )

    def _own_rows(self) -> tuple[Tensor, HiddenStates]:
        """The normalised residual stream of the round's rows, and their hidden states."""
        forward = self._forward
        if self._refreshed is not None:
            self._take_own(self._refreshed)
            return self._refreshed.normed, self._refreshed.hidden

        if self._chunks is not None:
            own = slice(self._chunks.num_chunk_rows, None)
            return forward.normed[own], forward.hidden_states.of_rows(own)

        return forward.normed, forward.hidden_states

    def _take_own(self, refreshed: RefreshedRows) -> None:
        """Copy the residual stream of the round's rows."""
        source, hidden = self._forward.hidden_states, refreshed.hidden
        pairs = [(self._forward.normed, refreshed.normed), (source.final, hidden.final)]
        pairs += [(source.by_layer[layer], stream) for layer, stream in hidden.by_layer.items()]
        for every, own in pairs:
            own = own.view(self._num_slots, self._num_drafts + 1, -1)
            own.copy_(every.view(self._num_slots, -1, own.shape[2])[:, -own.shape[1] :])
            note_library_kernel(own)

    def _extend(self, hidden: HiddenStates) -> None:
        """Update the drafter: with chunks first, because rows of prompts that end see those before."""
        verified, drafter, chunks = self._sample_commit.verified(hidden), self._drafter, self._chunks
        if self._tree is not None:
            self._tree.extend(verified)
        elif drafter is not None:
            if chunks is not None:
                drafter.draft_extend_prefill(
                    ComputedChunks(
                        rows=chunks.chunk_rows,
                        hidden=self._forward.hidden_states.of_rows(slice(chunks.num_chunk_rows)),
                        next_token=chunks.following,
                        hits=chunks.hits,
                        last_token=self._resources.table.state.last_token,
                    )
                )
            drafter.draft_extend(verified)


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

    roots: as they grow. kv_slot [B * T] int64, bits [B * T] int64, path [B * T, PATH_ENTRIES] int32: as of
    `tree_rows`. accepted [B, PATH_ENTRIES] int32: as of `tree_accept`.
    """

    roots: RootTensors
    kv_slot: Tensor
    bits: Tensor
    path: Tensor
    accepted: Tensor

    @classmethod
    def take(cls, workspace: Workspace, rows: Rows, num_trees: int, num_draft_nodes: int) -> TreeTensors:
        """Tensors beside the slots, tokens and positions of `rows`, in buffers that all rounds share."""
        num_rows = rows.slot.shape[0]

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


class TreeSteps:
    """The steps of a round whose rows are the nodes of B trees, T each: growth, places, checks, rewinding."""

    def __init__(
        self,
        resources: DeviceResources,
        tensors: TreeTensors,
        cache: PagedKVCache,
        drafter: TreeDrafter,
        plan: TreePlan,
        checks: TreeChecks | None,
    ) -> None:
        """checks: None: the round is not checked."""
        self._resources, self._tensors, self._cache = resources, tensors, cache
        self._drafter, self._plan, self._checks = drafter, plan, checks

    @property
    def parent(self) -> Tensor:
        """The parent [B * T] int32 of each node."""
        return self._tensors.roots.parent

    def grow(self, slots: Tensor, max_drafts: Tensor) -> None:
        """Draft. slots (-1: padding), max_drafts [B] int32."""
        table, roots = self._resources.table, self._tensors.roots
        tree_roots(
            slots,
            max_drafts,
            table.state,
            table.columns.flags,
            table.block_table,
            roots,
            max_depth=self._plan.depth,
            block_size=self._cache.block_size,
            first_draft_slot=self._drafter.first_draft_slot,
        )
        self._drafter.grow(roots, self._plan)
        if self._checks is not None:
            self._checks.after_draft(roots)

    def place(self) -> None:
        """Find positions, places and paths of all nodes, before the forward pass."""
        self._place()
        if self._checks is not None:
            self._checks.after_place(self._tensors.roots, self._tensors.path)

    def check_forward(self, hidden: HiddenStates) -> None:
        """Check what the forward pass has computed."""
        if self._checks is not None:
            self._checks.after_forward(self._tensors.roots, hidden.final)

    def finish(self, sample_commit: SampleCommit) -> None:
        """Rewind the cache after the commit, and report what checks have found."""
        tensors, checks = self._tensors, self._checks
        roots, accepted = tensors.roots, tensors.accepted
        if checks is not None:
            checks.after_commit(roots, sample_commit.chosen, accepted, sample_commit.emitted)
        with self._resources.stages("commit"):
            self._rewind()
        if checks is not None:
            checks.after_rewind(roots, tensors.kv_slot, accepted)
            checks.report(self._resources.ring)

    def extend(self, verified: VerifiedRows) -> None:
        """Update the drafter."""
        self._drafter.extend(self._tensors.roots, self._plan, verified, self._tensors.accepted)

    def _place(self) -> None:
        tensors, table = self._tensors, self._resources.table
        roots = tensors.roots
        tree_rows(
            roots.slot,
            roots.parent,
            table.state.length,
            table.block_table,
            (roots.position, tensors.bits, tensors.kv_slot, tensors.path),
            nodes_per_tree=self._plan.num_nodes,
            block_size=self._cache.block_size,
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
