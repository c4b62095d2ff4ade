"""What a caller receives: chunks while a request runs, one completion at its end."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

__all__ = ["Chunk", "Completion", "FinishReason", "Timing", "TokenLogprobs", "Usage"]

FinishReason = Literal["stop", "length", "cancelled"]


class TokenLogprobs(Struct, frozen=True, kw_only=True):
    """Log-probabilities at one generated position, of the model's own distribution (log-softmax of the raw
    logits in fp32, before temperature and filters).

    `top` holds the `logprobs` most likely tokens as (token id, log-probability), most likely first; the
    sampled token is not necessarily among them.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Chunk(Struct, frozen=True, kw_only=True):
    """One or more tokens of a stream. Tokens not read yet coalesce into the next chunk.

    `text` never splits a character, so it may be empty, and may lag behind `token_ids` while a stop string
    could still begin in it. The texts of all chunks, joined, equal `Completion.text`.
    `finish_reason` is None on every chunk but the last.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: FinishReason | None = None


class Usage(Struct, frozen=True, kw_only=True):
    """Token counts. `cached_tokens` of the prompt were taken from the prefix cache."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


class Timing(Struct, frozen=True, kw_only=True):
    """Seconds: waiting for a slot, from there to the first token, from the call to the first token, and
    from the first token to the last."""

    queued_s: float
    prefill_s: float
    first_token_s: float
    decode_s: float


class Completion(Struct, frozen=True, kw_only=True):
    """A finished request.

    `stop_reason` is the stop string or the stop token's id that ended it (`finish_reason == "stop"`).
    `seed` reproduces the tokens of a sampled request on the same model and parameters.
    """

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None
    usage: Usage
    timing: Timing
    seed: int
    logprobs: tuple[TokenLogprobs, ...] | None = None
