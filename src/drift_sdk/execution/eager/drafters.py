"""Drafters of the eager executor. A draft changes the speed of decoding, never the tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from msgspec import Struct
from torch import Tensor

from drift_sdk.draft_policy.ngram import NGramHistory
from drift_sdk.execution.eager.draft_chains import draft_chains
from drift_sdk.execution.eager.slot import Slot
from drift_sdk.execution.eager.tree_grower import TreeGrower, max_draft_rows, target_logits
from drift_sdk.models.attention import AttentionBatch, SequenceRows
from drift_sdk.models.decoder import Decoder
from drift_sdk.models.eagle3 import DRAFT_KV_OFFSET, DraftDecoder
from drift_sdk.speculation import DynamicTree, StaticTree
from drift_sdk.steps import ExecutorLimits
from drift_sdk.trees.growth import Draft, DraftLimit
from drift_sdk.trees.limits import MAX_TREE_ROWS

__all__ = ["Drafter", "EagleDrafter", "NGramDrafter", "Span"]


class Span(Struct, frozen=True):
    """The rows of one slot in a step of the target whose inputs belong to the sequence.

    start:           position of the first row.
    token_id:        the token at `start`.
    next_token_ids:  for each row, the token at the position after it.
    rows:            indices of the rows in the step's tensors, as many as `next_token_ids`.
    """

    slot: Slot
    start: int
    token_id: int
    next_token_ids: Sequence[int]
    rows: Sequence[int]


class Drafter(Protocol):
    """Proposes draft tokens, and is updated with the tokens of every step.

    aux_layers:     the layers of the target whose input `draft_extend` needs; see Decoder.forward.
    max_tree_rows:  most nodes of all trees that `propose` returns at once, roots included; 0 if it returns
                    chains only.
    """

    aux_layers: Sequence[int]
    max_tree_rows: int

    def enter(self, slot: Slot, cached_token_ids: Sequence[int]) -> None:
        """Initialise the state of a slot for a new sequence, whose first tokens were found in the prefix
        cache."""

    def draft_extend(self, spans: Sequence[Span], aux_hidden: Sequence[Tensor], hidden: Tensor) -> None:
        """Update the slots' states with rows that the target has computed.

        aux_hidden:  the residual stream at each of `aux_layers`, [N, H] each, of all rows of the step.
        hidden:      the residual stream after the last layer, [N, H].
        """

    def propose(self, slots: Sequence[Slot], limits: Sequence[DraftLimit]) -> list[Draft]:
        """Draft tokens to follow the newest token of each slot, within its limit."""


class NGramDrafter:
    """Prompt lookup: proposes the continuation of an earlier occurrence of a sequence's last tokens."""

    aux_layers: Sequence[int] = ()
    max_tree_rows = 0

    def __init__(self, min_length: int, max_length: int) -> None:
        self._lengths = min_length, max_length

    def enter(self, slot: Slot, cached_token_ids: Sequence[int]) -> None:
        slot.draft = NGramHistory(*self._lengths)
        slot.draft.extend(cached_token_ids)

    def draft_extend(self, spans: Sequence[Span], aux_hidden: Sequence[Tensor], hidden: Tensor) -> None:
        for span in spans:
            index = span.slot.draft
            assert isinstance(index, NGramHistory)
            tokens = (span.token_id, *span.next_token_ids)
            index.extend(tokens[len(index) - span.start :])

    def propose(self, slots: Sequence[Slot], limits: Sequence[DraftLimit]) -> list[Draft]:
        drafts = []
        for slot, limit in zip(slots, limits, strict=True):
            assert isinstance(slot.draft, NGramHistory)
            drafts.append(Draft.chain(slot.draft.propose(limit.chain_length)))

        return drafts


class EagleState:
    """The draft state of a slot.

    num_rows:  draft rows computed from features of the target.
    hidden:    output of the latest of them, [H]; None before the first.
    """

    __slots__ = ("hidden", "num_rows")

    def __init__(self) -> None:
        self.num_rows: int = 0
        self.hidden: Tensor | None = None


