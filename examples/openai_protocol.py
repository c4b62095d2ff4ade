"""The bodies of OpenAI's chat and completions requests, their translation for the engine, and error bodies.

There are three kinds of fields:
- supported: those declared below. null means the default, since clients send null for unset fields. Sampling
  fields that are not given have the model's own defaults, as in `Engine.chat`.
- without effect on the answer: accepted (`openai_fields.IGNORED`).
- all others: rejected with a 400 that names the field, unless they have the value that is the default
  (`openai_fields.REFUSED`).

A `response_format` describes the whole answer. A request that also has tools gets either calls or an answer
in the format; where `tool_choice` forces calls, the format does not apply. The same holds for vLLM's
`structured_outputs`, and for its older names `guided_json`, `guided_regex`, `guided_choice` and
`guided_grammar`.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from openai_fields import (
    NEVER,
    REFUSED,
    Grammar,
    ResponseFormat,
    StreamOptions,
    StructuredOutputs,
    Wire,
    check_names,
)
from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from drift_sdk import DriftError, EngineClosed, PromptTooLong, QueueFull, RequestError, SamplingParams

MAX_CHOICES = 128
GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")


class Body(Wire):
    """Fields of the requests of both endpoints. Those from `temperature` to `cache_salt` are fields of
    SamplingParams; 0 and -1 as `top_k` both mean all."""

    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = REFUSED

    model: str | None = None
    request_id: Annotated[str, Field(min_length=1, max_length=64)] | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    allowed_token_ids: list[int] | None = None
    seed: int | None = None
    priority: int | None = None
    cache_salt: str | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Field(min_length=1)] | None = None
    guided_grammar: str | None = None

    @model_validator(mode="before")
    @classmethod
    def check_fields(cls, values: Any) -> Any:
        if isinstance(values, Mapping):
            check_names(values, cls.model_fields, cls.refused)
        return values

    @property
    def form_fields(self) -> list[str]:
        """The fields of this request that describe the form of the text."""
        names = ("response_format", "structured_outputs", *GUIDED)
        return [name for name in names if getattr(self, name) is not None]

    def grammar(self) -> Grammar | None:
        """The form of the text. RequestError for several."""
        found = StructuredOutputs(
            json=self.guided_json,
            regex=self.guided_regex,
            choice=self.guided_choice,
            grammar=self.guided_grammar,
        ).grammars()
        if self.structured_outputs is not None:
            forms = self.structured_outputs.grammars()
            if not forms:
                allowed = "json, regex, choice, grammar or json_object"
                raise RequestError.of("structured_outputs", None, allowed)

            found += forms
        response_format = self.response_format.grammar() if self.response_format is not None else None
        if response_format is not None:
            found.append(response_format)
        if len(found) > 1:
            raise RequestError.of(self.form_fields[-1], len(found), "one form of the text in a request")

        return found[0] if found else None

    def params(self, defaults: SamplingParams, **more: Any) -> SamplingParams:
        """The defaults with the fields of this request."""
        given = {name: value for name in SAMPLING_FIELDS if (value := getattr(self, name)) is not None}
        if given.get("top_k") == -1:
            given["top_k"] = 0
        if self.include_stop_str_in_output is not None:
            given["include_stop"] = self.include_stop_str_in_output
        return defaults.replace(**given, **more)

    def error_names(self) -> dict[str, str]:
        """Fields of the engine's errors -> the fields of this request that they are about."""
        form = next(iter(self.form_fields), "response_format")
        return {
            **dict.fromkeys(("schema", "pattern", "grammar"), form),
            "include_stop": "include_stop_str_in_output",
        }


SAMPLING_FIELDS = [name for name in Body.model_fields if name in SamplingParams.__struct_fields__]


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
            plain["tool_calls"] = [call.model_dump() for call in self.tool_calls]
        for name in ("name", "reasoning_content", "tool_call_id"):
            if getattr(self, name) is not None:
                plain[name] = getattr(self, name)
        return plain


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
    refused = {**REFUSED, "add_special_tokens": NEVER}

    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: MaxTokens | None = None
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool = False
    top_logprobs: NumLogprobs = 0
    tools: Annotated[list[Tool], Field(max_length=MAX_CHOICES)] = []
    tool_choice: Literal["none", "auto", "required"] | NamedChoice = "auto"
    parallel_tool_calls: bool = True
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] = {}
    documents: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False

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
        documents = {"documents": self.documents} if self.documents is not None else {}
        return {**effort, **documents, **self.chat_template_kwargs}

    def sampling(self, defaults: SamplingParams) -> SamplingParams:
        """The engine's parameters. defaults: of the model."""
        if self.top_logprobs and not self.logprobs:
            raise RequestError.of("top_logprobs", self.top_logprobs, "logprobs=true in the same request")

        if self.add_generation_prompt not in (None, not self.continue_final_message):
            allowed = "the contrary of continue_final_message"
            raise RequestError.of("add_generation_prompt", self.add_generation_prompt, allowed)

        return self.params(
            defaults,
            max_tokens=self.max_completion_tokens or self.max_tokens,
            logprobs=self.top_logprobs if self.logprobs else None,
            # A forced call has no text, to which the format would apply.
            grammar=self.grammar() if not self.is_call_forced else None,
        )

    def error_names(self) -> dict[str, str]:
        names = {
            "prompt": "messages",
            "template_args": "chat_template_kwargs",
            "continue_final": "continue_final_message",
        }
        if self.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
        return {**super().error_names(), **names}


def as_prompts(prompt: Any) -> Any:
    """A list of prompts, each a text or token ids. In the protocol it may also be a single prompt."""
    is_list = isinstance(prompt, list) and (not prompt or isinstance(prompt[0], str | list))
    return prompt if is_list else [prompt]


class CompletionBody(Body):
    refused = {**REFUSED, "add_special_tokens": (True,)}

    prompt: Annotated[
        list[str | list[int]], BeforeValidator(as_prompts), Field(min_length=1, max_length=MAX_CHOICES)
    ]
    max_tokens: MaxTokens = 16
    logprobs: NumLogprobs | None = None

    def sampling(self, defaults: SamplingParams) -> SamplingParams:
        """The engine's parameters. defaults: of the model."""
        return self.params(
            defaults, max_tokens=self.max_tokens, logprobs=self.logprobs, grammar=self.grammar()
        )


def error_body(error: DriftError, names: Mapping[str, str]) -> tuple[int, dict[str, Any]]:
    """The HTTP status and the body of an error, in OpenAI's form. names: as of `Body.error_names`."""
    if isinstance(error, RequestError):
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
