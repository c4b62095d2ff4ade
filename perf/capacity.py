"""Capacity planning: how many replicas a load needs, by simulation from measured times of one replica.

python -m perf.capacity perf/results/nvidia-h200/serving.json --cases closed-128 open-40 --replicas 1 2 4
python -m perf.capacity one.json --check two.json

A replica is a sequence of steps. A step takes a fixed time, which is mostly the reading of the weights, a
time for each sequence that decodes, and a time for each prompt token that it computes. The three times are
fitted to the runs of one replica in a result file of `perf.serving`. Requests are routed by the router of
`EnginePool`. Slots are limited; the memory of the KV cache, speculation and the host are not simulated.
Prompts are computed as soon as a step has room for them, which the scheduler of an engine puts off while
others decode: times to the first token are lower bounds.
"""

from __future__ import annotations

import argparse
import heapq
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from drift_sdk.driver.prompts import TokenPrompt
from drift_sdk.errors import ConfigError
from drift_sdk.pool.routing import BLOCK_TOKENS, PromptBlocks, Router
from perf.harness.host import percentile
from perf.harness.numbers import at_least
from perf.harness.record import read
from perf.harness.table import show
from perf.service.load import Case, Request, requests_of

__all__ = ["Prediction", "StepTimes", "fit", "main", "simulate"]

VOCAB_SIZE = 32_000  # of simulated prompts; only equal beginnings matter


@dataclass(frozen=True)
class StepTimes:
    """Times of a step of a replica, in seconds.

    step_s:   every step.
    row_s:    for each sequence that decodes.
    prompt_s: for each prompt token that is computed.
    """

    step_s: float
    row_s: float
    prompt_s: float

    def of_step(self, num_rows: int, num_prompt_tokens: int) -> float:
        return self.step_s + self.row_s * num_rows + self.prompt_s * num_prompt_tokens


@dataclass(frozen=True)
class Prediction:
    """Figures of a simulated load.

    tokens_per_s: over the whole run.
    ttft_s:       seconds to the first token of each request, ascending.
    cached:       share of prompt tokens found in prefix caches.
    """

    tokens_per_s: float
    ttft_s: tuple[float, ...]
    cached: float


def fit(runs: Iterable[Mapping[str, Any]]) -> StepTimes:
    """The times of one replica by least squares of relative errors, none below 0.

    runs: of `perf.serving`. Those of closed loops without drafts are used, whose clients never leave the
          engine idle. Raises ValueError if they are of fewer than three cases, because there are three times,
          or of several models.
    """
    used = [run for run in runs if is_busy(run) and not run.get("num_draft_tokens")]
    if len(models := sorted({run["model"] for run in used})) > 1:
        raise ValueError(f"runs of {', '.join(models)}: expected one model")

    if len({run["case"] for run in used}) < 3:
        raise ValueError(f"{len(used)} runs: expected closed loops without drafts, of three cases at least")

    work = np.array(
        [[run["num_steps"], run["num_tokens"], computed_tokens(run)] for run in used], dtype=float
    )
    total_s = np.array([run["total_s"] for run in used])
    return StepTimes(*non_negative(work / total_s[:, None], np.ones(len(used))))


def non_negative(work: np.ndarray, wanted: np.ndarray) -> list[float]:
    """The least-squares solution of work @ x = wanted, without columns whose factors are negative."""
    columns = list(range(work.shape[1]))
    while True:
        found = np.linalg.lstsq(work[:, columns], wanted, rcond=None)[0]
        if found.min() >= 0:
            break

        columns.pop(int(found.argmin()))
    factors = dict(zip(columns, found, strict=True))
    return [float(factors.get(index, 0.0)) for index in range(work.shape[1])]


def is_busy(run: Mapping[str, Any]) -> bool:
    is_ours = run["engine"] == "drift" and run.get("num_replicas", 1) == 1
    return is_ours and run["clients"] is not None and "num_steps" in run


def computed_tokens(run: Mapping[str, Any]) -> int:
    computed: int = run["num_prompt_tokens"] - run["num_cached_tokens"]
    return computed


@dataclass(eq=False)
class Simulated:
    """A request on its way."""

    request: Request
    blocks: PromptBlocks
    sent_at: float
    num_left_of_prompt: int = 0
    num_left: int = 0


