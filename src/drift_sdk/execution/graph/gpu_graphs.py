"""The part of a graph executor on one GPU: resources, and a captured graph for each kind and size of step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from msgspec import Struct
from torch import Tensor

from drift_sdk._kernels.attention.exact_prefill import ExactPrefillConfig, exact_prefill_config
from drift_sdk._kernels.attention.prefill import prefill_attention_config
from drift_sdk._kernels.gemm.tuning import TunedTable
from drift_sdk._kernels.recurrent.gated_delta import PromptRuns
from drift_sdk._kernels.sampling.logits import count_tokens
from drift_sdk._kernels.sampling.rows import SampleBuffers
from drift_sdk._kernels.slots import gather_rows, num_mask_words
from drift_sdk.events import Report, ignore_progress
from drift_sdk.execution.device.device import Device, GroupReplay, Replay, ServingDevice
from drift_sdk.execution.device.exchange import Exchange
from drift_sdk.execution.device.memory import Workspace
from drift_sdk.execution.device.resources import DeviceResources, PayloadBuffer, Ring, RingSizes
from drift_sdk.execution.device.slot_table import SlotTable
from drift_sdk.execution.device.stages import NO_STAGE_MARKS, AcceptanceFactory, StageMarks
from drift_sdk.execution.drafter_factory import (
    NO_DRAFTER,
    DrafterFactory,
    NGramDrafterFactory,
    NoDrafterFactory,
)
from drift_sdk.execution.forward.attention import (
    AttentionGroups,
    ChunkAttention,
    ExpandedKeys,
    FastChunkAttention,
    MixedAttention,
    RefreshAttention,
    RowAttention,
    SequenceAttention,
    TreeAttention,
    ViewAttention,
    Views,
)
from drift_sdk.execution.forward.caches import ModelResources, PagedKVCache, RecurrentStates
from drift_sdk.execution.forward.forward_pass import ForwardPass, ResidualStream, exact_pass, fast_pass
from drift_sdk.execution.forward.gated_delta import RecurrentRows
from drift_sdk.execution.forward.rows import HiddenStates, LayerBuffers, Rows
from drift_sdk.execution.graph.buckets import GraphBuckets, MixedBucket, round_sizes
from drift_sdk.execution.rounds.drafters import ComputedChunks, RoundDrafter, TreeDrafter
from drift_sdk.execution.rounds.round import (
    ChainTreeDrafter,
    MixedTensors,
    PromptHead,
    RefreshedRows,
    Round,
    SampleCommit,
    TreeAcceptance,
    TreeChecks,
    TreeSteps,
    TreeTensors,
)
from drift_sdk.models.decoder import Decoder
from drift_sdk.speculation import TreePlan, ViewLayout, chain_plan
from drift_sdk.steps import ExecutorLimits

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
        self._drafter_factory = drafter_factory
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

    def allocate_caches(self, limits: ExecutorLimits) -> None:
        """Give the KV caches of target and draft their blocks; before anything is captured."""
        self._model.cache.allocate(limits.num_blocks, limits.num_window_blocks)
        if self.drafter is not None and self.drafter.kv_cache is not None:
            self.drafter.kv_cache.allocate(limits.num_blocks)

    def update(self) -> None:
        """Apply slot table updates and nothing else."""
        self._resources.payload.enter(0)
        self._resources.payload.advance()

    @property
    def inner_rows(self) -> tuple[int, ...]:
        """Rows of prefill steps that leave out the layers after the last one that keeps anything, whose
        output is not read: of full steps that no prompt ends in. Empty if there are no such layers, or the
        drafter may read their output."""
        spec = self._model.decoder.spec
        if not isinstance(self._drafter_factory, NoDrafterFactory | NGramDrafterFactory):
            return ()

        return () if spec.first_reader == spec.num_layers else self._buckets.prefill[-1:]

    def prefill(self, num_rows: int, num_layers: int | None = None) -> Step:
        """Compute chunks of `num_rows` rows in all. Payload: see `PrefillLayout`. num_layers: as of
        `ForwardPass.run`."""
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
        head_dim = decoder.spec.max_head_dim
        if buckets.is_exact:
            config = exact_prefill_config(head_dim, decoder.dtype)
            expanded = self._expanded(layout.expanded, tiles, num_rows, config)
            attention = ChunkAttention(tiles, config, expanded)
            forward = self._exact_forward(rows, attention, hidden, recurrent)
        else:
            block_table = resources.table.block_table
            fast = FastChunkAttention(tiles, prefill_attention_config(head_dim, decoder.dtype))
            forward = fast_pass(self._model, rows, block_table, resources.workspace, fast, hidden, recurrent)

        def step() -> None:
            payload.enter(layout.num_words)
            count_tokens(slot, token, position, columns)
            forward.run(num_layers)
            payload.advance()

        return step

    def inner(self, num_rows: int) -> Step:
        """A prefill step of `inner_rows`."""
        return self.prefill(num_rows, self._model.decoder.spec.first_reader)

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
            num_words=layout.num_words,
        )
        rows_per_slot = bucket.num_drafts + 1
        tiles = words[layout.tiles].view(-1, 4)
        config = buckets.mixed_attention(bucket)
        attention = MixedAttention(
            ChunkAttention(tiles, config, self._expanded(layout.expanded, tiles, bucket.size, config)),
            SequenceAttention(self.attention, tensors.round_rows.planned(rows_per_slot)),
            bucket.num_rows,
        )
        runs = self._runs(layout.runs, buckets.mixed_chunks(bucket))
        recurrent = None if runs is None else RecurrentRows(runs, bucket.num_rows, rows_per_slot)
        hidden = self.prefill_hidden.first(bucket.size)
        forward = self._exact_forward(tensors.rows, attention, hidden, recurrent)
        return Round(
            resources,
            tensors.slots,
            tensors.round_rows,
            forward,
            self._sample_commit(tensors.round_rows, rows_per_slot),
            self.drafter,
            chunks=tensors,
        ).whole

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

    def round(self, num_slots: int, num_drafts: int) -> Round:
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
        return Round(
            resources,
            self._slots(num_slots),
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
        return Round(
            resources,
            self._slots(num_slots),
            rows,
            self._exact_forward(rows, attention, self._round_hidden.first(num_rows)),
            self._sample_commit(rows, rows_per_slot),
            self.drafter,
            views=views,
        ).whole

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
        return Round(
            resources,
            self._slots(num_slots),
            round_rows,
            self._exact_forward(rows, attention, hidden),
            self._sample_commit(round_rows, rows_per_slot),
            drafter,
            views=views,
            refreshed=RefreshedRows(
                rows,
                workspace.take("refresh_normed", normed_shape, decoder.dtype),
                self._round_hidden.first(num_round_rows),
            ),
        ).whole

    def _slots(self, num_slots: int) -> torch.Tensor:
        """Slots and the most drafts of a round in its payload, [2, B]."""
        return self._resources.payload.words[: 2 * num_slots].view(2, num_slots)

    @property
    def _group(self) -> int:
        """Query heads that share a KV head."""
        return self._model.decoder.spec.attention.group

    def _tree_round(self, num_slots: int, drafter: TreeDrafter, plan: TreePlan) -> Round:
        resources, num_rows = self._resources, num_slots * plan.num_nodes
        rows = Rows.take(resources.workspace, num_rows)
        tensors = TreeTensors.take(resources.workspace, rows, num_slots, plan.num_draft_nodes)
        hidden, groups = self._round_hidden.first(num_rows), self._tree_attention[plan.num_drafts]
        attention = TreeAttention(groups, tensors.rows.planned(plan.num_nodes), tensors.paths)
        forward = self._exact_forward(tensors.rows, attention, hidden)
        return Round(
            resources,
            self._slots(num_slots),
            tensors.rows,
            forward,
            self._sample_commit(tensors.rows, plan.num_nodes, tensors.acceptance),
            None,
            tree=TreeSteps(resources, tensors, forward.cache, drafter, plan, self._checks(num_slots)),
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

    def _expanded(
        self, words: slice, tiles: Tensor, num_rows: int, config: ExactPrefillConfig
    ) -> ExpandedKeys | None:
        """What a step's chunks attend to that is expanded from latents. words: of the payload."""
        payload, workspace = self._resources.payload.words[words], self._resources.workspace
        return ExpandedKeys.take(self._model, workspace, payload, len(tiles), num_rows, config)

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


