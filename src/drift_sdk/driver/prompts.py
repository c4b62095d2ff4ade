"""Prompts as callers give them, and their token ids."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Protocol

from msgspec import Struct

from drift_sdk._plain_data import IdArray, ids_of_array, reading
from drift_sdk._validation import plain_int, plain_scalar
from drift_sdk.errors import PromptTooLong, RequestError, short_repr
from drift_sdk.grammars import Grammar
from drift_sdk.sampling_params import SamplingParams

if TYPE_CHECKING:  # their libraries would make up most of the package's import time
    from drift_sdk.text.answers.answer import Answer
    from drift_sdk.text.chat import ChatTemplate
    from drift_sdk.text.tokenizer import Tokenizer

__all__ = [
    "ModelText",
    "PreparedPrompt",
    "Prompt",
    "SharedPrompt",
    "TextPrompt",
    "TokenPrompt",
    "as_prompt",
    "check_countable",
    "message_ends",
    "encode",
]

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
    """

    token_ids: list[int]
    new_answer: Callable[[Grammar | None], Answer] | None = None
    is_continued: bool = False


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
