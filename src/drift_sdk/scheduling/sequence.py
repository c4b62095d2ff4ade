from __future__ import annotations

from msgspec import Struct

from drift_sdk.results import FinishReason
from drift_sdk.scheduling.prefix import PrefixNode
from drift_sdk.steps import SlotOutput, SlotSampling, TokenConstraint

__all__ = ["Delta", "Sequence"]


class Sequence:
    """A request as the scheduler sees it: its tokens, its place, and what steps in flight may still add.

    While results are in flight the true length is known to the device alone; it lies between
    `len(token_ids) + min_in_flight_tokens` and `len(token_ids) + max_in_flight_tokens`.
    """

    __slots__ = (
        "arrival",
        "block_table",
        "constraint",
        "finish",
        "awaits_mask",
        "is_publishing",
        "has_draft_kv",
        "max_draft_tokens",
        "max_in_flight_tokens",
        "max_length",
        "min_in_flight_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_in_flight",
        "num_launched_tokens",
        "num_prefill_tokens",
        "num_prompt_tokens",
        "order",
        "prefix_nodes",
        "priority",
        "request_id",
        "sampling",
        "slot",
        "started_at",
        "token_ids",
    )

    def __init__(
        self,
        *,
        request_id: str,
        prompt_ids: list[int],
        sampling: SlotSampling,
        priority: int,
        arrival: int,
        constraint: TokenConstraint | None = None,
        max_draft_tokens: int | None = None,
    ) -> None:
        self.request_id = request_id
        self.sampling = sampling
        self.priority = priority
        self.arrival = arrival
        self.order = (priority, arrival)
        self.max_length = sampling.max_length
        self.constraint = constraint
        self.max_draft_tokens = max_draft_tokens  # None = what the batch drafts
        self.has_draft_kv = False  # set by the scheduler
        self.awaits_mask = False  # no row is planned: the host works out what a constraint allows next

        self.token_ids = list(prompt_ids)  # prompt and committed output
        self.num_prompt_tokens = len(prompt_ids)
        self.num_cached_tokens = 0  # prefix hit of the first admission
        self.started_at: float | None = None  # time.monotonic() of the first admission
        self.finish: FinishReason | None = None

        # While it runs; a waiting sequence has slot -1 and no blocks.
        self.slot = -1
        self.block_table: list[int] = []
        self.prefix_nodes: list[PrefixNode] = []  # of the table's first entries; only a guess while waiting
        self.is_publishing = True  # false once somebody else has published the same block
        self.num_prefill_tokens = 0  # length at admission: what the chunks have to cover
        self.num_launched_tokens = 0  # of them, in launched chunks or cached
        self.num_computed_tokens = 0  # KV of positions below is committed; steps in flight write above

        # Steps that were launched and not committed, and the tokens they emit.
        self.num_in_flight = 0
        self.min_in_flight_tokens = 0
        self.max_in_flight_tokens = 0

    def __lt__(self, other: Sequence) -> bool:
        return self.order < other.order

    def __repr__(self) -> str:
        length = len(self.token_ids)
        return f"<Sequence {self.request_id!r} order={self.order} length={length} slot={self.slot}>"

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def is_running(self) -> bool:
        return self.slot >= 0

    @property
    def is_prefilling(self) -> bool:
        return self.num_launched_tokens < self.num_prefill_tokens

    @property
    def can_share_prefix(self) -> bool:
        """Log-probabilities of the prompt need every position computed."""
        return self.sampling.num_prompt_logprobs is None or self.num_output_tokens > 0

    @property
    def awaits_host(self) -> bool:
        """What a constrained sequence may say next depends on every token before: none may be in flight."""
        return self.constraint is not None and (self.awaits_mask or self.num_in_flight > 0)

    def num_kv_slots(self, length: int) -> int:
        """KV slots written once the sequence has `length` tokens, its limit at most."""
        # The newest token's KV is written by the step that feeds it, but a draft's row that pairs it with the
        # feature before lies in its slot.
        length = length if length < self.max_length else self.max_length
        return length if self.has_draft_kv else length - 1

    def num_draft_tokens(self, most: int) -> int:
        """Tokens worth drafting in the next step, `most` at most: the step adds one of its own."""
        if self.max_draft_tokens is not None and self.max_draft_tokens < most:
            most = self.max_draft_tokens

        room = self.max_length - len(self.token_ids) - self.min_in_flight_tokens - 1
        return min(most, room)

    def launch(self, least: int, most: int) -> None:
        """A step that emits `least` to `most` tokens was planned."""
        self.num_in_flight += 1
        self.min_in_flight_tokens += least
        self.max_in_flight_tokens += most

    def complete(self, least: int, most: int) -> None:
        """The result of such a step is in."""
        self.num_in_flight -= 1
        self.min_in_flight_tokens -= least
        self.max_in_flight_tokens -= most


class Delta(Struct, frozen=True, gc=False):
    """What one committed step added to a sequence. `num_planned_drafts`: None for a first token, which no
    draft can precede."""

    sequence: Sequence
    output: SlotOutput
    num_planned_drafts: int | None = None
