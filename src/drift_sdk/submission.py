"""Submission of requests: their ids and seeds, and their streams."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable, Sequence
from typing import TypeAlias

from msgspec import Struct

from drift_sdk.driver.loops import LoopPoster
from drift_sdk.driver.prompts import Prompt
from drift_sdk.driver.stream_updates import Signal, StreamUpdates, UpdateReceiver
from drift_sdk.errors import RequestError
from drift_sdk.samples import Samples
from drift_sdk.sampling_params import MAX_SEED, SamplingParams
from drift_sdk.stream import TokenStream

__all__ = ["Submission", "Submit", "Submitter", "check_request_id"]

MAX_ID_CHARS = 128
MAX_SUFFIX_CHARS = 4
"""Most characters that the name of a sample has more than that of its group, "-127"."""
OWN_ID = re.compile(r"req-\d+(-\d+)?", flags=re.ASCII)
"""Ids that the engine makes: "req-" and a number, and of samples a second number."""


class Submission(Struct, frozen=True, kw_only=True, eq=False):
    """A request as it is submitted: what the caller gave, with its id and seed.

    group_id:       the name of all samples of its prompt together; None if it is the only one.
    prompt, params: as the caller gave them; params may be the model's defaults.
    seed:           of its sampling: that of params, or drawn.
    stream_updates: what receives its updates.
    """

    request_id: str
    group_id: str | None = None
    prompt: Prompt
    params: SamplingParams
    seed: int
    stream_updates: UpdateReceiver


Submit: TypeAlias = Callable[[Sequence[Submission]], Sequence[Callable[[], None]]]
"""Submits requests of one prompt, all or none; returns the function that cancels each."""


class Submitter:
    """Makes the submissions of one engine and their streams. May be used from any thread."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._seeds = random.SystemRandom()

    def submit(
        self, submit: Submit, prompt: Prompt, params: SamplingParams, *, request_id: str | None
    ) -> TokenStream:
        """Submit a prompt. Raises what `submit` raises."""
        number, updates = next(self._numbers), StreamUpdates(LoopPoster.current())
        submission = Submission(
            request_id=request_id if request_id is not None else f"req-{number}",
            prompt=prompt,
            params=params,
            seed=self._seed(params),
            stream_updates=updates,
        )
        (cancel,) = submit([submission])
        return TokenStream(submission.request_id, updates, cancel)

    def submit_samples(
        self,
        submit: Submit,
        prompt: Prompt,
        params: SamplingParams,
        *,
        num_samples: int,
        request_id: str | None,
    ) -> Samples:
        """Submit a prompt several times, with the seeds `seed`, `seed + 1` and so on, modulo 2**63."""
        number = next(self._numbers)
        group_id = request_id if request_id is not None else f"req-{number}"
        first_seed, loop_poster, signal = self._seed(params), LoopPoster.current(), Signal()
        all_updates = [StreamUpdates(loop_poster, signal) for _ in range(num_samples)]
        submissions = [
            Submission(
                request_id=f"{group_id}-{index}",
                group_id=group_id,
                prompt=prompt,
                params=params,
                seed=(first_seed + index) % (MAX_SEED + 1),
                stream_updates=updates,
            )
            for index, updates in enumerate(all_updates)
        ]
        streams = [
            TokenStream(submission.request_id, updates, cancel)
            for submission, updates, cancel in zip(submissions, all_updates, submit(submissions), strict=True)
        ]
        return Samples(streams, signal)

    def _seed(self, params: SamplingParams) -> int:
        return params.seed if params.seed is not None else self._seeds.randint(0, MAX_SEED)


def check_request_id(request_id: object, *, is_new: bool) -> None:
    """RequestError for what is no id, and, if `is_new`, for ids that the engine makes itself: those of
    samples are longer."""
    most = MAX_ID_CHARS if is_new else MAX_ID_CHARS + MAX_SUFFIX_CHARS
    allowed = f"1 to {most} printable characters"
    is_id = isinstance(request_id, str) and 1 <= len(request_id) <= most and request_id.isprintable()
    if not is_id:
        raise RequestError.of("request_id", request_id, allowed)

    if is_new and isinstance(request_id, str) and OWN_ID.fullmatch(request_id):
        raise RequestError.of(
            "request_id", request_id, f'{allowed}, not one that the engine makes, like "req-1" or "req-1-0"'
        )
