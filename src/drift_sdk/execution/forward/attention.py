"""Attention of a forward pass: projections, rotation, keys and values in the cache, and the output.

Rows that are decoded or verified and rows of prompts are summed in the same order, so a row's bits do not
depend on which of them it goes through. Sequences are computed a group at a time, in scratch memory of
bounded size. Rounds of partial verification read a part of the cache, and others choose this part.

`AttentionForward`, at the end, is the mixer; the classes before it compute its kinds of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from msgspec import Struct
from msgspec.structs import replace
from torch import Tensor

from drift_sdk._kernels.attention.decode import (
    AttentionConfig,
    AttentionScratch,
    attention_config,
    paged_attention,
)
from drift_sdk._kernels.attention.exact_prefill import (
    ExactPrefillConfig,
    exact_prefill_attention,
    wide_prefill_attention,
)
from drift_sdk._kernels.attention.expanded import BLOCK_KEYS, PART_FIELDS, PART_KEYS, expand_latents
from drift_sdk._kernels.attention.latent import latent_attention, latent_prompt_attention
from drift_sdk._kernels.attention.layer_attention import LayerAttention, LayerKV
from drift_sdk._kernels.attention.plan import AttentionPlan, BlockTable, PlannedRows, plan_attention
from drift_sdk._kernels.attention.prefill import PrefillAttentionConfig, has_cuda_prefill, prefill_attention
from drift_sdk._kernels.attention.softmax import WIDE_HEAD, Partitions
from drift_sdk._kernels.exchange import PeerSums
from drift_sdk._kernels.layers.gates import gate_attention
from drift_sdk._kernels.layers.rope_store import Projected, rotate_and_store
from drift_sdk._kernels.trees.tree_attention import TreePaths, tree_attention
from drift_sdk._kernels.views import Retrieval, block_shares, select_blocks, view_blocks
from drift_sdk.execution.device.memory import Workspace
from drift_sdk.execution.device.slot_table import SlotTable
from drift_sdk.execution.forward.caches import ModelResources
from drift_sdk.execution.forward.products import Products
from drift_sdk.execution.forward.rows import LayerBuffers, Rows
from drift_sdk.models.decoder import Decoder
from drift_sdk.models.mixers.attention import AttentionWeights
from drift_sdk.spec.model import AnyAttention, Attention, LatentAttention
from drift_sdk.speculation import ViewLayout

SCRATCH_SHARE = 64
"""The partial sums take at most 1 / SCRATCH_SHARE of a GPU's memory: 2.2 GiB of an H200's 140 GiB, which is
room for 256 sequences of 131,072 tokens that decode one row each (8 KV heads, groups of 4, heads of 128)."""
CPU_SCRATCH_BYTES = 2**28
"""The most memory that partial sums take on a CPU, where kernels are interpreted."""


class AttentionShape(Struct, frozen=True, kw_only=True):
    """Sizes of the attention of some layers.

    num_kv_heads: of the KV cache. head_dim: of its values. group: query heads for each KV head. window: how
    many keys rows see; 0: all before them. is_latent: values are parts of keys.
    """

    num_kv_heads: int
    group: int
    head_dim: int
    window: int = 0
    is_latent: bool = False

    @classmethod
    def of_spec(cls, spec: AnyAttention) -> AttentionShape:
        return cls(
            num_kv_heads=spec.num_kv_heads,
            group=spec.group,
            head_dim=spec.value_dim,
            window=spec.window or 0,
            is_latent=spec.kv.is_latent,
        )

    @classmethod
    def of_layer(cls, layer: LayerAttention) -> AttentionShape:
        return cls(
            num_kv_heads=layer.kv.num_heads,
            group=layer.group,
            head_dim=layer.value_dim,
            window=layer.window,
            is_latent=layer.kv.latent_dim > 0,
        )

    @property
    def partitions(self) -> Partitions:
        """Borders at which keys are cut."""
        if self.is_latent:
            return Partitions.of_latents(self.group)

        return Partitions.of_layer(self.head_dim, self.window)

    def num_partitions(self, max_num_keys: int, num_rows: int) -> int:
        """The most partitions of a sequence of up to `max_num_keys` keys that `num_rows` rows see."""
        return self.partitions.room(max_num_keys, self.window, num_rows)

    def num_partials(self, max_num_keys: int, num_rows: int) -> int:
        """The most partial sums of `num_rows` rows of a sequence."""
        return self.num_kv_heads * self.num_partitions(max_num_keys, num_rows) * num_rows * self.group


class AttentionGroups:
    """Paged attention for up to `num_sequences` sequences of up to `num_rows` rows each.

    Partial sums of many rows at long contexts would take gigabytes. Where they exceed the bound, the
    sequences are attended in groups, one launch after the other. A sequence's bits do not depend on its
    group. All users of a workspace share the same scratch memory.

    group_size: most sequences of a group. scratches: for each shape of layers, the scratch memory of each
    group; all share the partial sums, each has its own plan.
    """

    def __init__(
        self,
        workspace: Workspace,
        device: torch.device,
        shapes: Sequence[AttentionShape],
        *,
        max_num_keys: int,
        num_sequences: int,
        num_rows: int,
        blocks: BlockTable | None = None,
        max_scratch_bytes: int | None = None,
    ) -> None:
        """shapes: of the layers, each once. max_num_keys: most keys of a sequence. blocks: in which shared
        prefixes are looked for; None: keys are read for each sequence. max_scratch_bytes: the bound; None:
        `scratch_bytes` of the device."""
        self._blocks = blocks
        num_bytes = sequence_bytes(shapes, max_num_keys, num_rows)
        most = scratch_bytes(device) if max_scratch_bytes is None else max_scratch_bytes
        self.group_size: int = max(1, min(num_sequences, most // num_bytes))

        def scratch(shape: AttentionShape) -> AttentionScratch:
            plan = AttentionPlan(
                self.group_size,
                max_num_keys,
                shape.partitions,
                device,
                window=shape.window,
                num_rows=num_rows,
            )
            rows = num_rows * shape.group
            sizes = (self.group_size, shape.num_kv_heads, plan.max_num_partitions, rows)

            def take(name: str, *last: int) -> Tensor:
                return workspace.take(f"attention_{name}", (*sizes, *last), torch.float32)

            return AttentionScratch(plan, take("sums", shape.head_dim), take("maxima"), take("weights"))

        # The shapes that need most take their memory first.
        partials = [shape.num_partials(max_num_keys, num_rows) for shape in shapes]
        sums = [number * shape.head_dim for number, shape in zip(partials, shapes, strict=True)]
        for name, sizes in (("sums", sums), ("maxima", partials), ("weights", partials)):
            workspace.take(f"attention_{name}", (self.group_size * max(sizes),), torch.float32)
        num_groups = -(-num_sequences // self.group_size)
        self.scratches: dict[AttentionShape, list[AttentionScratch]] = {
            shape: [scratch(shape) for _ in range(num_groups)] for shape in shapes
        }

    @classmethod
    def of_model(
        cls,
        model: ModelResources,
        workspace: Workspace,
        block_table: Tensor | None,
        *,
        num_sequences: int,
        num_rows: int,
    ) -> AttentionGroups:
        """The attention of a model.

        block_table [S, max_blocks] int32: of slots whose shared prefixes are read once, or None.
        """
        spec = model.decoder.spec
        mixers = (layer.mixer for layer in spec.layers)
        found = (AttentionShape.of_spec(mixer) for mixer in mixers if isinstance(mixer, AnyAttention))
        return cls(
            workspace,
            model.decoder.device,
            tuple(dict.fromkeys(found)),
            max_num_keys=model.limits.max_model_len + 1,
            num_sequences=num_sequences,
            num_rows=num_rows,
            # Of latents, a tile of a product has rows of one sequence alone.
            blocks=None
            if block_table is None or spec.has_latents
            else BlockTable(block_table, model.limits.block_size),
        )

    @property
    def shares_prefixes(self) -> bool:
        """True if keys that lie in the same blocks are read once for several sequences."""
        return self._blocks is not None

    def plan(self, rows: PlannedRows) -> None:
        """Distribute the keys of rows over programs; once a step, before any layer calls `attend`. What
        `attend_trees` attends needs a plan without shared prefixes."""
        for shape in self.scratches:
            for scratch, part in self._groups(rows, shape):
                plan_attention(rows.of_rows(part), scratch.plan, self._blocks, shape.group)

    def attend(self, layer: LayerAttention, rows: PlannedRows, *, beside_chunks: bool = False) -> None:
        """Attend the rows that `plan` was last called with; see `paged_attention`.

        Raises ValueError for more sequences than the object was made for.
        """
        for scratch, part in self._groups(rows, AttentionShape.of_layer(layer)):
            if layer.kv.latent_dim:
                latent_attention(layer.of_rows(part), rows.of_rows(part), scratch)
                continue

            paged_attention(
                layer.of_rows(part),
                rows.of_rows(part),
                scratch,
                _config(layer, scratch),
                beside_chunks=beside_chunks and part.start == 0,
            )

    def attend_trees(self, layer: LayerAttention, rows: PlannedRows, paths: TreePaths) -> None:
        """`attend` for rows that are nodes of trees; see `tree_attention`."""
        nodes_per_tree = rows.rows_per_sequence
        for scratch, part in self._groups(rows, AttentionShape.of_layer(layer)):
            trees = paths.of_trees(
                part.start // nodes_per_tree, part.stop // nodes_per_tree, rows.num_sequences
            )
            tree_attention(layer.of_rows(part), rows.of_rows(part), trees, scratch, _config(layer, scratch))

    def _groups(self, rows: PlannedRows, shape: AttentionShape) -> list[tuple[AttentionScratch, slice]]:
        """The scratch memory and the rows of each group, for layers of this shape."""
        scratches, num_rows = self.scratches[shape], rows.slot.shape[0]
        size = self.group_size * rows.rows_per_sequence
        firsts = range(0, num_rows, size)
        if len(firsts) > len(scratches):
            most = self.group_size * len(scratches)
            raise ValueError(f"{rows.num_sequences} sequences: expected at most {most}")

        return [
            (scratch, slice(first, min(first + size, num_rows)))
            for scratch, first in zip(scratches, firsts, strict=False)
        ]


def _config(layer: LayerAttention, scratch: AttentionScratch) -> AttentionConfig:
    return attention_config(layer.head_dim, layer.kv.keys.dtype, scratch.plan.partitions.tile)


def sequence_bytes(shapes: Sequence[AttentionShape], max_num_keys: int, num_rows: int) -> int:
    """Bytes of the partial sums of a sequence of up to `max_num_keys` keys with so many rows."""
    return max(shape.num_partials(max_num_keys, num_rows) * (shape.head_dim + 2) * 4 for shape in shapes)


def scratch_bytes(device: torch.device) -> int:
    """The most bytes that partial sums may take on a device."""
    if device.type != "cuda":
        return CPU_SCRATCH_BYTES

    return int(torch.cuda.get_device_properties(device).total_memory) // SCRATCH_SHARE


class RowAttention(Protocol):
    """Attention of a step's rows to the keys that they see."""

    def plan(self) -> None:
        """Prepare for the rows; once a step, before any layer calls `attend`."""

    def attend(self, layer: LayerAttention) -> None:
        """Fill `layer.out` for all rows."""


