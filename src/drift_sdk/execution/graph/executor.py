"""The graph executor: every step is a few replays of captured graphs, started without waiting."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import msgspec
from msgspec import Struct

from drift_sdk._kernels.gemm.tuning import TunedTable
from drift_sdk._kernels.slots.slot_columns import num_mask_words
from drift_sdk.errors import ExecutorError
from drift_sdk.execution.device.device import Device, Event
from drift_sdk.execution.device.errors import is_kept, typed_errors
from drift_sdk.execution.device.ring import Results, Ring
from drift_sdk.execution.device.slot_table import NO_UPDATES, Pairs, SlotTable, Updates
from drift_sdk.execution.graph.allocation_count import AllocationCount
from drift_sdk.execution.graph.buckets import GraphBuckets
from drift_sdk.execution.graph.captured_graphs import CapturedGraphs, FitBlocks
from drift_sdk.execution.graph.input_payloads import (
    fill_chunks,
    fill_draft_extend,
    fill_masks,
    fill_slots,
    first_rows,
)
from drift_sdk.execution.graph.prompt_logprobs import PromptLogprobs, ScoredParts
from drift_sdk.execution.graph.result_records import outputs
from drift_sdk.execution.graph.round_launch import launch_round
from drift_sdk.execution.graph.round_timing import time_rounds
from drift_sdk.execution.stages import NO_STAGE_MARKS, StageMarks
from drift_sdk.models.decoder import Decoder
from drift_sdk.models.eagle3 import DraftDecoder
from drift_sdk.speculation import NGram
from drift_sdk.steps import (
    ExecutorLimits,
    PrefillChunk,
    SlotAssignment,
    SlotOutput,
    SlotSampling,
    StepPlan,
    StepResult,
    TokenConstraint,
)

__all__ = ["GraphExecutor"]

NUM_ENTRIES = 16
MAX_UPDATES = 512


class _Ticket(Struct):
    """A step in flight, and where the records of its finished prompts and of its rows will be: for rounds of
    so many rows a slot."""

    plan: StepPlan
    started: Event
    ended: Event
    head: Results | None = None
    decode: Results | None = None
    rows_per_slot: int = 1
    scores: dict[int, ScoredParts] = {}


class GraphExecutor:
    """Runs a `Decoder` by CUDA graphs. Everything is captured when it is made, nothing while serving.

    `launch` writes to pinned memory and starts replays; lengths, tokens and finished flags live on the
    device. It waits for nothing but drafts behind which a constraint must be asked.
    """

    def __init__(
        self,
        device: Device,
        decoder: Decoder,
        limits: ExecutorLimits,
        tuned: TunedTable,
        *,
        prefill_token_budget: int,
        exact_prefill: bool = False,
        draft: DraftDecoder | NGram | None = None,
        draft_choices: Sequence[int] = (),
        acceptance_trace: Sequence[int] | None = None,
        stages: StageMarks = NO_STAGE_MARKS,
        step_timeout_s: float | None = None,
        fit_blocks: FitBlocks | None = None,
        report: Callable[[str, float], None] = lambda stage, fraction: None,
    ) -> None:
        """fit_blocks: None = the KV cache has limits.num_blocks blocks."""
        self.limits = limits
        self._device, self._stages = device, stages
        self._layout = layout = GraphBuckets.of(
            decoder,
            limits,
            prefill_token_budget,
            is_exact=exact_prefill,
            draft_choices=draft_choices,
        )
        with typed_errors(device), device.work():
            has_history = isinstance(draft, NGram)
            self._table = SlotTable(limits, device.torch_device, has_history=has_history)
            self._ring = Ring(
                device,
                num_entries=NUM_ENTRIES,
                max_updates=MAX_UPDATES,
                payload_words=layout.payload_words,
                record_words=layout.record_words,
                max_slots=layout.decode[-1],
                num_draft_masks=layout.num_draft_masks,
                mask_words=num_mask_words(limits.vocab_size),
                timeout_s=step_timeout_s,
            )
            self._graphs: CapturedGraphs | None = CapturedGraphs(
                device,
                decoder,
                limits,
                layout,
                self._table,
                self._ring,
                tuned,
                draft=draft,
                fit_blocks=partial(self._fit, fit_blocks),
                report=report,
                acceptance_trace=acceptance_trace,
                stages=stages,
            )
        self._scores = PromptLogprobs(decoder, self._graphs.prefill_hidden)
        self._sampling: dict[int, SlotSampling] = {}
        # By slot, of those that have any: most steps have none.
        self._constraints: dict[int, TokenConstraint] = {}
        self._num_logprobs: dict[int, int] = {}
        self._fresh: set[int] = set()  # slots whose first chunk is still to come
        self._launched: deque[_Ticket] = deque()
        self._events: list[Event] = []
        self._step_timeout_s = step_timeout_s
        self._allocations = AllocationCount(device)

    def _fit(self, fit_blocks: FitBlocks | None, num_graphs: int) -> int:
        """How many blocks the cache gets; sequences can be no longer than all of them."""
        limits = self.limits
        if fit_blocks is not None:
            num_blocks = fit_blocks(num_graphs)
            max_model_len = min(limits.max_model_len, num_blocks * limits.block_size)
            limits = msgspec.structs.replace(limits, num_blocks=num_blocks, max_model_len=max_model_len)
            self.limits = limits
        return limits.num_blocks

    def round_costs(self) -> dict[tuple[int, int], float]:
        """Seconds that rounds of (slots, drafts) take without any context. To be asked before serving."""
        assert self._graphs is not None and not self._launched
        with typed_errors(self), self._device.work():
            costs = time_rounds(self._device, self._graphs.decode)
            self._ring.reset()
        return costs

    def launch(self, plan: StepPlan) -> None:
        graphs = self._graphs
        if graphs is None:
            raise ExecutorError("the executor is closed")

        with typed_errors(self):
            ticket = _Ticket(plan, self._event(), self._event())
            self._launched.append(ticket)
            ticket.started.record()
            updates = self._updates(plan)
            # The last updates ride along with the first replay.
            *early, rest = [*updates.slices(MAX_UPDATES)] or [NO_UPDATES]
            for pairs in early:
                self._ring.start(self._ring.acquire(pairs), graphs.update)

            if plan.prefill:
                with self._stages("prefill"):
                    ticket.head = self._launch_prefill(graphs, plan.prefill, rest)
                ticket.scores = self._take_scores(plan.prefill)
                rest = NO_UPDATES
            if plan.decode:
                ticket.rows_per_slot, ticket.decode = launch_round(
                    graphs, self._layout, self._ring, self._stages, plan.decode, self._constraints, rest
                )
            ticket.ended.record()

    def collect(self) -> StepResult:
        ticket = self._launched.popleft()
        with typed_errors(self):
            ticket.ended.wait(self._step_timeout_s)
        plan = ticket.plan
        last = [chunk.slot for chunk in plan.prefill if chunk.is_last]
        sampled = self._outputs(ticket.head, 1, last)
        prefill = tuple(
            self._scored(next(sampled), ticket.scores.get(chunk.slot)) if chunk.is_last else SlotOutput()
            for chunk in plan.prefill
        )
        slots = [row.slot for row in plan.decode]
        decode = tuple(self._outputs(ticket.decode, ticket.rows_per_slot, slots))
        duration_s = ticket.ended.seconds_since(ticket.started)
        self._events += [ticket.started, ticket.ended]
        return StepResult(
            step_id=plan.step_id,
            prefill=prefill,
            decode=decode,
            duration_s=duration_s,
            host_work=self._ring.take_work(self._allocations.step()),
        )

    def close(self) -> None:
        if self._graphs is None or is_kept(self):
            return

        try:
            self._finish()
        except ExecutorError as error:
            if not error.process_unusable:
                raise
            return  # the driver takes nothing back

        self._launched.clear()
        self._graphs.close()
        self._graphs = None
        del self._table, self._ring, self._scores
        self._device.close()

    def _finish(self) -> None:
        """Steps in flight write to memory that is another engine's as soon as it is given back."""
        with typed_errors(self):
            (event := self._event()).record()
            timeout_s = self._step_timeout_s
            event.wait(timeout_s and timeout_s * (len(self._launched) + 1))

    def _updates(self, plan: StepPlan) -> Updates:
        updates = Updates()
        for assignment in plan.assignments:
            self._assign(assignment, updates)
        for update in plan.block_updates:
            self._table.place_blocks(update, updates)
        for chunk in plan.prefill:
            if chunk.is_last:
                length = chunk.start + len(chunk.token_ids)
                self._table.set_length(chunk.slot, length, chunk.token_ids[-1], updates)

        return updates

    def _assign(self, assignment: SlotAssignment, updates: Updates) -> None:
        slot, sampling = assignment.slot, assignment.sampling
        self._sampling[slot] = sampling
        self._fresh.add(slot)
        self._constraints.pop(slot, None)
        self._num_logprobs.pop(slot, None)
        if assignment.constraint is not None:
            self._constraints[slot] = assignment.constraint
        if sampling.num_logprobs is not None:
            self._num_logprobs[slot] = sampling.num_logprobs
        with self._device.work():
            self._table.assign(assignment, updates)

    def _launch_prefill(
        self, graphs: CapturedGraphs, chunks: tuple[PrefillChunk, ...], updates: Pairs
    ) -> Results | None:
        """Compute chunks and, behind those that end a prompt, sample: the records of that."""
        ring = self._ring
        entry = ring.acquire(updates)
        bucket = fill_chunks(self._layout, chunks, ring.payload(entry))
        ring.start(entry, graphs.prefill[bucket])
        firsts = first_rows(self._layout, chunks)
        for chunk, first in zip(chunks, firsts, strict=False):
            num_top = self._sampling[chunk.slot].num_prompt_logprobs
            if num_top is not None:
                with self._device.work():
                    self._scores.score(chunk, first, num_top)

        last = {
            chunk.slot: first + len(chunk.token_ids) - 1
            for chunk, first in zip(chunks, firsts, strict=False)
            if chunk.is_last
        }
        results = None
        if last:
            entry = ring.acquire(NO_UPDATES)
            size = fill_slots(self._layout, [*last], [*last.values()], ring.payload(entry))
            fill_masks(self._constraints, [*last], ring.mask(entry))
            ring.start(entry, graphs.head[size])
            results = ring.results(entry)
        if graphs.draft_extend:
            entry = ring.acquire(NO_UPDATES)
            hits = [chunk.slot for chunk in chunks if chunk.start > 0 and chunk.slot in self._fresh]
            self._fresh.difference_update(chunk.slot for chunk in chunks)
            bucket = fill_draft_extend(self._layout, chunks, hits, ring.payload(entry))
            ring.start(entry, graphs.draft_extend[bucket])
        return results

    def _outputs(self, results: Results | None, rows_per_slot: int, slots: list[int]) -> Iterator[SlotOutput]:
        if results is None:
            return iter(())

        results.is_pending = False
        return outputs(results.words, rows_per_slot, slots, self._num_logprobs)

    def _take_scores(self, chunks: tuple[PrefillChunk, ...]) -> dict[int, ScoredParts]:
        """Of prompts that end here and are all there is: when the step is collected, the slot may be
        another's."""
        found = {}
        for chunk in chunks:
            sampling = self._sampling[chunk.slot]
            is_whole = chunk.start + len(chunk.token_ids) == sampling.num_prompt_tokens
            if chunk.is_last and is_whole and sampling.num_prompt_logprobs is not None:
                found[chunk.slot] = self._scores.take(chunk.slot)

        return found

    def _scored(self, output: SlotOutput, parts: ScoredParts | None) -> SlotOutput:
        """With the prompt's log-probabilities, if they are wanted."""
        if parts is None:
            return output

        return msgspec.structs.replace(output, prompt_logprobs=self._scores.entries(parts))

    def _event(self) -> Event:
        return self._events.pop() if self._events else self._device.event()
