"""Counts of tokens that a prefill brings in, against a loop over its rows."""

from __future__ import annotations

import pytest
import torch

from drift_sdk._kernels.sampling.logits import count_tokens
from drift_sdk._kernels.slots import SlotColumns, SlotFlag
from drift_sdk.execution.eager.sampling import unpack_mask

pytestmark = pytest.mark.kernel


@pytest.mark.parametrize("vocab_size", [1, 31, 33, 1000])
def test_count_tokens_marks_prompt_and_counts_output(vocab_size: int, device: str) -> None:
    num_rows, num_slots = 700, 5
    generator = torch.Generator().manual_seed(vocab_size)

    def rows(low: int, high: int) -> torch.Tensor:
        return torch.randint(low, high, (num_rows,), generator=generator, dtype=torch.int32)

    row_slot, row_token, row_position = rows(-1, num_slots), rows(-1, vocab_size), rows(0, 60)
    slots = SlotColumns.allocate(num_slots, vocab_size, device)
    slots.flags[:] = torch.tensor([0, 31, SlotFlag.PENALTIES, 31 - SlotFlag.PENALTIES, SlotFlag.PENALTIES])
    slots.num_prompt_tokens[:] = torch.tensor([10, 20, 0, 30, 60])
    slots.counts[1, 0] = 4
    slots.prompt_bits[2, 0] = 1

    expected_counts = slots.counts.cpu().clone()
    is_in_prompt = unpack_mask(slots.prompt_bits.cpu(), vocab_size)
    for slot, token, position in zip(row_slot, row_token, row_position, strict=True):
        if slot in (1, 2, 4) and token >= 0:
            if position < slots.num_prompt_tokens[slot]:
                is_in_prompt[slot, token] = True
            else:
                expected_counts[slot, token] += 1

    count_tokens(row_slot.to(device), row_token.to(device), row_position.to(device), slots)
    assert torch.equal(slots.counts.cpu(), expected_counts)
    assert torch.equal(unpack_mask(slots.prompt_bits.cpu(), vocab_size), is_in_prompt)


def test_count_tokens_names_wrong_arguments(device: str) -> None:
    slots = SlotColumns.allocate(1, 8, device)
    row = torch.zeros(3, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match=r"row_token: \[3\] torch.int64: expected \[3\] torch.int32"):
        count_tokens(row, row.to(torch.int64), row, slots)
