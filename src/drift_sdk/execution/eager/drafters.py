"""Drafters of the eager executor: n-grams, a draft head by chains, by trees and in one pass, an assistant on
the target's KV, a small model, and n-grams in place of a model's drafts where they are accepted more often. A
draft changes the speed of decoding, never the tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Protocol, runtime_checkable

import torch
from msgspec import Struct
from torch import Tensor

from drift_sdk.execution.eager.sampling import choose, rank
from drift_sdk.execution.eager.slot import Slot
from drift_sdk.execution.ngram_history import NGramHistory, next_score, num_right
from drift_sdk.models.assistant import AssistantDecoder, NewestRows
from drift_sdk.models.attention import (
    AttentionBatch,
    LastRows,
    ParallelAttentionBatch,
    SequenceRows,
    TreeAttentionBatch,
    TreeRows,
)
from drift_sdk.models.decoder import Decoder
from drift_sdk.models.dflash import DFlashDecoder
from drift_sdk.models.draft_head import DRAFT_KV_OFFSET, DraftDecoder
from drift_sdk.models.kv_cache import KVCache
from drift_sdk.speculation import DynamicTree, StaticTree
from drift_sdk.steps import ExecutorLimits
from drift_sdk.trees import (
    MAX_TREE_ROWS,
    Draft,
    DraftLimit,
    DynamicGrowth,
    StaticGrowth,
    TreeGrowth,
    max_batch_drafts,
    rank_tree,
)

Advance = Callable[[Tensor, Sequence[int], Sequence[Slot], Sequence[int]], Tensor]
"""Takes the draft's outputs [M, H], the tokens chosen from them, the slots, and how many tokens each slot has
drafted, these included. Returns the outputs [M, H] of these tokens."""


def draft_chains(
    slots: Sequence[Slot],
    hidden: Sequence[Tensor],
    lengths: Sequence[int],
    logits_of: Callable[[Tensor], Tensor],
    advance: Advance,
) -> list[list[int]]:
    """Draft as many tokens as `lengths` says after the newest token of each slot.

    A token is sampled with the target's noise for its position, so that it equals the target's token where
    the logits agree.

    hidden: the draft's output [H] for each slot's newest token. logits_of: gives logits [M, vocab_size] fp32
    over the target's vocabulary, of outputs [M, H].
    """
    drafts: list[list[int]] = [[] for _ in slots]
    outputs = list(hidden)
    active = [index for index, length in enumerate(lengths) if length > 0]
    while active:
        stacked = torch.stack([outputs[index] for index in active])
        owners = [slots[index] for index in active]
        positions = [slots[index].length + len(drafts[index]) for index in active]
        tokens = choose(logits_of(stacked), [slot.sampling for slot in owners], positions).tolist()
        for index, token in zip(active, tokens, strict=True):
            drafts[index].append(token)
        continued = [n for n, index in enumerate(active) if len(drafts[index]) < lengths[index]]
        if not continued:
            break

        active = [active[n] for n in continued]
        output = advance(
            stacked[continued],
            [drafts[index][-1] for index in active],
            [slots[index] for index in active],
            [len(drafts[index]) for index in active],
        )
        for n, index in enumerate(active):
            outputs[index] = output[n]

    return drafts


def choose_drafts(
    slots: Sequence[Slot], outputs: Sequence[Tensor], logits_of: Callable[[Tensor], Tensor]
) -> list[list[int]]:
    """Choose all tokens of drafts at once, as `draft_chains` chooses one. outputs: [number of tokens, H] of
    each slot, the output that predicts the token after its newest one first."""
    lengths = [len(output) for output in outputs]
    if not sum(lengths):
        return [[] for _ in slots]

    rows = [(slot, j) for slot, length in zip(slots, lengths, strict=True) for j in range(length)]
    positions = [slot.length + j for slot, j in rows]
    tokens = choose(logits_of(torch.cat(tuple(outputs))), [slot.sampling for slot, _ in rows], positions)
    return [part.tolist() for part in tokens.split(lengths)]


class _GrowingTree:
    """A tree that grows after a slot's newest token.

    outputs:    the draft's output [N, H] for the nodes of the frontier.
    key_slots:  cache slots of the nodes that the draft has computed, in the order of computing.
    """

    def __init__(self, slot: Slot, tree: TreeGrowth, outputs: Tensor) -> None:
        self.slot, self.tree, self.outputs = slot, tree, outputs
        self.key_slots: list[int] = []


class TreeGrower:
    """Drafts trees of a shape.

    The node of depth d combines the draft's output for its parent with its own token, at the RoPE position
    that it has in a chain. Its keys and values are kept only while the tree grows, in cache slots from
    `first_slot` on; those of accepted tokens are computed again from the target's features.
    """

    def __init__(
        self,
        draft: DraftDecoder,
        cache: KVCache,
        shape: StaticTree | DynamicTree,
        first_slot: int,
        vocab_size: int,
    ) -> None:
        self._draft, self._cache, self._shape = draft, cache, shape
        self._first_slot, self._vocab_size = first_slot, vocab_size

    def grow(
        self, slots: Sequence[Slot], hidden: Sequence[Tensor], limits: Sequence[DraftLimit]
    ) -> list[Draft]:
        """A tree for each slot, from the draft's output [H] for its newest row."""
        growing = [
            _GrowingTree(slot, self._growth(limit), output[None])
            for slot, limit, output in zip(slots, limits, hidden, strict=True)
        ]
        free_slots = count(self._first_slot)
        active = [each for each in growing if each.tree.num_candidates]
        depth = 0
        while active:
            outputs = torch.cat([each.outputs for each in active])
            self._expand(active, outputs, depth)
            active = self._compute(active, outputs, depth, free_slots)
            depth += 1

        return [each.tree.draft() for each in growing]

    def _expand(self, active: Sequence[_GrowingTree], outputs: Tensor, depth: int) -> None:
        """Add candidates after the nodes of all frontiers, which are `depth` deep, from their outputs [N,
        H]."""
        owners = [each for each in active for _ in range(len(each.outputs))]
        token_ids, logprobs = rank(
            target_logits(self._draft, outputs, self._vocab_size),
            [each.slot.sampling for each in owners],
            [each.slot.length + depth for each in owners],
            max(each.tree.num_candidates for each in active),
        )
        first = 0
        for each in active:
            end = first + len(each.outputs)
            each.tree.expand(token_ids[first:end], logprobs[first:end])
            first = end

    def _compute(
        self, active: Sequence[_GrowingTree], outputs: Tensor, depth: int, free_slots: Iterator[int]
    ) -> list[_GrowingTree]:
        """Compute the nodes of the new frontiers from the outputs [N, H] of the ones before, and return the
        trees that have any."""
        rows: list[TreeRows] = []
        parents: list[int] = []
        tokens: list[int] = []
        first = 0
        for each in active:
            nodes, position = each.tree.frontier, each.slot.length - 1 + depth
            parents += [first + node.parent_index for node in nodes]
            tokens += [node.token_id for node in nodes]
            first += len(each.outputs)
            if nodes:
                each.key_slots += [next(free_slots) for _ in nodes]
                seen = [node.rows for node in nodes]
                table, positions = each.slot.block_table, [position] * len(nodes)
                rows.append(TreeRows(table, each.slot.length - 1, positions, each.key_slots, seen))
        if not rows:
            return []

        batch = TreeAttentionBatch(rows, self._cache, slot_offset=DRAFT_KV_OFFSET)
        inputs = torch.tensor(tokens, dtype=torch.int64, device=outputs.device)
        computed = self._draft.forward(outputs[parents], inputs, batch, self._cache)
        grown = [each for each in active if each.tree.frontier]
        for each, part in zip(grown, computed.split([row.num_rows for row in rows]), strict=True):
            each.outputs = part

        return grown

    def _growth(self, limit: DraftLimit) -> TreeGrowth:
        shape = self._shape
        if isinstance(shape, StaticTree):
            return StaticGrowth(rank_tree(shape.paths), limit)

        return DynamicGrowth(shape.top_k, shape.depth, limit)


