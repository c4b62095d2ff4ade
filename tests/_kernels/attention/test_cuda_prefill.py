"""Attention of prompts in CUDA C++: near the reference, and in decoding's order bit for bit as in Triton."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import tolerances
import torch
from prompt_chunks import Prompt

from drift_sdk._kernels.attention import exact_prefill as in_triton
from drift_sdk._kernels.attention.exact_prefill import ExactPrefillConfig, exact_prefill_config
from drift_sdk._kernels.attention.layer_attention import LayerAttention, LayerKV
from drift_sdk._kernels.attention.prefill import cuda_prefill_attention, has_cuda_prefill
from drift_sdk._kernels.attention.softmax import WIDE_HEAD, Partitions

pytestmark = pytest.mark.kernel

# Slot, position of the first row, rows: one row and an empty context, ends on borders of tiles and partitions
# and behind them, warpgroups without rows, tiles that only the second warpgroup sees.
CHUNKS = [
    [(0, 0, 1)],
    [(0, 63, 65), (1, 0, 64), (2, 127, 1), (3, 2047, 66)],
    [(0, 5, 37), (1, 700, 129), (2, 2051, 70), (3, 4500, 333)],
]
MAX_KEYS = 4864
SHAPES = [
    *((heads, rows) for heads in ((32, 8, 128), (1, 1, 128), (14, 2, 64), (9, 3, 64)) for rows in (64, 128)),
    ((6, 1, 256), 64),
    ((8, 4, 256), 64),
]
"""Heads, KV heads and dimensions of a head, and rows of a tile."""


WINDOWS = [
    ((32, 8, 128), 128, 1024),
    ((32, 8, 128), 64, 1024),
    ((14, 2, 64), 128, 128),
    ((9, 3, 64), 64, 100),
    ((8, 4, 256), 64, 1024),
    ((6, 1, 256), 64, 65),
    ((6, 1, 256), 64, 4096),
]
"""As SHAPES, with the keys that a row sees."""


CACHES = [*product((64, 256), (False, True))]
"""Tokens of a block, and whether layers have sinks."""
Alone = Callable[[Prompt, int], torch.Tensor]
Heads = tuple[int, int, int]


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Alone:
    """Attention of a prompt by the kernel in Triton."""

    def attend(prompt: Prompt, tile_rows: int) -> torch.Tensor:
        with monkeypatch.context() as patch:
            patch.setattr(in_triton, "has_cuda_prefill", lambda *_: False)
            config = ExactPrefillConfig(tile_rows=tile_rows)
            if prompt.query.shape[2] > 128:
                config = exact_prefill_config(prompt.query.shape[2], prompt.query.dtype)
            return prompt.exact(config, Partitions.of_layer(prompt.query.shape[2], prompt.window))

    return attend


def attend(
    prompt: Prompt, tile_rows: int, partitions: Partitions | None, num_unused: int = 1
) -> torch.Tensor:
    layer, tiles = prompt.layer(), prompt.tiles(tile_rows)
    unused = torch.full((num_unused, tiles.shape[1]), -1, dtype=torch.int32, device=tiles.device)
    assert has_cuda_prefill(layer, tile_rows, partitions)
    cuda_prefill_attention(layer, torch.cat((tiles, unused)), tile_rows, partitions)
    return layer.out


def assert_near(found: torch.Tensor, prompt: Prompt) -> None:
    tolerances.assert_near(found, prompt.expected(), inner=MAX_KEYS, magnitude=8.0, num_roundings=1)


@pytest.mark.gpu
@pytest.mark.parametrize("cache", CACHES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sums_of_all_shapes(
    shape: tuple[Heads, int], cache: tuple[int, bool], alone: Alone, device: str
) -> None:
    """With NaN wherever no key was written."""
    (heads, tile_rows), (block_size, has_sinks) = shape, cache
    for chunks in CHUNKS:
        prompt = Prompt(chunks, heads, block_size, device, torch.bfloat16, MAX_KEYS, has_sinks=has_sinks)
        assert_near(attend(prompt, tile_rows, None), prompt)
        exact = attend(prompt, tile_rows, Partitions())
        assert torch.equal(exact, alone(prompt, tile_rows)), chunks
        assert_near(exact, prompt)


@pytest.mark.gpu
@pytest.mark.parametrize("cache", CACHES, ids=str)
@pytest.mark.parametrize("shape", WINDOWS, ids=str)
def test_sums_of_windows(
    shape: tuple[Heads, int, int], cache: tuple[int, bool], alone: Alone, device: str
) -> None:
    """With NaN in all blocks that no row sees, also in those before the window."""
    (heads, tile_rows, window), (block_size, has_sinks) = shape, cache
    for chunks in CHUNKS:
        prompt = Prompt(
            chunks, heads, block_size, device, torch.bfloat16, MAX_KEYS, window=window, has_sinks=has_sinks
        )
        for slot, start, _ in chunks:
            passed = prompt.table[slot, : max(start - window + 1, 0) // block_size].long()
            prompt.keys[passed] = prompt.values[passed] = torch.nan
        exact = attend(prompt, tile_rows, Partitions.of_layer(heads[2], window))
        assert torch.equal(exact, alone(prompt, tile_rows)), chunks
        assert not exact.isnan().any()
        assert not has_cuda_prefill(prompt.layer(), tile_rows, None)


@pytest.mark.gpu
@pytest.mark.parametrize("cache", CACHES, ids=str)
@pytest.mark.parametrize("heads", [(8, 2, 512), (3, 1, 512), (32, 4, 512)], ids=str)
def test_sums_of_wide_heads(heads: Heads, cache: tuple[int, bool], alone: Alone, device: str) -> None:
    block_size, has_sinks = cache
    for chunks in CHUNKS:
        prompt = Prompt(chunks, heads, block_size, device, torch.bfloat16, MAX_KEYS, has_sinks=has_sinks)
        exact = attend(prompt, 64, Partitions.of_layer(512, 0))
        assert torch.equal(exact, alone(prompt, 64)), chunks
        assert_near(exact, prompt)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(64, 8, 64), (16, 2, 256), (8, 2, 512)], ids=str)
def test_sums_of_many_rows_with_sinks(heads: Heads, alone: Alone, device: str) -> None:
    """A few rows had other bits: the score of the sink was rounded once more."""
    prompt = Prompt([(0, 0, 4096)], heads, 64, device, torch.bfloat16, MAX_KEYS, has_sinks=True)
    assert torch.equal(attend(prompt, 64, Partitions.of_layer(heads[2], 0)), alone(prompt, 64))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("heads", "tile_rows"),
    [
        ((3, 1, 128), 64),
        ((3, 1, 128), 128),
        ((4, 2, 64), 64),
        ((4, 2, 64), 128),
        ((6, 1, 256), 64),
        ((2, 1, 512), 64),
    ],
    ids=str,
)
def test_a_cta_goes_through_tiles_of_different_lengths(
    heads: tuple[int, int, int],
    tile_rows: int,
    alone: Callable[[Prompt, int], torch.Tensor],
    device: str,
) -> None:
    """More tiles than CTAs, and enough for heads with the same keys to run first. The next tile begins
    at any stage of the rings."""
    for num_chunks in (200, 700):
        chunks = [(i % 4, 0, 1 + i * 37 % 191) for i in range(num_chunks)]
        prompt = Prompt(chunks, heads, 64, device, torch.bfloat16, MAX_KEYS)
        partitions = Partitions.of_layer(heads[2], 0)
        assert torch.equal(attend(prompt, tile_rows, partitions, num_unused=50), alone(prompt, tile_rows))
        if heads[2] <= WIDE_HEAD:
            assert_near(attend(prompt, tile_rows, None, num_unused=50), prompt)


@pytest.mark.gpu
@pytest.mark.parametrize(("head_dim", "tile_rows"), [(128, 64), (128, 128), (256, 64)])
def test_bits_of_a_row_do_not_depend_on_its_chunk(head_dim: int, tile_rows: int, device: str) -> None:
    whole = Prompt([(0, 0, 700)], (4, 2, head_dim), 64, device, torch.bfloat16, MAX_KEYS)
    expected = attend(whole, tile_rows, None)
    query = whole.query
    for start, num_rows in ((699, 1), (333, 367), (65, 200)):
        whole.chunks, whole.query = [(0, start, num_rows)], query[start : start + num_rows]
        assert torch.equal(attend(whole, tile_rows, None), expected[start : start + num_rows])


def test_other_attention_is_left_to_triton(device: str) -> None:
    kv = torch.empty(4, 2, 64, 128, dtype=torch.bfloat16, device=device)
    query = torch.empty(5, 4, 128, dtype=torch.bfloat16, device=device)
    table = torch.zeros(1, 4, dtype=torch.int32, device=device)

    def found(
        query: torch.Tensor = query,
        kv: torch.Tensor = kv,
        tile_rows: int = 64,
        partitions: Partitions | None = None,
        **options: int,
    ) -> bool:
        layer = LayerAttention(
            query=query, out=torch.empty_like(query), kv=LayerKV(kv, kv), block_table=table, **options
        )
        return has_cuda_prefill(layer, tile_rows, partitions)

    assert not found(window=64)
    assert not found(first_key=1)
    assert not found(partitions=Partitions(narrow=64))
    assert not found(partitions=Partitions(tile=32))
    assert not found(query.new_empty(5, 4 * 128 + 1)[:, :-1].view(5, 4, 128))
    assert not found(tile_rows=32)
    assert not found(kv=kv.view(8, 2, 32, 128))
    assert not found(query.half(), kv.half())
    assert not found(query[..., :80].contiguous(), kv[..., :80].contiguous())
    if not torch.cuda.is_available():
        assert not found()
