"""The kernel of paged attention as it is compiled for compute capability 9.0, without such a GPU.

A module for a process whose kernels are not interpreted.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence

import torch

from drift_sdk._kernels.attention.decode import AttentionScratch, attention_config, paged_attention
from drift_sdk._kernels.attention.layer_attention import LayerAttention, LayerKV
from drift_sdk._kernels.attention.plan import AttentionPlan, PlannedRows
from drift_sdk._kernels.attention.softmax import Partitions
from drift_sdk._kernels.launch.launch_order import access_of
from drift_sdk._kernels.launch.parallel_compile import KernelToCompile, recorded_kernels
from perf.cross_compile import target

__all__ = ["main"]

CACHED_LOAD = re.compile(r"\bld\.global(?!\S*\.cg)|\bcp\.async\.ca\b")
"""A load that may find earlier contents in the L1 cache."""


def main(arguments: Sequence[str]) -> int:
    """Print as JSON, for a size of heads and whether it starts beside chunks, what `_attend` reads and writes
    before it waits, and how many of these loads go through the L1 cache."""
    head_dim, beside_chunks = int(arguments[0]), arguments[1] == "beside"
    (kernel,) = [each for each in recorded(head_dim, beside_chunks) if each.name == "_attend"]
    code = kernel.compile().asm
    found = access_of(code["ttir"])
    early, _, _ = code["ptx"].partition("griddepcontrol.wait")
    result = {
        "reads_early": sorted(found.reads_early),
        "writes_early": sorted(found.writes_early),
        "triggers_early": found.triggers_early,
        "num_cached_loads": len(CACHED_LOAD.findall(early)),
    }
    sys.stdout.write(json.dumps(result))
    return 0


def recorded(head_dim: int, beside_chunks: bool) -> list[KernelToCompile]:
    """The kernels of the attention of 64 sequences of up to 4,096 keys."""
    meta, num_sequences, num_kv_heads, group, num_keys = torch.device("meta"), 64, 8, 4, 4096
    with target(90) as limits, recorded_kernels() as kernels:
        assert limits.has_pdl
        kv = torch.empty(num_keys, num_kv_heads, 64, head_dim, dtype=torch.bfloat16, device=meta)
        query = torch.empty(num_sequences, num_kv_heads * group, head_dim, dtype=torch.bfloat16, device=meta)
        numbers = torch.empty(num_sequences, num_keys // 64, dtype=torch.int32, device=meta)
        layer = LayerAttention(
            query=query, out=torch.empty_like(query), kv=LayerKV(kv, kv), block_table=numbers
        )
        rows = PlannedRows(numbers[:, 0].contiguous(), numbers[:, 1].contiguous(), 1)
        plan = AttentionPlan(num_sequences, num_keys, Partitions(), meta)
        scratch = AttentionScratch.allocate(
            plan, num_kv_heads=num_kv_heads, num_rows=1, group=group, head_dim=head_dim
        )
        config = attention_config(head_dim, torch.bfloat16, plan.partitions.tile)
        paged_attention(layer, rows, scratch, config, beside_chunks=beside_chunks)
    return [each for each in kernels if isinstance(each, KernelToCompile)]
