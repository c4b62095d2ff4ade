"""What a caller receives: chunks while a request runs, one completion at its end."""

from __future__ import annotations

from functools import cached_property
from itertools import pairwise
from typing import Any, Literal

from msgspec import Struct

from drift_sdk.grammars import JsonSchema

__all__ = [
    "Chunk",
    "Completion",
    "FinishReason",
    "SpeculationStats",
    "Timing",
    "TokenLogprobs",
    "ToolCall",
    "Usage",
]

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


class Chunk(Struct, frozen=True, kw_only=True, gc=False):
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


class ToolCall(Struct, frozen=True, kw_only=True):
    """A call of one of the tools that `chat` was given. The arguments are as the model wrote them: nothing
    holds them to the tool's schema."""

    name: str
    arguments: dict[str, Any]


class SpeculationStats(Struct, frozen=True, kw_only=True):
    """How speculation went for a request: rounds in which tokens were drafted, tokens drafted, and how many
    of those the model said too. `accepted_at[i]` counts rounds in which draft i was right, and all before."""

    num_rounds: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    accepted_at: tuple[int, ...] = ()

    @property
    def acceptance_length(self) -> float:
        """Mean tokens a round, the model's own included; 0 without rounds."""
        return 1 + self.num_accepted / self.num_rounds if self.num_rounds else 0.0

    @property
    def rates(self) -> tuple[float, ...]:
        """Share of rounds in which draft i was right, and all before."""
        return tuple(count / self.num_rounds for count in self.accepted_at)

    @property
    def num_rewound(self) -> int:
        """Tokens drafted in vain, each a row of the KV cache rewound."""
        return self.num_drafted - self.num_accepted

    @property
    def acceptance_histogram(self) -> tuple[int, ...]:
        """Rounds in which exactly 0, 1, ... drafted tokens were accepted."""
        at_least = (self.num_rounds, *self.accepted_at, 0)
        return tuple(count - more for count, more in pairwise(at_least))


class Completion(Struct, frozen=True, kw_only=True, dict=True):
    """A finished request.

    `stop_reason` is the stop string or the stop token's id that ended it (`finish_reason == "stop"`).
    `seed` reproduces the tokens of a sampled request on the same model and parameters.
    `speculation` is None where the engine does not speculate.
    `prompt_logprobs` has an entry per prompt token where they were asked for, None for the first; None for
    a request cancelled before its first token.
    `tool_calls`: those found in the text, which holds them too; empty when `chat` was given no tools.
    `schema`: the request's `JsonSchema` if the text is complete, None if it was cut short.
    """

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None
    usage: Usage
    timing: Timing
    seed: int
    speculation: SpeculationStats | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    schema: JsonSchema | None = None

    @cached_property
    def parsed(self) -> Any:
        """The value of the schema's type, or the plain JSON value; None without a schema or a complete text.

        What a type checks beyond its schema raises the type's own validation error, at the first use.
        """
        return None if self.schema is None else self.schema.decode(self.text)