class SequenceAttention:
    """Attention of some rows of each sequence, to be decoded or verified."""

    def __init__(self, groups: AttentionGroups, rows: PlannedRows) -> None:
        self._groups, self._rows = groups, rows

    def plan(self) -> None:
        self._groups.plan(self._rows)

    def attend(self, layer: LayerAttention, *, beside_chunks: bool = False) -> None:
        self._groups.attend(layer, self._rows, beside_chunks=beside_chunks)


class TreeAttention:
    """Attention of some nodes of each tree, to be verified or drafted further."""

    def __init__(self, groups: AttentionGroups, rows: PlannedRows, paths: TreePaths) -> None:
        self._groups, self._rows, self._paths = groups, rows, paths

    def plan(self) -> None:
        self._groups.plan(self._rows)

    def attend(self, layer: LayerAttention) -> None:
        self._groups.attend_trees(layer, self._rows, self._paths)


class ExpandedKeys(Struct, frozen=True, kw_only=True):
    """Keys and values of heads that a step expands from latents, one layer after the other, and the rows of
    chunks that attend to them.

    tiles: int32 [num_tiles, 4] of these rows (see `prefill_tiles`); the slot of a tile is the first block of
    its keys. rows: int32 [R], 1 for these rows, else 0. parts: int32, see `fill_parts`. kv: of blocks for all
    parts. blocks: int32 [num_blocks, 1], ascending: a block table of which each row begins with the block of
    its number, and goes on with the rows behind it.
    """

    tiles: Tensor
    rows: Tensor
    parts: Tensor
    config: ExactPrefillConfig
    kv: LayerKV
    blocks: Tensor

    @classmethod
    def take(
        cls,
        model: ModelResources,
        workspace: Workspace,
        words: Tensor,
        num_tiles: int,
        num_rows: int,
        config: ExactPrefillConfig,
    ) -> ExpandedKeys | None:
        """Those of a step, in memory that all steps share. words: int32, `num_tiles` tiles, `num_rows` rows
        and the parts; empty: None."""
        if not len(words):
            return None

        spec, decoder = model.decoder.spec.attention, model.decoder
        assert isinstance(spec, LatentAttention)
        first_row, first_part = 4 * num_tiles, 4 * num_tiles + num_rows
        parts = words[first_part:]
        num_blocks = (len(parts) - 1) // PART_FIELDS * PART_KEYS // BLOCK_KEYS
        shape = (num_blocks, spec.num_heads, BLOCK_KEYS, spec.output_dim)
        keys = workspace.take("expanded_keys", shape, decoder.dtype)
        values = workspace.take("expanded_values", shape, decoder.dtype)
        blocks = workspace.take("expanded_blocks", (num_blocks, 1), torch.int32)
        blocks.copy_(torch.arange(num_blocks)[:, None])
        return cls(
            tiles=words[:first_row].view(-1, 4),
            rows=words[first_row:first_part],
            parts=parts,
            config=config,
            kv=LayerKV(keys, values),
            blocks=blocks,
        )

    def attend(self, layer: LayerAttention, weight: Tensor) -> None:
        """Expand the keys and values of a layer, and fill `layer.out` for the rows of `tiles`.

        layer: with latents as keys, and heads of queries that are not absorbed. weight: as of
        `expand_latents`.
        """
        expand_latents(layer.kv, layer.block_table, self.parts, weight, self.kv.keys, self.kv.values)
        expanded = replace(layer, kv=self.kv, block_table=self.blocks)
        exact_prefill_attention(expanded, self.tiles, self.config, expanded.partitions)


