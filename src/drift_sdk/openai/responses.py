"""OpenAI's Responses, `/v1/responses`. Nothing is stored: a request has its whole conversation as `input`.

Input items become messages in the form that engines take; answers are output items, and the events that build
them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Literal

from starlette.requests import Request
from starlette.responses import Response

from drift_sdk import (
    BaseEngine,
    Chunk,
    Completion,
    DriftError,
    JsonSchema,
    RequestError,
    SamplingParams,
    ToolCall,
)
from drift_sdk.openai.conversation import (
    ANY_OBJECT,
    CHOICES,
    ROLES,
    SAMPLING,
    AnswerParts,
    Grammar,
    TokenLog,
    Tools,
    ToolUse,
    as_parts,
    described_tool,
    effort_args,
    params_of,
)
from drift_sdk.openai.service import Event, Generation, Service, new_id, respond
from drift_sdk.openai.wire import Body, Strict, Wire, convert, described, without_nulls

STATEFUL = "an item with its content: this server keeps no items"


class TextItem(Wire, kw_only=True):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[dict[str, Any]]


class CallItem(Wire, kw_only=True):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str = ""


class ResultItem(Wire, kw_only=True):
    type: Literal["function_call_output"]
    call_id: str
    output: str | list[dict[str, Any]] = ""


class ReasoningText(Wire, kw_only=True):
    text: str


class ReasoningItem(Wire, kw_only=True):
    """Reasoning that is only there encrypted is left out: it is of another server."""

    type: Literal["reasoning"]
    content: list[ReasoningText] | None = None
    summary: list[ReasoningText] | None = None

    @property
    def text(self) -> str:
        return "\n".join(part.text for part in self.content or self.summary or ())


KINDS: dict[str, type[TextItem] | type[CallItem] | type[ResultItem] | type[ReasoningItem]] = {
    "message": TextItem,
    "function_call": CallItem,
    "function_call_output": ResultItem,
    "reasoning": ReasoningItem,
}


class Conversation:
    """Messages, to which items are added. Reasoning, text and calls of one answer are items of their own, and
    become one message.

    places: path of a message -> path of the item that it was made of, the newest of several.
    """

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.places: dict[str, str] = {}

    def add(self, item: TextItem | CallItem | ResultItem | ReasoningItem, place: str) -> None:
        self._add(item)
        self.places[f"messages[{len(self.messages) - 1}]"] = place

    def _add(self, item: TextItem | CallItem | ResultItem | ReasoningItem) -> None:
        match item:
            case ReasoningItem():
                if item.text:
                    self._answer(unless=("content", "tool_calls"))["reasoning_content"] = item.text
            case CallItem():
                function = {"name": item.name, "arguments": item.arguments}
                call = {"id": item.call_id, "type": "function", "function": function}
                self._answer(unless=()).setdefault("tool_calls", []).append(call)
            case TextItem(role="assistant"):
                self._answer(unless=("content", "tool_calls"))["content"] = as_parts(item.content)
            case TextItem():
                role = ROLES.get(item.role, item.role)
                self.messages.append({"role": role, "content": as_parts(item.content)})
            case ResultItem():
                content = as_parts(item.output)
                self.messages.append({"role": "tool", "tool_call_id": item.call_id, "content": content})

    def _answer(self, unless: Sequence[str]) -> dict[str, Any]:
        """The last message if it is the assistant's and has none of these fields, else a new one."""
        last = self.messages[-1] if self.messages else {}
        if last.get("role") != "assistant" or any(name in last for name in unless):
            last = {"role": "assistant"}
            self.messages.append(last)
        return last


