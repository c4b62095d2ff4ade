"""The host's side of the rings through which replays get their input and give their results."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from drift_sdk._kernels.staging import HEADER_WORDS
from drift_sdk.execution.device import Device, Event

__all__ = ["Results", "Ring"]


class Results:
    """One replay's results: there when it is over."""

    __slots__ = ("is_wanted", "words")

    def __init__(self, words: NDArray[np.int32]) -> None:
        self.words = words
        self.is_wanted = True


class Ring:
    """`num_entries` entries in pinned memory, used in turn, each by one replay at a time.

    Each is filled with at most `max_updates` updates and `payload_words` words, and left with
    `record_words` words of results; mask_words [num_entries, ...] go with the input. The count of replays on
    the device follows the host's.
    """

    def __init__(
        self,
        device: Device,
        *,
        num_entries: int,
        max_updates: int,
        payload_words: int,
        record_words: int,
        mask_shape: tuple[int, int],
    ) -> None:
        is_pinned = device.torch_device.type == "cuda"

        def pinned(*shape: int) -> torch.Tensor:
            return torch.full(shape, -1, dtype=torch.int32, pin_memory=is_pinned)

        self.max_updates = max_updates
        self.input = pinned(num_entries, HEADER_WORDS + 2 * max_updates + payload_words)
        self.output = pinned(num_entries, record_words)
        self.masks = pinned(num_entries, *mask_shape)
        self.counter = torch.zeros(1, dtype=torch.int32, device=device.torch_device)
        self.current = torch.zeros(1, dtype=torch.int32, device=device.torch_device)
        self.input[:, 0] = 0
        self._input: NDArray[np.int32] = self.input.numpy()
        self._output: NDArray[np.int32] = self.output.numpy()
        self._masks: NDArray[np.int32] = self.masks.numpy()
        self._done: list[Event] = [device.event() for _ in range(num_entries)]
        self._results: list[Results | None] = [None] * num_entries
        self._next = 0

    def acquire(self) -> int:
        """The next replay's entry, once the replay that had it before is over."""
        entry = self._next
        self._next = (entry + 1) % len(self._done)
        self._done[entry].wait()
        results = self._results[entry]
        if results is not None and results.is_wanted:
            results.words = results.words.copy()
        self._results[entry] = None
        return entry

    def update(self, entry: int, places: NDArray[np.int64], values: NDArray[np.int32]) -> None:
        """The updates that come first in the replay."""
        words = self._input[entry]
        words[0] = len(places)
        words[HEADER_WORDS : HEADER_WORDS + len(places)] = places
        first_value = HEADER_WORDS + self.max_updates
        words[first_value : first_value + len(values)] = values

    def payload(self, entry: int) -> NDArray[np.int32]:
        words: NDArray[np.int32] = self._input[entry, HEADER_WORDS + 2 * self.max_updates :]
        return words

    def mask(self, entry: int) -> NDArray[np.int32]:
        """[max rows, words]: what rows under a constraint may say."""
        mask: NDArray[np.int32] = self._masks[entry]
        return mask

    def release(self, entry: int) -> None:
        """The replay has been started: from its end on the entry is free again, its results are there."""
        self._done[entry].record()

    def results(self, entry: int) -> Results:
        """What the replay that has been started leaves behind. Good until it is said not to be wanted."""
        results = self._results[entry] = Results(self._output[entry])
        return results

    def reset(self) -> None:
        """After warming up: the next replay is the first."""
        self.counter.zero_()
        self._next = 0
