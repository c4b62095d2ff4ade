"""Sampling of a step's rows: from logits to tokens in eight launches, whatever the rows ask for.

The launches are the same for every step, so that a captured graph serves any mixture of rows: what a slot's
columns ask for decides in each kernel which rows have work. Rows share nothing: a row's token, and every bit
of its log-probabilities, are the same as in a step without other rows.
"""

from __future__ import annotations

from torch import Tensor

from drift_sdk._kernels.sampling.apply_logits_rules import apply_logits_rules
from drift_sdk._kernels.sampling.filter_brackets import collect_candidates, refine_brackets
from drift_sdk._kernels.sampling.filter_thresholds import find_thresholds
from drift_sdk._kernels.sampling.gumbel_sample import add_noise
from drift_sdk._kernels.sampling.rows_to_sample import RowsToSample
from drift_sdk._kernels.sampling.sample_buffers import SampleBuffers
from drift_sdk._kernels.sampling.top_tokens import pick_tokens, rank_chunks
from drift_sdk._kernels.slots.slot_columns import SlotColumns

__all__ = ["sample_rows"]


def sample_rows(
    logits: Tensor,
    row_slot: Tensor,
    row_position: Tensor,
    row_token: Tensor,
    slots: SlotColumns,
    mask_words: Tensor,
    buffers: SampleBuffers,
    *,
    rows_per_slot: int = 1,
    row_path: Tensor | None = None,
) -> None:
    """Choose the token that follows each row's token; take log-probabilities where they are asked for.

    logits [2, R, V] fp32: plane 0 is read, plane 1 overwritten where rules apply; the planes may stand apart.
    row_slot (-1: padding), row_token and its absolute position row_position [R] int32: the chosen token is
    that of position row_position + 1. mask_words [R, W] int32: what each row's constraint allows.

    `rows_per_slot` rows of one slot stand together, at consecutive positions: the first holds a token that
    `slots` has counted, the others the tokens drafted behind it, which are not counted yet. With row_path,
    they are the nodes of a tree, see `RowsToSample.row_path`.

    Results are in rows [:R] of `buffers`: chosen, chosen_logprob, top_token, top_logprob. Raises ValueError
    for another shape or type.
    """
    rows = RowsToSample(
        logits, row_slot, row_position, row_token, slots, mask_words, buffers, rows_per_slot, row_path
    )
    apply_logits_rules(rows)  # every row; after this the best chunk of a greedy row has its token
    _filter(rows)
    add_noise(rows)  # rows that are not greedy: after this the best chunk of every row has its token
    rank_chunks(rows)  # rows that report log-probabilities
    pick_tokens(rows)  # every row


def _filter(rows: RowsToSample) -> None:
    """Find the thresholds of rows that are not greedy: four launches."""
    refine_brackets(rows)  # top_k and top_p: two launches
    collect_candidates(rows)  # top_k and top_p
    find_thresholds(rows)  # all rows that are not greedy
