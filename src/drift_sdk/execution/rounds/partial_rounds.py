"""Rounds of partial verification on the device: those that read views, and those that refresh them."""

from __future__ import annotations

from msgspec import Struct
from torch import Tensor

from drift_sdk._kernels.launch.launch_order import note_library_kernel
from drift_sdk._kernels.slots.step_inputs import gather_rows
from drift_sdk._kernels.views import note_round, refresh_rows
from drift_sdk.execution.forward.forward_pass import ForwardPass
from drift_sdk.execution.forward.rows import Rows
from drift_sdk.execution.forward.step_buffers import HiddenStates
from drift_sdk.execution.forward.view_attention import Views
from drift_sdk.execution.resources import DeviceResources
from drift_sdk.execution.rounds.drafter import RoundDrafter
from drift_sdk.execution.rounds.round import DecodeRound
from drift_sdk.execution.rounds.sample_commit import SampleCommit
from drift_sdk.execution.stages import forward_stage

__all__ = ["PartialRound", "RefreshRound", "RefreshedRows"]


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
