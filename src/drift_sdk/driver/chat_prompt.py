"""Conversations as prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, cast

from msgspec import Struct

from drift_sdk._plain_data import MAX_ITEMS, IdArray, reading, to_plain
from drift_sdk._validation import check_bool, plain_scalar
from drift_sdk.driver.prompts import (
    ModelText,
    PreparedPrompt,
    Prompt,
    as_prompt,
    check_countable,
    encode,
)
from drift_sdk.errors import RequestError
from drift_sdk.grammars import Grammar
from drift_sdk.sampling_params import SamplingParams
from drift_sdk.text.template_form import TEXT_ROLES
from drift_sdk.text.tools import ToolSet

if TYPE_CHECKING:  # their libraries would make up most of the package's import time
    from drift_sdk.text.answers.answer import Answer
    from drift_sdk.text.chat import ChatTemplate

__all__ = ["ChatPrompt", "as_any_prompt", "as_chat_prompt", "check_forced_calls"]


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
    """RequestError for a function without a name. Descriptions of other kinds are left to the template."""
    for index, tool in enumerate(tools if isinstance(tools, Sequence) else ()):
        is_function = isinstance(tool, Mapping) and (not tool or tool.get("type") == "function")
        if is_function and not ToolSet.of([tool]):
            allowed = '{"type": "function", "function": {"name": ..., ...}}'
            raise RequestError.of(f"tools[{index}]", tool, allowed)


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