def max_draft_rows(shape: StaticTree | DynamicTree) -> int:
    """The most rows that the draft computes for the trees of a round."""
    return max(
        number * shape.num_draft_rows(min(max_batch_drafts(number), shape.num_draft_tokens))
        for number in range(1, MAX_TREE_ROWS + 1)
    )


def target_logits(draft: DraftDecoder | DFlashDecoder, hidden: Tensor, vocab_size: int) -> Tensor:
    """The draft's logits [M, vocab_size] fp32 over the target's vocabulary; -inf for tokens that it does not
    have."""
    logits = torch.full((len(hidden), vocab_size), -torch.inf, dtype=torch.float32, device=hidden.device)
    logits[:, draft.target_ids] = draft.logits(hidden)
    return logits


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


@runtime_checkable
class ReadsTarget(Protocol):
    """A drafter that reads keys and values of the target."""

    def read_from(self, cache: KVCache) -> None:
        """Take the target's KV cache, before any sequence enters."""


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
        """Tokens one after another, or those of a parallel head in one pass, as many as given for each
        slot."""
        hidden = [output for slot in slots if (output := state_of(slot).hidden) is not None]
        if self._draft.mask_feature is not None:
            outputs = self._masked(slots, hidden, lengths, self._draft.mask_feature)
            return choose_drafts(slots, outputs, self._logits)

        return draft_chains(slots, hidden, lengths, self._logits, self._advance)

    def _masked(
        self, slots: Sequence[Slot], hidden: Sequence[Tensor], lengths: Sequence[int], feature: Tensor
    ) -> list[Tensor]:
        """The outputs [length, H] of a parallel head: that of each slot's newest row, and those of rows with
        masks behind it."""
        counts = [max(length - 1, 0) for length in lengths]
        rows = [
            SequenceRows(slot.block_table, slot.length - 1, count)
            for slot, count in zip(slots, counts, strict=True)
            if count
        ]
        number = sum(counts)
        masks = hidden[0].new_empty(0, len(hidden[0]))
        if rows:
            token_id = self._draft.config.mask_token_id
            assert token_id is not None
            masks = self._forward(feature.expand(number, -1), [token_id] * number, rows)
        return [
            torch.cat((newest[None], part))[:length]
            for newest, part, length in zip(hidden, masks.split(counts), lengths, strict=True)
        ]

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


