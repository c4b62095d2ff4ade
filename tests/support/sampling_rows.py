"""Rows to sample with all kinds of logits processors, in device tables and for the eager executor."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from drift_sdk._kernels.slots import SlotColumns, SlotFlag, num_mask_words
from drift_sdk.execution.eager.sampling import LogitsProcessors, apply_processors
from drift_sdk.steps import SlotAssignment, SlotSampling

GREEDY = SlotSampling(
    temperature=0.0,
    top_k=0,
    top_p=1.0,
    min_p=0.0,
    seed=0,
    stop_token_ids=(),
    num_prompt_tokens=2,
    max_length=99,
)
GARBAGE = 0x5A5A5A5A


class FixedMask:
    """A constraint that allows the same tokens at every position."""

    is_slow = False

    def __init__(self, words: NDArray[np.int32]) -> None:
        self.words = words

    def masks(self, draft_token_ids: Sequence[int]) -> NDArray[np.int32]:
        return np.stack([self.words] * (len(draft_token_ids) + 1))

    def mask_ahead(self) -> NDArray[np.int32]:
        return self.words


@dataclass(frozen=True)
class Group:
    """The rows of a slot.

    history:  tokens of the sequence so far.
    drafts:   tokens drafted after it.
    masks:    the mask of each row; None without a constraint.
    """

    sampling: SlotSampling
    history: tuple[int, ...]
    drafts: tuple[int, ...] = ()
    masks: tuple[NDArray[np.int32], ...] | None = None


@dataclass(frozen=True)
class Rows:
    """Rows of several slots, as the sampling kernels take them. A group that is None is padding."""

    logits: torch.Tensor
    row_slot: torch.Tensor
    row_position: torch.Tensor
    row_token: torch.Tensor
    slots: SlotColumns
    mask_words: torch.Tensor
    rows_per_slot: int
    groups: tuple[Group | None, ...]

    def sampling(self, row: int) -> SlotSampling | None:
        group = self.groups[row // self.rows_per_slot]
        return None if group is None else group.sampling

    def ruled(self) -> torch.Tensor:
        """Logits [R, V] after `apply_processors`, computed row by row."""
        logits = self.logits[0].clone()
        for row in range(logits.shape[0]):
            group = self.groups[row // self.rows_per_slot]
            if group is None:
                continue
            depth = row % self.rows_per_slot
            known = group.history + group.drafts[:depth]
            assignment = SlotAssignment(
                slot=0,
                sampling=group.sampling,
                constraint=None if group.masks is None else FixedMask(group.masks[depth]),
                cached_token_ids=known,
            )
            rules = LogitsProcessors.of(assignment, logits.shape[1], logits.device)
            logits[row : row + 1] = apply_processors(logits[row : row + 1], [rules], [len(known)])

        return logits

    def take(self, groups: Sequence[int]) -> Rows:
        """Only the rows of these groups, in this order, with the same slots."""
        rows = [group * self.rows_per_slot + depth for group in groups for depth in range(self.rows_per_slot)]
        return replace(
            self,
            logits=self.logits[:, rows],
            row_slot=self.row_slot[rows],
            row_position=self.row_position[rows],
            row_token=self.row_token[rows],
            mask_words=self.mask_words[rows],
            groups=tuple(self.groups[group] for group in groups),
        )


def moved(tensors: Any, device: str) -> Any:
    """A copy of a dataclass with all its tensors on another device.

    They are prepared on the CPU because each read or write of a single value on a GPU waits for its other
    work.
    """
    found = {}
    for field in fields(tensors):
        value = getattr(tensors, field.name)
        if isinstance(value, torch.Tensor):
            found[field.name] = value.to(device)
        elif is_dataclass(value):
            found[field.name] = moved(value, device)
    return replace(tensors, **found)


def pack(token_ids: Sequence[int], vocab_size: int) -> NDArray[np.int32]:
    """Words with the bits of the tokens. All bits after the vocabulary are set, and must be ignored."""
    bits = np.zeros(num_mask_words(vocab_size) * 32, np.uint8)
    bits[vocab_size:] = 1
    bits[list(token_ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def make_rows(
    groups: Sequence[Group | None], logits: torch.Tensor, device: str, rows_per_slot: int = 1
) -> Rows:
    """Rows of the groups with these logits [R, V]. Columns of a slot without their flag contain garbage."""
    num_rows, vocab_size = logits.shape
    slots = SlotColumns.allocate(len(groups) + 2, vocab_size, "cpu")
    for name in ("bias", "counts", "prompt_bits", "stop_bits", "allowed_bits"):
        table = getattr(slots, name)
        table.fill_(float("nan") if table.is_floating_point() else GARBAGE)

    mask_words = np.full((num_rows, num_mask_words(vocab_size)), GARBAGE, np.int32)
    row_slot, row_position, row_token = [], [], []
    for index, group in enumerate(groups):
        if group is None:
            row_slot += [-1] * rows_per_slot
            row_position += [GARBAGE] * rows_per_slot
            row_token += [-1] * rows_per_slot
            continue

        slot = len(groups) + 1 - index  # different from the row's index; slot 0 is unused
        fill_slot(slots, slot, group)
        row_slot += [slot] * rows_per_slot
        row_position += [len(group.history) - 1 + depth for depth in range(rows_per_slot)]
        row_token += [group.history[-1], *group.drafts]
        if group.masks is not None:
            mask_words[index * rows_per_slot : (index + 1) * rows_per_slot] = np.stack(group.masks)

    slot = torch.tensor(row_slot, dtype=torch.int32)
    raw = torch.where(slot[:, None] < 0, torch.nan, logits.cpu())
    rows = Rows(
        torch.stack([raw, torch.full_like(raw, torch.nan)]),
        slot,
        torch.tensor(row_position, dtype=torch.int32),
        torch.tensor(row_token, dtype=torch.int32),
        slots,
        torch.from_numpy(mask_words),
        rows_per_slot,
        tuple(groups),
    )
    return moved(rows, device)


def fill_slot(slots: SlotColumns, slot: int, group: Group) -> None:
    sampling, vocab_size = group.sampling, slots.vocab_size
    for name in (
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "seed",
        "min_length",
        "num_prompt_tokens",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
    ):
        getattr(slots, name)[slot] = getattr(sampling, name)

    slots.num_logprobs[slot] = -1 if sampling.num_logprobs is None else sampling.num_logprobs
    flags = SlotFlag(0)
    if sampling.logit_bias:
        flags |= SlotFlag.BIAS
        slots.bias[slot] = 0
        for token_id, addend in sampling.logit_bias:
            slots.bias[slot, token_id] = addend

    if sampling.has_penalties:
        flags |= SlotFlag.PENALTIES
        num_prompt = sampling.num_prompt_tokens
        slots.prompt_bits[slot] = torch.from_numpy(pack(group.history[:num_prompt], vocab_size))
        output = torch.tensor(group.history[num_prompt:], dtype=torch.int64)
        slots.counts[slot] = torch.bincount(output, minlength=vocab_size).to(torch.int32)

    if sampling.stop_token_ids:
        flags |= SlotFlag.STOPS
        slots.stop_bits[slot] = torch.from_numpy(pack(sampling.stop_token_ids, vocab_size))

    if sampling.allowed_token_ids is not None:
        flags |= SlotFlag.ALLOWED
        slots.allowed_bits[slot] = torch.from_numpy(pack(sampling.allowed_token_ids, vocab_size))

    if group.masks is not None:
        flags |= SlotFlag.CONSTRAINT
    slots.flags[slot] = int(flags)


def random_group(rng: random.Random, vocab_size: int, rows_per_slot: int = 1) -> Group | None:
    """A random mixture of parameters and processors, or padding (None)."""
    if rng.random() < 0.15:
        return None

    def some(most: int) -> tuple[int, ...]:
        return tuple(rng.sample(range(vocab_size), rng.randint(1, min(most, vocab_size))))

    def tokens(number: int) -> tuple[int, ...]:
        return tuple(rng.randrange(vocab_size) for _ in range(number))

    num_prompt, num_output = rng.randint(1, 40), rng.randint(0, 30)
    length = num_prompt + num_output
    sampling = SlotSampling(
        temperature=rng.choice([0.0, 0.3, 1.0, 1.7]),
        top_k=rng.choice([0, 0, 1, 5, 50, vocab_size, vocab_size + 7]),
        top_p=rng.choice([1.0, 1.0, 0.95, 0.5, 1e-6]),
        min_p=rng.choice([0.0, 0.0, 0.05, 1.0]),
        seed=rng.randrange(-(2**63), 2**63),
        stop_token_ids=some(vocab_size if rng.random() < 0.3 else 4) if rng.random() < 0.5 else (),
        num_prompt_tokens=num_prompt,
        max_length=10_000,
        min_length=length + rng.randint(-1, 2),
        presence_penalty=rng.choice([0.0, 0.0, 0.7, -1.3]),
        frequency_penalty=rng.choice([0.0, 0.0, 0.3]),
        repetition_penalty=rng.choice([1.0, 1.0, 1.3, 0.8]),
        logit_bias=tuple((token_id, rng.uniform(-9, 9)) for token_id in some(5))
        if rng.random() < 0.4
        else (),
        allowed_token_ids=some(rng.choice([3, vocab_size])) if rng.random() < 0.3 else None,
        num_logprobs=rng.choice([None, 0, 3, 20]),
    )
    masks = None
    if rng.random() < 0.4:
        masks = tuple(pack(some(rng.choice([3, vocab_size])), vocab_size) for _ in range(rows_per_slot))

    return Group(sampling, tokens(length), tokens(rows_per_slot - 1), masks)


def random_rows(seed: int, num_groups: int, vocab_size: int, device: str, rows_per_slot: int = 1) -> Rows:
    rng = random.Random(seed)
    groups = [random_group(rng, vocab_size, rows_per_slot) for _ in range(num_groups)]
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_groups * rows_per_slot, vocab_size, generator=generator) * 3
    # Every third row has many ties. In every fourth row some logits, but not all, are -inf.
    logits[::3] = (logits[::3] * 2).round() / 2
    logits[::4, 1::5] = -torch.inf
    return make_rows(groups, logits, device, rows_per_slot)
