"""The plan of a step, and what it is made by: the scheduler's configuration, the number of prefill tokens
from latency targets and measured step times, how prompts share them, and the choice of the decode round.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Items
from math import ceil
from typing import NamedTuple

from msgspec import Struct

from drift_sdk.draft_policy import DraftPolicy, ViewCosts
from drift_sdk.scheduling.sequence import Sequence
from drift_sdk.speculation import ViewLayout
from drift_sdk.steps import (
    EXPANDED_TILE,
    MAX_CHUNKS,
    BlockUpdate,
    DecodeRow,
    PrefillChunk,
    SlotAssignment,
    StepPlan,
    StepResult,
    Verification,
)


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
    window:                tokens that layers with windows see, a row's own included, if these layers have
                           blocks of their own; 0: they have none.
    num_window_blocks:     their number.
    max_expanded_tokens:   most keys of a step that are expanded from latents, a multiple of EXPANDED_TILE;
                           0: none are.
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
    window: int = 0
    num_window_blocks: int = 0
    max_expanded_tokens: int = 0
    target_latency_ms_p50: float | None = None
    target_latency_ms_p95: float | None = None
    prefer_high_throughput: bool = False

    def __post_init__(self) -> None:
        tokens = self.checkpoint_tokens
        assert tokens % self.block_size == 0, f"checkpoint_tokens: {tokens}, blocks of {self.block_size}"
        assert tokens or not self.num_checkpoints, f"num_checkpoints: {self.num_checkpoints}, at no positions"
        least = least_window_blocks(self.window, self.block_size, self.max_emitted_tokens)
        assert self.num_window_blocks >= least, f"num_window_blocks: {self.num_window_blocks} of {least}"
        assert not (tokens and self.window), f"window: {self.window}, in a model with recurrent states"
        most = self.max_expanded_tokens
        assert most % EXPANDED_TILE == 0, f"max_expanded_tokens: {most}, in tiles of {EXPANDED_TILE}"
        assert not (most and (tokens or self.window)), f"max_expanded_tokens: {most}, with states or windows"

    @property
    def max_emitted_tokens(self) -> int:
        """Most tokens that a row emits in one step."""
        most = max(self.draft_choices, default=0)
        return 1 + (most if self.max_tree_depth is None else min(most, self.max_tree_depth))


MIN_EXPANDED_PROMPT = 1024
"""Tokens of the shortest prompt that is expanded."""
EXPANDED_BORDER = 512
"""Expanded keys end at a multiple of so many tokens. About as many rows are the fewest for which it pays to
expand all keys before them, so a prompt that continues a cached one seldom expands them for fewer."""


def num_expanded_tokens(num_prompt_tokens: int, max_expanded_tokens: int) -> int | None:
    """How many of the first tokens of a sequence attend to expanded keys: those of its prompt but the last
    one, which a mixed step computes as a row of its round, up to a multiple of EXPANDED_BORDER. Samples of a
    prompt, whose blocks are cached, so expand none of the keys before the few rows that are left. The form
    of a row follows from the tokens before it and the length of the prompt, and is the same when a preempted
    sequence is computed again.

    None: the model has one form of attention.
    """
    if not max_expanded_tokens:
        return None

    most = min(num_prompt_tokens - 1, max_expanded_tokens) if num_prompt_tokens >= MIN_EXPANDED_PROMPT else 0
    return most // EXPANDED_BORDER * EXPANDED_BORDER


def least_window_blocks(window: int, block_size: int, max_emitted_tokens: int) -> int:
    """The fewest blocks with which a sequence alone can be computed whose layers have a window: the keys that
    its next row sees, a row for each token that this may emit, and one more, none of which need begin with a
    block."""
    return -(-(window + max_emitted_tokens + 1) // block_size) + 2 if window else 0


MIN_TOKENS = 16
"""Smallest budget under a latency target, so that prompts always progress."""
SMOOTHING = 0.1
"""Weight of the newest step in the exponential averages."""
WINDOW = 128
"""Number of latest steps whose ratios of measured to predicted time give the percentiles."""
SPREAD_ROWS = 24
"""Decode rows for each mixed step over which the waiting prompt tokens are spread: the more rows decode, the
shorter are the steps that all of them wait for, and the longer the prompts wait."""
MIN_SPREAD_TOKENS = 192
"""Least tokens of a step when prompts are spread: if fewer wait, one step takes them all."""


class TokenBudget:
    """Chooses how many prefill tokens the next step may take.

    Without decode rows: all of `max_tokens`, since no sequence waits for its next token. Otherwise the first
    of these rules that applies:

    - With a latency target, as many tokens as the predicted step time allows, `MIN_TOKENS` at least. Targets
      take precedence over `prefer_high_throughput`. The predicted time of a step is decode time + tokens x
      time per token, both exponential averages. The ratios of measured to predicted time in the last `WINDOW`
      steps tell how far the median and the 95th percentile lie from the prediction.
    - With `prefer_high_throughput`, all of `max_tokens`.
    - If one pass can compute prompts together with the decode rows: the waiting tokens, spread over a step
      for every SPREAD_ROWS decode rows, or over fewer steps if a sequence gets several tokens from each. This
      is at least MIN_SPREAD_TOKENS, if so many wait, and rounded up to the next size of such a pass
      (`mixed_tokens`, as in SchedulerConfig), if there is one. At most half of `max_tokens`, a block at
      least, times the average number of tokens that a decoding sequence gets from a step: a round of
      speculation emits several tokens, so it may take longer in proportion. At most `max_tokens`.
    - Two passes take longer: a quarter of `max_tokens` in place of half, however many tokens wait.

    The last two rules also apply with a latency target until a step with prefill tokens has been measured.
    """

    def __init__(
        self,
        *,
        max_tokens: int,
        block_size: int,
        mixed_tokens: Mapping[int, Items[tuple[int, Items[int]]]] = {},
        target_latency_ms_p50: float | None = None,
        target_latency_ms_p95: float | None = None,
        prefer_high_throughput: bool = False,
    ) -> None:
        self.max_tokens = max_tokens
        self.min_tokens: int = min(MIN_TOKENS, max_tokens)
        self._block_size = block_size
        self._mixed_tokens = mixed_tokens
        self._tokens_per_row = 1.0
        self._prefers_throughput = prefer_high_throughput
        targets = ((0.5, target_latency_ms_p50), (0.95, target_latency_ms_p95))
        self._targets = [(quantile, ms / 1e3) for quantile, ms in targets if ms is not None]

        self._decode_s: float | None = None
        self._token_s: float | None = None
        self._ratios: deque[float] = deque()  # measured / predicted time of steps with decode rows
        self._sorted_ratios: list[float] = []

    def num_tokens(
        self, num_decode_rows: int, num_waiting_tokens: int, num_draft_tokens: int | None = 0
    ) -> int:
        """The budget of a step with `num_decode_rows` decode rows, of at most `num_draft_tokens` draft tokens
        each, while `num_waiting_tokens` tokens of prompts wait to be computed. None: rows that share no pass
        with chunks."""
        if num_decode_rows == 0:
            return self.max_tokens

        if not self._targets:
            if self._prefers_throughput:
                return self.max_tokens

            return self._fair_share(num_decode_rows, num_waiting_tokens, num_draft_tokens)

        if self._token_s is None:
            return self._fair_share(num_decode_rows, num_waiting_tokens, num_draft_tokens)

        wanted_s = min(target_s / self._ratio(quantile) for quantile, target_s in self._targets)
        room_s = wanted_s - (self._decode_s or 0.0)
        if room_s <= 0.0:
            return self.min_tokens

        if room_s >= self.max_tokens * self._token_s:
            return self.max_tokens

        return max(int(room_s / self._token_s), self.min_tokens)

    def _fair_share(self, num_decode_rows: int, num_waiting_tokens: int, num_draft_tokens: int | None) -> int:
        """The budget of the last two rules of the class."""
        mixed = () if num_draft_tokens is None else self._mixed_tokens.get(num_draft_tokens, ())
        for most_rows, sizes in mixed:
            if num_decode_rows <= most_rows:
                num_steps = max(1.0, num_decode_rows / SPREAD_ROWS / self._tokens_per_row)
                wanted = max(num_waiting_tokens / num_steps, min(num_waiting_tokens, MIN_SPREAD_TOKENS))
                size = next((size for size in sizes if size >= wanted), sizes[-1])
                return min(size, self._share(2))

        return self._share(4)

    def _share(self, divisor: int) -> int:
        """A part of `max_tokens`, in proportion to the tokens that a decoding sequence gets from a step."""
        share = min(self.max_tokens, max(self.max_tokens // divisor, self._block_size))
        return min(self.max_tokens, int(share * self._tokens_per_row))

    def observe(
        self, num_prefill_tokens: int, num_decode_rows: int, num_decoded_tokens: int, duration_s: float
    ) -> None:
        """Update the averages with a completed step.

        duration_s:          seconds the device worked on it.
        num_decoded_tokens:  tokens that its `num_decode_rows` decode rows emitted.
        """
        if num_decode_rows:
            self._tokens_per_row = _average(self._tokens_per_row, num_decoded_tokens / num_decode_rows)
        if not self._targets or num_prefill_tokens + num_decode_rows == 0:
            return

        decode_s = (self._decode_s or 0.0) if num_decode_rows else 0.0
        predicted_s = decode_s + num_prefill_tokens * (self._token_s or 0.0)
        if num_decode_rows and predicted_s > 0.0:
            self._record_ratio(duration_s / predicted_s)

        if num_prefill_tokens:
            # All time beyond the decode time is attributed to the prefill tokens, so an unknown or outdated
            # decode time still leads to a budget that meets the target.
            token_s = max(duration_s - decode_s, 0.0) / num_prefill_tokens
            self._token_s = _average(self._token_s, token_s)

        if num_prefill_tokens == 0 or duration_s < decode_s:
            # Under load every step may have prefill tokens. One that took less than the average decode time
            # shows that decoding has become faster.
            self._decode_s = _average(self._decode_s, duration_s)

    def _record_ratio(self, ratio: float) -> None:
        if len(self._ratios) == WINDOW:
            oldest = self._ratios.popleft()
            del self._sorted_ratios[bisect_left(self._sorted_ratios, oldest)]

        self._ratios.append(ratio)
        insort(self._sorted_ratios, ratio)

    def _ratio(self, quantile: float) -> float:
        """The quantile (0 to 1) of the latest ratios; 1.0 if there are none."""
        if not self._sorted_ratios:
            return 1.0

        ratio = self._sorted_ratios[ceil(quantile * len(self._sorted_ratios)) - 1]
        return ratio if ratio > 0.0 else 1.0


def _average(old: float | None, new: float) -> float:
    return new if old is None else old + SMOOTHING * (new - old)


MAX_STEPS_WITHOUT_TOKENS = 4
"""Steps in a row in which the first prompt may get no tokens."""


def share_tokens(num_tokens: int, prompts: Items[Sequence]) -> list[int]:
    """Share `num_tokens` between prompts: the number of each. At most MAX_CHUNKS of them get any.

    Tokens go to the prompts by priority, then to the shortest first: a short prompt delays a long one only
    slightly, and does not wait for all of it. A first prompt that has got none in MAX_STEPS_WITHOUT_TOKENS
    steps gets half, or all that it needs if that is less, so that it always progresses.

    prompts: in order of (priority, arrival).
    """
    sizes = [(prompt.priority, prompt.num_unplanned_tokens) for prompt in prompts]
    shares = [0] * len(prompts)
    if prompts and prompts[0].num_steps_without_tokens >= MAX_STEPS_WITHOUT_TOKENS:
        shares[0] = min(sizes[0][1], (num_tokens + 1) // 2)
    left = num_tokens - sum(shares)
    num_chunks = int(sum(shares) > 0)
    for index in sorted(range(len(prompts)), key=sizes.__getitem__):
        more = min(sizes[index][1] - shares[index], left)
        if shares[index] == 0 and more:
            if num_chunks == MAX_CHUNKS:
                continue
            num_chunks += 1
        shares[index] += more
        left -= more
    return shares


def share_step(num_tokens: int, prompts: Items[Sequence], max_expanded_tokens: int) -> list[int]:
    """As `share_tokens`, with at most `max_expanded_tokens` expanded keys. What prompts do not get for want
    of these, others get."""
    refused: set[int] = set()
    while True:
        kept = [prompt for index, prompt in enumerate(prompts) if index not in refused]
        given = iter(share_tokens(num_tokens, kept))
        shares = [0 if index in refused else next(given) for index in range(len(prompts))]
        room, num_refused = max_expanded_tokens, len(refused)
        for index, (prompt, share) in enumerate(zip(prompts, shares, strict=True)):
            num_keys = prompt.num_expanded_keys(share)
            if num_keys > room:
                refused.add(index)
            else:
                room -= num_keys
        if len(refused) == num_refused:
            return shares


class PlannedStep(NamedTuple):
    """A plan with the sequences of its chunks and rows: at its commit, a slot may hold another sequence."""

    plan: StepPlan
    prefill: list[Sequence]
    decode: list[Sequence]


class StepBuilder:
    """Collects the parts of a step's plan.

    num_draft_tokens:  of the batch; a row may have fewer. verification: of the decode part.
    wants_history:     assignments carry the token ids of prefix hits.
    num_left_out:      sequences that have no row because they wait for a mask or for blocks.
    """

    def __init__(
        self, num_draft_tokens: int, *, wants_history: bool, verification: Verification = "whole"
    ) -> None:
        self.num_draft_tokens: int = num_draft_tokens
        self.verification: Verification = verification
        self.prefill: list[Sequence] = []
        self.decode: list[Sequence] = []
        self.num_left_out: int = 0
        self._wants_history = wants_history
        self._rows: list[DecodeRow] = []
        self._assignments: list[SlotAssignment] = []
        self._block_updates: list[BlockUpdate] = []
        self._window_updates: list[BlockUpdate] = []
        self._chunks: list[PrefillChunk] = []

    @property
    def num_mixed_drafts(self) -> int | None:
        """Draft tokens of rows that may share a pass with chunks; None: they have a pass of their own."""
        return self.num_draft_tokens if self.verification == "whole" else None

    def assign_slot(self, sequence: Sequence) -> None:
        """Add the assignment of an admitted sequence to its slot."""
        nodes = sequence.prefix_nodes
        place = nodes[-1].checkpoint if nodes else -1
        cached: tuple[int, ...] = ()
        if self._wants_history or sequence.sampling.has_penalties or sequence.functions:
            cached = tuple(sequence.token_ids[: sequence.num_computed_tokens])

        self._assignments.append(
            SlotAssignment(
                slot=sequence.slot,
                sampling=sequence.remaining_sampling,
                constraint=sequence.constraint,
                functions=sequence.functions,
                cached_token_ids=cached,
                arrival=sequence.arrival,
                checkpoint=place if place >= 0 else None,
            )
        )

    def update_blocks(self, sequence: Sequence, first_index: int) -> None:
        """Add the entries of the sequence's block table from `first_index` on."""
        block_ids = tuple(sequence.block_table[first_index:])
        self._block_updates.append(
            BlockUpdate(slot=sequence.slot, first_index=first_index, block_ids=block_ids)
        )

    def update_window(self, sequence: Sequence, first_index: int) -> None:
        """Add the entries of the sequence's window table from `first_index` on, if there are any."""
        block_ids = tuple(sequence.window_table[first_index:])
        if block_ids:
            self._window_updates.append(
                BlockUpdate(slot=sequence.slot, first_index=first_index, block_ids=block_ids)
            )

    def add_row(self, sequence: Sequence, row: DecodeRow, max_emitted_tokens: int) -> None:
        """Add a decode row of a sequence. max_emitted_tokens: the row's, which the caller has computed."""
        sequence.launch(1, max_emitted_tokens)
        self.decode.append(sequence)
        self._rows.append(row)

    def add_chunk(
        self, sequence: Sequence, num_tokens: int, checkpoints: tuple[tuple[int, int], ...] = ()
    ) -> None:
        """Add the sequence's next prefill chunk, of `num_tokens` tokens. checkpoints: the chunk's."""
        start = sequence.num_planned_tokens
        end = start + num_tokens
        is_last = end == sequence.num_prefill_tokens
        sequence.num_planned_tokens = end
        sequence.launch(is_last, is_last)
        self.prefill.append(sequence)
        self._chunks.append(
            PrefillChunk(
                slot=sequence.slot,
                start=start,
                token_ids=tuple(sequence.token_ids[start:end]),
                next_token_id=None if is_last else sequence.token_ids[end],
                checkpoints=checkpoints,
                num_expanded=min(max((sequence.num_expanded_tokens or 0) - start, 0), num_tokens),
            )
        )

    def build(self, step_id: int) -> PlannedStep:
        """The plan of everything added so far."""
        plan = StepPlan(
            step_id=step_id,
            assignments=tuple(self._assignments),
            block_updates=tuple(self._block_updates),
            prefill=tuple(self._chunks),
            decode=tuple(self._rows),
            verification=self.verification if self._rows else "whole",
            window_updates=tuple(self._window_updates),
        )
        return PlannedStep(plan, self.prefill, self.decode)