class DFlashDrafter:
    """Drafts with a DFlash head: all tokens in one pass, of as many masks as the head was trained with. What
    it proposes does not depend on how many of them are verified.

    Keys and values of a position lie at its KV slot in the sequence's blocks, and depend on the tokens up to
    it alone: a prefix hit covers both models, and there is no state beside them.
    """

    max_tree_rows = 0

    def __init__(self, draft: DFlashDecoder, limits: ExecutorLimits) -> None:
        self.aux_layers: Sequence[int] = draft.aux_layers
        self._draft = draft
        self._vocab_size = limits.vocab_size
        self._cache = draft.empty_kv_cache(limits.num_blocks, limits.block_size)

    def enter(self, slot: Slot, cached_token_ids: Sequence[int]) -> None:
        pass

    def draft_extend(self, spans: Sequence[Span], aux_hidden: Sequence[Tensor], hidden: Tensor) -> None:
        rows = [
            SequenceRows(span.slot.block_table, span.start, len(span.next_token_ids))
            for span in spans
            if span.next_token_ids
        ]
        if not rows:
            return

        taken = [row for span in spans for row in span.rows[: len(span.next_token_ids)]]
        features = self._draft.features([each[taken] for each in aux_hidden])
        self._draft.store(features, AttentionBatch(rows, self._cache), self._cache)

    def propose(self, slots: Sequence[Slot], limits: Sequence[DraftLimit]) -> list[Draft]:
        drafts = [Draft.chain(()) for _ in slots]
        indices = [index for index, limit in enumerate(limits) if limit.chain_length]
        if not indices:
            return drafts

        config, owners = self._draft.config, [slots[index] for index in indices]
        size = 1 + config.num_masks
        rows = [SequenceRows(slot.block_table, slot.length - 1, size) for slot in owners]
        batch = ParallelAttentionBatch(rows, self._cache, is_causal=config.is_causal)
        masks = [config.mask_token_id] * config.num_masks
        tokens = [token for slot in owners for token in (slot.last_token, *masks)]
        inputs = torch.tensor(tokens, dtype=torch.int64, device=self._draft.device)
        outputs = self._draft.forward(inputs, batch, self._cache).split(size)
        taken = [
            output[1 : 1 + limits[index].chain_length] for index, output in zip(indices, outputs, strict=True)
        ]
        for index, chosen in zip(indices, choose_drafts(owners, taken, self._logits), strict=True):
            drafts[index] = Draft.chain(chosen)

        return drafts

    def _logits(self, hidden: Tensor) -> Tensor:
        return target_logits(self._draft, hidden, self._vocab_size)


class AssistantState:
    """The state of an assistant in a slot.

    feature: the target's output [H] of the last token that it has computed; None before the first.
    """

    __slots__ = ("feature",)

    def __init__(self) -> None:
        self.feature: Tensor | None = None


