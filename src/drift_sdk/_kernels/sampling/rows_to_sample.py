"""The arguments that the launches of `sample_rows` share: rows, slots and buffers, checked once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from drift_sdk._kernels.common.arguments import check_tensor
from drift_sdk._kernels.common.sizes import cdiv, next_power_of_2
from drift_sdk._kernels.sampling.sample_buffers import SampleBuffers
from drift_sdk._kernels.slots.slot_columns import SlotColumns

__all__ = ["RowsToSample"]

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