@dataclass(eq=False)
class SimulatedReplica:
    """Requests of a replica: those whose prompts are computed, first come first served, and those that
    decode."""

    index: int
    is_stepping: bool = False
    waiting: deque[Simulated] = field(default_factory=deque)
    decoding: list[Simulated] = field(default_factory=list)
    prefilled: list[Simulated] = field(default_factory=list)  # in the step that runs


class Simulation:
    """A load on replicas. `run` simulates all of it."""

    def __init__(
        self,
        case: Case,
        num_replicas: int,
        times: StepTimes,
        *,
        affinity: float | None,
        num_slots: int,
        step_budget: int,
        seed: str,
    ) -> None:
        self._times, self._num_slots, self._step_budget = times, num_slots, step_budget
        self._case = case
        self._requests = deque(requests_of(case, VOCAB_SIZE, seed))
        self._router = Router(num_replicas, affinity)
        self._replicas = [SimulatedReplica(index) for index in range(num_replicas)]
        self._events: list[tuple[float, int, SimulatedReplica | Request]] = []
        self._numbers = count()
        self._ttft_s: list[float] = []
        self._num_tokens = self._num_prompt_tokens = self._num_cached = 0

    def run(self, limit_s: float | None) -> Prediction:
        """limit_s: seconds after which nothing is simulated any more; None = all requests end."""
        now = 0.0
        num_first = self._case.clients or len(self._requests)
        for _ in range(min(num_first, len(self._requests))):
            request = self._requests.popleft()
            self._at(request.due_s, request)
        while self._events and (limit_s is None or self._events[0][0] <= limit_s):
            now, _, event = heapq.heappop(self._events)
            if isinstance(event, Request):
                self._send(event, now)
            else:
                self._end_step(event, now)
        return Prediction(
            tokens_per_s=self._num_tokens / now,
            ttft_s=tuple(sorted(self._ttft_s)),
            cached=self._num_cached / self._num_prompt_tokens,
        )

    def _at(self, time_s: float, event: SimulatedReplica | Request) -> None:
        heapq.heappush(self._events, (time_s, next(self._numbers), event))

    def _send(self, request: Request, now: float) -> None:
        blocks = PromptBlocks.of(TokenPrompt(tuple(request.prompt)))
        index = self._router.order(blocks, range(len(self._replicas)))[0]
        num_known = self._router.loads[index].prefixes.num_known(blocks.hashes) * BLOCK_TOKENS
        num_cached = min(num_known, len(request.prompt) - 1)  # the last token is always computed
        self._router.begin(index, blocks)
        self._router.remember(index, blocks)
        self._num_prompt_tokens += len(request.prompt)
        self._num_cached += num_cached
        replica = self._replicas[index]
        left = len(request.prompt) - num_cached
        replica.waiting.append(Simulated(request, blocks, now, left, request.num_tokens))
        if not replica.is_stepping:
            self._start_step(replica, now)

    def _start_step(self, replica: SimulatedReplica, now: float) -> None:
        """Begin a step, if there is work: a row of each decoding sequence, and prompts up to the budget."""
        num_free = self._num_slots - len(replica.decoding)
        budget = self._step_budget
        replica.prefilled = []
        for each in list(replica.waiting)[:num_free]:
            computed = min(each.num_left_of_prompt, budget)
            each.num_left_of_prompt -= computed
            budget -= computed
            if each.num_left_of_prompt:
                break

            replica.prefilled.append(replica.waiting.popleft())
        num_prompt_tokens = self._step_budget - budget
        replica.is_stepping = bool(replica.decoding or num_prompt_tokens)
        if replica.is_stepping:
            self._at(now + self._times.of_step(len(replica.decoding), num_prompt_tokens), replica)

    def _end_step(self, replica: SimulatedReplica, now: float) -> None:
        self._ttft_s += [now - each.sent_at for each in replica.prefilled]
        emitting = [*replica.decoding, *replica.prefilled]
        self._num_tokens += len(emitting)
        self._router.grow(replica.index, len(emitting))
        for each in emitting:
            each.num_left -= 1
            if not each.num_left:
                self._router.end(replica.index, each.blocks.num_tokens + each.request.num_tokens)
                if self._case.clients and self._requests:
                    self._at(now, self._requests.popleft())
        replica.decoding = [each for each in emitting if each.num_left]
        self._start_step(replica, now)


