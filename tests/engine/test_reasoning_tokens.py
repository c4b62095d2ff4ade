"""Usage.reasoning_tokens: the tokens that begin inside the reasoning of an answer."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from drift_sdk import Completion, EngineConfig, SamplingParams
from drift_sdk.testing import EOS_TOKEN_ID, scripted_engine

USER = {"role": "user", "content": "Well?"}
THOUGHT = "\nHé, Stop.\n"
RAW = f" <think>{THOUGHT}</think>\n\nYes."
NUM_THOUGHT = len(THOUGHT.encode())  # a token is a byte
LIMITS = {"max_model_len": 4096, "kv_cache_tokens": 65_536}
THINKING = EngineConfig(reasoning_format="think", **LIMITS)


def counts(completion: Completion) -> tuple[str, int]:
    assert completion.usage.completion_tokens == len(completion.token_ids)
    return completion.reasoning, completion.usage.reasoning_tokens


@pytest.mark.parametrize("tokens_per_step", [1, 5])
async def test_tokens_between_the_markers_are_counted(tokens_per_step: int) -> None:
    async with scripted_engine(RAW, config=THINKING, tokens_per_step=tokens_per_step) as engine:
        assert counts(await engine.chat([USER])) == (THOUGHT.strip(), NUM_THOUGHT)
        assert counts(await engine.generate("Well?")) == ("", 0)
        for num_tokens in range(1, len(RAW.encode()) + 1):
            cut = await engine.chat([USER], max_tokens=num_tokens)
            num_inside = max(num_tokens - len(" <think>"), 0)  # an unfinished marker is reasoning
            is_closed = num_inside >= NUM_THOUGHT + len("</think>")
            assert cut.usage.reasoning_tokens == (NUM_THOUGHT if is_closed else num_inside)


@pytest.mark.parametrize("tokens_per_step", [1, 5])
async def test_tokens_of_a_stop_string_are_not_counted(tokens_per_step: int) -> None:
    async with scripted_engine(RAW, config=THINKING, tokens_per_step=tokens_per_step) as engine:
        found = await engine.chat([USER], SamplingParams(stop=("Stop", "es")))
        assert counts(found) == ("Hé,", len("\nHé, ".encode()))
        found = await engine.chat([USER], SamplingParams(stop=("es",)))
        assert (found.text, *counts(found)) == ("Y", THOUGHT.strip(), NUM_THOUGHT)


async def test_reasoning_that_the_prompt_has_opened_is_counted() -> None:
    config = THINKING.replace(chat_template="<think>")
    async with scripted_engine("Hm.</think>Yes.", config=config) as engine:
        assert counts(await engine.chat([USER])) == ("Hm.", 3)


async def test_a_character_that_the_end_cuts_off_is_counted_by_its_tokens() -> None:
    data = b"<think>a\xe2\x82</think>\xe2\x82\xac"

    def next_token(prompt_ids: Sequence[int], output_ids: Sequence[int], seed: int) -> int:
        return data[len(output_ids)] if len(output_ids) < len(data) else EOS_TOKEN_ID

    async with scripted_engine(next_token, config=THINKING) as engine:
        found = await engine.chat([USER])
        assert (found.text, *counts(found)) == ("\u20ac", "a\ufffd", 3)


async def test_reasoning_that_is_not_looked_for_is_not_counted() -> None:
    config = EngineConfig(reasoning_format=None, **LIMITS)
    async with scripted_engine(RAW, config=config) as engine:
        found = await engine.chat([USER])
        assert (found.text, *counts(found)) == (RAW, "", 0)


async def test_a_cancelled_request_has_the_tokens_so_far() -> None:
    async with scripted_engine("<think>" + "la " * 1000, config=THINKING, step_s=0.001) as engine:
        stream = engine.chat([USER], max_tokens=None)
        async for chunk in stream:
            if chunk.reasoning:
                break
        stream.cancel()
        found = await stream
        assert found.finish_reason == "cancelled"
        assert found.usage.reasoning_tokens == len(found.token_ids) - len("<think>") > 0
