"""Parameters of a request in the executor's terms, checked against the model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

from drift_sdk.driver.prompts import ModelText
from drift_sdk.errors import RequestError
from drift_sdk.grammars import AnyGrammar
from drift_sdk.sampling_params import SamplingParams
from drift_sdk.steps import SlotSampling, TokenConstraint

if TYPE_CHECKING:  # their libraries would make up most of the package's import time
    from drift_sdk.text.answers.answer import Answer
    from drift_sdk.text.grammar import GrammarConstraint

__all__ = ["Limits", "check_text_params", "limits_of", "slot_sampling"]


class Limits(TokenConstraint, Protocol):
    """A constraint that follows the tokens of its request."""

    def advance(self, token_ids: Sequence[int]) -> None:
        """Move on by newly generated tokens. RequestError if they are not allowed."""


def check_text_params(params: SamplingParams, grammar: AnyGrammar | None, model: ModelText) -> None:
    """Raise RequestError for what needs texts of tokens that the model does not have."""
    if params.stop and not model.tokenizer.has_text:
        raise RequestError.of("stop", params.stop, "stop_token_ids: the model has no tokenizer")

    if grammar is not None and not model.tokenizer.has_token_bytes:
        lack = (
            "the text of a token depends on its neighbours"
            if model.tokenizer.has_text
            else "the model has no tokenizer"
        )
        raise RequestError.of("grammar", grammar, f"None: {lack}")


def limits_of(
    params: SamplingParams, answer: Answer | None, grammar: GrammarConstraint | None, model: ModelText
) -> Limits | None:
    """What the tokens of a request have to follow: its grammar and its thinking budget, as far as they limit
    anything. answer: None = the prompt is no conversation. RequestError for a budget that cannot be kept."""
    num_tokens = params.thinking_budget
    if num_tokens is None:
        return grammar

    if answer is None:
        allowed = "None for a prompt that is no conversation: only chat() tells reasoning from text"
        raise RequestError.of("thinking_budget", num_tokens, allowed)

    if answer.thinking is None or (params.max_tokens is not None and num_tokens >= params.max_tokens):
        return grammar

    if not model.tokenizer.has_token_bytes:
        allowed = "None: the text of a token depends on its neighbours"
        raise RequestError.of("thinking_budget", num_tokens, allowed)

    from drift_sdk.text.answers.thinking_budget import BudgetedGrammar, ThinkingBudget

    budget = ThinkingBudget(
        answer.thinking,
        num_tokens,
        model.tokenizer,
        marker_ids=answer.marker_ids,
        vocab_size=model.vocab_size,
    )
    return budget if grammar is None else BudgetedGrammar(grammar, budget)


def slot_sampling(
    params: SamplingParams,
    model: ModelText,
    *,
    seed: int,
    num_prompt_tokens: int,
    eos_token_ids: tuple[int, ...],
) -> SlotSampling:
    """The parameters in the executor's terms: lengths count the prompt.

    eos_token_ids: end the text, in addition to the request's own stop ids.

    Raises RequestError naming the first token id that is outside the vocabulary.
    """
    for field in ("stop_token_ids", "logit_bias", "allowed_token_ids"):
        _check_vocabulary(field, getattr(params, field) or (), model.vocab_size)

    max_length = model.max_model_len
    if params.max_tokens is not None:
        max_length = min(max_length, num_prompt_tokens + params.max_tokens)

    return SlotSampling(
        temperature=float(params.temperature),
        top_k=params.top_k,
        top_p=float(params.top_p),
        min_p=float(params.min_p),
        seed=seed,
        stop_token_ids=tuple(sorted({*params.stop_token_ids, *eos_token_ids})),
        num_prompt_tokens=num_prompt_tokens,
        max_length=max_length,
        min_length=num_prompt_tokens + params.min_tokens if params.min_tokens else 0,
        presence_penalty=float(params.presence_penalty),
        frequency_penalty=float(params.frequency_penalty),
        repetition_penalty=float(params.repetition_penalty),
        logit_bias=tuple(params.logit_bias.items()),
        allowed_token_ids=params.allowed_token_ids,
        num_logprobs=params.logprobs,
        num_prompt_logprobs=params.prompt_logprobs,
    )


def _check_vocabulary(field: str, token_ids: Iterable[int], vocab_size: int) -> None:
    found = next((token_id for token_id in token_ids if token_id >= vocab_size), None)
    if found is not None:
        raise RequestError.of(field, found, f"token ids of the model, from 0 to {vocab_size - 1}")
