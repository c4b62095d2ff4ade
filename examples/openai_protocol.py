"""The bodies of OpenAI's chat and completions requests, their translation for the engine, and error bodies.

There are three kinds of fields:
- supported: those declared below. null means the default, since clients send null for unset fields.
- rejected with a 400 that names the field: `REFUSED`, fields without which the answer would be wrong.
- ignored: all others. They are hints (`service_tier`, `prediction`), bookkeeping (`metadata`, `store`,
  `user`) or newer than this file. Unknown ones are logged, once each.

A `response_format` describes the whole answer. A request that also has tools gets either calls or an answer
in the format; where `tool_choice` forces calls, the format does not apply.
"""

import json
import logging
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from drift_sdk import (
    DriftError,
    EngineClosed,
    JsonSchema,
    PromptTooLong,
    QueueFull,
    RequestError,
    SamplingParams,
)

MAX_CHOICES = 128
REFUSED: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "suffix": ("",),
    "web_search_options": (),
}
"""Field -> values that are accepted because they have no effect."""
IGNORED = {
    *("metadata", "prediction", "prompt_cache_key", "prompt_cache_retention"),
    *("safety_identifier", "service_tier", "store", "user", "verbosity"),
}

logger = logging.getLogger("openai_protocol")
reported: set[str] = set()
MAX_REPORTED_CHARS = 100


