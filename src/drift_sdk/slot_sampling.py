"""From what a request asks for to what a device needs to know of it."""

from __future__ import annotations

from collections.abc import Iterable

from drift_sdk.errors import RequestError
from drift_sdk.params import SamplingParams
from drift_sdk.steps import SlotSampling

__all__ = ["slot_sampling"]


def slot_sampling(
    params: SamplingParams,
    *,
    seed: int,
    num_prompt_tokens: int,
    max_model_len: int,
    vocab_size: int,
    eos_token_ids: tuple[int, ...],
) -> SlotSampling:
    """`eos_token_ids` end the text beside the request's own stop ids. Raises RequestError naming a token id
    outside the vocabulary."""
    for field in ("stop_token_ids", "logit_bias", "allowed_token_ids"):
        _check_vocabulary(field, getattr(params, field) or (), vocab_size)

    max_length = max_model_len
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
