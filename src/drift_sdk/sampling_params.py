"""What a request asks for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct

from drift_sdk._frozen_mapping import FrozenMapping
from drift_sdk._validation import check_bool, check_float, check_int, check_str_tuple
from drift_sdk.errors import RequestError, short_repr
from drift_sdk.grammars import Grammar

__all__ = ["MAX_SEED", "SamplingParams", "check_needs_no_host"]

MAX_SEED = 2**63 - 1
MAX_TOKENS = 2**31 - 1
MAX_STOPS = 64
MAX_LOGPROBS = 20
MAX_BIAS = 100.0
MAX_STOP_CHARS = 1024
MAX_NAME_CHARS = 64
NO_BIAS: FrozenMapping[int, float] = FrozenMapping({})


class SamplingParams(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a request's tokens are chosen and when they end.

    max_tokens:         most tokens to generate; None = to the end of the context.
    min_tokens:         tokens generated before a stop id may be chosen and stop strings are looked for.
    temperature:        0 = greedy; above, logits are divided by it before the filters.
    top_k:              keep the k most likely tokens; 0 = all.
    top_p:              keep the smallest set of most likely tokens whose probability reaches top_p; 1 = all.
    min_p:              keep tokens at least min_p times as likely as the most likely one; 0 = all.
    seed:               equal seeds give equal tokens, whatever else the engine runs; None = drawn anew.
    stop:               a string or several, at most 64 of at most 1,024 characters; generation ends before
                        the first one to appear.
    stop_token_ids:     ids that end generation, beside the model's own end-of-sequence ids.
    ignore_eos:         generate past the model's end-of-sequence ids.
    include_stop:       keep the stop string that ended the text.
    logprobs:           log-probabilities of each generated token and the n most likely ones; None = none.
    prompt_logprobs:    the same for each token of the prompt but the first.
    presence_penalty:   subtracted from the logits of tokens in the output, -2 to 2.
    frequency_penalty:  subtracted for each time that a token is in the output, -2 to 2.
    repetition_penalty: divides positive logits of tokens in prompt or output and multiplies negative ones,
                        0.01 to 2; 1 = off, above 1 discourages.
    logit_bias:         token id -> number added to its logit, -100 to 100.
    allowed_token_ids:  nothing else is generated; None = all.
    grammar:            what the text may be, a `JsonSchema`, `Regex` or `Lark`; None = anything. The text
                        ends where it may and the model ends it, with `ignore_eos` where it must.
    priority:           lower is served earlier; equal priorities in order of arrival.
    num_draft_tokens:   most tokens drafted a step, if the engine speculates; 0 = none, None = the engine's.

    The order is logit_bias, repetition, frequency and presence penalty, min_tokens, allowed_token_ids,
    temperature, top_k, top_p, min_p. Where min_tokens leaves none of allowed_token_ids, it gives way.
    Every value is checked here; a wrong one raises `RequestError` naming field, value and range. Ids outside
    the model's vocabulary are found when the request is prepared: its stream raises.
    """

    max_tokens: int | None = 256
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = NO_BIAS
    allowed_token_ids: tuple[int, ...] | None = None
    grammar: Grammar | None = None
    priority: int = 0
    num_draft_tokens: int | None = None

    def __post_init__(self) -> None:
        # A frozen Struct is normalised once, here: a lone stop string and lists become tuples.
        if isinstance(self.stop, str) and self.stop:
            msgspec.structs.force_setattr(self, "stop", (self.stop,))
        elif isinstance(self.stop, list):
            msgspec.structs.force_setattr(self, "stop", tuple(self.stop))
        for name in ("stop_token_ids", "allowed_token_ids"):
            if isinstance(getattr(self, name), list):
                msgspec.structs.force_setattr(self, name, tuple(getattr(self, name)))

        check_int(RequestError, "max_tokens", self.max_tokens, ge=1, le=MAX_TOKENS, optional=True)
        check_int(
            RequestError,
            "min_tokens",
            self.min_tokens,
            ge=0,
            le=self.max_tokens if self.max_tokens is not None else MAX_TOKENS,
        )
        check_float(RequestError, "temperature", self.temperature, ge=0.0, le=100.0)
        check_int(RequestError, "top_k", self.top_k, ge=0, le=MAX_TOKENS)
        check_float(RequestError, "top_p", self.top_p, gt=0.0, le=1.0)
        check_float(RequestError, "min_p", self.min_p, ge=0.0, le=1.0)
        check_int(RequestError, "seed", self.seed, ge=0, le=MAX_SEED, optional=True)
        check_str_tuple(RequestError, "stop", self.stop, max_items=MAX_STOPS, max_chars=MAX_STOP_CHARS)
        _check_token_ids("stop_token_ids", self.stop_token_ids, least=0, most=MAX_STOPS)
        check_bool(RequestError, "ignore_eos", self.ignore_eos)
        check_bool(RequestError, "include_stop", self.include_stop)
        for name in ("logprobs", "prompt_logprobs"):
            check_int(RequestError, name, getattr(self, name), ge=0, le=MAX_LOGPROBS, optional=True)
        for name in ("presence_penalty", "frequency_penalty"):
            check_float(RequestError, name, getattr(self, name), ge=-2.0, le=2.0)
        check_float(RequestError, "repetition_penalty", self.repetition_penalty, ge=0.01, le=2.0)
        msgspec.structs.force_setattr(self, "logit_bias", _checked_bias(self.logit_bias))
        if self.allowed_token_ids is not None:
            _check_token_ids("allowed_token_ids", self.allowed_token_ids, least=1, most=MAX_TOKENS)
        if not isinstance(self.grammar, Grammar | None):
            raise RequestError.of("grammar", self.grammar, "a JsonSchema, a Regex, a Lark or None")

        check_int(RequestError, "num_draft_tokens", self.num_draft_tokens, ge=0, le=16, optional=True)
        check_int(RequestError, "priority", self.priority, ge=-(2**31), le=2**31 - 1)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Build from wire input; an unknown or wrong field raises `RequestError`."""
        if not isinstance(values, Mapping):
            raise RequestError.of("params", values, "a mapping")

        known = set(cls.__struct_fields__)
        for name, value in values.items():
            if name not in known:
                allowed = ", ".join(sorted(known))
                shown = name if isinstance(name, str) and len(name) <= MAX_NAME_CHARS else short_repr(name)
                message = f"{shown}={short_repr(value)}: unknown field, expected one of {allowed}"
                raise RequestError(message, field=name, value=value, allowed=allowed)

        bias = values.get("logit_bias")
        if isinstance(bias, Mapping):
            values = {**values, "logit_bias": _bias_from_json(bias)}

        return cls(**values)


def check_needs_no_host(params: SamplingParams, *, is_speculating: bool) -> None:
    """RequestError for what takes the host in the midst of a step."""
    if params.prompt_logprobs is not None:
        raise RequestError.of("prompt_logprobs", params.prompt_logprobs, "None with strict_performance")

    if params.grammar is not None and is_speculating and params.num_draft_tokens != 0:
        allowed = "None, or num_draft_tokens=0, with strict_performance and speculation"
        raise RequestError.of("grammar", params.grammar, allowed)


def _bias_from_json(bias: Mapping[Any, Any]) -> dict[Any, Any]:
    """The keys of a JSON object are strings. What is no token id stays as it is and is refused as such."""
    read: dict[Any, Any] = {}
    for key, addend in bias.items():
        token_id = int(key) if isinstance(key, str) and re.fullmatch("0|[1-9][0-9]{0,9}", key) else key
        if token_id in read:
            raise RequestError.of("logit_bias", {key: addend}, "each token id once")

        read[token_id] = addend

    return read


def _check_token_ids(field: str, ids: object, *, least: int, most: int) -> None:
    allowed = f"{'token ids' if least == 0 else 'one or more token ids'} from 0 to {MAX_TOKENS}"
    if most < MAX_TOKENS:
        allowed = f"at most {most} {allowed}"
    if not isinstance(ids, tuple) or not least <= len(ids) <= most:
        raise RequestError.of(field, ids, allowed)

    for token_id in ids:
        if not _is_token_id(token_id):
            raise RequestError.of(field, token_id, allowed)


def _checked_bias(bias: object) -> FrozenMapping[int, float]:
    allowed = f"token ids from 0 to {MAX_TOKENS}, each with a finite number from {-MAX_BIAS} to {MAX_BIAS}"
    if not isinstance(bias, Mapping):
        raise RequestError.of("logit_bias", bias, f"a mapping of {allowed}")

    for token_id, addend in bias.items():
        is_number = isinstance(addend, int | float) and not isinstance(addend, bool)
        if not _is_token_id(token_id) or not is_number or not -MAX_BIAS <= addend <= MAX_BIAS:
            raise RequestError.of("logit_bias", {token_id: addend}, allowed)

    return FrozenMapping({token_id: float(addend) for token_id, addend in bias.items()})


def _is_token_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_TOKENS
