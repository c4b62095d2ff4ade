"""Replies of a scripted model, and the rule by which a reply belongs to a request.

A reply is text in a format of tool calls and reasoning, as a model would have generated it. The vocabulary is
bytes and an end-of-sequence token.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, TypeGuard

from msgspec import Struct
from msgspec.structs import fields

from drift_sdk._fields import ConfigFields, check_float, is_unicode
from drift_sdk.driver.prompts import ModelText, PreparedPrompt, Prompt
from drift_sdk.errors import ConfigError, QueueFull, RequestError
from drift_sdk.results import ToolCall
from drift_sdk.text.answers import tool_formats as marks
from drift_sdk.text.answers.formats import AnswerFormats
from drift_sdk.text.answers.reasoning import REASONING_FORMATS
from drift_sdk.text.chat import ChatTemplate
from drift_sdk.text.tokenizer import Tokenizer
from drift_sdk.text.tools import Tool, ToolSet

EOS_TOKEN_ID = 256
"""The scripted model's end-of-sequence id; ids 0 to 255 are bytes."""


def text_of(token_ids: Sequence[int]) -> str:
    """The text of token ids. Bytes that are no whole character become U+FFFD."""
    pieces = (bytes((token_id,)) if token_id < EOS_TOKEN_ID else b"<eos>" for token_id in token_ids)
    return b"".join(pieces).decode(errors="replace")


def byte_tokenizer() -> Tokenizer:
    """A tokenizer of 256 byte tokens and an end-of-sequence token, `EOS_TOKEN_ID`."""
    return Tokenizer.from_gguf(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "gpt-2",
            "tokenizer.ggml.tokens": [*byte_alphabet(), "<eos>"],
            "tokenizer.ggml.token_type": [1] * 256 + [3],
            "tokenizer.ggml.merges": [],
            "tokenizer.ggml.eos_token_id": EOS_TOKEN_ID,
        }
    )


