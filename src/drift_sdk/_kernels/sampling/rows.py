"""Gumbel noise inside a kernel, and the rows of a launch of `sample_rows`.

The noise is the kernels' counterpart of `eager.sampling.gumbel_noise`, which is the reference: the same
Philox words, so the same uniforms bit for bit; logarithms differ from torch's by rounding.

Rows: the filters of a slot, the buffers between the launches, and the rows, slots and buffers of a launch,
checked once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from drift_sdk._kernels.launch.arguments import cdiv, check_tensor, next_power_of_2
from drift_sdk._kernels.launch.kernel import device_function
from drift_sdk._kernels.slots import SlotColumns

LEAST_NOISE = tl.constexpr(-2.82)
"""-log(-log1p(-u)) = -2.81... at the largest uniform u = 1 - 2**-24, rounded down."""
MOST_NOISE = tl.constexpr(22.88)
"""-log(-log1p(-u)) = 22.87... at the smallest uniform u = 2**-33, rounded up."""
LAST_ID = tl.constexpr(2**31 - 1)
"""Larger than every token id: the id of no token, which loses every tie."""


@device_function
def arg_max(values, token_ids):
    """(largest of values [N], lowest of token_ids [N] that has it)."""
    best = tl.max(values, axis=0)
    # "Not less" rather than "equal": logits that are all NaN must still give a valid id.
    return best, tl.min(tl.where(values < best, LAST_ID, token_ids), axis=0)


@device_function
def gumbel(seed, position, first_token, NUM_TOKENS: tl.constexpr):
    """Standard Gumbel variates [NUM_TOKENS] in fp32 for the tokens from `first_token` on.

    `first_token` and NUM_TOKENS are multiples of 4: each Philox counter gives the bits of four tokens.
    """
    counters = (first_token // 4 + tl.arange(0, NUM_TOKENS // 4)).to(tl.uint32)
    zero = counters * 0
    a, b, c, d = tl.philox(seed, counters, zero + position.to(tl.uint32), zero, zero)
    return gumbel_from_bits(tl.interleave(tl.interleave(a, c), tl.interleave(b, d)))


@device_function
def gumbel_from_bits(bits):
    """Standard Gumbel variates in fp32 from 32 random bits each.

    The uniform is (bits + 1/2) / 2**32, in (0, 1): rounded to fp32, and at most the last number before 1.
    """
    uniform = bits.to(tl.float32) * 2.0**-32 + 2.0**-33
    return -tl.log(exponential(tl.minimum(uniform, 1.0 - 2.0**-24)))


@device_function
def exponential(uniform):
    """-log1p(-uniform), precise near zero, where the device's logarithm of 1 - uniform is not."""
    # log((1 + s) / (1 - s)) = 2 (s + s^3/3 + s^5/5 + s^7/7 + ...), here with s at most 1/7: used below 1/4,
    # where the first term left out, 2 s^9/9, is under 2**-24 of the sum.
    s = uniform / (2.0 - uniform)
    square = s * s
    series = s * (2.0 + square * (2.0 / 3.0 + square * (2.0 / 5.0 + square * (2.0 / 7.0))))
    return tl.where(uniform < 0.25, series, -tl.log(1.0 - uniform))


PASSES = tl.constexpr(2)
"""How often a row is weighed before its candidates are collected: two passes are enough for LEVELS."""
LEVELS = tl.constexpr(7)
"""Levels within the bracket at which a pass weighs the row. They cut it into eight parts, so two passes leave
a 64th of it: as a rule fewer than MAX_CANDIDATES logits of a chunk, also where thousands of tokens are about
as likely. (Three levels, a 16th, were not enough for such rows.)"""
BRACKET_FIELDS = tl.constexpr(4)
"""Fields of a bracket: its low end; its high end; the weight of all logits from the high end on; and, without
top_k, the mass of the whole row."""


@device_function
def load_filter(
    temperature_ptr,  # [S] fp32
    top_k_ptr,  # [S] int32
    top_p_ptr,  # [S] fp32
    slot,  # -1: none
    vocab_size,
):
    """(temperature, top_k or 0 if it cuts nothing off, top_p, whether a row of the slot is sampled through a
    filter that needs an order)."""
    is_slot = slot >= 0
    temperature = tl.load(temperature_ptr + slot, mask=is_slot, other=0.0)
    top_k = tl.load(top_k_ptr + slot, mask=is_slot, other=0)
    top_k = tl.where(top_k < vocab_size, top_k, 0)
    top_p = tl.load(top_p_ptr + slot, mask=is_slot, other=1.0)
    return temperature, top_k, top_p, (temperature > 0) & ((top_k > 0) | (top_p < 1))