class Wire(BaseModel):
    """An object of the protocol. Fields that are null are removed, unknown fields are ignored."""

    @model_validator(mode="before")
    @classmethod
    def drop_nulls(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values

        return {key: value for key, value in values.items() if value is not None}


class StreamOptions(Wire):
    include_usage: bool = False


class Body(Wire):
    """Fields of the requests of both endpoints."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    temperature: float = 1.0
    top_p: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    stop: str | list[str] = []
    seed: int | None = None

    @model_validator(mode="before")
    @classmethod
    def check_unknown(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values

        for name, value in values.items():
            if name in cls.model_fields or name in IGNORED or value is None:
                continue
            if name not in REFUSED:
                report_ignored(name)
            elif value not in REFUSED[name]:
                raise RequestError.of(name, value, "null: this server does not support it")

        return values

    def params(self, **more: Any) -> SamplingParams:
        return SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=self.logit_bias,
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop),
            seed=self.seed,
            **more,
        )


def report_ignored(name: str) -> None:
    """Log an unknown field, once for each name."""
    name = name[:MAX_REPORTED_CHARS]
    if name not in reported and len(reported) < 1000:
        reported.add(name)
        logger.warning("ignored unknown request field %.100r", name)


class TextPart(Wire):
    type: Literal["text", "refusal"]
    text: str = ""
    refusal: str = ""


class CalledFunction(Wire):
    name: str
    arguments: str = "{}"


class Call(Wire):
    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction

    def plain(self) -> dict[str, Any]:
        """The form that chat templates take: arguments as an object instead of JSON text."""
        try:
            arguments = json.loads(self.function.arguments)
        except (ValueError, RecursionError):
            arguments = self.function.arguments
        function = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id, "type": "function", "function": function}


ROLES = {"developer": "system", "function": "tool"}
"""Roles that chat templates know by another name."""


class Message(Wire):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[TextPart] = ""
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[Call] = []
    tool_call_id: str | None = None

    def plain(self) -> dict[str, Any]:
        content = self.content
        if not isinstance(content, str):
            content = "".join(part.text or part.refusal for part in content)
        plain: dict[str, Any] = {"role": ROLES.get(self.role, self.role), "content": content}
        if self.tool_calls:
            plain["tool_calls"] = [call.plain() for call in self.tool_calls]
        for name in ("name", "reasoning_content", "tool_call_id"):
            if getattr(self, name) is not None:
                plain[name] = getattr(self, name)
        return plain


class JsonSchemaFormat(Wire):
    name: str = ""
    schema_: dict[str, Any] = Field(alias="schema")


class ResponseFormat(Wire):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    def grammar(self) -> JsonSchema | None:
        if self.type == "text":
            return None

        if self.type == "json_object":
            return JsonSchema({"type": "object"})

        if self.json_schema is None:
            raise RequestError.of("response_format", self.type, "a json_schema in the same object")

        return JsonSchema(self.json_schema.schema_)


class Function(Wire):
    """Fields that are not declared here are kept, because a chat template may use them."""

    model_config = ConfigDict(extra="allow")

    name: Annotated[str, Field(min_length=1, pattern=r"^[\w.-]+$")]
    description: str | None = None
    parameters: dict[str, Any] = {"type": "object", "properties": {}}


class Tool(Wire):
    type: Literal["function"]
    function: Function


class FunctionName(Wire):
    name: str


class NamedChoice(Wire):
    type: Literal["function"]
    function: FunctionName


MaxTokens = Annotated[int, Field(ge=1)]
NumLogprobs = Annotated[int, Field(ge=0, le=20)]


class ChatBody(Body):
    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: MaxTokens | None = None
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool = False
    top_logprobs: NumLogprobs = 0
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_CHOICES)] = []
    tool_choice: Literal["none", "auto", "required"] | NamedChoice = "auto"
    parallel_tool_calls: bool = True
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] = {}

    @property
    def offered_tools(self) -> list[dict[str, Any]] | None:
        return [tool.model_dump(exclude_none=True) for tool in self.tools] or None

    @property
    def choice_of_tools(self) -> str:
        """The engine's `tool_choice`."""
        choice = self.tool_choice
        if not isinstance(choice, NamedChoice):
            return choice

        name = choice.function.name
        if name in ("none", "auto", "required"):
            raise RequestError.of("tool_choice", name, "a tool of another name, to force its call")

        return name

    @property
    def is_call_forced(self) -> bool:
        return self.tool_choice not in ("none", "auto")

    @property
    def max_calls(self) -> int | None:
        """Most tool calls in an answer; None = any number. A tool that is chosen by name is called once."""
        is_one = not self.parallel_tool_calls or isinstance(self.tool_choice, NamedChoice)
        return 1 if is_one else None

    @property
    def template_args(self) -> dict[str, Any]:
        """Variables of the chat template."""
        effort = {"reasoning_effort": self.reasoning_effort} if self.reasoning_effort else {}
        return {**effort, **self.chat_template_kwargs}

    def sampling(self) -> SamplingParams:
        if self.top_logprobs and not self.logprobs:
            raise RequestError.of("top_logprobs", self.top_logprobs, "logprobs=true in the same request")

        # A forced call has no text, to which the format would apply.
        response_format = self.response_format if not self.is_call_forced else None
        return self.params(
            max_tokens=self.max_completion_tokens or self.max_tokens,
            logprobs=self.top_logprobs if self.logprobs else None,
            grammar=response_format.grammar() if response_format is not None else None,
        )


def as_prompts(prompt: Any) -> Any:
    """A list of prompts, each a text or token ids. In the protocol it may also be a single prompt."""
    is_list = isinstance(prompt, list) and (not prompt or isinstance(prompt[0], str | list))
    return prompt if is_list else [prompt]


class CompletionBody(Body):
    prompt: Annotated[
        list[str | list[int]], BeforeValidator(as_prompts), Field(min_length=1, max_length=MAX_CHOICES)
    ]
    max_tokens: MaxTokens = 16
    logprobs: NumLogprobs | None = None

    def sampling(self) -> SamplingParams:
        return self.params(max_tokens=self.max_tokens, logprobs=self.logprobs)


def error_body(error: DriftError, path: str) -> tuple[int, dict[str, Any]]:
    """The HTTP status and the body of an error, in OpenAI's form and with its names of parameters."""
    if isinstance(error, RequestError):
        names = {"schema": "response_format", "grammar": "response_format"}
        if path.endswith("/chat/completions"):
            names["prompt"] = "messages"
        param, message, code = names.get(error.field, error.field), str(error), None
        if isinstance(error, PromptTooLong):
            # Some clients know this error by its code, others by these words.
            message = f"the prompt is longer than the model's context length: {message}"
            code = "context_length_exceeded"
        return 400, shaped_error(message, "invalid_request_error", param=param, code=code)

    if isinstance(error, QueueFull):
        return 429, shaped_error(str(error), "rate_limit_error", code="rate_limit_exceeded")

    return 503 if isinstance(error, EngineClosed) else 500, shaped_error(str(error), "server_error")


def shaped_error(
    message: str, kind: str, *, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
