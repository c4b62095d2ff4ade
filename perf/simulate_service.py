"""A service simulated: the real scheduler in virtual time, with steps that take as long as measured ones.

python -m perf.simulate_service
python -m perf.simulate_service --cases closed-64 open-20 --margin-ms 1.5 at-once --repeats 4

Predicts what a change of the scheduler does to throughput and latency, without a GPU: figures that
`perf.serving` measures for an engine of Llama-3.1-8B in bfloat16 with default settings, without drafts. The
products of a step take the times in the tuned table of the GPU, between measured numbers of rows by linear
interpolation; constants have the rest. Not simulated are other models, drafts, quantised weights, and the
reading of shared prefixes once for several sequences. The constants are those of an H100, and the table of an
H200 lacks the times of products that the library computes: its predictions compare schedulers, not GPUs.

--margin-ms: before the end of a step at which the next one is planned; at-once: when it begins.
"""

from __future__ import annotations

import argparse
import heapq
import statistics
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch

from drift_sdk._kernels.gemm.tuning import gemm_key, table_for
from drift_sdk.config import PREFILL_TOKEN_BUDGETS, EngineConfig
from drift_sdk.driver.driver import LAUNCH_DEPTH
from drift_sdk.execution.graph.buckets import GraphBuckets, bucket_of
from drift_sdk.families import read_spec
from drift_sdk.models.decoder import Decoder
from drift_sdk.models.weights import meta_weights
from drift_sdk.scheduling.planning import SchedulerConfig
from drift_sdk.scheduling.scheduler import Scheduler
from drift_sdk.scheduling.sequence import Sequence as Running
from drift_sdk.steps import ExecutorLimits, PrefillChunk, SlotOutput, SlotSampling, StepPlan, StepResult
from perf.harness.host import percentile
from perf.harness.numbers import at_least
from perf.harness.published import LLAMA, PUBLISHED
from perf.harness.table import show
from perf.service.load import Case, Request, requests_of

__all__ = ["Figures", "StepModel", "main", "simulate"]

MODEL = "llama-3.1-8b"
LAYER = ((6144, 4096, False), (4096, 4096, False), (28672, 4096, True), (4096, 14336, False))
HEAD = (128256, 4096, False)
NUM_LAYERS = 32
KV_BYTES = 131_072  # of a token
DEFAULTS = EngineConfig()
LIMITS = ExecutorLimits(
    max_num_seqs=DEFAULTS.max_num_seqs, max_model_len=8192, num_blocks=4096, block_size=64, vocab_size=128_256
)

OTHER_US = 550.0  # kernels of a step that take as long whatever the rows
MIXED_US = 250.0  # what a pass of chunks and decode rows takes longer
TOKEN_US = 0.5  # a prompt token in attention and elementwise kernels
READ_BYTES_PER_US = 3.0e6  # of keys and values
CHUNK_FLOPS_PER_US = 400e6  # of attention of chunks
HOST_US = 150.0  # from the end of a step to its tokens
TURN_US = 200.0  # from the end of a request to the next one of its client
"""Chosen by hand so that `closed-64` takes as long as measured on an H100."""


class ProductTimes:
    """Times of a weight's products by number of rows, as a tuned table's provenance has them."""

    def __init__(self, gpu: str, shape: tuple[int, int, bool]) -> None:
        num_columns, inner, is_gated = shape
        text = table_for(gpu).provenance[gemm_key(num_columns, inner, is_gated=is_gated)]
        measured = text.split("us by rows: ")[1].split("; ")[0]  # without remarks
        pairs = [pair.split(": ") for pair in measured.split(", ")]
        self.rows = [int(rows) for rows, _ in pairs]
        self.us = [float(us) for _, us in pairs]

    def of(self, num_rows: int) -> float:
        """Microseconds of a product; beyond the last measured number of rows, as between the last two."""
        index = min(max(bisect_left(self.rows, num_rows), 1), len(self.rows) - 1)
        (first, second), (begin, end) = self.rows[index - 1 : index + 1], self.us[index - 1 : index + 1]
        return begin + (end - begin) * max(num_rows - first, 0) / (second - first)


