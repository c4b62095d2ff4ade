"""Submission of requests: their ids, seeds and order of arrival, and their streams."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable
from functools import partial

from drift_sdk.driver.commands import Cancel
from drift_sdk.driver.driver import Driver
from drift_sdk.driver.loop_poster import LoopPoster
from drift_sdk.driver.prompts import Prompt, SharedPrompt
from drift_sdk.driver.request import Request
from drift_sdk.driver.stream_updates import Signal, StreamUpdates
from drift_sdk.errors import RequestError
from drift_sdk.samples import Samples
from drift_sdk.sampling_params import MAX_SEED, SamplingParams
from drift_sdk.stream import TokenStream

__all__ = ["Submitter", "check_request_id"]

MAX_ID_CHARS = 128
MAX_SUFFIX_CHARS = 4
"""Most characters that the name of a sample has more than that of its group, "-127"."""
OWN_ID = re.compile(r"req-\d.*", flags=re.ASCII)
"""Ids that the engine makes."""


class Submitter:
    """Submits the requests of one engine. May be used from any thread.

    new_request: makes a request of the arguments of `Request`; an error that it raises is raised by the call
                 that submits.
    """

    def __init__(self, new_request: Callable[..., Request] = Request) -> None:
        self._new_request = new_request
        self._numbers = itertools.count()
        self._seeds = random.SystemRandom()

    def submit(
        self,
        driver: Driver,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str | None,
    ) -> TokenStream:
        """Submit a prompt. RequestError for a wrong id; raises what `Driver.submit` raises."""
        number = next(self._numbers)
        request = self._new_request(
            request_id=request_id if request_id is not None else f"req-{number}",
            arrival=number,
            prompt=prompt,
            params=params,
            seed=self._seed(params),
            stream_updates=StreamUpdates(LoopPoster.current()),
        )
        driver.submit([request])
        return stream_of(request, driver)

    def submit_samples(
        self,
        driver: Driver,
        prompt: Prompt,
        params: SamplingParams,
        *,
        num_samples: int,
        request_id: str | None,
    ) -> Samples:
        """Submit a prompt several times, with the seeds `seed`, `seed + 1` and so on, modulo 2**63."""
        numbers = [next(self._numbers) for _ in range(num_samples)]
        group_id = request_id if request_id is not None else f"req-{numbers[0]}"
        first_seed, loop_poster, signal = self._seed(params), LoopPoster.current(), Signal()
        shared = SharedPrompt(prompt)
        requests = [
            self._new_request(
                request_id=f"{group_id}-{index}",
                group_id=group_id,
                arrival=number,
                prompt=shared,
                params=params,
                seed=(first_seed + index) % (MAX_SEED + 1),
                stream_updates=StreamUpdates(loop_poster, signal),
            )
            for index, number in enumerate(numbers)
        ]
        driver.submit(requests)
        return Samples([stream_of(request, driver) for request in requests], signal)

    def _seed(self, params: SamplingParams) -> int:
        return params.seed if params.seed is not None else self._seeds.randint(0, MAX_SEED)


def stream_of(request: Request, driver: Driver) -> TokenStream:
    return TokenStream(request.request_id, request.stream_updates, partial(driver.send, Cancel(request)))


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
            "request_id", request_id, f'{allowed} that do not begin with "req-" and a digit'
        )
