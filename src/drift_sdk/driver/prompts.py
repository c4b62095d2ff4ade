"""Prompts as callers give them, conversations among them: checks, token ids, and their count."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol, cast

from msgspec import Struct

from drift_sdk._fields import check_bool, plain_int, plain_scalar
from drift_sdk._plain_data import MAX_ITEMS, IdArray, ids_of_array, reading, to_plain
from drift_sdk.driver.loops import Latch
from drift_sdk.errors import PromptTooLong, RequestError, short_repr
from drift_sdk.grammars import Grammar
from drift_sdk.sampling_params import SamplingParams
from drift_sdk.text.template_form import TEXT_ROLES
from drift_sdk.text.tools import ToolSet

if TYPE_CHECKING:  # their libraries would make up most of the package's import time
    from drift_sdk.text.answers.answer import Answer
    from drift_sdk.text.chat import ChatTemplate
    from drift_sdk.text.tokenizer import Tokenizer

MAX_PROMPT_TOKENS = 2**22
"""More than any model's context. A prompt is copied at the call, before the model's own limit is checked."""
MAX_COUNTED_CHARS = 2**22
"""Most characters of a text whose tokens are counted: tokenising takes about 200 bytes of memory for each."""
MAX_CHARS_PER_TOKEN = 8
"""A text of at most this many characters for each token of the context is tokenised to find out whether it
fits. Longer texts rarely fit; before one is tokenised, the least number of its tokens is computed, which
takes one pass over the vocabulary."""


class ModelText(Struct, frozen=True, kw_only=True):
    """The parts of a model that turn requests into sequences and tokens into text.

    tokenizer:      text to token ids and back.
    chat_template:  messages to text; None if the model has none.
    eos_token_ids:  token ids that end a completion.
    max_model_len:  most tokens of prompt and completion together.
    vocab_size:     token ids of the model are from 0 to vocab_size - 1.
    default_params: parameters of requests that give none.
    has_drafts:     whether the engine speculates.
    has_states:     whether layers have recurrent states.
    """

    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    eos_token_ids: tuple[int, ...]
    max_model_len: int
    vocab_size: int
    default_params: SamplingParams = SamplingParams()
    has_drafts: bool = False
    has_states: bool = False


class PreparedPrompt(Struct, frozen=True):
    """A prompt for a model.

    token_ids:    its token ids.
    new_answer:   makes what the answer to a conversation is read with; it is called with the request's own
                  grammar, or None, and raises RequestError. None for other prompts, whose answer is text.
    is_continued: the completion continues a text that the prompt ends with.
    first_scored: the first token that gets a log-probability, if the request asks for them.
    """

    token_ids: list[int]
    new_answer: Callable[[Grammar | None], Answer] | None = None
    is_continued: bool = False
    first_scored: int = 1


def message_ends(token_ids: list[int], eos_token_ids: tuple[int, ...]) -> tuple[int, ...]:
    """Positions at which other prompts may part from a conversation's: after its first message, which is that
    of the system, and before its last one. Messages end with tokens that end completions."""
    ends = frozenset(eos_token_ids)
    found = [end for end, token_id in enumerate(token_ids, 1) if token_id in ends]
    return (*found[:1], *found[-2:-1])


class Prompt(Protocol):
    """A prompt. `field` is the name of the caller's argument that it comes from, for error messages."""

    @property
    def field(self) -> str: ...

    def prepare(self, model: ModelText) -> PreparedPrompt:
        """The prompt for a model. Runs on a text thread. RequestError if the prompt does not fit the
        model."""

    def num_tokens(self, model: ModelText) -> int:
        """The number of the prompt's token ids, also if there are none or more than the model takes. Runs on
        a text thread. RequestError as of `prepare` otherwise."""