class StepModel:
    """Times of steps, in microseconds."""

    def __init__(self, gpu: str) -> None:
        """gpu: the key of its tuned table."""
        self._products = [ProductTimes(gpu, shape) for shape in LAYER]
        self._head = ProductTimes(gpu, HEAD)

    def step_us(self, plan: StepPlan, num_keys: int, buckets: GraphBuckets) -> float:
        """The time of a step. num_keys: of all rows that decode, together."""
        num_tokens, num_rows = sum(len(chunk.token_ids) for chunk in plan.prefill), len(plan.decode)
        num_first = sum(chunk.is_last for chunk in plan.prefill)
        keys_us = num_keys * KV_BYTES / READ_BYTES_PER_US
        tokens_us = num_tokens * TOKEN_US + sum(map(self._chunk_us, plan.prefill))
        if num_rows and num_tokens:
            mixed = buckets.mixed_bucket(num_tokens, len(plan.prefill), num_rows)
            if mixed is not None:
                rows = self._rows_us(mixed.size, mixed.num_slots + num_first)
                return rows + keys_us + tokens_us + MIXED_US

        total = tokens_us + keys_us
        if num_tokens:
            total += self._rows_us(bucket_of(buckets.prefill, num_tokens), num_first)
        if num_rows:
            num_slots = bucket_of(buckets.decode, num_rows)
            total += self._rows_us(num_slots, num_slots)
        return total

    def _rows_us(self, num_rows: int, num_logits: int) -> float:
        layer = sum(product.of(num_rows) for product in self._products)
        head = self._head.of(num_logits) if num_logits else 0.0
        return NUM_LAYERS * layer + head + OTHER_US

    def _chunk_us(self, chunk: PrefillChunk) -> float:
        middle = chunk.start + len(chunk.token_ids) / 2
        return 4 * 4096 * NUM_LAYERS * len(chunk.token_ids) * middle / CHUNK_FLOPS_PER_US


@dataclass(frozen=True)
class Figures:
    """Of a case: tokens per second, and milliseconds to the first token and between tokens (50, 95, 99%)."""

    tokens_per_s: float
    ttft_ms: tuple[float, ...]
    itl_ms: tuple[float, ...]


def model_buckets() -> GraphBuckets:
    """The sizes of steps of a default engine."""
    spec = read_spec(LLAMA | PUBLISHED[MODEL] | {"num_hidden_layers": 1})
    decoder = Decoder(spec, meta_weights(spec, torch.bfloat16))
    return GraphBuckets.of(decoder, LIMITS, PREFILL_TOKEN_BUDGETS["cuda"], is_exact=False)


@dataclass(eq=False)
class Served:
    """A request on its way. times_us: at which its tokens have come."""

    request: Request
    sent_us: float
    sequence: Running
    times_us: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Launched:
    """A step on the device, and when it ends."""

    plan: StepPlan
    ends_us: float
    duration_us: float


class Simulation:
    """A case on one engine. Times are microseconds from its beginning."""

    def __init__(
        self, case: Case, model: StepModel, buckets: GraphBuckets, seed: str, margin_us: float | None
    ) -> None:
        """margin_us: before the end of a step at which the next one is planned; None: when it begins."""
        self._case, self._model, self._buckets, self._margin_us = case, model, buckets, margin_us
        self._scheduler = Scheduler(
            SchedulerConfig(
                max_num_seqs=LIMITS.max_num_seqs,
                num_blocks=LIMITS.num_blocks,
                block_size=LIMITS.block_size,
                prefill_token_budget=PREFILL_TOKEN_BUDGETS["cuda"],
                mixed_tokens=buckets.mixed_tokens,
            )
        )
        self._requests = requests_of(case, LIMITS.vocab_size, seed)
        self._num_sent = 0
        self._due: list[tuple[float, int]] = []  # when a request is sent, and its number
        self._served: dict[int, Served] = {}  # by number
        self._slots: dict[int, Served] = {}
        self._in_flight: deque[Launched] = deque()

    def run(self) -> list[Served]:
        """Serve all requests."""
        for _ in range(self._case.clients or len(self._requests)):
            self._send_next(0.0)
        now = device_us = 0.0
        while self._due or self._scheduler.has_work:
            if self._margin_us is not None and len(self._in_flight) == 1:
                now = max(now, self._in_flight[0].ends_us - self._margin_us)
            self._receive(now)
            plan = self._scheduler.schedule() if len(self._in_flight) < LAUNCH_DEPTH else None
            if plan is not None:
                duration_us = self._duration_us(plan)
                device_us = max(device_us, now) + duration_us
                self._in_flight.append(Launched(plan, device_us, duration_us))
                if len(self._in_flight) < LAUNCH_DEPTH:
                    continue

            if self._in_flight:
                now = max(now, self._in_flight[0].ends_us) + HOST_US
                self._commit(self._in_flight.popleft(), now)
            elif self._due:
                now = self._due[0][0]
        return list(self._served.values())

    def _send_next(self, now: float) -> None:
        """Have the next request sent, in an open loop when it is due."""
        if self._num_sent == len(self._requests):
            return

        due_us = now if self._case.clients else self._requests[self._num_sent].due_s * 1e6
        heapq.heappush(self._due, (due_us, self._num_sent))
        self._num_sent += 1

    def _receive(self, now: float) -> None:
        while self._due and self._due[0][0] <= now:
            sent_us, number = heapq.heappop(self._due)
            request = self._requests[number]
            sampling = SlotSampling(
                temperature=0.0,
                top_k=0,
                top_p=1.0,
                min_p=0.0,
                seed=0,
                stop_token_ids=(),
                num_prompt_tokens=len(request.prompt),
                max_length=len(request.prompt) + request.num_tokens,
            )
            sequence = Running(
                request_id=str(number),
                prompt_ids=request.prompt,
                sampling=sampling,
                priority=0,
                arrival=number,
            )
            self._served[number] = Served(request, sent_us, sequence)
            self._scheduler.add(sequence)

    def _duration_us(self, plan: StepPlan) -> float:
        for assignment in plan.assignments:
            self._slots[assignment.slot] = self._served[assignment.arrival]
        num_keys = sum(len(self._slots[row.slot].sequence.token_ids) for row in plan.decode)
        return self._model.step_us(plan, num_keys, self._buckets)

    def _commit(self, launched: Launched, now: float) -> None:
        plan = launched.plan
        result = StepResult(
            step_id=plan.step_id,
            prefill=tuple(
                self._output(chunk.slot) if chunk.is_last else SlotOutput() for chunk in plan.prefill
            ),
            decode=tuple(self._output(row.slot) for row in plan.decode),
            duration_s=launched.duration_us / 1e6,
        )
        for delta in self._scheduler.commit(result):
            self._served[delta.sequence.arrival].times_us.append(now)
            if delta.output.finish is not None and self._case.clients:
                self._send_next(now + TURN_US)

    def _output(self, slot: int) -> SlotOutput:
        sequence = self._slots[slot].sequence
        is_last = len(sequence.token_ids) + 1 >= sequence.max_length
        return SlotOutput(token_ids=(1,), finish="length" if is_last else None)