def simulate(
    case: Case,
    num_replicas: int,
    times: StepTimes,
    *,
    affinity: float | None = 2.0,
    num_slots: int = 256,
    step_budget: int = 2048,
    seed: str = "0/0",
    limit_s: float | None = None,
) -> Prediction:
    """The figures of a load on so many replicas behind a pool.

    affinity:    of `Routing`.
    num_slots:   `max_num_seqs` of each replica.
    step_budget: `prefill_token_budget`.
    seed:        that of `perf.serving`, "/" and the number of the repeat: the same requests.
    limit_s:     seconds after which requests are cut off; None = all end.
    """
    simulation = Simulation(
        case, num_replicas, times, affinity=affinity, num_slots=num_slots, step_budget=step_budget, seed=seed
    )
    return simulation.run(limit_s)


def arguments_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("results", type=Path, help="result file of perf.serving with runs of one replica")
    made.add_argument("--cases", nargs="+", type=Case.parse, default=(), metavar="NAME")
    made.add_argument("--replicas", nargs="+", type=at_least(1), default=[1, 2, 4], metavar="N")
    made.add_argument("--check", type=Path, help="result file whose runs are compared with their prediction")
    return made.parse_args(arguments)


def prediction_rows(cases: Sequence[Case], replicas: Sequence[int], times: StepTimes) -> list[list[str]]:
    return [
        [case.name, str(number), *figures(simulate(case, number, times))]
        for case in cases
        for number in replicas
    ]


def check_rows(runs: Iterable[Mapping[str, Any]], times: StepTimes) -> list[list[str]]:
    """Measured runs of this engine without drafts beside their prediction."""
    rows = []
    for run in runs:
        if run["engine"] != "drift" or run.get("num_draft_tokens"):
            continue

        case, number = case_of(run), run.get("num_replicas", 1)
        affinity = None if "affinity=null" in (run["config"] or "") else 2.0
        slots, seed = run["max_num_seqs"], f"0/{run['repeat']}"
        limit_s = run["total_s"] if run["num_unfinished"] else None
        found = simulate(case, number, times, affinity=affinity, num_slots=slots, seed=seed, limit_s=limit_s)
        measured = run["whole_tokens_per_s"]
        share = run["num_cached_tokens"] / run["num_prompt_tokens"]
        rows.append(
            [
                run["case"],
                f"{number}{'' if affinity else ', no affinity'}",
                *figures(found),
                f"{measured:.0f}",
                f"{share:.1%}",
                f"{found.tokens_per_s / measured - 1:+.1%}",
            ]
        )
    return rows


def case_of(run: Mapping[str, Any]) -> Case:
    """The load of a run, with as many requests as it had and prompts that fit the model."""
    case = Case.parse(run["case"]).fitted(run["max_model_len"])
    return replace(case, num_requests=run["num_requests"])


def figures(found: Prediction) -> list[str]:
    ttft_ms = [1e3 * percentile(list(found.ttft_s), share) for share in (0.5, 0.95)]
    return [f"{found.tokens_per_s:.0f}", "/".join(f"{each:.0f}" for each in ttft_ms), f"{found.cached:.1%}"]


def runs_of(file: Path) -> list[dict[str, Any]]:
    """The runs of a result file of `perf.serving`. Raises ConfigError for another file."""
    try:
        runs = read(file).runs
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError.of("results", str(file), f"a result file: {error}") from error

    if not all("case" in run for run in runs):
        raise ConfigError.of("results", str(file), "a result file of perf.serving")

    return runs


def main(arguments: Sequence[str] | None = None) -> None:
    given = arguments_of(arguments)
    times = fit(runs_of(given.results))
    print(
        f"step {times.step_s * 1e3:.3f} ms, row {times.row_s * 1e6:.2f} us, "
        f"prompt token {times.prompt_s * 1e6:.2f} us"
    )
    columns = ["case", "replicas", "tok/s", "TTFT p50/p95 ms", "cached"]
    if given.cases:
        show("predicted", columns, prediction_rows(given.cases, given.replicas, times))
    if given.check is not None:
        extra = ["measured tok/s", "measured cached", "error"]
        show("predicted and measured", [*columns, *extra], check_rows(runs_of(given.check), times))


if __name__ == "__main__":
    main()
