"""Memory of recurrent states, for running sequences and for checkpoints in the prefix cache."""

from __future__ import annotations

import math

import torch
from msgspec import Struct
from msgspec.structs import replace

from drift_sdk.config import EngineConfig
from drift_sdk.errors import ConfigError
from drift_sdk.spec.model import ModelSpec
from drift_sdk.spec.states import BORDER, checkpoint_bytes, graph_slot_bytes, slot_bytes
from drift_sdk.speculation import Chain
from drift_sdk.startup.kv_sizing import MemoryRoom, gib

__all__ = ["StateSize", "bytes_of_slot", "check_states", "size_states"]

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


def bytes_of_slot(config: EngineConfig, spec: ModelSpec, dtype: torch.dtype, executor: str) -> int:
    """Bytes of the states of a running sequence. executor: "graph" or "eager"."""
    if executor != "graph":
        return slot_bytes(spec, dtype)

    speculation = config.speculation
    most = 0 if speculation is None else speculation.shape.num_draft_tokens
    return graph_slot_bytes(spec, dtype, most + 1)


def size_states(
    config: EngineConfig, spec: ModelSpec, dtype: torch.dtype, room: MemoryRoom, executor: str
) -> StateSize | None:
    """The states of a model; None if it has none. They have room for as many of `max_num_seqs` sequences as
    half of the memory holds. executor: "graph" or "eager". Raises ConfigError if it holds none."""
    if not spec.recurrent_layers:
        return None

    each = bytes_of_slot(config, spec, dtype, executor)
    num_slots = min(config.max_num_seqs, max(room.most, 0) // 2 // each)
    if not num_slots:
        found = f"the states of one take {gib(each)}, there is room for {gib(room.most)} ({room.account})"
        raise ConfigError.of("max_num_seqs", config.max_num_seqs, f"memory for a sequence: {found}")

    checkpoint = checkpoint_bytes(spec, dtype)
    left = max(room.share - num_slots * each, 0)
    num_checkpoints = min(int(left * CHECKPOINT_SHARE) // checkpoint, CHECKPOINTS_PER_SLOT * num_slots)
    return StateSize(
        slot_bytes=each,
        checkpoint_bytes=checkpoint,
        num_slots=num_slots,
        num_checkpoints=num_checkpoints,
    )


def check_states(
    config: EngineConfig, spec: ModelSpec, executor: str | None, dtype: torch.dtype | None
) -> None:
    """Raise ConfigError for settings that models with recurrent layers do not have: a state has one path of
    rows, and follows from all of them. executor: "graph" or "eager"; dtype: of the model. None: not known.
    """
    if not spec.recurrent_layers:
        return

    if executor == "graph" and dtype is not None and dtype != torch.bfloat16:
        name = str(dtype).removeprefix("torch.")
        allowed = 'bfloat16 for a model with recurrent layers on CUDA graphs, or executor="eager"'
        raise ConfigError.of("dtype", name, allowed)

    speculation = config.speculation
    if speculation is None:
        return

    if executor == "graph" and speculation.checks:
        allowed = 'False for a model with recurrent layers on CUDA graphs, or executor="eager"'
        raise ConfigError.of("checks", True, allowed)

    if not isinstance(speculation.shape, Chain):
        raise ConfigError.of("shape", speculation.shape, "a Chain for a model with recurrent layers")

    if speculation.partial_verification is not None:
        allowed = "None for a model with recurrent layers"
        raise ConfigError.of("partial_verification", speculation.partial_verification, allowed)