class ChunkAttention:
    """Attention of chunks of prompts, cut into `tiles` [num_tiles, 4] (see `prefill_tiles`).

    expanded: of the rows that are in none of them; None: all are.
    """

    def __init__(
        self, tiles: Tensor, config: ExactPrefillConfig, expanded: ExpandedKeys | None = None
    ) -> None:
        self._tiles, self._config, self.expanded = tiles, config, expanded

    def plan(self) -> None:
        """Nothing: the tiles come from the host."""

    def attend(self, layer: LayerAttention) -> None:
        if layer.kv.latent_dim:
            latent_prompt_attention(layer, self._tiles, self._config.tile_rows, layer.partitions)
        else:
            exact_prefill_attention(layer, self._tiles, self._config, layer.partitions)

    def permits_early_start(self, layer: LayerAttention) -> bool:
        """Return True if the launch after `attend` may start while the kernel of `attend` still runs."""
        if layer.kv.latent_dim:
            return False

        return has_cuda_prefill(layer, self._config.tile_rows, layer.partitions)


class FastChunkAttention:
    """Attention of chunks of prompts, cut into `tiles` [num_tiles, 4], with other bits than decoding. Wide
    heads have no kernel of other bits."""

    def __init__(self, tiles: Tensor, config: PrefillAttentionConfig) -> None:
        self._tiles, self._config = tiles, config

    def plan(self) -> None:
        """Nothing: the tiles come from the host."""

    def attend(self, layer: LayerAttention) -> None:
        if layer.head_dim > WIDE_HEAD:
            wide_prefill_attention(layer, self._tiles, self._config.tile_rows, layer.partitions)
        else:
            prefill_attention(layer, self._tiles, self._config)


