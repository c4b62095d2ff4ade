"""Prompts as callers give them, and their token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast

from msgspec import Struct

from drift_sdk._plain_data import to_plain
from drift_sdk.errors import PromptTooLong, RequestError, short_repr
from drift_sdk.sampling_params import SamplingParams

if TYPE_CHECKING:  # their libraries would make up most of the package's import time
    from drift_sdk.text.chat import ChatTemplate
    from drift_sdk.text.tokenizer import Tokenizer

__all__ = [
    "ChatPrompt",
    "ModelText",
    "Prompt",
    "SharedPrompt",
    "TextPrompt",
    "TokenPrompt",
    "as_any_prompt",
    "as_chat_prompt",
    "as_prompt",
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

    def num_tokens(self, model: ModelText) -> int:
        """The number of the prompt's token ids, also if there are none or more than the model takes. Runs on
        a text thread. RequestError as of `token_ids` otherwise."""


class TextPrompt(Struct, frozen=True):
    """A text, which is tokenised with the model's special tokens (such as BOS) added."""

    text: str
    field = "prompt"

    def token_ids(self, model: ModelText) -> list[int]:
        return encode(self.text, model, add_special_tokens=True)

    def num_tokens(self, model: ModelText) -> int:
        return len(model.tokenizer.encode(self.text, add_special_tokens=True))


class TokenPrompt(Struct, frozen=True):
    """Token ids, used as they are."""

    ids: tuple[int, ...]
    field = "prompt"

    def token_ids(self, model: ModelText) -> list[int]:
        check_length(len(self.ids), model)
        return checked_ids(self.ids, model, given=list(self.ids))

    def num_tokens(self, model: ModelText) -> int:
        return len(checked_ids(self.ids, model, given=list(self.ids))) if self.ids else 0


class ChatPrompt(Struct, frozen=True):
    """A conversation, which the model's chat template renders and which is then tokenised without special
    tokens added.

    messages, tools, template_args: plain data that no other object refers to.
    """

    messages: list[Mapping[str, Any]]
    tools: list[Mapping[str, Any]] | None
    template_args: Mapping[str, Any] | None
    field = "messages"

    def token_ids(self, model: ModelText) -> list[int]:
        return encode(self._text(model), model, add_special_tokens=False)

    def num_tokens(self, model: ModelText) -> int:
        return len(model.tokenizer.encode(self._text(model), add_special_tokens=False))

    def _text(self, model: ModelText) -> str:
        if model.chat_template is None:
            allowed = "a model with a chat template; use generate()"
            raise RequestError.of("messages", len(self.messages), allowed)

        return self._render(model.chat_template)

    def _render(self, template: ChatTemplate) -> str:
        try:
            return template.render(self.messages, tools=self.tools, template_args=self.template_args)
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


class SharedPrompt:
    """A prompt of several requests that is tokenised for the first of them alone: the others are prepared
    after it."""

    def __init__(self, prompt: Prompt) -> None:
        self.field = prompt.field
        self._prompt = prompt
        self._ids: list[int] | None = None

    def token_ids(self, model: ModelText) -> list[int]:
        if self._ids is None:
            self._ids = self._prompt.token_ids(model)
        return self._ids

    def num_tokens(self, model: ModelText) -> int:
        return self._prompt.num_tokens(model)


def as_any_prompt(
    prompt: str | Sequence[int] | Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    template_args: Mapping[str, Any] | None,
) -> Prompt:
    """A prompt as of `as_prompt`, or messages as of `as_chat_prompt`. RequestError for tools or template_args
    without messages."""
    is_sequence = isinstance(prompt, Sequence) and not isinstance(prompt, str | bytes | bytearray)
    if is_sequence and len(prompt) and isinstance(prompt[0], Mapping):
        return as_chat_prompt(cast("Sequence[Mapping[str, Any]]", prompt), tools, template_args)

    for name, value in (("tools", tools), ("template_args", template_args)):
        if value is not None:
            raise RequestError.of(name, value, "None with a prompt that is no sequence of messages")

    return as_prompt(cast("str | Sequence[int]", prompt))


def as_chat_prompt(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    template_args: Mapping[str, Any] | None,
) -> ChatPrompt:
    """A conversation as a value. RequestError for what is not plain data or has another form."""
    if isinstance(messages, str | bytes) or not isinstance(messages, Sequence):
        raise RequestError.of("messages", messages, "a sequence of mappings with role and content")

    if template_args is not None and not isinstance(template_args, Mapping):
        raise RequestError.of("template_args", template_args, "a mapping")

    return ChatPrompt(
        to_plain("messages", messages),
        to_plain("tools", tools),
        to_plain("template_args", template_args),
    )


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
