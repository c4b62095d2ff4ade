"""The resources of a device that all steps of graphs share, and the host's side of the rings of steps."""

from __future__ import annotations

from copy import copy

import numpy as np
import torch
from msgspec import Struct
from numpy.typing import NDArray

from drift_sdk._kernels.slots import HEADER_WORDS, advance, enter
from drift_sdk.execution.device.device import Device, Event, Replay, ServingDevice
from drift_sdk.execution.device.memory import Workspace
from drift_sdk.execution.device.slot_table import Pairs, SlotTable
from drift_sdk.execution.device.stages import StageMarks
from drift_sdk.steps import HostWork

Words = NDArray[np.int32]


class Results:
    """The result words of one replay, valid once the replay has ended.

    words: int32, as `payloads` reads them.
    is_pending: whether the words are still to be read. The ring copies pending words before it reuses their
    entry; after `is_pending` has been set to False the words may be overwritten.
    """

    __slots__ = ("is_pending", "words")

    def __init__(self, words: Words) -> None:
        self.words: Words = words
        self.is_pending: bool = True


class RingSizes(Struct, frozen=True, kw_only=True):
    """Sizes of a ring.

    num_entries:     replays that can be in flight at once.
    max_updates:     most slot table updates of an entry.
    payload_words:   most payload words of an entry.
    record_words:    most result words of an entry.
    max_slots:       most slots of a round, each with one constraint mask in an entry.
    num_draft_masks: constraint masks for the rows of a split round; 0 without drafts.
    mask_words:      words of a mask, one bit for each token of the vocabulary.
    """

    num_entries: int
    max_updates: int
    payload_words: int
    record_words: int
    max_slots: int
    num_draft_masks: int
    mask_words: int