def byte_alphabet() -> list[str]:
    """The printable character that stands for each byte in byte-level vocabularies."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    shifted = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(shifted)) for byte in range(256)]


AT_START_ONLY = ("llama3_json", "pythonic")
"""Formats without a marker: their calls are found at the start of an answer."""


def written(template: ChatTemplate, *, text: str, tool_calls: Sequence[ToolCall], reasoning: str) -> str:
    """A reply in the formats of a model with this chat template: reasoning, text, calls. Without calls and
    reasoning it is the text itself.

    ConfigError for calls or reasoning if the model has no format for them, for text before calls that can
    only stand at the start of an answer, for arguments that are not JSON, and for calls that cannot be read
    back: the format has no quotes for a name in them, for example.
    """
    formats = template.formats
    check_expressible(formats, text=text, has_calls=bool(tool_calls), has_reasoning=bool(reasoning))
    try:
        for call in tool_calls:
            check_call(template, call)
        if formats.is_harmony and (tool_calls or reasoning):
            return harmony(text, tool_calls, reasoning)

        calls = write_calls(template, tool_calls) if tool_calls else ""
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"tool_calls: expected arguments that are JSON: {error}", field="tool_calls"
        ) from error

    thought = ""
    if reasoning:
        reasoning_format = REASONING_FORMATS[formats.reasoning or ""]
        thought = f"{reasoning_format.openers[0]}{reasoning}{reasoning_format.closers[0]}"
    return f"{thought}{text}{calls}"


def check_expressible(formats: AnswerFormats, *, text: str, has_calls: bool, has_reasoning: bool) -> None:
    if has_calls and formats.tools is None:
        allowed = "none with EngineConfig.tool_format=None"
        raise ConfigError(f"tool_calls: expected {allowed}", field="tool_calls", allowed=allowed)

    if has_calls and (text or has_reasoning) and formats.tools in AT_START_ONLY:
        allowed = f"no text or reasoning before tool calls in the format {formats.tools}"
        raise ConfigError(f"tool_calls: expected {allowed}", field="tool_calls", allowed=allowed)

    if has_reasoning and formats.reasoning is None:
        allowed = 'an engine with a format of reasoning, such as EngineConfig(reasoning_format="think")'
        raise ConfigError(f"reasoning: expected {allowed}", field="reasoning", allowed=allowed)


def check_call(template: ChatTemplate, call: ToolCall) -> None:
    """ConfigError for a call that is not read back from the text that is written for it. TypeError and
    ValueError, of which UnicodeEncodeError is one, for arguments that are not JSON."""
    formats = template.formats
    if not isinstance(call.arguments, dict):
        raise TypeError(f"found {type(call.arguments).__name__}")

    arguments = json.loads(as_json(call.arguments))
    if formats.tools in ("qwen3_coder", "glm"):  # without a schema, values are read as text
        arguments = {name: as_text(value) for name, value in arguments.items()}
    text = write_calls(template, [call])
    text.encode()
    splitter = formats.splitter(ToolSet({call.name: Tool(call.name, {})}))
    found = (*splitter.push(text).tool_calls, *splitter.flush().tool_calls)
    if [(each.name, each.arguments) for each in found] != [(call.name, arguments)]:
        raise ConfigError.of("tool_calls", call, f"calls that the format {formats.tools} can express")


def write_calls(template: ChatTemplate, calls: Sequence[ToolCall]) -> str:
    if template.formats.is_harmony:
        return harmony("", calls, "")

    return CALLS[template.formats.tools or ""](calls, template.source)


def as_text(value: object) -> str:
    """A value where strings have no quotes."""
    return value if isinstance(value, str) else as_json(value)


def as_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def as_object(call: ToolCall, key: str = "arguments") -> str:
    """A call as a JSON object, with its id if it has one."""
    described: dict[str, Any] = {"name": call.name, key: call.arguments}
    if call.id:
        described["id"] = call.id
    return as_json(described)


def hermes(calls: Sequence[ToolCall], template: str) -> str:
    return "\n".join(f"<tool_call>\n{as_object(call)}\n</tool_call>" for call in calls)


def qwen3_coder(calls: Sequence[ToolCall], template: str) -> str:
    return "\n".join(
        f"<tool_call>\n<function={call.name}>\n"
        + "".join(
            f"<parameter={name}>\n{as_text(value)}\n</parameter>\n" for name, value in call.arguments.items()
        )
        + "</function>\n</tool_call>"
        for call in calls
    )


def glm(calls: Sequence[ToolCall], template: str) -> str:
    line = "\n" if marks.LINES_BETWEEN.search(template) else ""
    return line.join(
        f"<tool_call>{call.name}{line}"
        + "".join(
            f"<arg_key>{name}</arg_key>{line}<arg_value>{as_text(value)}</arg_value>{line}"
            for name, value in call.arguments.items()
        )
        + "</tool_call>"
        for call in calls
    )


def gemma4(calls: Sequence[ToolCall], template: str) -> str:
    return "".join(
        f"{marks.NOTED_CALL}call:{call.name}{marks.noted(call.arguments)}{marks.NOTED_CALL_END}"
        for call in calls
    )


def llama3_json(calls: Sequence[ToolCall], template: str) -> str:
    return "; ".join(as_object(call, "parameters") for call in calls)


def pythonic(calls: Sequence[ToolCall], template: str) -> str:
    shown = [
        f"{call.name}({', '.join(f'{name}={as_python(value)}' for name, value in call.arguments.items())})"
        for call in calls
    ]
    return f"[{', '.join(shown)}]"


def as_python(value: object) -> str:
    """A JSON value as a literal of Python."""
    if isinstance(value, bool) or value is None:
        return repr(value)

    if isinstance(value, list | tuple):
        return f"[{', '.join(map(as_python, value))}]"

    if isinstance(value, dict):
        return f"{{{', '.join(f'{as_json(key)}: {as_python(each)}' for key, each in value.items())}}}"

    return as_json(value)


def mistral(calls: Sequence[ToolCall], template: str) -> str:
    if "[ARGS]" not in template:
        return f"[TOOL_CALLS][{', '.join(map(as_object, calls))}]"

    ids = (f"[CALL_ID]{call.id}" if call.id else "" for call in calls)
    return "".join(
        f"[TOOL_CALLS]{call.name}{call_id}[ARGS]{as_json(call.arguments)}"
        for call, call_id in zip(calls, ids, strict=True)
    )


def deepseek(calls: Sequence[ToolCall], template: str) -> str:
    is_fenced = "```json" in template
    shown = [
        f"{marks.CALL_BEGIN}function{marks.CALL_SEP}{call.name}\n```json\n{as_json(call.arguments)}\n```{marks.CALL_END}"
        if is_fenced
        else f"{marks.CALL_BEGIN}{call.name}{marks.CALL_SEP}{as_json(call.arguments)}{marks.CALL_END}"
        for call in calls
    ]
    between = "\n" if is_fenced else ""
    return f"{marks.CALLS_BEGIN}{between.join(shown)}{marks.CALLS_END}"


def granite(calls: Sequence[ToolCall], template: str) -> str:
    return f"<|tool_call|>[{', '.join(map(as_object, calls))}]"


def phi4_mini(calls: Sequence[ToolCall], template: str) -> str:
    return "".join(f"<|tool_call|>{as_object(call)}<|/tool_call|>" for call in calls)


def harmony(text: str, calls: Sequence[ToolCall], reasoning: str) -> str:
    messages = []
    if reasoning:
        messages.append(f"<|channel|>analysis<|message|>{reasoning}")
    if text:
        messages.append(f"<|channel|>final<|message|>{text}")
    messages += [
        f"<|channel|>commentary to=functions.{call.name} "
        f"<|constrain|>json<|message|>{as_json(call.arguments)}"
        for call in calls
    ]
    return "<|end|><|start|>assistant".join(messages)


CALLS: dict[str, Callable[[Sequence[ToolCall], str], str]] = {
    "json": hermes,
    "hermes": hermes,
    "qwen3_coder": qwen3_coder,
    "glm": glm,
    "gemma4": gemma4,
    "llama3_json": llama3_json,
    "pythonic": pythonic,
    "mistral": mistral,
    "deepseek": deepseek,
    "granite": granite,
    "phi4_mini": phi4_mini,
}
"""Functions that write calls in each format, of the calls and the source of the chat template. They write
what the grammars of forced calls allow."""


NextToken = Callable[[Sequence[int], Sequence[int], int], int]
"""A scripted model: (token ids of the prompt, token ids generated so far, seed) -> next token id."""

MAX_DELAY_S = 3600.0


class Reply(Struct, frozen=True, metaclass=ConfigFields):
    """A scripted reply to one request.

    text:          the text that is generated, after reasoning that the chat template may have opened.
    tool_calls:    calls after the text, written in the model's tool format. They are read from the answer as
                   those of any model: by `chat` with tools, while `generate` shows them as text.
    reasoning:     reasoning before the text, written in the model's reasoning format.
    raises:        an exception, or a class that takes a message. A RequestError is raised by the request's
                   stream and QueueFull by the call that submits it, and nothing is generated. Any other
                   exception is a failure of the executor after the last token of the reply: it ends the
                   engine, and all its streams raise ExecutorError. None = the reply ends with the
                   end-of-sequence token.
    first_token_s: seconds before the first token, 0 to 3,600.
    token_s:       seconds before each further token, 0 to 3,600. A step takes as long as the slowest of its
                   sequences, so a delay holds up the requests that run at the same time.
    """

    text: str = ""
    tool_calls: Sequence[ToolCall] = ()
    reasoning: str = ""
    raises: Exception | type[Exception] | None = None
    first_token_s: float = 0.0
    token_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("text", "reasoning"):
            if not isinstance(getattr(self, name), str):
                raise ConfigError.of(name, getattr(self, name), "a string")

            if not is_unicode(getattr(self, name)):
                raise ConfigError.of(name, getattr(self, name), "a string without lone surrogates")

        calls = self.tool_calls
        if not isinstance(calls, list | tuple) or not all(isinstance(call, ToolCall) for call in calls):
            raise ConfigError.of("tool_calls", calls, "a sequence of ToolCall")

        if self.raises is not None and not (is_exception(self.raises) and is_made(self)):
            allowed = "an exception, a class of exceptions that takes a message, or None"
            raise ConfigError.of("raises", self.raises, allowed)

        for name in ("first_token_s", "token_s"):
            check_float(ConfigError, name, getattr(self, name), ge=0.0, le=MAX_DELAY_S)


ReplyLike: TypeAlias = "str | ToolCall | Reply | Exception | type[Exception] | Mapping[str, Any]"
"""A reply: a text, a tool call, a `Reply` or a mapping of its fields, or an exception for `Reply.raises`."""


class Answer(Struct, frozen=True):
    """A reply as the executor gives it.

    token_ids: its tokens.
    failure:   the executor's failure after them; None = there is none, and the end-of-sequence token is the
               last.
    """

    token_ids: tuple[int, ...]
    failure: Exception | None
    first_token_s: float
    token_s: float


class Script:
    """The replies of a scripted model to the requests of one engine.

    given: a reply to every request; or a list with the reply to each request, in the order of submission; or
           a function from the prompt's text to the reply; or a function of three arguments, `NextToken`.

    A request's reply is found by its arrival, the number of requests submitted to the engine before it, which
    slots, preemption, cached prefixes and the order of execution do not change. A function from prompts to
    replies is called once for each request, when its prompt has been tokenised.
    """

    def __init__(self, given: object) -> None:
        self.next_token: NextToken | None = None
        self._by_prompt: Callable[[str], object] | None = None
        self._replies: list[Reply] = []
        self._is_list = isinstance(given, list | tuple)
        self._answers: list[Answer] = []
        self._answers_to_prompts: dict[int, Answer] = {}  # by arrival
        self._template: ChatTemplate | None = None
        if isinstance(given, list | tuple):
            self._replies = [as_reply(each) for each in given]
        elif callable(given) and not is_exception(given):
            if takes(given, 3):
                self.next_token = given
            elif takes(given, 1):
                self._by_prompt = given
            else:
                raise ConfigError.of("reply", given, "a function of one argument or of three")
        else:
            self._replies = [as_reply(given)]

    def open(self, template: ChatTemplate) -> None:
        """Write the replies in the formats of a model with this chat template. ConfigError for what they do
        not allow."""
        self._template = template
        self._answers = [answer_of(reply, template) for reply in self._replies]

    def forget(self) -> None:
        """Forget replies to prompts of an engine that has been closed."""
        self._answers_to_prompts.clear()

    def scripted(self, arrival: int, prompt: Prompt) -> Prompt:
        """The prompt of a request, which raises the request's error if its reply is one. Raises QueueFull if
        that is the reply, and AssertionError for a request without a reply."""
        if self.next_token is not None:
            return prompt

        reply = self._reply(arrival)
        if reply is not None and (error := error_of(reply)) is not None and isinstance(error, QueueFull):
            raise error

        return ScriptedPrompt(prompt, arrival, self)

    def prepare(self, arrival: int, prompt_ids: Sequence[int]) -> None:
        """Find the reply to a prompt. Raises RequestError or QueueFull if that is the reply."""
        reply = self._reply(arrival)
        if reply is None:
            reply = self._reply_to_prompt(prompt_ids)
            assert self._template is not None
            self._answers_to_prompts[arrival] = answer_of(reply, self._template)
        error = error_of(reply)
        if isinstance(error, RequestError | QueueFull):
            self._answers_to_prompts.pop(arrival, None)
            raise error

    def answer(self, arrival: int, read_prompt: Callable[[], Sequence[int]]) -> Answer:
        """The answer to a request; `read_prompt` returns the token ids of its prompt."""
        if self._by_prompt is None:
            self._reply(arrival)  # there is one
            return self._answers[arrival if self._is_list else 0]

        if arrival not in self._answers_to_prompts:  # an engine that does not prepare the script's prompts
            self.prepare(arrival, read_prompt())
        return self._answers_to_prompts[arrival]

    def ended(self, arrival: int) -> None:
        """Called when the last token of a request has been generated."""
        self._answers_to_prompts.pop(arrival, None)

    def _reply(self, arrival: int) -> Reply | None:
        """The reply to a request; None if it depends on the prompt."""
        if self._by_prompt is not None:
            return None

        if not self._is_list:
            return self._replies[0]

        if arrival >= len(self._replies):
            raise AssertionError(f"request {arrival + 1} of a script of {len(self._replies)} replies")

        return self._replies[arrival]

    def _reply_to_prompt(self, prompt_ids: Sequence[int]) -> Reply:
        assert self._by_prompt is not None
        try:
            return as_reply(self._by_prompt(text_of(prompt_ids)))
        except ConfigError:
            raise
        except Exception as error:
            return Reply(raises=error)


class ScriptedPrompt:
    """A request's prompt, for which the script finds its reply as soon as it is tokenised."""

    def __init__(self, prompt: Prompt, arrival: int, script: Script) -> None:
        self.field: str = prompt.field
        self._prompt = prompt
        self._arrival = arrival
        self._script = script

    def prepare(self, model: ModelText) -> PreparedPrompt:
        prepared = self._prompt.prepare(model)
        self._script.prepare(self._arrival, prepared.token_ids)
        return prepared

    def num_tokens(self, model: ModelText) -> int:
        return self._prompt.num_tokens(model)


