"""Where drafted tokens come from. A draft never changes what is said, only how fast."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from msgspec import Struct
from torch import Tensor

from drift_sdk.draft_policy.ngram import NGramIndex
from drift_sdk.execution.eager.sampling import choose
from drift_sdk.execution.eager.slot import Slot
from drift_sdk.models.attention import AttentionBatch, SequenceRows
from drift_sdk.models.decoder import Decoder
from drift_sdk.models.eagle3 import DRAFT_KV_OFFSET, DraftDecoder
from drift_sdk.models.kv_cache import KVCache
from drift_sdk.steps import ExecutorLimits

__all__ = ["Drafter", "EagleDrafter", "NGramDrafter", "Span"]


class Span(Struct, frozen=True):
    """Rows of a target step that turned out true: a slot's positions from `start` on, the token there and,
    for each row, the token after it. `first_row` is where they stand in the step's tensors."""

    slot: Slot
    start: int
    token_id: int
    next_token_ids: Sequence[int]
    first_row: int


class Drafter(Protocol):
    """Proposes tokens and follows what became of them. `aux_layers`: the target's layer boundaries whose
    residual stream `draft_extend` wants."""

    aux_layers: Sequence[int]

    def enter(self, slot: Slot, cached_token_ids: Sequence[int]) -> None:
        """A sequence enters a slot."""

    def draft_extend(self, spans: Sequence[Span], aux_hidden: Sequence[Tensor], hidden: Tensor) -> None:
        """The target has computed these rows: `aux_hidden` at each boundary and `hidden` after the last
        layer, [N, H] of the whole step."""

    def propose(self, slots: Sequence[Slot], num_draft_tokens: Sequence[int]) -> list[list[int]]:
        """At most so many tokens for each slot to say after its newest."""


class NGramDrafter:
    """Prompt look-up in each sequence's own history."""

    aux_layers: Sequence[int] = ()

    def __init__(self, min_length: int, max_length: int) -> None:
        self._lengths = min_length, max_length

    def enter(self, slot: Slot, cached_token_ids: Sequence[int]) -> None:
        slot.draft = NGramIndex(*self._lengths)
        slot.draft.extend(cached_token_ids)

    def draft_extend(self, spans: Sequence[Span], aux_hidden: Sequence[Tensor], hidden: Tensor) -> None:
        for span in spans:
            index = span.slot.draft
            assert isinstance(index, NGramIndex)
            tokens = (span.token_id, *span.next_token_ids)
            index.extend(tokens[len(index) - span.start :])

    def propose(self, slots: Sequence[Slot], num_draft_tokens: Sequence[int]) -> list[list[int]]:
        drafts = []
        for slot, most in zip(slots, num_draft_tokens, strict=True):
            assert isinstance(slot.draft, NGramIndex)
            drafts.append(slot.draft.propose(most))

        return drafts


class EagleState:
    """A slot's draft: how many of its rows are done, and what the latest one gave."""

    __slots__ = ("hidden", "num_rows")

    def __init__(self) -> None:
        self.num_rows = 0
        self.hidden: Tensor | None = None


class EagleDrafter:
    """An EAGLE-3 head on the target's features.

    Draft row i is (feature of position i, token i + 1), at RoPE position i; its keys and values lie at KV
    slot i + 1 of the sequence's own blocks, so a block's draft KV depends on that block's tokens and those
    before alone, and a prefix hit brings both. The feature of a block's last token is kept beside the block,
    for the first row after a hit.
    """

    def __init__(self, draft: DraftDecoder, target: Decoder, limits: ExecutorLimits) -> None:
        config = draft.config
        self.aux_layers: Sequence[int] = draft.aux_layers
        self._draft = draft
        self._vocab_size = limits.vocab_size
        self._block_size = limits.block_size
        self._cache = KVCache(
            num_layers=draft.num_layers,
            num_blocks=limits.num_blocks,
            block_size=limits.block_size,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=target.dtype,
            device=target.device,
        )
        self._block_features = torch.empty(
            limits.num_blocks, config.hidden_size, dtype=target.dtype, device=target.device
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
            own = fused[span.first_row : span.first_row + num_rows]
            start = span.start
            if start > 0 and state.num_rows < start:
                # The first rows after a prefix hit: the row before them needs the first new token too.
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

    def propose(self, slots: Sequence[Slot], num_draft_tokens: Sequence[int]) -> list[list[int]]:
        drafts: list[list[int]] = [[] for _ in slots]
        hidden = {index: state_of(slot).hidden for index, slot in enumerate(slots)}
        alive = [
            index for index, most in enumerate(num_draft_tokens) if most > 0 and hidden[index] is not None
        ]
        while alive:
            stacked = torch.stack([tensor for index in alive if (tensor := hidden[index]) is not None])
            tokens = self._choose(stacked, [slots[index] for index in alive], [drafts[i] for i in alive])
            for index, token in zip(alive, tokens, strict=True):
                drafts[index].append(token)
            going = [n for n, index in enumerate(alive) if len(drafts[index]) < num_draft_tokens[index]]
            if not going:
                break

            alive = [alive[n] for n in going]
            # The next row pairs what the draft itself made with the token it chose, one position on.
            rows = [
                SequenceRows(slots[index].block_table, slots[index].length - 2 + len(drafts[index]), 1)
                for index in alive
            ]
            output = self._forward(stacked[going], [drafts[index][-1] for index in alive], rows)
            for n, index in enumerate(alive):
                hidden[index] = output[n]

        return drafts

    def _choose(self, hidden: Tensor, slots: Sequence[Slot], drafted: Sequence[Sequence[int]]) -> list[int]:
        """A token for each row as the target would choose it from these logits, with the same noise."""
        logits = torch.full(
            (len(slots), self._vocab_size), -torch.inf, dtype=torch.float32, device=hidden.device
        )
        logits[:, self._draft.target_ids] = self._draft.logits(hidden)
        positions = [slot.length + len(tokens) for slot, tokens in zip(slots, drafted, strict=True)]
        chosen: list[int] = choose(logits, [slot.sampling for slot in slots], positions).tolist()
        return chosen

    def _forward(self, features: Tensor, tokens: Sequence[int], rows: Sequence[SequenceRows]) -> Tensor:
        token_ids = torch.tensor(tokens, dtype=torch.int64, device=features.device)
        batch = AttentionBatch(rows, self._cache, slot_offset=DRAFT_KV_OFFSET)
        return self._draft.forward(features, token_ids, batch, self._cache)

    def _keep_features(self, span: Span, features: Tensor) -> None:
        """Beside every block whose last position is among the rows."""
        size = self._block_size
        first = size - 1 - span.start % size
        for offset in range(first, features.shape[0], size):
            self._block_features[self._block(span.slot, span.start + offset)] = features[offset]

    def _block(self, slot: Slot, position: int) -> int:
        return slot.block_table[position // self._block_size]


def state_of(slot: Slot) -> EagleState:
    assert isinstance(slot.draft, EagleState)
    return slot.draft