FitBlocks = Callable[[int], tuple[int, int]]
"""Takes the number of graphs to be captured and returns how many KV blocks there is room for beside them.
Called once everything else has its memory."""


class GraphOptions(Struct, frozen=True, kw_only=True):
    """Settings of a graph executor.

    prefill_token_budget: most tokens of a prefill step.
    fast_prompts:         prompts are computed in the fastest orders of summation instead of decoding's.
    step_timeout_s:       most seconds that the device may take for a step; None = no limit.
    acceptance:           for measuring: makes what accepts drafts in place of their comparison.
    stages:               for measuring: marks around the stages of steps.
    has_checks:           rounds of speculation are checked.
    view_layout:          of partial verification; None without it.
    num_checkpoints:      places for checkpoints of recurrent layers.
    expands_latents:      prompts may attend to keys that are expanded from latents. The time of a chunk then
                          depends on the keys before it more than on its tokens, so that no latency can be
                          aimed at by their number.
    shape_log:            file to which the products that ran are added when the executor is closed.
    """

    prefill_token_budget: int
    fast_prompts: bool = False
    step_timeout_s: float | None = None
    acceptance: AcceptanceFactory | None = None
    stages: StageMarks = NO_STAGE_MARKS
    has_checks: bool = False
    view_layout: ViewLayout | None = None
    num_checkpoints: int = 0
    expands_latents: bool = True
    shape_log: Path | None = None


