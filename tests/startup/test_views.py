"""The layout of partial verification, and when there is none."""

from __future__ import annotations

from drift_sdk import EngineConfig, NGram, PartialVerification, Speculation
from drift_sdk.startup.executor_factory import view_layout
from drift_sdk.steps import ExecutorLimits

PARTIAL = PartialVerification(sink_tokens=10, retrieved_tokens=100, window_tokens=30, refresh_tokens=9)
CONFIG = EngineConfig(speculation=Speculation(draft=NGram(), partial_verification=PARTIAL))


def limits(max_model_len: int) -> ExecutorLimits:
    return ExecutorLimits(
        max_num_seqs=4, max_model_len=max_model_len, num_blocks=64, block_size=16, vocab_size=100
    )


def test_layout_has_whole_blocks_and_the_most_drafts() -> None:
    layout = view_layout(CONFIG, limits(1000), (1, 3))
    assert layout is not None
    assert (layout.num_sinks, layout.num_retrieved, layout.num_drafts) == (1, 7, 3)
    assert layout.capacity == 8 * 16 + 30
    assert layout.max_sequences == 1024 // 13


def test_no_layout_where_no_sequence_is_longer_than_a_view() -> None:
    """Views as large as the context would take memory, and never be used."""
    assert view_layout(CONFIG, limits(158), (1, 3)) is None
    assert view_layout(CONFIG, limits(159), (1, 3)) is not None


def test_no_layout_without_drafts_or_setting() -> None:
    assert view_layout(CONFIG, limits(1000), ()) is None
    assert view_layout(EngineConfig(), limits(1000), ()) is None
    assert view_layout(EngineConfig(speculation=Speculation(draft=NGram())), limits(1000), (3,)) is None