def check_in_flight(planned: Iterable[PlannedStep], sequences: Iterable[Sequence]) -> None:
    """Raise AssertionError unless every sequence's in-flight counts equal those of the planned steps."""
    in_flight = {sequence: [0, 0, 0] for sequence in sequences}
    for plan, prefill, decode in planned:
        emitted = [(int(chunk.is_last), int(chunk.is_last)) for chunk in plan.prefill]
        emitted += [(1, row.max_emitted_tokens) for row in plan.decode]
        for sequence, (least, most) in zip(prefill + decode, emitted, strict=True):
            counts = in_flight.setdefault(sequence, [0, 0, 0])
            counts[:] = counts[0] + 1, counts[1] + least, counts[2] + most

    for sequence, counts in in_flight.items():
        found = [sequence.num_in_flight, sequence.min_in_flight_tokens, sequence.max_in_flight_tokens]
        assert found == counts, f"{sequence}: in flight {found}, planned {counts}"


class RoundPlanner:
    """Chooses rounds by measured costs, and partial verification from bounds on what steps in flight do.

    A round over views needs room for the rows that it may accept among the pending ones, and views: of a
    sequence that is longer than a view, those of a refresh since its admission, and since its last whole
    round, whose rows no view has room for. While it is not used, rows that are pending are refreshed at once.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._layout = config.view_layout
        self._is_crowded = False
        self._policy = (
            DraftPolicy(
                config.draft_choices,
                config.round_costs,
                is_adaptive=config.is_draft_adaptive,
                has_trees=config.max_tree_depth is not None,
                view_costs=config.view_costs,
            )
            if config.draft_choices
            else None
        )

    def choose(self, running: list[Sequence]) -> tuple[int, Verification]:
        """The most draft tokens of a row of the next step, and its verification."""
        if self._policy is None:
            return 0, "whole"

        if self._layout is None:
            return self._policy.num_draft_tokens(len(running)), "whole"

        decoding = [sequence for sequence in running if not sequence.is_prefilling]
        self._is_crowded = len(decoding) > self._layout.max_sequences
        lengths = [len(sequence.token_ids) for sequence in decoding]
        if not self._can_use_views(decoding) or not self._policy.wants_views(lengths):
            is_pending = any(sequence.max_pending_tokens for sequence in decoding)
            return self._policy.num_draft_tokens(len(running)), "refresh" if is_pending else "whole"

        number = self._policy.num_draft_tokens(len(running), over_views=True)
        has_room = all(self._has_view(sequence, number + 1) for sequence in decoding)
        return number, "partial" if has_room else "refresh"

    def leaves_out(self, sequence: Sequence, verification: Verification) -> bool:
        """Return True if the step just chosen leaves out a sequence, because too many decode together for a
        refresh: it takes those with pending rows, for which there is room."""
        return self._is_crowded and verification == "refresh" and not sequence.max_pending_tokens

    def may_draft(self, sequence: Sequence, verification: Verification) -> bool:
        """Return True if a sequence may draft in a step of this verification: a refresh is one replay, in
        which a constraint gives the mask of one token alone."""
        return verification == "whole" or sequence.constraint is None

    def launch(self, sequence: Sequence, verification: Verification, step_id: int, most: int) -> None:
        """Count a planned row of a sequence that emits at most so many tokens."""
        if verification == "partial":
            sequence.max_pending_tokens += most
        else:
            sequence.has_views = verification == "refresh"
            if sequence.has_views:
                sequence.max_pending_tokens, sequence.refreshed_in = 0, step_id

    def complete(self, sequence: Sequence, step_id: int, most: int, num_emitted: int) -> None:
        """Count a committed row of a step over views."""
        if step_id > sequence.refreshed_in:
            sequence.max_pending_tokens -= most - num_emitted

    def observe(self, step: PlannedStep, result: StepResult) -> None:
        """Learn from the result of a step."""
        if self._policy is not None and step.plan.decode:
            has_views = self._layout is not None
            num_keys = sum([len(sequence.token_ids) for sequence in step.decode]) if has_views else 0
            self._policy.observe(step.plan, result, num_keys=num_keys)

    def _can_use_views(self, decoding: list[Sequence]) -> bool:
        """Return True if views may be used for sequences that decode together: there are not too many, one of
        them is longer than a view, and none forbids drafts or has a constraint."""
        if self._is_crowded or any(
            sequence.max_draft_tokens == 0 or sequence.constraint is not None for sequence in decoding
        ):
            return False

        return any(self._is_long(sequence) for sequence in decoding)

    def _has_view(self, sequence: Sequence, most: int) -> bool:
        """Return True if the sequence has a view, and room for `most` more pending rows."""
        assert self._layout is not None
        has_room = sequence.max_pending_tokens + most <= self._layout.refresh_tokens
        return has_room and (sequence.has_views or not self._is_long(sequence))

    def _is_long(self, sequence: Sequence) -> bool:
        """Return True if the sequence may be longer than a view when the next step begins."""
        assert self._layout is not None
        return len(sequence.token_ids) + sequence.max_in_flight_tokens > self._layout.capacity
