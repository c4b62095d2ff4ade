"""Parameters of a request."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Annotated, Any, Generic, TypedDict, Unpack, cast

import msgspec
from msgspec import Meta, Struct

from drift_sdk._fields import (
    RequestFields,
    check_field_names,
    check_fields,
    check_int,
    check_str_tuple,
    is_coroutine_function,
    plain_scalar,
    replace_fields,
)
from drift_sdk._plain_data import MAX_ITEMS, FrozenMapping, IdArray, first_pairs, ids_of_array, plain_tuple
from drift_sdk.errors import RequestError
from drift_sdk.grammars import Grammar, JsonSchema, Lark, ParsedT, ParsedT_co, Regex
from drift_sdk.processors import LogitsProcessor, StopFunction, TokenBias, TokenMachine, machines_of
from drift_sdk.results import StateKind
from drift_sdk.trees import MAX_TREE_DRAFTS

__all__ = [
    "MAX_SEED",
    "NOTHING",
    "SamplingOptions",
    "SamplingParams",
    "beside_graphs",
    "check_needs_no_host",
]

MAX_SEED = 2**63 - 1
MAX_TOKENS = 2**31 - 1
MAX_STOPS = 64
MAX_LOGPROBS = 20
MAX_LOGPROB_IDS = 128
MAX_PROCESSORS = 16
MAX_BIAS = 100.0
MAX_STOP_CHARS = 1024
MAX_SALT_CHARS = 1024
MAX_ALLOWED_IDS = 2**19
"""More than any vocabulary has."""
NO_BIAS: FrozenMapping[int, float] = FrozenMapping({})


class SamplingOptions(TypedDict, Generic[ParsedT], total=False):
    """Fields of `SamplingParams` as keyword arguments, for the annotation `**options:
    Unpack[SamplingOptions]`. Those given replace fields of other parameters."""

    max_tokens: int | None
    min_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int | None
    stop: str | tuple[str, ...] | list[str]
    stop_token_ids: tuple[int, ...] | list[int] | IdArray
    ignore_eos: bool
    include_stop: bool
    logprobs: int | None
    logprob_token_ids: tuple[int, ...] | list[int] | IdArray
    prompt_logprobs: int | None
    prompt_states: StateKind | None
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: Mapping[int, float]
    allowed_token_ids: tuple[int, ...] | list[int] | IdArray | None
    grammar: JsonSchema[ParsedT] | Regex | Lark | None
    thinking_budget: int | None
    logits_processors: tuple[LogitsProcessor, ...] | list[LogitsProcessor]
    stop_when: StopFunction | None
    priority: int
    cache_salt: str | None
    num_draft_tokens: int | None


class SamplingParams(
    Struct,
    Generic[ParsedT_co],
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    metaclass=RequestFields,
):
    """Settings of a request: how its tokens are chosen and when they end. The fields are checked when it is
    made: a wrong value raises `RequestError`, which names field, value and range.

    max_tokens:         most tokens to generate, at least 1; None = until the end of the context.
    min_tokens:         tokens to generate before stop ids may be chosen and stop strings are looked for, 0 to
                        max_tokens.
    temperature:        0 = greedy; otherwise logits are divided by it before the filters. At most 100.
    top_k:              keep the k most likely tokens; 0 = all.
    top_p:              keep the smallest set of most likely tokens whose probability reaches top_p, over 0 to
                        1; 1 = all.
    min_p:              keep tokens at least min_p times as likely as the most likely one, 0 to 1; 0 = all.
    seed:               of the random choice, 0 to 2**63 - 1: with equal logits, equal seeds give equal
                        tokens, whatever else the engine runs (docs/guarantees.md says when logits are equal).
                        None = a random seed, which the completion names.
    stop:               a string or several, at most 64 of at most 1,024 characters each. Generation ends when
                        one is complete, and the text is cut before it.
    stop_token_ids:     ids that end generation in addition to the model's end-of-sequence ids, at most 64.
    ignore_eos:         generate past the model's end-of-sequence ids.
    include_stop:       keep the stop string or stop token that ended the text.
    logprobs:           log-probabilities of each generated token and of this many most likely ones, 0 to 20;
                        None = none.
    logprob_token_ids:  ids whose log-probabilities are reported with those of each generated token, at most
                        128; needs `logprobs`.
    prompt_logprobs:    `logprobs` for each token of the prompt but the first, 0 to 20; None = none.
    prompt_states:      hidden states of the prompt after the final norm: of its "last" token, the "mean" of
                        all tokens, or those of "all"; None = none. The last two use no cached prefix, since
                        every token has to be computed.
    presence_penalty:   subtracted from the logits of tokens that are in the output, -2 to 2.
    frequency_penalty:  subtracted for each time that a token is in the output, -2 to 2.
    repetition_penalty: divides positive logits of tokens in prompt or output and multiplies negative ones,
                        0.01 to 2; 1 = off, above 1 discourages.
    logit_bias:         token id -> number added to its logit, -100 to 100; at most 100,000 ids.
    allowed_token_ids:  ids of the only tokens that may be generated, at most 524,288; None = all.
    grammar:            form of the text, a `JsonSchema`, `Regex` or `Lark`; None = any. The text ends where
                        the grammar allows it and the model chooses to, or with `ignore_eos` where the grammar
                        allows nothing more.
    thinking_budget:    most tokens of reasoning in the answer of `chat`, 0 to 2,147,483,647. When they are
                        used up, the marker that ends reasoning follows, and then the answer; None = no limit.
    logits_processors:  at most 16, each a `TokenMachine` or a `TokenBias`, which every executor runs, or a
                        Python function, which the eager executor alone runs, on the engine's thread. It is
                        given the token ids generated so far and the logits, an array of numpy, float32
                        [vocabulary], which it changes, or it returns another one.
    stop_when:          a function of the token ids generated so far and their text, called on the engine's
                        thread after each token from `min_tokens` on: the text ends with the first token for
                        which it returns True. The ids are one list, which grows; the text is the raw one,
                        with reasoning and markers. None = none.
    priority:           requests of lower priority values are served earlier, equal ones in order of arrival.
    cache_salt:         the prefix cache is shared with requests of an equal salt alone, such as all of one
                        tenant: 1 to 1,024 characters; None = with requests that have none.
    num_draft_tokens:   most tokens drafted a step if the engine speculates, 0 to 63; 0 = none, None = as the
                        engine.

    The order is logit_bias and biases of processors, repetition, frequency and presence penalty, min_tokens,
    allowed_token_ids, grammar, machines and thinking_budget, functions of processors, temperature, top_k,
    top_p, min_p. Where min_tokens leaves none of allowed_token_ids, min_tokens is ignored. Where both leave
    no token that the grammar, the machines and the budget permit, both are ignored: a text that the grammar
    ends may have fewer tokens than min_tokens.

    Numbers may have types of numpy, and ids may be one-dimensional arrays of integers of numpy, torch or a
    library like them. Ids outside the model's vocabulary are found when the request is prepared; its stream
    then raises RequestError."""

    max_tokens: Annotated[int, Meta(ge=1, le=MAX_TOKENS)] | None = 256
    min_tokens: Annotated[int, Meta(ge=0, le=MAX_TOKENS)] = 0
    temperature: Annotated[float, Meta(ge=0.0, le=100.0)] = 0.0
    top_k: Annotated[int, Meta(ge=0, le=MAX_TOKENS)] = 0
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    seed: Annotated[int, Meta(ge=0, le=MAX_SEED)] | None = None
    stop: str | tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop: bool = False
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    logprob_token_ids: tuple[int, ...] = ()
    prompt_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    prompt_states: StateKind | None = None
    presence_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] = 0.0
    frequency_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] = 0.0
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=2.0)] = 1.0
    logit_bias: Mapping[int, float] = NO_BIAS
    allowed_token_ids: tuple[int, ...] | None = None
    grammar: JsonSchema[ParsedT_co] | Regex | Lark | None = None
    thinking_budget: Annotated[int, Meta(ge=0, le=MAX_TOKENS)] | None = None
    logits_processors: tuple[LogitsProcessor, ...] = ()
    stop_when: StopFunction | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] = 0
    cache_salt: Annotated[str, Meta(max_length=MAX_SALT_CHARS)] | None = None
    num_draft_tokens: Annotated[int, Meta(ge=0, le=MAX_TREE_DRAFTS)] | None = None

    def __post_init__(self) -> None:
        # The Struct is frozen, so it is normalised here: a single stop string, lists and arrays become
        # tuples, and values of other classes become values of int, float and str.
        if isinstance(self.stop, str) and self.stop:
            msgspec.structs.force_setattr(self, "stop", (self.stop,))
        self._make_tuple("stop", MAX_STOPS)
        self._make_tuple("stop_token_ids", MAX_STOPS)
        self._make_tuple("allowed_token_ids", MAX_ALLOWED_IDS)
        self._make_tuple("logprob_token_ids", MAX_LOGPROB_IDS)
        check_fields(RequestError, self)
        if self.max_tokens is not None:
            check_int(RequestError, "min_tokens", self.min_tokens, ge=0, le=self.max_tokens)
        check_str_tuple(RequestError, "stop", self.stop, max_items=MAX_STOPS, max_chars=MAX_STOP_CHARS)
        _check_token_ids("stop_token_ids", self.stop_token_ids, least=0, most=MAX_STOPS)
        if self.allowed_token_ids is not None:
            _check_token_ids("allowed_token_ids", self.allowed_token_ids, least=1, most=MAX_ALLOWED_IDS)
        _check_token_ids("logprob_token_ids", self.logprob_token_ids, least=0, most=MAX_LOGPROB_IDS)
        if self.logprob_token_ids and self.logprobs is None:
            raise RequestError.of("logprob_token_ids", self.logprob_token_ids, "() without logprobs")

        if self.logit_bias is not NO_BIAS:
            msgspec.structs.force_setattr(self, "logit_bias", _checked_bias(self.logit_bias))
        if not isinstance(self.grammar, Grammar | None):
            raise RequestError.of("grammar", self.grammar, "a JsonSchema, a Regex, a Lark or None")

        self._check_functions()

    def _check_functions(self) -> None:
        allowed = f"a list of at most {MAX_PROCESSORS} TokenMachines, TokenBiases and functions (not async)"
        processors = plain_tuple("logits_processors", self.logits_processors, MAX_PROCESSORS, allowed)
        if not isinstance(processors, tuple):
            raise RequestError.of("logits_processors", processors, allowed)

        msgspec.structs.force_setattr(self, "logits_processors", processors)
        wrong = [each for each in processors if not is_processor(each)]
        if wrong:
            raise RequestError.of("logits_processors", wrong[0], allowed)

        if self.stop_when is not None and not is_function(self.stop_when):
            allowed = "a function (not async) of token ids and text, or None"
            raise RequestError.of("stop_when", self.stop_when, allowed)

    def _make_tuple(self, name: str, most: int) -> None:
        """Make a tuple of a list or an array of ids. RequestError for one of more than `most` items."""
        value: object = getattr(self, name)
        if name != "stop":
            value = ids_of_array(name, value, most)
        msgspec.structs.force_setattr(self, name, plain_tuple(name, value, most, f"at most {most} items"))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Make parameters from wire input, such as decoded JSON, in which the keys of `logit_bias` are
        strings. RequestError for a wrong value, and for an unknown field, with the name of the most similar
        one."""
        check_field_names(RequestError, cls, values, name="params")
        bias = values.get("logit_bias")
        if isinstance(bias, Mapping):
            values = {**values, "logit_bias": _bias_from_json(bias)}

        return cls(**values)

    def replace(
        self: SamplingParams[ParsedT], **changes: Unpack[SamplingOptions[ParsedT]]
    ) -> SamplingParams[ParsedT]:
        """A copy with some fields changed, checked like a new one: RequestError for a wrong value, and for an
        unknown field, with the name of the most similar one."""
        return replace_fields(RequestError, self, changes)


