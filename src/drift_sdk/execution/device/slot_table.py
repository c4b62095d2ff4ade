"""The slot tables on the device: one arena of int32 words that the host's updates address."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from drift_sdk._kernels.slots import SlotColumns, SlotFlag, SlotState, num_mask_words
from drift_sdk.errors import ConfigError
from drift_sdk.steps import BlockUpdate, ExecutorLimits, SlotAssignment, SlotSampling

# One value for each slot, by name.
COLUMNS = {
    "seed": torch.int64,
    "temperature": torch.float32,
    "top_p": torch.float32,
    "min_p": torch.float32,
    "presence_penalty": torch.float32,
    "frequency_penalty": torch.float32,
    "repetition_penalty": torch.float32,
    "top_k": torch.int32,
    "flags": torch.int32,
    "min_length": torch.int32,
    "num_prompt_tokens": torch.int32,
    "num_logprobs": torch.int32,
    "length": torch.int32,
    "last_token": torch.int32,
    "finish": torch.int32,
    "max_length": torch.int32,
}

NO_HISTORY = {"history": 0, "ngram_score": 0}
NO_VIEWS = {"dropped": 0, "pending": 0}
"""Words of a slot, by table."""
MAX_WORDS = 2**31 - 1
"""Most words of the arena: an update holds its place in a signed 32-bit word."""

Pairs = tuple[NDArray[np.int64], NDArray[np.int32]]
"""Places in the arena and the words to be written there."""
NO_UPDATES: Pairs = (np.empty(0, np.int64), np.empty(0, np.int32))


class Updates:
    """Words to be written to the arena, all at distinct places."""

    def __init__(self) -> None:
        self._places: list[NDArray[np.int64]] = []
        self._values: list[NDArray[np.int32]] = []

    def __len__(self) -> int:
        return sum(map(len, self._places))

    def add(self, places: NDArray[np.int64], values: NDArray[np.int32]) -> None:
        """Add the word `values[i]` at `places[i]` for all i."""
        self._places.append(places)
        self._values.append(values)

    def slices(self, most: int) -> Iterator[Pairs]:
        """All updates, at most `most` at a time."""
        if not self._places:
            return

        places, values = np.concatenate(self._places), np.concatenate(self._values)
        for first in range(0, len(places), most):
            yield places[first : first + most], values[first : first + most]


class SlotTable:
    """Tables with a row for each of S = `limits.max_num_seqs` slots.

    words: the arena, int32. The others are views of it.
    columns: what sampling reads. state: lengths, newest tokens and finished flags.
    block_table [S, max_blocks] int32.
    window_table [S, max_blocks] int32: of layers with windows; [S, 0] if they have no blocks of their own.
    history [S, max_model_len + 1] int32: the token at each position; [S, 0] without `has_history`.
    ngram_score [S] int32: see `execution.ngram_history`; 0 of a new sequence. [0] without `has_history`.
    dropped, pending [S] int32: see `Retrieval`; 0 of a new sequence. [0] without `has_views`.
    """

    def __init__(
        self,
        limits: ExecutorLimits,
        device: torch.device,
        *,
        has_history: bool = False,
        has_views: bool = False,
    ) -> None:
        """has_history: whether a drafter needs the history. has_views: whether rounds verify over a part of
        the KV cache.

        Raises ConfigError for more slots than the arena can address.
        """
        num_slots, vocab_size = limits.max_num_seqs, limits.vocab_size
        max_blocks = -(-(limits.max_model_len + 1) // limits.block_size) + 1
        num_words = num_mask_words(vocab_size)
        self._num_slots = num_slots
        widths = {name: dtype.itemsize // 4 for name, dtype in COLUMNS.items()}
        widths |= {"block_table": max_blocks, "bias": vocab_size, "counts": vocab_size}
        widths |= {"window_table": max_blocks if limits.num_window_blocks else 0}
        widths |= {"history": limits.max_model_len + 1, "ngram_score": 1} if has_history else NO_HISTORY
        widths |= dict.fromkeys(NO_VIEWS, 1) if has_views else NO_VIEWS
        widths |= dict.fromkeys(("prompt_bits", "stop_bits", "allowed_bits"), num_words)
        ends = list(accumulate(width * num_slots for width in widths.values()))
        if ends[-1] > MAX_WORDS:
            most = MAX_WORDS // sum(widths.values())
            raise ConfigError.of(
                "max_num_seqs",
                num_slots,
                f"at most {most} with a vocabulary of {vocab_size} and a context of {limits.max_model_len}",
            )

        self.words: torch.Tensor = torch.zeros(ends[-1], dtype=torch.int32, device=device)
        self._widths = widths
        self._starts = dict(zip(widths, [0, *ends], strict=False))
        table = {
            name: self._part(name).view(COLUMNS[name]) if name in COLUMNS else self._part(name)
            for name in widths
        }
        self.block_table: torch.Tensor = table.pop("block_table").view(num_slots, max_blocks)
        self.window_table: torch.Tensor = table.pop("window_table").view(num_slots, -1)
        self.history: torch.Tensor = table.pop("history").view(num_slots, -1)
        self.ngram_score: torch.Tensor = table.pop("ngram_score")
        self.dropped, self.pending = table.pop("dropped"), table.pop("pending")
        state = {name: table.pop(name) for name in ("length", "last_token", "finish", "max_length")}
        self.state: SlotState = SlotState(**state)
        self.columns: SlotColumns = SlotColumns(
            bias=table.pop("bias").view(torch.float32).view(num_slots, vocab_size),
            counts=table.pop("counts").view(num_slots, vocab_size),
            **{name: table.pop(name).view(num_slots, num_words)
               for name in ("prompt_bits", "stop_bits", "allowed_bits")},
            **table,
        )  # fmt: skip

    def assign(self, assignment: SlotAssignment, updates: Updates) -> None:
        """Assign a slot to a sequence.

        The slot's rows of wide tables are cleared here, by work in the stream (`clear`); all other changes
        are added to `updates`.
        """
        slot, sampling = assignment.slot, assignment.sampling
        flags = _flags(assignment)
        self.clear(assignment)
        for name, value in _column_values(sampling, flags).items():
            dtype = np.float32 if COLUMNS[name] == torch.float32 else np.int32
            self._set(updates, name, slot, np.array([value], dtype=dtype).view(np.int32))
        self._set(updates, "seed", slot, np.array([sampling.seed], dtype=np.int64).view(np.int32))
        self._set_bits(updates, "stop_bits", slot, sampling.stop_token_ids)
        if flags & SlotFlag.ALLOWED and sampling.allowed_token_ids is not None:
            self._set_bits(updates, "allowed_bits", slot, sampling.allowed_token_ids)
        if flags & SlotFlag.BIAS:
            biased = np.array([token_id for token_id, _ in sampling.logit_bias])
            addends = np.array([addend for _, addend in sampling.logit_bias], dtype=np.float32)
            self._set(updates, "bias", slot, addends.view(np.int32), biased)
        cached = np.array(assignment.cached_token_ids, dtype=np.int64)
        if self._widths["history"]:
            self._set(updates, "history", slot, cached.astype(np.int32))
            self._set(updates, "ngram_score", slot, np.zeros(1, dtype=np.int32))
        if self._widths["pending"]:
            self._set(updates, "dropped", slot, np.zeros(1, dtype=np.int32))
            self._set(updates, "pending", slot, np.zeros(1, dtype=np.int32))
        if flags & SlotFlag.PENALTIES:
            prompt, output = np.split(cached, [sampling.num_prompt_tokens])
            self._set_bits(updates, "prompt_bits", slot, prompt)
            ids, counts = np.unique(output, return_counts=True)
            self._set(updates, "counts", slot, counts.astype(np.int32), ids)

    def clear(self, assignment: SlotAssignment) -> None:
        """Clear a slot's rows of the wide tables that its new sequence uses, by work in the stream."""
        slot, flags, columns = assignment.slot, _flags(assignment), self.columns
        columns.stop_bits[slot].zero_()
        if flags & SlotFlag.ALLOWED:
            columns.allowed_bits[slot].zero_()
        if flags & SlotFlag.BIAS:
            columns.bias[slot].zero_()
        if flags & SlotFlag.PENALTIES:
            columns.prompt_bits[slot].zero_()
            columns.counts[slot].zero_()

    def place_blocks(self, update: BlockUpdate, updates: Updates, table: str = "block_table") -> None:
        """Set entries of a slot's block table. table: this one, or "window_table"."""
        places = np.arange(update.first_index, update.first_index + len(update.block_ids))
        self._set(updates, table, update.slot, np.array(update.block_ids, dtype=np.int32), places)

    def set_length(self, slot: int, length: int, last_token: int, updates: Updates) -> None:
        """Set how many tokens a slot has, and the newest of them."""
        self._set(updates, "length", slot, np.array([length], dtype=np.int32))
        self._set(updates, "last_token", slot, np.array([last_token], dtype=np.int32))

    def _part(self, name: str) -> Tensor:
        """The words of a table, all slots one after the other."""
        start = self._starts[name]
        return self.words[start : start + self._widths[name] * self._num_slots]

    def _set(
        self,
        updates: Updates,
        name: str,
        slot: int,
        values: NDArray[np.int32],
        columns: NDArray[np.int64] | None = None,
    ) -> None:
        """Set words of a slot's row in a table; columns: their places in the row, None = the first ones."""
        first = self._starts[name] + slot * self._widths[name]
        updates.add(first + (np.arange(len(values)) if columns is None else columns), values)

    def _set_bits(self, updates: Updates, name: str, slot: int, token_ids: object) -> None:
        """Set the bits of `token_ids` in a slot's row of a table, which was cleared."""
        ids = np.unique(np.asarray(token_ids, dtype=np.int64))
        words, inverse = np.unique(ids // 32, return_inverse=True)
        values = np.zeros(len(words), dtype=np.uint32)
        np.bitwise_or.at(values, inverse, np.uint32(1) << (ids % 32).astype(np.uint32))
        self._set(updates, name, slot, values.view(np.int32), words)


def _flags(assignment: SlotAssignment) -> SlotFlag:
    """The rules that a sequence's logits are subject to."""
    sampling = assignment.sampling
    flags = SlotFlag(0)
    if sampling.logit_bias:
        flags |= SlotFlag.BIAS
    if sampling.has_penalties:
        flags |= SlotFlag.PENALTIES
    if sampling.allowed_token_ids is not None:
        flags |= SlotFlag.ALLOWED
    if assignment.constraint is not None:
        flags |= SlotFlag.CONSTRAINT
    if sampling.stop_token_ids:
        flags |= SlotFlag.STOPS
    return flags


def _column_values(sampling: SlotSampling, flags: SlotFlag) -> dict[str, float]:
    """The values of a new sequence by column, without those of its seed and length."""
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "top_k": min(sampling.top_k, 2**31 - 1),
        "flags": int(flags),
        "min_length": sampling.min_length,
        "num_prompt_tokens": sampling.num_prompt_tokens,
        "num_logprobs": -1 if sampling.num_logprobs is None else sampling.num_logprobs,
        "finish": 0,
        "max_length": sampling.max_length,
    }
