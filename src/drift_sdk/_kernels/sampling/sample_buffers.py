"""The buffers between the launches of `sample_rows`, and its results."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from drift_sdk._kernels.common.arguments import check_tensor
from drift_sdk._kernels.common.sizes import cdiv
from drift_sdk._kernels.sampling.filter_settings import BRACKET_FIELDS, LEVELS, PASSES

__all__ = ["CHUNK_TOKENS", "MAX_CANDIDATES", "MAX_TOP", "SampleBuffers"]

CHUNK_TOKENS = 4096
"""Tokens of a chunk of the vocabulary, which one program works on at a time: 8 warps of 32 threads with 16
logits, four loads of 16 bytes, each. A vocabulary of 128,256 tokens has 32 chunks, so that a single row is
shared by 32 multiprocessors."""
MAX_CANDIDATES = 256
"""Most logits of a chunk that are collected while its row's filters are applied, a sixteenth of the chunk.
The last bracket holds fewer as a rule (see `filter_settings.LEVELS`); where it holds more, `find_thresholds`
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