class AssistantDrafter:
    """Drafts with an assistant, which attends to keys and values of the target and keeps none.

    All rows of a draft are at the position of the newest token, and see the target's keys before it. Beside
    them a draft depends on one output of the target, so there is nothing to compute after a prefix hit.
    """

    aux_layers: Sequence[int] = ()
    max_tree_rows = 0

    def __init__(self, draft: AssistantDecoder, target: Decoder) -> None:
        self._draft, self._target = draft, target
        self._cache: KVCache | None = None

    def read_from(self, cache: KVCache) -> None:
        self._cache = cache

    def enter(self, slot: Slot, cached_token_ids: Sequence[int]) -> None:
        slot.draft = AssistantState()

    def draft_extend(self, spans: Sequence[Span], aux_hidden: Sequence[Tensor], hidden: Tensor) -> None:
        spans = [span for span in spans if span.next_token_ids]
        if not spans:
            return

        last = [span.rows[len(span.next_token_ids) - 1] for span in spans]
        features = self._target.final_normed(hidden[last])
        for span, feature in zip(spans, features, strict=True):
            assistant_state_of(span.slot).feature = feature

    def propose(self, slots: Sequence[Slot], limits: Sequence[DraftLimit]) -> list[Draft]:
        drafts = [Draft.chain(()) for _ in slots]
        # A slot that decodes has taken part in a step before.
        features = [assistant_state_of(slot).feature for slot in slots]
        taken = [
            (index, feature)
            for index, feature in enumerate(features)
            if feature is not None and limits[index].chain_length
        ]
        if not taken:
            return drafts

        owners = [slots[index] for index, _ in taken]
        first = self._forward(
            torch.stack([feature for _, feature in taken]), [slot.last_token for slot in owners], owners
        )
        lengths = [limits[index].chain_length for index, _ in taken]
        chains = draft_chains(owners, list(first), lengths, self._draft.logits, self._advance)
        for (index, _), tokens in zip(taken, chains, strict=True):
            drafts[index] = Draft.chain(tokens)

        return drafts

    def _advance(
        self, outputs: Tensor, tokens: Sequence[int], slots: Sequence[Slot], num_drafted: Sequence[int]
    ) -> Tensor:
        return self._forward(self._draft.next_features(outputs), tokens, slots)

    def _forward(self, features: Tensor, tokens: Sequence[int], slots: Sequence[Slot]) -> Tensor:
        """The outputs [N, hidden] of a row for each slot, for features [N, H] and the tokens after them."""
        assert self._cache is not None
        rows = [
            SequenceRows(slot.block_table, slot.length - 2, 1, slot.window_table or None) for slot in slots
        ]
        token_ids = torch.tensor(tokens, dtype=torch.int64, device=features.device)
        return self._draft.forward(features, token_ids, NewestRows(rows, self._cache), self._cache)


def assistant_state_of(slot: Slot) -> AssistantState:
    """The state that an AssistantDrafter keeps for a slot."""
    assert isinstance(slot.draft, AssistantState)
    return slot.draft


class ModelState:
    """The state of a small model in a slot.

    num_rows: tokens of the sequence whose keys and values it has, from the first on.
    hidden:   its output for the newest token, [H]; None before the first step.
    """

    __slots__ = ("hidden", "num_rows")

    def __init__(self) -> None:
        self.num_rows: int = 0
        self.hidden: Tensor | None = None


