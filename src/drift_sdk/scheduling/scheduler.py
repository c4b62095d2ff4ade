"""The scheduler: which sequences run in the next step, with which KV blocks. It uses no device."""

from __future__ import annotations

import time
from collections import deque
from typing import NamedTuple

from drift_sdk.results import FinishReason
from drift_sdk.scheduling.blocks import BlockManager, CheckpointPlanner
from drift_sdk.scheduling.planning import (
    PlannedStep,
    RoundPlanner,
    SchedulerConfig,
    StepBuilder,
    TokenBudget,
    check_in_flight,
    num_expanded_tokens,
    share_step,
)
from drift_sdk.scheduling.sequence import Delta, RunningSet, Sequence, SequenceWatcher, WaitingQueue
from drift_sdk.steps import MAX_CHUNKS, DecodeRow, StepPlan, StepResult


class RowCounts(NamedTuple):
    """Sequences that run, or may be admitted, by what their next row depends on.

    num_free:    their masks are known when they are needed, or they have none.
    num_bound:   their masks are computed when the token before is known, soon after it.
    num_lacking: of the bound ones, those that a plan made now would lack.
    mask_s:      the longest time that a mask of the bound ones took last.
    asked_at:    when a mask that a lacking one awaits was asked for last.
    """

    num_free: int
    num_bound: int
    num_lacking: int
    mask_s: float
    asked_at: float
    has_in_flight: bool


