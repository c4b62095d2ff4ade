"""The splitter and the grammar of the answer to a conversation."""

from __future__ import annotations

from msgspec import Struct

from drift_sdk.errors import RequestError
from drift_sdk.grammars import After, AnyGrammar, AnyOf, Grammar
from drift_sdk.text.answers.forced_calls import final_message, forced_calls, message_end, optional_calls
from drift_sdk.text.answers.formats import AnswerFormats
from drift_sdk.text.answers.reasoning import Thinking
from drift_sdk.text.answers.splitter import AnswerSplitter
from drift_sdk.text.tokenizer import Tokenizer
from drift_sdk.text.tools import ToolSet


class Answer(Struct, frozen=True, kw_only=True):
    """The answer that a request asks for.

    splitter:   splits it; None = all of it is text.
    marker_ids: special tokens that are part of the text which is split.
    grammar:    that it has to follow; None = any answer.
    thinking:   the markers of its reasoning; None = it has none.
    """

    splitter: AnswerSplitter | None
    marker_ids: frozenset[int]
    grammar: AnyGrammar | None
    thinking: Thinking | None = None


def prepare_answer(
    formats: AnswerFormats,
    tokenizer: Tokenizer,
    *,
    template: str,
    prompt: str,
    continued: str | None,
    tools: ToolSet,
    tool_choice: str,
    grammar: Grammar | None,
) -> Answer:
    """The answer to a prompt.

    template:    source of the chat template.
    continued:   the beginning of the answer, if the prompt ends with it; else None.
    tools:       those that the model was given.
    tool_choice: "auto" or "none", or for a grammar of calls "required", or of one call the name of a tool.
    grammar:     the request's own: the answer then begins after the prompt, and it is not reasoning, even if
                 the prompt has opened one. In Harmony it describes the body of the final message. With
                 "auto", calls of the tools are allowed in its place.

    Calls in Harmony are messages: if an answer is continued, they come after the end of its message.

    Raises RequestError if calls cannot be forced in the model's format.
    """
    is_inside = formats.is_harmony and continued is not None
    is_thinking = grammar is None and formats.is_thinking(prompt, continued)
    followed: AnyGrammar | None = grammar
    if tool_choice not in ("auto", "none"):
        if formats.tools is None:
            raise RequestError.of("tool_choice", tool_choice, '"auto" or "none" with tool_format=None')

        wanted = tools if tool_choice == "required" else tools.only(tool_choice)
        calls = forced_calls(
            formats,
            wanted,
            tokenizer,
            template=template,
            is_thinking=is_thinking,
            is_single=tool_choice != "required",
        )
        followed = After(message_end(tokenizer), calls) if is_inside else calls
    elif grammar is not None:
        is_message = formats.is_harmony and not is_inside
        own = After(final_message(formats, tokenizer), grammar) if is_message else grammar
        followed = own
        if tools and formats.tools is not None:
            calls = optional_calls(formats, tools, tokenizer, template=template)
            followed = AnyOf((After(message_end(tokenizer), calls) if is_inside else calls, own))
    finds_calls = bool(tools) and formats.tools is not None
    if formats.reasoning is None and not finds_calls and not formats.is_harmony:  # whose text is in messages
        return Answer(splitter=None, marker_ids=frozenset(), grammar=followed)

    splitter = formats.splitter(
        tools, prompt=prompt, is_thinking=is_thinking, is_constrained=grammar is not None
    )
    return Answer(
        splitter=splitter,
        marker_ids=tokenizer.special_ids_of(formats.markers),
        grammar=followed,
        thinking=formats.thinking(prompt, is_thinking=is_thinking)
        if grammar is None or formats.is_harmony
        else None,
    )
