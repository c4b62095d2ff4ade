"""The steps that CUDA graphs are captured from: the kernels of each kind of step, and their buffers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from drift_sdk._kernels.attention.exact_prefill import exact_prefill_config
from drift_sdk._kernels.attention.prefill import prefill_attention_config
from drift_sdk._kernels.recurrent.gated_delta import PromptRuns
from drift_sdk._kernels.sampling.logits import count_tokens
from drift_sdk._kernels.sampling.rows import SampleBuffers
from drift_sdk._kernels.slots.step_inputs import gather_rows
from drift_sdk.execution.acceptance import AcceptanceFactory
from drift_sdk.execution.device_resources import DeviceResources
from drift_sdk.execution.drafter_factory import DrafterFactory
from drift_sdk.execution.forward.attention import (
    AttentionGroups,
    ChunkAttention,
    FastChunkAttention,
    MixedAttention,
    RefreshAttention,
    RowAttention,
    SequenceAttention,
    TreeAttention,
    ViewAttention,
    Views,
)
from drift_sdk.execution.forward.caches import ModelResources
from drift_sdk.execution.forward.forward_pass import ForwardPass, ResidualStream, exact_pass, fast_pass
from drift_sdk.execution.forward.gated_delta import RecurrentRows
from drift_sdk.execution.forward.rows import HiddenStates, LayerBuffers, Rows
from drift_sdk.execution.graph.buckets import GraphBuckets, MixedBucket, round_sizes
from drift_sdk.execution.rounds.drafter import ComputedChunks, RoundDrafter, TreeDrafter
from drift_sdk.execution.rounds.round import (
    DecodeRound,
    MixedStep,
    MixedTensors,
    PartialRound,
    PromptHead,
    RefreshedRows,
    RefreshRound,
    SampleCommit,
    TreeAcceptance,
)
from drift_sdk.execution.rounds.tree_plan import TreePlan, chain_plan
from drift_sdk.execution.rounds.tree_round import ChainTreeDrafter, TreeChecks, TreeRound, TreeTensors

Step = Callable[[], None]
"""Records the kernels of a step on the current stream."""


class GraphSteps:
    """The steps of an executor, by kind and size.

    Every step starts with the kernel that reads its ring entry, so that the same graph can be launched again
    before it has ended, and ends with a kernel that moves on to the next entry.

    drafter: drafts in rounds; None without speculation. trees: drafts trees; None if drafts are chains.
    prefill_hidden: the residual stream of the latest prefill step. It is kept until the first tokens have
    been sampled from it and the drafter has read it.
    prompt_head: scores rows of prompts outside of graphs; None for a model that GPUs divide.
    attention: the plan and scratch memory of rounds.
    views: the views of partial verification; None without it.
    """

    def __init__(
        self,
        resources: DeviceResources,
        model: ModelResources,
        buckets: GraphBuckets,
        drafter_factory: DrafterFactory,
        *,
        acceptance: AcceptanceFactory | None,
    ) -> None:
        """acceptance: see `GraphOptions`. With `buckets.has_checks`, all rounds of speculation run as
        trees and are checked."""
        self._resources, self._model, self._buckets = resources, model, buckets
        workspace, max_rows = resources.workspace, buckets.max_rows
        device = resources.device.torch_device
        self._samples = SampleBuffers.allocate(max_rows, model.limits.vocab_size, device)
        self._acceptance = None if acceptance is None else acceptance(model.limits.max_num_seqs, device)
        # The step that needs most takes its attention first: the partial sums of all steps share one buffer.
        self.views: Views | None = None
        if buckets.view_layout is not None:
            self.views = Views.allocate(buckets.view_layout, model.decoder, resources.table)
            num_tiles, rows_per_tile = buckets.view_layout.refresh_tiles(self._group)
            most = buckets.refreshes[-1]
            self._refresh_attention = AttentionGroups.of_model(
                model, workspace, None, num_sequences=most * num_tiles, num_rows=rows_per_tile
            )
            self._view_attention = AttentionGroups.of_model(
                model, workspace, None, num_sequences=most, num_rows=buckets.max_chain + 1
            )
        self._tree_attention = {
            number: AttentionGroups.of_model(
                model, workspace, None, num_sequences=buckets.max_slots(number), num_rows=number + 1
            )
            for number in sorted(buckets.trees, key=lambda number: -buckets.max_slots(number) * (number + 1))
        }
        self.attention: AttentionGroups = AttentionGroups.of_model(
            model,
            workspace,
            resources.table.block_table,
            num_sequences=buckets.decode[-1],
            num_rows=buckets.max_chain + 1,
        )
        self.drafter: RoundDrafter | None = drafter_factory.round_drafter(
            resources, model, round_sizes(buckets, drafter_factory.tree_plans)
        )
        self.trees: TreeDrafter | None = drafter_factory.tree_drafter(resources, self.drafter, buckets.rounds)
        self._checked_chains: ChainTreeDrafter | None = None
        if buckets.has_checks and self.drafter is not None:
            plans = {number: chain_plan(number) for number in buckets.drafts}
            self._checked_chains = ChainTreeDrafter(self.drafter, plans)
        aux_layers = self.drafter.aux_layers if self.drafter is not None else ()
        decoder = model.decoder
        most = max(buckets.prefill[-1], buckets.most_mixed_rows)
        self.prefill_hidden: HiddenStates = HiddenStates.take(workspace, "prefill", decoder, most, aux_layers)
        self._round_hidden = HiddenStates.take(workspace, "round", decoder, max_rows, aux_layers)
        self.prompt_head: PromptHead | None = None
        if model.exchange is None:
            self.prompt_head = PromptHead(model, workspace, min(max_rows, most))

    def largest(self) -> list[Step]:
        """The largest step of each kind that needs memory. All other steps need no memory that these do not
        take."""
        buckets = self._buckets
        steps = [self.prefill(buckets.prefill[-1])]
        if self.drafter is not None:
            steps.append(self.draft_extend(buckets.prefill[-1], self.drafter))
        if buckets.refreshes and self.drafter is not None and self.views is not None:
            steps.append(self.refresh(buckets.refreshes[-1], self.drafter, self.views))
            steps.append(self.partial_round(*buckets.partial_rounds[-1], self.views))
        steps += [
            self.round(num_slots, number).whole
            for number in reversed(buckets.drafts)
            if number in (*buckets.trees, buckets.max_chain) and (num_slots := buckets.max_slots(number))
        ]
        steps += [self.mixed(bucket) for bucket in buckets.mixed if bucket.size == buckets.most_mixed_rows]
        steps.append(self.first_tokens(buckets.first_tokens[-1]))
        if self.prompt_head is not None:
            steps.append(partial(self._score_rows, self.prompt_head))
        return steps

    def _score_rows(self, head: PromptHead) -> None:
        """What is computed outside of graphs, so that its kernels are there before it is needed."""
        rows = self.prefill_hidden.first(head.num_rows).final
        head.normed(rows)
        head.logits(rows)

    def allocate_caches(self, num_blocks: int) -> None:
        """Give the KV caches of target and draft their blocks; before anything is captured."""
        self._model.cache.allocate(num_blocks)
        if self.drafter is not None and self.drafter.kv_cache is not None:
            self.drafter.kv_cache.allocate(num_blocks)

    def update(self) -> None:
        """Apply slot table updates and nothing else."""
        self._resources.payload.enter(0)
        self._resources.payload.advance()

    def prefill(self, num_rows: int) -> Step:
        """Compute chunks of `num_rows` rows in all. Payload: see `PrefillLayout`."""
        resources, buckets = self._resources, self._buckets
        payload, columns = resources.payload, resources.table.columns
        layout = buckets.prefill_layout(num_rows)
        token, slot, position = payload.words[layout.rows].view(3, num_rows)
        rows = Rows(slot=slot, token=token, position=position)
        hidden = self.prefill_hidden.first(num_rows)
        tiles = payload.words[layout.tiles].view(-1, 4)
        runs = self._runs(layout.runs, buckets.max_chunks)
        recurrent = None if runs is None else RecurrentRows(runs, num_rows)
        decoder = self._model.decoder
        head_dim = decoder.spec.attention.head_dim
        if buckets.is_exact:
            attention = ChunkAttention(tiles, exact_prefill_config(head_dim, decoder.dtype))
            forward = self._exact_forward(rows, attention, hidden, recurrent)
        else:
            block_table = resources.table.block_table
            fast = FastChunkAttention(tiles, prefill_attention_config(head_dim, decoder.dtype))
            forward = fast_pass(self._model, rows, block_table, resources.workspace, fast, hidden, recurrent)

        def step() -> None:
            payload.enter(layout.num_words)
            count_tokens(slot, token, position, columns)
            forward.run()
            payload.advance()

        return step

    def mixed(self, bucket: MixedBucket) -> Step:
        """Compute chunks and a round in one pass. Payload: see `MixedLayout`."""
        resources, buckets = self._resources, self._buckets
        layout, words = buckets.mixed_layout(bucket), resources.payload.words
        token, slot, position = words[layout.rows].view(3, bucket.size)
        tensors = MixedTensors(
            rows=Rows(slot=slot, token=token, position=position),
            slots=words[layout.slots].view(2, bucket.num_slots),
            following=words[layout.following],
            hits=words[layout.hits],
            num_chunk_rows=bucket.num_rows,
        )
        rows_per_slot = bucket.num_drafts + 1
        tiles = words[layout.tiles].view(-1, 4)
        attention = MixedAttention(
            ChunkAttention(tiles, buckets.mixed_attention(bucket)),
            SequenceAttention(self.attention, tensors.round_rows.planned(rows_per_slot)),
            bucket.num_rows,
        )
        runs = self._runs(layout.runs, buckets.mixed_chunks(bucket))
        recurrent = None if runs is None else RecurrentRows(runs, bucket.num_rows, rows_per_slot)
        hidden = self.prefill_hidden.first(bucket.size)
        forward = self._exact_forward(tensors.rows, attention, hidden, recurrent)
        sample_commit = self._sample_commit(tensors.round_rows, rows_per_slot)
        return MixedStep(resources, tensors, layout.num_words, forward, sample_commit, self.drafter).run

    def draft_extend(self, num_rows: int, drafter: RoundDrafter) -> Step:
        """Update the drafter after a prefill step, once the tokens after its rows are known. Payload: token,
        slot and position of each row and the token after it, then the rows that follow prefix hits."""
        payload, buckets = self._resources.payload, self._buckets
        num_words = buckets.draft_extend_words(num_rows)
        token, slot, position, next_token = payload.words[: 4 * num_rows].view(4, num_rows)
        hits = payload.words[4 * num_rows : num_words]
        rows = Rows(slot=slot, token=token, position=position)
        chunks = ComputedChunks(
            rows=rows,
            hidden=self.prefill_hidden.first(num_rows),
            next_token=next_token,
            hits=hits,
            last_token=self._resources.table.state.last_token,
        )

        def step() -> None:
            payload.enter(num_words)
            drafter.draft_extend_prefill(chunks)
            payload.advance()

        return step

    def round(self, num_slots: int, num_drafts: int) -> DecodeRound | TreeRound:
        """A round of `num_slots` slots with `num_drafts` drafts each."""
        if self.trees is not None and num_drafts in self.trees.plans:
            return self._tree_round(num_slots, self.trees, self.trees.plans[num_drafts])

        if self._checked_chains is not None:
            return self._tree_round(num_slots, self._checked_chains, self._checked_chains.plans[num_drafts])

        resources, rows_per_slot = self._resources, num_drafts + 1
        num_rows = num_slots * rows_per_slot
        rows = Rows.take(resources.workspace, num_rows)
        hidden = self._round_hidden.first(num_rows)
        attention = SequenceAttention(self.attention, rows.planned(rows_per_slot))
        return DecodeRound(
            resources,
            resources.payload.words[: 2 * num_slots].view(2, num_slots),
            rows,
            self._exact_forward(rows, attention, hidden, RecurrentRows(rows_per_slot=rows_per_slot)),
            self._sample_commit(rows, rows_per_slot),
            self.drafter,
        )

    def partial_round(self, num_slots: int, num_drafts: int, views: Views) -> Step:
        """A round of `num_slots` slots with `num_drafts` drafts each that reads views."""
        resources, rows_per_slot = self._resources, num_drafts + 1
        num_rows = num_slots * rows_per_slot
        rows = Rows.take(resources.workspace, num_rows)
        attention = ViewAttention(
            self._view_attention,
            rows.planned(rows_per_slot),
            views,
            resources.table.block_table,
            resources.workspace,
        )
        sample_commit = self._sample_commit(rows, rows_per_slot)
        decode_round = DecodeRound(
            resources,
            resources.payload.words[: 2 * num_slots].view(2, num_slots),
            rows,
            self._exact_forward(rows, attention, self._round_hidden.first(num_rows)),
            sample_commit,
            self.drafter,
        )
        return PartialRound(decode_round, rows, sample_commit.emitted, views).run

    def refresh(self, num_slots: int, drafter: RoundDrafter, views: Views) -> Step:
        """A round of `num_slots` slots with the most drafts that reads all keys and values, computes those of
        pending rows again, and chooses the blocks of views."""
        resources, workspace, decoder = self._resources, self._resources.workspace, self._model.decoder
        rows_per_slot = views.layout.num_drafts + 1
        num_tiles, rows_per_tile = views.layout.refresh_tiles(self._group)
        num_rows, num_round_rows = num_slots * num_tiles * rows_per_tile, num_slots * rows_per_slot
        columns = workspace.take("refresh_rows", (3, num_rows), torch.int32)
        rows, round_rows = Rows(*columns.unbind()), Rows.take(workspace, num_round_rows)
        attention = RefreshAttention(
            self._refresh_attention,
            rows.planned(rows_per_tile),
            round_rows.planned(rows_per_slot),
            views,
            decoder,
            resources.table.block_table.shape[1],
            workspace,
        )
        hidden = HiddenStates.take(workspace, "refresh", decoder, num_rows, drafter.aux_layers)
        normed_shape = (num_round_rows, decoder.spec.hidden_size)
        return RefreshRound(
            resources,
            resources.payload.words[: 2 * num_slots].view(2, num_slots),
            RefreshedRows(
                round_rows,
                rows,
                workspace.take("refresh_normed", normed_shape, decoder.dtype),
                self._round_hidden.first(num_round_rows),
            ),
            self._exact_forward(rows, attention, hidden),
            self._sample_commit(round_rows, rows_per_slot),
            drafter,
            views,
        ).run

    @property
    def _group(self) -> int:
        """Query heads that share a KV head."""
        return self._model.decoder.spec.attention.group

    def _tree_round(self, num_slots: int, drafter: TreeDrafter, plan: TreePlan) -> TreeRound:
        resources, num_rows = self._resources, num_slots * plan.num_nodes
        slots = resources.payload.words[: 2 * num_slots].view(2, num_slots)
        rows = Rows.take(resources.workspace, num_rows)
        tensors = TreeTensors.take(resources.workspace, slots, rows, plan.num_draft_nodes)
        hidden, groups = self._round_hidden.first(num_rows), self._tree_attention[plan.num_drafts]
        attention = TreeAttention(groups, tensors.rows.planned(plan.num_nodes), tensors.paths)
        return TreeRound(
            resources,
            tensors,
            self._exact_forward(tensors.rows, attention, hidden),
            self._sample_commit(tensors.rows, plan.num_nodes, tensors.acceptance),
            drafter,
            plan,
            self._checks(num_slots),
        )

    def _checks(self, num_trees: int) -> TreeChecks | None:
        if not self._buckets.has_checks:
            return None

        workspace, table = self._resources.workspace, self._resources.table
        vocab_size = self._model.limits.vocab_size
        return TreeChecks(workspace, table, self._model.cache, num_trees, vocab_size)

    def first_tokens(self, num_slots: int) -> Step:
        """Sample the first token of `num_slots` finished prompts from `prefill_hidden`. Payload: slots, then
        the row of each prompt's last token in the prefill step."""
        resources, decoder = self._resources, self._model.decoder
        payload = resources.payload
        rows = Rows.take(resources.workspace, num_slots)
        slots, sources = payload.words[: 2 * num_slots].view(2, num_slots)
        normed = LayerBuffers.take(resources.workspace, decoder, num_slots).normed
        stream = ResidualStream(decoder, self._round_hidden.first(num_slots), normed)
        sample_commit, exchange = self._sample_commit(rows, 1), self._model.exchange

        def step() -> None:
            payload.enter(2 * num_slots)
            if exchange is not None:
                exchange.begin()
            gather_rows(slots, sources, resources.table.state, rows.slot, rows.token, rows.position)
            stream.gather(self.prefill_hidden.final, sources, rows.slot)
            sample_commit.run(normed)

        return step

    def _runs(self, words: slice, num_chunks: int) -> PromptRuns | None:
        """The runs of chunks in the payload; None without recurrent layers."""
        if not self._buckets.has_states:
            return None

        found = self._resources.payload.words[words]
        return PromptRuns(found[: 4 * num_chunks].view(num_chunks, 4), found[4 * num_chunks :])

    def _exact_forward(
        self,
        rows: Rows,
        attention: RowAttention,
        hidden: HiddenStates,
        recurrent: RecurrentRows | None = None,
    ) -> ForwardPass:
        return exact_pass(
            self._model,
            rows,
            self._resources.table.block_table,
            self._resources.workspace,
            attention,
            hidden,
            recurrent,
        )

    def _sample_commit(
        self, rows: Rows, rows_per_slot: int, tree: TreeAcceptance | None = None
    ) -> SampleCommit:
        return SampleCommit(
            self._resources,
            self._model,
            rows,
            self._samples,
            rows_per_slot=rows_per_slot,
            acceptance=self._acceptance,
            tree=tree,
            is_ngram=self.drafter.is_ngram if self.drafter is not None and rows_per_slot > 1 else None,
        )
