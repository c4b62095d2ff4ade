"""Chat completions, `/v1/chat/completions`, and text completions, `/v1/completions`.

A `response_format` describes the whole answer. A request that also has tools gets either calls or an answer
in the format; where `tool_choice` forces calls, the format does not apply. The same holds for vLLM's
`structured_outputs`, and for its older names `guided_json`, `guided_regex`, `guided_choice` and
`guided_grammar`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Literal, Protocol

from starlette.requests import Request
from starlette.responses import Response

from drift_sdk import BaseEngine, Chunk, Completion, DriftError, RequestError, SamplingParams, ToolCall
from drift_sdk.openai.conversation import (
    CHOICES,
    IGNORED,
    NEVER,
    REFUSED,
    SAMPLING,
    AnswerParts,
    Form,
    Message,
    ResponseFormat,
    StructuredOutputs,
    TokenLog,
    Tools,
    ToolUse,
    described_tool,
    effort_args,
    params_of,
    shown,
)
from drift_sdk.openai.service import DONE, Event, Generation, Service, new_id, respond
from drift_sdk.openai.wire import Body, Strict, Wire, described, shaped

MAX_ID_CHARS = 64


class StreamOptions(Strict, kw_only=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # padding that has no effect on the answer
    continuous_usage_stats: Literal[False] | None = None


class TextBody(Body, kw_only=True):
    """Fields of the requests of chat and of completions."""

    sampling_names: ClassVar[Mapping[str, str]] = SAMPLING
    ignored: ClassVar[frozenset[str]] = IGNORED
    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = REFUSED

    model: str | None = None
    request_id: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = 1
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    def error_names(self) -> dict[str, str]:
        """Fields of the engine's errors -> the fields of this request that they are about."""
        budget = "thinking_token_budget"
        return {
            **dict.fromkeys(("schema", "pattern", "grammar"), Form(self).field),
            "include_stop": "include_stop_str_in_output",
            "thinking_budget": budget if budget in self.sampling else "thinking_budget",
        }

    def new_id(self, prefix: str) -> str:
        given = self.request_id
        if given is not None and not 1 <= len(given) <= MAX_ID_CHARS:
            raise RequestError.of("request_id", given, f"1 to {MAX_ID_CHARS} characters")

        return new_id(prefix, given)


class Choice(Protocol):
    """One choice of an answer."""

    def pieces(self, chunk: Chunk, completion: Completion | None) -> list[dict[str, Any]]:
        """The JSON of a chunk, in pieces. completion: given with the last chunk."""
        ...

    def whole(self, completion: Completion) -> dict[str, Any]:
        """The JSON of an answer that is not streamed."""
        ...


class ChoicesAnswer:
    """An answer of several choices, as `generation.Answer` describes it.

    kinds: the values of `object` of an answer and of its chunks.
    """

    def __init__(
        self,
        choices: Sequence[Choice],
        body: TextBody,
        kinds: tuple[str, str],
        *,
        answer_id: str,
        model: str,
        shows_cached_tokens: bool,
    ) -> None:
        self._choices = choices
        self._body = body
        self._kinds = kinds
        self._common = {"id": answer_id, "created": int(time.time()), "model": model}
        self._shows_cached_tokens = shows_cached_tokens
        # Clients look there for the id of their request, which is also in the engine's log.
        self.headers: Mapping[str, str] = {"x-request-id": answer_id}

    def whole(self, completions: list[Completion]) -> dict[str, Any]:
        choices = [
            {"index": index, **choice.whole(completion)}
            for index, (choice, completion) in enumerate(zip(self._choices, completions, strict=True))
        ]
        return {
            **self._common,
            "object": self._kinds[0],
            "choices": choices,
            "usage": self._usage(completions),
        }

    def begin(self, num_prompt_tokens: int) -> Iterator[Event]:
        return iter(())

    def chunk(self, index: int, chunk: Chunk, completion: Completion | None) -> Iterator[Event]:
        for piece in self._choices[index].pieces(chunk, completion):
            yield self._event([{"index": index, **piece}])

    def end(self, completions: list[Completion]) -> Iterator[Event | bytes]:
        options = self._body.stream_options
        if options is not None and options.include_usage:
            yield self._event([], usage=self._usage(completions))
        yield DONE

    def failed(self, error: DriftError) -> Iterator[Event]:
        yield Event(shaped(described(error, self._body.error_names()), is_anthropic=False))

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> Event:
        return Event({**self._common, "object": self._kinds[1], "choices": choices, **more})

    def _usage(self, completions: list[Completion]) -> dict[str, Any]:
        """Token counts of all choices together. A prompt with several choices counts once."""
        counts = [completion.usage for completion in completions]
        prompts = counts[:: self._body.n]
        prompt_tokens = sum(count.prompt_tokens for count in prompts)
        completion_tokens = sum(count.completion_tokens for count in counts)
        found: dict[str, Any] = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "completion_tokens_details": {
                "reasoning_tokens": sum(count.reasoning_tokens for count in counts)
            },
        }
        if self._shows_cached_tokens:
            cached_tokens = sum(count.cached_tokens for count in prompts)
            found["prompt_tokens_details"] = {"cached_tokens": cached_tokens}
        return found


