"""Drafters inside the graphs of rounds: their interfaces, small models, assistants and n-grams."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from msgspec import Struct
from msgspec.structs import replace
from torch import Tensor

from drift_sdk._kernels.attention.prefill import prefill_attention_config
from drift_sdk._kernels.draft.draft_choose import choose_drafts, keep_best_clusters, num_draft_chunks
from drift_sdk._kernels.draft.draft_rows import (
    chunk_rows,
    draft_tiles,
    keep_last_rows,
    num_draft_tiles,
    round_rows,
)
from drift_sdk._kernels.draft.ngrams import (
    append_history,
    num_searchers,
    propose_ngrams,
    score_ngrams,
    search_ngrams,
    take_ngrams,
)
from drift_sdk._kernels.launch.launch_order import note_library_kernel
from drift_sdk._kernels.layers.norm import add_norm, embed_norm
from drift_sdk._kernels.trees.tree_rows import RootTensors
from drift_sdk.execution.device.memory import Workspace
from drift_sdk.execution.device.slot_table import SlotTable
from drift_sdk.execution.device.stages import NO_STAGE_MARKS, StageMarks
from drift_sdk.execution.forward.attention import AttentionGroups, FastChunkAttention, SequenceAttention
from drift_sdk.execution.forward.caches import DraftKVCache, ModelResources, PagedKVCache
from drift_sdk.execution.forward.forward_pass import ForwardPass, ResidualStream, exact_pass, fast_pass
from drift_sdk.execution.forward.products import ExactProducts, multiply_head
from drift_sdk.execution.forward.rows import HiddenStates, LayerBuffers, Rows
from drift_sdk.execution.ngram_history import SCORE_SHIFT, SCORE_UNIT
from drift_sdk.models.assistant import AssistantDecoder
from drift_sdk.models.decoder import Decoder
from drift_sdk.quantised.weight import dense
from drift_sdk.speculation import TreePlan


class RoundSizes(Struct, frozen=True, kw_only=True):
    """Sizes of the largest steps that a drafter takes part in.

    max_num_slots: of a round. max_draft_tokens: of a round of chains. max_prefill_rows: of a prefill step.
    max_path_length: most drafts on a path of a tree. max_path_rows: most rows on accepted paths of a round of
    trees. max_growth_rows: most rows that the draft computes to grow the trees of a round. 0 without trees.
    """

    max_num_slots: int
    max_draft_tokens: int
    max_prefill_rows: int
    max_path_length: int = 0
    max_path_rows: int = 0
    max_growth_rows: int = 0


class VerifiedRows(Struct, frozen=True, kw_only=True):
    """The rows of a round of B slots, T of each, which the target has computed and sampled.

    rows [B * T]: as they were drafted. hidden: their residual stream. chosen [B * T] int32: the token sampled
    after each row. emitted [B] int32: how many of them each slot emitted, from its first row on; 0 for a slot
    of padding.
    """

    rows: Rows
    hidden: HiddenStates
    chosen: Tensor
    emitted: Tensor

    @property
    def num_slots(self) -> int:
        return self.emitted.shape[0]

    @property
    def num_draft_tokens(self) -> int:
        """Most drafts of a slot."""
        return self.chosen.shape[0] // self.num_slots - 1


class ComputedChunks(Struct, frozen=True, kw_only=True):
    """The rows of chunks of prompts that the target has computed. A slot's rows lie together.

    rows [N]: padding rows have slot -1. hidden: their residual stream. next_token [N] int32: the token after
    each row; -1: the sampled token, the slot's last_token [S]. hits [C] int32, C at least the number of
    chunks: the first row of each chunk whose predecessor was computed by no step, because it came from the
    prefix cache; -1: none.
    """

    rows: Rows
    hidden: HiddenStates
    next_token: Tensor
    hits: Tensor
    last_token: Tensor


class RoundDrafter(Protocol):
    """A drafter of the graph executor. Every method records kernels that read all they need from the device.

    A round of B slots with K drafts each has T = K + 1 rows a slot: row b * T holds the newest token, the
    rows after it hold the drafts. A row that its slot has no use for has slot -1.

    aux_layers: the target's layer boundaries whose residual stream the drafter reads, low to high.
    """

    aux_layers: Sequence[int]

    @property
    def is_ngram(self) -> Tensor | None:
        """int32, an entry for each slot of the largest round: 1 if the latest drafts of the round's slot are
        n-grams in place of a draft model's. None if the drafter has one kind of drafts."""

    @property
    def kv_cache(self) -> DraftKVCache | PagedKVCache | None:
        """Keys and values of the draft in the target's blocks; None if the drafter keeps none. The executor
        allocates them together with the target's."""

    def propose(self, rows: Rows, *, num_slots: int, num_draft_tokens: int) -> None:
        """Write drafted tokens to rows.token [B * T]. The slot of a row without a draft becomes -1."""

    def draft_extend(self, verified: VerifiedRows) -> None:
        """Update the drafter's state by the tokens that a round emitted."""

    def draft_extend_prefill(self, chunks: ComputedChunks) -> None:
        """Update the drafter's state by chunks of prompts."""