def messages_of(
    given: str | Sequence[Mapping[str, Any]], instructions: str | None
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """The messages of a request, and the path of each -> the path of its item. RequestError for an item of
    another kind, with its place."""
    conversation = Conversation()
    if instructions is not None:
        conversation.add(TextItem(role="system", content=instructions), "instructions")
    if isinstance(given, str):
        conversation.add(TextItem(role="user", content=given), "input")
    elif not given:
        raise RequestError.of("input", given, "at least one item")
    else:
        for index, values in enumerate(given):
            conversation.add(item_of(values, f"input[{index}]"), f"input[{index}]")
    return [{"content": "", **message} for message in conversation.messages], conversation.places


def item_of(values: Mapping[str, Any], place: str) -> TextItem | CallItem | ResultItem | ReasoningItem:
    kind = values.get("type") or "message"
    if not isinstance(kind, str) or kind not in KINDS:
        allowed = STATEFUL if kind == "item_reference" else f"one of {', '.join(KINDS)}"
        raise RequestError.of(f"{place}.type", kind, allowed)

    return convert({"type": "message", **without_nulls(values)}, KINDS[kind], place)


PREFIXES = {"message": "msg_", "reasoning": "rs_", "function_call": "fc_"}
PARTS = {"message": "output_text", "reasoning": "reasoning_text"}
"""Type of an item -> type of the part with its text."""


class Item:
    """An output item that is being built: reasoning, a message, or a call.

    kind: its type. text: of its part, or the arguments of the call.
    """

    def __init__(self, kind: str, index: int, call: ToolCall | None = None) -> None:
        self.id = new_id(PREFIXES[kind])
        self.kind = kind
        self.index = index
        self.text = ""
        self.logprobs: list[dict[str, Any]] = []
        self._call = call

    @property
    def part(self) -> dict[str, Any]:
        """The part that has the text."""
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": self.text}

        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": self.logprobs}

    def json(self, status: str) -> dict[str, Any]:
        common = {"id": self.id, "type": self.kind, "status": status}
        parts = [self.part] if self.text or status != "in_progress" else []
        if self._call is not None:
            call = {"call_id": self._call.id, "name": self._call.name, "arguments": self.text}
            return {**common, **call}

        if self.kind == "reasoning":
            return {**common, "summary": [], "content": parts}

        return {**common, "role": "assistant", "content": parts}


class ResponseAnswer:
    """A response, as `generation.Answer` describes it.

    echoed: fields of the response that repeat the request.
    """

    def __init__(
        self,
        engine: BaseEngine,
        use: ToolUse,
        echoed: Mapping[str, Any],
        *,
        response_id: str,
        model: str,
        has_logprobs: bool,
        shows_cached_tokens: bool,
    ) -> None:
        self._parts = AnswerParts(use)
        self._log = TokenLog(engine) if has_logprobs else None
        self._is_split = False
        self._echoed = echoed
        self._common = {
            "id": response_id,
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
        }
        self._shows_cached_tokens = shows_cached_tokens
        self._items: list[Item] = []
        self._open: Item | None = None
        self._num_events = 0
        self.headers: Mapping[str, str] = {"x-request-id": response_id}

    def whole(self, completions: list[Completion]) -> dict[str, Any]:
        (completion,) = completions
        for _ in self._add(completion, completion):  # the events are not sent
            pass
        return self._response(completion)

    def begin(self, num_prompt_tokens: int) -> Iterator[Event]:
        for name in ("created", "in_progress"):
            yield self._event(f"response.{name}", response=self._response(None))

    def chunk(self, index: int, chunk: Chunk, completion: Completion | None) -> Iterator[Event]:
        yield from self._add(chunk, completion)

    def end(self, completions: list[Completion]) -> Iterator[Event]:
        response = self._response(completions[0])
        yield self._event(f"response.{response['status']}", response=response)

    def failed(self, error: DriftError) -> Iterator[Event]:
        found = described(error, {})
        failure = {"code": found.code or "server_error", "message": found.message}
        yield self._event(
            "response.failed", response={**self._response(None), "status": "failed", "error": failure}
        )

    def _add(self, part: Chunk | Completion, completion: Completion | None) -> Iterator[Event]:
        """Add a chunk, or all of a completion. completion: given with the last chunk."""
        text, calls = self._parts.read(part)
        logprobs = self._logprobs(part, completion)
        if part.reasoning:
            yield from self._write("reasoning", part.reasoning, [])
        if text or logprobs:
            yield from self._write("message", text, logprobs)
        for call in calls:
            yield from self._close("completed")
            yield from self._call(call)
        if completion is not None:
            is_whole = self._parts.ended(completion) != "length"
            yield from self._close("completed" if is_whole else "incomplete")
            if not self._items:  # an empty answer is a message too
                yield from self._write("message", "", [])
                yield from self._close("completed" if is_whole else "incomplete")

    def _write(self, kind: str, text: str, logprobs: list[dict[str, Any]]) -> Iterator[Event]:
        """Add text to the open item, or to a new one if that is of another kind."""
        if self._open is None or self._open.kind != kind:
            yield from self._close("completed")
            self._open = Item(kind, len(self._items))
            self._items.append(self._open)
            yield self._item_event("added", self._open, "in_progress")
            yield self._part_event("added", self._open)
        item = self._open
        item.text += text
        item.logprobs += logprobs
        more = {"logprobs": logprobs} if kind == "message" else {}
        if text or logprobs:
            yield self._event(f"response.{PARTS[kind]}.delta", **place(item), delta=text, **more)

    def _close(self, status: str) -> Iterator[Event]:
        """Complete the open item, if there is one."""
        item, self._open = self._open, None
        if item is not None:
            more = {"logprobs": item.logprobs} if item.kind == "message" else {}
            yield self._event(f"response.{PARTS[item.kind]}.done", **place(item), text=item.text, **more)
            yield self._part_event("done", item)
            yield self._item_event("done", item, status)

    def _call(self, call: ToolCall) -> Iterator[Event]:
        """The events of a call, which comes whole."""
        item = Item("function_call", len(self._items), call)
        self._items.append(item)
        yield self._item_event("added", item, "in_progress")
        item.text = json.dumps(call.arguments, ensure_ascii=False)
        where = {"item_id": item.id, "output_index": item.index}
        name = "response.function_call_arguments"
        yield self._event(f"{name}.delta", **where, delta=item.text)
        yield self._event(f"{name}.done", **where, name=call.name, arguments=item.text)
        yield self._item_event("done", item, "completed")

    def _logprobs(self, part: Chunk | Completion, completion: Completion | None) -> list[dict[str, Any]]:
        if self._log is None or part.logprobs is None:
            return []

        self._is_split |= bool(part.reasoning or part.tool_calls)
        taken = self._log.take(part.text, part.logprobs, completion, is_split=self._is_split)
        return [self._log.entry_json(entry) for _, entry in taken]

    def _response(self, completion: Completion | None) -> dict[str, Any]:
        """The response as it is now. completion: None before the end."""
        status, details = "in_progress", None
        if completion is not None:
            is_cut = self._parts.ended(completion) == "length"
            status = "incomplete" if is_cut else "completed"
            details = {"reason": "max_output_tokens"} if is_cut else None
        last = self._items[-1] if self._items else None
        output = [
            item.json("incomplete" if item is last and status == "incomplete" else "completed")
            for item in self._items
        ]
        return {
            **self._common,
            **self._echoed,
            "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,
            "error": None,
            "incomplete_details": details,
            "output": output,
            "usage": None if completion is None else self._usage(completion),
        }

    def _usage(self, completion: Completion) -> dict[str, Any]:
        usage = completion.usage
        cached = usage.cached_tokens if self._shows_cached_tokens else 0
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }

    def _item_event(self, name: str, item: Item, status: str) -> Event:
        where = {"output_index": item.index, "item": item.json(status)}
        return self._event(f"response.output_item.{name}", **where)

    def _part_event(self, name: str, item: Item) -> Event:
        return self._event(f"response.content_part.{name}", **place(item), part=item.part)

    def _event(self, kind: str, **fields: Any) -> Event:
        event = Event({"type": kind, "sequence_number": self._num_events, **fields}, kind)
        self._num_events += 1
        return event


def place(item: Item) -> dict[str, Any]:
    return {"item_id": item.id, "output_index": item.index, "content_index": 0}


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
