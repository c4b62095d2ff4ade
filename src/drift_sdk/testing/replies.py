"""Replies of a scripted model, and the rule by which a reply belongs to a request."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, TypeGuard

from msgspec import Struct
from msgspec.structs import fields

from drift_sdk._keywords import ConfigFields
from drift_sdk._validation import check_float, is_unicode
from drift_sdk.driver.prompts import ModelText, PreparedPrompt, Prompt
from drift_sdk.errors import ConfigError, QueueFull, RequestError
from drift_sdk.results import ToolCall
from drift_sdk.testing.byte_tokens import EOS_TOKEN_ID, text_of
from drift_sdk.testing.written_replies import written
from drift_sdk.text.chat import ChatTemplate

__all__ = ["Answer", "NextToken", "Reply", "ReplyLike", "Script"]

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