class TextPrompt(Struct, frozen=True):
    """A text, which is tokenised with the model's special tokens (such as BOS) added."""

    text: str
    field = "prompt"

    def prepare(self, model: ModelText) -> PreparedPrompt:
        return PreparedPrompt(encode(self.text, model, add_special_tokens=True))

    def num_tokens(self, model: ModelText) -> int:
        check_countable(self.text, self.field)
        return len(model.tokenizer.encode(self.text, add_special_tokens=True))


class TokenPrompt(Struct, frozen=True):
    """Token ids, used as they are."""

    ids: tuple[int, ...]
    field = "prompt"

    def prepare(self, model: ModelText) -> PreparedPrompt:
        check_length(len(self.ids), model)
        return PreparedPrompt(checked_ids(self.ids, model, given=list(self.ids)))

    def num_tokens(self, model: ModelText) -> int:
        return len(checked_ids(self.ids, model, given=list(self.ids))) if self.ids else 0


class CutPrompt(Struct, frozen=True):
    """The first tokens of a text or of token ids, of which at least one remains besides those that the model
    has around a text, which are kept. most: tokens, at least 1; never more than the model takes."""

    prompt: TextPrompt | TokenPrompt
    most: int

    @property
    def field(self) -> str:
        return self.prompt.field

    def prepare(self, model: ModelText) -> PreparedPrompt:
        most = min(self.most, model.max_model_len - 1)
        if isinstance(self.prompt, TokenPrompt):
            return TokenPrompt(self.prompt.ids[:most]).prepare(model)

        return PreparedPrompt(checked_ids(self._cut(model, most), model, given=self.prompt.text))

    def num_tokens(self, model: ModelText) -> int:
        return min(self.prompt.num_tokens(model), self.most, model.max_model_len - 1)

    def _cut(self, model: ModelText, most: int) -> list[int]:
        assert isinstance(self.prompt, TextPrompt)
        text, tokenizer = self.prompt.text, model.tokenizer
        check_countable(text, self.field)
        ids = tokenizer.encode(text, add_special_tokens=True)
        if len(ids) <= most:
            return ids

        own = tokenizer.encode(text, add_special_tokens=False)
        num_added = len(ids) - len(own)
        if most <= num_added:
            allowed = f"at least {num_added + 1}, as the model has {num_added} tokens around a text"
            raise RequestError.of("truncate_prompt_tokens", self.most, allowed)

        first = next(place for place in range(num_added + 1) if ids[place : place + len(own)] == own)
        return [*ids[:first], *own[: most - num_added], *ids[first + len(own) :]]


class AnsweredPrompt(Struct, frozen=True):
    """A prompt and an answer to it, whose tokens are scored. answer: a text, tokenised by itself without
    special tokens, or token ids; neither is empty. place: of the answer among the caller's arguments."""

    prompt: Prompt
    answer: str | tuple[int, ...]
    place: str

    @property
    def field(self) -> str:
        return self.prompt.field

    def prepare(self, model: ModelText) -> PreparedPrompt:
        ids = self.prompt.prepare(model).token_ids
        answer_ids: Sequence[int] = self.answer if isinstance(self.answer, tuple) else ()
        try:
            if isinstance(self.answer, str):
                answer_ids = encode(self.answer, model, add_special_tokens=False)
            answer_ids = checked_ids(answer_ids, model, given=self.answer)
            check_length(len(ids) + len(answer_ids), model, what="prompt and answer")
        except RequestError as error:
            raise in_place(error, self.place) from error

        return PreparedPrompt([*ids, *answer_ids], first_scored=len(ids))

    def num_tokens(self, model: ModelText) -> int:
        return len(self.prepare(model).token_ids)


