"""A budget of reasoning in an engine: the tokens are the model's own up to the end that is forced, and from
it on, alone and in a batch, with drafts and without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest
from asgi_calls import call
from model_zoo import logprob_bound, make_model
from near_ties import no_near_ties
from slow_cases import slow_after

import drift_sdk.openai
from drift_sdk import (
    Chain,
    Completion,
    Engine,
    EngineConfig,
    JsonSchema,
    NGram,
    RequestError,
    SamplingParams,
    Speculation,
)
from drift_sdk.sampling_params import check_needs_no_host

MODEL = 0
SEED = 200  # of cases without near ties
BUDGETS = (0, 1, 2, 7, 20)
THINKING = "{% for m in messages %}{{ m['content'] }}{% endfor %}<think>"
QUESTIONS = ("one two three one two", "abc abc abc", "How?", "7 7 7 7 7", "Well")
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_model(MODEL, folder)
    (folder / "chat_template.jinja").write_text(THINKING)
    return folder


def config_of(**fields: Any) -> EngineConfig:
    limits = {"max_model_len": 256, "block_size": 8}
    return EngineConfig(dtype="float32", device="cpu", reasoning_format="think", **limits, **fields)


def asked(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def params_of(index: int, temperature: float) -> SamplingParams:
    return SamplingParams(
        max_tokens=48,
        temperature=temperature,
        seed=SEED + index,
        ignore_eos=True,
        thinking_budget=BUDGETS[index],
    )


async def run(config: EngineConfig, folder: Path, temperature: float, *, alone: bool) -> list[Completion]:
    """A conversation for each budget, and one without a budget beside each."""
    completions: dict[int, Completion] = {}
    async with Engine(folder, config) as engine:

        async def ask(index: int) -> None:
            params = params_of(index % len(BUDGETS), temperature)
            if index >= len(BUDGETS):
                params = params.replace(thinking_budget=None)
            completions[index] = await engine.chat(asked(QUESTIONS[index % len(BUDGETS)]), params)

        async with anyio.create_task_group() as tasks:
            for index in range(2 * len(BUDGETS)):
                if alone:
                    await ask(index)
                else:
                    tasks.start_soon(ask, index)
        if config.speculation is not None:
            stats = engine.stats()
            assert stats.speculation is not None and stats.speculation.num_accepted > 0
    return [completions[index] for index in range(2 * len(BUDGETS))]


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[float, list[Completion]]:
    with no_near_ties(logprob_bound(MODEL)):
        return {
            temperature: anyio.run(lambda t=temperature: run(config_of(), folder, t, alone=True))
            for temperature in (0.0, 0.7)
        }


async def test_only_the_end_of_reasoning_is_forced(
    folder: Path, alone: dict[float, list[Completion]]
) -> None:
    async with Engine(folder, config_of()) as engine:
        tokenizer = engine.tokenizer
        end = tuple(tokenizer.encode("</think>", add_special_tokens=False))
        for index, num_tokens in enumerate(BUDGETS):
            free, found = alone[0.0][index + len(BUDGETS)], alone[0.0][index]
            assert free.usage.reasoning_tokens == 48  # this model does not end it
            begun = (*free.token_ids[:num_tokens], *end)
            assert found.token_ids[: len(begun)] == begun
            assert found.usage.reasoning_tokens == num_tokens
            assert (found.finish_reason, len(found.token_ids)) == ("length", 48)
            prompt = tokenizer.encode(QUESTIONS[index] + "<think>", add_special_tokens=False)
            rest = await engine.generate(
                [*prompt, *begun], SamplingParams(max_tokens=48 - len(begun), ignore_eos=True)
            )
            assert found.token_ids[len(begun) :] == rest.token_ids


SPECULATIONS = {
    "plain": None,
    "ngram": Speculation(draft=NGram(min_length=1), shape=Chain(4), adaptive=False),
}


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("is_alone", slow_after(1, [False, True]))
@pytest.mark.parametrize("draft", SPECULATIONS)
async def test_batches_and_drafts_change_no_token(
    folder: Path, alone: dict[float, list[Completion]], draft: str, is_alone: bool, temperature: float
) -> None:
    config = config_of(speculation=SPECULATIONS[draft], max_num_seqs=8)
    found = await run(config, folder, temperature, alone=is_alone)
    for one, other in zip(found, alone[temperature], strict=True):
        assert (one.token_ids, one.reasoning, one.text) == (other.token_ids, other.reasoning, other.text)
        assert one.usage.reasoning_tokens == other.usage.reasoning_tokens


async def test_a_forced_call_comes_after_the_budget(folder: Path) -> None:
    config = config_of(tool_format="hermes")
    async with Engine(folder, config) as engine:
        for num_tokens in (0, 3):
            params = SamplingParams(max_tokens=200, thinking_budget=num_tokens)
            found = await engine.chat(asked("Why?"), params, tools=[TOOL], tool_choice="f")
            assert [call.name for call in found.tool_calls] == ["f"]
            assert found.usage.reasoning_tokens <= num_tokens
            assert found.finish_reason == "stop"


async def test_a_grammar_of_the_whole_answer_has_no_reasoning(folder: Path) -> None:
    async with Engine(folder, config_of()) as engine:
        params = SamplingParams(max_tokens=20, thinking_budget=1, grammar=JsonSchema({"const": 7}))
        found = await engine.chat(asked("Why?"), params)
        assert (found.text.strip(), found.usage.reasoning_tokens) == ("7", 0)


async def test_a_budget_needs_a_conversation(folder: Path) -> None:
    async with Engine(folder, config_of()) as engine:
        with pytest.raises(RequestError, match="thinking_budget=5.*chat") as caught:
            await engine.generate("Why?", thinking_budget=5)
        assert caught.value.field == "thinking_budget"
        samples = await engine.samples(
            asked("Why?"), 2, thinking_budget=5, max_tokens=20, temperature=1.0, ignore_eos=True
        )
        assert [found.usage.reasoning_tokens for found in samples] == [5, 5]


async def test_a_model_without_reasoning_keeps_every_budget(folder: Path) -> None:
    config = config_of().replace(reasoning_format=None)
    async with Engine(folder, config) as engine:
        params = SamplingParams(max_tokens=20, ignore_eos=True)
        free = await engine.chat(asked("Why?"), params)
        found = await engine.chat(asked("Why?"), params, thinking_budget=0)
        assert found.token_ids == free.token_ids and found.usage.reasoning_tokens == 0


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_budgets_of_the_protocols_are_kept(folder: Path, is_streamed: bool) -> None:
    body = {"messages": asked("Why?"), "max_tokens": 40, "ignore_eos": True, "stream": is_streamed}
    async with Engine(folder, config_of()) as engine:
        app = drift_sdk.openai.app(engine)
        thinking = {"type": "enabled", "budget_tokens": 6}
        found = await call(app, "/v1/messages", {**body, "thinking": thinking})
        usage = (found.events[-2] if is_streamed else found.json)["usage"]
        assert usage["output_tokens_details"] == {"thinking_tokens": 6}
        options = {"stream_options": {"include_usage": True}} if is_streamed else {}
        for field in ("thinking_budget", "thinking_token_budget"):
            found = await call(app, "/v1/chat/completions", {**body, **options, field: 6})
            usage = (found.events[-2] if is_streamed else found.json)["usage"]
            assert usage["completion_tokens_details"] == {"reasoning_tokens": 6}
            refused = await call(app, "/v1/completions", {"prompt": "Why?", field: 6})
            assert (refused.status, refused.error["param"]) == (400, field)


def test_with_strict_performance_a_budget_excludes_drafts() -> None:
    """The host computes the masks after them."""
    params = SamplingParams(thinking_budget=5)
    with pytest.raises(RequestError, match="thinking_budget=5"):
        check_needs_no_host(params, is_speculating=True)
    check_needs_no_host(params, is_speculating=False)
    check_needs_no_host(params.replace(num_draft_tokens=0), is_speculating=True)


@pytest.mark.parametrize("num_tokens", [-1, 0.5, "5", True])
def test_wrong_budgets_are_named(num_tokens: Any) -> None:
    with pytest.raises(RequestError, match="thinking_budget"):
        SamplingParams(thinking_budget=num_tokens)
