"""Decode rounds on the device: drafting, the forward pass, sampling and commit.

`SampleCommit` is the end of every step: logits from the last layer, a token behind each row, and the commit
of the slots. A round is one step, or two between which the host reads the drafted tokens; a mixed step
computes chunks of prompts and a round in one forward pass; rounds of partial verification read views, or
refresh them.
"""

from __future__ import annotations

import torch
from msgspec import Struct
from torch import Tensor

from drift_sdk._kernels.commit import commit
from drift_sdk._kernels.exchange.gather import gather_logits
from drift_sdk._kernels.exchange.peer_memory import PeerTensor
from drift_sdk._kernels.launch.launch_order import note_library_kernel
from drift_sdk._kernels.layers.norm import add_norm
from drift_sdk._kernels.sampling.logits import count_tokens
from drift_sdk._kernels.sampling.rows import SampleBuffers
from drift_sdk._kernels.sampling.sample import sample_rows
from drift_sdk._kernels.slots.step_inputs import copy_masks, gather_rows, show_drafts
from drift_sdk._kernels.trees.tree_accept import tree_accept
from drift_sdk._kernels.views import note_round, refresh_rows
from drift_sdk.execution.acceptance import Acceptance
from drift_sdk.execution.device.memory import Workspace
from drift_sdk.execution.device_resources import DeviceResources
from drift_sdk.execution.forward.attention import Views
from drift_sdk.execution.forward.caches import ModelResources
from drift_sdk.execution.forward.forward_pass import ForwardPass
from drift_sdk.execution.forward.products import multiply_head
from drift_sdk.execution.forward.rows import HiddenStates, Rows
from drift_sdk.execution.rounds.drafter import ComputedChunks, RoundDrafter, VerifiedRows
from drift_sdk.execution.stages import forward_stage


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
        rows, ring = self._rows, self._ring
        if self._tree is not None:
            self._commit_trees(self._tree)
            return

        self._commit_rows(
            rows.slot,
            rows.token,
            self._buffers,
            self._table.state,
            self._table.columns,
            self.emitted,
            ring.output,
            ring.current,
            ring.next_index,
            rows_per_slot=self._rows_per_slot,
            is_ngram=self._is_ngram,
        )

    def _commit_trees(self, tree: TreeAcceptance) -> None:
        rows, ring, nodes = self._rows, self._ring, self._rows_per_slot
        if self._acceptance is not None:
            self._acceptance.choose(rows.slot, tree.parent, rows.token, self.chosen, nodes_per_tree=nodes)
        tree_accept(
            rows.slot,
            tree.parent,
            rows.token,
            self._buffers,
            self._table.state,
            self._table.columns,
            tree.path,
            self.emitted,
            (ring.output, ring.current, ring.next_index),
            nodes_per_tree=nodes,
            is_ngram=self._is_ngram,
        )


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