class FramedPrompt(Struct, frozen=True):
    """A text inside a longer one, all tokenised without special tokens: the text together with what is before
    it. most: tokens of the prompt that are kept, by leaving out the end of the text; None = all."""

    before: str
    text: str
    after: str
    most: int | None = None
    field = "prompt"

    def prepare(self, model: ModelText) -> PreparedPrompt:
        given = self.before + self.text + self.after
        check_countable(given, self.field)
        if self.most is not None:
            return PreparedPrompt(checked_ids(self._cut(model, self.most), model, given=given))

        parts = (self.before + self.text, self.after)
        ids = [each for part in parts if part for each in encode(part, model, add_special_tokens=False)]
        check_length(len(ids), model)
        return PreparedPrompt(checked_ids(ids, model, given=given))

    def num_tokens(self, model: ModelText) -> int:
        return len(self.prepare(model).token_ids)

    def _cut(self, model: ModelText, most: int) -> list[int]:
        tokenizer, most = model.tokenizer, min(most, model.max_model_len - 1)
        num_fixed = sum(fitting_tokens(part, model) for part in (self.before, self.after))
        if num_fixed <= most:
            first = tokenizer.encode(self.before + self.text, add_special_tokens=False)
            last = tokenizer.encode(self.after, add_special_tokens=False)
            if num_fixed < most or len(first) + len(last) <= most:
                return [*first[: most - len(last)], *last]

        check_length(num_fixed + 1, model, "at least ")  # with one token of the text
        allowed = f"more than {num_fixed}, the tokens of the prompt without the document"
        raise RequestError.of("truncate_prompt_tokens", most, allowed)


class SharedPrompt:
    """A prompt of several requests that is tokenised for the first of them alone: the others are prepared
    after it."""

    def __init__(self, prompt: Prompt) -> None:
        self.field: str = prompt.field
        self._prompt = prompt
        self._prepared: PreparedPrompt | None = None

    def prepare(self, model: ModelText) -> PreparedPrompt:
        if self._prepared is None:
            self._prepared = self._prompt.prepare(model)
        return self._prepared

    def num_tokens(self, model: ModelText) -> int:
        return self._prompt.num_tokens(model)


def as_prompt(prompt: str | Sequence[int] | IdArray) -> Prompt:
    """The prompt as a value. RequestError for what is neither a text nor a sequence of ids."""
    allowed = "a string or a sequence of token ids"
    prompt = ids_of_array("prompt", prompt, MAX_PROMPT_TOKENS)
    if isinstance(prompt, bytes | bytearray) or not isinstance(prompt, Sequence):
        raise RequestError.of("prompt", prompt, allowed)

    if isinstance(prompt, str):
        return TextPrompt(plain_scalar(prompt))

    with reading("prompt", prompt, allowed):
        num_ids = length_of(prompt)
        if num_ids > MAX_PROMPT_TOKENS:
            raise too_many_ids(num_ids)

        # One more than there may be: a sequence may be longer than it says, or have no end.
        ids = tuple(prompt) if type(prompt) in (list, tuple) else tuple(islice(prompt, MAX_PROMPT_TOKENS + 1))
    if ids and isinstance(ids[0], Mapping):
        raise RequestError.of("prompt", prompt, f"{allowed}; chat() and Job(messages=...) take messages")

    if ids and isinstance(ids[0], str | list | tuple):
        raise RequestError.of("prompt", prompt, f"{allowed}; map() takes several prompts")

    if len(ids) > MAX_PROMPT_TOKENS:
        raise too_many_ids(len(ids))

    if not set(map(type, ids)) <= {int}:
        ids = tuple(map(plain_int, ids))
    return TokenPrompt(ids)


def length_of(sequence: Sequence[object]) -> int:
    """The length, or that of the longest list if it is larger."""
    try:
        return len(sequence)
    except OverflowError:  # of a range, say
        return sys.maxsize


def too_many_ids(number: int) -> RequestError:
    allowed = f"at most {MAX_PROMPT_TOKENS} token ids"
    return RequestError(f"prompt: expected {allowed}, not {number}", field="prompt", allowed=allowed)


def check_countable(text: str, field: str) -> None:
    """RequestError for a text whose tokens take too much memory to be counted."""
    if len(text) > MAX_COUNTED_CHARS:
        allowed = f"a text of at most {MAX_COUNTED_CHARS} characters"
        message = f"{field}: expected {allowed}, not {len(text)}"
        raise RequestError(message, field=field, value=len(text), allowed=allowed)