class StartupHooks(Struct, frozen=True, kw_only=True):
    """Called while an executor starts.

    fit_blocks: how many KV blocks there is room for, and how many of layers with windows, beside so many
    graphs; None = those of the limits. report: progress.
    """

    fit_blocks: FitBlocks | None = None
    report: Report = ignore_progress


NO_HOOKS = StartupHooks()


class CapturedGraphs:
    """All graphs of an executor on a GPU. `capture` captures them, the largest of each kind first.

    The constructor runs the largest steps once, so that everything but KV caches and graphs has its memory
    and the caches can be given what is left.

    update: applies updates and nothing else. decode[B, K]: a round of B slots with K drafts each. draft[B, K]
    and verify[B, K]: its halves, if there is a drafter and K is not 0. prefill[N]: chunks of N rows.
    inner[N]: chunks of N rows whose output is not read, see `GraphSteps.inner_rows`.
    mixed[N, B, K]: chunks of N rows and a round of B slots with K drafts each, in one pass.
    partial[B, K], refresh[B]: rounds of partial verification, if that is configured.
    first_tokens[B]: samples the first tokens of B finished prompts. draft_extend[N]: updates the drafter
    after a prefill step and its first tokens; empty without a drafter.
    num_graphs: to be captured.
    """

    update: Replay

    def __init__(
        self,
        resources: DeviceResources,
        steps: GraphSteps,
        buckets: GraphBuckets,
        *,
        report: Report,
    ) -> None:
        self._resources, self._buckets = resources, buckets
        self._steps = steps  # the buffers that graphs use stay allocated as long as the graphs
        self._report = report
        self.prefill: dict[int, Replay] = {}
        self.inner: dict[int, Replay] = {}
        self.mixed: dict[MixedBucket, Replay] = {}
        self.draft_extend: dict[int, Replay] = {}
        self.decode: dict[tuple[int, int], Replay] = {}
        self.draft: dict[tuple[int, int], Replay] = {}
        self.verify: dict[tuple[int, int], Replay] = {}
        self.partial: dict[tuple[int, int], Replay] = {}
        self.refresh: dict[int, Replay] = {}
        self.first_tokens: dict[int, Replay] = {}
        self._replays: list[Replay] = []
        self.num_graphs: int = self._count_graphs()
        self._compile()
        self._warm_up()

    def capture(self, limits: ExecutorLimits) -> None:
        """Capture all graphs, with KV caches of as many blocks as the limits have. To be called once."""
        resources, steps, buckets = self._resources, self._steps, self._buckets
        with resources.device.work():
            steps.allocate_caches(limits)
        self._capture_prefill()
        self._capture_mixed()
        self._capture_rounds()
        self._capture_partial()
        for num_slots in reversed(buckets.first_tokens):
            self.first_tokens[num_slots] = self._capture(steps.first_tokens(num_slots))
        self.update = self._capture(steps.update)
        resources.device.finish_captures()
        with resources.device.work():
            resources.ring.reset()

    def join(self, others: Sequence[CapturedGraphs]) -> None:
        """Launch the graphs of other GPUs, which were captured for the same sizes, together with these. There
        are none of partial verification, which runs on one GPU."""
        if not others:
            return

        every = (self, *others)
        for kind in (
            "prefill",
            "inner",
            "mixed",
            "draft_extend",
            "decode",
            "draft",
            "verify",
            "first_tokens",
        ):
            graphs: dict[Any, Replay] = getattr(self, kind)
            for bucket in graphs:
                graphs[bucket] = GroupReplay([getattr(each, kind)[bucket] for each in every])
        self.update = GroupReplay([each.update for each in every])
        self._replays += [replay for other in others for replay in other._replays]

    def close(self) -> None:
        """Free all graphs."""
        for replay in self._replays:
            replay.close()

    def _count_graphs(self) -> int:
        """The number of graphs to capture."""
        buckets, has_drafter = self._buckets, self._steps.drafter is not None
        num_prefill = len(buckets.prefill) * (2 if has_drafter else 1) + len(self._steps.inner_rows)
        # A round without drafts is never split.
        num_decode = sum(3 if number and has_drafter else 1 for _, number in buckets.rounds)
        num_decode += len(buckets.partial_rounds) + len(buckets.refreshes)
        num_first_tokens = len(buckets.first_tokens)
        return num_prefill + len(buckets.mixed) + num_decode + num_first_tokens + 1  # and `update`

    def _compile(self) -> None:
        """Compile the kernels of all steps, unless that was done on this machine before."""
        self._report("compile", 0.0)
        device = self._resources.device
        device.compile_kernels(self._every_step(), lambda fraction: self._report("compile", fraction))

    def _every_step(self) -> Iterator[Step]:
        """All steps that are captured. The largest of each kind come first, as they do when they run: steps
        take their buffers even where their kernels are only compiled."""
        steps, buckets = self._steps, self._buckets
        yield from steps.largest()
        for num_slots, num_drafts in reversed(buckets.rounds):
            decode_round = steps.round(num_slots, num_drafts)
            yield decode_round.whole
            if steps.drafter is not None and num_drafts > 0:
                yield decode_round.draft
                yield decode_round.verify
        yield from (step for _, step in self._partial_steps())
        yield from (step for _, step in self._refresh_steps())
        for num_slots in reversed(buckets.first_tokens):
            yield steps.first_tokens(num_slots)
        for num_rows in reversed(buckets.prefill):
            yield steps.prefill(num_rows)
            if steps.drafter is not None:
                yield steps.draft_extend(num_rows, steps.drafter)
        for num_rows in steps.inner_rows:
            yield steps.inner(num_rows)
        for bucket in reversed(buckets.mixed):
            yield steps.mixed(bucket)
        yield steps.update

    def _warm_up(self) -> None:
        """Run the largest step of each kind, so that later ones need no more memory."""
        self._report("warm up", 0.0)
        for step in self._steps.largest():
            self._resources.device.warm_up(step)

    def _capture_prefill(self) -> None:
        steps = self._steps
        for num_rows in reversed(self._buckets.prefill):
            self.prefill[num_rows] = self._capture(steps.prefill(num_rows))
            if steps.drafter is not None:
                self.draft_extend[num_rows] = self._capture(steps.draft_extend(num_rows, steps.drafter))
        for num_rows in steps.inner_rows:
            self.inner[num_rows] = self._capture(steps.inner(num_rows))

    def _capture_mixed(self) -> None:
        for bucket in reversed(self._buckets.mixed):
            self.mixed[bucket] = self._capture(self._steps.mixed(bucket))

    def _capture_rounds(self) -> None:
        for bucket in reversed(self._buckets.rounds):
            decode_round = self._steps.round(*bucket)
            self.decode[bucket] = self._capture(decode_round.whole)
            if self._steps.drafter is not None and bucket[1] > 0:
                self.draft[bucket] = self._capture(decode_round.draft)
                self.verify[bucket] = self._capture(decode_round.verify)

    def _partial_steps(self) -> Iterator[tuple[tuple[int, int], Step]]:
        if (views := self._steps.views) is not None:
            for bucket in reversed(self._buckets.partial_rounds):
                yield bucket, self._steps.partial_round(*bucket, views)

    def _refresh_steps(self) -> Iterator[tuple[int, Step]]:
        views, drafter = self._steps.views, self._steps.drafter
        if views is not None and drafter is not None:
            for num_slots in reversed(self._buckets.refreshes):
                yield num_slots, self._steps.refresh(num_slots, drafter, views)

    def _capture_partial(self) -> None:
        for bucket, step in self._partial_steps():
            self.partial[bucket] = self._capture(step)
        for num_slots, step in self._refresh_steps():
            self.refresh[num_slots] = self._capture(step)

    def _capture(self, step: Step) -> Replay:
        self._report("capture graphs", len(self._replays) / self.num_graphs)
        self._replays.append(self._resources.stages.capture(self._resources.device, step))
        return self._replays[-1]


