"""Anthropic's Messages, `/v1/messages` and `/v1/messages/count_tokens`.

A request whose last message is the assistant's gets an answer that continues it.
"""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar, Literal

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from drift_sdk import JsonSchema, RequestError, SamplingParams
from drift_sdk.openai.conversation import Tools, described_tool, effort_args
from drift_sdk.openai.generation import Generation, respond
from drift_sdk.openai.message_events import MessageAnswer
from drift_sdk.openai.message_input import InputMessage, messages_of
from drift_sdk.openai.sampling import SAMPLING, params_of
from drift_sdk.openai.service import Service, new_id
from drift_sdk.openai.wire import Body, Strict, Wire

__all__ = ["CountBody", "MessagesBody", "count_tokens", "messages"]

CUSTOM_TOOLS = (None, "custom")
ALL_THINKING: dict[str, Any] = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}


class Thinking(Strict, kw_only=True):
    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted"] | None = None

    def template_args(self) -> dict[str, Any]:
        return {} if self.type == "adaptive" else {"enable_thinking": self.type == "enabled"}

    @property
    def budget(self) -> dict[str, int]:
        """Most tokens of thinking, as a field of the engine's parameters, if there is a limit."""
        num_tokens = self.budget_tokens if self.type == "enabled" else None
        return {} if num_tokens is None else {"thinking_budget": num_tokens}


class OutputFormat(Strict, kw_only=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(Strict, kw_only=True):
    effort: str | None = None
    format: OutputFormat | None = None


class Tool(Wire, kw_only=True):
    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    input_examples: list[dict[str, Any]] | None = None

    def described(self, place: str) -> dict[str, Any]:
        if self.type not in CUSTOM_TOOLS:
            allowed = '"custom": this server runs no tools of its own'
            raise RequestError.of(f"{place}.type", self.type, allowed)

        function = {
            "name": self.name,
            "description": self.description,
            "parameters": self.input_schema,
            "input_examples": self.input_examples,
        }
        return described_tool(function, place)


class ToolChoice(Strict, kw_only=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class CountBody(Body, kw_only=True):
    """Fields that make a prompt."""

    ignored: ClassVar[frozenset[str]] = frozenset(
        {
            # Bookkeeping, and hints about speed.
            *("cache_control", "diagnostics", "inference_geo", "metadata", "service_tier", "speed"),
            *("user_profile_id", "workspace_id"),
        }
    )
    refused = {
        "container": (),
        "context_management": ({"edits": []}, ALL_THINKING),
        "mcp_servers": ([],),
    }

    model: str | None = None
    messages: list[InputMessage]
    system: str | list[dict[str, Any]] | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    tools: list[Tool] = []
    tool_choice: ToolChoice | None = None
    chat_template_kwargs: dict[str, Any] = {}

    def offered(self) -> Tools:
        described = [tool.described(f"tools[{index}]") for index, tool in enumerate(self.tools)]
        choice = self.tool_choice
        if choice is None:
            return Tools(described, "auto")

        if choice.type == "tool":
            if choice.name is None:
                raise RequestError.of("tool_choice.name", None, "the name of a tool")

            return Tools.calling(described, choice.name)

        kind = "required" if choice.type == "any" else choice.type
        return Tools(described, kind, is_parallel=not choice.disable_parallel_tool_use)

    def template_args(self) -> dict[str, Any]:
        """Variables of the chat template."""
        thinking = self.thinking.template_args() if self.thinking is not None else {}
        effort = self.output_config.effort if self.output_config is not None else None
        return {**thinking, **effort_args(effort), **self.chat_template_kwargs}

    def prompt(self, tools: Tools) -> dict[str, Any]:
        """Arguments of the engine that make the prompt, but for the messages."""
        last = self.messages[-1] if self.messages else None
        is_begun = last is not None and last.role == "assistant"
        return {
            "tools": tools.offered,
            "template_args": self.template_args(),
            "tool_choice": tools.choice,
            "continue_final": is_begun,
        }


class MessagesBody(CountBody, kw_only=True):
    sampling_names = {
        **{name: field for name, field in SAMPLING.items() if field not in ("stop", "thinking_budget")},
        "stop_sequences": "stop",
    }

    max_tokens: int
    stream: bool = False

    def params(self, defaults: SamplingParams, *, is_forced: bool) -> SamplingParams:
        """The engine's parameters. defaults: of the model. is_forced: the answer consists of calls."""
        form = self.output_config.format if self.output_config is not None else None
        return params_of(
            defaults,
            self.sampling,
            self.sampling_names,
            **(self.thinking.budget if self.thinking is not None else {}),
            max_tokens=self.max_tokens,
            grammar=JsonSchema(form.schema) if form is not None and not is_forced else None,
        )


ERROR_NAMES = {
    **dict.fromkeys(("schema", "pattern", "grammar"), "output_config.format"),
    "continue_final": "messages",
    "include_stop": "include_stop_str_in_output",
    "stop": "stop_sequences",
    "template_args": "chat_template_kwargs",
    "thinking_budget": "thinking.budget_tokens",
}


async def messages(service: Service, request: Request) -> Response:
    """The endpoint of answers."""
    body = await service.read(request, MessagesBody)
    request.state.error_names = ERROR_NAMES
    model, tools = service.model(body.model), body.offered()
    params = body.params(model.engine.default_params, is_forced=tools.use.is_forced)
    message_id = new_id("msg_")
    conversation, places = messages_of(body.system, body.messages)
    request.state.error_names = {**ERROR_NAMES, **places}
    submit = partial(
        model.engine.samples,
        conversation,
        1,
        service.salted(request, params),
        **body.prompt(tools),
        request_id=message_id,
    )
    generation = Generation([submit])
    answer = MessageAnswer(
        tools.use,
        message_id=message_id,
        model=model.name,
        shows_thinking=body.thinking is None or body.thinking.display != "omitted",
        shows_cached_tokens=service.shows_cached_tokens,
    )
    return await respond(request, generation, answer, is_streamed=body.stream)


async def count_tokens(service: Service, request: Request) -> Response:
    """The endpoint that counts the tokens of a prompt."""
    body = await service.read(request, CountBody)
    request.state.error_names = ERROR_NAMES
    engine = service.model(body.model).engine
    conversation, places = messages_of(body.system, body.messages)
    request.state.error_names = {**ERROR_NAMES, **places}
    num_tokens = await engine.count_tokens(conversation, **body.prompt(body.offered()))
    return JSONResponse({"input_tokens": num_tokens})