class MixedAttention:
    """Attention of `num_chunk_rows` rows of prompts, followed by rows of sequences."""

    def __init__(self, chunks: ChunkAttention, sequences: SequenceAttention, num_chunk_rows: int) -> None:
        self._chunks, self._sequences, self._num_chunk_rows = chunks, sequences, num_chunk_rows
        self.expanded = chunks.expanded

    def plan(self) -> None:
        self._sequences.plan()

    def attend(self, layer: LayerAttention) -> None:
        """The launch for chunks has to come directly before the one for sequences, which may start beside it:
        that one reads queries and keys before it waits."""
        chunk_layer = layer.of_rows(slice(self._num_chunk_rows))
        self._chunks.attend(chunk_layer)
        self._sequences.attend(
            layer.of_rows(slice(self._num_chunk_rows, None)),
            beside_chunks=self._chunks.permits_early_start(chunk_layer),
        )


class Views(Struct, frozen=True, kw_only=True):
    """The views of all slots. tables [L, S, layout.num_blocks] int32: block tables of each layer, which each
    partial round makes for its slots."""

    layout: ViewLayout
    retrieval: Retrieval
    tables: Tensor

    @classmethod
    def allocate(cls, layout: ViewLayout, decoder: Decoder, table: SlotTable) -> Views:
        """The state of a table's slots, for a model."""
        num_layers, num_slots = decoder.spec.num_layers, table.block_table.shape[0]

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=decoder.device)

        return cls(
            layout=layout,
            retrieval=Retrieval(
                dropped=table.dropped,
                pending=table.pending,
                pending_token=zeros(num_slots, layout.refresh_tokens),
                selected=zeros(num_layers, num_slots, layout.num_retrieved),
            ),
            tables=zeros(num_layers, num_slots, layout.num_blocks),
        )


