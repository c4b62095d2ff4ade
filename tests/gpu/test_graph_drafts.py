"""A real model in bfloat16: small models and n-grams beside drafts do not change a bit of the output."""

from __future__ import annotations

import json
import random
from pathlib import Path

import anyio
import pytest
import smollm2
import torch
from safetensors.torch import save_file

from drift_sdk import Chain, Completion, Engine, EngineConfig, EngineStats, NGram, SamplingParams, Speculation
from drift_sdk.families import read_spec
from drift_sdk.loading.source import resolve
from drift_sdk.models.draft_config import DraftConfig
from drift_sdk.models.draft_head import required_shapes

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

NUM_TOKENS, BATCH, NUM_DRAFTS = 300, 12, 4
SHARED = "<|im_start|>system\nYou answer at length, and repeat the question first.<|im_end|>\n"
TASKS = (
    "Repeat this list word for word, five times: red, green, blue, yellow, violet, black, white.",
    "Write a for loop in Python that prints the numbers from one to ten, then the same in C and Java.",
    "Tell me a story of an old harbour.",
)


def save_random_head(folder: Path, **options: int) -> Path:
    """An EAGLE-3 or P-EAGLE head of the model, with random weights. options: settings of its config."""
    target = resolve(smollm2.path()).config
    settings = target | {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1} | options
    settings["draft_vocab_size"] = settings["vocab_size"]
    settings.pop("quantization_config", None)
    config = DraftConfig.from_hf(settings, read_spec(target))
    generator = torch.Generator().manual_seed(3)
    tensors = {
        name: torch.ones(shape) if len(shape) == 1 else 0.02 * torch.randn(shape, generator=generator)
        for name, shape in required_shapes(config).items()
    }
    save_file({name: tensor.bfloat16() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


def answers(speculation: Speculation | None) -> tuple[list[Completion], EngineStats]:
    """Requests of which half are greedy, that are more than the slots, and of which one is cancelled."""
    config = EngineConfig(
        device="cuda",
        executor="graph",
        dtype="bfloat16",
        max_num_seqs=8,
        max_model_len=1024,
        kv_cache_tokens=4096,  # so few that sequences are preempted
        speculation=speculation,
    )
    rng = random.Random(5)

    async def main() -> tuple[list[Completion], EngineStats]:
        async with Engine(smollm2.path(), config) as engine:
            streams = [
                engine.generate(
                    f"{SHARED}<|im_start|>user\n{TASKS[index % 3]} ({index})<|im_end|>\n"
                    "<|im_start|>assistant\n",
                    SamplingParams(
                        max_tokens=rng.randint(NUM_TOKENS // 2, NUM_TOKENS),
                        ignore_eos=True,
                        seed=index,
                        logprobs=0,
                        temperature=index % 2,
                        stop_token_ids=(17,) if index % 5 == 4 else (),
                    ),
                )
                for index in range(BATCH)
            ]
            other = engine.generate("Once upon a time", SamplingParams(max_tokens=400))
            async with other as stream:
                async for _ in stream:
                    break
            return [await stream for stream in streams], engine.stats()

    return anyio.run(main)


@pytest.mark.parametrize("kind", ["itself", "itself and ngrams", "head and ngrams", "masks and ngrams"])
def test_drafts_do_not_change_the_output(kind: str, tmp_path: Path) -> None:
    plain, _ = answers(None)
    heads: dict[str, dict[str, int]] = {"head and ngrams": {}, "masks and ngrams": {"mask_token_id": 2}}
    draft = save_random_head(tmp_path, **heads[kind]) if kind in heads else smollm2.path()
    ngrams = NGram() if kind.endswith("and ngrams") else None
    speculation = Speculation(draft=draft, ngrams=ngrams, shape=Chain(NUM_DRAFTS), adaptive=False)
    found, stats = answers(speculation)
    for one, other in zip(found, plain, strict=True):
        assert one.token_ids == other.token_ids
        assert one.logprobs == other.logprobs
        assert (one.text, one.finish_reason) == (other.text, other.finish_reason)
    counts = stats.speculation
    print(kind, counts, stats.num_preemptions)  # noqa: T201 - shown on failure, or with -s
    assert counts.num_rounds > 100
    assert (counts.num_ngram_rounds > 0) == (ngrams is not None)
    if kind == "itself":
        # Drafts can differ from the model only because prompts are computed by other kernels.
        assert counts.num_accepted > 0.8 * counts.num_drafted
    else:
        assert 0 < counts.num_ngram_accepted <= counts.num_ngram_drafted
