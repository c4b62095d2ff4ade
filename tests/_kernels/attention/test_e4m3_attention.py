"""Attention over caches of e4m3 numbers: against float64, and bit for bit against itself, decoded, verified,
in trees and as prompts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import steady_dots
import torch
from msgspec.structs import replace
from references.attention import cache_numbers, pack_cache, paged_attention_reference, unpack_cache
from references.trees import tree_attention_reference
from slow_cases import slow_after
from tolerances import assert_near

from drift_sdk._kernels.attention.decode import (
    AttentionConfig,
    AttentionScratch,
    attention_config,
    paged_attention,
)
from drift_sdk._kernels.attention.exact_prefill import ExactPrefillConfig, exact_prefill_attention
from drift_sdk._kernels.attention.layer_attention import LayerAttention, LayerKV
from drift_sdk._kernels.attention.plan import AttentionPlan, PlannedRows, plan_attention
from drift_sdk._kernels.attention.prefill import (
    TILE_FIELDS,
    PrefillAttentionConfig,
    prefill_attention,
    prefill_tiles,
)
from drift_sdk._kernels.attention.softmax import WIDE_HEAD, Partitions
from drift_sdk._kernels.launch.gpu_limits import HOPPER, limited_gpu
from drift_sdk._kernels.trees.tree_attention import TreePaths, tree_attention
from drift_sdk._kernels.trees.tree_rows import PATH_ENTRIES
from drift_sdk.quantised.formats import E4M3, quantise_e4m3

pytestmark = pytest.mark.kernel

IS_GPU = torch.cuda.is_available()
DTYPES = (torch.float32, torch.bfloat16, torch.float16) if IS_GPU else (torch.float32,)
SMALL = Partitions(narrow=32, narrow_end=64, num_doublings=2, tile=16)
NAN_CODE = 0x7F
SCALES = (torch.tensor([0.37, 1.9, 0.011]), torch.tensor([2.3, 0.05, 1.25]))


class Step:
    """The last `num_rows` rows of sequences over a cache of e4m3 numbers with scales. What no row sees is
    NaN."""

    def __init__(
        self,
        lengths: list[int],
        num_rows: int,
        *,
        device: str,
        dtype: torch.dtype = torch.float32,
        block_size: int = 16,
        num_kv_heads: int = 2,
        group: int = 2,
        head_dim: int = 32,
        window: int = 0,
        has_sinks: bool = False,
    ) -> None:
        generator = torch.Generator(device).manual_seed(len(lengths))

        def randn(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device=device)

        max_blocks = -(-max(lengths) // block_size)
        num_blocks = len(lengths) * max_blocks
        shape = (num_blocks, num_kv_heads, block_size, head_dim)
        table = torch.randperm(num_blocks, generator=generator, device=device)
        self.block_table = table.view(len(lengths), max_blocks).int()
        codes = [torch.full(shape, NAN_CODE, dtype=torch.uint8, device=device) for _ in range(2)]
        scales = [scale[:num_kv_heads].to(device) for scale in SCALES]
        for index, length in enumerate(lengths):
            first = max(0, length - num_rows - window + 1) if window else 0
            positions = torch.arange(first, length, device=device)
            blocks = self.block_table[index].long()[positions // block_size]
            for cache, scale in zip(codes, scales, strict=True):
                heads = randn(len(positions), num_kv_heads, head_dim)
                stored = pack_cache(quantise_e4m3(heads, scale[:, None])).view(torch.uint8)
                cache[blocks, :, positions % block_size] = stored
        self.kv = LayerKV(*(cache.view(E4M3) for cache in codes), *scales)
        self.query = randn(len(lengths) * num_rows, num_kv_heads * group, head_dim).to(dtype)
        self.sinks = randn(num_kv_heads * group).to(dtype) if has_sinks else None
        self.lengths, self.num_rows, self.window = lengths, num_rows, window
        slots = torch.arange(len(lengths), device=device).repeat_interleave(num_rows)
        starts = torch.tensor(lengths, device=device) - num_rows
        positions = (starts[:, None] + torch.arange(num_rows, device=device)).flatten()
        self.rows = PlannedRows(slots.int(), positions.int(), num_rows)

    def layer(self) -> LayerAttention:
        return LayerAttention(
            query=self.query,
            out=torch.full_like(self.query, torch.nan),
            kv=self.kv,
            block_table=self.block_table,
            window=self.window,
            sinks=self.sinks,
        )

    def scratch(self, partitions: Partitions) -> AttentionScratch:
        layer = self.layer()
        plan = AttentionPlan(
            len(self.lengths),
            max(self.lengths),
            partitions,
            self.query.device,
            window=self.window,
            num_rows=self.num_rows,
        )
        plan_attention(self.rows, plan)
        scratch = AttentionScratch.allocate(
            plan,
            num_kv_heads=self.kv.num_heads,
            num_rows=self.num_rows,
            group=layer.group,
            head_dim=layer.head_dim,
        )
        for tensor in (scratch.sums, scratch.maxima, scratch.weights):
            tensor.fill_(torch.nan)
        return scratch

    def decoded(self, partitions: Partitions) -> torch.Tensor:
        layer, config = self.layer(), AttentionConfig(num_programs=264 if IS_GPU else 4)
        paged_attention(layer, self.rows, self.scratch(partitions), config)
        return layer.out

    @property
    def paths(self) -> TreePaths:
        """Each sequence's rows as a chain of nodes."""
        device, block_size, position = self.query.device, self.kv.block_size, self.rows.position
        blocks = self.block_table[self.rows.slot.long(), position.long() // block_size]
        path = torch.full((self.num_rows, PATH_ENTRIES), -1, dtype=torch.int32, device=device)
        for row in range(self.num_rows):
            path[row, : row + 1] = torch.arange(row + 1, device=device)
        kv_slot = blocks.long() * block_size + position % block_size
        return TreePaths(position, kv_slot, path.repeat(len(self.lengths), 1))

    def in_trees(self, partitions: Partitions) -> torch.Tensor:
        layer, config = self.layer(), AttentionConfig(num_programs=264 if IS_GPU else 4)
        tree_attention(layer, self.rows, self.paths, self.scratch(partitions), config)
        return layer.out

    def tiles(self, tile_rows: int) -> torch.Tensor:
        chunks = [(slot, length - self.num_rows, self.num_rows) for slot, length in enumerate(self.lengths)]
        found = np.zeros((len(chunks) * -(-self.num_rows // tile_rows), TILE_FIELDS), dtype=np.int32)
        prefill_tiles(chunks, tile_rows, found)
        return torch.from_numpy(found).to(self.query.device)

    def as_prompt(self, partitions: Partitions, config: ExactPrefillConfig | None = None) -> torch.Tensor:
        config = config or ExactPrefillConfig(tile_rows=16, num_warps=4, num_stages=1, narrow_stages=1)
        layer = self.layer()
        exact_prefill_attention(layer, self.tiles(config.tile_rows), config, partitions)
        return layer.out

    def as_fast_prompt(self, config: PrefillAttentionConfig) -> torch.Tensor:
        layer = self.layer()
        prefill_attention(layer, self.tiles(config.tile_rows), config)
        return layer.out

    def expected(self) -> torch.Tensor:
        return paged_attention_reference(self.layer(), self.rows)

    def use_scales_of_one(self) -> None:
        ones = torch.ones(self.kv.num_heads, device=self.query.device)
        self.kv = replace(self.kv, key_scale=ones, value_scale=ones)

    def use_numbers(self) -> None:
        """Replace the cache by one of its codes as numbers of the storage type, without scales."""
        numbers = (unpack_cache(x).to(self.query.dtype) for x in (self.kv.keys, self.kv.values))
        self.kv = LayerKV(*numbers)

    def assert_attended(self, found: torch.Tensor) -> None:
        magnitude = cache_numbers(self.kv.values, self.kv.value_scale).nan_to_num().abs().max().item()
        num_roundings = 0 if found.dtype == torch.float32 else 1
        expected = self.expected()
        assert_near(
            found, expected, inner=max(self.lengths), magnitude=magnitude, num_roundings=num_roundings
        )


SHAPES = [
    {"block_size": 4, "num_kv_heads": 1, "group": 2, "head_dim": 80},
    {"block_size": 64, "num_kv_heads": 3, "group": 1, "head_dim": 24},
    {"window": 7, "has_sinks": True, "group": 1},
    {"window": 40, "block_size": 64, "head_dim": 64, "num_kv_heads": 1},
    {"block_size": 64, "num_kv_heads": 2, "group": 1, "head_dim": 264},
    {"window": 40, "has_sinks": True, "num_kv_heads": 1, "head_dim": 512},
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_is_near_float64(shape: dict[str, Any], dtype: torch.dtype, device: str) -> None:
    """All kernels are compared. Scales differ between heads, and between keys and values."""
    step = Step([3, 17, 130] if IS_GPU else [3, 66], 3, device=device, dtype=dtype, **shape)
    is_wide = step.query.shape[2] > WIDE_HEAD
    kernels = (step.decoded, step.as_prompt) if is_wide else (step.decoded, step.in_trees, step.as_prompt)
    for attend in kernels:
        step.assert_attended(
            attend(Partitions.of_layer(step.query.shape[2], step.window) if IS_GPU else SMALL)
        )
    if not is_wide:
        step.assert_attended(
            step.as_fast_prompt(PrefillAttentionConfig(tile_rows=16, tile_keys=16, num_stages=1))
        )
    expected = tree_attention_reference(step.layer(), step.rows, step.paths)
    torch.testing.assert_close(expected, step.expected())


@pytest.fixture
def exact_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter multiplies by BLAS, whose order of summation may vary. Tensor cores add products of 16
    numbers, one after the other, also to the sum of another product."""
    if not IS_GPU:
        steady_dots.install(monkeypatch, is_chained=True)


@pytest.mark.usefixtures("exact_products")
@pytest.mark.parametrize("shape", [{"num_kv_heads": 1}, {"window": 40, "has_sinks": True}], ids=str)
def test_bits_are_those_of_decoding_in_trees_and_prompts(shape: dict[str, Any], device: str) -> None:
    """A cache of the same numbers has these bits too, if halves of the dimensions fill whole MMAs."""
    step = Step([70, 133], 3, device=device, **shape)
    expected = step.decoded(SMALL)
    assert torch.equal(step.in_trees(SMALL), expected)
    assert torch.equal(step.as_prompt(SMALL), expected)
    if not step.window:
        step.use_scales_of_one()
        expected = step.decoded(SMALL)
        step.use_numbers()
        assert torch.equal(step.decoded(SMALL), expected)
        assert torch.equal(step.as_prompt(SMALL), expected)


@pytest.mark.usefixtures("exact_products")
@pytest.mark.parametrize("head_dim", slow_after(1, [264, 288, 512]))
@pytest.mark.parametrize("options", [{}, {"window": 40, "has_sinks": True}], ids=str)
def test_wide_heads_have_the_bits_of_decoding_in_prompts(
    options: dict[str, Any], head_dim: int, device: str
) -> None:
    """A cache of the same numbers has these bits too, if halves of the dimensions are padded to nothing."""
    step = Step([70, 133], 35, device=device, num_kv_heads=1, head_dim=head_dim, **options)
    for tile_rows in (16, 64):
        config = ExactPrefillConfig(tile_rows=tile_rows, num_warps=4, num_stages=1, narrow_stages=1)
        found = step.as_prompt(SMALL, config)
        assert found.isfinite().all() and torch.equal(step.decoded(SMALL), found)
    step.use_scales_of_one()
    found = step.as_prompt(SMALL)
    step.use_numbers()
    if head_dim == 512:
        assert torch.equal(step.as_prompt(SMALL), found)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 5, 64])
@pytest.mark.parametrize(
    "heads", [(8, 4, 128), (2, 7, 64), (2, 1, 256), (1, 8, 80), (1, 4, 512), (2, 2, 320)], ids=str
)
def test_bits_are_those_of_a_cache_of_the_same_numbers(
    heads: tuple[int, int, int], num_rows: int, device: str
) -> None:
    """Halves of the dimensions fill whole MMAs. Decoding, trees, and prompts by wgmma and by mma.sync are
    compared with a cache of bfloat16 numbers."""
    num_kv_heads, group, head_dim = heads
    step = Step(
        [64, 700, 2050, 5300],
        num_rows,
        device=device,
        dtype=torch.bfloat16,
        block_size=64,
        num_kv_heads=min(num_kv_heads, 3),
        group=group,
        head_dim=head_dim,
    )
    prompt = ExactPrefillConfig() if head_dim <= 128 else ExactPrefillConfig(64, 8, 3, 1)
    partitions = Partitions.of_layer(head_dim, 0)
    found = step.as_prompt(partitions, prompt)
    step.assert_attended(found)
    if num_rows < 64:
        assert torch.equal(step.decoded(partitions), found)
        assert head_dim > WIDE_HEAD or torch.equal(step.in_trees(partitions), found)
    few = ExactPrefillConfig(tile_rows=32, num_warps=4, num_stages=1, narrow_stages=1)  # by mma.sync
    assert torch.equal(step.as_prompt(partitions, few), found)
    step.use_scales_of_one()
    ones = step.as_prompt(partitions, prompt)
    if head_dim <= WIDE_HEAD:
        fast = step.as_fast_prompt(PrefillAttentionConfig(tile_keys=64 if head_dim <= 128 else 32))
        step.assert_attended(fast)
    step.use_numbers()
    if head_dim % 32 == 0 and head_dim != 320:  # whose halves are padded
        assert torch.equal(step.as_prompt(partitions, prompt), ones)


@pytest.mark.parametrize(("head_dim", "num_stages"), [(64, 3), (256, 3), (512, 3), (1024, 1)])
def test_more_stages_are_under_way_where_they_fit(head_dim: int, num_stages: int) -> None:
    """The GPU has 227 KiB of shared memory."""
    with limited_gpu(HOPPER):
        assert attention_config(head_dim, E4M3, 64).num_stages == num_stages
        assert attention_config(head_dim, torch.bfloat16, 64).num_stages == (2 if head_dim <= 256 else 1)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("values", lambda x: x.float(), r"values: .* torch.float32: expected .* torch.float8_e4m3fn"),
        ("key_scale", lambda x: None, r"key_scale: expected \[2\] torch.float32 for a cache of torch.float8"),
        ("value_scale", lambda x: x[1:], r"value_scale: \[1\] torch.float32: expected \[2\] torch.float32"),
        ("key_scale", lambda x: x.double(), r"key_scale: \[2\] torch.float64: expected \[2\] torch.float32"),
    ],
)
def test_errors_name_the_argument(name: str, change: Callable[[Any], Any], message: str, device: str) -> None:
    step = Step([5], 1, device=device)
    step.kv = replace(step.kv, **{name: change(getattr(step.kv, name))})
    with pytest.raises(ValueError, match=message):
        step.decoded(SMALL)


def test_scales_are_refused_for_other_caches(device: str) -> None:
    step = Step([5], 1, device=device)
    step.kv = replace(step.kv, keys=step.kv.keys.float(), values=step.kv.values.float())
    with pytest.raises(ValueError, match="key_scale: expected None for a cache of torch.float32"):
        step.decoded(SMALL)
