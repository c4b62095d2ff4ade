"""Engines of models with experts: transformers' tokens, whatever else runs and however prompts are divided.

On a CPU the bits of a row depend on the other rows. A near tie between tokens, or between the last expert
that is chosen and the next one, could be decided either way, so prompts are chosen that lead to none.
"""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest
from expert_cases import LOGPROB_BOUND, NUM_TOKENS, clear_cases, make_folder
from expert_zoo import EXPERT_MODELS
from slow_cases import slow_after

from drift_sdk import Chain, Engine, EngineConfig, NGram, SamplingParams, Speculation


@pytest.mark.parametrize("name", slow_after(1, [*EXPERT_MODELS, "mxfp4"]))
def test_tokens_equal_transformers_alone_and_together(name: str, tmp_path: Path) -> None:
    """Alone; then all at once, in small chunks, with drafts and cached prefixes."""
    model, folder = make_folder(name, tmp_path)
    params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0)
    cases = clear_cases(model)
    config = {"dtype": "float32", "device": "cpu", "max_model_len": 256}

    async def main() -> None:
        async with Engine(folder, EngineConfig(**config, max_num_seqs=1)) as engine:
            for prompt, tokens, logprobs in cases:
                completion = await engine.generate(prompt, params)
                assert list(completion.token_ids) == tokens
                for entry, logprob in zip(completion.logprobs, logprobs, strict=True):
                    assert abs(entry.logprob - logprob) < LOGPROB_BOUND

        drafts = Speculation(draft=NGram(min_length=1), shape=Chain(3), adaptive=False)
        together = EngineConfig(**config, prefill_token_budget=16, block_size=8, speculation=drafts)
        async with Engine(folder, together) as engine:
            streams = [engine.generate(prompt, params) for prompt, _, _ in cases]
            completions = [await stream for stream in streams]
        assert [list(completion.token_ids) for completion in completions] == [
            tokens for _, tokens, _ in cases
        ]
        assert sum(completion.speculation.num_drafted for completion in completions) > 0

    anyio.run(main)
