"""What the rounds advance of each slot, in tensors on the device."""

from __future__ import annotations

from msgspec import Struct
from torch import Tensor

__all__ = ["SlotState"]


class SlotState(Struct, frozen=True):
    """[S] int32 each: tokens, the newest of them, 0 while running or else how the slot ended, most tokens."""

    length: Tensor
    last_token: Tensor
    finish: Tensor
    max_length: Tensor
