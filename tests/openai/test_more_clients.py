"""Responses and Messages of drift_sdk.openai, used through the libraries that speak these protocols.

As test_clients.py, of which this is the second half: it needs the extra `clients`.
"""

from __future__ import annotations

import asyncio
import json
import os
import typing
from collections.abc import Callable
from typing import Any

import pytest
from loops import until
from openai_server import CITY, MODEL, PARIS, WEATHER
from pydantic import BaseModel

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # otherwise its import fetches a file
openai = pytest.importorskip("openai")
anthropic = pytest.importorskip("anthropic")
agents = pytest.importorskip("agents")
litellm = pytest.importorskip("litellm")
pydantic_ai = pytest.importorskip("pydantic_ai")
langchain_openai = pytest.importorskip("langchain_openai")

from anthropic.types import message_count_tokens_params, message_create_params  # noqa: E402
from langchain_core.messages import HumanMessage, ToolMessage  # noqa: E402
from pydantic_ai.models.openai import OpenAIResponsesModel  # noqa: E402
from pydantic_ai.providers.openai import OpenAIProvider  # noqa: E402

from drift_sdk import Engine  # noqa: E402
from drift_sdk.openai.messages import CountBody, MessagesBody  # noqa: E402

# Clients keep connections of the event loop on which they were first used.
pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.asyncio(loop_scope="module")]
RECORDED = "more_requests.json"
CLIENTS = ("openai", "anthropic", "openai-agents", "litellm", "pydantic-ai-slim", "langchain-openai")
CAPITAL, ASK_WEATHER = "What is the capital of France?", "How is the weather in Rome?"
ASK_CITY, STORY, TOO_LONG = "Name a city.", "Tell me a story.", "x" * 70_000
SUNNY = "It is sunny in Rome."
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
DESCRIPTION = "The weather in a city."
FUNCTION = {"type": "function", "name": "get_weather", "description": DESCRIPTION, "parameters": PARAMETERS}
TOOL = {"name": "get_weather", "description": DESCRIPTION, "input_schema": PARAMETERS}


class City(BaseModel):
    """A city."""

    name: str
    population: int


async def get_weather(city: str) -> str:
    """The weather in a city."""
    assert city == WEATHER["city"]
    return "sunny"


def asked(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


# openai, Responses


def openai_client(url: str) -> Any:
    return openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0)


async def test_openai_responses_plain(url: str) -> None:
    async with openai_client(url) as client:
        found = await client.responses.create(model=MODEL, input=CAPITAL, instructions="Be brief.")
    assert (found.output_text, found.status) == (PARIS, "completed")
    assert found._request_id == found.id
    assert found.usage.output_tokens == len(PARIS) + 1


async def test_openai_responses_stream(url: str) -> None:
    async with openai_client(url) as client, client.responses.stream(model=MODEL, input=CAPITAL) as stream:
        events = [event async for event in stream]
        found = await stream.get_final_response()
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == PARIS
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert found.output_text == PARIS


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_openai_responses_tools(url: str, is_streamed: bool) -> None:
    async with openai_client(url) as client:

        async def ask(items: list[Any]) -> Any:
            options = {"model": MODEL, "input": items, "tools": [FUNCTION]}
            if not is_streamed:
                return await client.responses.create(**options)

            async with client.responses.stream(**options) as stream:
                return await stream.get_final_response()

        first = await ask(asked(ASK_WEATHER))
        (call,) = first.output
        assert (call.name, json.loads(call.arguments)) == ("get_weather", WEATHER)
        answer = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
        found = await ask([*asked(ASK_WEATHER), *first.output, answer])
    assert found.output_text == SUNNY


async def test_openai_responses_typed(url: str) -> None:
    async with openai_client(url) as client:
        found = await client.responses.parse(model=MODEL, input=ASK_CITY, text_format=City)
    assert found.output_parsed == City(**CITY)


async def test_openai_responses_errors(url: str) -> None:
    async with openai_client(url) as client:
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError) as too_long:
                await client.responses.create(model=MODEL, input=TOO_LONG, stream=stream)
            assert too_long.value.code == "context_length_exceeded"
        with pytest.raises(openai.NotFoundError) as unknown:
            await client.responses.create(model="other", input=CAPITAL)
        assert unknown.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as stateful:
            await client.responses.create(model=MODEL, input=CAPITAL, previous_response_id="resp_1")
        assert stateful.value.param == "previous_response_id"


