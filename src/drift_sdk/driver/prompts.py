"""Prompts as callers give them, and their token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from msgspec import Struct

from drift_sdk.errors import PromptTooLong, RequestError, short_repr
from drift_sdk.sampling_params import SamplingParams
from drift_sdk.text.tools import ToolSet

if TYPE_CHECKING:  # their libraries would make up most of the package's import time
    from drift_sdk.text.answers.answer import Answer
    from drift_sdk.text.chat import ChatTemplate
    from drift_sdk.text.tokenizer import Tokenizer

__all__ = [
    "ChatPrompt",
    "ModelText",
    "Prompt",
    "TextPrompt",
    "TokenPrompt",
    "as_prompt",
    "check_tool_choice",
]

MAX_PROMPT_TOKENS = 2**24
"""More than any model's context. A prompt is copied at the call, before the model's own limit is checked."""
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
    """

    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    eos_token_ids: tuple[int, ...]
    max_model_len: int
    vocab_size: int
    default_params: SamplingParams = SamplingParams()
    has_drafts: bool = False


class Prompt(Protocol):
    """A prompt. `field` is the name of the caller's argument that it comes from, for error messages."""

    @property
    def field(self) -> str: ...

    def token_ids(self, model: ModelText) -> list[int]:
        """The prompt's token ids. Runs on a text thread. RequestError if the prompt does not fit the
        model."""


class TextPrompt(Struct, frozen=True):
    """A text, which is tokenised with the model's special tokens (such as BOS) added."""

    text: str
    field = "prompt"

    def token_ids(self, model: ModelText) -> list[int]:
        return encode(self.text, model, add_special_tokens=True)


class TokenPrompt(Struct, frozen=True):
    """Token ids, used as they are."""

    ids: tuple[int, ...]
    field = "prompt"

    def token_ids(self, model: ModelText) -> list[int]:
        check_length(len(self.ids), model)
        return checked_ids(self.ids, model, given=list(self.ids))


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

    def token_ids(self, model: ModelText) -> list[int]:
        return self.prepare(model, has_grammar=False)[0]

    def prepare(self, model: ModelText, *, has_grammar: bool) -> tuple[list[int], Answer]:
        """The prompt's token ids, and what its answer is read with.

        has_grammar: whether the request has a grammar, which describes the answer from its first token on.
        """
        if model.chat_template is None:
            allowed = "a model with a chat template; use generate()"
            raise RequestError.of("messages", len(self.messages), allowed)

        from drift_sdk.text.answers.answer import prepare_answer

        template = model.chat_template.for_tools(self.offered_tools)
        text = self._render(template)
        continued = self.messages[-1]["content"] if self.continue_final else None
        answer = prepare_answer(
            template.formats,
            model.tokenizer,
            template=template.source,
            prompt=text,
            continued=continued,
            tools=ToolSet.of(self.offered_tools),
            tool_choice=self.tool_choice,
            has_grammar=has_grammar,
        )
        return encode(text, model, add_special_tokens=False), answer

    @property
    def offered_tools(self) -> list[Mapping[str, Any]] | None:
        """The tools that the template and the model see."""
        return self.tools if self.tool_choice != "none" else None

    def _render(self, template: ChatTemplate) -> str:
        try:
            return template.render(
                self.messages,
                tools=self.offered_tools,
                template_args=self.template_args,
                continue_final=self.continue_final,
            )
        except RequestError as error:
            # Many templates take strings only, and what they raise for a list does not say so.
            indices = (i for i, message in enumerate(self.messages) if is_list_of_parts(message))
            index = next(indices, None)
            if error.field != "messages" or index is None:
                raise

            allowed = "a string: the model's chat template does not take a list of parts"
            field = f"messages[{index}].content"
            value = self.messages[index]["content"]
            raise RequestError.of(field, value, f"{allowed} ({error.__cause__ or error})") from error


