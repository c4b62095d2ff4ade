"""drift_sdk.openai, used through the libraries that speak its protocol, in their default modes.

Needs the extra `clients`: `make client-test`. Without it these tests are skipped; test_client_requests.py has
the requests that they recorded. With CLIENT_REQUESTS=FOLDER, they are written to RECORDED in this folder.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from loops import until
from openai_server import CITY, MODEL, PARIS, WEATHER
from pydantic import BaseModel

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # otherwise its import fetches a file
openai = pytest.importorskip("openai")
litellm = pytest.importorskip("litellm")
instructor = pytest.importorskip("instructor")
pydantic_ai = pytest.importorskip("pydantic_ai")
langchain_openai = pytest.importorskip("langchain_openai")

from instructor.core import InstructorRetryException  # noqa: E402
from langchain_core.messages import AIMessageChunk, HumanMessage, ToolMessage  # noqa: E402
from pydantic_ai.models.openai import OpenAIChatModel  # noqa: E402
from pydantic_ai.providers.openai import OpenAIProvider  # noqa: E402

from drift_sdk import Engine  # noqa: E402

# Clients keep connections of the event loop on which they were first used.
pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.asyncio(loop_scope="module")]
RECORDED = "chat_requests.json"
CLIENTS = ("openai", "litellm", "instructor", "pydantic-ai-slim", "langchain-openai")
CAPITAL = [{"role": "user", "content": "What is the capital of France?"}]
ASK_WEATHER = [{"role": "user", "content": "How is the weather in Rome?"}]
ASK_CITY = [{"role": "user", "content": "Name a city."}]
STORY = [{"role": "user", "content": "Tell me a story."}]
TOO_LONG = [{"role": "user", "content": "x" * 70_000}]
SUNNY = "It is sunny in Rome."
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


class City(BaseModel):
    """A city."""

    name: str
    population: int


# openai


def openai_client(url: str) -> Any:
    return openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0)


async def test_openai_plain(url: str) -> None:
    async with openai_client(url) as client:
        found = await client.chat.completions.create(model=MODEL, messages=CAPITAL)
    assert found.choices[0].message.content == PARIS
    assert found._request_id == found.id
    assert found.usage.completion_tokens == len(PARIS) + 1


async def test_openai_stream(url: str) -> None:
    async with openai_client(url) as client:
        include = {"include_usage": True}
        stream = await client.chat.completions.create(
            model=MODEL, messages=CAPITAL, stream=True, stream_options=include
        )
        *chunks, last = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content for chunk in chunks) == PARIS
    assert last.usage.completion_tokens == len(PARIS) + 1


async def test_openai_tools(url: str) -> None:
    async with openai_client(url) as client:
        first = await client.chat.completions.create(model=MODEL, messages=ASK_WEATHER, tools=[TOOL])
        message = first.choices[0].message
        (call,) = message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", WEATHER)
        assert first.choices[0].finish_reason == "tool_calls"
        answer = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
        found = await client.chat.completions.create(
            model=MODEL, messages=[*ASK_WEATHER, message, answer], tools=[TOOL]
        )
    assert found.choices[0].message.content == SUNNY


async def test_openai_streamed_tools(url: str) -> None:
    """The stream helper joins deltas into a completion."""
    tool = openai.pydantic_function_tool(City)
    async with (
        openai_client(url) as client,
        client.chat.completions.stream(model=MODEL, messages=ASK_CITY, tools=[tool]) as stream,
    ):
        kinds = {event.type async for event in stream}
        found = await stream.get_final_completion()
    (call,) = found.choices[0].message.tool_calls
    assert call.function.parsed_arguments == City(**CITY)
    assert "tool_calls.function.arguments.done" in kinds


async def test_openai_typed(url: str) -> None:
    async with openai_client(url) as client:
        found = await client.chat.completions.parse(model=MODEL, messages=ASK_CITY, response_format=City)
    assert found.choices[0].message.parsed == City(**CITY)


async def test_openai_typed_after_tools(url: str) -> None:
    """A request with a format and tools gets calls first, and then an answer in the format."""
    tool = {**TOOL, "function": {**TOOL["function"], "strict": True}}
    async with openai_client(url) as client:
        ask = partial(client.chat.completions.parse, model=MODEL, tools=[closed(tool)], response_format=City)
        message = (await ask(messages=ASK_CITY)).choices[0].message
        (call,) = message.tool_calls
        assert (message.parsed, json.loads(call.function.arguments)) == (None, WEATHER)
        answer = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
        found = await ask(messages=[*ASK_CITY, message.model_dump(exclude_none=True), answer])
    assert found.choices[0].message.parsed == City(**CITY)


def closed(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool whose parameters are closed, as the client asks of tools with typed output."""
    function = tool["function"]
    parameters = {**function["parameters"], "additionalProperties": False}
    return {**tool, "function": {**function, "parameters": parameters}}