async def test_openai_responses_disconnect(url: str, num_cancelled: Callable[[], int]) -> None:
    async with openai_client(url) as client:
        async with await client.responses.create(model=MODEL, input=STORY, stream=True) as stream:
            async for event in stream:
                if event.type == "response.output_text.delta":
                    break
        await until(lambda: num_cancelled() == 1)


# openai-agents


def agent(url: str, *, is_chat: bool = False, **options: Any) -> Any:
    agents.set_tracing_disabled(True)
    model = agents.OpenAIChatCompletionsModel if is_chat else agents.OpenAIResponsesModel
    return agents.Agent(
        name="Guide", instructions="Be brief.", model=model(MODEL, openai_client(url)), **options
    )


@pytest.mark.parametrize("is_chat", [False, True])
async def test_agents_plain(url: str, is_chat: bool) -> None:
    found = await agents.Runner.run(agent(url, is_chat=is_chat), CAPITAL)
    assert found.final_output == PARIS


@pytest.mark.parametrize("is_chat", [False, True])
async def test_agents_stream(url: str, is_chat: bool) -> None:
    found = agents.Runner.run_streamed(agent(url, is_chat=is_chat), CAPITAL)
    text = ""
    async for event in found.stream_events():
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
            text += event.data.delta
    assert text == found.final_output == PARIS


@pytest.mark.parametrize("is_chat", [False, True])
@pytest.mark.parametrize("is_streamed", [False, True])
async def test_agents_tools(url: str, is_chat: bool, is_streamed: bool) -> None:
    helper = agent(url, is_chat=is_chat, tools=[agents.function_tool(get_weather)])
    if is_streamed:
        found = agents.Runner.run_streamed(helper, ASK_WEATHER)
        kinds = [
            event.item.type async for event in found.stream_events() if event.type == "run_item_stream_event"
        ]
        assert kinds == ["tool_call_item", "tool_call_output_item", "message_output_item"]
    else:
        found = await agents.Runner.run(helper, ASK_WEATHER)
    assert found.final_output == SUNNY


@pytest.mark.parametrize("is_chat", [False, True])
async def test_agents_typed(url: str, is_chat: bool) -> None:
    found = await agents.Runner.run(agent(url, is_chat=is_chat, output_type=City), ASK_CITY)
    assert found.final_output == City(**CITY)


async def test_agents_errors(url: str) -> None:
    with pytest.raises(openai.BadRequestError):
        await agents.Runner.run(agent(url), TOO_LONG)


# pydantic-ai and langchain, Responses


def pydantic_agent(url: str, **options: Any) -> Any:
    model = OpenAIResponsesModel(MODEL, provider=OpenAIProvider(base_url=url, api_key="none"))
    return pydantic_ai.Agent(model, **options)


async def test_pydantic_ai_responses_plain(url: str) -> None:
    assert (await pydantic_agent(url, instructions="Be brief.").run(CAPITAL)).output == PARIS


async def test_pydantic_ai_responses_stream(url: str) -> None:
    async with pydantic_agent(url).run_stream(CAPITAL) as found:
        pieces = [piece async for piece in found.stream_text(delta=True, debounce_by=None)]
    assert "".join(pieces) == PARIS


async def test_pydantic_ai_responses_tools(url: str) -> None:
    assert (await pydantic_agent(url, tools=[get_weather]).run(ASK_WEATHER)).output == SUNNY
    async with pydantic_agent(url, tools=[get_weather]).run_stream(ASK_WEATHER) as found:
        assert await found.get_output() == SUNNY


async def test_pydantic_ai_responses_typed(url: str) -> None:
    for output in (City, pydantic_ai.NativeOutput(City)):
        assert (await pydantic_agent(url, output_type=output).run(ASK_CITY)).output == City(**CITY)


async def test_langchain_responses(url: str) -> None:
    model = langchain_openai.ChatOpenAI(
        model=MODEL, base_url=url, api_key="none", max_retries=0, use_responses_api=True
    )
    assert (await model.ainvoke(CAPITAL)).text == PARIS
    assert "".join([chunk.text async for chunk in model.astream(CAPITAL)]) == PARIS
    with_tools = model.bind_tools([get_weather])
    question = HumanMessage(ASK_WEATHER)
    message = await with_tools.ainvoke([question])
    (call,) = message.tool_calls
    answer = ToolMessage(await get_weather(**call["args"]), tool_call_id=call["id"])
    assert (await with_tools.ainvoke([question, message, answer])).text == SUNNY
    assert await model.with_structured_output(City).ainvoke(ASK_CITY) == City(**CITY)


# anthropic


