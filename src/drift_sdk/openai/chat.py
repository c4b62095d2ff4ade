"""Chat completions, `/v1/chat/completions`.

A `response_format` describes the whole answer. A request that also has tools gets either calls or an answer
in the format; where `tool_choice` forces calls, the format does not apply. The same holds for vLLM's
`structured_outputs`, and for its older names `guided_json`, `guided_regex`, `guided_choice` and
`guided_grammar`.
"""

from __future__ import annotations

import json
from functools import partial
from typing import Any, Literal

from starlette.requests import Request
from starlette.responses import Response

from drift_sdk import BaseEngine, Chunk, Completion, RequestError, SamplingParams, ToolCall
from drift_sdk.openai.answer_parts import AnswerParts, ToolUse
from drift_sdk.openai.choices import ChoicesAnswer, TextBody
from drift_sdk.openai.conversation import CHOICES, Message, Tools, described_tool, effort_args
from drift_sdk.openai.generation import Generation, respond
from drift_sdk.openai.sampling import NEVER, REFUSED, Form, params_of
from drift_sdk.openai.service import Service
from drift_sdk.openai.token_log import TokenLog
from drift_sdk.openai.wire import Wire

__all__ = ["ChatBody", "chat"]

KINDS = ("chat.completion", "chat.completion.chunk")


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
        KINDS,
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
