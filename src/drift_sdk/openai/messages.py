"""Anthropic's Messages, `/v1/messages` and `/v1/messages/count_tokens`.

Content blocks become messages in the form that engines take; answers are content blocks, and the events that
build them. A request whose last message is the assistant's gets an answer that continues it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Literal

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from drift_sdk import Chunk, Completion, DriftError, JsonSchema, RequestError, SamplingParams, ToolCall
from drift_sdk.openai.conversation import (
    SAMPLING,
    AnswerParts,
    Tools,
    ToolUse,
    described_tool,
    effort_args,
    params_of,
)
from drift_sdk.openai.service import Event, Generation, Service, new_id, respond
from drift_sdk.openai.wire import Body, Strict, Wire, convert, described, shaped, without_nulls

Blocks = str | list[dict[str, Any]]


class InputMessage(Wire, kw_only=True):
    role: Literal["user", "assistant", "system"]
    content: Blocks


class ToolUseBlock(Wire, kw_only=True):
    id: str
    name: str
    input: dict[str, Any] = {}


class ToolResultBlock(Wire, kw_only=True):
    """is_error has no effect: chat templates know no failed results, and the content tells of them."""

    tool_use_id: str
    content: Blocks | None = None


class ThinkingBlock(Wire, kw_only=True):
    thinking: str


class TextBlock(Wire, kw_only=True):
    text: str


def messages_of(
    system: Blocks | None, messages: Sequence[InputMessage]
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """The messages of a request, and their paths, or those of their parts -> the paths of what they were made
    of. RequestError for a block that has no place in them."""
    if not messages:
        raise RequestError.of("messages", messages, "at least one message")

    found: list[dict[str, Any]] = []
    places: dict[str, str] = {}
    if system:
        found.append({"role": "system", "content": parts_of(system)})
        places["messages[0].content"] = "system"
    for index, message in enumerate(messages):
        place = f"messages[{index}].content"
        places[f"messages[{len(found)}].content"] = place
        if message.role == "assistant":
            found.append(answer_of(message.content, place))
        elif message.role == "system" or isinstance(message.content, str):
            found.append({"role": message.role, "content": parts_of(message.content)})
        else:
            add_asked(found, places, message.content, place)
    return found, places


def add_asked(
    found: list[dict[str, Any]], places: dict[str, str], blocks: Sequence[dict[str, Any]], place: str
) -> None:
    """Add the messages that a user's blocks make: one for each result of a tool, and one for those between
    them."""
    if not blocks:
        raise RequestError.of(place, blocks, "at least one block")

    for number, block in enumerate(blocks):
        where = f"{place}[{number}]"
        if block.get("type") == "tool_result":
            places[f"messages[{len(found)}].content"] = f"{where}.content"
            found.append(result_of(block, where))
            continue

        if number == 0 or found[-1]["role"] == "tool":
            found.append({"role": "user", "content": []})
        parts = found[-1]["content"]
        places[f"messages[{len(found) - 1}].content[{len(parts)}]"] = where
        parts += parts_of([block])


def parts_of(blocks: Blocks) -> Blocks:
    """Blocks as parts. What a prompt has no use for, such as marks of a cache, is left out of those of text;
    engines name the blocks of other types."""
    if isinstance(blocks, str):
        return blocks

    return [
        {"type": "text", "text": block.get("text")} if block.get("type") == "text" else block
        for block in blocks
    ]


def result_of(block: dict[str, Any], place: str) -> dict[str, Any]:
    """The message that the result of a tool makes."""
    result = convert(without_nulls(block), ToolResultBlock, place)
    return {"role": "tool", "tool_call_id": result.tool_use_id, "content": parts_of(result.content or "")}


def answer_of(blocks: Blocks, place: str) -> dict[str, Any]:
    """The message that the assistant's blocks make. Texts are joined: they are pieces of one answer."""
    if isinstance(blocks, str):
        return {"role": "assistant", "content": blocks}

    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for index, given in enumerate(blocks):
        block, where = without_nulls(given), f"{place}[{index}]"
        match block.get("type"):
            case "text":
                texts.append(convert(block, TextBlock, where).text)
            case "thinking":
                thoughts.append(convert(block, ThinkingBlock, where).thinking)
            case "redacted_thinking":
                pass  # encrypted by another server
            case "tool_use":
                use = convert(block, ToolUseBlock, where)
                function = {"name": use.name, "arguments": use.input}
                calls.append({"id": use.id, "type": "function", "function": function})
            case kind:
                allowed = "one of text, thinking, redacted_thinking and tool_use"
                raise RequestError.of(f"{where}.type", kind, allowed)
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