CHUNK_TOKENS = 4096
"""Tokens of a chunk of the vocabulary, which one program works on at a time: 8 warps of 32 threads with 16
logits, four loads of 16 bytes, each. A vocabulary of 128,256 tokens has 32 chunks, so that a single row is
shared by 32 multiprocessors."""
MAX_CANDIDATES = 256
"""Most logits of a chunk that are collected while its row's filters are applied, a sixteenth of the chunk.
The last bracket holds fewer as a rule (see `LEVELS`); where it holds more, `find_thresholds`
reads the whole row, which is as exact and slower."""
MAX_TOP = 20
"""Most tokens whose log-probabilities are reported: `SamplingParams` allows no more."""


@dataclass(frozen=True, slots=True)
class SampleBuffers:
    """Buffers for up to R rows over V tokens in C chunks of CHUNK_TOKENS.

    The last four are the results of `sample_rows`; the others hold what one launch leaves for a later one.
    The fields whose comment names some rows are undefined for other rows.
    """

    chunk_value: Tensor
    """fp32 [R, C]: the best logit of each chunk, rules applied; later, of rows that are not greedy, the
    largest scaled logit plus noise, -inf for chunks from which no token can be chosen."""
    chunk_token: Tensor
    """int32 [R, C]: the token of chunk_value."""
    chunk_mass: Tensor
    """fp32 [R, C]: sum of exp(scaled logits) of each chunk, its best at zero; rows that are not greedy, with
    top_p."""
    raw_max: Tensor
    """fp32 [R, C]: the largest raw logit of each chunk; rows that report log-probabilities."""
    raw_sum: Tensor
    """fp32 [R, C]: sum of exp(raw logit - raw_max) of each chunk; rows that report log-probabilities."""
    brackets: Tensor
    """fp32 [R, PASSES + 1, BRACKET_FIELDS]: the bracket before each pass, and the last one; rows with a
    filter that needs an order."""
    weights: Tensor
    """fp32 [R, PASSES, C, LEVELS]: the weight of each chunk from each level of a pass on; as brackets."""
    candidates: Tensor
    """fp32 [R, C, MAX_CANDIDATES]: scaled logits of each chunk within the last bracket, then -inf; as
    brackets."""
    num_candidates: Tensor
    """int32 [R, C]: how many there are; more than MAX_CANDIDATES if not all were collected; as brackets."""
    row_max: Tensor
    """fp32 [R]: the largest logit; rows that are not greedy."""
    row_threshold: Tensor
    """fp32 [R]: scaled logits below it are cut off; -inf without filters; rows that are not greedy."""
    chunk_top_value: Tensor
    """fp32 [R, C, MAX_TOP]: the largest raw logits of each chunk, in falling order; rows that report
    log-probabilities of several tokens."""
    chunk_top_token: Tensor
    """int32 [R, C, MAX_TOP]: their tokens."""
    chosen: Tensor
    """int32 [R]: the token chosen for each row; -1 for padding."""
    chosen_logprob: Tensor
    """fp32 [R]: its log-probability; rows that report log-probabilities."""
    top_token: Tensor
    """int32 [R, MAX_TOP]: the most likely tokens, as many as the slot reports, then -1; as chosen_logprob."""
    top_logprob: Tensor
    """fp32 [R, MAX_TOP]: their log-probabilities, then -inf; as chosen_logprob."""

    @classmethod
    def allocate(cls, num_rows: int, vocab_size: int, device: torch.device | str) -> SampleBuffers:
        """Uninitialised buffers for `num_rows` rows."""
        shapes = _shapes(num_rows, vocab_size)
        return cls(
            **{
                name: torch.empty(shape, dtype=dtype, device=device)
                for name, (shape, dtype) in shapes.items()
            }
        )

    def check(self, num_rows: int, vocab_size: int) -> None:
        """Raises ValueError for buffers of fewer rows, another vocabulary, another shape or type."""
        most_rows, num_chunks = self.chunk_value.shape
        if most_rows < num_rows:
            raise ValueError(f"buffers: {most_rows} rows: expected at least {num_rows}")

        expected = cdiv(vocab_size, CHUNK_TOKENS)
        if num_chunks != expected:
            raise ValueError(f"buffers: {num_chunks} chunks: expected {expected}")

        for name, (shape, dtype) in _shapes(most_rows, vocab_size).items():
            check_tensor(name, getattr(self, name), shape, dtype)