class TreeDrafter(Protocol):
    """A drafter of trees. Every method records kernels that read all they need from the device.

    A round of B trees with K drafts each has T = K + 1 rows a tree: row b * T holds the newest token of its
    slot, the rows after it hold the other nodes, a parent before its children. A row without a node has slot
    -1.

    plans: by K, of the rounds that draft trees.
    """

    plans: Mapping[int, TreePlan]

    @property
    def first_draft_slot(self) -> int:
        """The first cache slot of the draft behind its blocks, for nodes of trees."""

    def grow(self, rows: RootTensors, plan: TreePlan) -> None:
        """Write the nodes of trees to slot, token and parent of rows, which hold the roots."""

    def extend(self, rows: RootTensors, plan: TreePlan, verified: VerifiedRows, path: Tensor) -> None:
        """Update the drafter's state by the tokens that a round emitted. path [B, PATH_ENTRIES] int32: the
        nodes that tokens were emitted behind, then -1."""


class DraftChoice:
    """Chooses drafts from logits, by the temperature and the seed of their slots."""

    def __init__(self, token_ids: Tensor, table: SlotTable, workspace: Workspace, name: str) -> None:
        """token_ids [D] int32, ascending: the target's id of each token of the draft. name: of the drafter,
        which its buffers begin with."""
        self._token_ids, self._columns = token_ids, table.columns
        self._workspace, self._name = workspace, name

    def choose(self, logits: Tensor, rows: Rows, next_rows: Rows, *, depth: int, num_depths: int = 1) -> None:
        """Write the drafts of a depth, and of the num_depths - 1 behind it, to `rows.token` [B * T].

        logits: [N, D] or partial sums of them, N = B * num_depths. next_rows [N]: written; see
        `choose_drafts`.
        """
        num_tokens, vocab_size = logits.shape[-2:]
        shape = num_tokens, num_draft_chunks(vocab_size)
        choose_drafts(
            logits,
            self._token_ids,
            rows.slot,
            rows.token,
            rows.position,
            self._columns.temperature,
            self._columns.seed,
            (
                self._workspace.take(f"{self._name}_chunk_value", shape, torch.float32),
                self._workspace.take(f"{self._name}_chunk_token", shape, torch.int32),
            ),
            (next_rows.slot, next_rows.token, next_rows.position),
            depth=depth,
            num_depths=num_depths,
        )


