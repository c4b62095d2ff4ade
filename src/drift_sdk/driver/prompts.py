"""Prompts: from what a caller gives to token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from msgspec import Struct

from drift_sdk.errors import PromptTooLong, RequestError
from drift_sdk.sampling_params import SamplingParams

if TYPE_CHECKING:  # their libraries would make up most of the package's import time
    from drift_sdk.text.chat import ChatTemplate
    from drift_sdk.text.tokenizer import Tokenizer

__all__ = ["ChatPrompt", "ModelText", "Prompt", "TextPrompt", "TokenPrompt"]

LONG = 8
"""Characters for each token of the context: shorter texts are tokenised to see whether they fit. Few texts
that fit are longer, so the rest may cost the time it takes to read the vocabulary once."""


class ModelText(Struct, frozen=True, kw_only=True):
    """What a model brings for turning requests into sequences and tokens into text."""

    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    eos_token_ids: tuple[int, ...]
    max_model_len: int
    vocab_size: int
    default_params: SamplingParams = SamplingParams()
    has_drafts: bool = False


class Prompt(Protocol):
    """What a request begins with. `field`: the caller's argument it comes from."""

    @property
    def field(self) -> str: ...

    def token_ids(self, model: ModelText) -> list[int]:
        """Runs on a text thread. RequestError if there are none for this model."""


class TextPrompt(Struct, frozen=True):
    text: str
    field = "prompt"

    def token_ids(self, model: ModelText) -> list[int]:
        return encode(self.text, model, add_special_tokens=True)


class TokenPrompt(Struct, frozen=True):
    ids: tuple[int, ...]
    field = "prompt"

    def token_ids(self, model: ModelText) -> list[int]:
        check_length(len(self.ids), model)
        return checked_ids(self.ids, model.vocab_size)


class ChatPrompt(Struct, frozen=True):
    """messages, tools, template_args: plain data that nobody else can change."""

    messages: list[Mapping[str, Any]]
    tools: list[Mapping[str, Any]] | None
    template_args: Mapping[str, Any] | None
    field = "messages"

    def token_ids(self, model: ModelText) -> list[int]:
        if model.chat_template is None:
            allowed = "a model with a chat template; use generate()"
            raise RequestError.of("messages", len(self.messages), allowed)

        text = model.chat_template.render(self.messages, tools=self.tools, template_args=self.template_args)
        return encode(text, model, add_special_tokens=False)


def encode(text: str, model: ModelText, *, add_special_tokens: bool) -> list[int]:
    if len(text) > LONG * model.max_model_len:
        check_length(model.tokenizer.min_num_tokens(text), model, "at least ")
    ids = model.tokenizer.encode(text, add_special_tokens=add_special_tokens)
    check_length(len(ids), model)
    return checked_ids(ids, model.vocab_size)


def check_length(num_tokens: int, model: ModelText, bound: str = "") -> None:
    if num_tokens >= model.max_model_len:
        allowed = f"at most {model.max_model_len - 1} tokens (max_model_len - 1)"
        raise PromptTooLong(
            f"prompt of {bound}{num_tokens} tokens: expected {allowed}",
            field="prompt",
            value=num_tokens,
            allowed=allowed,
        )


def checked_ids(ids: Sequence[int], vocab_size: int) -> list[int]:
    prompt_ids = list(ids)
    is_ids = all(type(token_id) is int and 0 <= token_id < vocab_size for token_id in prompt_ids)
    if not prompt_ids or not is_ids:
        found = next((i for i in prompt_ids if type(i) is not int or not 0 <= i < vocab_size), None)
        allowed = f"at least one token id, each from 0 to {vocab_size - 1}"
        raise RequestError.of("prompt", found if prompt_ids else "", allowed)

    return prompt_ids
