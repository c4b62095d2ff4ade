"""What the drafter keeps, step after step, is what the draft gives on the whole true history at once."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import anyio
import pytest
import torch
from draft_zoo import make_draft
from model_zoo import make_model

import drift_sdk.opening
from drift_sdk import Chain, Engine, EngineConfig, SamplingParams, Speculation
from drift_sdk.execution.drafters import EagleDrafter, Span, state_of
from drift_sdk.models.attention import AttentionBatch, SequenceRows
from drift_sdk.models.decoder import Decoder
from drift_sdk.models.eagle3 import DraftDecoder
from drift_sdk.models.kv_cache import KVCache
from drift_sdk.steps import ExecutorLimits

BLOCK_SIZE = 8


class WatchedDrafter(EagleDrafter):
    """Notes what it holds after each step: seed, number of draft rows, newest hidden state, rows computed."""

    def __init__(self, draft: DraftDecoder, target: Decoder, limits: ExecutorLimits) -> None:
        super().__init__(draft, target, limits)
        self.draft, self.target = draft, target
        self.seen: list[tuple[int, int, torch.Tensor]] = []
        self.num_rows = 0

    def follow(self, spans: Sequence[Span], captured: Sequence[torch.Tensor], hidden: torch.Tensor) -> None:
        super().follow(spans, captured, hidden)
        for span in spans:
            state = state_of(span.slot)
            self.seen.append((span.slot.sampling.seed, state.num_rows, state.hidden.clone()))

    def _forward(self, features, tokens, rows) -> torch.Tensor:
        self.num_rows += len(tokens)
        return super()._forward(features, tokens, rows)


@torch.inference_mode()
def at_once(target: Decoder, draft: DraftDecoder, tokens: list[int]) -> torch.Tensor:
    """The draft's hidden state of every row of a token sequence, [len(tokens) - 1, H]."""

    def cache(config, num_layers: int) -> KVCache:
        return KVCache(
            num_layers, len(tokens) + 1, 1, config.num_kv_heads, config.head_dim, torch.float32, "cpu"
        )

    blocks = list(range(len(tokens) + 1))
    rows = [SequenceRows(blocks, 0, len(tokens) - 1)]
    target_cache, draft_cache = (
        cache(target.config, target.config.num_layers),
        cache(draft.config, draft.num_layers),
    )
    ids = torch.tensor(tokens)
    hidden, captured = target.forward(
        ids[:-1], AttentionBatch(rows, target_cache), target_cache, draft.boundaries
    )
    batch = AttentionBatch(rows, draft_cache, slot_offset=1)
    return draft.forward(draft.fuse(captured, hidden), ids[1:], batch, draft_cache)


@pytest.mark.parametrize("variant", ["reference", "speculators", "final hidden", "post norm", "deep"])
@pytest.mark.parametrize("kv_cache_tokens", [4096, 224])
def test_the_state_is_that_of_the_true_history(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variant: str, kv_cache_tokens: int
) -> None:
    make_model(1, tmp_path / "target")
    make_draft(variant, tmp_path / "draft", tmp_path / "target")
    drafters: list[WatchedDrafter] = []

    def open_drafter(config: EngineConfig, target: Decoder, limits: ExecutorLimits) -> EagleDrafter:
        drafters.append(WatchedDrafter(DraftDecoder.load(tmp_path / "draft", target), target, limits))
        return drafters[-1]

    monkeypatch.setattr(drift_sdk.opening, "open_drafter", open_drafter)
    rng = random.Random(11)
    shared = [rng.randrange(3, 300) for _ in range(40)]
    prompts = [
        shared[: rng.choice([0, 17, 40])] + [rng.randrange(3, 300) for _ in range(rng.randint(1, 30))]
        for _ in range(10)
    ]
    speculation = Speculation(draft=tmp_path / "draft", shape=Chain(3), adaptive=False)
    config = EngineConfig(
        dtype="float32",
        device="cpu",
        max_model_len=160,
        block_size=BLOCK_SIZE,
        kv_cache_tokens=kv_cache_tokens,
        prefill_token_budget=24,
        speculation=speculation,
    )
    histories: dict[int, list[int]] = {}

    async def main() -> int:
        num_preemptions = 0
        async with Engine(tmp_path / "target", config) as engine:

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
                # Alone and all cached: a hit costs one draft row more than the prompt's uncached tokens.
                for seed in range(10, 20):
                    before, prompt = drafters[0].num_rows, prompts[seed % 10]
                    num_cached = await ask(seed)
                    assert num_cached == (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE
                    seen = [rows for s, rows, _ in drafters[0].seen if s == seed]
                    assert min(seen) <= len(prompt)
                    assert drafters[0].num_rows > before
        return num_preemptions

    num_preemptions = anyio.run(main)
    assert (num_preemptions > 0) == (kv_cache_tokens == 224)
    (drafter,) = drafters
    expected = {seed: at_once(drafter.target, drafter.draft, tokens) for seed, tokens in histories.items()}
    assert len(drafter.seen) > 200
    for seed, num_rows, hidden in drafter.seen:
        if num_rows <= expected[seed].shape[0]:
            assert (expected[seed][num_rows - 1] - hidden).abs().max().item() < 1e-4, (seed, num_rows)
