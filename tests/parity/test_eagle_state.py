"""The eager EAGLE drafter's state after each step equals the draft's output on the whole sequence at once."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import anyio
import pytest
import torch
from draft_pass import whole_pass
from draft_zoo import make_draft
from model_zoo import make_model
from slow_cases import slow_rows_after
from tolerances import assert_near

from drift_sdk import Chain, Engine, EngineConfig, SamplingParams, Speculation
from drift_sdk.execution.drafter_factory import EagleDrafterFactory
from drift_sdk.execution.eager.drafters import EagleDrafter, Span, state_of
from drift_sdk.models.attention import AttentionBatch
from drift_sdk.models.decoder import Decoder
from drift_sdk.models.draft_head import DraftDecoder
from drift_sdk.steps import ExecutorLimits

BLOCK_SIZE = 8


class WatchedDrafter(EagleDrafter):
    """Records its state after each step.

    seen:        seed, number of draft rows and newest hidden state of each slot.
    num_rows:    draft rows computed so far.
    first_rows:  draft rows computed in the first step of a request that ran alone, by seed.
    """

    def __init__(self, draft: DraftDecoder, target: Decoder, limits: ExecutorLimits) -> None:
        super().__init__(draft, target, limits)
        self.draft, self.target = draft, target
        self.seen: list[tuple[int, int, torch.Tensor]] = []
        self.num_rows = 0
        self.first_rows: dict[int, int] = {}

    def draft_extend(
        self, spans: Sequence[Span], aux_hidden: Sequence[torch.Tensor], hidden: torch.Tensor
    ) -> None:
        before = self.num_rows
        super().draft_extend(spans, aux_hidden, hidden)
        for span in spans:
            state = state_of(span.slot)
            self.seen.append((span.slot.sampling.seed, state.num_rows, state.hidden.clone()))
        if len(spans) == 1:
            self.first_rows.setdefault(spans[0].slot.sampling.seed, self.num_rows - before)

    def _forward(self, features, tokens, rows) -> torch.Tensor:
        self.num_rows += len(tokens)
        return super()._forward(features, tokens, rows)


class PositionOff(WatchedDrafter):
    """Fault: positions above 3 are one too high."""

    def _forward(self, features, tokens, rows) -> torch.Tensor:
        with pytest.MonkeyPatch.context() as patch:
            original = AttentionBatch.__init__

            def shifted(batch, *args, **kwargs) -> None:
                original(batch, *args, **kwargs)
                batch.positions = batch.positions + (batch.positions > 3)

            patch.setattr(AttentionBatch, "__init__", shifted)
            return super()._forward(features, tokens, rows)


class FeatureOff(WatchedDrafter):
    """Fault: features belong to the row before."""

    def draft_extend(self, spans, aux_hidden, hidden) -> None:
        super().draft_extend(spans, [tensor.roll(1, 0) for tensor in aux_hidden], hidden.roll(1, 0))


class StaleDraftKV(WatchedDrafter):
    """Fault: KV computed from the draft's own outputs is kept when the target's features are known."""

    def draft_extend(self, spans, aux_hidden, hidden) -> None:
        kept = [tensor.clone() for tensor in self._cache.tensors]
        super().draft_extend(spans, aux_hidden, hidden)
        for span in spans:
            if len(span.next_token_ids) > 1 and span.start > 30:
                for tensor, old in zip(self._cache.tensors, kept, strict=True):
                    tensor.copy_(old)


class RewindOneShort(WatchedDrafter):
    """Fault: a token other than the last emitted one is taken as part of the sequence."""

    def draft_extend(self, spans, aux_hidden, hidden) -> None:
        longer = [
            Span(
                s.slot,
                s.start,
                s.token_id,
                (*s.next_token_ids[:-1], (s.next_token_ids[-1] + 1) % 300),
                s.rows,
            )
            for s in spans
        ]
        super().draft_extend(longer, aux_hidden, hidden)


@pytest.mark.slow
@pytest.mark.parametrize("fault", [PositionOff, FeatureOff, StaleDraftKV, RewindOneShort])
def test_planted_fault_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: type[WatchedDrafter]
) -> None:
    with pytest.raises(AssertionError):
        check(tmp_path, monkeypatch, "reference", 4096, fault)


@pytest.mark.parametrize(
    ("kv_cache_tokens", "variant"),
    slow_rows_after(
        2,
        [
            *((224, variant) for variant in ("reference", "deep")),
            *(
                (4096, variant)
                for variant in ("reference", "speculators", "final hidden", "post norm", "deep")
            ),
        ],
    ),
)
def test_state_equals_a_pass_over_the_whole_sequence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kv_cache_tokens: int, variant: str
) -> None:
    check(tmp_path, monkeypatch, variant, kv_cache_tokens, WatchedDrafter)


def check(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    variant: str,
    kv_cache_tokens: int,
    drafter_class: type[WatchedDrafter],
) -> None:
    """Run requests with a drafter of this class and compare all states it has seen."""
    make_model(1, tmp_path / "target")
    make_draft(variant, tmp_path / "draft", tmp_path / "target")
    drafters: list[WatchedDrafter] = []

    def eager_drafter(factory: EagleDrafterFactory, target: Decoder, limits: ExecutorLimits) -> EagleDrafter:
        drafters.append(drafter_class(factory.draft, target, limits))
        return drafters[-1]

    monkeypatch.setattr(EagleDrafterFactory, "eager_drafter", eager_drafter)
    histories, num_preemptions = anyio.run(run_requests, tmp_path, kv_cache_tokens, drafters)
    assert (num_preemptions > 0) == (kv_cache_tokens == 224)
    (drafter,) = drafters
    expected = {seed: whole_pass(drafter.target, drafter.draft, tokens) for seed, tokens in histories.items()}
    assert len(drafter.seen) > 200
    depth = drafter.target.spec.num_layers + drafter.draft.num_layers + 1
    for seed, num_rows, hidden in drafter.seen:
        if num_rows <= expected[seed].shape[0]:
            name = f"{num_rows} rows of seed {seed}"
            assert_near(hidden, expected[seed][num_rows - 1], inner=192, depth=depth, name=name)


async def run_requests(
    folder: Path, kv_cache_tokens: int, drafters: list[WatchedDrafter]
) -> tuple[dict[int, list[int]], int]:
    """Run requests together, and in the large cache again alone. Returns prompt and output tokens by seed,
    and the number of preemptions of the first run."""
    rng = random.Random(11)
    shared = [rng.randrange(3, 300) for _ in range(40)]
    prompts = [
        shared[: rng.choice([0, 17, 40])] + [rng.randrange(3, 300) for _ in range(rng.randint(1, 30))]
        for _ in range(10)
    ]
    config = EngineConfig(
        dtype="float32",
        device="cpu",
        max_model_len=160,
        block_size=BLOCK_SIZE,
        kv_cache_tokens=kv_cache_tokens,
        prefill_token_budget=24,
        speculation=Speculation(draft=folder / "draft", shape=Chain(3), adaptive=False),
    )
    histories: dict[int, list[int]] = {}
    async with Engine(folder / "target", config) as engine:

        async def ask(seed: int) -> int:
            prompt = prompts[seed % len(prompts)]
            params = SamplingParams(max_tokens=30, ignore_eos=True, seed=seed, temperature=0.8)
            completion = await engine.generate(prompt, params)
            histories[seed] = [*prompt, *completion.token_ids]
            return completion.usage.cached_tokens

        async with anyio.create_task_group() as tasks:
            for seed in range(10):
                tasks.start_soon(ask, seed)
        num_preemptions = engine.stats().num_preemptions
        if kv_cache_tokens == 4096:
            # Alone, with cached prompts: a hit costs one more draft row than the prompt has uncached tokens.
            for seed in range(10, 20):
                prompt = prompts[seed % 10]
                num_cached = await ask(seed)
                assert num_cached == (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE
                num_rows = len(prompt) - num_cached + (num_cached > 0)
                assert drafters[0].first_rows[seed] == num_rows
    return histories, num_preemptions
