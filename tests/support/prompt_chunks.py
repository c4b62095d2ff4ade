"""Chunks of prompts over a paged cache, as inputs of exact prefill attention."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from references.attention import prefill_attention_reference

from drift_sdk._kernels.attention.decode import (
    MOST_WARPS,
    AttentionConfig,
    AttentionScratch,
    paged_attention,
)
from drift_sdk._kernels.attention.exact_prefill import ExactPrefillConfig, exact_prefill_attention
from drift_sdk._kernels.attention.layer_attention import LayerAttention, LayerKV
from drift_sdk._kernels.attention.plan import AttentionPlan, PlannedRows, plan_attention
from drift_sdk._kernels.attention.prefill import TILE_FIELDS, prefill_tiles
from drift_sdk._kernels.attention.softmax import WIDE_HEAD, Partitions

__all__ = ["Prompt"]


class Prompt:
    """Chunks over a paged cache whose unseen places are NaN."""

    def __init__(
        self,
        chunks: list[tuple[int, int, int]],
        heads: tuple[int, int, int],
        block_size: int,
        device: str,
        dtype: torch.dtype,
        max_keys: int = 192,
        *,
        window: int = 0,
        has_sinks: bool = False,
    ) -> None:
        num_heads, num_kv_heads, head_dim = heads
        generator = torch.Generator().manual_seed(num_heads + block_size)
        num_slots, max_blocks = 4, -(-max_keys // block_size)
        shape = (1 + num_slots * max_blocks, num_kv_heads, block_size, head_dim)
        self.keys, self.values = (torch.full(shape, torch.nan, dtype=dtype) for _ in range(2))
        table = 1 + torch.randperm(num_slots * max_blocks, generator=generator).view(num_slots, max_blocks)
        for slot, start, num_rows in chunks:
            position = torch.arange(start + num_rows)
            blocks = table[slot, position // block_size]
            for cache in (self.keys, self.values):
                seen = torch.randn(len(position), num_kv_heads, head_dim, generator=generator)
                cache[blocks, :, position % block_size] = seen.to(dtype)
        self.num_rows = sum(num_rows for _, _, num_rows in chunks)
        query = torch.randn(self.num_rows, num_heads, head_dim, generator=generator).to(dtype)
        self.query, self.keys, self.values = (t.to(device) for t in (query, self.keys, self.values))
        self.table = table.to(device, torch.int32)
        sinks = torch.randn(num_heads, generator=generator).to(device, dtype) if has_sinks else None
        self.options: dict[str, Any] = {"scale": 0.3 if window else None, "sinks": sinks}
        self.chunks, self.device, self.window = chunks, device, window

    def tiles(self, tile_rows: int) -> torch.Tensor:
        """One more than is needed: an unused tile."""
        most = sum(-(-num_rows // tile_rows) for _, _, num_rows in self.chunks) + 1
        found = np.zeros((most, TILE_FIELDS), dtype=np.int32)
        prefill_tiles(self.chunks, tile_rows, found)
        return torch.from_numpy(found).to(self.device)

    def exact(self, config: ExactPrefillConfig, partitions: Partitions) -> torch.Tensor:
        layer = self.layer()
        exact_prefill_attention(layer, self.tiles(config.tile_rows), config, partitions)
        return layer.out

    def layer(self, dtype: torch.dtype | None = None) -> LayerAttention:
        """dtype: of the output; None: that of the queries."""
        return LayerAttention(
            query=self.query,
            out=torch.full_like(self.query, torch.nan, dtype=dtype),
            kv=LayerKV(self.keys, self.values),
            block_table=self.table,
            window=self.window,
            **self.options,
        )

    def expected(self) -> torch.Tensor:
        layer = self.layer(torch.float64)
        prefill_attention_reference(layer, self.tiles(16))
        return layer.out

    def decoded(self, rows_per_sequence: int, partitions: Partitions, num_programs: int = 16) -> torch.Tensor:
        """The same rows, each `rows_per_sequence` of them one sequence to verify."""
        slots, positions = (
            torch.tensor([row[part] for row in self._rows()], dtype=torch.int32, device=self.device)
            for part in (0, 1)
        )
        rows, layer = PlannedRows(slots, positions, rows_per_sequence), self.layer()
        most = int(positions.max()) + 1
        plan = AttentionPlan(
            rows.num_sequences,
            most,
            partitions,
            torch.device(self.device),
            window=self.window,
            num_rows=rows_per_sequence,
        )
        plan_attention(rows, plan)
        scratch = AttentionScratch.allocate(
            plan,
            num_kv_heads=layer.kv.num_heads,
            num_rows=rows_per_sequence,
            group=layer.group,
            head_dim=layer.head_dim,
        )
        for tensor in (scratch.sums, scratch.maxima, scratch.weights):
            tensor.fill_(torch.nan)  # the kernels between the plan and attention
        num_warps = 2 if layer.head_dim <= WIDE_HEAD else MOST_WARPS
        config = AttentionConfig(num_programs=num_programs, num_warps=num_warps)
        paged_attention(layer, rows, scratch, config)
        return layer.out

    def _rows(self) -> list[tuple[int, int]]:
        return [(slot, start + row) for slot, start, num_rows in self.chunks for row in range(num_rows)]
