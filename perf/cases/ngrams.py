"""Cases of n-gram look-up: short and long runs, short and long histories."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from drift_sdk import NGram
from drift_sdk._kernels.draft.ngrams import num_searchers, propose_ngrams
from drift_sdk._kernels.gemm.tuning import TunedTable
from perf.cases.case import Case, Prepared, num_copies
from perf.harness.shapes import Model

__all__ = ["ngram_cases"]

CONTEXTS, BATCHES, MAX_LENGTHS = (512, 32_768), (1, 64), (4, NGram().max_length)
"""Tokens of a history; slots; most tokens that are looked up."""
NUM_DRAFT_TOKENS = 3
ITEMSIZE = 4
"""Bytes of a token id."""


def ngram_cases(model: Model, row_counts: tuple[int, ...], table: TunedTable, device: str) -> Iterator[Case]:
    """Yield the cases of CONTEXTS, BATCHES and MAX_LENGTHS; row_counts and table have no influence."""
    for context in CONTEXTS:
        for batch in BATCHES:
            for max_length in MAX_LENGTHS:
                yield Case(
                    kernel=f"n-gram look-up of {max_length}",
                    shape=f"batch {batch}, {context} tokens",
                    num_rows=batch * (NUM_DRAFT_TOKENS + 1),
                    num_bytes=batch * context * ITEMSIZE,
                    num_flops=0.0,
                    prepare=partial(prepare, model.spec.vocab_size, context, batch, max_length, device),
                )


def prepare(vocab_size: int, context: int, batch: int, max_length: int, device: str) -> Prepared:
    """Make histories [batch, context + 1] whose second half repeats the first, so that each row has a draft
    and runs are as long as they may be."""
    copies = []
    for _ in range(num_copies(batch * context * ITEMSIZE)):
        half = torch.randint(vocab_size, (batch, context // 2), device=device, dtype=torch.int32)
        copies.append(torch.cat((half, half, half[:, :1]), 1))
    rows = NUM_DRAFT_TOKENS + 1
    slot = torch.arange(batch, dtype=torch.int32, device=device).repeat_interleave(rows)
    position = (context - 1 + torch.arange(rows, device=device)).to(torch.int32).repeat(batch)
    found = torch.empty((batch, num_searchers(context + 1)), dtype=torch.int64, device=device)
    tokens = [history[:, context - 1 :][:, :1].repeat(1, rows).flatten().contiguous() for history in copies]

    def step() -> None:
        for history, token in zip(copies, tokens, strict=True):
            propose_ngrams(
                slot,
                position,
                token,
                history,
                found,
                rows_per_slot=rows,
                min_length=2,
                max_length=max_length,
            )

    return Prepared(step, len(copies), ())