class Scheduler:
    """Plans steps, and commits their results.

    A plan may be made before earlier ones are committed, to any depth; results are committed in the order of
    their plans. A plan has decode rows first, then prefill chunks of running and of newly admitted sequences,
    while slots, blocks and the token budget last, and up to MAX_CHUNKS. Sequences are in order of (priority,
    arrival), the lowest first; prompts share the budget (`share_tokens`). A waiting sequence that gets
    tokens is admitted, if there is a slot for those before it too. If it has to wait for blocks, no other is
    admitted after it.

    A decode row that lacks blocks is left out while the sequence has steps in flight, because their results
    may free blocks. With none in flight, running sequences are preempted, the last in the order first, which
    may be the sequence itself. So the first sequence in the order always advances, but for steps that refresh
    others (`RoundPlanner`) or compute shorter prompts in place of its own (`TokenBudget`). A preempted
    sequence computes all its tokens again once admitted; results of its steps in flight still count, and it
    is not admitted before the last of them is committed.

    watcher: told of admissions and preemptions; None = nobody. checkpoints: None without recurrent states.
    """

    def __init__(self, config: SchedulerConfig, watcher: SequenceWatcher | None = None) -> None:
        self.config = config
        self._max_emitted_tokens = config.max_emitted_tokens
        self._blocks = BlockManager(config)
        self.checkpoints: CheckpointPlanner | None = self._blocks.checkpoints
        self._budget = TokenBudget(
            max_tokens=config.prefill_token_budget,
            block_size=config.block_size,
            mixed_tokens=config.mixed_tokens,
            target_latency_ms_p50=config.target_latency_ms_p50,
            target_latency_ms_p95=config.target_latency_ms_p95,
            prefer_high_throughput=config.prefer_high_throughput,
        )
        self._queue = WaitingQueue()
        self._running = RunningSet(config.max_num_seqs)
        # By slot: rows without drafts are the same in every step.
        self._plain_rows = [DecodeRow(slot=slot, num_draft_tokens=0) for slot in range(config.max_num_seqs)]
        self._planned: deque[PlannedStep] = deque()
        self._rounds = RoundPlanner(config)
        self._next_step_id = 0
        self.num_preemptions: int = 0
        self._watcher = watcher

    @property
    def num_waiting(self) -> int:
        """Sequences without a slot: new and preempted ones."""
        return len(self._queue)

    @property
    def num_queued(self) -> int:
        """Waiting sequences that have never been admitted; the others were preempted."""
        return self._queue.num_never_started

    @property
    def num_running(self) -> int:
        """Sequences with a slot."""
        return len(self._running.sequences)

    @property
    def num_in_flight(self) -> int:
        """Planned steps that are not committed."""
        return len(self._planned)

    @property
    def num_awaiting_masks(self) -> int:
        """Sequences whose next row waits for the host to compute a constraint's mask."""
        return sum(sequence.awaits_mask for sequence in (*self._running.sequences, *self._queue))

    def count_rows(self, now: float, most_mask_s: float) -> RowCounts:
        """What the next plan would have, and lack. Sequences whose masks take more than `most_mask_s` seconds
        are not counted, and neither are those that will have no further row."""
        num_left_out = num_bound = num_lacking = 0
        mask_s = asked_at = 0.0
        for sequence in self._running.sequences:
            if not sequence.is_bound or sequence.is_prefilling:
                continue

            is_overdue = sequence.awaits_mask and now - sequence.mask_asked_at > most_mask_s
            length = len(sequence.token_ids) + sequence.min_in_flight_tokens
            if is_overdue or sequence.mask_s > most_mask_s or length >= sequence.max_length:
                num_left_out += 1
                continue

            num_bound += 1
            mask_s = max(mask_s, sequence.mask_s)
            if sequence.awaits_mask:
                asked_at = max(asked_at, sequence.mask_asked_at)
            num_lacking += sequence.awaits_mask or sequence.num_in_flight > 0
        num_new = min(len(self._queue), self._running.num_free_slots)
        return RowCounts(
            num_free=len(self._running.sequences) - num_left_out - num_bound + num_new,
            num_bound=num_bound,
            num_lacking=num_lacking,
            mask_s=mask_s,
            asked_at=asked_at,
            has_in_flight=bool(self._planned),
        )

    @property
    def num_free_blocks(self) -> int:
        """Blocks that the next plan can allocate: free ones, and cached ones that no sequence references."""
        return self._blocks.num_available

    @property
    def num_free_window_blocks(self) -> int:
        """Blocks of layers with windows that can be allocated; 0 if these have none of their own."""
        return 0 if self._blocks.windows is None else self._blocks.windows.num_available

    @property
    def num_recomputed_tokens(self) -> int:
        """Cached tokens that admitted sequences compute again for want of states or of a window."""
        source = self.checkpoints or self._blocks.windows
        return 0 if source is None else source.num_lost_tokens

    @property
    def num_cached_blocks(self) -> int:
        """Blocks in the prefix cache, referenced or not."""
        return self._blocks.trie.num_nodes

    @property
    def has_work(self) -> bool:
        """Whether any sequence is running or waiting, or any step is uncommitted."""
        return bool(self._running.sequences or self._queue or self._planned)

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence.

        AssertionError unless the whole cache has blocks for `sampling.max_length` tokens and the prompt
        leaves room for one token.
        """
        sequence.has_draft_kv = self.config.has_draft_kv
        sequence.num_expanded_tokens = num_expanded_tokens(
            sequence.num_prompt_tokens, self.config.max_expanded_tokens
        )
        num_blocks = self._blocks.num_blocks(sequence.num_kv_slots(sequence.max_length))
        assert num_blocks <= self.config.num_blocks, f"{sequence}: {num_blocks} blocks, more than there are"
        assert 0 < sequence.num_prompt_tokens < sequence.max_length, f"{sequence}: no room for a token"
        self._queue.push(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence at once. Its slot and blocks are free for the next plan, and results of its steps
        in flight are dropped. Idempotent."""
        self._end(sequence, sequence.finish or "cancelled")

    def forget_kv(self) -> None:
        """Handle the loss of all KV: preempt all running sequences and empty the prefix cache.

        No step may be in flight.
        """
        assert not self._planned, "steps are in flight"
        for sequence in list(self._running.sequences):
            self._preempt(sequence)
        self._blocks.forget_cached()

    def schedule(self) -> StepPlan | None:
        """Plan the next step. The caller launches plans in the order they are returned.

        None if nothing can be launched now: there is no work, or all of it waits for results in flight or for
        the host.
        """
        num_draft_tokens, verification = self._rounds.choose(self._running.sequences)
        step = StepBuilder(
            num_draft_tokens, wants_history=self.config.wants_history, verification=verification
        )
        prefilling, lacks_blocks = self._plan_rows(step)
        if prefilling or self._queue:
            self._plan_chunks(step, prefilling, may_admit=not lacks_blocks)

        if not step.prefill and not step.decode:
            # Without steps in flight, the sequences that were to be refreshed have just been preempted.
            return self.schedule() if verification == "refresh" and not self._planned else None

        planned = step.build(self._next_step_id)
        self._next_step_id += 1
        self._planned.append(planned)
        return planned.plan

    def commit(self, result: StepResult) -> list[Delta]:
        """Apply the result of the oldest uncommitted plan.

        Returns a delta for each sequence that gained tokens, those with chunks first. Results of sequences
        that have ended since the plan was made are dropped. AssertionError for the result of another plan.
        """
        step = self._planned.popleft()
        assert result.step_id == step.plan.step_id, (
            f"step {result.step_id}: step {step.plan.step_id} comes first"
        )
        deltas: list[Delta] = []
        num_useful = self._commit_prefill(step, result, deltas)
        num_useful += self._commit_decode(step, result, deltas)
        if num_useful:
            self._observe(step, result)

        return deltas

    def check_integrity(self) -> None:
        """Raise AssertionError if anything is inconsistent. May be called between any two other calls."""
        running, waiting = self._running.sequences, list(self._queue)
        self._running.check_integrity()
        self._queue.check_integrity()
        self._blocks.check_integrity(running)
        assert len({*running, *waiting}) == len(running) + len(waiting), "a sequence is listed twice"
        check_in_flight(self._planned, [*running, *waiting])
        if self.checkpoints is not None:
            self.checkpoints.check_integrity(self._planned, [*running, *waiting])
        for sequence in running:
            assert sequence.finish is None, f"{sequence} has finished and is running"
            length, computed = len(sequence.token_ids), sequence.num_computed_tokens
            layout = self.config.view_layout
            first = length - 1 - (0 if layout is None else layout.refresh_tokens)  # before pending rows
            assert computed <= sequence.num_planned_tokens or first <= computed < length, (
                f"{sequence}: {computed} of {length} tokens computed, {sequence.num_planned_tokens} planned"
            )

    def _plan_rows(self, step: StepBuilder) -> tuple[list[Sequence], bool]:
        """Add a decode row for every sequence that can decode.

        Returns the running sequences with prefill chunks still to launch, and whether a row lacked blocks.
        """
        prefilling: list[Sequence] = []
        lacks_blocks = False
        running = self._running.sequences
        most_drafts, block_size = step.num_draft_tokens, self.config.block_size
        index = 0
        while index < len(running):  # preemption shortens the list, at its end
            sequence = running[index]
            index += 1
            if sequence.is_prefilling:
                if self._blocks.windows is None or self._reserve_window(step, sequence):
                    prefilling.append(sequence)
                else:
                    lacks_blocks = True
                continue

            if sequence.awaits_mask:
                step.num_left_out += 1
                continue

            if self._rounds.leaves_out(sequence, step.verification):
                continue

            length = len(sequence.token_ids)
            if length + sequence.min_in_flight_tokens >= sequence.max_length:
                continue

            row, most = self._plain_rows[sequence.slot], 1
            if sequence.constraint is not None and sequence.num_in_flight:
                mask = sequence.mask_ahead(most_drafts)
                sequence.is_bound = mask is None
                if mask is None:
                    step.num_left_out += 1
                    continue

                row = DecodeRow(slot=sequence.slot, num_draft_tokens=0, mask=mask)
            if most_drafts and self._rounds.may_draft(sequence, step.verification):
                row = self._decode_row(sequence, most_drafts)
                most = row.max_emitted_tokens
            num_slots = sequence.num_kv_slots(length + sequence.max_in_flight_tokens + most)
            first_index = len(sequence.block_table)
            if num_slots > first_index * block_size:
                if not self._reserve(sequence, self._blocks.num_blocks(num_slots)):
                    lacks_blocks = True
                    step.num_left_out += 1
                    continue

                step.update_blocks(sequence, first_index)
                step.update_window(sequence, first_index)

            step.add_row(sequence, row, most)
            self._rounds.launch(sequence, step.verification, self._next_step_id, most)

        return prefilling, lacks_blocks

    def _decode_row(self, sequence: Sequence, most_drafts: int) -> DecodeRow:
        """The next decode row of a sequence in a batch that drafts at most `most_drafts` tokens a row."""
        max_depth = self.config.max_tree_depth
        if max_depth is None:
            num_drafts = sequence.num_draft_tokens(most_drafts)
            return DecodeRow(slot=sequence.slot, num_draft_tokens=num_drafts)

        depth = min(max_depth, sequence.room)
        num_drafts = sequence.num_tree_tokens(most_drafts, depth)
        return DecodeRow(slot=sequence.slot, num_draft_tokens=num_drafts, max_depth=max(depth, 0))

    def _plan_chunks(self, step: StepBuilder, prefilling: list[Sequence], *, may_admit: bool) -> None:
        """Add chunks of running and, with `may_admit`, of newly admitted sequences, within the budget."""
        # Without `may_admit`: a new sequence would take the blocks that a running one is waiting for.
        waiting = self._queue.first(min(self._running.num_free_slots, MAX_CHUNKS) if may_admit else 0)
        for sequence in waiting:
            self._blocks.match(sequence)
        prompts = sorted([*prefilling, *waiting])
        num_tokens = sum([sequence.num_unplanned_tokens for sequence in prompts])
        # Who has no row waits for the step as well.
        num_rows = len(step.decode) + step.num_left_out
        budget = self._budget.num_tokens(num_rows, num_tokens, step.num_mixed_drafts)
        room, windows = self.config.max_expanded_tokens, self._blocks.windows
        shares = share_step(budget, prompts, room)
        for sequence, share in zip(prompts, shares, strict=True):
            if share and not sequence.is_running and not self._admit(step, sequence):
                prompts = [each for each in prompts if each.is_running]
                shares = share_step(budget, prompts, room)
                break

        for sequence, share in zip(prompts, shares, strict=True):
            num_keys = sequence.num_expanded_keys(share)
            if num_keys <= room:
                room -= num_keys
            else:  # cached blocks of its prompt were evicted for one that was admitted before
                share = 0
            if share and windows is not None:
                first_index = len(sequence.window_table)
                share = windows.extend_for_chunk(sequence, share)
                step.update_window(sequence, first_index)
            if share:
                sequence.num_steps_without_tokens = 0
                checkpoints = () if self.checkpoints is None else self.checkpoints.plan(sequence, share)
                step.add_chunk(sequence, share, checkpoints)
            else:
                sequence.num_steps_without_tokens += 1

    def _reserve(self, sequence: Sequence, num_blocks: int) -> bool:
        """Lengthen a running sequence's tables to `num_blocks` entries, preempting sequences if necessary.

        Returns False if the row has to be left out: the sequence has steps in flight that may free blocks, or
        was preempted itself.
        """
        while not self._blocks.has_room(sequence, num_blocks):
            if not self._preempt_for(sequence):
                return False

        self._blocks.extend(sequence, num_blocks)
        return True

    def _reserve_window(self, step: StepBuilder, sequence: Sequence) -> bool:
        """Give a running sequence window blocks for the next token of its prompt, preempting sequences if
        necessary. Returns False if it has to be left out."""
        windows = self._blocks.windows
        assert windows is not None
        first_index = len(sequence.window_table)
        num_blocks = windows.num_blocks_of_chunk(sequence, sequence.num_planned_tokens + 1)
        while num_blocks - first_index > windows.num_available:
            if not self._preempt_for(sequence):
                return False

        windows.extend(sequence, num_blocks)
        step.update_window(sequence, first_index)
        return True

    def _preempt_for(self, sequence: Sequence) -> bool:
        """Preempt the last sequence in the order, for one that lacks blocks. Returns False if this has steps
        in flight that may free blocks, or was preempted itself."""
        if sequence.num_in_flight:
            return False

        preempted = self._running.lowest_priority
        self._preempt(preempted)
        return preempted is not sequence

    def _admit(self, step: StepBuilder, sequence: Sequence) -> bool:
        """Give a waiting sequence a free slot and blocks. Returns False if that is not possible."""
        # The tokens of its chunks are known only when all its steps are committed. The last chunk samples a
        # token, which needs the constraint's mask.
        is_settled = not sequence.num_in_flight and not sequence.awaits_mask
        if not is_settled or not self._blocks.try_admit(sequence, self._max_emitted_tokens):
            return False

        self._queue.discard(sequence)
        self._running.add(sequence)
        sequence.num_prefill_tokens = len(sequence.token_ids)
        sequence.num_planned_tokens = sequence.num_computed_tokens
        sequence.max_pending_tokens, sequence.refreshed_in, sequence.has_views = 0, -1, False
        if sequence.started_at is None:
            sequence.started_at = time.monotonic()
            sequence.num_cached_tokens = sequence.num_computed_tokens

        step.assign_slot(sequence)
        step.update_blocks(sequence, 0)
        step.update_window(sequence, sequence.num_recycled_blocks)
        if self._watcher is not None:
            self._watcher.admitted(sequence)
        return True

    def _commit_prefill(self, step: PlannedStep, result: StepResult, deltas: list[Delta]) -> int:
        """Commit the chunks of a step; returns how many belong to sequences that have not ended."""
        num_useful = 0
        for sequence, chunk, output in zip(step.prefill, step.plan.prefill, result.prefill, strict=True):
            sequence.complete(chunk.is_last, chunk.is_last)
            if sequence.is_running:
                assert chunk.start == sequence.num_computed_tokens, f"{sequence}: chunk at {chunk.start}"
                sequence.num_computed_tokens = chunk.start + len(chunk.token_ids)
                self._blocks.publish(sequence)
            if chunk.checkpoints and self.checkpoints is not None:
                self.checkpoints.commit(sequence, chunk)
            if sequence.finish is not None:
                continue

            assert len(output.token_ids) == chunk.is_last, f"{sequence}: {output} of {chunk}"
            num_useful += 1
            if chunk.is_last:
                sequence.token_ids += output.token_ids
                deltas.append(Delta(sequence, output))
                if output.finish is not None:
                    self._end(sequence, output.finish)

        return num_useful

    def _commit_decode(self, step: PlannedStep, result: StepResult, deltas: list[Delta]) -> int:
        """Commit the decode rows of a step; returns how many belong to sequences that have not ended."""
        num_useful = 0
        for sequence, row, output in zip(step.decode, step.plan.decode, result.decode, strict=True):
            most = row.max_emitted_tokens if row.num_draft_tokens else 1
            sequence.complete(1, most)
            if sequence.finish is not None:
                continue

            token_ids = output.token_ids
            assert 0 < len(token_ids) <= most, f"{sequence}: {output}"
            num_useful += 1
            sequence.token_ids += token_ids
            deltas.append(Delta(sequence, output, row.num_draft_tokens, step.plan.verification))
            if sequence.slot >= 0:  # is_running, without the cost of a property for every row
                if step.plan.verification != "partial":
                    sequence.num_computed_tokens = len(sequence.token_ids) - 1
                else:
                    self._rounds.complete(sequence, step.plan.step_id, most, len(token_ids))
                if output.violation is not None:
                    sequence.max_draft_tokens, sequence.has_wrong_drafts = 0, True
                    if output.violation.is_fatal:  # what the round has computed must not be shared
                        sequence.num_computed_tokens = len(sequence.prefix_nodes) * self.config.block_size
                if output.finish is None:
                    self._blocks.publish(sequence)
                    if len(token_ids) < most:
                        self._blocks.trim(sequence)
            if output.finish is not None:
                self._end(sequence, output.finish)

        return num_useful

    def _observe(self, step: PlannedStep, result: StepResult) -> None:
        """Let the token budget and the draft policy learn from a step.

        The counts are those of the device's work, so they include sequences that have been removed.
        """
        num_prefill_tokens = sum([len(chunk.token_ids) for chunk in step.plan.prefill])
        num_decoded = [len(output.token_ids) for output in result.decode if output.token_ids]
        self._budget.observe(num_prefill_tokens, len(num_decoded), sum(num_decoded), result.duration_s)
        self._rounds.observe(step, result)

    def _preempt(self, sequence: Sequence) -> None:
        """Return a running sequence to the queue without its slot and blocks."""
        self._release(sequence)
        self._queue.push(sequence)
        self.num_preemptions += 1
        if self._watcher is not None:
            self._watcher.preempted(sequence)

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        """Finish a running or waiting sequence."""
        sequence.finish = reason
        if sequence.is_running:
            self._release(sequence)
        else:
            self._queue.discard(sequence)
            sequence.prefix_nodes = []

    def _release(self, sequence: Sequence) -> None:
        """Free a running sequence's slot and blocks."""
        self._running.remove(sequence)
        self._blocks.release(sequence)