def as_reply(value: object) -> Reply:
    """A reply from any of its forms, or from a list that mixes them. ConfigError for anything else."""
    if isinstance(value, Reply):
        return value

    if isinstance(value, str):
        return Reply(value)

    if isinstance(value, ToolCall):
        return Reply(tool_calls=(value,))

    if is_exception(value):
        return Reply(raises=value)

    names = [field.name for field in fields(Reply)]
    if isinstance(value, Mapping) and set(value) <= set(names):
        return Reply(**value)

    if not isinstance(value, list | tuple):
        allowed = (
            f"a text, a ToolCall, a Reply, a mapping of {', '.join(names)}, an exception, or a list of them"
        )
        raise ConfigError.of("reply", value, allowed)

    parts = [as_reply(each) for each in value]
    return Reply(
        text="".join(part.text for part in parts),
        tool_calls=[call for part in parts for call in part.tool_calls],
        reasoning="".join(part.reasoning for part in parts),
        raises=next((part.raises for part in parts if part.raises is not None), None),
        first_token_s=max((part.first_token_s for part in parts), default=0.0),
        token_s=max((part.token_s for part in parts), default=0.0),
    )


def answer_of(reply: Reply, template: ChatTemplate) -> Answer:
    failure = error_of(reply)
    text = written(template, text=reply.text, tool_calls=reply.tool_calls, reasoning=reply.reasoning)
    ending = () if failure is not None else (EOS_TOKEN_ID,)
    return Answer((*text.encode(), *ending), failure, reply.first_token_s, reply.token_s)


def error_of(reply: Reply) -> Exception | None:
    """The exception of a reply; of a class, a new one."""
    return reply.raises("a scripted error") if isinstance(reply.raises, type) else reply.raises


def is_made(reply: Reply) -> bool:
    """Whether a reply's exception can be made."""
    try:
        return isinstance(error_of(reply), Exception)
    except TypeError:
        return False


def is_exception(value: object) -> TypeGuard[Exception | type[Exception]]:
    return isinstance(value, Exception) or (isinstance(value, type) and issubclass(value, Exception))


def takes(function: Callable[..., object], num_arguments: int) -> bool:
    """Whether a function can be called with so many positional arguments. False if it does not say so: many
    classes of Python's own do not."""
    try:
        inspect.signature(function).bind(*range(num_arguments))
    except (TypeError, ValueError):
        return False

    return True