NOTHING: dict[str, object] = {"prompt_logprobs": None, "prompt_states": None, "logprob_token_ids": ()}


def beside_graphs(params: SamplingParams) -> dict[str, object]:
    """The parameters that ask for what is computed beside the graphs, by name."""
    given = {field: getattr(params, field) for field in NOTHING}
    return {field: value for field, value in given.items() if value != NOTHING[field]}


def check_needs_no_host(params: SamplingParams, *, is_speculating: bool) -> None:
    """RequestError for parameters that need the host in the middle of a step (strict_performance)."""
    for field, value in beside_graphs(params).items():
        raise RequestError.of(field, value, f"{NOTHING[field]!r} with strict_performance")

    for field in ("grammar", "thinking_budget", "logits_processors"):
        value = getattr(params, field)
        is_given = bool(machines_of(value)) if field == "logits_processors" else value is not None
        if is_given and is_speculating and params.num_draft_tokens != 0:
            none = "no TokenMachine" if field == "logits_processors" else "None"
            allowed = f"{none}, or num_draft_tokens=0, with strict_performance and speculation"
            raise RequestError.of(field, value, allowed)


def is_processor(value: object) -> bool:
    return isinstance(value, TokenMachine | TokenBias) or is_function(value)


def is_function(value: object) -> bool:
    """Whether a value can be called where no event loop runs. A class is none: one was meant to be made."""
    return callable(value) and not isinstance(value, type) and not is_coroutine_function(value)