class Ring:
    """Entries in pinned memory, used in turn, each by one replay at a time.

    input [num_entries, words]: an entry's header, updates (places, then values) and payload.
    output [num_entries, record_words]: the results that an entry's replay leaves.
    masks [num_entries, max_slots, mask_words]: constraint masks, part of an entry's input.
    draft_masks [num_draft_masks, mask_words]: pinned too, and not per entry. They are written only after
    `wait`, when no replay that reads them is left.
    next_index [1]: on the device, the index of the next replay's entry; it follows the host's index.
    current [1]: on the device, the index of the running replay's entry.

    All are int32.
    """

    def __init__(self, device: ServingDevice, sizes: RingSizes, *, timeout_s: float | None = None) -> None:
        """timeout_s: most seconds that the device may take for a step. A wait in this class may cover two
        steps, so it lasts at most twice as long. None: no limit."""
        is_pinned = device.torch_device.type == "cuda"

        def pinned(*shape: int) -> torch.Tensor:
            return torch.full(shape, -1, dtype=torch.int32, pin_memory=is_pinned)

        num_entries = sizes.num_entries
        self.max_updates: int = sizes.max_updates
        self.input: torch.Tensor = pinned(
            num_entries, HEADER_WORDS + 2 * sizes.max_updates + sizes.payload_words
        )
        self.output: torch.Tensor = pinned(num_entries, sizes.record_words)
        self.masks: torch.Tensor = pinned(num_entries, sizes.max_slots, sizes.mask_words)
        self.draft_masks: torch.Tensor = pinned(sizes.num_draft_masks, sizes.mask_words)
        self.next_index: torch.Tensor = torch.zeros(1, dtype=torch.int32, device=device.torch_device)
        self.current: torch.Tensor = torch.zeros(1, dtype=torch.int32, device=device.torch_device)
        self.input[:, 0] = 0
        # Parts of each entry, so that no views are made while replays are launched.
        self._input: list[Words] = list(self.input.numpy())
        self._payloads = [words[HEADER_WORDS + 2 * sizes.max_updates :] for words in self._input]
        self._output: list[Words] = list(self.output.numpy())
        self._masks: list[Words] = list(self.masks.numpy())
        self._done: list[Event] = [device.event() for _ in range(num_entries)]
        self._results: list[Results | None] = [None] * num_entries
        self._next = 0
        self._timeout_s = None if timeout_s is None else 2 * timeout_s
        self._num_waits = self._num_split_rounds = self._num_copies = 0

    def on(self, device: ServingDevice) -> Ring:
        """The ring as steps of a further GPU use it, which run the same replays: with the same input, indices
        of its own, and results that nobody reads."""
        other = copy(self)
        other.output = torch.full_like(self.output, -1, pin_memory=self.output.is_pinned())
        other.next_index = torch.zeros(1, dtype=torch.int32, device=device.torch_device)
        other.current = torch.zeros(1, dtype=torch.int32, device=device.torch_device)
        return other

    def acquire(self, updates: Pairs) -> int:
        """Return the index of the next replay's entry, with `updates` written to it.

        Blocks until the replay that used the entry before has ended. The replay applies the updates before
        it does anything else. Raises ExecutorError if the wait exceeds the timeout.
        """
        entry = self._next
        self._next = (entry + 1) % len(self._done)
        done = self._done[entry]
        if not done.is_done:
            self._num_waits += 1
            done.wait(self._timeout_s)
        results = self._results[entry]
        if results is not None and results.is_pending:
            self._num_copies += 1
            results.words = results.words.copy()
        self._results[entry] = None
        places, values = updates
        words = self._input[entry]
        words[0] = len(places)
        if len(places):
            words[HEADER_WORDS : HEADER_WORDS + len(places)] = places
            first_value = HEADER_WORDS + self.max_updates
            words[first_value : first_value + len(values)] = values
        return entry

    def payload(self, entry: int) -> Words:
        """The payload words of an acquired entry, to be filled before `start`."""
        return self._payloads[entry]

    def mask(self, entry: int) -> Words:
        """Masks [max_slots, mask_words] of an acquired entry: the tokens allowed next for each slot under a
        constraint, to be filled before `start`."""
        return self._masks[entry]

    def start(self, entry: int, replay: Replay) -> None:
        """Launch a replay that reads this entry. The entry is free again, and its results are valid, once the
        replay has ended."""
        replay.launch()
        self._done[entry].record()

    def wait(self, entry: int) -> Words:
        """Block until the entry's replay and all replays before it have ended; return its result words.

        Raises ExecutorError if the wait exceeds the timeout.
        """
        self._num_split_rounds += 1
        self._done[entry].wait(self._timeout_s)
        return self._output[entry]

    def results(self, entry: int) -> Results:
        """The results of the entry's started replay, pending until the caller sets `is_pending` to False."""
        results = self._results[entry] = Results(self._output[entry])
        return results

    def take_work(self, num_allocations: int) -> HostWork:
        """The host work counted since the last call, with `num_allocations` added to it."""
        work = HostWork(
            num_waits=self._num_waits,
            num_split_rounds=self._num_split_rounds,
            num_copies=self._num_copies,
            num_allocations=num_allocations,
        )
        self._num_waits = self._num_split_rounds = self._num_copies = 0
        return work

    def reset(self) -> None:
        """Start again at the first entry, after warm-up runs and captures have moved the device's index."""
        self.next_index.zero_()
        self._next = 0


class PayloadBuffer:
    """The device's copy of the running replay's payload.

    words [payload_words] int32: filled by `enter`, read by the kernels after it. Captured kernels address
    slices of it, so it is never replaced.
    """

    def __init__(self, ring: Ring, slot_words: torch.Tensor, num_words: int) -> None:
        """slot_words: the slot table's arena, to which updates are applied. num_words: of the largest
        payload."""
        self._ring, self._slot_words = ring, slot_words
        self.words: torch.Tensor = torch.full((num_words,), -1, dtype=torch.int32, device=slot_words.device)

    def enter(self, num_words: int) -> None:
        """Record the first kernel of a step: it applies the entry's updates to the slot table and copies the
        first `num_words` words of its payload."""
        ring = self._ring
        payload = self.words[:num_words]
        enter(
            ring.input, ring.next_index, ring.current, payload, self._slot_words, max_updates=ring.max_updates
        )

    def advance(self) -> None:
        """Record the kernel that moves on to the next entry: a step's last, unless another one does it."""
        advance(self._ring.next_index, len(self._ring.input))


class DeviceResources(Struct, frozen=True, kw_only=True):
    """Device resources of captured steps.

    Code that needs only some of these takes them one by one.

    device:    the stream, events and captures.
    ring:      input and results of replays.
    payload:   the running replay's input on the device.
    table:     the slot table.
    workspace: buffers shared by all steps.
    stages:    marks around the stages of a step, for measuring.
    """

    device: Device
    ring: Ring
    payload: PayloadBuffer
    table: SlotTable
    workspace: Workspace
    stages: StageMarks
