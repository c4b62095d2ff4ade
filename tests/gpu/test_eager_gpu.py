"""The eager executor on a GPU: the same engine, weights and caches on the device."""

from __future__ import annotations

import gc
import random
from pathlib import Path

import anyio
import pytest
import torch
from draft_zoo import make_draft
from model_zoo import NUM_MODELS, make_model

from drift_sdk import Chain, Completion, Engine, EngineConfig, NGram, SamplingParams, Speculation

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

NUM_TOKENS = 64


def gpu_config(**fields: object) -> EngineConfig:
    return EngineConfig(device="cuda", dtype="float32", executor="eager", max_model_len=256, **fields)


@torch.inference_mode()
def greedy_after(model, prompt: list[int], tokens: tuple[int, ...]) -> torch.Tensor:
    """transformers' log-probabilities before each of the tokens, [len(tokens), vocab]."""
    ids = torch.tensor([[*prompt, *tokens[:-1]]], device=model.device)
    logits = model(ids, use_cache=False).logits[0, len(prompt) - 1 :]
    return logits.float().log_softmax(-1)


@pytest.mark.parametrize("index", range(NUM_MODELS))
def test_greedy_tokens_equal_transformers(index: int, tmp_path: Path) -> None:
    """float32 on both sides. A token may differ only where transformers' two best tokens are within 1e-4."""
    model = make_model(index, tmp_path).to("cuda")
    generator = torch.Generator().manual_seed(index)
    prompts = [torch.randint(3, 300, (length,), generator=generator).tolist() for length in (1, 19, 70)]
    params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0)

    async def main() -> None:
        async with Engine(tmp_path, gpu_config(prefill_token_budget=32, block_size=8)) as engine:
            streams = [engine.generate(prompt, params) for prompt in prompts]
            for stream, prompt in zip(streams, prompts, strict=True):
                completion = await stream
                scores = greedy_after(model, prompt, completion.token_ids)
                chosen = scores.gather(1, torch.tensor(completion.token_ids, device="cuda")[:, None])[:, 0]
                assert (scores.max(-1).values - chosen).max().item() <= 1e-4
                found = torch.tensor([entry.logprob for entry in completion.logprobs], device="cuda")
                assert (found - chosen).abs().max().item() < 1e-3

    anyio.run(main)


@pytest.mark.parametrize("kv_cache_tokens", [16_384, 320])
def test_batched_requests_equal_single_ones(tmp_path: Path, kv_cache_tokens: int) -> None:
    make_model(0, tmp_path)
    rng = random.Random(5)
    cases = [
        (
            [rng.randrange(3, 500) for _ in range(rng.randint(1, 120))],
            SamplingParams(
                max_tokens=rng.randint(1, 40),
                temperature=rng.choice([0.0, 0.7, 1.0]),
                top_p=0.9,
                seed=index,
                ignore_eos=True,
            ),
        )
        for index in range(32)
    ]

    async def main() -> None:
        completions: dict[int, Completion] = {}
        async with Engine(tmp_path, gpu_config(max_num_seqs=1)) as engine:
            alone = [await engine.generate(prompt, params) for prompt, params in cases]
        config = gpu_config(max_num_seqs=12, kv_cache_tokens=kv_cache_tokens, prefill_token_budget=64)
        async with Engine(tmp_path, config) as engine:

            async def ask(index: int) -> None:
                completions[index] = await engine.generate(*cases[index])

            async with anyio.create_task_group() as tasks:
                for index in range(len(cases)):
                    tasks.start_soon(ask, index)
            for index, expected in enumerate(alone):
                assert completions[index].token_ids == expected.token_ids

    anyio.run(main)


def test_closed_engines_free_their_memory(tmp_path: Path) -> None:
    make_model(6, tmp_path)

    async def cycle() -> None:
        async with Engine(tmp_path, gpu_config()) as engine:
            await engine.generate([5, 6, 7], SamplingParams(max_tokens=8, temperature=1.0))

    def in_use() -> int:
        gc.collect()
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    anyio.run(cycle)  # the baseline includes what the first engine leaves: cuBLAS workspaces
    baseline = in_use()
    for _ in range(10):
        anyio.run(cycle)
    assert in_use() <= baseline


def test_real_model_in_bfloat16_names_paris() -> None:
    import smollm2

    async def main() -> None:
        async with Engine(smollm2.path(), EngineConfig(device="cuda")) as engine:
            messages = [{"role": "user", "content": "What is the capital of France?"}]
            completion = await engine.chat(messages, SamplingParams(max_tokens=32))
            assert "Paris" in completion.text

    anyio.run(main)


@pytest.mark.parametrize("draft", ["ngram", "reference", "speculators", "ids only"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_speculation_does_not_change_tokens(tmp_path: Path, draft: str, temperature: float) -> None:
    """In float32, with penalties, biases and prompt log-probabilities among the requests."""
    make_model(0, tmp_path / "target")
    if draft != "ngram":
        make_draft(draft, tmp_path / "draft", tmp_path / "target")
    speculation = Speculation(
        draft=NGram(min_length=1) if draft == "ngram" else tmp_path / "draft", shape=Chain(3), adaptive=False
    )
    rng = random.Random(8)
    cases = [
        (
            [rng.randrange(3, 40) for _ in range(rng.randint(1, 80))],
            SamplingParams(
                max_tokens=40,
                temperature=temperature,
                top_p=0.9,
                seed=index,
                ignore_eos=True,
                repetition_penalty=rng.choice([1.0, 1.3]),
                frequency_penalty=rng.choice([0.0, 0.5]),
                logit_bias={7: 2.0} if index % 3 == 0 else {},
                prompt_logprobs=1 if index % 4 == 0 else None,
            ),
        )
        for index in range(16)
    ]

    async def run_all(config: EngineConfig) -> list[Completion]:
        async with Engine(tmp_path / "target", config) as engine:
            streams = [engine.generate(prompt, params) for prompt, params in cases]
            return [await stream for stream in streams]

    plain = anyio.run(run_all, gpu_config(kv_cache_tokens=2048))
    found = anyio.run(run_all, gpu_config(kv_cache_tokens=1024, speculation=speculation))
    assert [c.token_ids for c in found] == [c.token_ids for c in plain]
    assert sum(c.speculation.num_drafted for c in found) > 0
