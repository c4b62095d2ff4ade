"""Logits processors of a request, as values: machines over tokens and tables of biases, which every executor
runs, and Python functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec
from msgspec import Struct

from drift_sdk._fields import RequestFields, check_int, plain_scalar, plain_value
from drift_sdk._plain_data import MAX_ITEMS, FrozenMapping, first_pairs, ids_of_array, plain_tuple
from drift_sdk.errors import RequestError, error_repr

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["LogitsFunction", "LogitsProcessor", "StopFunction", "TokenBias", "TokenMachine", "TokenState"]

MAX_STATES = 10_000
MAX_MACHINE_IDS = 2**20
MAX_ID = 2**31 - 1
MAX_ADDEND = 100.0
NO_STEPS: FrozenMapping[int, int] = FrozenMapping({})

LogitsFunction: TypeAlias = Callable[[Sequence[int], Any], Any]
"""(token ids generated so far, logits) -> logits: arrays of numpy, float32 [vocabulary]. The array is the
function's own: it may change it and return None. In it, methods of the engine that wait raise RuntimeError.
"""
StopFunction: TypeAlias = Callable[[Sequence[int], str], bool]
"""(token ids generated so far, their text) -> whether generation ends with the last of them. The ids are one
list, which grows from call to call. In it, methods of the engine that wait raise RuntimeError."""


class TokenState(Struct, frozen=True, kw_only=True, metaclass=RequestFields):
    """A state of a `TokenMachine`: the tokens that may be next, and the states after them.

    allowed:   ids of the only tokens that may be next; None = all.
    forbidden: ids of tokens that may not be next.
    next:      token id -> number of the state after it.
    otherwise: number of the state after any other token; None = this state.

    RequestError for a value of another form.
    """

    allowed: tuple[int, ...] | None = None
    forbidden: tuple[int, ...] = ()
    next: Mapping[int, int] = NO_STEPS
    otherwise: int | None = None

    def __post_init__(self) -> None:
        for field in ("allowed", "forbidden"):
            least = 1 if field == "allowed" else 0
            allowed = f"{least} to {MAX_MACHINE_IDS} token ids from 0 to {MAX_ID}"
            value = ids_of_array(field, getattr(self, field), MAX_MACHINE_IDS)
            value = plain_value(plain_tuple(field, value, MAX_MACHINE_IDS, allowed))
            msgspec.structs.force_setattr(self, field, value)
            if value is None and field == "allowed":
                continue

            if not isinstance(value, tuple) or len(value) < least:
                raise RequestError.of(field, value, allowed)

            if not all(map(is_id, value)):
                raise RequestError.of(field, next(each for each in value if not is_id(each)), allowed)
        steps = plain_pairs("next", self.next, f"a mapping of at most {MAX_ITEMS} token ids to states")
        steps = {plain_scalar(token_id): plain_scalar(state) for token_id, state in steps.items()}
        for token_id, state in steps.items():
            if not (is_id(token_id) and is_id(state)):
                raise RequestError.of("next", {token_id: state}, "token ids, each with the number of a state")
        msgspec.structs.force_setattr(self, "next", FrozenMapping(steps))
        if self.otherwise is not None:
            msgspec.structs.force_setattr(self, "otherwise", plain_scalar(self.otherwise))
            check_int(RequestError, "otherwise", self.otherwise, ge=0)

    def after(self, token_id: int, number: int) -> int:
        """The number of the state after a token. number: of this state."""
        return self.next.get(token_id, number if self.otherwise is None else self.otherwise)


def distinct(states: Sequence[TokenState]) -> Iterable[TokenState]:
    """The states, each object once: a large one may be repeated."""
    return {id(state): state for state in states}.values()


class TokenMachine(Struct, frozen=True, metaclass=RequestFields):
    """A logits processor: which tokens may be next depends on those generated so far. It runs in CUDA graphs,
    with drafts and with a grammar.

    states: 1 to 10,000; the first is the one before the first token. RequestError for a state that names one
            which does not exist.

    A request whose tokens a machine leaves no choice, alone or with the grammar, the thinking budget and
    other machines, ends with RequestError.
    """

    states: tuple[TokenState, ...]

    def __post_init__(self) -> None:
        allowed = f"1 to {MAX_STATES} TokenStates"
        states = plain_tuple("states", self.states, MAX_STATES, allowed)
        if not isinstance(states, tuple) or not states:
            raise RequestError.of("states", states, allowed)

        for number, state in enumerate(states):
            if not isinstance(state, TokenState):
                raise RequestError.of(f"states[{number}]", state, "a TokenState")

        for state in distinct(states):
            if max((*state.next.values(), state.otherwise or 0)) < len(states):
                continue

            following = {f"next[{token_id}]": after for token_id, after in state.next.items()}
            for field, after in (*following.items(), ("otherwise", state.otherwise or 0)):
                if after >= len(states):
                    allowed = f"the number of a state, from 0 to {len(states) - 1}"
                    raise RequestError.of(f"states[{states.index(state)}].{field}", after, allowed)

        msgspec.structs.force_setattr(self, "states", states)

    @property
    def token_ids(self) -> set[int]:
        """The ids that the machine names."""
        return {
            token_id
            for state in distinct(self.states)
            for token_id in (*(state.allowed or ()), *state.forbidden, *state.next)
        }

    def function(self) -> LogitsFunction:
        """A Python function of the same effect, for tests: what the machine does to logits."""

        def process(token_ids: Sequence[int], logits: NDArray[np.float32]) -> NDArray[np.float32]:
            number = 0
            for token_id in token_ids:
                number = self.states[number].after(token_id, number)
            state = self.states[number]
            if state.allowed is not None:
                kept = logits[list(state.allowed)]
                logits[:] = -float("inf")
                logits[list(state.allowed)] = kept
            logits[list(state.forbidden)] = -float("inf")
            return logits

        return process


class TokenBias(Struct, frozen=True, metaclass=RequestFields):
    """A logits processor: numbers that are added to the logits of tokens, besides `logit_bias`.

    biases: token id -> addend, -100 to 100. RequestError for a value of another form.
    """

    biases: Mapping[int, float]

    def __post_init__(self) -> None:
        allowed = f"at most {MAX_ITEMS} token ids, each with a number from {-MAX_ADDEND} to {MAX_ADDEND}"
        pairs = plain_pairs("biases", self.biases, allowed)
        plain = {plain_scalar(key): plain_scalar(value) for key, value in pairs.items()}
        for token_id, addend in plain.items():
            is_number = type(addend) in (int, float) and -MAX_ADDEND <= addend <= MAX_ADDEND
            if not is_id(token_id) or not is_number:
                raise RequestError.of("biases", {token_id: addend}, allowed)

        floats = FrozenMapping({token_id: float(addend) for token_id, addend in plain.items()})
        msgspec.structs.force_setattr(self, "biases", floats)

    @property
    def token_ids(self) -> set[int]:
        """The ids that the table names."""
        return set(self.biases)

    def function(self) -> LogitsFunction:
        """A Python function of the same effect, for tests: what the table does to logits."""

        def process(token_ids: Sequence[int], logits: NDArray[np.float32]) -> None:
            for token_id, addend in self.biases.items():
                logits[token_id] += addend

        return process


LogitsProcessor: TypeAlias = TokenMachine | TokenBias | LogitsFunction


def plain_pairs(field: str, value: object, allowed: str) -> dict[Any, Any]:
    """The items of a mapping as a dict. RequestError for what is none, has more than MAX_ITEMS items, or
    cannot be read."""
    if not isinstance(value, Mapping):
        raise RequestError.of(field, value, allowed)

    try:
        return first_pairs(value, MAX_ITEMS)
    except Exception as error:  # a class of the caller may run any code
        raise RequestError.of(field, value, f"{allowed} ({error_repr(error)})") from error


def is_id(value: object) -> bool:
    return type(value) is int and 0 <= value <= MAX_ID


def machines_of(processors: Sequence[Any]) -> list[TokenMachine]:
    return [each for each in processors if isinstance(each, TokenMachine)]


def functions_of(processors: Sequence[Any]) -> tuple[LogitsFunction, ...]:
    """The Python functions among logits processors, in their order."""
    return tuple(each for each in processors if not isinstance(each, TokenMachine | TokenBias))