async def test_openai_errors(url: str) -> None:
    async with openai_client(url) as client:
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError) as too_long:
                await client.chat.completions.create(model=MODEL, messages=TOO_LONG, stream=stream)
            assert too_long.value.code == "context_length_exceeded"
        with pytest.raises(openai.NotFoundError) as unknown:
            await client.chat.completions.create(model="other", messages=CAPITAL)
        assert unknown.value.code == "model_not_found"


async def test_openai_disconnect(url: str, num_cancelled: Callable[[], int]) -> None:
    async with openai_client(url) as client:
        async with await client.chat.completions.create(model=MODEL, messages=STORY, stream=True) as stream:
            async for chunk in stream:
                if chunk.choices[0].delta.content:
                    break
        await until(lambda: num_cancelled() == 1)


# litellm


def litellm_options(url: str) -> dict[str, Any]:
    return {"model": f"openai/{MODEL}", "api_base": url, "api_key": "none", "num_retries": 0}


async def test_litellm_plain(url: str) -> None:
    found = await litellm.acompletion(**litellm_options(url), messages=CAPITAL)
    assert found.choices[0].message.content == PARIS
    assert found.usage.completion_tokens == len(PARIS) + 1


async def test_litellm_stream(url: str) -> None:
    stream = await litellm.acompletion(**litellm_options(url), messages=CAPITAL, stream=True)
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == PARIS
    assert chunks[-1].choices[0].finish_reason == "stop"


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_litellm_tools(url: str, is_streamed: bool) -> None:
    async def ask(messages: list[Any]) -> Any:
        options = {**litellm_options(url), "messages": messages, "tools": [TOOL]}
        if not is_streamed:
            return await litellm.acompletion(**options)

        chunks = [chunk async for chunk in await litellm.acompletion(**options, stream=True)]
        return litellm.stream_chunk_builder(chunks, messages=messages)

    message = (await ask(ASK_WEATHER)).choices[0].message
    (call,) = message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", WEATHER)
    answer = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    assert (await ask([*ASK_WEATHER, message, answer])).choices[0].message.content == SUNNY


async def test_litellm_typed(url: str) -> None:
    found = await litellm.acompletion(**litellm_options(url), messages=ASK_CITY, response_format=City)
    assert City.model_validate_json(found.choices[0].message.content) == City(**CITY)


async def test_litellm_errors(url: str) -> None:
    for stream in (False, True):
        with pytest.raises(litellm.ContextWindowExceededError):
            await litellm.acompletion(**litellm_options(url), messages=TOO_LONG, stream=stream)
    with pytest.raises(litellm.NotFoundError):
        await litellm.acompletion(**{**litellm_options(url), "model": "openai/other"}, messages=CAPITAL)


async def test_litellm_disconnect(url: str, num_cancelled: Callable[[], int]) -> None:
    stream = await litellm.acompletion(**litellm_options(url), messages=STORY, stream=True)
    async for chunk in stream:
        if chunk.choices[0].delta.content:
            break
    await stream.aclose()
    await until(lambda: num_cancelled() == 1)


# instructor


def instructor_client(url: str) -> Any:
    return instructor.from_openai(openai_client(url))


async def test_instructor_typed(url: str) -> None:
    client = instructor_client(url)
    found = await client.chat.completions.create(model=MODEL, messages=ASK_CITY, response_model=City)
    assert found.model_dump() == CITY


async def test_instructor_json_schema(url: str) -> None:
    client = instructor.from_openai(openai_client(url), mode=instructor.Mode.JSON_SCHEMA)
    found = await client.chat.completions.create(model=MODEL, messages=ASK_CITY, response_model=City)
    assert found.model_dump() == CITY


async def test_instructor_partial_stream(url: str) -> None:
    stream = instructor_client(url).chat.completions.create_partial(
        model=MODEL, messages=ASK_CITY, response_model=City
    )
    assert [found async for found in stream][-1].model_dump() == CITY


async def test_instructor_tools(url: str) -> None:
    """The library's own tool loop: a call is answered, and the next answer is typed."""
    client = instructor_client(url)
    asked = await client.client.chat.completions.create(model=MODEL, messages=ASK_WEATHER, tools=[TOOL])
    message = asked.choices[0].message
    (call,) = message.tool_calls
    answer = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    typed = instructor.from_openai(openai_client(url), mode=instructor.Mode.JSON_SCHEMA)
    found = await typed.chat.completions.create(
        model=MODEL,
        messages=[*ASK_CITY, message.model_dump(), answer],
        response_model=City,
    )
    assert found.model_dump() == CITY