def simulate(
    case: Case, model: StepModel, buckets: GraphBuckets, seed: str, margin_us: float | None
) -> Figures:
    """The figures of a case in its window, as `perf.serving` has them."""
    served = Simulation(case, model, buckets, seed, margin_us).run()
    sent = sorted(one.sent_us for one in served)
    begin = sent[len(sent) // 5]
    if case.clients:
        begin = sorted(one.times_us[-1] for one in served)[min(case.clients, len(served)) - 1]
    end = sent[-1]
    in_window = [one for one in served if begin <= one.sent_us <= end]
    ttft = [(one.times_us[0] - one.sent_us) / 1e3 for one in in_window]
    itl = [
        (time_us - before_us) / 1e3
        for one in served
        for before_us, time_us in zip(one.times_us, one.times_us[1:], strict=False)
        if begin <= time_us <= end
    ]
    num_tokens = sum(begin <= time_us <= end for one in served for time_us in one.times_us)
    return Figures(num_tokens / (end - begin) * 1e6, percentiles(ttft), percentiles(itl))


def percentiles(values: list[float]) -> tuple[float, ...]:
    return tuple(percentile(values, share) for share in (0.5, 0.95, 0.99))


def rows_of(
    cases: Sequence[Case], margins: Sequence[float | None], repeats: int, model: StepModel
) -> Iterator[tuple[str, ...]]:
    """A line for each case and margin: means over the repeats, whose requests differ."""
    buckets = model_buckets()
    for case in cases:
        for margin_us in margins:
            found = [simulate(case, model, buckets, str(repeat), margin_us) for repeat in range(repeats)]
            rate = statistics.mean(one.tokens_per_s for one in found)
            ttft = [statistics.mean(values) for values in zip(*(one.ttft_ms for one in found), strict=True)]
            itl = [statistics.mean(values) for values in zip(*(one.itl_ms for one in found), strict=True)]
            yield (
                case.name,
                "at once" if margin_us is None else f"{margin_us / 1e3:g} ms before",
                f"{rate:.0f}",
                "/".join(f"{value:.1f}" for value in ttft),
                "/".join(f"{value:.1f}" for value in itl),
            )


def margin(text: str) -> float | None:
    """Microseconds; None for "at-once". Raises ValueError for anything else."""
    return None if text == "at-once" else float(text) * 1e3


def main(arguments: Sequence[str] | None = None) -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument(
        "--cases", nargs="+", type=Case.parse, metavar="CASE", default=[Case.parse("closed-64")]
    )
    made.add_argument("--margin-ms", nargs="+", type=margin, default=[None, 1500.0])
    made.add_argument("--repeats", type=at_least(1), default=1)
    made.add_argument("--num-requests", type=at_least(1), help="per case; default: as perf.serving")
    made.add_argument(
        "--gpu", default="nvidia-h100-80gb-hbm3", help="whose tuned table has the products' times"
    )
    given = made.parse_args(arguments)
    cases = given.cases
    if given.num_requests is not None:
        cases = [replace(case, num_requests=given.num_requests) for case in cases]
    columns = ("case", "planned", "tok/s", "TTFT ms, p50/p95/p99", "ITL ms, p50/p95/p99")
    show("simulated", columns, list(rows_of(cases, given.margin_ms, given.repeats, StepModel(given.gpu))))


if __name__ == "__main__":
    main()