class DecodeRound:
    """A round of B slots with K drafts each, T = K + 1 rows a slot. Each public method is a step to capture.

    Its payload: slots [B], then the most drafts of each slot [B].
    """

    def __init__(
        self,
        resources: DeviceResources,
        payload: Tensor,
        rows: Rows,
        forward: ForwardPass,
        sample_commit: SampleCommit,
        drafter: RoundDrafter | None,
    ) -> None:
        """payload [2, B] int32: slots (-1: padding) and most drafts. rows [B * T]: rows are drafted and
        verified in the same buffers."""
        self._resources, self._rows, self._forward = resources, rows, forward
        self._sample_commit, self._drafter = sample_commit, drafter
        self._slots, self._max_drafts = payload
        self._num_slots = payload.shape[1]
        self._num_drafts = rows.slot.shape[0] // self._num_slots - 1

    def whole(self) -> None:
        """Draft, verify and commit without the host."""
        self._draft()
        self._verify(has_draft_masks=False)

    def draft(self) -> None:
        """The first half of a split round: leaves the drafted tokens in the ring, see `show_drafts`."""
        self._draft()
        ring, rows = self._resources.ring, self._rows
        show_drafts(rows.slot, rows.token, ring.output, ring.current, ring.next_index)

    def verify(self) -> None:
        """The second half, the next replay after the first. Slots under a constraint have a mask for every
        row."""
        self._resources.payload.enter(0)
        self._verify(has_draft_masks=True)

    def _draft(self) -> None:
        rows, state = self._rows, self._resources.table.state
        self._resources.payload.enter(2 * self._num_slots)
        gather_rows(self._slots, self._max_drafts, state, rows.slot, rows.token, rows.position)
        if self._drafter is not None:
            self._drafter.propose(rows, num_slots=self._num_slots, num_draft_tokens=self._num_drafts)

    def _verify(self, *, has_draft_masks: bool) -> None:
        forward, sample_commit, stages = self._forward, self._sample_commit, self._resources.stages
        if self._num_drafts > 0:
            forward.share_drafts()
        with stages(forward_stage(self._num_drafts)):
            forward.run()
        sample_commit.run(forward.normed, has_draft_masks=has_draft_masks)
        if self._drafter is not None:
            with stages("draft_extend"):
                self._drafter.draft_extend(sample_commit.verified(forward.hidden_states))


class MixedTensors(Struct, frozen=True, kw_only=True):
    """The payload of a mixed step: chunks of N rows in all, and a round of B slots with K drafts each.

    rows [N + B * (K + 1)]: those of chunks, then those of the round. slots [2, B]: slots (-1: padding), then
    the most drafts of each. following [N], hits [C]: next_token and hits of `ComputedChunks`. All int32.
    """

    rows: Rows
    slots: Tensor
    following: Tensor
    hits: Tensor
    num_chunk_rows: int

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


class MixedStep:
    """Drafts, computes chunks and the round's rows in one pass, commits the round and extends the drafts.

    A prompt that ends in the step is a slot of the round: its last token is the slot's newest one, without
    drafts, and the chunk has the tokens before it. So its first token is committed as a round's tokens are.
    """

    def __init__(
        self,
        resources: DeviceResources,
        tensors: MixedTensors,
        num_words: int,
        forward: ForwardPass,
        sample_commit: SampleCommit,
        drafter: RoundDrafter | None,
    ) -> None:
        """num_words: of the payload. forward: of all rows. sample_commit: of the round's rows."""
        self._resources, self._tensors, self._num_words = resources, tensors, num_words
        self._forward, self._sample_commit, self._drafter = forward, sample_commit, drafter

    def run(self) -> None:
        """Record the kernels of the step."""
        tensors, table = self._tensors, self._resources.table
        rows, round_rows = tensors.rows, tensors.round_rows
        slots, max_drafts = tensors.slots
        self._resources.payload.enter(self._num_words)
        # The payload's rows of the round are the last tokens of prompts.
        count_tokens(rows.slot, rows.token, rows.position, table.columns)
        gather_rows(slots, max_drafts, table.state, round_rows.slot, round_rows.token, round_rows.position)
        if self._drafter is not None:
            self._drafter.propose(round_rows, num_slots=self._num_slots, num_draft_tokens=self._num_drafts)
            self._forward.share_drafts()
        self._forward.run()
        self._sample_commit.run(self._forward.normed[tensors.num_chunk_rows :])
        if self._drafter is not None:
            self._extend(self._drafter)

    def _extend(self, drafter: RoundDrafter) -> None:
        """Update the drafter: with the chunks first, because rows of prompts that end see those before."""
        tensors, hidden = self._tensors, self._forward.hidden_states
        first = tensors.num_chunk_rows
        drafter.draft_extend_prefill(
            ComputedChunks(
                rows=tensors.chunk_rows,
                hidden=hidden.of_rows(slice(first)),
                next_token=tensors.following,
                hits=tensors.hits,
                last_token=self._resources.table.state.last_token,
            )
        )
        drafter.draft_extend(self._sample_commit.verified(hidden.of_rows(slice(first, None))))

    @property
    def _num_slots(self) -> int:
        return self._tensors.slots.shape[1]

    @property
    def _num_drafts(self) -> int:
        num_rows = self._tensors.rows.slot.shape[0] - self._tensors.num_chunk_rows
        return num_rows // self._num_slots - 1


