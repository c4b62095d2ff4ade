"""Types of the public names, as a type checker reads them: `make check` runs mypy over this file, and fails
where an `assert_type` differs from what it infers. The tests run the same calls, for their values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypedDict, assert_never, assert_type

import pydantic
from msgspec import Struct

from drift_sdk import (
    Completion,
    DriftError,
    Engine,
    Job,
    JobDone,
    JobFailed,
    JobResult,
    JsonSchema,
    Message,
    Regex,
    SamplingParams,
    SyncEngine,
    TokenStream,
    ToolSpec,
)
from drift_sdk.testing import ScriptedModel, scripted_engine

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam


class City(Struct):
    name: str


@dataclass
class Street:
    name: str


class Pet(pydantic.BaseModel):
    name: str


class Plant(TypedDict):
    name: str


JSON = '{"name": "Ada"}'
ADA = City("Ada")
GRAMMAR = JsonSchema(City)
PARAMS = SamplingParams(grammar=GRAMMAR)
ASKED: Message = {"role": "user", "content": "Who?"}


def test_a_schema_has_the_type_that_it_is_made_from() -> None:
    assert_type(JsonSchema(City), JsonSchema[City])
    assert_type(JsonSchema(Street), JsonSchema[Street])
    assert_type(JsonSchema(Pet), JsonSchema[Pet])
    assert_type(JsonSchema(Plant), JsonSchema[Plant])
    assert_type(JsonSchema(list[City]), JsonSchema[list[City]])
    assert_type(JsonSchema(pydantic.TypeAdapter(list[Pet])), JsonSchema[list[Pet]])
    assert_type(JsonSchema(City).decode(JSON), City)
    assert JsonSchema(City).decode(JSON) == ADA
    assert JsonSchema(pydantic.TypeAdapter(list[Pet])).decode(f"[{JSON}]") == [Pet(name="Ada")]


def test_a_schema_of_no_class_has_any_type() -> None:
    assert_type(JsonSchema({"type": "object"}), JsonSchema[Any])
    assert_type(JsonSchema('{"type": "object"}'), JsonSchema[Any])
    assert_type(JsonSchema(City | None), JsonSchema[Any])
    assert_type(JsonSchema(Literal["yes", "no"]), JsonSchema[Any])


def test_parameters_have_the_type_of_their_schema() -> None:
    assert_type(PARAMS, SamplingParams[City])
    assert_type(PARAMS.replace(temperature=1.0), SamplingParams[City])
    assert_type(SamplingParams(), SamplingParams[Any])
    assert_type(SamplingParams(grammar=Regex("a+")), SamplingParams[Any])
    assert SamplingParams[City](grammar=GRAMMAR) == PARAMS


async def test_a_completion_is_parsed_into_the_type_of_the_schema() -> None:
    async with scripted_engine(JSON) as engine:
        stream = engine.generate("Who?", PARAMS)
        assert_type(stream, TokenStream[City])
        completion = await stream
        assert_type(completion, Completion[City])
        assert_type(completion.parsed, City | None)
        assert completion.parsed == ADA

        by_option = await engine.generate("Who?", grammar=GRAMMAR, temperature=0.0)
        assert_type(by_option.parsed, City | None)
        changed = await engine.generate("Who?", PARAMS, temperature=0.0)
        assert_type(changed.parsed, City | None)
        answer = await engine.chat([ASKED], grammar=GRAMMAR)
        assert_type(answer.parsed, City | None)
        samples = engine.samples("Who?", 2, PARAMS)
        assert_type(samples[0], TokenStream[City])
        (first, second) = await samples
        assert_type(first.parsed, City | None)
        assert by_option.parsed == changed.parsed == answer.parsed == first.parsed == second.parsed == ADA

        plain = await engine.generate("Who?")
        assert_type(plain, Completion[Any])
        assert plain.parsed is None


def test_a_blocking_completion_is_parsed_into_the_type_of_the_schema() -> None:
    with SyncEngine("scripted", open_model=ScriptedModel(JSON)) as engine:
        completion = engine.generate("Who?", PARAMS).result()
        assert_type(completion.parsed, City | None)
        answer = engine.chat([ASKED], grammar=GRAMMAR).result()
        assert_type(answer.parsed, City | None)
        (sample,) = engine.samples("Who?", 1, PARAMS)
        assert_type(sample.result().parsed, City | None)
        (mapped,) = engine.map(["Who?"], PARAMS)
        assert_type(mapped.parsed, City | None)
        (result,) = engine.map(["Who?"], PARAMS, errors="yield")
        assert_type(result, JobDone[City] | JobFailed)
        assert completion.parsed == answer.parsed == sample.result().parsed == mapped.parsed == ADA
        assert isinstance(result, JobResult)


def named_by_class(result: JobResult) -> str:
    if isinstance(result, JobDone):
        assert_type(result.completion, Completion[Any])
        return result.completion.text

    assert_type(result, JobFailed)
    return type(result.error).__name__


def named_by_error(result: JobResult) -> str:
    if result.error is None:
        assert_type(result.completion, Completion[Any])
        return result.completion.text

    assert_type(result.error, DriftError)
    assert_type(result.completion, None)
    return type(result.error).__name__


def named_by_match(result: JobResult) -> str:
    match result:
        case JobDone(completion=completion):
            return completion.text
        case JobFailed(error=error):
            return type(error).__name__
        case _:
            assert_never(result)


async def test_the_results_of_jobs_are_told_apart() -> None:
    jobs = [Job(key="a", prompt="Who?", params=PARAMS), Job(key="b", prompt=[])]
    async with scripted_engine(JSON) as engine:
        results = [result async for result in engine.map(jobs, errors="yield")]
        for name in (named_by_class, named_by_error, named_by_match):
            assert [name(result) for result in results] == [JSON, "RequestError"]

        async for result in engine.map(["Who?"], PARAMS, errors="yield"):
            assert_type(result, JobDone[City] | JobFailed)
            if isinstance(result, JobDone):
                assert_type(result.completion.parsed, City | None)
            kept: JobResult = result
            assert isinstance(kept, JobDone) and kept.completion.parsed == ADA
        async for completion in engine.map(["Who?"], PARAMS):
            assert_type(completion.parsed, City | None)
            assert completion.parsed == ADA


def test_a_job_has_the_type_of_its_parameters() -> None:
    assert_type(Job(key=1, prompt="Who?", params=PARAMS), Job[City])
    assert_type(Job(key=1, prompt="Who?"), Job[Any])


async def test_messages_and_tools_are_typed_or_any_mapping() -> None:
    tool: ToolSpec = {
        "type": "function",
        "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {}}},
    }
    history: list[Message] = [
        ASKED,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "sunny"}]},
    ]
    other: Mapping[str, Any] = {"role": "user", "content": "Who?", "further": 1}
    plain = [{"role": "user", "content": "Who?"}]
    async with scripted_engine("Ada") as engine:
        assert (await engine.chat(history, tools=[tool])).text == "Ada"
        assert (await engine.chat([*history, other], tools=[tool["function"]])).text == "Ada"
        assert (await engine.chat(plain, tools=[{"name": "f", "further": 1}])).text == "Ada"
        assert (await engine.chat([{"role": "user", "content": "Who?", "further": 1}])).text == "Ada"
        assert await engine.count_tokens(history, tools=[tool]) > 0
        plain.append((await engine.chat(plain)).message())


def accepts_what_openai_types(
    engine: Engine,
    messages: list[ChatCompletionMessageParam],
    tools: list[ChatCompletionToolParam],
    options: dict[str, Any],
) -> tuple[TokenStream, Job]:
    """For type checkers alone."""
    return engine.chat(messages, tools=tools, **options), Job(key=1, messages=messages, tools=tools)


def test_a_wrong_key_of_a_message_is_an_error_for_type_checkers() -> None:
    wrong: Message = {"role": "user", "contents": "Who?"}  # type: ignore[typeddict-unknown-key]
    missing: Message = {"content": "Who?"}  # type: ignore[typeddict-item]
    assert wrong and missing
