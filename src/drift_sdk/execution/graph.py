"""The graph executor: every step is a few replays of captured graphs, started without waiting."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Literal

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from drift_sdk._kernels.commit import FINISHED_LENGTH, FINISHED_STOP, record_words
from drift_sdk._kernels.prefill_tiles import prefill_tiles
from drift_sdk._kernels.sampled_rows import MAX_TOP
from drift_sdk._kernels.slot_columns import num_mask_words
from drift_sdk._kernels.tuning import TunedTable
from drift_sdk.errors import ExecutorError
from drift_sdk.execution.device import Device, Event, Replay
from drift_sdk.execution.device_errors import typed_errors
from drift_sdk.execution.graphs import GraphLayout, Graphs
from drift_sdk.execution.prompt_scores import PromptScores
from drift_sdk.execution.ring import Results, Ring
from drift_sdk.execution.slot_table import Pairs, SlotTable, Updates
from drift_sdk.models.decoder import Decoder
from drift_sdk.results import TokenLogprobs
from drift_sdk.steps import (
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
FINISH: dict[int, Literal["stop", "length"]] = {FINISHED_STOP: "stop", FINISHED_LENGTH: "length"}

Records = NDArray[np.int32]


class _Ticket(Struct):
    """A step in flight, and where the records of its finished prompts and of its rows will be."""

    plan: StepPlan
    started: Event
    ended: Event
    head: Results | None = None
    decode: Results | None = None


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
        report: Callable[[str, float], None] = lambda stage, fraction: None,
    ) -> None:
        self.limits = limits
        self._device = device
        self._layout = GraphLayout.of(decoder, limits, prefill_token_budget, is_exact=exact_prefill)
        self._is_exact = exact_prefill
        most = self._layout.decode[-1]
        with typed_errors(device), device.work():
            self._table = SlotTable(limits, device.torch_device)
            self._ring = Ring(
                device,
                num_entries=NUM_ENTRIES,
                max_updates=MAX_UPDATES,
                payload_words=self._layout.payload_words,
                record_words=most * record_words(1),
                mask_shape=(most, num_mask_words(limits.vocab_size)),
            )
            self._graphs: Graphs | None = Graphs(
                device,
                decoder,
                limits,
                self._layout,
                self._table,
                self._ring,
                tuned,
                is_exact=exact_prefill,
                report=report,
            )
        self._scores = PromptScores(decoder, self._graphs.prefill_hidden)
        self._assigned: dict[int, SlotAssignment] = {}
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
                entry, rest = self._entry(rest), NO_UPDATES
                first_rows = self._fill_chunks(entry, plan.prefill)
                self._replay(entry, self._bucket(graphs.prefill, self._num_rows(plan.prefill)))
                self._score(plan.prefill, first_rows)
                last = [
                    (chunk.slot, first + len(chunk.token_ids) - 1)
                    for chunk, first in zip(plan.prefill, first_rows, strict=True)
                    if chunk.is_last
                ]
                if last:
                    slots, sources = zip(*last, strict=True)
                    ticket.head = self._sample(graphs.head, self._entry(NO_UPDATES), slots, sources)
            if plan.decode:
                slots = tuple(row.slot for row in plan.decode)
                ticket.decode = self._sample(graphs.decode, self._entry(rest), slots)
            ticket.ended.record()

    def collect(self) -> StepResult:
        ticket = self._launched.popleft()
        with typed_errors(self):
            ticket.ended.wait()
        plan = ticket.plan
        num_last = sum(chunk.is_last for chunk in plan.prefill)
        sampled = iter(self._records(ticket.head, num_last))
        prefill = tuple(
            self._output(next(sampled), chunk.slot, chunk) if chunk.is_last else SlotOutput()
            for chunk in plan.prefill
        )
        decode = tuple(
            self._output(record, row.slot)
            for row, record in zip(plan.decode, self._records(ticket.decode, len(plan.decode)), strict=True)
        )
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

    def _num_rows(self, chunks: tuple[PrefillChunk, ...]) -> int:
        return sum(self._padded(chunk) for chunk in chunks)

    def _padded(self, chunk: PrefillChunk) -> int:
        """Rows of a chunk; in exact mode it ends with its tile of rows."""
        size = self._layout.tile_rows if self._is_exact else 1
        return -(-len(chunk.token_ids) // size) * size

    def _fill_chunks(self, entry: int, chunks: tuple[PrefillChunk, ...]) -> list[int]:
        """The payload of a prefill step; the first row of each chunk."""
        num_rows = self._bucket_size(self._layout.prefill, self._num_rows(chunks))
        payload = self._ring.payload(entry)
        token, slot, position = payload[: 3 * num_rows].reshape(3, num_rows)
        slot[:] = -1
        first_rows = []
        first = 0
        for chunk in chunks:
            rows = slice(first, first + len(chunk.token_ids))
            token[rows] = chunk.token_ids
            slot[rows] = chunk.slot
            position[rows] = np.arange(chunk.start, chunk.start + len(chunk.token_ids))
            first_rows.append(first)
            first += self._padded(chunk)

        if not self._is_exact:
            num_tiles = self._layout.num_tiles(num_rows)
            tiles = payload[3 * num_rows : 3 * num_rows + 4 * num_tiles].reshape(num_tiles, 4)
            sizes = [(chunk.slot, chunk.start, len(chunk.token_ids)) for chunk in chunks]
            prefill_tiles(sizes, self._layout.tile_rows, tiles)
        return first_rows

    def _sample(
        self,
        graphs: dict[int, Replay],
        entry: int,
        slots: tuple[int, ...],
        sources: tuple[int, ...] = (),
    ) -> Results:
        """Replay a graph that chooses a token for each slot; its records."""
        size = self._bucket_size(self._layout.decode, len(slots))
        payload = self._ring.payload(entry)
        payload[:size] = -1
        payload[: len(slots)] = slots
        payload[size : size + len(sources)] = sources
        for row, slot in enumerate(slots):
            constraint = self._assigned[slot].constraint
            if constraint is not None:
                self._ring.mask(entry)[row] = constraint.masks(())[0]
        self._replay(entry, graphs[size])
        return self._ring.results(entry)

    def _score(self, chunks: tuple[PrefillChunk, ...], first_rows: list[int]) -> None:
        for chunk, first_row in zip(chunks, first_rows, strict=True):
            num_top = self._assigned[chunk.slot].sampling.num_prompt_logprobs
            if num_top is not None:
                self._scores.score(chunk, first_row, num_top)

    def _records(self, results: Results | None, num_records: int) -> Records:
        size = record_words(1)
        if results is None:
            return np.empty((0, size), np.int32)

        results.is_wanted = False
        return results.words[: num_records * size].reshape(num_records, size)

    def _output(self, record: Records, slot: int, chunk: PrefillChunk | None = None) -> SlotOutput:
        num_tokens, finish, num_drafted, num_accepted = record[:4].tolist()
        rows = record[4:].reshape(-1, 2 + 2 * MAX_TOP)[:num_tokens]
        sampling = self._assigned[slot].sampling
        num_top = sampling.num_logprobs
        prompt_logprobs = None
        if chunk is not None and sampling.num_prompt_logprobs is not None:
            is_whole = chunk.start + len(chunk.token_ids) == sampling.num_prompt_tokens
            prompt_logprobs = self._scores.take(slot) if is_whole else None
        return SlotOutput(
            token_ids=tuple(rows[:, 0].tolist()),
            finish=FINISH.get(finish),
            logprobs=tuple(_logprobs(row, num_top) for row in rows) if num_top is not None else None,
            prompt_logprobs=prompt_logprobs,
            num_drafted=num_drafted,
            num_accepted=num_accepted,
        )

    def _event(self) -> Event:
        return self._events.pop() if self._events else self._device.event()

    @staticmethod
    def _bucket_size(sizes: tuple[int, ...], num_rows: int) -> int:
        return next(size for size in sizes if size >= num_rows)

    def _bucket(self, graphs: dict[int, Replay], num_rows: int) -> Replay:
        return graphs[self._bucket_size(self._layout.prefill, num_rows)]


def _logprobs(row: Records, num_top: int) -> TokenLogprobs:
    values = row.view(np.float32)
    ids = row[2 : 2 + num_top].tolist()
    top = zip(ids, values[2 + MAX_TOP : 2 + MAX_TOP + num_top].tolist(), strict=True)
    return TokenLogprobs(token_id=int(row[0]), logprob=float(values[1]), top=tuple(top))