async def test_instructor_errors(url: str) -> None:
    for model, messages in ((MODEL, TOO_LONG), ("other", ASK_CITY)):
        with pytest.raises(InstructorRetryException) as caught:
            await instructor_client(url).chat.completions.create(
                model=model, messages=messages, response_model=City
            )
        assert isinstance(caught.value.__cause__, Exception)
        assert ("context length" if model == MODEL else "other") in str(caught.value)


# pydantic-ai


def agent(url: str, **options: Any) -> Any:
    model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=url, api_key="none"))
    return pydantic_ai.Agent(model, **options)


async def get_weather(city: str) -> str:
    """The weather in a city."""
    assert city == WEATHER["city"]
    return "sunny"


async def test_pydantic_ai_plain(url: str) -> None:
    found = await agent(url, instructions="Be brief.").run(CAPITAL[0]["content"])
    assert found.output == PARIS


async def test_pydantic_ai_stream(url: str) -> None:
    async with agent(url).run_stream(CAPITAL[0]["content"]) as found:
        pieces = [piece async for piece in found.stream_text(delta=True, debounce_by=None)]
    assert "".join(pieces) == PARIS


async def test_pydantic_ai_tools(url: str) -> None:
    found = await agent(url, tools=[get_weather]).run(ASK_WEATHER[0]["content"])
    assert found.output == SUNNY


async def test_pydantic_ai_streamed_tools(url: str) -> None:
    async with agent(url, tools=[get_weather]).run_stream(ASK_WEATHER[0]["content"]) as found:
        assert await found.get_output() == SUNNY


async def test_pydantic_ai_typed(url: str) -> None:
    assert (await agent(url, output_type=City).run("Name a city.")).output == City(**CITY)


async def test_pydantic_ai_streamed_typed(url: str) -> None:
    async with agent(url, output_type=City).run_stream("Name a city.") as found:
        assert await found.get_output() == City(**CITY)


async def test_pydantic_ai_native_output(url: str) -> None:
    native = agent(url, output_type=pydantic_ai.NativeOutput(City))
    assert (await native.run("Name a city.")).output == City(**CITY)


async def test_pydantic_ai_native_output_after_tools(url: str) -> None:
    native = agent(url, output_type=pydantic_ai.NativeOutput(City), tools=[get_weather])
    assert (await native.run("Name a city, by its weather.")).output == City(**CITY)


async def test_pydantic_ai_errors(url: str) -> None:
    with pytest.raises(pydantic_ai.exceptions.ModelHTTPError) as too_long:
        await agent(url).run(TOO_LONG[0]["content"])
    assert too_long.value.status_code == 400
    model = OpenAIChatModel("other", provider=OpenAIProvider(base_url=url, api_key="none"))
    with pytest.raises(pydantic_ai.exceptions.ModelHTTPError) as unknown:
        await pydantic_ai.Agent(model).run("Hello")
    assert unknown.value.status_code == 404


async def test_pydantic_ai_disconnect(url: str, num_cancelled: Callable[[], int]) -> None:
    async def ask() -> None:
        async with agent(url).run_stream(STORY[0]["content"]) as found:
            async for _ in found.stream_text(delta=True, debounce_by=None):
                started.set()

    started = asyncio.Event()
    task = asyncio.create_task(ask())
    await started.wait()
    task.cancel()
    await until(lambda: num_cancelled() == 1)
    with pytest.raises(asyncio.CancelledError):
        await task


# langchain-openai


def chat_model(url: str, model: str = MODEL) -> Any:
    return langchain_openai.ChatOpenAI(model=model, base_url=url, api_key="none", max_retries=0)


async def test_langchain_plain(url: str) -> None:
    found = await chat_model(url).ainvoke("What is the capital of France?")
    assert found.content == PARIS
    assert found.usage_metadata["output_tokens"] == len(PARIS) + 1


async def test_langchain_stream(url: str) -> None:
    chunks = [chunk async for chunk in chat_model(url).astream("What is the capital of France?")]
    assert "".join(chunk.text for chunk in chunks) == PARIS


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_langchain_tools(url: str, is_streamed: bool) -> None:
    model = chat_model(url).bind_tools([get_weather])

    async def ask(messages: list[Any]) -> Any:
        if not is_streamed:
            return await model.ainvoke(messages)

        joined = None
        async for chunk in model.astream(messages):
            assert isinstance(chunk, AIMessageChunk)
            joined = chunk if joined is None else joined + chunk
        return joined

    question = HumanMessage("How is the weather in Rome?")
    message = await ask([question])
    (call,) = message.tool_calls
    assert (call["name"], call["args"]) == ("get_weather", WEATHER)
    answer = ToolMessage(await get_weather(**call["args"]), tool_call_id=call["id"])
    assert (await ask([question, message, answer])).content == SUNNY