class ViewAttention:
    """Attention of rows, equally many of each sequence, to the keys of its views.

    Raises ValueError for groups that look for shared prefixes: sequences that share blocks have views of
    their own.
    """

    def __init__(
        self,
        groups: AttentionGroups,
        rows: PlannedRows,
        views: Views,
        block_table: Tensor,
        workspace: Workspace,
    ) -> None:
        if groups.shares_prefixes:
            raise ValueError("groups: expected some that look for no shared prefixes")

        self._groups, self._rows, self._views, self._block_table = groups, rows, views, block_table
        position = workspace.take("view_positions", (rows.slot.shape[0],), torch.int32)
        self._view_rows = replace(rows, position=position)

    def plan(self) -> None:
        view_blocks(
            self._rows.slot,
            self._rows.position,
            self._block_table,
            self._views.retrieval,
            self._views.tables,
            self._view_rows.position,
            self._views.layout,
            rows_per_sequence=self._rows.rows_per_sequence,
        )
        self._groups.plan(self._view_rows)

    def attend(self, layer: LayerAttention) -> None:
        self._groups.attend(replace(layer, block_table=self._views.tables[layer.index]), self._view_rows)


class RefreshAttention:
    """Attention of a refresh's rows to all keys of their sequences. In each layer it also chooses the blocks
    of views, from the queries of the round's rows, which are the last of each sequence."""

    def __init__(
        self,
        groups: AttentionGroups,
        rows: PlannedRows,
        round_rows: PlannedRows,
        views: Views,
        decoder: Decoder,
        max_blocks: int,
        workspace: Workspace,
    ) -> None:
        """rows: those of tiles as sequences, see `ViewLayout.refresh_tiles`. max_blocks: of a block table."""
        self._groups, self._rows, self._round_rows, self._views = groups, rows, round_rows, views
        attention = decoder.spec.attention
        shape = (round_rows.num_sequences, attention.num_kv_heads, max_blocks)
        num_query_rows = round_rows.rows_per_sequence * attention.group
        self._sums = workspace.take("block_sums", (*shape, num_query_rows), torch.float32)
        self._shares = workspace.take("block_shares", shape, torch.float32)

    def plan(self) -> None:
        self._groups.plan(self._rows)

    def attend(self, layer: LayerAttention) -> None:
        self._groups.attend(layer, self._rows)
        rows, views = self._round_rows, self._views
        block_shares(
            layer.query,
            layer.kv.keys,
            layer.block_table,
            rows.slot,
            rows.position,
            self._sums,
            self._shares,
            num_sequences=rows.num_sequences,
            scale=layer.scale,
        )
        selected = views.retrieval.selected[layer.index]
        select_blocks(self._shares, rows.slot, rows.position, selected, views.layout)


