"""The end of a step: logits from the last layer, a token behind each row, and the commit of the slots."""

from __future__ import annotations

import torch
from msgspec import Struct
from torch import Tensor

from drift_sdk._kernels.commit import commit
from drift_sdk._kernels.exchange.gather import gather_logits
from drift_sdk._kernels.exchange.peer_memory import PeerTensor
from drift_sdk._kernels.sampling.rows import SampleBuffers
from drift_sdk._kernels.sampling.sample import sample_rows
from drift_sdk._kernels.slots.step_inputs import copy_masks
from drift_sdk._kernels.trees.tree_accept import tree_accept
from drift_sdk.execution.acceptance import Acceptance
from drift_sdk.execution.forward.head_product import multiply_head
from drift_sdk.execution.forward.model_resources import ModelResources
from drift_sdk.execution.forward.rows import Rows
from drift_sdk.execution.forward.step_buffers import HiddenStates
from drift_sdk.execution.resources import DeviceResources
from drift_sdk.execution.rounds.drafter import VerifiedRows
from drift_sdk.execution.stages import forward_stage

__all__ = ["SampleCommit", "TreeAcceptance"]


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
