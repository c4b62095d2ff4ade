"""A mixed step on the device: chunks of prompts and a decode round, computed in one forward pass."""

from __future__ import annotations

from msgspec import Struct
from torch import Tensor

from drift_sdk._kernels.sampling.logits import count_tokens
from drift_sdk._kernels.slots.step_inputs import gather_rows
from drift_sdk.execution.forward.forward_pass import ForwardPass
from drift_sdk.execution.forward.rows import Rows
from drift_sdk.execution.resources import DeviceResources
from drift_sdk.execution.rounds.drafter import ComputedChunks, RoundDrafter
from drift_sdk.execution.rounds.sample_commit import SampleCommit

__all__ = ["MixedStep", "MixedTensors"]


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
