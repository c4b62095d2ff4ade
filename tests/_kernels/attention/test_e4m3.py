"""Caches of e4m3 numbers: the codes against torch's own, attention against float64 and bit for bit against
itself, decoded, verified, in trees and as prompts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from tolerances import assert_near

from drift_sdk._kernels.attention.attention_plan import AttentionPlan, plan_attention
from drift_sdk._kernels.attention.e4m3 import (
    cache_numbers,
    cache_words,
    decode_pairs,
    encode_e4m3,
    is_decoded_in_pairs,
    pack_cache,
    unpack_cache,
)
from drift_sdk._kernels.attention.exact_prefill_attention import ExactPrefillConfig, exact_prefill_attention
from drift_sdk._kernels.attention.paged_attention import (
    AttentionConfig,
    AttentionScratch,
    attention_config,
    paged_attention,
    paged_attention_reference,
)
from drift_sdk._kernels.attention.partitions import Partitions
from drift_sdk._kernels.attention.prefill_attention import PrefillAttentionConfig, prefill_attention
from drift_sdk._kernels.attention.prefill_tiles import TILE_FIELDS, prefill_tiles
from drift_sdk._kernels.common.gpu_limits import HOPPER, limited_gpu
from drift_sdk._kernels.trees.tree_attention import tree_attention, tree_attention_reference
from drift_sdk._kernels.trees.tree_paths import TreePaths
from drift_sdk._kernels.trees.tree_rows import PATH_ENTRIES
from drift_sdk.quantised.e4m3 import E4M3, MAX_E4M3, quantise_e4m3

pytestmark = pytest.mark.kernel

IS_GPU = torch.cuda.is_available()
DTYPES = (torch.float32, torch.bfloat16, torch.float16) if IS_GPU else (torch.float32,)
SMALL = Partitions(narrow=32, narrow_end=64, wide=48, tile=16)
NAN_CODE = 0x7F
SCALES = (torch.tensor([0.37, 1.9, 0.011]), torch.tensor([2.3, 0.05, 1.25]))


@triton.jit
def _encode(x_ptr, scale_ptr, codes_ptr, SIZE: tl.constexpr):
    place = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    codes = encode_e4m3(tl.load(x_ptr + place).to(tl.float32), tl.load(scale_ptr))
    tl.store(codes_ptr + place, codes.to(tl.uint8))


@triton.jit
def _decode(words_ptr, low_ptr, high_ptr, SIZE: tl.constexpr, IN_PAIRS: tl.constexpr):
    place = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    low, high = decode_pairs(tl.load(words_ptr + place), low_ptr.dtype.element_ty, IN_PAIRS)
    tl.store(low_ptr + place, low)
    tl.store(high_ptr + place, high)


def all_bfloat16(device: str) -> torch.Tensor:
    return torch.arange(2**16, device=device, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # signalling NaN, and quotients that overflow
@pytest.mark.parametrize("scale", [1.0, 0.0173, 2.0**-9, 3.1e4])
def test_codes_of_all_bfloat16_numbers_are_those_of_torch(scale: float, device: str) -> None:
    x, scales = all_bfloat16(device), torch.tensor([scale], device=device)
    codes = torch.empty(len(x), dtype=torch.uint8, device=device)
    _encode[(16,)](x, scales, codes, SIZE=4096)
    expected = quantise_e4m3(x, scales)
    assert torch.equal(codes, expected.view(torch.uint8))
    assert expected.float().isfinite().all()

    # torch's conversion gives the same codes, except for NaN and numbers that overflow.
    quotient = x.float() / scale
    inside = quotient.abs() <= MAX_E4M3
    assert torch.equal(expected[inside].view(torch.uint8), quotient[inside].to(E4M3).view(torch.uint8))
    beyond = quotient.abs() > MAX_E4M3
    assert torch.equal(expected[beyond].float(), quotient[beyond].sign() * MAX_E4M3)
    assert expected[x.isnan()].float().eq(0).all()


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=str)
def test_numbers_of_all_pairs_of_codes_are_those_of_torch(dtype: torch.dtype, device: str) -> None:
    words = torch.arange(2**16, device=device, dtype=torch.int32).to(torch.int16)
    low, high = torch.empty(2, len(words), dtype=dtype, device=device)
    _decode[(16,)](words, low, high, SIZE=4096, IN_PAIRS=is_decoded_in_pairs(dtype))
    codes = words.view(torch.uint8).view(-1, 2)
    for found, expected in ((low, codes[:, 0]), (high, codes[:, 1])):
        numbers = expected.contiguous().view(E4M3).float()
        numbers = torch.where(numbers.isnan(), 480.0 - 960.0 * (expected >> 7), numbers)
        assert torch.equal(found.float(), numbers)
        assert torch.equal(found.signbit(), expected >= 128)


def test_packed_caches_hold_both_halves_of_the_dimensions_side_by_side() -> None:
    codes = torch.arange(24, dtype=torch.uint8).view(2, 12).view(E4M3)
    packed = pack_cache(codes)
    assert packed.view(torch.uint8)[0].tolist() == [0, 6, 1, 7, 2, 8, 3, 9, 4, 10, 5, 11]
    assert torch.equal(unpack_cache(packed).view(torch.uint8), codes.view(torch.uint8))


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
        self.scales: list[Any] = [scale[:num_kv_heads].to(device) for scale in SCALES]
        for index, length in enumerate(lengths):
            first = max(0, length - num_rows - window + 1) if window else 0
            positions = torch.arange(first, length, device=device)
            blocks = self.block_table[index].long()[positions // block_size]
            for cache, scale in zip(codes, self.scales, strict=True):
                heads = randn(len(positions), num_kv_heads, head_dim)
                stored = pack_cache(quantise_e4m3(heads, scale[:, None])).view(torch.uint8)
                cache[blocks, :, positions % block_size] = stored
        self.keys, self.values = (cache.view(E4M3) for cache in codes)
        self.query = randn(len(lengths) * num_rows, num_kv_heads * group, head_dim).to(dtype)
        sinks = randn(num_kv_heads * group).to(dtype) if has_sinks else None
        self.lengths, self.num_rows, self.window = lengths, num_rows, window
        self.options: dict[str, Any] = {"sinks": sinks}
        slots = torch.arange(len(lengths), device=device).repeat_interleave(num_rows)
        self.row_slot = slots.int()
        starts = torch.tensor(lengths, device=device) - num_rows
        self.row_position = (starts[:, None] + torch.arange(num_rows, device=device)).flatten().int()

    @property
    def cache(self) -> dict[str, Any]:
        return {
            "keys": self.keys,
            "values": self.values,
            "key_scale": self.scales[0],
            "value_scale": self.scales[1],
            "block_table": self.block_table,
        }

    @property
    def rows(self) -> dict[str, torch.Tensor]:
        return {"query": self.query, "row_slot": self.row_slot, "row_position": self.row_position}

    def scratch(self, partitions: Partitions) -> AttentionScratch:
        device, num_kv_heads = self.query.device, self.keys.shape[1]
        plan = AttentionPlan(
            len(self.lengths),
            max(self.lengths),
            partitions,
            device,
            window=self.window,
            num_rows=self.num_rows,
        )
        plan_attention(self.row_slot, self.row_position, plan, self.num_rows)
        scratch = AttentionScratch.allocate(
            plan,
            num_kv_heads=num_kv_heads,
            num_rows=self.num_rows,
            group=self.query.shape[1] // num_kv_heads,
            head_dim=self.query.shape[2],
        )
        for tensor in (scratch.sums, scratch.maxima, scratch.weights):
            tensor.fill_(torch.nan)
        return scratch

    def decoded(self, partitions: Partitions, **cache: Any) -> torch.Tensor:
        out = torch.full_like(self.query, torch.nan)
        paged_attention(
            **self.rows,
            **self.cache | cache,
            out=out,
            scratch=self.scratch(partitions),
            config=AttentionConfig(num_programs=264 if IS_GPU else 4),
            rows_per_sequence=self.num_rows,
            **self.options,
        )
        return out

    @property
    def paths(self) -> TreePaths:
        """Each sequence's rows as a chain of nodes."""
        device, block_size = self.query.device, self.keys.shape[2]
        blocks = self.block_table[self.row_slot.long(), self.row_position.long() // block_size]
        path = torch.full((self.num_rows, PATH_ENTRIES), -1, dtype=torch.int32, device=device)
        for row in range(self.num_rows):
            path[row, : row + 1] = torch.arange(row + 1, device=device)
        return TreePaths(
            self.row_position,
            blocks.long() * block_size + self.row_position % block_size,
            path.repeat(len(self.lengths), 1),
        )

    def in_trees(self, partitions: Partitions) -> torch.Tensor:
        out = torch.full_like(self.query, torch.nan)
        tree_attention(
            **self.rows,
            **self.cache,
            paths=self.paths,
            out=out,
            scratch=self.scratch(partitions),
            config=AttentionConfig(num_programs=264 if IS_GPU else 4),
            nodes_per_tree=self.num_rows,
            **self.options,
        )
        return out

    def tiles(self, tile_rows: int) -> torch.Tensor:
        chunks = [(slot, length - self.num_rows, self.num_rows) for slot, length in enumerate(self.lengths)]
        found = np.zeros((len(chunks) * -(-self.num_rows // tile_rows), TILE_FIELDS), dtype=np.int32)
        prefill_tiles(chunks, tile_rows, found)
        return torch.from_numpy(found).to(self.query.device)

    def as_prompt(self, partitions: Partitions, config: ExactPrefillConfig | None = None) -> torch.Tensor:
        config = config or ExactPrefillConfig(tile_rows=16, num_warps=4, num_stages=1, narrow_stages=1)
        out = torch.full_like(self.query, torch.nan)
        exact_prefill_attention(
            self.query,
            **self.cache,
            tiles=self.tiles(config.tile_rows),
            output=out,
            config=config,
            partitions=partitions,
            window=self.window,
            **self.options,
        )
        return out

    def as_fast_prompt(self, config: PrefillAttentionConfig) -> torch.Tensor:
        out = torch.full_like(self.query, torch.nan)
        prefill_attention(
            self.query,
            **self.cache,
            tiles=self.tiles(config.tile_rows),
            output=out.flatten(1),
            config=config,
            window=self.window,
            **self.options,
        )
        return out

    def expected(self) -> torch.Tensor:
        return paged_attention_reference(**self.rows, **self.cache, window=self.window, **self.options)

    def use_numbers(self) -> None:
        """Replace the cache by one of its codes as numbers of the storage type, without scales."""
        self.keys, self.values = (unpack_cache(x).to(self.query.dtype) for x in (self.keys, self.values))
        self.scales = [None, None]

    def assert_attended(self, found: torch.Tensor) -> None:
        magnitude = cache_numbers(self.values, self.scales[1]).nan_to_num().abs().max().item()
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
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_is_near_float64(shape: dict[str, Any], dtype: torch.dtype, device: str) -> None:
    """All kernels are compared. Scales differ between heads, and between keys and values."""
    step = Step([3, 17, 130] if IS_GPU else [3, 66], 3, device=device, dtype=dtype, **shape)
    for attend in (step.decoded, step.in_trees, step.as_prompt):
        step.assert_attended(attend(Partitions.of_window(step.window) if IS_GPU else SMALL))
    step.assert_attended(
        step.as_fast_prompt(PrefillAttentionConfig(tile_rows=16, tile_keys=16, num_stages=1))
    )
    expected = tree_attention_reference(
        **step.rows,
        **step.cache,
        paths=step.paths,
        nodes_per_tree=3,
        window=step.window,
        **step.options,
    )
    torch.testing.assert_close(expected, step.expected())


@pytest.fixture
def exact_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter multiplies by BLAS, whose order of summation may vary. Tensor cores add products of 16
    numbers, one after the other."""

    def matmul(a: Any, b: Any, dtype: Any) -> Any:
        starts = range(0, a.shape[1], 16)
        steps = [(a[:, k : k + 16, None] * b[k : k + 16]).sum(1, dtype=dtype) for k in starts]
        return sum(steps[1:], steps[0])

    monkeypatch.setattr(np, "matmul", matmul)


@pytest.mark.usefixtures("exact_products")
@pytest.mark.parametrize("shape", [{"num_kv_heads": 1}, {"window": 40, "has_sinks": True}], ids=str)
def test_bits_are_those_of_decoding_in_trees_and_prompts(shape: dict[str, Any], device: str) -> None:
    """A cache of the same numbers has these bits too, if halves of the dimensions fill whole MMAs."""
    step = Step([70, 133], 3, device=device, **shape)
    expected = step.decoded(SMALL)
    assert torch.equal(step.in_trees(SMALL), expected)
    assert torch.equal(step.as_prompt(SMALL), expected)
    if not step.window:
        step.scales = [torch.ones_like(scale) for scale in step.scales]
        expected = step.decoded(SMALL)
        step.use_numbers()
        assert torch.equal(step.decoded(SMALL), expected)
        assert torch.equal(step.as_prompt(SMALL), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 5, 64])
@pytest.mark.parametrize("heads", [(8, 4, 128), (2, 7, 64), (2, 1, 256), (1, 8, 80)], ids=str)
def test_bits_are_those_of_a_cache_of_the_same_numbers(
    heads: tuple[int, int, int], num_rows: int, device: str
) -> None:
    """Halves of the dimensions fill whole MMAs. Decoding, trees, prompts by wgmma and rows alone are compared
    with a cache of bfloat16 numbers."""
    num_kv_heads, group, head_dim = heads
    step = Step(
        [64, 700, 1999, 5300],
        num_rows,
        device=device,
        dtype=torch.bfloat16,
        block_size=64,
        num_kv_heads=min(num_kv_heads, 3),
        group=group,
        head_dim=head_dim,
    )
    prompt = ExactPrefillConfig() if head_dim <= 128 else ExactPrefillConfig(64, 8, 3, 1)
    found = step.as_prompt(Partitions(), prompt)
    step.assert_attended(found)
    if num_rows < 64:
        assert torch.equal(step.decoded(Partitions()), found)
        assert torch.equal(step.in_trees(Partitions()), found)
    step.scales = [torch.ones_like(scale) for scale in step.scales]
    ones = step.as_prompt(Partitions(), prompt)
    fast = step.as_fast_prompt(PrefillAttentionConfig(tile_keys=64 if head_dim <= 128 else 32))
    step.assert_attended(fast)
    step.use_numbers()
    if head_dim % 32 == 0:
        assert torch.equal(step.as_prompt(Partitions(), prompt), ones)


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
    with pytest.raises(ValueError, match=message):
        step.decoded(SMALL, **{name: change(step.cache[name])})


def test_scales_are_refused_for_other_caches(device: str) -> None:
    step = Step([5], 1, device=device)
    numbers = {name: step.cache[name].float() for name in ("keys", "values")}
    with pytest.raises(ValueError, match="key_scale: expected None for a cache of torch.float32"):
        step.decoded(SMALL, **numbers)


def test_words_of_other_caches_are_their_numbers() -> None:
    numbers = torch.zeros(2, 4)
    assert cache_words(numbers) is numbers
