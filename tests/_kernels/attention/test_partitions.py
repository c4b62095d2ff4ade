"""Borders of partitions: against their definition, in Python and in kernels."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import triton.language as tl

from drift_sdk._kernels.attention.softmax import Partitions, partition_of, partition_start
from drift_sdk._kernels.launch.kernel import kernel

pytestmark = pytest.mark.kernel

EVEN = Partitions(narrow=32, num_doublings=0, tile=16)
MANY = [
    EVEN,
    Partitions(narrow=32, narrow_end=64, num_doublings=0, tile=16),
    Partitions(narrow=32, narrow_end=64, num_doublings=1, tile=16),
    Partitions(narrow=32, narrow_end=64, num_doublings=2, tile=16),
    Partitions(narrow=32, narrow_end=256, num_doublings=3, tile=32),
    Partitions(narrow=48, narrow_end=96, num_doublings=3, tile=16),
]
NUM_KEYS = 1100


def width_at(partitions: Partitions, position: int) -> int:
    """The width of the partition that begins at a position: it has doubled at narrow_end, and wherever the
    position has doubled since."""
    width, border = partitions.narrow, partitions.narrow_end
    for _ in range(partitions.num_doublings):
        if position >= border:
            width, border = 2 * width, 2 * border
    return width


def borders_of(partitions: Partitions, num_keys: int) -> list[int]:
    """All borders, as far as the first one that is not before num_keys."""
    borders = [0]
    while borders[-1] < num_keys:
        borders.append(borders[-1] + width_at(partitions, borders[-1]))
    return borders


def test_default_partitions_are_128_then_256_then_512_wide() -> None:
    expected = [*range(0, 2048, 128), *range(2048, 4096, 256), *range(4096, 9217, 512)]
    assert borders_of(Partitions(), 9000) == expected
    assert [Partitions().start(index) for index in range(len(expected))] == expected


@pytest.mark.parametrize("partitions", [*MANY, Partitions()], ids=str)
def test_partitions_have_the_borders_of_their_definition(partitions: Partitions) -> None:
    num_keys = max(NUM_KEYS, 3 * partitions.narrow_end)
    borders = borders_of(partitions, num_keys)
    for index, (begin, end) in enumerate(pairwise(borders)):
        assert partitions.start(index) == begin and partitions.start(index + 1) == end
        assert begin % partitions.tile == end % partitions.tile == 0
        for position in range(begin, end):
            assert partitions.index(position) == index
            assert partitions.floor(position) == begin
            assert partitions.count(position + 1) == index + 1
    assert partitions.count(0) == 0
    assert partitions.room(num_keys, window=0, num_rows=4) == len(borders) - 1


@pytest.mark.parametrize("num_keys", [1, 2, 17, 32, 33, 49, 50, 129])
@pytest.mark.parametrize("partitions", MANY, ids=str)
def test_most_partitions_are_those_at_any_place(partitions: Partitions, num_keys: int) -> None:
    """At least as many; where the width changes nowhere, not more."""
    partition_of_key = [
        index
        for index, (begin, end) in enumerate(pairwise(borders_of(partitions, NUM_KEYS)))
        for _ in range(begin, end)
    ]
    pairs = zip(partition_of_key, partition_of_key[num_keys - 1 :], strict=False)
    most = max(last - first + 1 for first, last in pairs)
    assert most <= partitions.most(num_keys)
    assert partitions.num_doublings or most == partitions.most(num_keys)
    found = [partitions.room(end, num_keys - 3, 4) for end in range(1, NUM_KEYS) if num_keys > 3]
    expected = [min(partition_of_key[end - 1] + 1, partitions.most(num_keys)) for end in range(1, NUM_KEYS)]
    assert not found or found == expected


@pytest.mark.parametrize(
    ("window", "num_doublings"), [(0, 2), (1, 0), (128, 0), (2048, 0), (2049, 2), (4096, 2)]
)
def test_short_windows_have_narrow_partitions(window: int, num_doublings: int) -> None:
    for head_dim in (16, 256):
        assert Partitions.of_layer(head_dim, window) == Partitions(num_doublings=num_doublings)
    for head_dim in (257, 512):
        assert Partitions.of_layer(head_dim, window) == Partitions(num_doublings=num_doublings, tile=32)


def test_latents_of_many_heads_have_wide_partitions() -> None:
    """The sums of a partition are those of all heads: of DeepSeek-V3 256 KiB, read and written, beside keys
    of 1,152 bytes. Up to 2,048 keys they are less than twice the bytes of keys, in place of 3.6 times."""
    assert Partitions.of_latents(20) == Partitions.of_latents(64) == Partitions()
    wide = Partitions.of_latents(128)
    assert (wide.narrow, wide.start(9), wide.start(13)) == (256, 2560, 5120)
    sums = [2 * 4 * 512 * 128 * each.count(2048) for each in (Partitions(), wide)]
    assert [round(number / (1152 * 2048), 1) for number in sums] == [3.6, 1.8]


@pytest.mark.parametrize(
    "fields",
    [
        {"narrow": 24, "narrow_end": 96, "tile": 16},
        {"narrow": 32, "narrow_end": 96, "tile": 16},
        {"narrow": 32, "narrow_end": 0, "tile": 16},
    ],
    ids=str,
)
def test_borders_that_would_not_be_whole_are_rejected(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected whole tiles in a partition"):
        Partitions(**fields)


@kernel
def _find(
    positions_ptr,  # [grid] int32
    found_ptr,  # [grid, 2] int32
    NARROW: tl.constexpr,
    NARROW_END: tl.constexpr,
    NUM_DOUBLINGS: tl.constexpr,
    SIZE: tl.constexpr,
):
    """The partition of each position, and where it begins."""
    place = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    partition = partition_of(tl.load(positions_ptr + place), NARROW, NARROW_END, NUM_DOUBLINGS)
    tl.store(found_ptr + 2 * place, partition)
    tl.store(found_ptr + 2 * place + 1, partition_start(partition, NARROW, NARROW_END, NUM_DOUBLINGS))


@pytest.mark.parametrize("partitions", [*MANY, Partitions()], ids=str)
def test_kernels_find_the_partitions_that_python_finds(partitions: Partitions, device: str) -> None:
    most = max(NUM_KEYS, 3 * partitions.narrow_end)
    size = 2 ** (most - 1).bit_length()
    positions = torch.arange(size, dtype=torch.int32)
    positions[-3:] = torch.tensor([131_071, 131_072, 2**30])
    found = torch.full((size, 2), -7, dtype=torch.int32, device=device)
    _find[(2,)](
        positions.to(device),
        found,
        NARROW=partitions.narrow,
        NARROW_END=partitions.narrow_end,
        NUM_DOUBLINGS=partitions.num_doublings,
        SIZE=size // 2,
    )
    expected = [[partitions.index(place), partitions.floor(place)] for place in positions.tolist()]
    assert found.tolist() == expected
