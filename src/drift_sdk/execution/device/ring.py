"""The host's side of the rings through which replays get their input and give their results."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from drift_sdk._kernels.slots.input_ring import HEADER_WORDS
from drift_sdk.execution.device.device import Device, Event, Replay
from drift_sdk.execution.device.slot_table import Pairs
from drift_sdk.steps import HostWork

__all__ = ["Results", "Ring"]


class Results:
    """One replay's results: there when it is over."""

    __slots__ = ("is_pending", "words")

    def __init__(self, words: NDArray[np.int32]) -> None:
        self.words = words
        self.is_pending = True


class Ring:
    """`num_entries` entries in pinned memory, used in turn, each by one replay at a time.

    Each is filled with at most `max_updates` updates and `payload_words` words, and left with
    `record_words` words of results; masks [num_entries, max_slots, mask_words] go with the input.
    `next_index`, the next replay's entry, follows the host's on the device.

    draft_masks [num_draft_masks, mask_words], pinned too, are there once: written only after a `wait`, when
    no replay is left that reads them. timeout_s: most seconds that the device may take for a step; a wait
    here may be for two.
    """

    def __init__(
        self,
        device: Device,
        *,
        num_entries: int,
        max_updates: int,
        payload_words: int,
        record_words: int,
        max_slots: int,
        num_draft_masks: int,
        mask_words: int,
        timeout_s: float | None = None,
    ) -> None:
        is_pinned = device.torch_device.type == "cuda"

        def pinned(*shape: int) -> torch.Tensor:
            return torch.full(shape, -1, dtype=torch.int32, pin_memory=is_pinned)

        self.max_updates = max_updates
        self.input = pinned(num_entries, HEADER_WORDS + 2 * max_updates + payload_words)
        self.output = pinned(num_entries, record_words)
        self.masks = pinned(num_entries, max_slots, mask_words)
        self.draft_masks = pinned(num_draft_masks, mask_words)
        self.next_index = torch.zeros(1, dtype=torch.int32, device=device.torch_device)
        self.current = torch.zeros(1, dtype=torch.int32, device=device.torch_device)
        self.input[:, 0] = 0
        self._input: NDArray[np.int32] = self.input.numpy()
        self._output: NDArray[np.int32] = self.output.numpy()
        self._masks: NDArray[np.int32] = self.masks.numpy()
        self._done: list[Event] = [device.event() for _ in range(num_entries)]
        self._results: list[Results | None] = [None] * num_entries
        self._next = 0
        self._timeout_s = None if timeout_s is None else 2 * timeout_s
        self._num_waits = self._num_host_rounds = self._num_copies = 0

    def acquire(self, updates: Pairs) -> int:
        """The next replay's entry, once the replay that had it before is over. These updates come first."""
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
        words[HEADER_WORDS : HEADER_WORDS + len(places)] = places
        first_value = HEADER_WORDS + self.max_updates
        words[first_value : first_value + len(values)] = values
        return entry

    def payload(self, entry: int) -> NDArray[np.int32]:
        words: NDArray[np.int32] = self._input[entry, HEADER_WORDS + 2 * self.max_updates :]
        return words

    def mask(self, entry: int) -> NDArray[np.int32]:
        """[max_slots, mask_words]: what slots under a constraint may say next."""
        mask: NDArray[np.int32] = self._masks[entry]
        return mask

    def start(self, entry: int, replay: Replay) -> None:
        """From the replay's end on the entry is free again, its results are there."""
        replay.launch()
        self._done[entry].record()

    def wait(self, entry: int) -> NDArray[np.int32]:
        """What the replay that has been started leaves behind, once it and all before it are over."""
        self._num_host_rounds += 1
        self._done[entry].wait(self._timeout_s)
        words: NDArray[np.int32] = self._output[entry]
        return words

    def results(self, entry: int) -> Results:
        """What the replay that has been started leaves behind. Good until it is said not to be wanted."""
        results = self._results[entry] = Results(self._output[entry])
        return results

    def take_work(self, num_allocations: int) -> HostWork:
        """What the host had to do here since it was last asked, and allocations that were found."""
        work = HostWork(
            num_waits=self._num_waits,
            num_split_rounds=self._num_host_rounds,
            num_copies=self._num_copies,
            num_allocations=num_allocations,
        )
        self._num_waits = self._num_host_rounds = self._num_copies = 0
        return work

    def reset(self) -> None:
        """After warming up: the next replay is the first."""
        self.next_index.zero_()
        self._next = 0
