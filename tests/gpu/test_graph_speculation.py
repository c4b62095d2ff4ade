"""Speculation on the graph executor does not change a bit of the output, whatever is drafted."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from random_folder import make_random_draft_folder, make_random_folder

from drift_sdk import Chain, Completion, Engine, EngineConfig, JsonSchema, NGram, SamplingParams, Speculation
from drift_sdk.execution.drafter_factory import NGramDrafterFactory
from drift_sdk.execution.graph.graph_executor import GraphExecutor
from drift_sdk.execution.rounds.drafters import RoundDrafter
from drift_sdk.steps import StepPlan

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

MAX_SEQS, MAX_MODEL_LEN = 64, 2304
LLAMA_8B = {
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
BATCHES = {1: 2000, 4: 500, 64: 32}
"""Number of requests that run together, and tokens of each."""
GREEDY, SAMPLED = 0, 1
"""How the first request of a batch is decoded; batches of several requests have both kinds."""
KINDS = [(1, GREEDY), (1, SAMPLED), (4, GREEDY), (64, GREEDY)]

Kind = tuple[int, int]
Case = tuple[list[int], SamplingParams]


class Oracle:
    """A RoundDrafter that drafts the tokens of plain decoding, a share `corruption` of them wrong.

    stories [MAX_SEQS, MAX_MODEL_LEN] int64: the tokens of each slot's sequence.
    """

    aux_layers: Sequence[int] = ()
    kv_cache = None
    is_ngram = None

    def __init__(self) -> None:
        self.stories = torch.zeros(MAX_SEQS, MAX_MODEL_LEN, dtype=torch.int64, device="cuda")
        self.corruption = torch.zeros((), device="cuda")
        self.known: dict[int, torch.Tensor] = {}

    def propose(self, rows: Any, *, num_slots: int, num_draft_tokens: int) -> None:
        if num_draft_tokens == 0:
            return

        slot, position = (column.view(num_slots, -1)[:, 1:].long() for column in (rows.slot, rows.position))
        token = self.stories[slot.clamp(min=0), position.clamp(max=MAX_MODEL_LEN - 1)]
        is_wrong = (position * 7919 + slot * 104_729) % 1009 < self.corruption * 1009
        token = torch.where(is_wrong, (token + 1) % LLAMA_8B["vocab_size"], token)
        rows.token.view(num_slots, -1)[:, 1:].copy_(token)

    def draft_extend(self, verified: Any) -> None:
        pass

    def draft_extend_prefill(self, chunks: Any) -> None:
        pass

    def learn(self, cases: Sequence[Case], completions: Sequence[Completion]) -> None:
        for (prompt, params), completion in zip(cases, completions, strict=True):
            assert params.seed is not None
            self.known[params.seed] = torch.tensor([*prompt, *completion.token_ids], device="cuda")
        torch.cuda.synchronize()

    def watch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Become the drafter of all engines; recognise the sequence that enters a slot by its seed."""
        launch: Callable[[GraphExecutor, StepPlan], None] = GraphExecutor.launch

        def watched(executor: GraphExecutor, plan: StepPlan) -> None:
            with executor._device.work():
                for assignment in plan.assignments:
                    story = self.known[assignment.sampling.seed]
                    self.stories[assignment.slot, : len(story)].copy_(story)
            launch(executor, plan)

        monkeypatch.setattr(GraphExecutor, "launch", watched)
        monkeypatch.setattr(NGramDrafterFactory, "round_drafter", lambda *_: self)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_folder(tmp_path_factory.mktemp("8b"), "llama", **LLAMA_8B)


def engine_of(folder: Path, speculation: Speculation | None, **fields: Any) -> Engine:
    config = EngineConfig(
        device="cuda",
        executor="graph",
        load="random",
        max_num_seqs=MAX_SEQS,
        max_model_len=MAX_MODEL_LEN,
        speculation=speculation,
        **{"kv_cache_tokens": 16_384, **fields},
    )
    return Engine(folder, config)


def cases_of(kind: Kind) -> list[Case]:
    batch, first = kind
    rng = random.Random(batch + 1000 * first)
    ways: list[dict[str, Any]] = [
        {},
        {"temperature": 0.8, "top_p": 0.9},
        {"repetition_penalty": 1.2, "frequency_penalty": 0.3},
        {"temperature": 1.0, "top_k": 50, "logprobs": 2},
    ]
    return [
        (
            [rng.randrange(3, 128_000) for _ in range(rng.choice((1, 30, 64, 129)))],
            SamplingParams(
                max_tokens=BATCHES[batch],
                ignore_eos=True,
                seed=rng.randrange(2**62),
                **ways[(index + first) % len(ways)],
            ),
        )
        for index in range(batch)
    ]


