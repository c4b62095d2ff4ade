"""Rounds of partial verification: graph and eager executor emit the same tokens and keep the same KV."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from draft_zoo import make_draft
from drawn_decoder import drawn_decoder
from interpreted_device import InterpretedDevice
from tiny_llama import tiny_llama
from tolerances import assert_near

from drift_sdk import NGram
from drift_sdk._kernels.gemm.tuning import TunedTable
from drift_sdk.execution.device.device import GpuDevice
from drift_sdk.execution.device.slot_table import SlotTable
from drift_sdk.execution.drafter_factory import (
    DrafterFactory,
    EagleDrafterFactory,
    HybridDrafterFactory,
    NGramDrafterFactory,
)
from drift_sdk.execution.eager.eager_executor import EagerExecutor
from drift_sdk.execution.eager.rounds import PartialRounds, state_of
from drift_sdk.execution.forward.attention import ViewAttention
from drift_sdk.execution.forward.rows import Rows
from drift_sdk.execution.graph.gpu_graphs import GraphOptions
from drift_sdk.execution.graph.graph_executor import GraphExecutor
from drift_sdk.families import read_spec
from drift_sdk.models.decoder import Decoder
from drift_sdk.models.draft_head import DraftDecoder
from drift_sdk.speculation import PartialVerification, ViewLayout
from drift_sdk.steps import (
    BlockUpdate,
    ExecutorLimits,
    PrefillChunk,
    SlotAssignment,
    SlotSampling,
    StepPlan,
    Verification,
)
from perf.harness.manual_driver import ManualDriver

pytestmark = pytest.mark.kernel

IS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if IS_GPU else "cpu"
TARGET = tiny_llama(
    vocab_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, hidden_size=32
)
LIMITS = ExecutorLimits(max_num_seqs=2, max_model_len=72, num_blocks=40, block_size=4, vocab_size=96)
BUDGET = 64
NUM_DRAFTS = 2
LAYOUT = PartialVerification(sink_tokens=4, retrieved_tokens=8, window_tokens=6, refresh_tokens=9).layout(
    LIMITS.block_size, NUM_DRAFTS
)
KINDS: tuple[Verification, ...] = ("refresh", "partial", "partial", "refresh", "partial")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Decoder, DraftDecoder]:
    folder = tmp_path_factory.mktemp("models")
    (folder / "config.json").write_text(json.dumps(TARGET))
    target = drawn_decoder(read_spec(TARGET), DEVICE, seed=3)
    make_draft("reference", folder / "draft", folder)
    return target, DraftDecoder.load(folder / "draft", target)


def graph_executor(
    target: Decoder, factory: DrafterFactory, layout: ViewLayout | None = LAYOUT
) -> GraphExecutor:
    return GraphExecutor(
        GpuDevice(0) if IS_GPU else InterpretedDevice(),
        target,
        LIMITS,
        TunedTable(),
        GraphOptions(prefill_token_budget=BUDGET, view_layout=layout),
        drafter_factory=factory,
    )


def eager_executor(target: Decoder, factory: DrafterFactory, layout: ViewLayout = LAYOUT) -> EagerExecutor:
    partial = PartialRounds(layout, target.spec.num_layers)
    return EagerExecutor(target, LIMITS, factory.eager_drafter(target, LIMITS), partial=partial)


def run(
    executor: Any, kinds: Sequence[Verification], *, contexts: int = 44, slots: int = 2
) -> list[list[tuple[int, ...]]]:
    """The tokens of each slot in each round."""
    driver = ManualDriver(executor, prefill_token_budget=BUDGET)
    driver.fill(contexts, [LIMITS.max_model_len - 4 * slot for slot in range(slots)])
    return [
        [output.token_ids for output in driver.round(NUM_DRAFTS, verification=kind).decode] for kind in kinds
    ]


def fill(table: SlotTable, **values: int) -> None:
    """Set tensors of a table in all slots, before the executor's stream goes on."""
    with torch.inference_mode():
        for name, value in values.items():
            getattr(table, name).fill_(value)
    if IS_GPU:
        torch.cuda.synchronize()