def anthropic_client(url: str) -> Any:
    return anthropic.AsyncAnthropic(base_url=url.removesuffix("/v1"), api_key="none", max_retries=0)


async def test_anthropic_plain(url: str) -> None:
    async with anthropic_client(url) as client:
        found = await client.messages.create(
            model=MODEL, max_tokens=100, messages=asked(CAPITAL), system="Be brief."
        )
    assert [(block.type, block.text) for block in found.content] == [("text", PARIS)]
    assert (found.stop_reason, found.role) == ("end_turn", "assistant")
    assert found._request_id == found.id
    assert found.usage.output_tokens == len(PARIS) + 1


async def test_anthropic_stream(url: str) -> None:
    async with anthropic_client(url) as client:
        options = {"model": MODEL, "messages": asked(CAPITAL)}
        async with client.messages.stream(max_tokens=100, **options) as stream:
            assert "".join([text async for text in stream.text_stream]) == PARIS
            found = await stream.get_final_message()
        whole = await client.messages.create(max_tokens=100, **options)
        counted = await client.messages.count_tokens(**options)
    assert [block.text for block in found.content] == [block.text for block in whole.content] == [PARIS]
    assert found.stop_reason == whole.stop_reason == "end_turn"
    usage = found.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == counted.input_tokens > 0


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_anthropic_tools(url: str, is_streamed: bool) -> None:
    async with anthropic_client(url) as client:

        async def ask(messages: list[Any]) -> Any:
            options = {"model": MODEL, "max_tokens": 200, "messages": messages, "tools": [TOOL]}
            if not is_streamed:
                return await client.messages.create(**options)

            async with client.messages.stream(**options) as stream:
                return await stream.get_final_message()

        first = await ask(asked(ASK_WEATHER))
        (call,) = first.content
        assert (call.name, call.input, first.stop_reason) == ("get_weather", WEATHER, "tool_use")
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
        found = await ask(
            [
                *asked(ASK_WEATHER),
                {"role": "assistant", "content": first.content},
                {"role": "user", "content": [result]},
            ]
        )
    assert found.content[0].text == SUNNY


async def test_anthropic_typed(url: str) -> None:
    async with anthropic_client(url) as client:
        found = await client.messages.parse(
            model=MODEL, max_tokens=100, messages=asked(ASK_CITY), output_format=City
        )
    assert found.parsed_output == City(**CITY)


async def test_anthropic_errors(url: str) -> None:
    async with anthropic_client(url) as client:
        options = {"model": MODEL, "max_tokens": 100, "messages": asked(TOO_LONG)}
        for stream in (False, True):
            with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
                await client.messages.create(**options, stream=stream)
        with pytest.raises(anthropic.NotFoundError, match="other"):
            await client.messages.create(model="other", max_tokens=1, messages=asked(CAPITAL))
        assert [model.id async for model in client.models.list()] == [MODEL]


def test_every_field_of_anthropics_client_is_supported_ignored_or_refused() -> None:
    kinds = {
        MessagesBody: (
            message_create_params.MessageCreateParamsNonStreaming,
            message_create_params.MessageCreateParamsStreaming,
        ),
        CountBody: (message_count_tokens_params.MessageCountTokensParams,),
    }
    for body, params in kinds.items():
        for name in {name for each in params for name in typing.get_type_hints(each)}:
            known = {*body.__struct_fields__, *body.sampling_names} - {"sampling"}
            assert sum(name in each for each in (known, body.ignored, body.refused)) == 1, name


async def test_anthropic_disconnect(
    url: str, server: tuple[Engine, str, Any], num_cancelled: Callable[[], int]
) -> None:
    async with anthropic_client(url) as client:
        options = {"model": MODEL, "max_tokens": 60_000, "messages": asked(STORY)}
        async with client.messages.stream(**options) as stream:
            async for _ in stream.text_stream:
                break
        await until(lambda: num_cancelled() == 1)
        asking = asyncio.create_task(client.messages.create(**options, timeout=300))
        await until(lambda: server[0].stats().num_running == 1)
        asking.cancel()
        await until(lambda: num_cancelled() == 2)


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_litellm_anthropic(url: str, is_streamed: bool) -> None:
    options = {"model": f"anthropic/{MODEL}", "api_base": url.removesuffix("/v1"), "api_key": "none"}
    found = await litellm.acompletion(**options, messages=asked(CAPITAL), stream=is_streamed)
    if is_streamed:
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in found])
    else:
        text = found.choices[0].message.content
    assert text == PARIS
