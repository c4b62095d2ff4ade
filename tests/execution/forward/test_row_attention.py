from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from prompt_chunks import Prompt

from drift_sdk._kernels.attention import paged_attention
from drift_sdk._kernels.attention.exact_prefill_attention import exact_prefill_config
from drift_sdk._kernels.attention.partitions import Partitions
from drift_sdk._kernels.attention.planned_rows import PlannedRows
from drift_sdk._kernels.attention.prefill_tiles import TILE_FIELDS, prefill_tiles
from drift_sdk._kernels.common.launch_order import checked_launches
from drift_sdk.execution.device.workspace import Workspace
from drift_sdk.execution.forward import attention_groups
from drift_sdk.execution.forward.attention_groups import AttentionGroups, AttentionShape
from drift_sdk.execution.forward.row_attention import ChunkAttention, MixedAttention, SequenceAttention

pytestmark = pytest.mark.kernel

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
HEADS, NUM_CHUNK_ROWS, MAX_KEYS = ((32, 8, 128), 150, 2048) if CUDA else ((2, 1, 16), 20, 320)
STARTS = (MAX_KEYS - 1, MAX_KEYS // 3, 0)
"""Positions of the rows of sequences."""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16] if CUDA else [torch.float32], ids=str)
def test_rows_of_sequences_beside_chunks_have_the_bits_that_they_have_alone(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Queries and keys are written just before. bfloat16 goes through kernels in CUDA C++ where there are."""
    start = MAX_KEYS - NUM_CHUNK_ROWS
    chunks = [(0, start, NUM_CHUNK_ROWS), *((slot, place, 1) for slot, place in enumerate(STARTS, 1))]
    prompt = Prompt(chunks, HEADS, 64, DEVICE, dtype, MAX_KEYS)
    config = exact_prefill_config(HEADS[2], dtype, NUM_CHUNK_ROWS)
    expected = prompt.exact(config, Partitions())

    begun: list[bool] = []
    attend = attention_groups.paged_attention

    def noted(*arguments: object, beside_chunks: bool) -> None:
        begun.append(beside_chunks)
        attend(*arguments, beside_chunks=beside_chunks)  # type: ignore[arg-type]

    monkeypatch.setattr(attention_groups, "paged_attention", noted)
    shape = AttentionShape(
        num_kv_heads=HEADS[1], group=HEADS[0] // HEADS[1], head_dim=HEADS[2], max_num_keys=MAX_KEYS
    )
    slots = torch.arange(1, 1 + len(STARTS), dtype=torch.int32, device=DEVICE)
    rows = PlannedRows(slots, torch.tensor(STARTS, dtype=torch.int32, device=DEVICE), 1)
    for max_scratch_bytes in (None, 1):  # one group of sequences, and one for each
        groups = AttentionGroups(
            Workspace(torch.device(DEVICE)),
            torch.device(DEVICE),
            shape,
            num_sequences=len(STARTS),
            num_rows=1,
            max_scratch_bytes=max_scratch_bytes,
        )
        tiles = first_tiles(prompt, config.tile_rows)
        mixed = MixedAttention(ChunkAttention(tiles, config), SequenceAttention(groups, rows), NUM_CHUNK_ROWS)
        mixed.plan()
        for _ in range(20 if CUDA else 1):
            layer = prompt.layer()
            layer = replace(layer, query=torch.full_like(layer.query, torch.nan))
            kv = replace(layer.kv, keys=torch.full_like(layer.kv.keys, torch.nan))
            with checked_launches():
                layer.query.copy_(prompt.query)
                kv.keys.copy_(prompt.keys)
                mixed.attend(replace(layer, kv=kv))
            assert torch.equal(layer.out, expected)
    assert begun[:1] == [True] and begun[-3:] == [True, False, False]


@pytest.mark.parametrize("has_pdl", [False, True])
def test_the_kernel_starts_beside_chunks_where_there_is_dependent_launch(
    has_pdl: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[bool] = []

    class Kernel:
        def __getitem__(self, grid: object) -> Callable[..., None]:
            return lambda **given: started.append(given["BESIDE_CHUNKS"])

    monkeypatch.setattr(paged_attention, "_attend", Kernel())
    monkeypatch.setattr(paged_attention, "add_partitions", lambda *_: None)
    monkeypatch.setattr(paged_attention, "uses_pdl", lambda: has_pdl)
    prompt = Prompt([(0, 3, 1)], HEADS, 64, DEVICE, torch.float32)
    shape = AttentionShape(
        num_kv_heads=HEADS[1], group=HEADS[0] // HEADS[1], head_dim=HEADS[2], max_num_keys=64
    )
    where = torch.device(DEVICE)
    groups = AttentionGroups(Workspace(where), where, shape, num_sequences=1, num_rows=1)
    slot, position = torch.tensor([[0], [3]], dtype=torch.int32, device=DEVICE)
    for beside_chunks in (False, True):
        groups.attend(prompt.layer(), PlannedRows(slot, position, 1), beside_chunks=beside_chunks)
    assert started == [False, has_pdl]


def first_tiles(prompt: Prompt, tile_rows: int) -> torch.Tensor:
    """Tiles of the first chunk, and unused ones."""
    found = np.full((-(-NUM_CHUNK_ROWS // tile_rows) + 2, TILE_FIELDS), -1, dtype=np.int32)
    prefill_tiles(prompt.chunks[:1], tile_rows, found)
    return torch.from_numpy(found).to(DEVICE)