async def at_once(engine: Engine, cases: Sequence[Case]) -> list[Completion]:
    streams = [engine.generate(*case) for case in cases]
    return [await stream for stream in streams]


def assert_same(found: Sequence[Completion], expected: Sequence[Completion]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.token_ids == other.token_ids
        assert one.logprobs == other.logprobs
        assert (one.text, one.finish_reason) == (other.text, other.finish_reason)


@pytest.fixture(scope="module")
def plain(folder: Path) -> dict[Kind, list[Completion]]:
    async def main() -> dict[Kind, list[Completion]]:
        async with engine_of(folder, None) as engine:
            return {kind: await at_once(engine, cases_of(kind)) for kind in KINDS}

    return anyio.run(main)


@pytest.mark.xdist_group("8b, oracle")  # tests of a group do not run together: the GPU has no room for that
@pytest.mark.parametrize("num_draft_tokens", [1, 3, 5])
def test_oracle_drafts_do_not_change_the_output(
    folder: Path, plain: dict[Kind, list[Completion]], num_draft_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16, greedy and sampled, with so many wrong drafts that every acceptance length occurs."""
    oracle = Oracle()
    oracle.watch(monkeypatch)
    for kind, completions in plain.items():
        oracle.learn(cases_of(kind), completions)

    async def main() -> None:
        shape = Chain(num_draft_tokens)
        speculation = Speculation(draft=NGram(), shape=shape, adaptive=False)
        async with engine_of(folder, speculation) as engine:
            for corruption in (0.0, 0.2, 0.5):
                oracle.corruption.fill_(corruption)
                for kind in KINDS:
                    found = await at_once(engine, cases_of(kind))
                    assert_same(found, plain[kind])
            stats = engine.stats().speculation
            assert all(count > 0 for count in stats.acceptance_histogram)
            assert stats.acceptance_length > 1 + 0.4 * num_draft_tokens

    anyio.run(main)


@pytest.mark.parametrize(
    "draft",
    [
        pytest.param("ngram", marks=pytest.mark.xdist_group("8b, n-grams")),
        pytest.param("eagle", marks=pytest.mark.xdist_group("8b, eagle")),
    ],
)
@pytest.mark.parametrize("num_draft_tokens", [1, 3, 5])
def test_real_drafts_do_not_change_the_output(
    folder: Path, plain: dict[Kind, list[Completion]], draft: str, num_draft_tokens: int, tmp_path: Path
) -> None:
    """Requests are admitted and cancelled while others decode."""
    if draft == "eagle":
        make_random_draft_folder(tmp_path, folder)

    async def main() -> None:
        speculation = Speculation(
            draft=NGram(min_length=1) if draft == "ngram" else tmp_path,
            shape=Chain(num_draft_tokens),
            adaptive=False,
        )
        async with engine_of(folder, speculation) as engine:
            for kind in KINDS:
                cases = cases_of(kind)
                streams = [engine.generate(*case) for case in cases]
                others = [engine.generate([5, 6, 7 + n], SamplingParams(max_tokens=400)) for n in range(3)]
                async with others[0] as stream:
                    async for _ in stream:
                        break
                found = [await stream for stream in streams]
                assert_same(found, plain[kind])
                for other in others[1:]:
                    other.cancel()
            assert engine.stats().num_draft_rounds > 100

    anyio.run(main)


@pytest.mark.xdist_group("8b, eagle")
def test_drafts_with_stops_and_grammars_do_not_change_the_output(folder: Path) -> None:
    pytest.importorskip("llguidance")
    rng = random.Random(3)
    cases: list[Case] = [
        ([5, 6, 7], SamplingParams(max_tokens=60, seed=1, stop_token_ids=tuple(range(0, 128_000, 2000)))),
        ([5, 6], SamplingParams(max_tokens=60, temperature=1.0, seed=2, stop=("a", "e"))),
        ([9], SamplingParams(max_tokens=40, grammar=JsonSchema({"type": "boolean"}), seed=4)),
        ([rng.randrange(3, 9000) for _ in range(20)] * 5, SamplingParams(max_tokens=80, min_tokens=20)),
    ]

    async def main(speculation: Speculation | None) -> list[Completion]:
        async with engine_of(folder, speculation) as engine:
            return await at_once(engine, cases)

    expected = anyio.run(main, None)
    speculation = Speculation(draft=NGram(min_length=1), shape=Chain(4), adaptive=False)
    assert_same(anyio.run(main, speculation), expected)


def test_oracle_is_a_round_drafter() -> None:
    drafter: RoundDrafter = Oracle()
    assert drafter.aux_layers == ()