def as_prompt(prompt: str | Sequence[int]) -> Prompt:
    """The prompt as a value. RequestError for what is neither a text nor a sequence of ids."""
    allowed = "a string or a sequence of token ids"
    if isinstance(prompt, bytes | bytearray) or not isinstance(prompt, Sequence):
        raise RequestError.of("prompt", prompt, allowed)

    if isinstance(prompt, str):
        return TextPrompt(prompt)

    if len(prompt) and isinstance(prompt[0], Mapping):
        raise RequestError.of("prompt", prompt, f"{allowed}; chat() takes messages")

    if len(prompt) and isinstance(prompt[0], str | list | tuple):
        raise RequestError.of("prompt", prompt, f"{allowed}; map() takes several prompts")

    if len(prompt) > MAX_PROMPT_TOKENS:
        allowed = f"at most {MAX_PROMPT_TOKENS} token ids"
        raise RequestError(f"prompt: expected {allowed}, not {len(prompt)}", field="prompt", allowed=allowed)

    return TokenPrompt(tuple(prompt))


def check_tool_choice(prompt: ChatPrompt, params: SamplingParams | None, *, needs_no_host: bool) -> None:
    """RequestError for a choice of tools that the prompt does not have, or that a grammar contradicts.

    needs_no_host: grammars are rejected for requests that draft (strict_performance).
    """
    names, choice = ToolSet.of(prompt.tools), prompt.tool_choice
    if choice in ("auto", "none"):
        return

    if not isinstance(choice, str) or not names or (choice != "required" and choice not in names):
        allowed = ", ".join(['"auto"', '"none"', *(['"required"'] if names else []), *map(repr, names)])
        raise RequestError.of("tool_choice", choice, f"one of {allowed}")

    if params is not None and params.grammar is not None:
        raise RequestError.of("tool_choice", choice, '"auto" or "none" with a grammar')

    if needs_no_host and (params is None or params.num_draft_tokens != 0):
        allowed = '"auto" or "none", or num_draft_tokens=0, with strict_performance and speculation'
        raise RequestError.of("tool_choice", choice, allowed)


def is_list_of_parts(message: object) -> bool:
    """Whether a message's content has the form [{"type": "text", "text": ...}, ...]."""
    return isinstance(message, Mapping) and isinstance(message.get("content"), list)


def encode(text: str, model: ModelText, *, add_special_tokens: bool) -> list[int]:
    """Token ids of a text; RequestError if they do not fit the model."""
    if len(text) > MAX_CHARS_PER_TOKEN * model.max_model_len:
        check_length(model.tokenizer.min_num_tokens(text), model, "at least ")
    ids = model.tokenizer.encode(text, add_special_tokens=add_special_tokens)
    check_length(len(ids), model)
    return checked_ids(ids, model, given=text)


def check_length(num_tokens: int, model: ModelText, bound: str = "") -> None:
    """PromptTooLong for a prompt that leaves no room for a token. `bound`: words before the number in the
    message."""
    if num_tokens >= model.max_model_len:
        allowed = f"at most {model.max_model_len - 1} tokens (max_model_len - 1)"
        raise PromptTooLong(
            f"prompt of {bound}{num_tokens} tokens: expected {allowed}",
            field="prompt",
            value=num_tokens,
            allowed=allowed,
        )


def checked_ids(ids: Sequence[int], model: ModelText, *, given: str | Sequence[int]) -> list[int]:
    """The ids as a list. RequestError if there are none, with `given` as the prompt, and for the first that
    is not a token id of the model, with its index."""
    allowed = f"token id from 0 to {model.vocab_size - 1}"
    if not ids:
        raise RequestError.of("prompt", given, f"at least one {allowed}")

    for index, token_id in enumerate(ids):
        if type(token_id) is not int or not 0 <= token_id < model.vocab_size:
            place = f"prompt[{index}]" if not isinstance(given, str) else f"prompt: token {index}"
            message = f"{place}={short_repr(token_id)}: expected a {allowed}"
            raise RequestError(message, field="prompt", value=token_id, allowed=f"a {allowed}")

    return list(ids)
