from __future__ import annotations

from msgspec import Struct

__all__ = ["SchedulerConfig"]


class SchedulerConfig(Struct, frozen=True, kw_only=True):
    """What a scheduler shares out: slots, blocks of `block_size` tokens, prefill tokens a step."""

    max_num_seqs: int
    num_blocks: int
    block_size: int
    prefill_token_budget: int
    num_draft_tokens: int = 0
    target_latency_ms_p50: float | None = None
    target_latency_ms_p95: float | None = None
    prefer_high_throughput: bool = False
