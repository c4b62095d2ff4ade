"""Configuration of a scheduler."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from drift_sdk.draft_policy.policy import ViewCosts
from drift_sdk.partial_verification import ViewLayout

__all__ = ["SchedulerConfig"]


class SchedulerConfig(Struct, frozen=True, kw_only=True):
    """Resources and limits that a scheduler distributes.

    max_num_seqs:          number of slots, so of sequences running at once.
    num_blocks:            KV blocks of the cache, of `block_size` tokens each.
    prefill_token_budget:  most prefill tokens in one step.
    draft_choices:         numbers of draft tokens that a batch may use; empty without speculation.
    max_tree_depth:        most draft tokens on a path if they form trees; None: they are chains.
    is_draft_adaptive:     choose among them by measured cost and acceptance, else always use the largest.
    round_costs:           seconds of a round by (slots, draft tokens), as the executor measured them at
                           start.
    mixed_tokens:          steps that compute decode rows and prefill chunks in one pass: by number of draft
                           tokens, ascending numbers of decode rows, each with the ascending numbers of
                           prefill tokens for which there are such steps. What is missing has two passes.
    view_layout, view_costs: of partial verification; None without it.
    has_draft_kv:          the executor keeps a draft's keys and values, one KV slot ahead of the target's.
    wants_history:         the executor needs the token ids of prefix hits.
    num_checkpoints:       places for checkpoints of recurrent states.
    checkpoint_tokens:     checkpoints are taken at multiples of it, which is a multiple of `block_size`; 0:
                           the model has no recurrent states.
    target_latency_ms_p50, target_latency_ms_p95, prefer_high_throughput: as in EngineConfig.
    """

    max_num_seqs: int
    num_blocks: int
    block_size: int
    prefill_token_budget: int
    draft_choices: tuple[int, ...] = ()
    max_tree_depth: int | None = None
    is_draft_adaptive: bool = True
    round_costs: Mapping[tuple[int, int], float] = {}
    mixed_tokens: Mapping[int, tuple[tuple[int, tuple[int, ...]], ...]] = {}
    view_layout: ViewLayout | None = None
    view_costs: ViewCosts | None = None
    has_draft_kv: bool = False
    wants_history: bool = False
    num_checkpoints: int = 0
    checkpoint_tokens: int = 0
    target_latency_ms_p50: float | None = None
    target_latency_ms_p95: float | None = None
    prefer_high_throughput: bool = False

    def __post_init__(self) -> None:
        tokens = self.checkpoint_tokens
        assert tokens % self.block_size == 0, f"checkpoint_tokens: {tokens}, blocks of {self.block_size}"
        assert tokens or not self.num_checkpoints, f"num_checkpoints: {self.num_checkpoints}, at no positions"

    @property
    def max_emitted_tokens(self) -> int:
        """Most tokens that a row emits in one step."""
        most = max(self.draft_choices, default=0)
        return 1 + (most if self.max_tree_depth is None else min(most, self.max_tree_depth))