TEXT_KINDS = ("text_completion", "text_completion")
MAX_PROMPTS = 128


class CompletionBody(TextBody, kw_only=True):
    max_items = 2**20  # a prompt of a million token ids has fewer
    refused = {**REFUSED, "add_special_tokens": (True,)}

    prompt: str | list[str | int | list[int]]
    max_tokens: Any = 16
    logprobs: Any = None

    def prompts(self) -> list[str | list[int]]:
        """The prompts, each a text or token ids. In the protocol it may also be a single one."""
        given: Any = self.prompt
        is_list = isinstance(given, list) and (not given or not isinstance(given[0], int))
        found = given if is_list else [given]
        if not 1 <= len(found) <= MAX_PROMPTS:
            raise RequestError.of("prompt", given, f"1 to {MAX_PROMPTS} prompts")

        for each in found:
            if not isinstance(each, str | list) or not each:
                raise RequestError.of("prompt", each, "texts or lists of token ids, none of them empty")

        return found

    def params(self, defaults: SamplingParams) -> SamplingParams:
        """The engine's parameters. defaults: of the model."""
        return params_of(
            defaults,
            self.sampling,
            max_tokens=self.max_tokens,
            logprobs=self.logprobs,
            grammar=Form(self).grammar(),
        )


async def completions(service: Service, request: Request) -> Response:
    """The endpoint."""
    body = await service.read(request, CompletionBody)
    request.state.error_names = body.error_names()
    model = service.model(body.model)
    request_id = body.new_id("cmpl-")
    params = service.salted(request, body.params(model.engine.default_params))
    generation = Generation(
        partial(model.engine.samples, prompt, body.n, params, request_id=f"{request_id}-{place}")
        for place, prompt in enumerate(body.prompts())
    )
    answer = ChoicesAnswer(
        [TextChoice(model.engine, params) for _ in range(generation.num_choices)],
        body,
        TEXT_KINDS,
        answer_id=request_id,
        model=model.name,
        shows_cached_tokens=service.shows_cached_tokens,
    )
    return await respond(request, generation, answer, is_streamed=body.stream)


class TextChoice:
    """One choice of an answer. Offsets of tokens count from the beginning of the text."""

    def __init__(self, engine: BaseEngine, params: SamplingParams) -> None:
        self._log = TokenLog(engine) if params.logprobs is not None else None

    def pieces(self, chunk: Chunk, completion: Completion | None) -> list[dict[str, Any]]:
        ended = ended_json(completion) if completion is not None else {"finish_reason": None}
        return [{"text": chunk.text, "logprobs": self._logprobs(chunk, completion), **ended}]

    def whole(self, completion: Completion) -> dict[str, Any]:
        logprobs = self._logprobs(completion, completion)
        return {"text": completion.text, "logprobs": logprobs, **ended_json(completion)}

    def _logprobs(self, part: Chunk | Completion, completion: Completion | None) -> dict[str, Any] | None:
        if self._log is None or part.logprobs is None:
            return None

        taken = self._log.take(part.text, part.logprobs, completion)
        text_of = self._log.text_of
        return {
            "tokens": [text_of(entry.token_id) for _, entry in taken],
            "token_logprobs": [shown(entry.logprob) for _, entry in taken],
            "top_logprobs": [
                {text_of(token): shown(value) for token, value in entry.top} for _, entry in taken
            ],
            "text_offset": [offset for offset, _ in taken],
        }