class AttentionForward:
    """Kernels that compute the attention of R rows in a layer."""

    def __init__(
        self,
        model: ModelResources,
        rows: Rows,
        block_table: Tensor,
        workspace: Workspace,
        attention: RowAttention,
        products: Products,
    ) -> None:
        """block_table [S, max_blocks] int32. attention: of the rows."""
        self._cache, self._rows, self._block_table = model.cache, rows, block_table
        self._window_table = block_table if model.window_table is None else model.window_table
        self._attention, self._products = attention, products
        self._buffers = LayerBuffers.take(workspace, model.decoder, rows.slot.shape[0])

    def run(
        self, x: Tensor, weights: AttentionWeights, spec: Attention, index: int
    ) -> tuple[Tensor | PeerSums, Tensor | None]:
        """Store keys and values of layer `index`, if it has its own. Returns its output for x [R, hidden],
        normalised, as `Products` return it."""
        rows, cache = self._rows, self._cache
        query, attended = self._buffers.heads[spec.num_heads, spec.head_dim]
        kv = cache.layer(index if spec.kv_of is None else spec.kv_of)
        rotation, projected = cache.rotation(spec), _projected(spec)
        block_table = self._block_table if spec.window is None else self._window_table
        product, bias = self._products.multiply(x, weights.qkv, weights.qkv_bias)
        width = (spec.num_heads + (len(projected) - 1) * spec.num_kv_heads) * spec.head_dim
        rotate_and_store(
            product[..., :width],
            rows.slot,
            rows.position,
            block_table,
            rotation.cos,
            rotation.sin,
            query,
            kv,
            bias=None if bias is None else bias[:width],
            query_norm=weights.query_norm,
            key_norm=weights.key_norm,
            eps=0.0 if spec.head_norm is None else spec.head_norm.eps,
            norm_kind="rounded" if spec.head_norm is None else spec.head_norm.kind,
            row_kv_slot=rows.kv_slot,
            query_scale=rotation.query_factors,
            projected=projected,
            has_value_norm=spec.has_value_norm and spec.kv_of is None,
        )
        self._attention.attend(
            LayerAttention(
                query=query,
                out=attended,
                kv=kv,
                block_table=block_table,
                window=spec.window or 0,
                scale=spec.scale,
                sinks=weights.sinks,
                index=index,
            )
        )
        rows_of_heads = attended.flatten(1)
        if spec.has_gate:
            gate_attention(rows_of_heads, product[..., width:])
        return self._products.multiply_down(rows_of_heads, weights.output, weights.output_bias, 2 * index)


def _projected(spec: Attention) -> Projected:
    if spec.kv_of is not None:
        return "q"

    return "qkv" if spec.has_values else "qk"