class EagleDrafter:
    """Drafts with a head on the target's features (EAGLE-3 or MTP).

    Draft row i combines the feature of position i with token i + 1, at RoPE position i. Its keys and values
    lie at KV slot i + 1 of the sequence's blocks, so a block's draft KV depends only on the tokens of that
    block and of those before it, and a prefix hit covers both models. The feature of each block's last token
    is stored beside the block: it is needed for the first draft row after a prefix hit.
    """

    def __init__(
        self,
        draft: DraftDecoder,
        target: Decoder,
        limits: ExecutorLimits,
        tree: StaticTree | DynamicTree | None = None,
    ) -> None:
        """tree: the shape of drafts; None: chains."""
        config = draft.config
        # Rows for nodes of trees lie behind the blocks that the scheduler allocates.
        num_tree_blocks = 0 if tree is None else -(-max_draft_rows(tree) // limits.block_size)
        self.aux_layers: Sequence[int] = draft.aux_layers
        self._draft = draft
        self._vocab_size = limits.vocab_size
        self._block_size = limits.block_size
        self._cache = draft.empty_kv_cache(limits.num_blocks + num_tree_blocks, limits.block_size)
        self._block_features = torch.empty(
            limits.num_blocks, config.hidden_size, dtype=target.dtype, device=target.device
        )

        self.max_tree_rows = 0 if tree is None else MAX_TREE_ROWS
        self._trees = (
            None
            if tree is None
            else TreeGrower(
                draft, self._cache, tree, limits.num_blocks * limits.block_size, limits.vocab_size
            )
        )

    def enter(self, slot: Slot, cached_token_ids: Sequence[int]) -> None:
        slot.draft = EagleState()

    def draft_extend(self, spans: Sequence[Span], aux_hidden: Sequence[Tensor], hidden: Tensor) -> None:
        spans = [span for span in spans if span.next_token_ids]
        if not spans:
            return

        fused = self._draft.fuse(aux_hidden, hidden)
        features: list[Tensor] = []
        tokens: list[int] = []
        rows: list[SequenceRows] = []
        for span in spans:
            state = state_of(span.slot)
            num_rows = len(span.next_token_ids)
            own = fused[span.rows[0] : span.rows[-1] + 1] if is_run(span.rows) else fused[list(span.rows)]
            start = span.start
            if start > 0 and state.num_rows < start:
                # After a prefix hit: the draft row of position start - 1 was not computed, because it
                # contains the first token that was not cached.
                features.append(self._block_features[self._block(span.slot, start - 1)][None])
                tokens.append(span.token_id)
                start -= 1
            features.append(own)
            tokens.extend(span.next_token_ids)
            rows.append(SequenceRows(span.slot.block_table, start, span.start + num_rows - start))
            self._keep_features(span, own)
            state.num_rows = span.start + num_rows

        output = self._forward(torch.cat(features), tokens, rows)
        last = -1
        for span, row in zip(spans, rows, strict=True):
            last += row.num_rows
            state_of(span.slot).hidden = output[last]

    def propose(self, slots: Sequence[Slot], limits: Sequence[DraftLimit]) -> list[Draft]:
        # Without an output of the draft there is nothing to draft from.
        indices = [index for index, slot in enumerate(slots) if state_of(slot).hidden is not None]
        trees = [index for index in indices if self._trees is not None and not limits[index].is_chain]
        chains = [index for index in indices if index not in trees]
        drafts = [Draft.chain(()) for _ in slots]
        lengths = [limits[index].chain_length for index in chains]
        for index, tokens in zip(chains, self._chains([slots[i] for i in chains], lengths), strict=True):
            drafts[index] = Draft.chain(tokens)
        if self._trees is not None and trees:
            hidden = [output for i in trees if (output := state_of(slots[i]).hidden) is not None]
            grown = self._trees.grow([slots[i] for i in trees], hidden, [limits[i] for i in trees])
            for index, draft in zip(trees, grown, strict=True):
                drafts[index] = draft

        return drafts

    def _chains(self, slots: Sequence[Slot], lengths: Sequence[int]) -> list[list[int]]:
        """Tokens one after another, as many as given for each slot."""
        hidden = [output for slot in slots if (output := state_of(slot).hidden) is not None]
        return draft_chains(slots, hidden, lengths, self._logits, self._advance)

    def _logits(self, hidden: Tensor) -> Tensor:
        return target_logits(self._draft, hidden, self._vocab_size)

    def _advance(
        self, outputs: Tensor, tokens: Sequence[int], slots: Sequence[Slot], num_drafted: Sequence[int]
    ) -> Tensor:
        # The next row combines the draft's own output with the token sampled from it, one position further.
        rows = [
            SequenceRows(slot.block_table, slot.length - 2 + number, 1)
            for slot, number in zip(slots, num_drafted, strict=True)
        ]
        return self._forward(outputs, tokens, rows)

    def _forward(self, features: Tensor, tokens: Sequence[int], rows: Sequence[SequenceRows]) -> Tensor:
        """The draft's output [N, H] for features [N, H] and the tokens after them."""
        token_ids = torch.tensor(tokens, dtype=torch.int64, device=features.device)
        batch = AttentionBatch(rows, self._cache, slot_offset=DRAFT_KV_OFFSET)
        return self._draft.forward(features, token_ids, batch, self._cache)

    def _keep_features(self, span: Span, features: Tensor) -> None:
        """Store features [num_rows, H] of a span's rows at the last positions of blocks."""
        size = self._block_size
        first = size - 1 - span.start % size
        for offset in range(first, features.shape[0], size):
            self._block_features[self._block(span.slot, span.start + offset)] = features[offset]

    def _block(self, slot: Slot, position: int) -> int:
        """The KV block that holds a position."""
        return slot.block_table[position // self._block_size]


def is_run(rows: Sequence[int]) -> bool:
    """Whether ascending row indices are consecutive."""
    return rows[-1] - rows[0] == len(rows) - 1


def state_of(slot: Slot) -> EagleState:
    """The state that an EagleDrafter keeps for a slot."""
    assert isinstance(slot.draft, EagleState)
    return slot.draft