def ended_json(completion: Completion) -> dict[str, Any]:
    """The reasons why a text ended. `stop_reason`, which is not in OpenAI's protocol, is the stop string or
    token, or "context" if the context was full."""
    return {"finish_reason": completion.finish_reason, "stop_reason": completion.stop_reason}


CHAT_KINDS = ("chat.completion", "chat.completion.chunk")


class FunctionName(Wire, kw_only=True):
    name: str


class Tool(Wire, kw_only=True):
    type: Literal["function"]
    function: dict[str, Any]


class NamedTool(Wire, kw_only=True):
    type: Literal["function"] = "function"
    function: FunctionName


class AllowedTools(Wire, kw_only=True):
    mode: Literal["auto", "required"]
    tools: list[NamedTool]


class ToolChoice(Wire, kw_only=True):
    """A tool that has to be called, or those that may be."""

    type: Literal["function", "allowed_tools"]
    function: FunctionName | None = None
    allowed_tools: AllowedTools | None = None


class ChatBody(TextBody, kw_only=True):
    refused = {**REFUSED, "add_special_tokens": NEVER}

    messages: list[Message]
    max_tokens: Any = None
    max_completion_tokens: Any = None
    logprobs: bool = False
    top_logprobs: int = 0
    tools: list[Tool] = []
    tool_choice: Literal["none", "auto", "required"] | ToolChoice = "auto"
    parallel_tool_calls: bool = True
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] = {}
    documents: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False

    def offered(self) -> Tools:
        described = [
            described_tool(tool.function, f"tools[{index}].function") for index, tool in enumerate(self.tools)
        ]
        choice, is_parallel = self.tool_choice, self.parallel_tool_calls
        if isinstance(choice, str):
            return Tools(described, choice, is_parallel=is_parallel)

        if choice.type == "function" and choice.function is not None:
            return Tools.calling(described, choice.function.name)

        if choice.type == "allowed_tools" and choice.allowed_tools is not None:
            allowed = choice.allowed_tools
            names = [tool.function.name for tool in allowed.tools]
            return Tools(described, allowed.mode, names=names, is_parallel=is_parallel)

        form = f'one of {", ".join(CHOICES)}, or an object with its field "{choice.type}"'
        raise RequestError.of("tool_choice", choice.type, form)

    def template_args(self) -> dict[str, Any]:
        """Variables of the chat template."""
        documents = {"documents": self.documents} if self.documents is not None else {}
        return {**effort_args(self.reasoning_effort), **documents, **self.chat_template_kwargs}

    def params(self, defaults: SamplingParams, *, is_forced: bool) -> SamplingParams:
        """The engine's parameters. defaults: of the model. is_forced: the answer consists of calls."""
        if self.top_logprobs and not self.logprobs:
            raise RequestError.of("top_logprobs", self.top_logprobs, "logprobs=true in the same request")

        if self.add_generation_prompt not in (None, not self.continue_final_message):
            allowed = "the contrary of continue_final_message"
            raise RequestError.of("add_generation_prompt", self.add_generation_prompt, allowed)

        newer = self.max_completion_tokens
        return params_of(
            defaults,
            self.sampling,
            max_tokens=newer if newer is not None else self.max_tokens,
            logprobs=self.top_logprobs if self.logprobs else None,
            # A forced call has no text, to which the format would apply.
            grammar=Form(self).grammar() if not is_forced else None,
        )

    def error_names(self) -> dict[str, str]:
        names = {
            "prompt": "messages",
            "template_args": "chat_template_kwargs",
            "continue_final": "continue_final_message",
            "logprobs": "top_logprobs",
        }
        if self.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
        return {**super().error_names(), **names}


