"""KV cache sizing: blocks and context length from a configuration, a model's shapes and the free memory."""

from __future__ import annotations

from msgspec import Struct

from drift_sdk.config import EngineConfig
from drift_sdk.errors import ConfigError, FieldError

__all__ = ["KVDemand", "KVSize", "MemoryRoom", "check_model_len", "gib", "size_kv"]

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
