"""What the sampling kernels know of each slot, in tensors on the device."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntFlag

import torch
from msgspec import Struct
from torch import Tensor

__all__ = ["SlotColumns", "SlotFlag", "SlotState", "num_mask_words"]


class SlotFlag(IntFlag):
    """Which rules a slot's logits are subject to; a table is read only where its flag is set."""

    BIAS = 1
    PENALTIES = 2
    ALLOWED = 4
    CONSTRAINT = 8
    STOPS = 16


def num_mask_words(vocab_size: int) -> int:
    """How many words hold a bit for each token: bit i % 32 of word i // 32 is token i's."""
    return -(-vocab_size // 32)


@dataclass(frozen=True, slots=True)
class SlotColumns:
    """Of S slots and V tokens, W = ceil(V / 32). The fields of `SlotSampling` of the same name, save:

    flags: `SlotFlag`, STOPS where there are any stop ids. top_k: 0 = off. num_logprobs: -1 = none.
    bias [S, V]: the addend of every token. counts [S, V]: how often each was generated. prompt_bits,
    stop_bits, allowed_bits [S, W]: which occur in the prompt, are stop ids, are allowed.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed: Tensor
    flags: Tensor
    min_length: Tensor
    num_prompt_tokens: Tensor
    presence_penalty: Tensor
    frequency_penalty: Tensor
    repetition_penalty: Tensor
    num_logprobs: Tensor
    bias: Tensor
    counts: Tensor
    prompt_bits: Tensor
    stop_bits: Tensor
    allowed_bits: Tensor

    @classmethod
    def allocate(cls, num_slots: int, vocab_size: int, device: torch.device | str) -> SlotColumns:
        """Columns of zeros: greedy slots without rules, but for `num_logprobs` and `top_p` yet to be set."""

        def column(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros(num_slots, *shape, dtype=dtype, device=device)

        num_words = num_mask_words(vocab_size)
        return cls(
            temperature=column(torch.float32),
            top_k=column(torch.int32),
            top_p=column(torch.float32),
            min_p=column(torch.float32),
            seed=column(torch.int64),
            flags=column(torch.int32),
            min_length=column(torch.int32),
            num_prompt_tokens=column(torch.int32),
            presence_penalty=column(torch.float32),
            frequency_penalty=column(torch.float32),
            repetition_penalty=column(torch.float32),
            num_logprobs=column(torch.int32),
            bias=column(torch.float32, vocab_size),
            counts=column(torch.int32, vocab_size),
            prompt_bits=column(torch.int32, num_words),
            stop_bits=column(torch.int32, num_words),
            allowed_bits=column(torch.int32, num_words),
        )

    @property
    def num_slots(self) -> int:
        return self.temperature.shape[0]

    @property
    def vocab_size(self) -> int:
        return self.counts.shape[1]


class SlotState(Struct, frozen=True):
    """[S] int32 each: tokens, the newest of them, 0 while running or else how the slot ended, most tokens."""

    length: Tensor
    last_token: Tensor
    finish: Tensor
    max_length: Tensor