def _bias_from_json(bias: Mapping[Any, Any]) -> dict[Any, Any]:
    """The mapping with its keys as integers where they are decimal token ids; other keys are kept, for the
    check of the field to reject."""
    read: dict[Any, Any] = {}
    for key, addend in _plain_bias(bias).items():
        token_id = int(key) if isinstance(key, str) and re.fullmatch("0|[1-9][0-9]{0,9}", key) else key
        if token_id in read:
            raise RequestError.of("logit_bias", {key: addend}, "each token id once")

        read[token_id] = addend

    return read


def _check_token_ids(field: str, ids: object, *, least: int, most: int) -> None:
    allowed = f"{'at most' if least == 0 else '1 to'} {most} token ids from 0 to {MAX_TOKENS}"
    if not isinstance(ids, tuple) or not least <= len(ids) <= most:
        raise RequestError.of(field, ids, allowed)

    if not _are_token_ids(ids):
        wrong = next(token_id for token_id in ids if not _are_token_ids((token_id,)))
        raise RequestError.of(field, wrong, allowed)


def _plain_bias(bias: Mapping[Any, Any]) -> dict[Any, Any]:
    try:
        return first_pairs(bias, MAX_ITEMS)
    except Exception as error:  # a class of the caller may run any code
        raise RequestError.of(
            "logit_bias", bias, f"a mapping of at most {MAX_ITEMS} items ({error})"
        ) from error