class ModelDrafter:
    """Drafts with a small model of the target's vocabulary.

    Keys and values of a token lie at its position in the sequence's blocks, as those of the target do, but
    they are computed one step earlier: together with the tokens of a step, the newest of which the target has
    not computed yet. So its output for the newest token is known when the next round begins, and drafting K
    tokens takes K - 1 passes of one row. The draft's KV of a block depends only on the tokens of the block
    and of those before it, and a prefix hit covers both models.
    """

    aux_layers: Sequence[int] = ()
    max_tree_rows = 0

    def __init__(self, draft: Decoder, limits: ExecutorLimits) -> None:
        self._draft = draft
        self._cache = draft.empty_kv_cache(limits.num_blocks, limits.block_size)

    def enter(self, slot: Slot, cached_token_ids: Sequence[int]) -> None:
        slot.draft = ModelState()

    def draft_extend(self, spans: Sequence[Span], aux_hidden: Sequence[Tensor], hidden: Tensor) -> None:
        spans = [span for span in spans if span.next_token_ids]
        if not spans:
            return

        tokens: list[int] = []
        rows: list[SequenceRows] = []
        for span in spans:
            state = model_state_of(span.slot)
            # The token at `start` was the newest one before, and was computed then, unless the sequence
            # begins with it or a prefix hit ends before it.
            is_known = state.num_rows > span.start
            new = span.next_token_ids if is_known else (span.token_id, *span.next_token_ids)
            end = span.start + 1 + len(span.next_token_ids)
            tokens.extend(new)
            rows.append(SequenceRows(span.slot.block_table, end - len(new), len(new)))
            state.num_rows = end

        for span, output in zip(spans, self._forward(tokens, rows), strict=True):
            model_state_of(span.slot).hidden = output

    def propose(self, slots: Sequence[Slot], limits: Sequence[DraftLimit]) -> list[Draft]:
        hidden = [output_of(slot) for slot in slots]
        lengths = [limit.chain_length for limit in limits]
        chains = draft_chains(slots, hidden, lengths, self._draft.logits, self._advance)
        return [Draft.chain(tokens) for tokens in chains]

    def _advance(
        self, outputs: Tensor, tokens: Sequence[int], slots: Sequence[Slot], num_drafted: Sequence[int]
    ) -> Tensor:
        rows = [
            SequenceRows(slot.block_table, slot.length - 1 + number, 1)
            for slot, number in zip(slots, num_drafted, strict=True)
        ]
        return self._forward(tokens, rows)

    def _forward(self, tokens: Sequence[int], rows: Sequence[SequenceRows]) -> Tensor:
        """The model's output [len(rows), H] for the last token of each sequence."""
        token_ids = torch.tensor(tokens, dtype=torch.int64, device=self._draft.device)
        batch, last = AttentionBatch(rows, self._cache), LastRows.of(rows, [1] * len(rows))
        return self._draft.forward(token_ids, batch, self._cache, last=last)[0]


def output_of(slot: Slot) -> Tensor:
    """The model's output [H] for the newest token. A slot that decodes has taken part in a step before."""
    output = model_state_of(slot).hidden
    assert output is not None
    return output


def model_state_of(slot: Slot) -> ModelState:
    """The state that a ModelDrafter keeps for a slot."""
    assert isinstance(slot.draft, ModelState)
    return slot.draft


class HybridState:
    """The state of n-grams in a slot.

    score:  see `execution.ngram_history`.
    drafts: the n-gram and the model's tokens of the latest round; None if one of them had no draft.
    """

    __slots__ = ("drafts", "history", "score")

    def __init__(self, history: NGramHistory) -> None:
        self.history: NGramHistory = history
        self.score: int = 0
        self.drafts: tuple[Sequence[int], Sequence[int]] | None = None


class HybridDrafter:
    """Chains of a draft model, or n-grams in their place. The model drafts for every slot and is updated with
    the tokens of every step, whatever was taken."""

    max_tree_rows = 0

    def __init__(self, model: Drafter, min_length: int, max_length: int) -> None:
        """min_length, max_length: see `NGram`."""
        self._model, self._lengths = model, (min_length, max_length)
        self.aux_layers: Sequence[int] = model.aux_layers

    def read_from(self, cache: KVCache) -> None:
        if isinstance(self._model, ReadsTarget):
            self._model.read_from(cache)

    def enter(self, slot: Slot, cached_token_ids: Sequence[int]) -> None:
        state = slot.ngrams = HybridState(NGramHistory(*self._lengths))
        state.history.extend(cached_token_ids)
        self._model.enter(slot, cached_token_ids)

    def draft_extend(self, spans: Sequence[Span], aux_hidden: Sequence[Tensor], hidden: Tensor) -> None:
        for span in spans:
            state = hybrid_state_of(span.slot)
            tokens = (span.token_id, *span.next_token_ids)
            state.history.extend(tokens[len(state.history) - span.start :])
            if state.drafts is not None:
                counts = [num_right(draft, span.next_token_ids) for draft in state.drafts]
                state.score = next_score(state.score, *counts)
                state.drafts = None
        self._model.draft_extend(spans, aux_hidden, hidden)

    def propose(self, slots: Sequence[Slot], limits: Sequence[DraftLimit]) -> list[Draft]:
        drafts = self._model.propose(slots, limits)
        for index, (slot, limit) in enumerate(zip(slots, limits, strict=True)):
            state = hybrid_state_of(slot)
            ngram = state.history.propose(limit.chain_length)
            state.drafts = (ngram, drafts[index].token_ids) if ngram else None
            if ngram and state.score >= 0:
                drafts[index] = Draft.chain(ngram, is_ngram=True)

        return drafts


def hybrid_state_of(slot: Slot) -> HybridState:
    """The state that a HybridDrafter keeps for a slot."""
    assert isinstance(slot.ngrams, HybridState)
    return slot.ngrams
