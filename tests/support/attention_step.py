"""Steps of paged attention for tests: rows, their cache, a plan and memory for sums."""

from __future__ import annotations

import torch

from drift_sdk._kernels.attention.attention_plan import AttentionPlan, plan_attention
from drift_sdk._kernels.attention.layer_attention import LayerAttention, LayerKV
from drift_sdk._kernels.attention.paged_attention import AttentionScratch
from drift_sdk._kernels.attention.partitions import Partitions
from drift_sdk._kernels.attention.planned_rows import PlannedRows
from drift_sdk._kernels.attention.shared_prefixes import BlockTable

__all__ = ["AttentionStep"]


class AttentionStep:
    """Rows of a step over a cache of shuffled blocks, in which NaN lies wherever no key was written."""

    def __init__(
        self,
        lengths: list[int],
        num_rows: int,
        heads: tuple[int, int, int],
        block_size: int,
        device: str,
        *,
        num_shared: int = 0,
    ) -> None:
        num_heads, num_kv_heads, head_dim = heads
        generator = torch.Generator(device).manual_seed(len(lengths) + num_rows)

        def randn(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device=device).to(torch.bfloat16)

        num_blocks = max(1, -(-max(lengths) // block_size))
        table = torch.randperm(len(lengths) * num_blocks, generator=generator, device=device)
        self.block_table = table.view(len(lengths), num_blocks).int()
        # Sequences of the same remainder begin with the same blocks.
        for index in range(num_shared, len(lengths)) if num_shared else ():
            first = self.block_table[index % num_shared, : num_blocks // 2]
            self.block_table[index, : num_blocks // 2] = first
        shape = (len(lengths) * num_blocks, num_kv_heads, block_size, head_dim)
        keys, values = torch.full((2, *shape), torch.nan, dtype=torch.bfloat16, device=device)
        for index, length in enumerate(lengths):
            for first in range(0, length, block_size):
                block, size = self.block_table[index, first // block_size], min(block_size, length - first)
                keys[block, :, :size] = randn(num_kv_heads, size, head_dim)
                values[block, :, :size] = randn(num_kv_heads, size, head_dim)
        slots = torch.arange(len(lengths), device=device).repeat_interleave(num_rows)
        ends = torch.tensor(lengths, device=device).repeat_interleave(num_rows)
        positions = ends - num_rows + torch.arange(num_rows, device=device).repeat(len(lengths))
        self.rows = PlannedRows(
            torch.where(positions >= 0, slots, -1).int(), positions.clamp(min=0).int(), num_rows
        )
        query = randn(len(slots), num_heads, head_dim)
        query[positions < 0] = torch.nan
        self.layer = LayerAttention(
            query=query,
            out=torch.full_like(query, torch.nan),
            kv=LayerKV(keys, values),
            block_table=self.block_table,
        )
        plan = AttentionPlan(len(lengths), num_blocks * block_size, Partitions(), query.device)
        blocks = BlockTable(self.block_table, block_size) if num_shared else None
        plan_attention(self.rows, plan, blocks, self.layer.group)
        self.scratch = AttentionScratch.allocate(
            plan, num_kv_heads=num_kv_heads, num_rows=num_rows, group=self.layer.group, head_dim=head_dim
        )