class ModelRoundDrafter:
    """A `RoundDrafter` that computes what `ModelDrafter` does, for slots and rows known only to the device.

    kv_cache: the small model's keys and values, in the target's blocks.
    """

    aux_layers: Sequence[int] = ()
    is_ngram: Tensor | None = None

    def __init__(
        self,
        draft: Decoder,
        target: ModelResources,
        table: SlotTable,
        workspace: Workspace,
        sizes: RoundSizes,
        *,
        stages: StageMarks = NO_STAGE_MARKS,
    ) -> None:
        """sizes: of the largest round and the largest prefill step."""
        # All of its layers use the blocks of layers that keep all tokens.
        limits, spec = replace(target.limits, num_window_blocks=0), draft.spec
        self.kv_cache = PagedKVCache(draft, limits)
        self._model = ModelResources(decoder=draft, cache=self.kv_cache, tuned=target.tuned, limits=limits)
        self._table, self._workspace, self._stages = table, workspace, stages
        self._attention = AttentionGroups.of_model(
            self._model,
            workspace,
            table.block_table,
            num_sequences=sizes.max_num_slots,
            num_rows=sizes.max_draft_tokens + 1,
        )
        self._prefill = prefill_attention_config(spec.max_head_dim, draft.dtype)
        # A prefill step has one more row for each chunk that begins a sequence or follows a prefix hit.
        most = max(
            sizes.max_num_slots * (sizes.max_draft_tokens + 1), sizes.max_prefill_rows + limits.max_num_seqs
        )
        self._hidden = HiddenStates.take(workspace, "draft_model", draft, most, ())
        shape = (limits.max_num_seqs, spec.hidden_size)
        self._outputs = torch.empty(shape, dtype=draft.dtype, device=draft.device)  # of newest tokens
        token_ids = torch.arange(spec.vocab_size, dtype=torch.int32, device=draft.device)
        self._choice = DraftChoice(token_ids, table, workspace, "draft_model")

    def propose(self, rows: Rows, *, num_slots: int, num_draft_tokens: int) -> None:
        if num_draft_tokens == 0:
            return

        drafted = self._take_rows(num_slots)
        drafted.slot.copy_(rows.slot.view(num_slots, num_draft_tokens + 1)[:, 1])
        note_library_kernel(drafted.slot)
        hidden = self._hidden.first(num_slots)
        normed = LayerBuffers.take(self._workspace, self._model.decoder, num_slots).normed
        with self._stages("draft_lm_head"):
            stream = ResidualStream(self._model.decoder, hidden, normed)
            stream.gather(self._outputs, drafted.slot, drafted.slot)
        for depth in range(1, num_draft_tokens + 1):
            with self._stages("draft_lm_head"):
                self._choose(normed, rows, drafted, depth)
            if depth < num_draft_tokens:
                with self._stages("draft_model"):
                    forward = self._few_rows(drafted, hidden, 1)
                    forward.run()
                normed = forward.normed

    def draft_extend(self, verified: VerifiedRows) -> None:
        # The rows of emitted tokens: the round's rows, one position further.
        rows, num_rows = verified.rows, verified.chosen.shape[0]
        new = self._take_rows(num_rows)
        out = (new.slot, new.token, new.position)
        round_rows(rows.slot, rows.position, verified.chosen, verified.emitted, out)
        states = self._hidden.first(num_rows)
        self._few_rows(new, states, verified.num_draft_tokens + 1).run()
        keep_last_rows(new.slot, states.final, self._outputs)

    def draft_extend_prefill(self, chunks: ComputedChunks) -> None:
        rows, hits = chunks.rows, chunks.hits
        num_rows, num_hits = rows.slot.shape[0], hits.shape[0]
        new = self._take_rows(num_rows + num_hits)
        out = (new.slot, new.token, new.position)
        after = (chunks.next_token, hits, chunks.last_token)
        chunk_rows(rows.slot, rows.token, rows.position, *after, out)
        tile_rows = self._prefill.tile_rows
        num_tiles = num_draft_tiles(num_rows, num_hits, tile_rows)
        tiles = self._workspace.take("draft_model_tiles", (num_tiles, 4), torch.int32)
        draft_tiles(new.slot, new.position, tiles, num_single=num_hits, tile_rows=tile_rows)
        states, block_table = self._hidden.first(num_rows + num_hits), self._table.block_table
        attention = FastChunkAttention(tiles, self._prefill)
        fast_pass(self._model, new, block_table, self._workspace, attention, states).run()
        keep_last_rows(new.slot[:num_rows], states.final[:num_rows], self._outputs)

    def _choose(self, normed: Tensor, rows: Rows, drafted: Rows, depth: int) -> None:
        """Choose the drafts of a depth from the normalised outputs [B, H] for the tokens before them."""
        draft, shape = self._model.decoder, (1, len(normed), self._model.decoder.spec.vocab_size)
        logits = self._workspace.take("draft_model_logits", shape, torch.float32)
        multiply_head(normed, draft.weights.head, logits[0], self._model.tuned, draft.spec.logits_cap)
        self._choice.choose(logits, rows, drafted, depth=depth)

    def _few_rows(self, rows: Rows, hidden: HiddenStates, rows_per_slot: int) -> ForwardPass:
        """The forward pass of `rows_per_slot` rows of each slot."""
        attention = SequenceAttention(self._attention, rows.planned(rows_per_slot))
        return exact_pass(self._model, rows, self._table.block_table, self._workspace, attention, hidden)

    def _take_rows(self, num_rows: int) -> Rows:
        """Uninitialised rows of the small model."""
        return Rows.take(self._workspace, num_rows, "draft_model_")


