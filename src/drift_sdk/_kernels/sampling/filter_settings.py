"""The filters of a slot, and the sizes of the buffers through which a row's brackets are refined."""

from __future__ import annotations

import triton.language as tl

from drift_sdk._kernels.common.device_function import device_function

__all__ = ["BRACKET_FIELDS", "LEVELS", "PASSES", "load_filter"]

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