NUM_ENTRIES = 16
"""Replays that can be in flight at once. A step has up to five, and one more for each MAX_UPDATES updates:
with eight entries, a request with a bias for 4,000 tokens would wait for the device."""
MAX_UPDATES = 512
"""Slot table updates of one replay. A step with more of them starts replays that do nothing else."""


class GpuModel(Struct, frozen=True, kw_only=True):
    """A model, or a part of one, on a GPU.

    drafter_factory: its draft is on the same GPU. exchange: with the GPUs that have the other parts.
    """

    device: Device
    decoder: Decoder
    tuned: TunedTable
    drafter_factory: DrafterFactory = NO_DRAFTER
    exchange: Exchange | None = None


class GpuGraphs(Struct, frozen=True, kw_only=True):
    """The graphs of a model on a GPU, which are captured by `graphs.capture`, and what they use.

    states: of recurrent layers; None: the model has none.
    """

    device: Device
    resources: DeviceResources
    steps: GraphSteps
    graphs: CapturedGraphs
    states: RecurrentStates | None = None


def graph_buckets(model: GpuModel, limits: ExecutorLimits, options: GraphOptions) -> GraphBuckets:
    """The sizes that graphs of a model are captured for."""
    factory = model.drafter_factory
    return GraphBuckets.of(
        model.decoder,
        limits,
        options.prefill_token_budget,
        is_exact=not options.fast_prompts,
        draft_choices=factory.draft_choices,
        tree_choices=tuple(factory.tree_plans),
        shares_rows=factory.max_tree_depth is not None,
        has_checks=options.has_checks and bool(factory.draft_choices),
        view_layout=options.view_layout if factory.draft_choices else None,
        expands_latents=options.expands_latents,
    )