@pytest.mark.parametrize("method", ["default", "function_calling", "json_mode"])
async def test_langchain_typed(url: str, method: str) -> None:
    options = {"method": method} if method != "default" else {}
    model = chat_model(url).with_structured_output(City, **options)
    assert await model.ainvoke("Name a city, in JSON.") == City(**CITY)


async def test_langchain_errors(url: str) -> None:
    with pytest.raises(langchain_openai.chat_models.base.OpenAIContextOverflowError):
        await chat_model(url).ainvoke(TOO_LONG)
    with pytest.raises(openai.NotFoundError):
        await chat_model(url, "other").ainvoke("Hello")


async def test_langchain_disconnect(url: str, num_cancelled: Callable[[], int]) -> None:
    stream = chat_model(url).astream("Tell me a story.")
    async for chunk in stream:
        if chunk.text:
            break
    await stream.aclose()
    await until(lambda: num_cancelled() == 1)


async def test_langchain_typed_after_tools(url: str) -> None:
    model = chat_model(url).bind_tools([get_weather], response_format=City, strict=True)
    question = HumanMessage("Name a city, by its weather.")
    message = await model.ainvoke([question])
    (call,) = message.tool_calls
    answer = ToolMessage(await get_weather(**call["args"]), tool_call_id=call["id"])
    found = await model.ainvoke([question, message, answer])
    assert found.additional_kwargs["parsed"] == City(**CITY)


# all


@pytest.mark.parametrize(
    "kind", ["openai", "litellm", "instructor", "instructor_partial", "pydantic_ai", "langchain"]
)
async def test_client_that_leaves_before_a_whole_answer_disconnects(
    url: str, kind: str, server: tuple[Engine, str, Any], num_cancelled: Callable[[], int]
) -> None:
    """Nothing has been sent of an answer that is not streamed, or that is a call, before its end."""

    async def read_partial() -> list[Any]:
        partial_client = instructor_client(url).chat.completions
        stream = partial_client.create_partial(model=MODEL, messages=STORY, response_model=City)
        return [found async for found in stream]

    if kind == "openai":
        asking = openai_client(url).chat.completions.create(model=MODEL, messages=STORY)
    elif kind == "litellm":
        asking = litellm.acompletion(**litellm_options(url), messages=STORY)
    elif kind == "instructor":
        asking = instructor_client(url).chat.completions.create(
            model=MODEL, messages=STORY, response_model=None
        )
    elif kind == "instructor_partial":
        asking = read_partial()
    elif kind == "pydantic_ai":
        asking = agent(url).run(STORY[0]["content"])
    else:
        asking = chat_model(url).ainvoke(STORY[0]["content"])
    task = asyncio.ensure_future(asking)
    await until(lambda: server[0].stats().num_running == 1)
    task.cancel()
    await until(lambda: num_cancelled() == 1)
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_two_hundred_streams_of_which_half_disconnect(
    url: str, num_cancelled: Callable[[], int]
) -> None:
    async def ask(client: Any, number: int) -> str:
        messages = STORY if number % 2 else CAPITAL
        found = []
        async with await client.chat.completions.create(
            model=MODEL, messages=messages, stream=True
        ) as stream:
            async for chunk in stream:
                found.append(chunk.choices[0].delta.content or "")
                if number % 2 and len(found) > number % 7:
                    break
        return "".join(found)

    async with openai_client(url) as client:
        found = await asyncio.gather(*(ask(client, number) for number in range(200)))
        await until(lambda: num_cancelled() == 100)
    assert found[::2] == [PARIS] * 100
    assert all(("la " * 1000).startswith(text) for text in found[1::2])


async def test_two_hundred_streams_of_all_clients_complete(url: str) -> None:
    question = "What is the capital of France?"

    async def of_openai() -> str:
        stream = await client.chat.completions.create(model=MODEL, messages=CAPITAL, stream=True)
        return "".join([chunk.choices[0].delta.content async for chunk in stream])

    async def of_litellm() -> str:
        stream = await litellm.acompletion(**litellm_options(url), messages=CAPITAL, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def of_pydantic_ai() -> str:
        async with agent(url).run_stream(question) as found:
            return await found.get_output()

    async def of_langchain() -> str:
        return "".join([chunk.text async for chunk in chat_model(url).astream(question)])

    kinds = (of_openai, of_litellm, of_pydantic_ai, of_langchain)
    async with openai_client(url) as client:
        found = await asyncio.gather(*(ask() for ask in kinds for _ in range(50)))
    assert found == [PARIS] * 200
