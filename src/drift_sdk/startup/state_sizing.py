"""Memory of recurrent states, for running sequences and for checkpoints in the prefix cache."""

from __future__ import annotations

import math

import torch
from msgspec import Struct
from msgspec.structs import replace

from drift_sdk.config import EngineConfig
from drift_sdk.errors import ConfigError
from drift_sdk.models.states import BORDER, slot_bytes, state_bytes
from drift_sdk.spec.model import ModelSpec
from drift_sdk.speculation import Chain
from drift_sdk.startup.kv_sizing import MemoryRoom, gib

__all__ = ["StateSize", "check_states", "size_states"]

CHECKPOINT_SHARE = 1 / 4
"""Share of the memory for the KV cache that goes to checkpoints."""
CHECKPOINTS_PER_SLOT = 8
"""Most checkpoints for each sequence that runs at once."""


class StateSize(Struct, frozen=True, kw_only=True):
    """slot_bytes, checkpoint_bytes: of a running sequence, and of a checkpoint.
    num_slots, num_checkpoints: of each, for which there is room."""

    slot_bytes: int
    checkpoint_bytes: int
    num_slots: int
    num_checkpoints: int

    @property
    def num_bytes(self) -> int:
        return self.num_slots * self.slot_bytes + self.num_checkpoints * self.checkpoint_bytes

    def left(self, room: MemoryRoom) -> MemoryRoom:
        """The room for keys and values beside the states."""
        taken = self.num_bytes
        account = f"{room.account}; states take {gib(taken)}"
        return replace(
            room,
            share=room.share - taken,
            for_length=room.for_length - taken,
            most=room.most - taken,
            account=account,
        )

    def checkpoint_tokens(self, block_size: int) -> int:
        """Checkpoints lie at multiples of so many tokens."""
        return math.lcm(BORDER, block_size)


def size_states(
    config: EngineConfig, spec: ModelSpec, dtype: torch.dtype, room: MemoryRoom
) -> StateSize | None:
    """The states of a model; None if it has none. They have room for as many of `max_num_seqs` sequences as
    half of the memory holds. Raises ConfigError if it holds none."""
    if not spec.recurrent_layers:
        return None

    each = slot_bytes(spec, dtype)
    num_slots = min(config.max_num_seqs, max(room.most, 0) // 2 // each)
    if not num_slots:
        found = f"the states of one take {gib(each)}, there is room for {gib(room.most)} ({room.account})"
        raise ConfigError.of("max_num_seqs", config.max_num_seqs, f"memory for a sequence: {found}")

    checkpoint = state_bytes(spec, dtype)
    left = max(room.share - num_slots * each, 0)
    num_checkpoints = min(int(left * CHECKPOINT_SHARE) // checkpoint, CHECKPOINTS_PER_SLOT * num_slots)
    return StateSize(
        slot_bytes=each,
        checkpoint_bytes=checkpoint,
        num_slots=num_slots,
        num_checkpoints=num_checkpoints,
    )


def check_states(config: EngineConfig, spec: ModelSpec) -> None:
    """Raise ConfigError for settings that models with recurrent layers do not have: a state has one path of
    rows, and follows from all of them."""
    speculation = config.speculation
    if speculation is None or not spec.recurrent_layers:
        return

    if not isinstance(speculation.shape, Chain):
        raise ConfigError.of("shape", speculation.shape, "a Chain for a model with recurrent layers")

    if speculation.partial_verification is not None:
        allowed = "None for a model with recurrent layers"
        raise ConfigError.of("partial_verification", speculation.partial_verification, allowed)