async def chat(service: Service, request: Request) -> Response:
    """The endpoint."""
    body = await service.read(request, ChatBody)
    request.state.error_names = body.error_names()
    if not body.messages:
        raise RequestError.of("messages", body.messages, "at least one message")

    model = service.model(body.model)
    tools, request_id = body.offered(), body.new_id("chatcmpl-")
    params = body.params(model.engine.default_params, is_forced=tools.use.is_forced)
    submit = partial(
        model.engine.samples,
        [message.plain(f"messages[{index}]") for index, message in enumerate(body.messages)],
        body.n,
        service.salted(request, params),
        tools.offered,
        body.template_args(),
        tool_choice=tools.choice,
        continue_final=body.continue_final_message,
        request_id=request_id,
    )
    generation = Generation([submit])
    answer = ChoicesAnswer(
        [ChatChoice(model.engine, tools.use, has_logprobs=body.logprobs) for _ in range(body.n)],
        body,
        CHAT_KINDS,
        answer_id=request_id,
        model=model.name,
        shows_cached_tokens=service.shows_cached_tokens,
    )
    return await respond(request, generation, answer, is_streamed=body.stream)


class ChatChoice:
    """One choice of an answer."""

    def __init__(self, engine: BaseEngine, use: ToolUse, *, has_logprobs: bool) -> None:
        self._parts = AnswerParts(use)
        self._is_forced = use.is_forced
        self._log = TokenLog(engine) if has_logprobs else None
        self._is_first = True
        self._is_split = False

    def pieces(self, chunk: Chunk, completion: Completion | None) -> list[dict[str, Any]]:
        """The JSON of a chunk, in one piece or two, or none if nothing of it is shown: tokens of a tool call,
        or a part of a character. completion: given with the last chunk.

        Clients take a call as whole when a piece follows it, so the reason to finish comes by itself then."""
        delta: dict[str, Any] = {"role": "assistant"} if self._is_first else {}
        self._is_first = False
        text, calls = self._parts.read(chunk)
        if chunk.reasoning:
            delta["reasoning_content"] = chunk.reasoning
        if text or not (chunk.reasoning or calls):
            delta["content"] = text
        if calls:
            delta["tool_calls"] = [{"index": call.index, **call_json(call)} for call in calls]
        logprobs = self._logprobs(chunk, completion)
        piece = {"delta": delta, "logprobs": logprobs, "finish_reason": None}
        if completion is None:
            return [piece] if delta != {"content": ""} or logprobs is not None else []

        ended = self._ended(completion)
        return [piece, {"delta": {}, "logprobs": None, **ended}] if calls else [{**piece, **ended}]

    def whole(self, completion: Completion) -> dict[str, Any]:
        """The JSON of an answer that is not streamed."""
        text, calls = self._parts.read(completion)
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if completion.reasoning:
            message["reasoning_content"] = completion.reasoning
        if calls:
            message["content"] = text or None
            message["tool_calls"] = [call_json(call) for call in calls]
        logprobs = self._logprobs(completion, completion)
        return {"message": message, "logprobs": logprobs, **self._ended(completion)}

    def _ended(self, completion: Completion) -> dict[str, Any]:
        return {"finish_reason": self._parts.ended(completion), "stop_reason": completion.stop_reason}

    def _logprobs(self, part: Chunk | Completion, completion: Completion | None) -> dict[str, Any] | None:
        if self._log is None or part.logprobs is None:
            return None

        self._is_split |= bool(part.reasoning or part.tool_calls)
        taken = self._log.take(part.text, part.logprobs, completion, is_split=self._is_split)
        return {"content": [self._log.entry_json(entry) for _, entry in taken], "refusal": None}


def call_json(call: ToolCall) -> dict[str, Any]:
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}
