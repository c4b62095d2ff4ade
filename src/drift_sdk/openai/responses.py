"""OpenAI's Responses, `/v1/responses`. Nothing is stored: a request has its whole conversation as `input`."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar, Literal

from starlette.requests import Request
from starlette.responses import Response

from drift_sdk import JsonSchema, RequestError, SamplingParams
from drift_sdk.openai.conversation import CHOICES, Tools, described_tool, effort_args
from drift_sdk.openai.generation import Generation, respond
from drift_sdk.openai.response_events import ResponseAnswer
from drift_sdk.openai.response_input import messages_of
from drift_sdk.openai.sampling import ANY_OBJECT, SAMPLING, Grammar, params_of
from drift_sdk.openai.service import Service, new_id
from drift_sdk.openai.wire import Body, Strict, Wire

__all__ = ["ResponsesBody", "responses"]

LOGPROBS = "message.output_text.logprobs"
FUNCTION_FIELDS = ("name", "description", "parameters", "strict")


class Reasoning(Strict, kw_only=True):
    """Only the effort has an effect: reasoning is shown whole, without a summary."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None
    mode: Literal["standard"] | None = None
    context: str | None = None


class TextFormat(Strict, kw_only=True):
    """strict has no effect: every answer follows the schema."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    schema: dict[str, Any] | None = None

    def grammar(self) -> Grammar | None:
        if self.type == "text":
            return None

        if self.type == "json_object":
            return JsonSchema(ANY_OBJECT)

        if self.schema is None:
            raise RequestError.of("text.format", self.type, "a schema in the same object")

        return JsonSchema(self.schema)


class TextConfig(Strict, kw_only=True):
    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class FunctionTool(Wire, kw_only=True):
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def described(self, place: str) -> dict[str, Any]:
        return described_tool({name: getattr(self, name) for name in FUNCTION_FIELDS}, place)


class ToolName(Wire, kw_only=True):
    type: Literal["function"] = "function"
    name: str


class ToolChoice(Wire, kw_only=True):
    """A tool that has to be called, or those that may be."""

    type: Literal["function", "allowed_tools"]
    name: str | None = None
    mode: Literal["auto", "required"] = "auto"
    tools: list[ToolName] | None = None


class ResponsesBody(Body, kw_only=True):
    sampling_names = SAMPLING
    ignored: ClassVar[frozenset[str]] = frozenset(
        {
            # Bookkeeping, storage that later requests could use, and hints about speed.
            *("access_programs", "background_options", "prompt_cache_key", "service_tier"),
            *("prompt_cache_options", "prompt_cache_retention", "safety_identifier", "store", "user"),
            # Of images, and of tools that the server would run: there are none.
            *("image", "max_tool_calls"),
            "stream_options",  # padding of events
            "truncation",  # a prompt that is too long is refused in any case
        }
    )
    refused = {
        "background": (False,),
        "context_management": ([],),
        "conversation": (),
        "moderation": (),
        "previous_response_id": (),
        "prompt": (),
        "skip_special_tokens": (True,),
        "vllm_xargs": ({},),
    }

    model: str | None = None
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    stream: bool = False
    max_output_tokens: Any = None
    include: list[str] = []
    top_logprobs: int = 0
    reasoning: Reasoning | None = None
    text: TextConfig | None = None
    tools: list[FunctionTool] = []
    tool_choice: Literal["none", "auto", "required"] | ToolChoice = "auto"
    parallel_tool_calls: bool = True
    chat_template_kwargs: dict[str, Any] = {}
    metadata: dict[str, Any] = {}  # which the response repeats

    @property
    def has_logprobs(self) -> bool:
        return LOGPROBS in self.include or self.top_logprobs > 0

    def offered(self) -> Tools:
        described = [tool.described(f"tools[{index}]") for index, tool in enumerate(self.tools)]
        choice, is_parallel = self.tool_choice, self.parallel_tool_calls
        if isinstance(choice, str):
            return Tools(described, choice, is_parallel=is_parallel)

        if choice.type == "function" and choice.name is not None:
            return Tools.calling(described, choice.name)

        if choice.type == "allowed_tools" and choice.tools is not None:
            names = [tool.name for tool in choice.tools]
            return Tools(described, choice.mode, names=names, is_parallel=is_parallel)

        form = f"one of {', '.join(CHOICES)}, a function with its name, or allowed_tools with tools"
        raise RequestError.of("tool_choice", choice.type, form)

    def template_args(self) -> dict[str, Any]:
        """Variables of the chat template."""
        effort = self.reasoning.effort if self.reasoning is not None else None
        return {**effort_args(effort), **self.chat_template_kwargs}

    def params(self, defaults: SamplingParams, *, is_forced: bool) -> SamplingParams:
        """The engine's parameters. defaults: of the model. is_forced: the answer consists of calls."""
        form = self.text.format if self.text is not None else None
        return params_of(
            defaults,
            self.sampling,
            max_tokens=self.max_output_tokens,
            logprobs=self.top_logprobs if self.has_logprobs else None,
            grammar=form.grammar() if form is not None and not is_forced else None,
        )


