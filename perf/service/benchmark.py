"""Runs a service's load on several engines, case by case, and writes each result as soon as it is known."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from perf.harness.machine import default_device
from perf.harness.record import Results, result_path, write
from perf.harness.recording import dtype_name
from perf.service.children import Child, ask_all
from perf.service.engines import MeasuredEngine, parse_settings
from perf.service.load import Case, Lengths
from perf.service.runs import ServingRun, line_of

__all__ = ["WARM_UPS", "Benchmark", "Plan", "visible_devices"]

START_LIMIT_S = 300.0
ANSWER_LIMIT_S = 60.0  # in addition to the time that a case may take
WARM_UP = Case("warm-up", 64, clients=64, outputs=Lengths(16, 0.3, 8, 24))
WARM_UPS = (WARM_UP, dataclasses.replace(WARM_UP, name="sampled warm-up", is_sampled=True))
"""Cases that are not counted: kernels compiled at their first use are compiled here."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The runs of a benchmark: cases, devices and repeats.

    devices:         one GPU per engine, or one that they use in turn.
    logs:            folder for the output of the engines.
    out:             result file; None for the default file of the GPU.
    swap:            engines swap GPUs after each repeat and are restarted.
    configs:         settings to add to the engines' own, as text, one after the other.
    seconds:         limit for a case.
    start_limit_s:   limit for a start, warm-ups included.
    answer_limit_s:  limit for an answer, in addition to `seconds` for a case.
    """

    cases: Sequence[Case]
    devices: Sequence[int]
    logs: Path
    out: Path | None = None
    repeats: int = 1
    swap: bool = False
    configs: Sequence[str] = ("",)
    seconds: float = 40.0
    seed: str = "0"
    warm_ups: Sequence[Case] = WARM_UPS
    start_limit_s: float = START_LIMIT_S
    answer_limit_s: float = ANSWER_LIMIT_S


class Benchmark:
    """A plan and the engines that it is run on.

    results:     all results so far; None before the first.
    path:        the file that they are written to; None before the first.
    num_failed:  number of engines that failed.
    """

    def __init__(self, plan: Plan, engines: Sequence[MeasuredEngine]) -> None:
        self._plan, self._engines = plan, engines
        self._num_started = 0
        self.results: Results | None = None
        self.path: Path | None = None
        self.num_failed = 0

    def measure(self) -> None:
        """Run the whole plan."""
        plan = self._plan
        rounds = [[repeat] for repeat in range(plan.repeats)] if plan.swap else [range(plan.repeats)]
        for index, repeats in enumerate(rounds):
            turn = index % len(self._engines) if plan.swap else 0
            engines = [*self._engines[turn:], *self._engines[:turn]]
            if len(plan.devices) > 1 and len(engines) > 1:
                self._measure_together(engines, repeats)
            else:
                for engine in engines:
                    self._measure_together([engine], repeats)

    def _measure_together(self, engines: Sequence[MeasuredEngine], repeats: Sequence[int]) -> None:
        """Run all cases, each on all engines at the same time, each engine on its own GPU and CPU cores."""
        plan = self._plan
        with ExitStack() as stack:
            started = {
                stack.enter_context(self._start_process(engine, slot, len(engines))): engine
                for slot, engine in enumerate(engines)
            }
            children = list(started)
            for number, config in enumerate(plan.configs):
                if number:
                    ask_all(children, lambda child: {"do": "stop"}, plan.answer_limit_s)
                facts = self._start_engines(started, children, config)
                for repeat in repeats:
                    for case in plan.cases:
                        for child, figures in self._run(case, repeat, children).items():
                            engine = started[child]
                            fields = run_fields(engine, config, repeat, plan.devices[child.slot])
                            self._add(ServingRun.of(case, facts[child], figures, **fields), facts[child])
            self.num_failed += len(started) - len(children)

    def _start_process(self, engine: MeasuredEngine, slot: int, num_slots: int) -> Child:
        cores = sorted(os.sched_getaffinity(0))
        share = len(cores) // num_slots
        job = dataclasses.replace(
            engine.job,
            cores=cores[slot * share : (slot + 1) * share],
            measures_machine=engine.job.measures_machine and self.results is None,
            warm_ups=[dataclasses.asdict(case) for case in self._plan.warm_ups],
        )
        devices = visible_devices(self._plan.devices[slot : slot + engine.job.num_replicas])
        environment = engine.environment | {"CUDA_VISIBLE_DEVICES": devices}
        log = self._plan.logs / f"serving-{self._num_started}-{engine.name}.log"
        self._num_started += 1
        return Child(engine.name, job.command, environment, log, slot)

    def _start_engines(
        self, engines: Mapping[Child, MeasuredEngine], children: list[Child], config: str
    ) -> dict[Child, dict[str, Any]]:
        """Start the engine of each child with the added settings; returns what each child reports of it."""
        added = parse_settings(config)
        commands = {
            child: {"do": "start", "settings": engine.settings | added} for child, engine in engines.items()
        }
        answers = ask_all(children, commands.__getitem__, self._plan.start_limit_s)
        facts = {child: answer["facts"] for child, answer in answers.items()}
        for child in children:
            print(f"{child.name} started in {facts[child]['start_s']:.1f} s", flush=True)
        return facts

    def _run(self, case: Case, repeat: int, children: list[Child]) -> dict[Child, dict[str, Any]]:
        plan = self._plan
        command = {
            "do": "run",
            "case": dataclasses.asdict(case),
            "seed": f"{plan.seed}/{repeat}",
            "limit_s": plan.seconds,
        }
        answers = ask_all(children, lambda child: command, plan.seconds + plan.answer_limit_s)
        return {child: answer["figures"] for child, answer in answers.items()}

    def _add(self, run: ServingRun, facts: Mapping[str, Any]) -> None:
        """Add a run to the results, write them and print a line about it."""
        if self.results is None or self.path is None:
            made = Results.of("cpu", facts.get("read_bandwidth_tb_s", 0.0))
            self.results = replace(made, gpu=facts.get("gpu", made.gpu))
            self.path = self._plan.out or result_path("serving", self.results.gpu)
        self.results.add(run)
        write(self.results, self.path)
        print(line_of(run), flush=True)


def run_fields(engine: MeasuredEngine, config: str, repeat: int, gpu_index: int) -> dict[str, Any]:
    """The fields of a run that do not come from the engine's process."""
    fields: dict[str, Any] = {
        "engine": engine.name,
        "model": engine.model_name,
        "dtype": dtype_name(engine.settings.get("dtype", "auto"), default_device()),
        "repeat": repeat,
        "gpu_index": gpu_index,
        "config": " ".join(filter(None, (engine.given, config))) or None,
    }
    if engine.job.draft is not None:
        fields |= {
            "num_draft_tokens": engine.job.num_draft_tokens,
            "acceptance": "simulated",
            "acceptance_length": engine.job.acceptance_length,
        }
    return fields


def visible_devices(devices: Sequence[int]) -> str:
    """CUDA_VISIBLE_DEVICES of a child process that is to have some of the GPUs that this process sees.

    Raises ValueError for a GPU beyond those of this process's own CUDA_VISIBLE_DEVICES.
    """
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not seen:
        return ",".join(map(str, devices))

    names = seen.split(",")
    if max(devices) >= len(names):
        raise ValueError(f"devices={devices}: expected below {len(names)}: CUDA_VISIBLE_DEVICES is {seen}")

    return ",".join(names[device] for device in devices)
