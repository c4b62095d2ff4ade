from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from prompt_chunks import Prompt

from drift_sdk._kernels.attention import decode
from drift_sdk._kernels.attention.decode import AttentionConfig
from drift_sdk._kernels.attention.exact_prefill import exact_prefill_config
from drift_sdk._kernels.attention.layer_attention import LayerAttention
from drift_sdk._kernels.attention.plan import PlannedRows
from drift_sdk._kernels.attention.prefill import TILE_FIELDS, has_cuda_prefill, prefill_tiles
from drift_sdk._kernels.attention.softmax import Partitions
from drift_sdk._kernels.launch.launch_order import LaunchOrderError, checked_launches, note_library_kernel
from drift_sdk.execution.device.memory import Workspace
from drift_sdk.execution.forward import attention
from drift_sdk.execution.forward.attention import (
    AttentionGroups,
    AttentionShape,
    ChunkAttention,
    MixedAttention,
    SequenceAttention,
)

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

    begun: list[str] = []
    attend, attend_chunks = attention.paged_attention, attention.exact_prefill_attention

    def noted(*arguments: object, beside_chunks: bool) -> None:
        begun.append("beside" if beside_chunks else "behind")
        attend(*arguments, beside_chunks=beside_chunks)  # type: ignore[arg-type]

    def noted_chunks(*arguments: object) -> None:
        begun.append("chunks")
        attend_chunks(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(attention, "paged_attention", noted)
    monkeypatch.setattr(attention, "exact_prefill_attention", noted_chunks)
    slots = torch.arange(1, 1 + len(STARTS), dtype=torch.int32, device=DEVICE)
    rows = PlannedRows(slots, torch.tensor(STARTS, dtype=torch.int32, device=DEVICE), 1)
    for max_scratch_bytes in (None, 1):  # one group of sequences, and one for each
        groups = groups_of(len(STARTS), MAX_KEYS, max_scratch_bytes)
        tiles = first_tiles(prompt, config.tile_rows)
        mixed = MixedAttention(ChunkAttention(tiles, config), SequenceAttention(groups, rows), NUM_CHUNK_ROWS)
        mixed.plan()
        for _ in range(20 if CUDA else 1):
            layer = prompt.layer()
            layer = replace(layer, query=torch.full_like(layer.query, torch.nan))
            kv = replace(layer.kv, keys=torch.full_like(layer.kv.keys, torch.nan))
            with checked_launches():
                layer.query.copy_(prompt.query)
                note_library_kernel(layer.query)
                kv.keys.copy_(prompt.keys)
                note_library_kernel(kv.keys)
                mixed.attend(replace(layer, kv=kv))
            assert torch.equal(layer.out, expected)
    first = "beside" if has_cuda_prefill(prompt.layer(), config.tile_rows, Partitions()) else "behind"
    assert begun[:2] == ["chunks", first]
    assert begun[-4:] == ["chunks", first, "behind", "behind"]


@pytest.mark.gpu
def test_sequences_that_start_beside_no_chunks_are_noticed() -> None:
    prompt = Prompt([(0, 99, 1)], HEADS, 64, DEVICE, torch.bfloat16)
    groups = groups_of(1, 100)
    slot, position = torch.tensor([[0], [99]], dtype=torch.int32, device=DEVICE)
    rows, layer = PlannedRows(slot, position, 1), prompt.layer()
    groups.plan(rows)
    for beside_chunks in (False, True):
        with (
            checked_launches(),
            pytest.raises(LaunchOrderError) if beside_chunks else nullcontext(),
        ):
            note_library_kernel(layer.query)
            groups.attend(layer, rows, beside_chunks=beside_chunks)


@pytest.mark.parametrize("has_kernel", [False, True])
def test_sequences_start_beside_the_chunks_of_the_kernel_that_permits_it(
    has_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[tuple[int, ...], int, Partitions | None]] = []

    def has_cuda_prefill(layer: LayerAttention, tile_rows: int, partitions: Partitions | None) -> bool:
        asked.append((tuple(layer.query.shape), tile_rows, partitions))
        return has_kernel

    begun: list[bool] = []
    monkeypatch.setattr(attention, "has_cuda_prefill", has_cuda_prefill)
    monkeypatch.setattr(attention, "exact_prefill_attention", lambda *_: None)
    monkeypatch.setattr(attention, "paged_attention", lambda *_, beside_chunks: begun.append(beside_chunks))
    prompt = Prompt([(0, 0, NUM_CHUNK_ROWS), (1, 3, 1)], HEADS, 64, DEVICE, torch.float32)
    groups = groups_of(1, 64)
    slot, position = torch.tensor([[1], [3]], dtype=torch.int32, device=DEVICE)
    config = exact_prefill_config(HEADS[2], torch.float32, NUM_CHUNK_ROWS)
    chunks = ChunkAttention(first_tiles(prompt, config.tile_rows), config)
    sequences = SequenceAttention(groups, PlannedRows(slot, position, 1))
    MixedAttention(chunks, sequences, NUM_CHUNK_ROWS).attend(prompt.layer())
    assert begun == [has_kernel]
    assert asked == [((NUM_CHUNK_ROWS, HEADS[0], HEADS[2]), config.tile_rows, Partitions())]


@pytest.mark.parametrize("has_pdl", [False, True])
def test_the_kernel_starts_beside_chunks_where_there_is_dependent_launch(
    has_pdl: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[bool] = []

    class Kernel:
        def __getitem__(self, grid: object) -> Callable[..., None]:
            return lambda **given: started.append(given["BESIDE_CHUNKS"])

    monkeypatch.setattr(decode, "_attend", Kernel())
    monkeypatch.setattr(decode, "add_partitions", lambda *_: None)
    monkeypatch.setattr(decode, "uses_pdl", lambda: has_pdl)
    prompt = Prompt([(0, 3, 1)], HEADS, 64, DEVICE, torch.float32)
    groups = groups_of(1, 64)
    slot, position = torch.tensor([[0], [3]], dtype=torch.int32, device=DEVICE)
    rows, layer = PlannedRows(slot, position, 1), prompt.layer()
    for beside_chunks in (False, True):
        groups.attend(layer, rows, beside_chunks=beside_chunks)
    assert started == [False, has_pdl]
    groups.attend(layer, rows)
    ((scratch,),) = groups.scratches.values()
    decode.paged_attention(layer, rows, scratch, AttentionConfig())
    assert started[2:] == [False, False]


def groups_of(num_sequences: int, max_num_keys: int, max_scratch_bytes: int | None = None) -> AttentionGroups:
    """Attention of sequences of one row, in groups that `max_scratch_bytes` have room for."""
    where = torch.device(DEVICE)
    shape = AttentionShape(num_kv_heads=HEADS[1], group=HEADS[0] // HEADS[1], head_dim=HEADS[2])
    return AttentionGroups(
        Workspace(where),
        where,
        (shape,),
        max_num_keys=max_num_keys,
        num_sequences=num_sequences,
        num_rows=1,
        max_scratch_bytes=max_scratch_bytes,
    )


def first_tiles(prompt: Prompt, tile_rows: int) -> torch.Tensor:
    """Tiles of the first chunk, and unused ones."""
    found = np.full((-(-NUM_CHUNK_ROWS // tile_rows) + 2, TILE_FIELDS), -1, dtype=np.int32)
    prefill_tiles(prompt.chunks[:1], tile_rows, found)
    return torch.from_numpy(found).to(DEVICE)