def open_ring(
    device: ServingDevice, limits: ExecutorLimits, buckets: GraphBuckets, options: GraphOptions
) -> Ring:
    """The ring of an executor. To be called inside `device.work()`."""
    sizes = RingSizes(
        num_entries=NUM_ENTRIES,
        max_updates=MAX_UPDATES,
        payload_words=buckets.payload_words,
        record_words=buckets.record_words,
        max_slots=buckets.decode[-1],
        num_draft_masks=buckets.num_draft_masks,
        mask_words=num_mask_words(limits.vocab_size),
    )
    return Ring(device, sizes, timeout_s=options.step_timeout_s)


def open_graphs(
    model: GpuModel,
    limits: ExecutorLimits,
    options: GraphOptions,
    buckets: GraphBuckets,
    ring: Ring,
    report: Report,
) -> GpuGraphs:
    """Allocate all but the KV cache, and compile and run the largest steps. To be called inside
    `model.device.work()`.

    Raises ConfigError for more slots than the slot table can address.
    """
    device, decoder, factory = model.device, model.decoder, model.drafter_factory
    table = SlotTable(
        limits,
        device.torch_device,
        has_history=factory.needs_history,
        has_views=buckets.view_layout is not None,
    )
    resources = DeviceResources(
        device=device,
        ring=ring,
        payload=PayloadBuffer(ring, table.words, buckets.payload_words),
        table=table,
        workspace=Workspace(device.torch_device),
        stages=options.stages,
    )
    num_tree_rows = max((buckets.max_slots(number) * (number + 1) for number in buckets.trees), default=0)
    states = None
    if buckets.has_states:
        most = buckets.max_chain + 1
        states = RecurrentStates(decoder, limits.max_num_seqs, most, options.num_checkpoints)
    target = ModelResources(
        decoder=decoder,
        window_table=table.window_table if limits.num_window_blocks else None,
        cache=PagedKVCache(decoder, limits, num_tree_rows),
        tuned=model.tuned,
        limits=limits,
        states=states,
        exchange=model.exchange,
    )
    steps = GraphSteps(resources, target, buckets, factory, acceptance=options.acceptance)
    graphs = CapturedGraphs(resources, steps, buckets, report=report)
    return GpuGraphs(device=device, resources=resources, steps=steps, graphs=graphs, states=states)
