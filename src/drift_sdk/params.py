"""What a request asks for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct

from drift_sdk.errors import RequestError
from drift_sdk.validation import check_bool, check_float, check_int, check_str_tuple

__all__ = ["MAX_SEED", "SamplingParams"]

MAX_SEED = 2**63 - 1
MAX_TOKENS = 2**31 - 1
MAX_STOPS = 64
MAX_LOGPROBS = 20


class SamplingParams(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a request's tokens are chosen and when they end.

    max_tokens:     most tokens to generate; None = to the end of the context.
    temperature:    0 = greedy; above, logits are divided by it before the filters.
    top_k:          keep the k most likely tokens; 0 = all.
    top_p:          keep the smallest set of most likely tokens whose probability reaches top_p; 1 = all.
    min_p:          keep tokens at least min_p times as likely as the most likely one; 0 = all.
    seed:           equal seeds give equal tokens, whatever else the engine runs; None = drawn per request.
    stop:           a string or several; generation ends before the first one to appear.
    stop_token_ids: ids that end generation, beside the model's own end-of-sequence ids.
    ignore_eos:     generate past the model's end-of-sequence ids.
    include_stop:   keep the stop string that ended the text.
    logprobs:       log-probabilities of each generated token and the n most likely ones; None = none.
    priority:       lower is served earlier; equal priorities in order of arrival.

    The filters apply in the order top_k, top_p, min_p. Every value is checked here; a wrong one raises
    `RequestError` naming field, value and range.
    """

    max_tokens: int | None = 256
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
    priority: int = 0

    def __post_init__(self) -> None:
        # A frozen Struct is normalised once, here: a lone stop string and lists become tuples.
        if isinstance(self.stop, str):
            msgspec.structs.force_setattr(self, "stop", (self.stop,))
        elif isinstance(self.stop, list):
            msgspec.structs.force_setattr(self, "stop", tuple(self.stop))
        if isinstance(self.stop_token_ids, list):
            msgspec.structs.force_setattr(self, "stop_token_ids", tuple(self.stop_token_ids))

        check_int(RequestError, "max_tokens", self.max_tokens, ge=1, le=MAX_TOKENS, optional=True)
        check_float(RequestError, "temperature", self.temperature, ge=0.0, le=100.0)
        check_int(RequestError, "top_k", self.top_k, ge=0, le=MAX_TOKENS)
        check_float(RequestError, "top_p", self.top_p, gt=0.0, le=1.0)
        check_float(RequestError, "min_p", self.min_p, ge=0.0, le=1.0)
        check_int(RequestError, "seed", self.seed, ge=0, le=MAX_SEED, optional=True)
        check_str_tuple(RequestError, "stop", self.stop, max_items=MAX_STOPS)
        self._check_stop_token_ids()
        check_bool(RequestError, "ignore_eos", self.ignore_eos)
        check_bool(RequestError, "include_stop", self.include_stop)
        check_int(RequestError, "logprobs", self.logprobs, ge=0, le=MAX_LOGPROBS, optional=True)
        check_int(RequestError, "priority", self.priority, ge=-(2**31), le=2**31 - 1)

    def _check_stop_token_ids(self) -> None:
        ids = self.stop_token_ids
        is_tuple = isinstance(ids, tuple) and len(ids) <= MAX_STOPS
        if not is_tuple or not all(
            isinstance(i, int) and not isinstance(i, bool) and 0 <= i <= MAX_TOKENS for i in ids
        ):
            raise RequestError.of("stop_token_ids", ids, f"at most {MAX_STOPS} token ids of at least 0")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Build from wire input; an unknown or wrong field raises `RequestError`."""
        known = set(cls.__struct_fields__)
        for name, value in values.items():
            if name not in known:
                raise RequestError(
                    f"{name}={value!r}: unknown field, expected one of {', '.join(sorted(known))}",
                    field=name,
                    value=value,
                    allowed=", ".join(sorted(known)),
                )

        return cls(**values)