def _shapes(num_rows: int, vocab_size: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and type of every field."""
    by_row, by_chunk = (num_rows,), (num_rows, cdiv(vocab_size, CHUNK_TOKENS))
    return {
        "chunk_value": (by_chunk, torch.float32),
        "chunk_token": (by_chunk, torch.int32),
        "chunk_mass": (by_chunk, torch.float32),
        "raw_max": (by_chunk, torch.float32),
        "raw_sum": (by_chunk, torch.float32),
        "brackets": ((*by_row, PASSES.value + 1, BRACKET_FIELDS.value), torch.float32),
        "weights": ((*by_row, PASSES.value, by_chunk[1], LEVELS.value), torch.float32),
        "candidates": ((*by_chunk, MAX_CANDIDATES), torch.float32),
        "num_candidates": (by_chunk, torch.int32),
        "row_max": (by_row, torch.float32),
        "row_threshold": (by_row, torch.float32),
        "chunk_top_value": ((*by_chunk, MAX_TOP), torch.float32),
        "chunk_top_token": ((*by_chunk, MAX_TOP), torch.int32),
        "chosen": (by_row, torch.int32),
        "chosen_logprob": (by_row, torch.float32),
        "top_token": ((*by_row, MAX_TOP), torch.int32),
        "top_logprob": ((*by_row, MAX_TOP), torch.float32),
    }


MAX_PROGRAMS = 1024
"""About as many programs as a GPU runs at once: 132 multiprocessors with 2,048 threads hold eight programs of
8 warps each, 1,056. With more rows than that allows each program takes several chunks, as most programs have
nothing to do and end at once."""


@dataclass(frozen=True, slots=True)
class RowsToSample:
    """R rows over V tokens, in C chunks of `sample_buffers.CHUNK_TOKENS`. Raises ValueError for another shape
    or type."""

    logits: Tensor
    """fp32 [2, R, V]: plane 0 is read; plane 1 gets the logits of rows to which rules apply. Each plane is
    contiguous, the two may stand apart."""
    row_slot: Tensor
    """int32 [R]; -1: padding."""
    row_position: Tensor
    """int32 [R]: the position of each row's token; the token chosen is that of the next position."""
    row_token: Tensor
    """int32 [R]."""
    slots: SlotColumns
    mask_words: Tensor
    """int32 [R, W]: the tokens that each row's constraint allows; read for slots under a constraint."""
    buffers: SampleBuffers
    rows_per_slot: int
    """Rows of a slot, which stand together, at consecutive positions unless there is a row_path."""
    row_path: Tensor | None = None
    """int32 [R, D], rows that are nodes of trees: by depth from the root on, the numbers of the nodes on each
    row's path among the rows of its slot, then -1."""

    def __post_init__(self) -> None:
        (num_rows,) = self.row_slot.shape
        vocab_size = self.slots.vocab_size
        for name in ("row_slot", "row_position", "row_token"):
            check_tensor(name, getattr(self, name), (num_rows,), torch.int32)
        if self.logits.shape != (2, num_rows, vocab_size):
            raise ValueError(f"logits: {list(self.logits.shape)}: expected {[2, num_rows, vocab_size]}")

        for plane in self.logits:
            check_tensor("logits", plane, (num_rows, vocab_size), torch.float32)
        self.slots.check()
        num_words = self.slots.prompt_bits.shape[1]
        check_tensor("mask_words", self.mask_words, (num_rows, num_words), torch.int32)
        self.buffers.check(num_rows, vocab_size)
        if self.row_path is not None:
            check_tensor("row_path", self.row_path, (num_rows, self.row_path.shape[1]), torch.int32)
        if num_rows % self.rows_per_slot:
            raise ValueError(f"row_slot: {num_rows} rows: expected a multiple of {self.rows_per_slot}")

    @property
    def num_rows(self) -> int:
        return self.row_slot.shape[0]

    @property
    def vocab_size(self) -> int:
        return self.slots.vocab_size

    @property
    def num_chunks(self) -> int:
        return self.buffers.chunk_value.shape[1]

    @property
    def padded_chunks(self) -> int:
        """The number of chunks as a power of two."""
        return next_power_of_2(self.num_chunks)

    @property
    def chunk_grid(self) -> tuple[int, int]:
        """A program for each chunk of each row."""
        return self.num_rows, self.num_chunks

    @property
    def part_grid(self) -> tuple[int, int]:
        """Programs that share a row's chunks: program p of P takes chunks p, p + P, and so on. Each chunk is
        computed by itself, so results do not depend on P."""
        return self.num_rows, min(self.num_chunks, cdiv(MAX_PROGRAMS, max(self.num_rows, 1)))

    @property
    def row_grid(self) -> tuple[int]:
        """A program for each row."""
        return (self.num_rows,)
