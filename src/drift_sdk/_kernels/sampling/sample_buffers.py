"""What the launches of `sample_rows` hand on to each other, and what comes out."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from drift_sdk._kernels.sampling.filter_brackets import BRACKET, LEVELS, PASSES

__all__ = ["CHUNK", "MAX_CANDIDATES", "MAX_TOP", "SampleBuffers"]

CHUNK = 4096
"""Tokens of one program where a row is shared by several."""
MAX_CANDIDATES = 256
"""The most logits of a chunk that are set apart while its row's filters are applied."""
MAX_TOP = 20
"""The most tokens whose log-probabilities are reported."""


@dataclass(frozen=True, slots=True)
class SampleBuffers:
    """What the launches hand on to each other, and their results, for up to R rows over V tokens in C chunks.

    chosen [R] int32: the token of each row, -1 for padding. chosen_logprob [R] fp32, top_token
    [R, MAX_TOP] int32 and top_logprob [R, MAX_TOP] fp32: of rows whose slot reports log-probabilities; of the
    MAX_TOP places as many as it reports, the others -1 and -inf.
    """

    chunk_value: Tensor
    chunk_token: Tensor
    chunk_mass: Tensor
    raw_max: Tensor
    raw_sum: Tensor
    brackets: Tensor
    weights: Tensor
    candidates: Tensor
    num_candidates: Tensor
    row_max: Tensor
    row_threshold: Tensor
    candidate_value: Tensor
    candidate_token: Tensor
    chosen: Tensor
    chosen_logprob: Tensor
    top_token: Tensor
    top_logprob: Tensor

    @classmethod
    def allocate(cls, num_rows: int, vocab_size: int, device: torch.device | str) -> SampleBuffers:
        num_chunks = triton.cdiv(vocab_size, CHUNK)

        def buffer(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.empty(num_rows, *shape, dtype=dtype, device=device)

        return cls(
            chunk_value=buffer(torch.float32, num_chunks),
            chunk_token=buffer(torch.int32, num_chunks),
            chunk_mass=buffer(torch.float32, num_chunks),
            raw_max=buffer(torch.float32, num_chunks),
            raw_sum=buffer(torch.float32, num_chunks),
            brackets=buffer(torch.float32, PASSES.value + 1, BRACKET.value),
            weights=buffer(torch.float32, PASSES.value, num_chunks, LEVELS.value),
            candidates=buffer(torch.float32, num_chunks, MAX_CANDIDATES),
            num_candidates=buffer(torch.int32, num_chunks),
            row_max=buffer(torch.float32),
            row_threshold=buffer(torch.float32),
            candidate_value=buffer(torch.float32, num_chunks, MAX_TOP),
            candidate_token=buffer(torch.int32, num_chunks, MAX_TOP),
            chosen=buffer(torch.int32),
            chosen_logprob=buffer(torch.float32),
            top_token=buffer(torch.int32, MAX_TOP),
            top_logprob=buffer(torch.float32, MAX_TOP),
        )
