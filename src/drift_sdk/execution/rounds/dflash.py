"""The drafter of the graph executor with a DFlash head: a whole draft in one pass, in the graphs that verify
it.

The head is a small decoder whose keys and values before the newest token are projections of the target's
features. They lie in the target's blocks, at their own positions, and are stored when the target has computed
the position's row: of prompts, and of the tokens that a round emitted. Those of an anchor and its masks lie
behind the blocks, as those of trees do, and are kept for a pass: rows of a draft attend to their sequence and
to each other as nodes of trees do.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from msgspec import Struct
from msgspec.structs import replace
from torch import Tensor

from drift_sdk._kernels.attention.layer_attention import LayerAttention
from drift_sdk._kernels.attention.plan import PlannedRows
from drift_sdk._kernels.draft.draft_rows import anchor_rows, round_rows
from drift_sdk._kernels.launch.launch_order import note_library_kernel
from drift_sdk._kernels.layers.norm import add_norm
from drift_sdk._kernels.layers.rope_store import rotate_and_store
from drift_sdk._kernels.trees.tree_attention import TreePaths
from drift_sdk.execution.device.memory import Workspace
from drift_sdk.execution.device.slot_table import SlotTable
from drift_sdk.execution.device.stages import NO_STAGE_MARKS, StageMarks
from drift_sdk.execution.forward.attention import AttentionGroups, AttentionShape
from drift_sdk.execution.forward.caches import ModelResources, PagedKVCache
from drift_sdk.execution.forward.draft import MAX_MULTIPLY_ROWS
from drift_sdk.execution.forward.forward_pass import exact_pass, fast_pass
from drift_sdk.execution.forward.products import ExactProducts, LibraryProducts, Products
from drift_sdk.execution.forward.rows import HiddenStates, Rows
from drift_sdk.execution.rounds.drafters import ComputedChunks, DraftChoice, RoundSizes, VerifiedRows
from drift_sdk.models.dflash import DFlashConfig, DFlashDecoder
from drift_sdk.models.mixers.attention import AttentionWeights
from drift_sdk.spec.model import Attention


class DraftedRows(Struct, frozen=True, kw_only=True):
    """The rows of B drafts of one pass, T of each: an anchor, and masks.

    rows [B * T]: those of a slot that drafts nothing have slot -1. last_seen [B * T] int32: see
    `anchor_rows`.
    """

    rows: Rows
    last_seen: Tensor


class _SeenRows(Struct, frozen=True, kw_only=True):
    """Attention in the layers where rows see the same rows of their draft.

    is_causal: a row sees no rows after its own. path [max_rows, E] int32: see `TreePaths`.
    """

    is_causal: bool
    groups: AttentionGroups
    path: Tensor


def draft_paths(num_masks: int, *, is_causal: bool) -> Tensor:
    """The rows that each row of a draft sees, [1 + num_masks, E] int32 as `TreePaths` has them. E has room
    for the positions of these rows: their own, or num_masks more."""
    row = torch.arange(1 + num_masks, dtype=torch.int32)
    seen = row.where(row <= row[:, None], -1) if is_causal else row.expand(1 + num_masks, -1)
    return torch.nn.functional.pad(seen, (0, 0 if is_causal else num_masks), value=-1)


class DraftAttention:
    """Attention of drafted rows to the keys of their sequences before the anchor, and to each other.

    Rows that see those behind them are given the position `last_seen`, and a window of as many tokens more.
    """

    def __init__(self, drafted: DraftedRows, kinds: Sequence[_SeenRows], config: DFlashConfig) -> None:
        """kinds: those that the head's layers have, each once."""
        rows, self._is_causal, self._num_masks = drafted.rows, config.is_causal, config.num_masks
        assert rows.kv_slot is not None
        self._kinds: dict[bool, tuple[AttentionGroups, PlannedRows, TreePaths]] = {}
        for kind in kinds:
            position = rows.position if kind.is_causal else drafted.last_seen
            planned = PlannedRows(rows.slot, position, 1 + config.num_masks)
            paths = TreePaths(rows.position, rows.kv_slot, kind.path[: len(rows.slot)])
            self._kinds[kind.is_causal] = kind.groups, planned, paths

    def plan(self) -> None:
        for groups, rows, _ in self._kinds.values():
            groups.plan(rows)

    def attend(self, layer: LayerAttention) -> None:
        is_causal = self._is_causal[layer.index]
        groups, rows, paths = self._kinds[is_causal]
        if layer.window and not is_causal:
            layer = replace(layer, window=layer.window + self._num_masks)
        groups.attend_trees(layer, rows, paths)