def rows_of(executor: GraphExecutor, num_positions: int) -> list[torch.Tensor]:
    """Keys and values of slot 0 at its first positions, which lie in blocks 0, 1, ..."""
    cache = executor._gpus[0].steps._model.cache
    num_blocks = -(-num_positions // LIMITS.block_size)
    return [
        each[:, :num_blocks].transpose(2, 3).flatten(1, 2)[:, :num_positions].clone()
        for each in cache.groups[0]
    ]


@pytest.fixture
def executor(models: tuple[Decoder, DraftDecoder]) -> Iterator[GraphExecutor]:
    """An executor that drafts n-grams."""
    executor = graph_executor(models[0], NGramDrafterFactory(NGram(min_length=1), (NUM_DRAFTS,)))
    yield executor
    executor.close()


def test_rounds_equal_those_of_the_eager_executor(models: tuple[Decoder, DraftDecoder]) -> None:
    """In tokens, in the blocks of each layer's views, and in keys and values, which rounds over views have
    written last. With a head and n-grams beside it, which covers both drafters."""
    factory = HybridDrafterFactory(EagleDrafterFactory(models[1], (1, NUM_DRAFTS)), NGram(min_length=1))
    eager = eager_executor(models[0], factory)
    expected = run(eager, KINDS)
    executor = graph_executor(models[0], factory)
    graphs = executor._gpus[0].graphs
    assert graphs.num_graphs == len(graphs._replays)
    assert (set(graphs.partial), set(graphs.refresh)) == ({(1, 1), (1, 2), (2, 1), (2, 2)}, {1, 2})
    assert run(executor, KINDS) == expected
    newest = [44 + sum(len(each[slot]) for each in expected[: KINDS.index("refresh", 1)]) for slot in (0, 1)]
    dropped = executor._gpus[0].resources.table.dropped.tolist()
    assert dropped == [LAYOUT.num_dropped(position) for position in newest]
    assert min(dropped) > 0
    views = executor._gpus[0].steps.views
    assert views is not None
    states = [state_of(eager._slots[slot]) for slot in (0, 1)]
    assert views.retrieval.selected.transpose(0, 1).tolist() == [state.selected for state in states]
    assert len({tuple(blocks) for state in states for blocks in state.selected}) > 2
    num_positions = 44 + sum(len(each[0]) for each in expected)
    cache = eager._open_cache()
    for found, rows in zip(rows_of(executor, num_positions), cache.tensors, strict=True):
        assert_near(found, rows[:, :num_positions], inner=TARGET["intermediate_size"], depth=4)
    executor.close()


def test_a_refresh_gives_pending_rows_the_keys_and_values_of_plain_decoding(executor: GraphExecutor) -> None:
    """The rows of tokens that were accepted over views, against those of a sequence that had all its tokens
    in its prompt, which is computed as decoding does."""
    driver = ManualDriver(executor, prefill_token_budget=BUDGET)
    driver.fill(44, [LIMITS.max_model_len])
    tokens = prompt(44) + [int(executor._gpus[0].resources.table.state.last_token[0])]
    kinds: tuple[Verification, ...] = ("refresh", "partial", "partial")
    for kind in kinds:
        tokens += driver.round(NUM_DRAFTS, verification=kind).decode[0].token_ids
    num_positions = len(tokens) - 1  # the newest token has no row yet
    before = rows_of(executor, num_positions)
    driver.round(NUM_DRAFTS, verification="refresh")
    after = rows_of(executor, num_positions)
    executor.launch(whole_prompt(tokens))
    executor.collect()
    for found, views, expected in zip(after, before, rows_of(executor, num_positions), strict=True):
        if IS_GPU:
            assert torch.equal(found, expected)
        else:  # the order of sums in the interpreter depends on the number of rows
            assert_near(found, expected, inner=TARGET["intermediate_size"], depth=4)
        with pytest.raises(AssertionError):
            assert_near(views, expected, inner=TARGET["intermediate_size"], depth=4)


def test_rounds_whose_views_have_all_blocks_equal_whole_rounds(executor: GraphExecutor) -> None:
    """Also in slots whose sequences before had views without some blocks, and pending rows."""
    table = executor._gpus[0].resources.table
    found = []
    for kind in ("partial", "whole"):
        fill(table, pending=3, dropped=2)
        kinds: list[Verification] = [kind, kind]  # type: ignore[list-item]  # a name of one
        tokens = run(executor, kinds, contexts=10)
        assert table.dropped.tolist() == [0, 0]
        num_pending = [sum(len(each[slot]) for each in tokens) for slot in (0, 1)]
        assert table.pending.tolist() == (num_pending if kind == "partial" else [0, 0])
        found.append((tokens, *rows_of(executor, 10 + num_pending[0])))
    assert found[0][0] == found[1][0]
    assert torch.equal(found[0][1], found[1][1])
    assert torch.equal(found[0][2], found[1][2])


def test_refreshes_are_timed_for_each_bucket_and_leave_no_pending_rows(executor: GraphExecutor) -> None:
    table = executor._gpus[0].resources.table
    fill(table, pending=1)
    costs = executor.refresh_costs()
    assert set(costs) == {1, 2}
    assert min(costs.values()) > 0
    assert table.pending.tolist() == [1, 1]  # all rows were padding


def test_prefixes_are_not_shared_in_views(executor: GraphExecutor) -> None:
    """Two sequences with the same first blocks have other views: their keys cannot be read once for both."""
    steps, table = executor._gpus[0].steps, executor._gpus[0].resources.table
    workspace = executor._gpus[0].resources.workspace
    assert steps.views is not None
    assert not steps._refresh_attention.shares_prefixes
    rows = Rows.take(workspace, 6).planned(3)
    ViewAttention(steps._view_attention, rows, steps.views, table.block_table, workspace)
    with pytest.raises(ValueError, match="no shared prefixes"):
        ViewAttention(steps.attention, rows, steps.views, table.block_table, workspace)


def prompt(num_tokens: int) -> list[int]:
    """The first prompt of a `ManualDriver`."""
    rng = random.Random(0)
    return [rng.randrange(LIMITS.vocab_size) for _ in range(num_tokens)]


def whole_prompt(tokens: Sequence[int]) -> StepPlan:
    """A step that computes tokens as a prompt."""
    sampling = SlotSampling(
        temperature=0.0,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        seed=0,
        stop_token_ids=(),
        num_prompt_tokens=len(tokens),
        max_length=LIMITS.max_model_len,
    )
    return StepPlan(
        step_id=0,
        assignments=(SlotAssignment(slot=0, sampling=sampling),),
        block_updates=(BlockUpdate(slot=0, first_index=0, block_ids=tuple(range(18))),),
        prefill=(PrefillChunk(slot=0, start=0, token_ids=tuple(tokens), next_token_id=None),),
        decode=(),
    )
