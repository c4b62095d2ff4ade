"""Sizes of the KV cache and of recurrent states, from a configuration, a model's shapes and the free memory.

Of the KV cache these are blocks and context length; of states, those of running sequences and of checkpoints
in the prefix cache.
"""

from __future__ import annotations

import math

import torch
from msgspec import Struct
from msgspec.structs import replace

from drift_sdk.config import EngineConfig
from drift_sdk.errors import ConfigError, FieldError
from drift_sdk.spec.model import BORDER, ModelSpec, checkpoint_bytes, graph_slot_bytes, slot_bytes
from drift_sdk.speculation import Chain

MIN_DEFAULT_MODEL_LEN = 512
"""Tokens. Without a max_model_len, an engine whose KV cache cannot hold a sequence of this length, or of the
model's own context if that is shorter, does not start."""


class KVDemand(Struct, frozen=True, kw_only=True):
    """Memory that a model's KV takes.

    context:         the model's own context, in tokens.
    block_size:      tokens in a block.
    bytes_per_block: bytes of a block, of all layers, those of a draft model included.
    """

    context: int
    block_size: int
    bytes_per_block: int

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks that hold this many tokens of one sequence."""
        return -(-num_tokens // self.block_size)


class MemoryRoom(Struct, frozen=True, kw_only=True):
    """Bytes of memory that a KV cache may take.

    share:       for the default size.
    for_length:  for one sequence of the configured max_model_len, if the default size cannot hold it.
    most:        for a configured kv_cache_tokens.
    share_field: the configuration's field that sets the share; empty if there is none.
    account:     how these numbers come about, in words for error messages.
    """

    share: int
    for_length: int
    most: int
    share_field: str
    account: str


class KVSize(Struct, frozen=True, kw_only=True):
    """Blocks of the KV cache, and most tokens of a sequence."""

    num_blocks: int
    max_model_len: int


def size_kv(config: EngineConfig, demand: KVDemand, room: MemoryRoom) -> KVSize:
    """The size of the KV cache and the length of a sequence, so that the longest sequence fits into the
    cache.

    There are as many blocks as kv_cache_tokens needs; without it, as many as fit into the share, and at most
    as many as max_num_seqs sequences of full length can use. If that is less than the model's context and no
    max_model_len is given, the context is cut to it. Raises ConfigError, with the numbers, for a cache that
    does not fit."""
    check_model_len(config, demand.context)
    if config.kv_cache_tokens is not None:
        return _configured_size(config, config.kv_cache_tokens, demand, room)

    max_model_len = config.max_model_len or demand.context
    num_used = config.max_num_seqs * demand.num_blocks(max_model_len)
    num_blocks = min(max(room.share, 0) // demand.bytes_per_block, num_used)
    least = config.max_model_len or min(demand.context, MIN_DEFAULT_MODEL_LEN)
    if num_blocks < demand.num_blocks(least):
        num_blocks = demand.num_blocks(least)
        most = room.for_length if config.max_model_len is not None else room.share
        if num_blocks * demand.bytes_per_block > most:
            raise _room_error(config, demand, room, least, max(most, 0))

    num_tokens = num_blocks * demand.block_size
    return KVSize(num_blocks=num_blocks, max_model_len=min(max_model_len, num_tokens))


def check_model_len(config: EngineConfig, context: int) -> None:
    """Raise ConfigError for a max_model_len over the model's own context."""
    if config.max_model_len is not None and config.max_model_len > context:
        allowed = f"at most the model's context of {context}"
        raise ConfigError.of("max_model_len", config.max_model_len, allowed)


def _room_error(
    config: EngineConfig, demand: KVDemand, room: MemoryRoom, num_tokens: int, most: int
) -> FieldError:
    needed = gib(demand.num_blocks(num_tokens) * demand.bytes_per_block)
    fitting = most // demand.bytes_per_block * demand.block_size
    figures = (
        f"KV of {num_tokens} tokens takes {needed}, there is room for {gib(most)} or {fitting} tokens "
        f"({room.account})"
    )
    if room.share_field and config.max_model_len is None:
        value = getattr(config, room.share_field)
        return ConfigError.of(room.share_field, value, f"more, or more free memory: {figures}")

    length = config.max_model_len or demand.context
    return ConfigError.of("max_model_len", length, f"less, or more free memory: {figures}")


def _configured_size(config: EngineConfig, num_tokens: int, demand: KVDemand, room: MemoryRoom) -> KVSize:
    if config.max_model_len is not None and num_tokens < config.max_model_len:
        allowed = f"at least max_model_len={config.max_model_len}"
        raise ConfigError.of("kv_cache_tokens", num_tokens, allowed)

    num_blocks = demand.num_blocks(num_tokens)
    most = max(room.most, 0) // demand.bytes_per_block
    if num_blocks > most:
        needed = gib(num_blocks * demand.bytes_per_block)
        allowed = (
            f"at most {most * demand.block_size}: {num_tokens} tokens take {needed}, "
            f"there is room for {gib(max(room.most, 0))} ({room.account})"
        )
        raise ConfigError.of("kv_cache_tokens", num_tokens, allowed)

    return KVSize(
        num_blocks=num_blocks, max_model_len=min(config.max_model_len or demand.context, num_tokens)
    )


def gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"


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