class AssistantRoundDrafter:
    """A `RoundDrafter` that computes what `AssistantDrafter` does, for slots and rows known only to the
    device.

    It reads the target's keys and values, and keeps the target's residual stream of the last token of each
    slot that has been computed.
    """

    aux_layers: Sequence[int] = ()
    is_ngram: Tensor | None = None
    kv_cache: DraftKVCache | PagedKVCache | None = None

    def __init__(
        self,
        draft: AssistantDecoder,
        target: ModelResources,
        table: SlotTable,
        workspace: Workspace,
        sizes: RoundSizes,
        *,
        stages: StageMarks = NO_STAGE_MARKS,
    ) -> None:
        """sizes: of the largest round."""
        self._draft, self._target = draft, target.decoder
        self._model = replace(target, decoder=draft.layers)  # its layers read the target's cache
        self._table, self._workspace, self._stages = table, workspace, stages
        self._attention = AttentionGroups.of_model(
            self._model, workspace, table.block_table, num_sequences=sizes.max_num_slots, num_rows=1
        )
        shape = (target.limits.max_num_seqs, draft.config.target_hidden_size)
        self._streams = torch.empty(shape, dtype=draft.dtype, device=draft.device)
        self._vocab_size = draft.config.shape.vocab_size
        token_ids = torch.arange(self._vocab_size, dtype=torch.int32, device=draft.device)
        self._choice = DraftChoice(token_ids, table, workspace, "assistant")

    def propose(self, rows: Rows, *, num_slots: int, num_draft_tokens: int) -> None:
        if num_draft_tokens == 0:
            return

        newest = self._newest_rows(rows, num_slots, num_draft_tokens)
        before = self._take("before", num_slots)
        torch.sub(newest.position, 1, out=before)
        note_library_kernel(before)
        # A row stands at the newest token and sees the keys before it, all rows of a round the same.
        attention = SequenceAttention(self._attention, replace(newest, position=before).planned(1))
        hidden = HiddenStates.take(self._workspace, "assistant", self._draft.layers, num_slots, ())
        block_table = self._table.block_table
        forward = exact_pass(self._model, newest, block_table, self._workspace, attention, hidden)
        attention.plan()
        self._load(newest)
        drafted = Rows(slot=self._take("slot", num_slots), token=newest.token, position=newest.position)
        drafted.slot.copy_(newest.slot)
        note_library_kernel(drafted.slot)
        for depth in range(1, num_draft_tokens + 1):
            with self._stages("draft_model"):
                self._embed(drafted)
                self._begin(forward)
                forward.run_layers()
            with self._stages("draft_lm_head"):
                self._choose(forward.normed, rows, drafted, depth)
            if depth < num_draft_tokens:
                with self._stages("draft_model"):
                    self._hand_on(forward.normed)

    def draft_extend(self, verified: VerifiedRows) -> None:
        rows, num_rows = verified.rows, verified.chosen.shape[0]
        slot, token, position = (
            self._take(f"extend_{name}", num_rows) for name in ("slot", "token", "position")
        )
        round_rows(rows.slot, rows.position, verified.chosen, verified.emitted, (slot, token, position))
        keep_last_rows(slot, verified.hidden.final, self._streams)

    def draft_extend_prefill(self, chunks: ComputedChunks) -> None:
        keep_last_rows(chunks.rows.slot, chunks.hidden.final, self._streams)

    def _newest_rows(self, rows: Rows, num_slots: int, num_draft_tokens: int) -> Rows:
        """The rows of newest tokens, of slot -1 where nothing is drafted."""
        newest = Rows(*(self._take(name, num_slots) for name in ("newest_slot", "token", "position")))
        sources = (rows.slot, 1), (rows.token, 0), (rows.position, 0)
        for own, (source, row) in zip((newest.slot, newest.token, newest.position), sources, strict=True):
            own.copy_(source.view(num_slots, num_draft_tokens + 1)[:, row])
            note_library_kernel(own)
        return newest

    def _inputs(self, num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """Embeddings and features of rows [num_rows, 2 * H], and either part of them, [num_rows, H]."""
        width, dtype = self._draft.config.target_hidden_size, self._draft.dtype
        both = self._workspace.take("assistant_inputs", (num_rows, 2 * width), dtype)
        return both, both[:, :width], both[:, width:]

    def _load(self, newest: Rows) -> None:
        """Load the target's output of the token before each row's as its feature."""
        features = self._inputs(len(newest.slot))[2]
        self._look_up(newest.slot, newest.slot, self._streams, self._scratch(features), features, 1.0)

    def _embed(self, drafted: Rows) -> None:
        """Load the target's embeddings of tokens."""
        target = self._target
        embedded = self._inputs(len(drafted.slot))[1]
        table, multiplier = dense(target.weights.embedding), target.embedding_multiplier
        self._look_up(drafted.token, drafted.slot, table, embedded, self._scratch(embedded), multiplier)

    def _look_up(
        self, row: Tensor, slot: Tensor, table: Tensor, hidden: Tensor, normed: Tensor, multiplier: float
    ) -> None:
        """Fill hidden and normed [B, H] with rows of a table, multiplied, and what the target's norm makes of
        them."""
        norm, weight = self._target.spec.final_norm, self._target.weights.final_norm
        embed_norm(
            row,
            slot,
            table,
            weight,
            hidden,
            normed,
            eps=norm.eps,
            multiplier=multiplier,
            norm_kind=norm.kind,
        )

    def _begin(self, forward: ForwardPass) -> None:
        """Begin the stream of a pass with the projection of its inputs."""
        hidden, layer = forward.hidden_states.final, self._draft.layers.spec.layers[0]
        weights = self._draft.weights
        hidden.zero_()
        note_library_kernel(hidden)
        product = self._multiply(self._inputs(len(hidden))[0], weights.pre)
        norm, kind = weights.layers[0].mixer_norm, layer.norm.kind
        add_norm(hidden, product, norm, forward.normed, eps=layer.norm.eps, norm_kind=kind)

    def _hand_on(self, normed: Tensor) -> None:
        """Make the features of the next rows of the outputs [B, hidden]."""
        features, target = self._inputs(len(normed))[2], self._target
        features.zero_()
        note_library_kernel(features)
        product, norm = self._multiply(normed, self._draft.weights.post), target.spec.final_norm
        add_norm(
            features,
            product,
            target.weights.final_norm,
            self._scratch(features),
            eps=norm.eps,
            norm_kind=norm.kind,
        )

    def _choose(self, normed: Tensor, rows: Rows, drafted: Rows, depth: int) -> None:
        """Choose the drafts of a depth from the normalised outputs [B, hidden] for the tokens before them."""
        weights, num_slots = self._draft.weights, len(normed)
        logits = self._workspace.take("assistant_logits", (1, num_slots, self._vocab_size), torch.float32)
        multiply_head(normed, weights.head, logits[0], self._model.tuned)
        if weights.centroids is not None and weights.clusters is not None:
            scores, config = self._multiply(normed, weights.centroids), self._draft.config
            is_best = self._workspace.take("assistant_best", (num_slots, config.num_clusters), torch.int32)
            keep_best_clusters(
                logits[0], scores, weights.clusters, is_best, num_best=config.num_best_clusters
            )
        following = Rows(drafted.slot, drafted.token, self._take("next_position", num_slots))
        self._choice.choose(logits, rows, following, depth=depth)

    def _multiply(self, x: Tensor, weight: Tensor) -> Tensor:
        """Partial sums of x [B, in] by weight [out, in] transposed, valid until the next product."""
        products = ExactProducts(self._model.tuned, None, self._workspace, len(x))
        product, _ = products.multiply(x, weight, None)
        return product

    def _scratch(self, like: Tensor) -> Tensor:
        """Memory for results that nothing reads, of the shape of a part of the inputs."""
        return self._workspace.take("assistant_scratch", tuple(like.shape), like.dtype)

    def _take(self, name: str, num_rows: int) -> Tensor:
        return self._workspace.take(f"assistant_{name}", (num_rows,), torch.int32)


class NGramRoundDrafter:
    """A `RoundDrafter` that drafts the tokens that `NGramDrafter` drafts.

    history [S, max_model_len + 1] int32: the token at each position of a slot before its newest token. The
    drafter appends to it; the host writes the cached tokens of a prefix hit.
    """

    aux_layers: Sequence[int] = ()
    kv_cache: DraftKVCache | None = None
    is_ngram: Tensor | None = None

    def __init__(self, history: Tensor, workspace: Workspace, *, min_length: int, max_length: int) -> None:
        """min_length, max_length: tokens of the runs that are looked up, see `NGram`."""
        num_slots, max_num_tokens = history.shape
        self._history = history
        self._min_length, self._max_length = min_length, max_length
        shape = (num_slots, num_searchers(max_num_tokens))
        self._found = workspace.take("ngrams_found", shape, torch.int64)

    def propose(self, rows: Rows, *, num_slots: int, num_draft_tokens: int) -> None:
        if num_draft_tokens == 0:
            return

        propose_ngrams(
            rows.slot,
            rows.position,
            rows.token,
            self._history,
            self._found[:num_slots],
            rows_per_slot=num_draft_tokens + 1,
            min_length=self._min_length,
            max_length=self._max_length,
        )

    def draft_extend(self, verified: VerifiedRows) -> None:
        # An accepted row holds the token that was sampled after the row before it.
        rows = verified.rows
        append_history(rows.slot, rows.position, rows.token, self._history, emitted=verified.emitted)

    def draft_extend_prefill(self, chunks: ComputedChunks) -> None:
        rows = chunks.rows
        append_history(rows.slot, rows.position, rows.token, self._history)


class HybridRoundDrafter:
    """A `RoundDrafter` that drafts what `HybridDrafter` drafts: chains of a model, or n-grams in their place.

    The model drafts for all slots of a round and is extended by the tokens of every step, so its state does
    not depend on what was taken. kv_cache: the model's.
    """

    is_ngram: Tensor

    def __init__(
        self,
        model: RoundDrafter,
        table: SlotTable,
        workspace: Workspace,
        *,
        max_num_slots: int,
        min_length: int,
        max_length: int,
    ) -> None:
        """max_num_slots: of a round. min_length, max_length: see `NGram`."""
        self.aux_layers: Sequence[int] = model.aux_layers
        self._model, self._workspace = model, workspace
        self._history, self._score = table.history, table.ngram_score
        self._min_length, self._max_length = min_length, max_length
        self._num_searchers = num_searchers(table.history.shape[1])
        self.is_ngram = torch.zeros(max_num_slots, dtype=torch.int32, device=table.history.device)

    @property
    def kv_cache(self) -> DraftKVCache | PagedKVCache | None:
        return self._model.kv_cache

    def propose(self, rows: Rows, *, num_slots: int, num_draft_tokens: int) -> None:
        self._model.propose(rows, num_slots=num_slots, num_draft_tokens=num_draft_tokens)
        if num_draft_tokens == 0:
            return

        found = self._workspace.take("hybrid_found", (num_slots, self._num_searchers), torch.int64)
        search_ngrams(
            rows.slot,
            rows.position,
            rows.token,
            self._history,
            found,
            rows_per_slot=num_draft_tokens + 1,
            min_length=self._min_length,
            max_length=self._max_length,
        )
        take_ngrams(
            rows.slot,
            rows.position,
            rows.token,
            self._history,
            found,
            self._score,
            self._drafts(num_slots, num_draft_tokens),
            self.is_ngram[:num_slots],
        )

    def draft_extend(self, verified: VerifiedRows) -> None:
        rows, chosen, emitted = verified.rows, verified.chosen, verified.emitted
        if verified.num_draft_tokens > 0:
            drafts = self._drafts(verified.num_slots, verified.num_draft_tokens)
            score_ngrams(rows.slot, chosen, emitted, drafts, self._score, unit=SCORE_UNIT, shift=SCORE_SHIFT)
        # An accepted row holds the token that was sampled after the row before it.
        append_history(rows.slot, rows.position, rows.token, self._history, emitted=emitted)
        self._model.draft_extend(verified)

    def draft_extend_prefill(self, chunks: ComputedChunks) -> None:
        rows = chunks.rows
        append_history(rows.slot, rows.position, rows.token, self._history)
        self._model.draft_extend_prefill(chunks)

    def _drafts(self, num_slots: int, num_draft_tokens: int) -> Tensor:
        """Both drafts of a round. They last until the round has been committed, also if it is split."""
        shape = (2, num_slots, num_draft_tokens + 1)
        return self._workspace.take("hybrid_drafts", shape, torch.int32)