ERROR_NAMES = {
    **dict.fromkeys(("schema", "pattern", "grammar"), "text.format"),
    "include_stop": "include_stop_str_in_output",
    "logprobs": "top_logprobs",
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "template_args": "chat_template_kwargs",
}


async def responses(service: Service, request: Request) -> Response:
    """The endpoint."""
    body = await service.read(request, ResponsesBody)
    request.state.error_names = ERROR_NAMES
    model, tools = service.model(body.model), body.offered()
    params = body.params(model.engine.default_params, is_forced=tools.use.is_forced)
    response_id = new_id("resp_")
    conversation, places = messages_of(body.input, body.instructions)
    request.state.error_names = {**ERROR_NAMES, **places}
    submit = partial(
        model.engine.samples,
        conversation,
        1,
        service.salted(request, params),
        tools.offered,
        body.template_args(),
        tool_choice=tools.choice,
        request_id=response_id,
    )
    generation = Generation([submit])
    answer = ResponseAnswer(
        model.engine,
        tools.use,
        echoed(body, params),
        response_id=response_id,
        model=model.name,
        has_logprobs=body.has_logprobs,
        shows_cached_tokens=service.shows_cached_tokens,
    )
    return await respond(request, generation, answer, is_streamed=body.stream)


def echoed(body: ResponsesBody, params: SamplingParams) -> dict[str, Any]:
    """The fields of a response that repeat the request, or say what was used in its place."""
    form = body.text.format if body.text is not None and body.text.format is not None else TextFormat()
    tools = [
        {"type": "function", **{name: getattr(tool, name) for name in FUNCTION_FIELDS}} for tool in body.tools
    ]
    choice = body.tool_choice
    return {
        "instructions": body.instructions,
        "max_output_tokens": params.max_tokens,
        "metadata": body.metadata,
        "parallel_tool_calls": body.parallel_tool_calls,
        "previous_response_id": None,
        "reasoning": {
            "effort": body.reasoning.effort if body.reasoning is not None else None,
            "summary": None,
        },
        "background": False,
        "service_tier": "default",
        "store": False,
        "temperature": params.temperature,
        "text": {
            "format": {
                name: value for name in form.__struct_fields__ if (value := getattr(form, name)) is not None
            }
        },
        "tool_choice": choice if isinstance(choice, str) else plain_choice(choice),
        "tools": tools,
        "top_logprobs": body.top_logprobs,
        "top_p": params.top_p,
        "truncation": "disabled",
        "user": None,
    }


def plain_choice(choice: ToolChoice) -> dict[str, Any]:
    if choice.type == "function":
        return {"type": "function", "name": choice.name}

    tools = [{"type": "function", "name": tool.name} for tool in choice.tools or ()]
    return {"type": "allowed_tools", "mode": choice.mode, "tools": tools}
