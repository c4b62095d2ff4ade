"""Cases of kernels that work row by row: norms, rotation and store, sampling."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from drift_sdk._kernels.attention.layer_attention import LayerKV
from drift_sdk._kernels.gemm.tuning import TunedTable
from drift_sdk._kernels.layers.norm import add_norm
from drift_sdk._kernels.layers.rope_store import rotate_and_store
from drift_sdk._kernels.sampling.rows import SampleBuffers
from drift_sdk._kernels.sampling.sample import sample_rows
from drift_sdk._kernels.slots import SlotColumns, num_mask_words
from drift_sdk.spec.model import Attention
from perf.cases.case import Case, Prepared, num_copies
from perf.cases.gemm import ITEMSIZE
from perf.harness.shapes import Model

__all__ = ["norm_cases", "rope_cases", "sampling_cases"]

SUM_ITEMSIZE = 4
"""Bytes of a partial sum or a logit: they are float32."""
BLOCK_SIZE = 64
CONTEXT = 512
"""Tokens before the newest of each sequence."""
FILTERED = {"temperature": 0.8, "top_p": 0.95}
PEAKED, FLAT = 3.0, 1.3
"""Standard deviations of logits. Peaked: few tokens hold nearly all the probability. Flat: thousands do, as
with random weights."""


def norm_cases(model: Model, row_counts: tuple[int, ...], table: TunedTable, device: str) -> Iterator[Case]:
    """Yield cases of `add_norm`: a product's partial sums added to the residual stream, and its norm."""
    size = model.spec.hidden_size
    gemm = table.gemm(size, model.spec.attention.output_size)
    for num_rows in row_counts:
        num_partials = gemm.config(num_rows).num_partials
        yield Case(
            kernel="add_norm",
            shape=f"{size} from {num_partials} sums",
            num_rows=num_rows,
            num_bytes=num_rows * size * (num_partials * SUM_ITEMSIZE + 3 * ITEMSIZE) + size * ITEMSIZE,
            num_flops=0.0,
            prepare=partial(prepare_norm, size, num_partials, num_rows, device),
        )


def rope_cases(model: Model, row_counts: tuple[int, ...], table: TunedTable, device: str) -> Iterator[Case]:
    """Yield cases of `rotate_and_store`, of a product's partial sums."""
    spec = model.spec.attention
    if not isinstance(spec, Attention):  # see perf/cases/latent.py
        return

    width = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    gemm = table.gemm(width, model.spec.hidden_size)
    for num_rows in row_counts:
        num_partials = gemm.config(num_rows).num_partials
        yield Case(
            kernel="rope and store",
            shape=f"{width} from {num_partials} sums",
            num_rows=num_rows,
            num_bytes=num_rows
            * (width * (num_partials * SUM_ITEMSIZE + ITEMSIZE) + spec.head_dim * ITEMSIZE),
            num_flops=0.0,
            prepare=partial(prepare_rope, spec, num_partials, num_rows, device),
        )


def sampling_cases(
    model: Model, row_counts: tuple[int, ...], table: TunedTable, device: str
) -> Iterator[Case]:
    """Yield cases of `sample_rows`: greedy, and with top-p. The bytes are those of the logits, read once."""
    vocab_size = model.spec.vocab_size
    kinds: tuple[tuple[str, dict[str, float], float], ...] = (
        ("greedy", {}, PEAKED),
        ("top-p", FILTERED, PEAKED),
        ("top-p of flat logits", FILTERED, FLAT),
    )
    for name, settings, spread in kinds:
        for num_rows in row_counts:
            yield Case(
                kernel=f"sampling, {name}",
                shape=f"{vocab_size}",
                num_rows=num_rows,
                num_bytes=num_rows * vocab_size * SUM_ITEMSIZE,
                num_flops=0.0,
                prepare=partial(prepare_sampling, vocab_size, settings, spread, num_rows, device),
            )


def prepare_norm(size: int, num_partials: int, num_rows: int, device: str) -> Prepared:
    """Make the inputs of `add_norm`."""
    copies = num_copies(num_rows * size * (num_partials * SUM_ITEMSIZE + ITEMSIZE))
    sums = torch.randn(copies, num_partials, num_rows, size, device=device)
    hidden = torch.randn(copies, num_rows, size, device=device).to(torch.bfloat16)
    weight = torch.randn(size, device=device).to(torch.bfloat16)
    normed = torch.empty_like(hidden)

    def step() -> None:
        for index in range(copies):
            add_norm(hidden[index], sums[index], weight, normed[index], eps=1e-5)

    return Prepared(step, copies, (normed,))


def prepare_rope(spec: Attention, num_partials: int, num_rows: int, device: str) -> Prepared:
    """Make the inputs of `rotate_and_store`: the newest row of each sequence, after CONTEXT tokens."""
    width = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    copies = num_copies(num_rows * width * num_partials * SUM_ITEMSIZE)
    sums = torch.randn(copies, num_partials, num_rows, width, device=device)
    blocks_each = CONTEXT // BLOCK_SIZE + 1
    table = torch.arange(num_rows * blocks_each, dtype=torch.int32, device=device).view(num_rows, -1)
    shape = (num_rows * blocks_each, spec.num_kv_heads, BLOCK_SIZE, spec.head_dim)
    keys, values = (torch.zeros(shape, dtype=torch.bfloat16, device=device) for _ in range(2))
    kv = LayerKV(keys, values)
    angles = torch.randn(CONTEXT + 1, spec.head_dim // 2, device=device)
    cos, sin = angles.cos().to(torch.bfloat16), angles.sin().to(torch.bfloat16)
    slot = torch.arange(num_rows, dtype=torch.int32, device=device)
    position = torch.full_like(slot, CONTEXT)
    query = torch.empty(num_rows, spec.num_heads, spec.head_dim, dtype=torch.bfloat16, device=device)

    def step() -> None:
        for index in range(copies):
            rotate_and_store(sums[index], slot, position, table, cos, sin, query, kv)

    return Prepared(step, copies, (query,))


def prepare_sampling(
    vocab_size: int, settings: dict[str, float], spread: float, num_rows: int, device: str
) -> Prepared:
    """Make the inputs of `sample_rows`: logits of standard deviation `spread`, and columns of `settings`."""
    copies = num_copies(num_rows * vocab_size * SUM_ITEMSIZE)
    # Two planes each. The second is written where logits rules apply.
    logits = torch.randn(copies, 2, num_rows, vocab_size, device=device).mul_(spread)
    columns = SlotColumns.allocate(num_rows, vocab_size, device)
    columns.num_logprobs.fill_(-1)
    columns.top_p.fill_(1.0)
    for name, value in settings.items():
        getattr(columns, name).fill_(value)
    slot = torch.arange(num_rows, dtype=torch.int32, device=device)
    position, token = torch.full_like(slot, CONTEXT), torch.zeros_like(slot)
    masks = torch.zeros(num_rows, num_mask_words(vocab_size), dtype=torch.int32, device=device)
    buffers = SampleBuffers.allocate(num_rows, vocab_size, device)

    def step() -> None:
        for index in range(copies):
            sample_rows(logits[index], slot, position, token, columns, masks, buffers)

    # Token ids, viewed as float32 to be filled with NaN: the bits of ids are those of finite numbers.
    return Prepared(step, copies, (buffers.chosen.view(torch.float32),))
