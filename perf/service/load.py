"""A service's load: cases and their requests.

Standard library alone: peers' processes import this module.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

__all__ = ["CASES", "OUTPUTS", "PROMPTS", "Case", "Lengths", "Request", "requests_of"]

FIRST_TOKEN_ID = 10  # the ids below are special tokens in some models
NUM_REQUESTS = {"closed-1": 24, "closed-8": 150, "closed-64": 530, "closed-256": 1000, "sampled-64": 480}
"""Requests of a closed loop that take about 20 seconds on an H200. Others have 8 per client."""
NUM_PREFIX_REQUESTS = 480
OPEN_LOOP_S = 20
DRAFT_FACTOR = 1.6  # times as many requests with drafts, which make a closed loop that much faster


@dataclass(frozen=True)
class Lengths:
    """A log-normal distribution of numbers of tokens, clipped to `least` and `most`."""

    median: float
    sigma: float
    least: int
    most: int

    def draw(self, numbers: random.Random) -> int:
        drawn = round(numbers.lognormvariate(math.log(self.median), self.sigma))
        return min(max(drawn, self.least), self.most)

    def __str__(self) -> str:
        return f"log-normal, median {self.median:g}, sigma {self.sigma:g}, {self.least} to {self.most}"


PROMPTS = Lengths(350, 1.0, 16, 6000)
OUTPUTS = Lengths(160, 0.6, 8, 600)
OWN_PARTS = Lengths(64, 0.5, 16, 256)


@dataclass(frozen=True)
class Case:
    """One kind of load.

    clients:        of a closed loop, each with one request at a time; 0 for an open loop.
    rate:           requests per second of an open loop with Poisson arrivals; 0 for a closed loop.
    is_sampled:     temperature 0.8 and top_p 0.95; greedy otherwise.
    num_prefixes:   number of shared prefixes; every prompt starts with one of them.
    prefix_tokens:  tokens of each shared prefix.
    """

    name: str
    num_requests: int
    clients: int = 0
    rate: float = 0.0
    is_sampled: bool = False
    num_prefixes: int = 0
    prefix_tokens: int = 0
    prompts: Lengths = PROMPTS
    outputs: Lengths = OUTPUTS

    @classmethod
    def parse(cls, name: str) -> Case:
        """The load of a name: closed-N or sampled-N (N clients), open-R (R requests a second), prefix or
        prefix-N (N shared prefixes in place of 8).

        Raises ValueError for anything else.
        """
        match = re.fullmatch(
            r"(closed|sampled|open|prefix)-([1-9]\d*)", f"{name}-8" if name == "prefix" else name
        )
        if match is None:
            raise ValueError(f"case={name!r}: expected closed-N, sampled-N, open-N, prefix or prefix-N")

        kind, number = match[1], int(match[2])
        if kind == "prefix":
            return cls(
                name,
                NUM_PREFIX_REQUESTS,
                clients=32,
                num_prefixes=number,
                prefix_tokens=2000,
                prompts=OWN_PARTS,
            )

        if kind == "open":
            return cls(name, OPEN_LOOP_S * number, rate=float(number))

        num_requests = NUM_REQUESTS.get(name, 8 * number)
        return cls(name, num_requests, clients=number, is_sampled=kind == "sampled")

    def with_drafts(self) -> Case:
        """The same load for engines that draft: a closed loop has more requests."""
        if not self.clients:
            return self

        return replace(self, num_requests=round(DRAFT_FACTOR * self.num_requests))

    def fitted(self, max_model_len: int) -> Case:
        """The same load with prompts that leave room for the longest output in `max_model_len` tokens."""
        room = max_model_len - self.outputs.most
        if room < 2 * self.prompts.least:
            raise ValueError(f"max_model_len={max_model_len}: expected room for {self.outputs.most} tokens")

        prefix_tokens = min(self.prefix_tokens, room // 2)
        prompts = replace(self.prompts, most=min(self.prompts.most, room - prefix_tokens))
        return replace(self, prefix_tokens=prefix_tokens, prompts=prompts)


CASES = tuple(
    Case.parse(name)
    for name in ("closed-64", "sampled-64", "closed-8", "prefix", "open-20", "closed-1", "closed-256")
)


@dataclass(frozen=True)
class Request:
    """A prompt and the number of tokens to generate. due_s: its arrival in an open loop, in seconds."""

    prompt: list[int]
    num_tokens: int
    due_s: float = 0.0


def requests_of(case: Case, vocab_size: int, seed: str) -> list[Request]:
    """The case's requests, in order. Equal arguments give equal requests in every process.

    Token ids are random, so that no two prompts share a block unless the case has shared prefixes.
    """
    return list(_requests(case, vocab_size, random.Random(f"{seed}/{case.name}")))


def _requests(case: Case, vocab_size: int, numbers: random.Random) -> Iterator[Request]:
    ids = range(FIRST_TOKEN_ID, vocab_size)
    prefixes = [numbers.choices(ids, k=case.prefix_tokens) for _ in range(case.num_prefixes)] or [[]]
    due_s = 0.0
    for _ in range(case.num_requests):
        prefix = numbers.choice(prefixes)
        own = numbers.choices(ids, k=case.prompts.draw(numbers))
        if case.rate:
            due_s += numbers.expovariate(case.rate)
        yield Request(prefix + own, case.outputs.draw(numbers), due_s)
