"""The drafters of the graph executor with a draft head: chains and trees, in the graphs that verify them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from drift_sdk._kernels.attention.latent import latent_prompt_attention
from drift_sdk._kernels.attention.layer_attention import LayerAttention
from drift_sdk._kernels.attention.plan import BlockTable
from drift_sdk._kernels.attention.prefill import prefill_attention, prefill_attention_config
from drift_sdk._kernels.draft.draft_choose import num_draft_chunks
from drift_sdk._kernels.draft.draft_rows import (
    chunk_rows,
    draft_tiles,
    keep_last_rows,
    num_draft_tiles,
    round_rows,
)
from drift_sdk._kernels.launch.launch_order import note_library_kernel
from drift_sdk._kernels.layers.norm import add_norm, embed_norm
from drift_sdk._kernels.trees.tree_attention import TreePaths
from drift_sdk._kernels.trees.tree_growth import (
    CandidateBuffers,
    CandidatePool,
    Frontier,
    StaticTables,
    expand_dynamic,
    grow_static,
    keep_best,
    rank_candidates,
)
from drift_sdk._kernels.trees.tree_rows import PATH_ENTRIES, RootTensors, gather_hidden, path_rows
from drift_sdk.execution.device.memory import Workspace
from drift_sdk.execution.device.slot_table import SlotTable
from drift_sdk.execution.device.stages import NO_STAGE_MARKS, StageMarks
from drift_sdk.execution.forward.attention import (
    AttentionGroups,
    AttentionShape,
    SequenceAttention,
    TreeAttention,
)
from drift_sdk.execution.forward.caches import DraftKVCache, ModelResources
from drift_sdk.execution.forward.draft import Attend, DraftForward
from drift_sdk.execution.forward.rows import Rows
from drift_sdk.execution.rounds.drafters import ComputedChunks, DraftChoice, RoundSizes, VerifiedRows
from drift_sdk.models.draft_head import DraftDecoder
from drift_sdk.speculation import TreePlan


class EagleRoundDrafter:
    """A `RoundDrafter` that computes what `EagleDrafter` does, for slots and rows known only to the device.

    aux_layers: the draft's. kv_cache: the draft's keys and values, in the target's blocks. forward: its
    forward pass. attention_shape: of its attention.
    """

    is_ngram: Tensor | None = None

    def __init__(
        self,
        draft: DraftDecoder,
        model: ModelResources,
        table: SlotTable,
        workspace: Workspace,
        sizes: RoundSizes,
        *,
        stages: StageMarks = NO_STAGE_MARKS,
    ) -> None:
        """model: the target. sizes: of the largest round and the largest prefill step."""
        attention, limits = draft.config.attention, model.limits
        self.aux_layers: Sequence[int] = draft.aux_layers
        self.kv_cache = DraftKVCache(draft, limits, limits.max_num_seqs, sizes.max_growth_rows)
        self._draft, self._target = draft, model.decoder
        self._block_table = table.block_table
        self._workspace, self._stages, self._sizes = workspace, stages, sizes
        self._choice = DraftChoice(draft.target_ids.to(torch.int32), table, workspace, "draft")
        max_round_rows = sizes.max_num_slots * (sizes.max_draft_tokens + 1)
        self.forward = DraftForward(
            draft,
            self.kv_cache,
            table.block_table,
            workspace,
            model.tuned,
            # A prefill step may have one more row for each chunk that follows a prefix hit.
            max_num_rows=max(
                max_round_rows, sizes.max_path_rows, sizes.max_prefill_rows + limits.max_num_seqs
            ),
            stages=stages,
        )
        self.attention_shape = AttentionShape.of_spec(attention)
        self._attention = AttentionGroups(
            workspace,
            draft.device,
            (self.attention_shape,),
            max_num_keys=self.kv_cache.num_places,
            num_sequences=sizes.max_num_slots,
            num_rows=max(sizes.max_draft_tokens, sizes.max_path_length) + 1,
            # Of latents, as for the target: see `AttentionGroups.of_model`.
            blocks=None
            if self.attention_shape.is_latent
            else BlockTable(table.block_table, limits.block_size),
        )
        self._prefill = prefill_attention_config(attention.head_dim, draft.dtype)
        self._masks: tuple[Tensor, Tensor] | None = None  # tokens and features of rows, all alike
        if draft.mask_feature is not None and draft.config.mask_token_id is not None:
            tokens = torch.full((max_round_rows,), draft.config.mask_token_id, dtype=torch.int32)
            self._masks = tokens.to(draft.device), draft.mask_feature.repeat(max_round_rows, 1)

    def propose(self, rows: Rows, *, num_slots: int, num_draft_tokens: int) -> None:
        """Write the drafted tokens to `rows.token`: of row b * T + j for j from 1, unless its slot is -1.

        Raises ValueError for a round larger than `sizes`.
        """
        num_rows_each = self._rows_per_slot(rows, num_slots, num_draft_tokens)
        if num_draft_tokens == 0:
            return

        drafted = self.take_rows(num_slots)
        drafted.slot.copy_(rows.slot.view(num_slots, num_rows_each)[:, 1])
        note_library_kernel(drafted.slot)
        self.load_outputs(drafted)
        forward = self.forward
        if self._masks is not None:
            normed = self._masked(rows, self._masks, num_slots, num_draft_tokens)
            with self._stages("draft_lm_head"):
                self._choose(rows, normed, self.take_rows(len(normed)), depth=1, num_depths=num_draft_tokens)
            return

        for depth in range(1, num_draft_tokens + 1):
            with self._stages("draft_lm_head"):
                self._choose(rows, forward.normed(num_slots), drafted, depth=depth)
            if depth < num_draft_tokens:
                # The next row pairs the draft's own output with the token just chosen.
                with self._stages("draft_attention"):
                    attend = self.attend_few_rows(drafted, 1)
                forward.run(drafted, forward.output(num_slots), attend, is_fused=False)

    def _masked(
        self, rows: Rows, masks: tuple[Tensor, Tensor], num_slots: int, num_draft_tokens: int
    ) -> Tensor:
        """The normalised outputs [B * K, hidden] of a parallel head: of the newest rows, as loaded, and of
        rows with masks at the places of all drafts but the last."""
        forward, num_masks = self.forward, num_draft_tokens - 1
        width = self._draft.config.hidden_size
        shape = num_slots, num_draft_tokens, width
        outputs = self._workspace.take("draft_outputs", shape, self._draft.dtype)
        outputs[:, 0].copy_(forward.normed(num_slots))
        note_library_kernel(outputs)
        if num_masks:
            tokens, features = (each[: num_slots * num_masks] for each in masks)
            taken = self.take_rows(num_slots * num_masks)
            for own, source in ((taken.slot, rows.slot), (taken.position, rows.position)):
                source = source.view(num_slots, num_draft_tokens + 1)[:, 1:num_draft_tokens]
                own.view(num_slots, num_masks).copy_(source)
                note_library_kernel(own)
            masked = Rows(slot=taken.slot, token=tokens, position=taken.position)
            with self._stages("draft_attention"):
                attend = self.attend_few_rows(masked, num_masks)
            forward.run(masked, features, attend, is_fused=False)
            outputs[:, 1:].copy_(forward.normed(len(tokens)).view(num_slots, num_masks, width))
            note_library_kernel(outputs)
        return outputs.view(-1, width)

    def _choose(self, rows: Rows, normed: Tensor, drafted: Rows, *, depth: int, num_depths: int = 1) -> None:
        """Choose drafts from normalised outputs [N, hidden]; drafted [N]: the rows computed next."""
        logits = self.forward.multiply(normed, self._draft.weights.head)
        self._choice.choose(logits, rows, drafted, depth=depth, num_depths=num_depths)

    def draft_extend(self, verified: VerifiedRows) -> None:
        """Compute the draft rows of the tokens that a round emitted: of slot b the first emitted[b].

        Raises ValueError for a round larger than `sizes`.
        """
        rows, num_rows = verified.rows, verified.rows.slot.shape[0]
        num_rows_each = self._rows_per_slot(rows, verified.num_slots, verified.num_draft_tokens)
        emitted_rows = self.take_rows(num_rows)
        out = (emitted_rows.slot, emitted_rows.token, emitted_rows.position)
        round_rows(rows.slot, rows.position, verified.chosen, verified.emitted, out)
        attend = self.attend_few_rows(emitted_rows, num_rows_each)
        features = self.fuse(verified.hidden.aux, verified.hidden.final)
        self.forward.run(emitted_rows, features, attend, is_fused=True)
        keep_last_rows(emitted_rows.slot, self.forward.output(num_rows), self.kv_cache.outputs)

    def draft_extend_prefill(self, chunks: ComputedChunks) -> None:
        """Compute the draft rows of chunks of prompts."""
        rows, hits, hidden = chunks.rows, chunks.hits, chunks.hidden
        num_rows, num_hits = rows.slot.shape[0], hits.shape[0]
        draft_rows = self.take_rows(num_rows + num_hits)
        out = (draft_rows.slot, draft_rows.token, draft_rows.position)
        after = (chunks.next_token, hits, chunks.last_token)
        chunk_rows(rows.slot, rows.token, rows.position, *after, out)
        attend = self._attend_many_rows(draft_rows, num_hits)
        self.forward.run(draft_rows, self.fuse(hidden.aux, hidden.final), attend, is_fused=True)
        output = self.forward.output(num_rows + num_hits)
        keep_last_rows(draft_rows.slot[:num_rows], output[:num_rows], self.kv_cache.outputs)

    def load_outputs(self, drafted: Rows) -> None:
        """Load the output of each slot's newest row, as the first drafted token is chosen from it."""
        config, forward, num_slots = self._draft.config, self.forward, drafted.slot.shape[0]
        hidden, normed = forward.hidden(num_slots), forward.normed(num_slots)
        final_norm = self._draft.weights.final_norm
        with self._stages("draft_lm_head"):
            embed_norm(
                drafted.slot,
                drafted.slot,
                self.kv_cache.outputs,
                final_norm,
                hidden,
                normed,
                eps=config.norm.eps,
                norm_kind=config.norm.kind,
            )
            if config.is_output_normed:
                normed.copy_(hidden)  # the kept output has been normalised already

    def _rows_per_slot(self, rows: Rows, num_slots: int, num_draft_tokens: int) -> int:
        """Rows of each slot in a round; ValueError for a round larger than `sizes`."""
        num_rows, sizes = rows.slot.shape[0], self._sizes
        is_known = num_slots <= sizes.max_num_slots and num_draft_tokens <= sizes.max_draft_tokens
        if not is_known or num_rows != num_slots * (num_draft_tokens + 1):
            raise ValueError(
                f"{num_rows} rows of {num_slots} slots with {num_draft_tokens} drafts each: expected all "
                f"rows of at most {sizes.max_num_slots} slots with at most {sizes.max_draft_tokens}"
            )

        return num_draft_tokens + 1

    def take_rows(self, num_rows: int) -> Rows:
        """Uninitialised rows of the draft."""
        return Rows.take(self._workspace, num_rows, "draft_")

    def fuse(self, aux_hidden: Sequence[Tensor], hidden: Tensor) -> Tensor:
        """Features of rows [R, target_hidden] for `draft_inputs`, computed as `DraftDecoder.fuse` does."""
        draft, weights, num_rows = self._draft, self._draft.weights, hidden.shape[0]
        eps, width = draft.config.norm.eps, draft.config.target_hidden_size
        shape = (num_rows, width * max(len(self.aux_layers), 1))
        features = self._workspace.take("draft_features", shape, draft.dtype)
        if weights.fc is None:
            final_norm, spec = self._target.weights.final_norm, self._target.spec.final_norm
            add_norm(hidden, None, final_norm, features, eps=spec.eps, norm_kind=spec.kind)
            return features

        if weights.feature_norms:
            for index, (tensor, norm) in enumerate(zip(aux_hidden, weights.feature_norms, strict=True)):
                part = features[:, index * width : (index + 1) * width]
                add_norm(tensor, None, norm, part, eps=eps)
        else:
            torch.cat(tuple(aux_hidden), dim=1, out=features)
            note_library_kernel(features)
        if weights.input_norm is not None:
            add_norm(features, None, weights.input_norm, features, eps=eps)

        return self.forward.multiply(features, weights.fc)

    def attend_few_rows(self, rows: Rows, rows_per_slot: int) -> Attend:
        """Attention of a round's rows, `rows_per_slot` of each slot, planned on the device."""
        attention = SequenceAttention(self._attention, rows.planned(rows_per_slot))
        attention.plan()
        return attention.attend

    def _attend_many_rows(self, rows: Rows, num_hits: int) -> Attend:
        """Attention of a prefill step's rows by tiles; the last `num_hits` rows precede prefix hits."""
        tile_rows = self._prefill.tile_rows
        num_tiles = num_draft_tiles(rows.slot.shape[0] - num_hits, num_hits, tile_rows)
        tiles = self._workspace.take("draft_tiles", (num_tiles, 4), torch.int32)
        draft_tiles(rows.slot, rows.position, tiles, num_single=num_hits, tile_rows=tile_rows)
        if not self.attention_shape.is_latent:
            return partial(prefill_attention, tiles=tiles, config=self._prefill)

        def attend(layer: LayerAttention) -> None:
            latent_prompt_attention(layer, tiles, tile_rows, layer.partitions)

        return attend