class PartialRound:
    """A round whose attention reads views; what it accepts is pending."""

    def __init__(self, decode_round: DecodeRound, rows: Rows, emitted: Tensor, views: Views) -> None:
        """rows, emitted: of the round."""
        self._round, self._rows, self._emitted, self._views = decode_round, rows, emitted, views

    def run(self) -> None:
        """Record the kernels of the round."""
        rows, views = self._rows, self._views
        self._round.whole()
        columns = (rows.slot, rows.token, rows.position)
        note_round(columns, self._emitted, views.retrieval, views.layout, is_refresh=False)


class RefreshedRows(Struct, frozen=True):
    """The rows of a round that refreshes B slots, T of each, and those that are computed, T' of each.

    own [B * T]: of the round. every [B * T']: pending rows, then those of the round. normed, hidden: of the
    round's rows.
    """

    own: Rows
    every: Rows
    normed: Tensor
    hidden: HiddenStates


class RefreshRound:
    """A round that reads all keys and values, with the pending rows of its slots before its own.

    The keys and values of pending rows get the bits of plain decoding, and the blocks of views are chosen
    anew. Its payload is that of a `DecodeRound`.
    """

    def __init__(
        self,
        resources: DeviceResources,
        payload: Tensor,
        rows: RefreshedRows,
        forward: ForwardPass,
        sample_commit: SampleCommit,
        drafter: RoundDrafter,
        views: Views,
    ) -> None:
        """payload [2, B] int32: slots (-1: padding) and most drafts. forward: of all rows."""
        self._resources, self._rows, self._forward = resources, rows, forward
        self._sample_commit, self._drafter, self._views = sample_commit, drafter, views
        self._slots, self._max_drafts = payload
        self._num_slots = payload.shape[1]
        self._num_drafts = rows.own.slot.shape[0] // self._num_slots - 1

    def run(self) -> None:
        """Record the kernels of the round."""
        resources, rows, views = self._resources, self._rows.own, self._views
        resources.payload.enter(2 * self._num_slots)
        columns = (rows.slot, rows.token, rows.position)
        gather_rows(self._slots, self._max_drafts, resources.table.state, *columns)
        self._drafter.propose(rows, num_slots=self._num_slots, num_draft_tokens=self._num_drafts)
        every = (self._rows.every.slot, self._rows.every.token, self._rows.every.position)
        refresh_rows(columns, views.retrieval, every, views.layout, num_sequences=self._num_slots)
        with resources.stages(forward_stage(self._num_drafts)):
            self._forward.run()
        self._take_round()
        self._sample_commit.run(self._rows.normed)
        with resources.stages("draft_extend"):
            self._drafter.draft_extend(self._sample_commit.verified(self._rows.hidden))
        note_round(columns, self._sample_commit.emitted, views.retrieval, views.layout, is_refresh=True)

    def _take_round(self) -> None:
        """Copy the residual stream of the round's rows."""
        source, hidden = self._forward.hidden_states, self._rows.hidden
        pairs = [(self._forward.normed, self._rows.normed), (source.final, hidden.final)]
        pairs += [(source.by_layer[layer], stream) for layer, stream in hidden.by_layer.items()]
        for every, own in pairs:
            own = own.view(self._num_slots, self._num_drafts + 1, -1)
            own.copy_(every.view(self._num_slots, -1, own.shape[2])[:, -own.shape[1] :])
            note_library_kernel(own)