def encode(text: str, model: ModelText, *, add_special_tokens: bool) -> list[int]:
    """Token ids of a text; RequestError if they do not fit the model."""
    if len(text) > MAX_CHARS_PER_TOKEN * model.max_model_len:
        check_length(model.tokenizer.min_num_tokens(text, model.max_model_len), model, "at least ")
    ids = model.tokenizer.encode(text, add_special_tokens=add_special_tokens)
    check_length(len(ids), model)
    return checked_ids(ids, model, given=text)


def fitting_tokens(text: str, model: ModelText) -> int:
    """The number of tokens of a text, without special tokens; a lower bound if they do not fit the model."""
    if len(text) > MAX_CHARS_PER_TOKEN * model.max_model_len:
        least = model.tokenizer.min_num_tokens(text, model.max_model_len)
        if least >= model.max_model_len:
            return least

    return len(model.tokenizer.encode(text, add_special_tokens=False))


def in_place(error: RequestError, place: str) -> RequestError:
    """The error of a prompt, or of the answer to one, with its place in the caller's arguments; other errors
    as they are."""
    if error.field != "prompt":
        return error

    message = str(error)
    rest = message.removeprefix("prompt")
    message = place + (rest if rest.startswith(("=", "[", ":")) else f": {message}")
    return type(error)(message, field=place, value=error.value, allowed=error.allowed)


def check_length(num_tokens: int, model: ModelText, bound: str = "", *, what: str = "prompt") -> None:
    """PromptTooLong for a prompt that leaves no room for a token. `bound`: words before the number in the
    message; `what`: is so long."""
    if num_tokens >= model.max_model_len:
        allowed = f"at most {model.max_model_len - 1} tokens (max_model_len - 1)"
        raise PromptTooLong(
            f"{what} of {bound}{num_tokens} tokens: expected {allowed}",
            field="prompt",
            value=num_tokens,
            allowed=allowed,
        )


def checked_ids(ids: Sequence[int], model: ModelText, *, given: str | Sequence[int]) -> list[int]:
    """The ids as a list. RequestError if there are none, with `given` as the prompt, and for the first that
    is not a token id of the model, with its index."""
    allowed = f"token id from 0 to {model.vocab_size - 1}"
    if not ids:
        wanted = "a text of at least one token" if isinstance(given, str) else f"at least one {allowed}"
        raise RequestError.of("prompt", given, wanted)

    for index, token_id in enumerate(ids):
        if type(token_id) is not int or not 0 <= token_id < model.vocab_size:
            if not isinstance(token_id, int) or isinstance(token_id, bool):
                allowed += ", an int"  # others may look like one
            place = f"prompt[{index}]" if not isinstance(given, str) else f"prompt: token {index}"
            message = f"{place}={short_repr(token_id)}: expected a {allowed}"
            raise RequestError(message, field="prompt", value=token_id, allowed=f"a {allowed}")

    return list(ids)