class EagleTreeDrafter:
    """A `TreeDrafter` that grows the trees that `TreeGrower` does, for slots and rows known only to the
    device.

    The node of depth d combines the draft's output for its parent with its own token. Its keys and values are
    kept only while the tree grows, behind the blocks. Those of accepted tokens are computed again, by
    `extend`, from the target's features.
    """

    def __init__(
        self,
        draft: DraftDecoder,
        chains: EagleRoundDrafter,
        table: SlotTable,
        workspace: Workspace,
        plans: Mapping[int, TreePlan],
        rounds: Sequence[tuple[int, int]],
        *,
        stages: StageMarks = NO_STAGE_MARKS,
    ) -> None:
        """chains: the draft's chains, whose cache and forward pass are shared. plans: by drafts. rounds:
        (slots, drafts) of those that draft trees."""
        device = draft.device
        self.plans = plans
        self._draft, self._chains = draft, chains
        self._block_table, self._columns = table.block_table, table.columns
        self._workspace, self._stages = workspace, stages
        self._target_ids = draft.target_ids.to(torch.int32)
        self._tables = {
            number: _static_tables(plan, device) for number, plan in plans.items() if plan.ranked is not None
        }
        most: dict[int, int] = {}  # trees, by the rows that each of them has at a depth
        for num_trees, number in rounds:
            for width in plans[number].widths if number in plans else ():
                most[width] = max(most.get(width, 0), num_trees)
        self._attention = {
            width: AttentionGroups(
                workspace,
                device,
                (chains.attention_shape,),
                max_num_keys=chains.kv_cache.num_places,
                num_sequences=num_trees,
                num_rows=width,
            )
            for width, num_trees in sorted(most.items(), key=lambda item: -item[0] * item[1])
        }

    @property
    def first_draft_slot(self) -> int:
        return self._chains.kv_cache.first_tree_slot

    def grow(self, rows: RootTensors, plan: TreePlan) -> None:
        num_trees = rows.root_slot.shape[0]
        before = self._take_frontier(num_trees, 0)
        before = Frontier(
            rows.root_slot, before.token, rows.root_position, before.kv_slot, before.source, before.node,
            before.path,
        )  # fmt: skip
        self._chains.load_outputs(Rows(slot=rows.root_slot, token=before.token, position=rows.root_position))
        pool = self._take_pool(num_trees * plan.pool_size)
        first_node, first_candidate = 1, 0
        for depth in range(1, plan.depth + 1):
            candidates = self._rank(before, plan)
            is_last = depth == plan.depth
            width = 0 if is_last else plan.widths[depth - 1]
            after = None if is_last else self._take_frontier(num_trees * width, depth)
            if plan.ranked is not None:
                tables = self._tables[plan.num_drafts]
                grow_static(candidates, tables, rows, before, after, depth=depth, first_node=first_node)
            else:
                expand_dynamic(
                    candidates,
                    pool,
                    rows,
                    before,
                    after,
                    depth=depth,
                    first_candidate=first_candidate,
                    first_node=first_node,
                )
            first_candidate += before.slot.shape[0] // num_trees * plan.num_candidates
            first_node += width
            if after is not None:
                self._compute(after, before, rows, width)
                before = after

        if plan.ranked is None:
            keep_best(pool, rows)

    def extend(self, rows: RootTensors, plan: TreePlan, verified: VerifiedRows, path: Tensor) -> None:
        chains, rows_per_path = self._chains, plan.depth + 1
        num_rows = path.shape[0] * rows_per_path
        draft_rows = chains.take_rows(num_rows)
        source = self._workspace.take("draft_path_source", (num_rows,), torch.int32)
        out = (draft_rows.slot, draft_rows.token, draft_rows.position, source)
        path_rows(rows.slot, rows.position, verified.chosen, path, out, nodes_per_tree=plan.num_nodes)
        needs_final, hidden = self._draft.weights.fc is None, verified.hidden
        gathered = [
            self._gather(f"draft_path_hidden_{index}", source, tensor)
            for index, tensor in enumerate([hidden.final] if needs_final else hidden.aux)
        ]
        features = chains.fuse([] if needs_final else gathered, gathered[0])
        attend = chains.attend_few_rows(draft_rows, rows_per_path)
        chains.forward.run(draft_rows, features, attend, is_fused=True)
        keep_last_rows(draft_rows.slot, chains.forward.output(num_rows), chains.kv_cache.outputs)

    def _rank(self, rows: Frontier, plan: TreePlan) -> CandidateBuffers:
        """The best tokens after rows that the draft has just computed."""
        forward, num_rows = self._chains.forward, rows.slot.shape[0]
        buffers = self._take_candidates(num_rows, plan.num_candidates)
        with self._stages("draft_lm_head"):
            rank_candidates(
                forward.multiply(forward.normed(num_rows), self._draft.weights.head),
                self._target_ids,
                rows.slot,
                rows.position,
                self._columns.temperature,
                self._columns.seed,
                buffers,
            )
        return buffers

    def _compute(self, after: Frontier, before: Frontier, rows: RootTensors, width: int) -> None:
        """Compute a frontier from the outputs of the one before."""
        forward = self._chains.forward
        output = forward.output(before.slot.shape[0])
        features = self._gather("draft_parent_output", after.source, output)
        drafted = Rows(
            slot=after.slot,
            token=after.token,
            position=after.position,
            kv_slot=after.kv_slot,
        )
        paths = TreePaths(rows.root_position, rows.draft_kv_slot, after.path)
        with self._stages("draft_attention"):
            attend = self._attend(drafted, paths, width)
        forward.run(drafted, features, attend, is_fused=False)

    def _attend(self, rows: Rows, paths: TreePaths, width: int) -> Attend:
        """Attention of a frontier's rows, `width` of each tree."""
        attention = TreeAttention(self._attention[width], rows.planned(width), paths)
        attention.plan()
        return attention.attend

    def _gather(self, name: str, source: Tensor, hidden: Tensor) -> Tensor:
        """The rows of hidden [N, H] that source [M] names."""
        out = self._workspace.take(name, (source.shape[0], hidden.shape[1]), hidden.dtype)
        gather_hidden(source, hidden, out)
        return out

    def _take_frontier(self, num_rows: int, depth: int) -> Frontier:
        """Uninitialised rows. Those of the depth before are kept."""

        def take(name: str, dtype: torch.dtype, *more: int) -> Tensor:
            return self._workspace.take(f"frontier_{name}_{depth % 2}", (num_rows, *more), dtype)

        return Frontier(
            slot=take("slot", torch.int32),
            token=take("token", torch.int32),
            position=take("position", torch.int32),
            kv_slot=take("kv_slot", torch.int64),
            source=take("source", torch.int32),
            node=take("node", torch.int32),
            path=take("path", torch.int32, PATH_ENTRIES),
        )

    def _take_pool(self, size: int) -> CandidatePool:
        def take(name: str, dtype: torch.dtype) -> Tensor:
            return self._workspace.take(f"pool_{name}", (size,), dtype)

        return CandidatePool(
            cost=take("cost", torch.float32),
            token=take("token", torch.int32),
            parent=take("parent", torch.int32),
        )

    def _take_candidates(self, num_rows: int, number: int) -> CandidateBuffers:
        num_chunks = num_draft_chunks(self._draft.weights.head.shape[0])

        def take(name: str, dtype: torch.dtype, *shape: int) -> Tensor:
            return self._workspace.take(f"candidate_{name}", (num_rows, *shape), dtype)

        return CandidateBuffers(
            token=take("token", torch.int32, number),
            logprob=take("logprob", torch.float32, number),
            chunk_max=take("chunk_max", torch.float32, num_chunks),
            chunk_sum=take("chunk_sum", torch.float32, num_chunks),
            chunk_value=take("chunk_value", torch.float32, num_chunks, number),
            chunk_token=take("chunk_token", torch.int32, num_chunks, number),
        )


def _static_tables(plan: TreePlan, device: torch.device) -> StaticTables:
    """The tables of a static tree."""
    assert plan.ranked is not None
    tree, ranks = plan.ranked.tree.prefix(plan.num_nodes), plan.ranked.ranks[: plan.num_nodes]
    frontiers = [[0], *(plan.frontier(depth) for depth in range(1, plan.depth))]
    sources = [0] + [
        frontiers[tree.depths[node] - 1].index(tree.parents[node]) for node in range(1, plan.num_nodes)
    ]

    def tensor(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    return StaticTables(
        depth=tensor(tree.depths),
        parent=tensor(tree.parents),
        rank=tensor(ranks),
        source=tensor(sources),
        frontier=tuple(tensor(nodes) for nodes in frontiers[1:]),
    )