class DFlashRoundDrafter:
    """A `RoundDrafter` that computes what `DFlashDrafter` does, for slots and rows known only to the device.

    aux_layers: the head's. kv_cache: its keys and values, in the target's blocks.
    """

    is_ngram: Tensor | None = None

    def __init__(
        self,
        draft: DFlashDecoder,
        target: ModelResources,
        table: SlotTable,
        workspace: Workspace,
        sizes: RoundSizes,
        *,
        stages: StageMarks = NO_STAGE_MARKS,
    ) -> None:
        """sizes: of the largest round and the largest prefill step."""
        config, decoder = draft.config, draft.decoder()
        self.aux_layers: Sequence[int] = draft.aux_layers
        self._draft, self._num_masks = draft, config.num_masks
        self._table, self._workspace, self._stages = table, workspace, stages
        self._choice = DraftChoice(draft.target_ids.to(torch.int32), table, workspace, "dflash")
        num_rows = sizes.max_num_slots * (1 + config.num_masks)
        # Masks may stand behind the longest sequence. All layers use the blocks that keep all tokens.
        longest = target.limits.max_model_len + config.num_masks
        limits = replace(target.limits, max_model_len=longest, num_window_blocks=0)
        self.kv_cache = PagedKVCache(decoder, limits, num_rows)
        self._model = ModelResources(decoder=decoder, cache=self.kv_cache, tuned=target.tuned, limits=limits)
        self._kinds = [
            self._seen_rows(is_causal, num_rows, sizes.max_num_slots, longest)
            for is_causal in sorted(set(config.is_causal))
        ]
        # Taken at their largest: smaller requests are views of these.
        self._hidden = HiddenStates.take(workspace, "dflash", decoder, num_rows, ())
        self._features(max(sizes.max_num_slots * (sizes.max_draft_tokens + 1), sizes.max_prefill_rows))

    def propose(self, rows: Rows, *, num_slots: int, num_draft_tokens: int) -> None:
        if num_draft_tokens == 0:
            return

        normed = self._compute(rows, num_slots)[:, 1 : 1 + num_draft_tokens]
        outputs = self._workspace.take("dflash_outputs", tuple(normed.shape), normed.dtype)
        outputs.copy_(normed)
        note_library_kernel(outputs)
        with self._stages("draft_lm_head"):
            self._choose(rows, outputs.flatten(0, 1), num_draft_tokens)

    def draft_extend(self, verified: VerifiedRows) -> None:
        rows = verified.rows
        slot, token, position = (
            self._take(name, rows.slot.shape[0]) for name in ("slot", "token", "position")
        )
        round_rows(rows.slot, rows.position, verified.chosen, verified.emitted, (slot, token, position))
        self._store(slot, rows.position, verified.hidden)

    def draft_extend_prefill(self, chunks: ComputedChunks) -> None:
        self._store(chunks.rows.slot, chunks.rows.position, chunks.hidden)

    def _compute(self, rows: Rows, num_slots: int) -> Tensor:
        """The normalised outputs [B, T, hidden] of anchors and masks."""
        num_rows = num_slots * (1 + self._num_masks)
        drafted = self._drafted_rows(rows, num_rows)
        attention = DraftAttention(drafted, self._kinds, self._draft.config)
        make_pass = exact_pass if num_rows <= MAX_MULTIPLY_ROWS else fast_pass
        forward = make_pass(
            self._model,
            drafted.rows,
            self._table.block_table,
            self._workspace,
            attention,
            self._hidden.first(num_rows),
        )
        with self._stages("draft_model"):
            forward.run()
        return forward.normed.view(num_slots, 1 + self._num_masks, -1)

    def _drafted_rows(self, rows: Rows, num_rows: int) -> DraftedRows:
        """The rows of anchors and masks, behind a round's rows."""
        slot, token, position, last_seen = (
            self._take(name, num_rows) for name in ("slot", "token", "position", "last_seen")
        )
        kv_slot = self._workspace.take("dflash_row_kv_slot", (num_rows,), torch.int64)
        anchor_rows(
            rows.slot,
            rows.token,
            rows.position,
            (slot, token, position, last_seen, kv_slot),
            num_masks=self._num_masks,
            mask_token=self._draft.config.mask_token_id,
            first_kv_slot=self.kv_cache.first_tree_slot,
        )
        found = Rows(slot=slot, token=token, position=position, kv_slot=kv_slot)
        return DraftedRows(rows=found, last_seen=last_seen)

    def _choose(self, rows: Rows, normed: Tensor, num_depths: int) -> None:
        """Choose all drafts of a round from the normalised outputs [N, hidden] of masks."""
        num_tokens = len(normed)
        logits, _ = self._products(num_tokens).multiply(normed, self._draft.weights.head, None)
        following = Rows(*(self._take(f"next_{name}", num_tokens) for name in ("slot", "token", "position")))
        self._choice.choose(logits, rows, following, depth=1, num_depths=num_depths)

    def _store(self, slot: Tensor, position: Tensor, hidden: HiddenStates) -> None:
        """Store keys and values of rows [R] that the target has computed; none of rows of slot -1. hidden: of
        these rows."""
        draft, cache, num_rows = self._draft, self.kv_cache, slot.shape[0]
        features, products = self._fuse(hidden.aux), self._products(num_rows)
        for index, (layer, weights) in enumerate(draft.layers()):
            spec, mixer = layer.mixer, weights.mixer
            assert isinstance(spec, Attention) and isinstance(mixer, AttentionWeights)
            matrix, bias, num_skipped = draft.weights.context_projection(index)
            product, bias = products.multiply(features, matrix, bias)
            rotation, norm = cache.rotation(spec), spec.head_norm
            rotate_and_store(
                product[..., num_skipped:],
                slot,
                position,
                self._table.block_table,
                rotation.cos,
                rotation.sin,
                features.new_empty(num_rows, 0, spec.head_dim),
                cache.layer(index),
                bias=None if bias is None else bias[num_skipped:],
                query_norm=mixer.query_norm,
                key_norm=mixer.key_norm,
                eps=0.0 if norm is None else norm.eps,
                norm_kind="rounded" if norm is None else norm.kind,
            )

    def _fuse(self, aux_hidden: Sequence[Tensor]) -> Tensor:
        """Features [R, hidden] of rows, as `DFlashDecoder.features` computes them."""
        draft, norm = self._draft, self._draft.config.shape.final_norm
        joined, features = self._features(aux_hidden[0].shape[0])
        torch.cat(tuple(aux_hidden), dim=1, out=joined)
        note_library_kernel(joined)
        stream = self._workspace.take("dflash_stream", tuple(features.shape), features.dtype)
        stream.zero_()
        note_library_kernel(stream)
        product, _ = self._products(len(joined)).multiply(joined, draft.weights.fc, None)
        add_norm(stream, product, draft.weights.hidden_norm, features, eps=norm.eps, norm_kind=norm.kind)
        return features

    def _features(self, num_rows: int) -> tuple[Tensor, Tensor]:
        """Buffers for the target's residual streams [R, num_features * target_hidden] side by side, and for
        features [R, hidden]."""
        config, dtype = self._draft.config, self._draft.dtype
        width = len(config.aux_layers) * config.target_hidden_size
        joined = self._workspace.take("dflash_joined", (num_rows, width), dtype)
        return joined, self._workspace.take("dflash_features", (num_rows, config.shape.hidden_size), dtype)

    def _products(self, num_rows: int) -> Products:
        """Products of so many rows. Drafts are verified, so their bits do not matter."""
        if num_rows > MAX_MULTIPLY_ROWS:
            return LibraryProducts(self._workspace, num_rows)

        return ExactProducts(self._model.tuned, None, self._workspace, num_rows)

    def _seen_rows(self, is_causal: bool, num_rows: int, num_slots: int, longest: int) -> _SeenRows:
        """Attention of up to num_rows rows of num_slots drafts, the last of which lies before position
        `longest`."""
        config, num_masks = self._draft.config, self._num_masks
        more = 0 if is_causal else num_masks
        shapes = []
        for layer, is_own in zip(config.shape.layers, config.is_causal, strict=True):
            assert isinstance(layer.mixer, Attention)
            shape = AttentionShape.of_spec(layer.mixer)
            if is_own == is_causal:
                shapes.append(replace(shape, window=shape.window + more) if shape.window else shape)
        groups = AttentionGroups(
            self._workspace,
            self._draft.device,
            tuple(dict.fromkeys(shapes)),
            max_num_keys=longest + 1 + more,
            num_sequences=num_slots,
            num_rows=1 + num_masks,
        )
        path = draft_paths(num_masks, is_causal=is_causal).to(self._draft.device)
        return _SeenRows(is_causal=is_causal, groups=groups, path=path.repeat(num_slots, 1))

    def _take(self, name: str, num_rows: int) -> Tensor:
        """An uninitialised column of rows, int32."""
        return self._workspace.take(f"dflash_row_{name}", (num_rows,), torch.int32)