class ChatPrompt(Struct, frozen=True, kw_only=True):
    """A conversation, which the model's chat template renders and which is then tokenised without special
    tokens added.

    messages, tools, template_args: plain data that no other object refers to.
    tool_choice:                    "auto", "none", "required" or the name of one of the tools.
    continue_final:                 the answer continues the last message.
    """

    messages: list[Mapping[str, Any]]
    tools: list[Mapping[str, Any]] | None = None
    template_args: Mapping[str, Any] | None = None
    tool_choice: str = "auto"
    continue_final: bool = False
    field = "messages"

    def prepare(self, model: ModelText) -> PreparedPrompt:
        template = self._template(model)
        text = self._render(template)
        return PreparedPrompt(
            encode(text, model, add_special_tokens=False),
            lambda grammar: self._answer(model, template, text, grammar),
            is_continued=self.continue_final,
        )

    def num_tokens(self, model: ModelText) -> int:
        text = self._render(self._template(model))
        check_countable(text, self.field)
        return len(model.tokenizer.encode(text, add_special_tokens=False))

    @property
    def offered_tools(self) -> list[Mapping[str, Any]] | None:
        """The tools that the template and the model see."""
        return self.tools if self.tool_choice != "none" else None

    @property
    def has_calls(self) -> bool:
        """Whether a message has tool calls."""
        return any(isinstance(each, Mapping) and each.get("tool_calls") for each in self.messages)

    def _template(self, model: ModelText) -> ChatTemplate:
        if model.chat_template is None:
            allowed = "a model with a chat template; use generate()"
            raise RequestError(f"messages: expected {allowed}", field="messages", allowed=allowed)

        return model.chat_template.for_tools(self.offered_tools)

    def _answer(self, model: ModelText, template: ChatTemplate, text: str, grammar: Grammar | None) -> Answer:
        from drift_sdk.text.answers.answer import prepare_answer

        is_forced = self.tool_choice not in ("auto", "none")
        return prepare_answer(
            template.forced_formats if is_forced else template.formats,
            model.tokenizer,
            template=template.source,
            prompt=text,
            continued=self.messages[-1]["content"] if self.continue_final else None,
            tools=ToolSet.of(self.offered_tools),
            tool_choice=self.tool_choice,
            grammar=grammar,
        )

    def _render(self, template: ChatTemplate) -> str:
        return template.render(
            self.messages,
            tools=self.offered_tools,
            template_args=self.template_args,
            continue_final=self.continue_final,
        )


def as_any_prompt(
    prompt: str | Sequence[int] | IdArray | Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    template_args: Mapping[str, Any] | None,
    *,
    tool_choice: str = "auto",
    continue_final: bool = False,
) -> Prompt:
    """A prompt as of `as_prompt`, or messages as of `as_chat_prompt`. RequestError for arguments
    of messages without them."""
    # As `as_prompt` reads it: a range may have no length, and the class of a caller no items by their index.
    is_conversation = False
    if isinstance(prompt, Sequence) and not isinstance(prompt, str | bytes | bytearray):
        with reading("prompt", prompt, "a string, or a sequence of token ids or messages"):
            is_conversation = isinstance(next(iter(prompt), None), Mapping)
    if is_conversation:
        messages = cast("Sequence[Mapping[str, Any]]", prompt)
        return as_chat_prompt(
            messages, tools, template_args, tool_choice=tool_choice, continue_final=continue_final
        )

    for name, value, default in (
        ("tools", tools, None),
        ("template_args", template_args, None),
        ("tool_choice", tool_choice, "auto"),
        ("continue_final", continue_final, False),
    ):
        if value is not default and not (isinstance(value, str) and value == default):
            allowed = f"{default!r} with a prompt that is no sequence of messages"
            raise RequestError.of(name, value, allowed)

    return as_prompt(cast("str | Sequence[int]", prompt))


def as_chat_prompt(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    template_args: Mapping[str, Any] | None,
    *,
    tool_choice: str = "auto",
    continue_final: bool = False,
) -> ChatPrompt:
    """A conversation as a value. RequestError for what is not plain data or has another form."""
    if isinstance(messages, str | bytes) or not isinstance(messages, Sequence):
        raise RequestError.of("messages", messages, "a sequence of mappings with role and content")

    if tools is not None and (isinstance(tools, str | bytes) or not isinstance(tools, Sequence)):
        raise RequestError.of("tools", tools, "a sequence of mappings")

    with reading("template_args", template_args, "a mapping of names to values"):
        check_named(template_args)
    check_bool(RequestError, "continue_final", continue_final)
    with reading("messages", messages, "a sequence of mappings with role and content"):
        check_contents(messages)
    prompt = ChatPrompt(
        messages=to_plain("messages", messages),
        tools=to_plain("tools", tools, is_json=True),
        template_args=to_plain("template_args", template_args),
        tool_choice=plain_scalar(tool_choice),
        continue_final=continue_final,
    )
    check_tools(prompt.tools)
    check_tool_choice(prompt)
    return prompt


