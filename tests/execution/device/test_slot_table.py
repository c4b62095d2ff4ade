from __future__ import annotations

import pytest
import torch

from drift_sdk import ConfigError
from drift_sdk.execution.device.slot_table import MAX_WORDS, SlotTable
from drift_sdk.steps import ExecutorLimits


def limits(max_num_seqs: int, vocab_size: int) -> ExecutorLimits:
    return ExecutorLimits(
        max_num_seqs=max_num_seqs, max_model_len=64, num_blocks=8, block_size=16, vocab_size=vocab_size
    )


@pytest.mark.parametrize("has_history", [False, True])
def test_more_slots_than_can_be_addressed_are_rejected(has_history: bool) -> None:
    """An update's place is an int32: a larger place would wrap around and change other slots."""
    meta = torch.device("meta")
    with pytest.raises(ConfigError, match="max_num_seqs=4096: expected at most") as caught:
        SlotTable(limits(4096, 262_144), meta, has_history=has_history)

    most = int(caught.value.allowed.split()[2])
    words = SlotTable(limits(most, 262_144), meta, has_history=has_history).words
    assert words.numel() <= MAX_WORDS < words.numel() / most * (most + 1)
