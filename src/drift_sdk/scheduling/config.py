from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

__all__ = ["SchedulerConfig"]


class SchedulerConfig(Struct, frozen=True, kw_only=True):
    """What a scheduler shares out: slots, blocks of `block_size` tokens, prefill tokens a step.

    `draft_choices`: how many tokens a batch may draft for its rows, none if empty; chosen by what is measured
    if `is_draft_adaptive`, else always the most. `round_costs`: what the executor measured when it was made,
    seconds by (slots, drafts). `has_draft_kv`: it keeps a draft's keys and values one slot ahead.
    `wants_history`: it wants to know the tokens of prefix hits.
    """

    max_num_seqs: int
    num_blocks: int
    block_size: int
    prefill_token_budget: int
    draft_choices: tuple[int, ...] = ()
    is_draft_adaptive: bool = True
    round_costs: Mapping[tuple[int, int], float] = {}
    has_draft_kv: bool = False
    wants_history: bool = False
    target_latency_ms_p50: float | None = None
    target_latency_ms_p95: float | None = None
    prefer_high_throughput: bool = False

    @property
    def num_draft_tokens(self) -> int:
        """Most tokens drafted for a row in one step."""
        return max(self.draft_choices, default=0)
