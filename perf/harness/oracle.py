"""Drafts that are right for as many tokens as a round is told, from answers that are known beforehand.

Of K drafts, the first 0 to K are the next tokens of the answer, and the others are wrong. The number differs
by request and position, so every number of accepted drafts occurs, whatever the model's weights are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import triton.language as tl
from torch import Tensor

from drift_sdk._kernels.launch.arguments import next_power_of_2
from drift_sdk._kernels.launch.kernel import (
    kernel,
    launch_options,
    start_dependents,
    uses_pdl,
    wait_for_producers,
)
from drift_sdk.execution.drafter_factory import NGramDrafterFactory
from drift_sdk.execution.forward.caches import DraftKVCache
from drift_sdk.execution.forward.rows import Rows
from drift_sdk.execution.rounds.drafters import ComputedChunks, VerifiedRows

__all__ = ["KnownAnswers", "OracleRoundDrafter", "oracle_drafts"]

TURN = tl.constexpr(7)
"""At the same position, two consecutive requests have numbers of right drafts that differ by this, modulo
K + 1."""


@kernel
def _draft_known(
    row_slot_ptr,  # [R] int32, written for rows that are drafted
    row_position_ptr,  # [R] int32
    row_token_ptr,  # [R] int32, written for rows that are drafted
    slot_seed_ptr,  # [S] int64
    case_seed_ptr,  # [C] int64
    tokens_ptr,  # [C, L] int32; -1 behind a sequence's end
    num_cases,  # C
    length,  # L
    vocab_size,
    PADDED_CASES: tl.constexpr,
    ROWS_PER_SLOT: tl.constexpr,
    PADDED_ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (R / ROWS_PER_SLOT,): a program drafts for a slot. The drafts of unknown requests are token 0."""
    wait_for_producers(PDL)
    start_dependents(PDL)
    first = tl.program_id(0) * ROWS_PER_SLOT
    slot = tl.load(row_slot_ptr + first)
    position = tl.load(row_position_ptr + first)
    seed = tl.load(slot_seed_ptr + slot, mask=slot >= 0, other=0)
    case = tl.arange(0, PADDED_CASES)
    seeds = tl.load(case_seed_ptr + case, mask=case < num_cases, other=0)
    found = tl.max(tl.where((seeds == seed) & (case < num_cases) & (slot >= 0), case, -1))
    draft = tl.arange(0, PADDED_ROWS)
    row = first + 1 + draft
    own_slot = tl.load(row_slot_ptr + row, mask=draft + 1 < ROWS_PER_SLOT, other=-1)
    place = tl.where(found >= 0, position + 1 + draft, length)
    is_known = (own_slot >= 0) & (place < length)
    right = tl.load(tokens_ptr + found.to(tl.int64) * length + place, mask=is_known, other=-1)
    num_right = (position + TURN * found) % ROWS_PER_SLOT
    token = tl.where(draft < num_right, right, (right + 1) % vocab_size)
    tl.store(row_token_ptr + row, tl.where(right >= 0, token, 0), mask=own_slot >= 0)


class KnownAnswers:
    """Sequences by the seeds of their requests: prompts and answers, as far as they are known.

    vocab_size: of the model.
    """

    def __init__(self, sequences: Mapping[int, Sequence[int]], vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.seeds = torch.tensor([*sequences], dtype=torch.int64)
        length = max(map(len, sequences.values()))
        self.tokens = torch.full((len(sequences), length), -1, dtype=torch.int32)
        for row, tokens in zip(self.tokens, sequences.values(), strict=True):
            row[: len(tokens)] = torch.tensor(tokens, dtype=torch.int32)


class OracleRoundDrafter:
    """A `RoundDrafter` that drafts from known answers."""

    aux_layers: Sequence[int] = ()
    kv_cache: DraftKVCache | None = None
    is_ngram: Tensor | None = None

    def __init__(self, slot_seeds: Tensor, answers: KnownAnswers) -> None:
        """slot_seeds [S] int64: the seed of each slot's request."""
        self._slot_seeds, self._vocab_size = slot_seeds, answers.vocab_size
        self._seeds, self._tokens = (each.to(slot_seeds.device) for each in (answers.seeds, answers.tokens))

    def propose(self, rows: Rows, *, num_slots: int, num_draft_tokens: int) -> None:
        if num_draft_tokens == 0:
            return

        num_cases, length = self._tokens.shape
        _draft_known[(num_slots,)](
            rows.slot,
            rows.position,
            rows.token,
            self._slot_seeds,
            self._seeds,
            self._tokens,
            num_cases,
            length,
            self._vocab_size,
            PADDED_CASES=next_power_of_2(num_cases),
            ROWS_PER_SLOT=num_draft_tokens + 1,
            PADDED_ROWS=next_power_of_2(num_draft_tokens + 1),
            PDL=uses_pdl(),
            num_warps=4,
            **launch_options(),
        )

    def draft_extend(self, verified: VerifiedRows) -> None:
        pass

    def draft_extend_prefill(self, chunks: ComputedChunks) -> None:
        pass


@contextmanager
def oracle_drafts(answers: KnownAnswers) -> Iterator[None]:
    """Graph executors that start inside draft from known answers where they are to draft n-grams."""

    def round_drafter(_: NGramDrafterFactory, resources: Any, *__: Any) -> OracleRoundDrafter:
        return OracleRoundDrafter(resources.table.columns.seed, answers)

    with mock.patch.object(NGramDrafterFactory, "round_drafter", round_drafter):
        yield
