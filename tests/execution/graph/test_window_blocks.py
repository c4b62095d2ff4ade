"""The graph executor with blocks of their own for layers with windows, against the eager executor, in which
all layers share their blocks. Memory that was never written holds NaN."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from interpreted_device import InterpretedDevice
from lockstep_devices import Lockstep
from msgspec.structs import replace
from scheduled_run import run_scheduled, sampling_of
from slow_cases import slow_rows_after
from tolerances import bound

from drift_sdk._kernels.attention.exact_prefill import exact_prefill_attention, exact_prefill_config
from drift_sdk._kernels.attention.layer_attention import LayerAttention, LayerKV
from drift_sdk._kernels.attention.prefill import prefill_tiles
from drift_sdk._kernels.gemm.tuning import TunedTable
from drift_sdk.execution.drafter_factory import NGramDrafterFactory
from drift_sdk.execution.eager.eager_executor import EagerExecutor
from drift_sdk.execution.graph.gpu_graphs import GpuModel, GraphOptions
from drift_sdk.execution.graph.graph_executor import GraphExecutor, ParallelExecutor
from drift_sdk.families import read_spec
from drift_sdk.loading.tensors import TensorSource
from drift_sdk.models.decoder import Decoder, random_tensors
from drift_sdk.models.shard import Shard, cut_head, load_shard
from drift_sdk.scheduling.blocks import WindowBlocks
from drift_sdk.scheduling.planning import least_window_blocks
from drift_sdk.speculation import NGram
from drift_sdk.startup.sizing import ATTENTION_TILE
from drift_sdk.steps import ExecutorLimits, SlotSampling, StepPlan, StepResult

pytestmark = [
    pytest.mark.kernel,
    pytest.mark.skipif(torch.cuda.is_available(), reason="for the interpreter: kernels run on the CPU"),
]

WINDOW, BUDGET, NUM_DRAFTS = 20, 48, 3
CONFIG = {
    "model_type": "gemma3_text",
    "vocab_size": 120,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "sliding_window": WINDOW,
    "max_position_embeddings": 512,
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
    },
}
LOGPROB_BOUND = bound(16.0, inner=80, depth=12)

Request = tuple[list[int], SlotSampling]
Outputs = list[tuple[StepPlan, StepResult]]


def limits_of(block_size: int, window: int) -> ExecutorLimits:
    """Blocks for three sequences of 256 tokens, and for two windows and the chunks in flight."""
    num_window_blocks = 0
    if window:
        each = least_window_blocks(window, block_size, 1 + NUM_DRAFTS)
        num_window_blocks = 2 * each + -(-2 * BUDGET // block_size)
    return ExecutorLimits(
        vocab_size=120,
        max_num_seqs=3,
        max_model_len=256,
        num_blocks=3 * 256 // block_size,
        block_size=block_size,
        num_window_blocks=num_window_blocks,
    )


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return Decoder.random(read_spec(CONFIG), device="cpu", dtype=torch.float32, seed=3)


def requests_of(num_tokens: int) -> list[Request]:
    """Prompts longer and shorter than the window; three of them begin alike."""
    rng = random.Random(5)

    def tokens(number: int) -> list[int]:
        return [rng.randrange(3, 120) for _ in range(number)]

    shared, repeated = tokens(130), tokens(5) * 8
    prompts = [[*shared, *tokens(12)], tokens(3), [*shared, *tokens(30)], repeated, [*shared, *tokens(40)]]
    return [(prompt, sampling_of(len(prompt), num_tokens, num_logprobs=1)) for prompt in prompts]


def run(
    executor: EagerExecutor | GraphExecutor | ParallelExecutor,
    requests: list[Request],
    window: int,
    num_drafts: int,
) -> tuple[list[list[int]], Outputs]:
    steps: Outputs = []
    tokens = run_scheduled(
        executor,
        requests,
        prefill_token_budget=BUDGET,
        draft_choices=(0, num_drafts) if num_drafts else (),
        wants_history=num_drafts > 0,
        window=window,
        on_step=lambda plan, result: steps.append((plan, result)),
    )
    executor.close()
    return tokens, steps


def graph_run(
    decoder: Decoder,
    requests: list[Request],
    block_size: int,
    window: int,
    num_drafts: int = 0,
    **options: bool,
) -> tuple[list[list[int]], Outputs]:
    factory = (
        {"drafter_factory": NGramDrafterFactory(NGram(min_length=1), (num_drafts,))} if num_drafts else {}
    )
    executor = GraphExecutor(
        InterpretedDevice(),
        decoder,
        limits_of(block_size, window),
        TunedTable(),
        GraphOptions(prefill_token_budget=BUDGET, **options),
        **factory,
    )
    return run(executor, requests, window, num_drafts)


def logprobs_of(steps: Outputs) -> list[float]:
    """Of all tokens, in order of their values: steps may differ in who takes part in them."""
    outputs = [output for _, result in steps for output in (*result.prefill, *result.decode)]
    return sorted(entry.logprob for output in outputs for entry in output.logprobs or ())


@pytest.mark.parametrize(
    "block_size, num_drafts, fast_prompts",
    slow_rows_after(
        1, [(64, NUM_DRAFTS, False), (16, 0, False), (64, 0, True), (16, NUM_DRAFTS, False), (16, 0, True)]
    ),
)
def test_tokens_equal_those_of_shared_blocks(
    decoder: Decoder, block_size: int, num_drafts: int, fast_prompts: bool
) -> None:
    requests = requests_of(8)
    expected, expected_steps = run(EagerExecutor(decoder, limits_of(block_size, 0)), requests, 0, 0)
    window = WINDOW + (ATTENTION_TILE - 1 if block_size < ATTENTION_TILE else 0)
    tokens, steps = graph_run(decoder, requests, block_size, window, num_drafts, fast_prompts=fast_prompts)
    assert tokens == expected
    found, wanted = logprobs_of(steps), logprobs_of(expected_steps)
    assert found == pytest.approx(wanted, abs=LOGPROB_BOUND)

    plans = [plan for plan, _ in steps]
    firsts = [plan.prefill[0].start for plan in plans if plan.assignments and plan.prefill]
    assert max(firsts) >= 128  # a hit behind the window
    used = {block for plan in plans for update in plan.window_updates for block in update.block_ids}
    placed = sum(len(update.block_ids) for plan in plans for update in plan.window_updates)
    assert placed > len(used)  # blocks were recycled
    if num_drafts:
        outputs = [output for _, result in steps for output in result.decode]
        drafted, accepted = (
            sum(output.num_drafted for output in outputs),
            sum(output.num_accepted for output in outputs),
        )
        assert drafted > accepted > 0


def test_the_eager_executor_has_the_same_tokens(decoder: Decoder) -> None:
    requests = requests_of(8)
    expected, _ = run(EagerExecutor(decoder, limits_of(16, 0)), requests, 0, 0)
    tokens, _ = run(EagerExecutor(decoder, limits_of(16, WINDOW)), requests, WINDOW, 0)
    assert tokens == expected


def test_a_tile_before_the_window_is_read() -> None:
    """Attention of chunks reads keys from the tile's first one on, so that these have to be kept; nothing
    before them is read."""
    size, start, num_rows = 16, 100, 8
    generator = torch.Generator().manual_seed(0)
    query, kept, values = (
        torch.randn(shape, generator=generator)
        for shape in ((num_rows, 2, 16), (8, 1, size, 16), (8, 1, size, 16))
    )
    tiles = torch.empty(1, 4, dtype=torch.int32)
    config = exact_prefill_config(16, torch.float32)
    prefill_tiles([(0, start, num_rows)], config.tile_rows, tiles.numpy())

    def attend(num_lost: int) -> torch.Tensor:
        """The rows' output if so many blocks at the beginning were never written."""
        keys = kept.clone()
        keys[:num_lost] = torch.nan
        lost = values.clone()
        lost[:num_lost] = torch.nan
        out = torch.empty_like(query)
        layer = LayerAttention(
            query=query,
            out=out,
            kv=LayerKV(keys, lost),
            block_table=torch.arange(8, dtype=torch.int32)[None],
            window=WINDOW,
            scale=None,
            sinks=None,
            index=0,
        )
        exact_prefill_attention(layer, tiles, config, layer.partitions)
        return out

    blocks_before = (start - (WINDOW + ATTENTION_TILE - 1) + 1) // size
    assert blocks_before == 1
    assert attend(0).isfinite().all()
    assert torch.equal(attend(blocks_before), attend(0))
    assert not attend((start - WINDOW + 1) // size).isfinite().all()


@pytest.mark.slow
def test_a_block_recycled_too_early_is_found(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """With so few blocks that it is written at once: the same tokens without the fault."""
    requests = requests_of(8)
    few = replace(limits_of(64, WINDOW), num_window_blocks=4)
    expected, _ = run(EagerExecutor(decoder, limits_of(64, 0)), requests, 0, 0)
    options = GraphOptions(prefill_token_budget=BUDGET)

    def tokens() -> list[list[int]]:
        executor = GraphExecutor(InterpretedDevice(), decoder, few, TunedTable(), options)
        return run(executor, requests, WINDOW, 0)[0]

    assert tokens() == expected
    first_block = WindowBlocks.first_block
    monkeypatch.setattr(WindowBlocks, "first_block", lambda self, at: first_block(self, at + 64))
    monkeypatch.setattr(WindowBlocks, "num_resumable", lambda self, nodes: 0)
    monkeypatch.setattr(WindowBlocks, "check_integrity", lambda self, running: None)
    assert tokens() != expected


@pytest.mark.slow
def test_a_model_on_two_gpus_has_the_tokens_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    spec = read_spec(CONFIG | heads | {"hidden_size": 64, "intermediate_size": 128})
    placement: dict[str, Any] = {"device": torch.device("cpu"), "dtype": torch.float32}

    def tensors() -> TensorSource:
        return random_tensors(spec, **placement)

    requests = requests_of(3)[:3]
    expected, _ = graph_run(Decoder.load(spec, tensors(), **placement), requests, 64, WINDOW)
    group, models = Lockstep(2, monkeypatch), []
    for device in group.devices:
        shard = Shard(rank=device.rank, size=2)
        part = load_shard(spec, tensors(), shard, **placement)
        cut_head(part, shard)
        models.append(GpuModel(device=device, decoder=part, tuned=TunedTable()))
    executor = ParallelExecutor(models, limits_of(64, WINDOW), GraphOptions(prefill_token_budget=BUDGET))
    tokens, steps = run(executor, requests, WINDOW, 0)
    assert tokens == expected
    assert sum(len(plan.window_updates) for plan, _ in steps) > len(requests)