Kind = Literal["thinking", "text"]
EMPTY: dict[Kind, dict[str, str]] = {
    "thinking": {"type": "thinking", "thinking": "", "signature": ""},
    "text": {"type": "text", "text": ""},
}


class MessageAnswer:
    """A message, as `generation.Answer` describes it.

    shows_thinking: False = the text of thinking is left out.
    """

    def __init__(
        self,
        use: ToolUse,
        *,
        message_id: str,
        model: str,
        shows_thinking: bool,
        shows_cached_tokens: bool,
    ) -> None:
        self._parts = AnswerParts(use)
        self._common = {"id": message_id, "type": "message", "role": "assistant", "model": model}
        self._shows_thinking = shows_thinking
        self._shows_cached_tokens = shows_cached_tokens
        self._num_blocks = 0
        self._open: Kind | None = None
        self.headers: Mapping[str, str] = {"request-id": message_id, "x-request-id": message_id}

    def whole(self, completions: list[Completion]) -> dict[str, Any]:
        (completion,) = completions
        text, calls = self._parts.read(completion)
        content: list[dict[str, Any]] = []
        if completion.reasoning:
            content.append({**EMPTY["thinking"], "thinking": self._thought(completion.reasoning)})
        if text:
            content.append({**EMPTY["text"], "text": text})
        content += [call_json(call, call.arguments) for call in calls]
        ended = self._ended(completion)
        return {**self._common, "content": content, **ended, "usage": self._usage(completion)}

    def begin(self, num_prompt_tokens: int) -> Iterator[Event]:
        usage = {
            "input_tokens": num_prompt_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 0,
        }
        not_ended = {"stop_reason": None, "stop_sequence": None}
        yield event("message_start", message={**self._common, "content": [], **not_ended, "usage": usage})

    def chunk(self, index: int, chunk: Chunk, completion: Completion | None) -> Iterator[Event]:
        text, calls = self._parts.read(chunk)
        if chunk.reasoning:
            yield from self._write("thinking", self._thought(chunk.reasoning))
        if text:
            yield from self._write("text", text)
        for call in calls:
            yield from self._close()
            yield self._block_event("start", content_block=call_json(call, {}))
            written = json.dumps(call.arguments, ensure_ascii=False)
            yield self._block_event("delta", delta={"type": "input_json_delta", "partial_json": written})
            yield from self._stop()
        if completion is not None:
            yield from self._close()

    def end(self, completions: list[Completion]) -> Iterator[Event]:
        (completion,) = completions
        yield event("message_delta", delta=self._ended(completion), usage=self._usage(completion))
        yield event("message_stop")

    def failed(self, error: DriftError) -> Iterator[Event]:
        yield Event(shaped(described(error, {}), is_anthropic=True), "error")

    def _write(self, kind: Kind, text: str) -> Iterator[Event]:
        """Add text to the open block, or to a new one if that is of another kind."""
        if self._open != kind:
            yield from self._close()
            self._open = kind
            yield self._block_event("start", content_block=EMPTY[kind])
        if text:
            yield self._block_event("delta", delta={"type": f"{kind}_delta", kind: text})

    def _close(self) -> Iterator[Event]:
        """End the open block, if there is one."""
        if self._open is not None:
            self._open = None
            yield from self._stop()

    def _stop(self) -> Iterator[Event]:
        yield self._block_event("stop")
        self._num_blocks += 1

    def _block_event(self, name: str, **fields: Any) -> Event:
        return event(f"content_block_{name}", index=self._num_blocks, **fields)

    def _thought(self, text: str) -> str:
        return text if self._shows_thinking else ""

    def _ended(self, completion: Completion) -> dict[str, Any]:
        reason, found = self._parts.ended(completion), completion.stop_reason
        if reason == "tool_calls":
            return {"stop_reason": "tool_use", "stop_sequence": None}

        if reason == "length":
            is_full = found == "context"
            kind = "model_context_window_exceeded" if is_full else "max_tokens"
            return {"stop_reason": kind, "stop_sequence": None}

        if isinstance(found, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": found}

        return {"stop_reason": "end_turn", "stop_sequence": None}

    def _usage(self, completion: Completion) -> dict[str, Any]:
        """Token counts. In this protocol the tokens of the input do not include those that were cached."""
        usage = completion.usage
        cached = usage.cached_tokens if self._shows_cached_tokens else 0
        return {
            "input_tokens": usage.prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
        }


def call_json(call: ToolCall, arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": arguments}


def event(kind: str, **fields: Any) -> Event:
    return Event({"type": kind, **fields}, kind)


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