def _checked_bias(bias: object) -> FrozenMapping[int, float]:
    allowed = f"token ids from 0 to {MAX_TOKENS}, each with a finite number from {-MAX_BIAS} to {MAX_BIAS}"
    if not isinstance(bias, Mapping):
        raise RequestError.of("logit_bias", bias, f"a mapping of {allowed}")

    plain = _plain_bias(bias)
    if not set(map(type, plain)) | set(map(type, plain.values())) <= {int, float}:
        plain = {plain_scalar(token_id): plain_scalar(addend) for token_id, addend in plain.items()}
    if not _are_token_ids(plain) or not _are_addends(plain.values()):
        wrong = next(
            {token_id: addend}
            for token_id, addend in plain.items()
            if not _are_token_ids((token_id,)) or not _are_addends((addend,))
        )
        raise RequestError.of("logit_bias", wrong, allowed)

    return FrozenMapping(dict(zip(plain, map(float, plain.values()), strict=True)))


def _are_token_ids(values: Collection[object]) -> bool:
    """Whether all are ints from 0 to MAX_TOKENS: there may be a hundred thousand."""
    if not set(map(type, values)) <= {int}:
        return False

    ids = cast("Collection[int]", values)
    return not ids or (min(ids) >= 0 and max(ids) <= MAX_TOKENS)


def _are_addends(values: Collection[object]) -> bool:
    """Whether all are numbers from -MAX_BIAS to MAX_BIAS."""
    if not set(map(type, values)) <= {int, float}:
        return False

    return all(-MAX_BIAS <= addend <= MAX_BIAS for addend in cast("Collection[float]", values))
