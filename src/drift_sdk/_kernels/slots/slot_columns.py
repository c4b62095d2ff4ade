"""The slot tables as the kernels see them: one tensor a column, one row a slot, all on the device.

S: number of slots. V: vocabulary size. W = ceil(V / 32): words of a set of tokens, one bit a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntFlag

import torch
from msgspec import Struct
from torch import Tensor

from drift_sdk._kernels.launch.arguments import check_tensor


class SlotFlag(IntFlag):
    """The rules that apply to a slot's logits. Sampling reads a table [S, V] or [S, W] only for slots that
    have the table's flag."""

    BIAS = 1
    """`SlotColumns.bias` is added."""
    PENALTIES = 2
    """Repetition, frequency and presence penalties apply: `counts` and `prompt_bits` are kept up to date."""
    ALLOWED = 4
    """Only the tokens of `allowed_bits` may be chosen."""
    CONSTRAINT = 8
    """Only the tokens of the row's own mask, which the host computes from a grammar, may be chosen."""
    STOPS = 16
    """There are stop ids: they are in `stop_bits`."""


def num_mask_words(vocab_size: int) -> int:
    """Number of 32-bit words that hold one bit a token: token i is bit i % 32 of word i // 32."""
    return -(-vocab_size // 32)


@dataclass(frozen=True, slots=True)
class SlotColumns:
    """The columns that sampling reads. Where nothing else is said a column is [S] and means what the field of
    the same name of `SlotSampling` means.

    bias, counts, prompt_bits and allowed_bits are undefined for slots without the flag. stop_bits is defined
    for every slot in use, since the commit kernel reads it whatever the flags are.
    """

    temperature: Tensor
    """fp32 [S]."""
    top_k: Tensor
    """int32 [S]; 0: off."""
    top_p: Tensor
    """fp32 [S]."""
    min_p: Tensor
    """fp32 [S]."""
    seed: Tensor
    """int64 [S]."""
    flags: Tensor
    """int32 [S]: a `SlotFlag`; STOPS is set where there are any stop ids."""
    min_length: Tensor
    """int32 [S]."""
    num_prompt_tokens: Tensor
    """int32 [S]."""
    presence_penalty: Tensor
    """fp32 [S]."""
    frequency_penalty: Tensor
    """fp32 [S]."""
    repetition_penalty: Tensor
    """fp32 [S]."""
    num_logprobs: Tensor
    """int32 [S]; -1: none are reported."""
    bias: Tensor
    """fp32 [S, V]: the addend of every token's logit."""
    counts: Tensor
    """int32 [S, V]: how often each token was generated."""
    prompt_bits: Tensor
    """int32 [S, W]: the tokens that occur in the prompt."""
    stop_bits: Tensor
    """int32 [S, W]: the stop ids."""
    allowed_bits: Tensor
    """int32 [S, W]: the tokens that are allowed."""

    @classmethod
    def allocate(cls, num_slots: int, vocab_size: int, device: torch.device | str) -> SlotColumns:
        """Columns of zeros: greedy slots without rules, once `num_logprobs` and `top_p` are set too."""

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

    def check(self) -> None:
        """Raises ValueError for a column of another shape or type, or one that is not contiguous."""
        num_slots, vocab_size = self.num_slots, self.vocab_size
        num_words = num_mask_words(vocab_size)
        for name in ("top_k", "flags", "min_length", "num_prompt_tokens", "num_logprobs"):
            check_tensor(name, getattr(self, name), (num_slots,), torch.int32)
        for name in (
            "temperature",
            "top_p",
            "min_p",
            "presence_penalty",
            "frequency_penalty",
            "repetition_penalty",
        ):
            check_tensor(name, getattr(self, name), (num_slots,), torch.float32)
        check_tensor("seed", self.seed, (num_slots,), torch.int64)
        check_tensor("bias", self.bias, (num_slots, vocab_size), torch.float32)
        check_tensor("counts", self.counts, (num_slots, vocab_size), torch.int32)
        for name in ("prompt_bits", "stop_bits", "allowed_bits"):
            check_tensor(name, getattr(self, name), (num_slots, num_words), torch.int32)

    @property
    def num_slots(self) -> int:
        return self.temperature.shape[0]

    @property
    def vocab_size(self) -> int:
        return self.counts.shape[1]


class SlotState(Struct, frozen=True):
    """The columns that the commit kernel advances, int32 [S] each."""

    length: Tensor
    """Number of tokens of the sequence, prompt and generated."""
    last_token: Tensor
    """The newest token."""
    finish: Tensor
    """0 while the sequence runs; else why it ended: FINISHED_STOP or FINISHED_LENGTH."""
    max_length: Tensor
    """The most tokens that the sequence may have; never written by a kernel."""

    def check(self) -> None:
        """Raises ValueError for a column of another shape or type, or one that is not contiguous."""
        (num_slots,) = self.length.shape
        for name in ("length", "last_token", "finish", "max_length"):
            check_tensor(name, getattr(self, name), (num_slots,), torch.int32)
