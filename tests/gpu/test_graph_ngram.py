"""A real model in bfloat16: n-gram drafts do not change a bit of the output."""

from __future__ import annotations

import random
from collections.abc import Sequence

import anyio
import pytest
import smollm2

from drift_sdk import Chain, Completion, Engine, EngineConfig, EngineStats, NGram, SamplingParams, Speculation

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

NUM_TOKENS = 625
BATCH = 16
TASKS = (
    "Repeat this list word for word, five times: red, green, blue, yellow, violet, black, white.",
    "Write a for loop in Python that prints the numbers from one to ten, then the same in C, Go and Java.",
    "Count from one to two hundred.",
    "Tell me a story in which every chapter begins with the words: Once upon a time in the old harbour.",
)

Case = tuple[str, SamplingParams]


def cases() -> list[Case]:
    """Half greedy, half sampled; some texts repeat themselves, others do not."""
    rng = random.Random(5)
    ways: list[dict[str, float]] = [{}, {"temperature": 0.7, "top_p": 0.9}, {}, {"temperature": 1.0}]
    return [
        (
            f"<|im_start|>user\n{TASKS[index % 4]} ({index})<|im_end|>\n<|im_start|>assistant\n",
            SamplingParams(
                max_tokens=NUM_TOKENS,
                ignore_eos=True,
                seed=rng.randrange(2**62),
                logprobs=0,
                **ways[index // 4 % 4],
            ),
        )
        for index in range(BATCH)
    ]


def answers(speculation: Speculation | None, at_once: int) -> tuple[list[Completion], EngineStats]:
    """10,000 tokens of all requests together. at_once: requests that run at a time."""
    config = EngineConfig(
        device="cuda",
        executor="graph",
        dtype="bfloat16",
        max_num_seqs=at_once,
        max_model_len=1024,
        kv_cache_tokens=BATCH * 1024,
        speculation=speculation,
    )

    async def main() -> tuple[list[Completion], EngineStats]:
        async with Engine(smollm2.path(), config) as engine:
            streams = [engine.generate(*case) for case in cases()]
            return [await stream for stream in streams], engine.stats()

    return anyio.run(main)


@pytest.fixture(scope="module")
def plain() -> Sequence[Completion]:
    return answers(None, BATCH)[0]


@pytest.mark.parametrize("at_once", [1, BATCH])
def test_ngram_drafts_do_not_change_the_output(plain: Sequence[Completion], at_once: int) -> None:
    speculation = Speculation(draft=NGram(), shape=Chain(5), adaptive=False)
    found, stats = answers(speculation, at_once)
    assert sum(len(completion.token_ids) for completion in found) == 10_000
    for one, other in zip(found, plain, strict=True):
        assert one.token_ids == other.token_ids
        assert one.logprobs == other.logprobs
        assert one.text == other.text
    assert stats.speculation.acceptance_length > 1.5
    assert all(count > 0 for count in stats.speculation.acceptance_histogram)
