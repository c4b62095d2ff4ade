from __future__ import annotations

import pytest
import torch
from msgspec.structs import replace
from references.attention import paged_attention_reference

from drift_sdk._kernels.attention.layer_attention import LayerAttention, LayerKV
from drift_sdk._kernels.attention.plan import PlannedRows
from drift_sdk.execution.device.memory import Workspace
from drift_sdk.execution.forward import attention as attention_module
from drift_sdk.execution.forward.attention import AttentionGroups, AttentionShape

pytestmark = pytest.mark.kernel

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NUM_KV_HEADS, GROUP, HEAD_DIM, BLOCK_SIZE = 1, 2, 16, 16
LENGTHS = (70, 1, 150, 33, 9)
MAX_NUM_KEYS = 160
WINDOWS = (0, 40)
BYTES_PER_SEQUENCE = NUM_KV_HEADS * 2 * 2 * GROUP * (HEAD_DIM + 2) * 4  # two partitions, two rows


def groups(workspace: Workspace, max_scratch_bytes: int | None, num_rows: int = 2) -> AttentionGroups:
    return AttentionGroups(
        workspace,
        DEVICE,
        [
            AttentionShape(num_kv_heads=NUM_KV_HEADS, group=GROUP, head_dim=HEAD_DIM, window=window)
            for window in WINDOWS
        ],
        max_num_keys=MAX_NUM_KEYS,
        num_sequences=len(LENGTHS),
        num_rows=num_rows,
        max_scratch_bytes=max_scratch_bytes,
    )


def test_bits_do_not_depend_on_groups() -> None:
    generator = torch.Generator().manual_seed(3)
    blocks_each = -(-MAX_NUM_KEYS // BLOCK_SIZE)
    shape = (len(LENGTHS) * blocks_each, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    keys, values = torch.randn(2, *shape, generator=generator).to(DEVICE)
    block_table = torch.randperm(shape[0], generator=generator).view(len(LENGTHS), -1).int().to(DEVICE)
    row_slot = torch.tensor([0, 0, 1, -1, 2, 2, 3, 3, 4, 4], dtype=torch.int32, device=DEVICE)
    last = [position for length in LENGTHS for position in (max(length - 2, 0), length - 1)]
    row_position = torch.tensor(last, dtype=torch.int32, device=DEVICE)
    query = torch.randn(len(row_slot), NUM_KV_HEADS * GROUP, HEAD_DIM, generator=generator).to(DEVICE)
    sinks = torch.randn(NUM_KV_HEADS * GROUP, generator=generator).to(DEVICE)
    rows = PlannedRows(row_slot, row_position, 2)
    layer = LayerAttention(
        query=query, out=query, kv=LayerKV(keys, values), block_table=block_table, scale=0.3, sinks=sinks
    )
    found: dict[int, list[torch.Tensor]] = {window: [] for window in WINDOWS}
    for group_size in (5, 2, 1):
        attention = groups(Workspace(DEVICE), group_size * BYTES_PER_SEQUENCE)
        assert attention.group_size == group_size
        attention.plan(rows)
        for window in WINDOWS:
            out = torch.full_like(query, torch.nan)
            attention.attend(replace(layer, out=out, window=window), rows)
            found[window].append(out)

    for window, outputs in found.items():
        expected = paged_attention_reference(replace(layer, window=window), rows)
        torch.testing.assert_close(outputs[0].double(), expected, rtol=0, atol=2e-5)
        assert all(torch.equal(out, outputs[0]) for out in outputs)
    with pytest.raises(ValueError, match="6 sequences: expected at most 5"):
        attention.plan(PlannedRows(row_slot[:6], row_position[:6], 1))


def test_partial_sums_share_bounded_memory() -> None:
    workspace = Workspace(DEVICE)
    first = groups(workspace, 3 * BYTES_PER_SEQUENCE, num_rows=2)
    second = groups(workspace, 3 * BYTES_PER_SEQUENCE, num_rows=1)
    scratches = [scratch for one in (first, second) for each in one.scratches.values() for scratch in each]
    assert len(scratches) == (2 + 1) * len(WINDOWS)  # two groups and one
    assert len({scratch.sums.data_ptr() for scratch in scratches}) == 1
    num_bytes = sum(buffer.numel() for buffer in workspace._buffers.values())
    assert num_bytes <= 3 * BYTES_PER_SEQUENCE
    assert groups(workspace, 1).group_size == 1  # a group has at least one sequence, whatever the bound
    assert groups(workspace, None).group_size == len(LENGTHS)
    if DEVICE.type == "cpu":
        assert attention_module.scratch_bytes(DEVICE) == attention_module.CPU_SCRATCH_BYTES