def check_named(template_args: object) -> None:
    """RequestError for what is no mapping of names."""
    if template_args is None:
        return

    names = islice(template_args, MAX_ITEMS) if isinstance(template_args, Mapping) else (None,)
    if not all(isinstance(name, str) for name in names):  # with more they are no plain data
        raise RequestError.of("template_args", template_args, "a mapping of names to values")


def check_contents(messages: Sequence[Mapping[str, Any]]) -> None:
    """RequestError for a content that no template takes. A tool's answer may also be other plain data, and
    the assistant's content None."""
    for index, message in enumerate(islice(messages, MAX_ITEMS)):  # with more they are no plain data
        if not isinstance(message, Mapping) or "content" not in message:
            continue  # the template has its own rules

        role, content = message.get("role"), message["content"]
        is_binary = isinstance(content, bytes | bytearray | memoryview)
        is_text_or_parts = isinstance(content, str | Sequence) and not is_binary
        is_other = role not in TEXT_ROLES or (role == "assistant" and content is None)
        if is_binary or not (is_text_or_parts or is_other):
            raise RequestError.of(f"messages[{index}].content", content, "a string or a list of parts")


def check_tools(tools: object) -> None:
    """RequestError for a function without a name, and for a schema under a name that is not read.
    Descriptions of other kinds are left to the template."""
    for index, tool in enumerate(tools if isinstance(tools, Sequence) else ()):
        is_function = isinstance(tool, Mapping) and (not tool or tool.get("type") == "function")
        if is_function and not ToolSet.of([tool]):
            allowed = '{"type": "function", "function": {"name": ..., ...}}'
            raise RequestError.of(f"tools[{index}]", tool, allowed)

        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if isinstance(function, Mapping) and "input_schema" in function and "parameters" not in function:
            place = f"tools[{index}].input_schema"
            raise RequestError.of(place, function["input_schema"], 'none: the schema is "parameters" here')


def check_tool_choice(prompt: ChatPrompt) -> None:
    """RequestError for a choice of tools that the prompt does not have."""
    names, choice = ToolSet.of(prompt.tools), prompt.tool_choice
    choices = ("auto", "none", *names, *(["required"] if names else []))
    if not (isinstance(choice, str) and choice in choices):
        allowed = ", ".join(['"auto"', '"none"', *(['"required"'] if names else []), *map(repr, names)])
        kind = "tools with a name" if prompt.tools else "tools"
        reason = "" if names else f", as there are no {kind}"
        raise RequestError.of("tool_choice", choice, f"one of {allowed}{reason}")


def check_forced_calls(prompt: Prompt, params: SamplingParams, *, needs_no_host: bool) -> None:
    """RequestError for calls that are forced by a grammar where the request can have none.

    needs_no_host: grammars are rejected for requests that draft (strict_performance).
    """
    if not isinstance(prompt, ChatPrompt) or prompt.tool_choice in ("auto", "none"):
        return

    if params.grammar is not None:
        raise RequestError.of("tool_choice", prompt.tool_choice, '"auto" or "none" with a grammar')

    if needs_no_host and params.num_draft_tokens != 0:
        allowed = '"auto" or "none", or num_draft_tokens=0, with strict_performance and speculation'
        raise RequestError.of("tool_choice", prompt.tool_choice, allowed)


class TokenCount:
    """A prompt whose tokens are to be counted on a text thread. `done` is set when `num_tokens` is known, or
    with the error of the prompt."""

    request_id = "count_tokens()"  # for the log

    def __init__(self, prompt: Prompt, model: ModelText) -> None:
        self._prompt = prompt
        self._model = model
        self.text_field: str = prompt.field
        self.done: Latch = Latch()
        self.is_done = False
        self.num_tokens: int = 0

    def run(self) -> None:
        self.num_tokens = self._prompt.num_tokens(self._model)
