"""The graph executor: every step is a few replays of captured graphs, started without waiting."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

import msgspec
import numpy as np
from msgspec import Struct

from drift_sdk._kernels.slot_columns import num_mask_words
from drift_sdk._kernels.tuning import TunedTable
from drift_sdk.drafts import NGram
from drift_sdk.errors import ExecutorError
from drift_sdk.execution.device import Device, Event, Replay
from drift_sdk.execution.device_errors import typed_errors
from drift_sdk.execution.graph_layout import GraphLayout, bucket_of
from drift_sdk.execution.graphs import Graphs
from drift_sdk.execution.payloads import fill_chunks, fill_followed, fill_slots, first_rows
from drift_sdk.execution.prompt_scores import PromptScores, ScoredParts
from drift_sdk.execution.records import outputs
from drift_sdk.execution.ring import Results, Ring
from drift_sdk.execution.slot_table import Pairs, SlotTable, Updates
from drift_sdk.models.decoder import Decoder
from drift_sdk.models.eagle3 import DraftDecoder
from drift_sdk.steps import (
    DecodeRow,
    ExecutorLimits,
    PrefillChunk,
    SlotAssignment,
    SlotOutput,
    StepPlan,
    StepResult,
)

__all__ = ["GraphExecutor"]

NO_UPDATES: Pairs = (np.empty(0, np.int64), np.empty(0, np.int32))
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
    device.
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
        simulated_length: float | None = None,
        report: Callable[[str, float], None] = lambda stage, fraction: None,
    ) -> None:
        self.limits = limits
        self._device = device
        self._layout = layout = GraphLayout.of(
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
                mask_shape=(layout.decode[-1], num_mask_words(limits.vocab_size)),
            )
            self._graphs: Graphs | None = Graphs(
                device,
                decoder,
                limits,
                layout,
                self._table,
                self._ring,
                tuned,
                draft=draft,
                report=report,
                simulated_length=simulated_length,
            )
        self._scores = PromptScores(decoder, self._graphs.prefill_hidden)
        self._assigned: dict[int, SlotAssignment] = {}
        self._fresh: set[int] = set()  # slots whose first chunk is still to come
        self._launched: deque[_Ticket] = deque()
        self._events: list[Event] = []

    def launch(self, plan: StepPlan) -> None:
        graphs = self._graphs
        if graphs is None:
            raise ExecutorError("the executor is closed")

        with typed_errors(self), self._device.work():
            ticket = _Ticket(plan, self._event(), self._event())
            self._launched.append(ticket)
            ticket.started.record()
            updates = self._updates(plan)
            # The last updates ride along with the first replay.
            *early, rest = [*updates.slices(MAX_UPDATES)] or [NO_UPDATES]
            for pairs in early:
                self._replay(self._entry(pairs), graphs.update)

            if plan.prefill:
                ticket.head = self._launch_prefill(graphs, plan.prefill, rest)
                ticket.scores = self._take_scores(plan.prefill)
                rest = NO_UPDATES
            if plan.decode:
                ticket.rows_per_slot, ticket.decode = self._launch_round(graphs, plan.decode, rest)
            ticket.ended.record()

    def collect(self) -> StepResult:
        ticket = self._launched.popleft()
        with typed_errors(self):
            ticket.ended.wait()
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
        return StepResult(step_id=plan.step_id, prefill=prefill, decode=decode, duration_s=duration_s)

    def close(self) -> None:
        if self._graphs is None:
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
            event.wait()

    def _updates(self, plan: StepPlan) -> Updates:
        updates = Updates()
        for assignment in plan.assignments:
            self._assigned[assignment.slot] = assignment
            self._fresh.add(assignment.slot)
            self._table.assign(assignment, updates)
        for update in plan.block_updates:
            self._table.place_blocks(update, updates)
        for chunk in plan.prefill:
            if chunk.is_last:
                length = chunk.start + len(chunk.token_ids)
                self._table.set_length(chunk.slot, length, chunk.token_ids[-1], updates)

        return updates

    def _entry(self, updates: Pairs) -> int:
        entry = self._ring.acquire()
        self._ring.update(entry, *updates)
        return entry

    def _replay(self, entry: int, replay: Replay) -> None:
        replay.launch()
        self._ring.release(entry)

    def _launch_prefill(
        self, graphs: Graphs, chunks: tuple[PrefillChunk, ...], updates: Pairs
    ) -> Results | None:
        """Compute chunks and, behind those that end a prompt, sample: the records of that."""
        entry = self._entry(updates)
        bucket = fill_chunks(self._layout, chunks, self._ring.payload(entry))
        self._replay(entry, graphs.prefill[bucket])
        firsts = first_rows(self._layout, chunks)
        for chunk, first in zip(chunks, firsts, strict=False):
            num_top = self._assigned[chunk.slot].sampling.num_prompt_logprobs
            if num_top is not None:
                self._scores.score(chunk, first, num_top)

        last = {
            chunk.slot: first + len(chunk.token_ids) - 1
            for chunk, first in zip(chunks, firsts, strict=False)
            if chunk.is_last
        }
        results = None
        if last:
            entry = self._entry(NO_UPDATES)
            size = fill_slots(self._layout, [*last], [*last.values()], self._ring.payload(entry))
            self._fill_masks(entry, [*last])
            self._replay(entry, graphs.head[size])
            results = self._ring.results(entry)
        if graphs.follow:
            entry = self._entry(NO_UPDATES)
            hits = [chunk.slot for chunk in chunks if chunk.start > 0 and chunk.slot in self._fresh]
            self._fresh.difference_update(chunk.slot for chunk in chunks)
            bucket = fill_followed(self._layout, chunks, hits, self._ring.payload(entry))
            self._replay(entry, graphs.follow[bucket])
        return results

    def _launch_round(
        self, graphs: Graphs, rows: tuple[DecodeRow, ...], updates: Pairs
    ) -> tuple[int, Results]:
        """Rows per slot, and the records."""
        slots = [row.slot for row in rows]
        # What a grammar allows behind a draft only the host knows: its slots go one token at a time.
        drafts = [
            0 if self._assigned[row.slot].constraint is not None else row.num_draft_tokens for row in rows
        ]
        entry = self._entry(updates)
        size = fill_slots(self._layout, slots, drafts, self._ring.payload(entry))
        self._fill_masks(entry, slots)
        num_drafts = bucket_of(self._layout.drafts, max(drafts))
        self._replay(entry, graphs.decode[size, num_drafts])
        return num_drafts + 1, self._ring.results(entry)

    def _fill_masks(self, entry: int, slots: list[int]) -> None:
        for row, slot in enumerate(slots):
            constraint = self._assigned[slot].constraint
            if constraint is not None:
                self._ring.mask(entry)[row] = constraint.masks(())[0]

    def _outputs(self, results: Results | None, rows_per_slot: int, slots: list[int]) -> Iterator[SlotOutput]:
        if results is None:
            return iter(())

        results.is_wanted = False
        num_logprobs = [self._assigned[slot].sampling.num_logprobs for slot in slots]
        return outputs(results.words, rows_per_slot, num_logprobs)

    def _take_scores(self, chunks: tuple[PrefillChunk, ...]) -> dict[int, ScoredParts]:
        """Of prompts that end here and are all there is: when the step is collected, the slot may be
        another's."""
        found = {}
        for chunk in chunks:
            sampling = self._assigned[chunk.slot].sampling
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
