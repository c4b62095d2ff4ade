"""The kernels of a decode step: launches, time, bytes, fraction of the roofline, and idle time. Needs a GPU.

python -m perf.step_profile --scenario single-512 batch64-512
python -m perf.step_profile --scenario batch62-768 --prompt-tokens 190
python -m perf.step_profile --scenario batch63-768 --prompt-tokens 765 --num-draft-tokens 3

Replays of a step are traced by torch.profiler. Kernels overlap (programmatic dependent launch), and a kernel
that waits for its predecessor counts as running, so the times of kernels add up to more than the step. With
--prompt-tokens, a step also computes a chunk of so many tokens of a prompt. With --num-draft-tokens, it is a
round of speculation: an EAGLE-3 head of random weights drafts so many tokens for each sequence, and
acceptance is simulated.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from msgspec import UNSET, Struct, UnsetType

from drift_sdk.config import prefill_token_budget
from drift_sdk.events import ignore_progress
from perf.cases.gemm import weight_roles
from perf.harness.decoding import DecodeOptions, engine_config
from perf.harness.drafting import Drafting
from perf.harness.manual_driver import ManualDriver
from perf.harness.numbers import at_least, over_zero
from perf.harness.record import Run
from perf.harness.recording import Recording, parser
from perf.harness.scenario import SCENARIOS, Scenario
from perf.harness.shapes import Model, prepare, prepare_draft
from perf.harness.simulation import acceptance_of
from perf.harness.stage_work import LOGIT_BYTES
from perf.harness.table import drafts_of, show, title_of

__all__ = ["Kernel", "KernelRun", "busy_us", "kernels_of_trace", "main", "profile_runs", "roles_of"]

NUM_WARM_UP_ROUNDS = 3
MULTIPLY, FEW_ROWS, GATED = "_multiply", "few_rows_product", "_gated_multiply"
ATTEND, SAMPLE = "_attend", "rule_logits"
EXPERT_ROLES = {"_gated_expert_multiply": "gate_up of experts", "_expert_multiply": "down of experts"}
ROUTE, EXPERT_PRODUCT = "route", "product"
"""Kernels of CUDA C++: of a router, and of the experts' products, two a layer."""
EXPERT_SHARES = {"gate_up of experts": 2 / 3, "down of experts": 1 / 3}
"""Parts of an expert's weights."""
STEP = "step"


class Kernel(Struct, frozen=True, order=True):
    """A kernel or copy of a trace; start and end in microseconds of the device's clock."""

    start: float
    end: float
    name: str


class KernelRun(Run, kw_only=True):
    """A kernel with its role in the step (`shape`), or the whole step. Numbers are means over steps.

    us: of a launch; of the step, from the start of its first kernel to the end of its last. us_per_step: of
    all `launches`, overlapping ones counted in full. num_bytes: of a launch; given, with tb_s and
    roofline_fraction, where it is known what must be read. idle_share: share of the step in which no kernel
    runs. draft: name of the head that drafts, if one does.
    """

    kernel: str
    shape: str
    launches: float
    us: float
    us_per_step: float
    num_bytes: float | UnsetType = UNSET
    tb_s: float | UnsetType = UNSET
    idle_share: float | UnsetType = UNSET
    num_steps: int
    draft: str | UnsetType = UNSET


def kernels_of_trace(trace: dict[str, Any]) -> list[Kernel]:
    """Kernels and copies of a profiler's trace, in the order of their starts."""
    kinds = ("kernel", "gpu_memcpy", "gpu_memset")
    return sorted(
        Kernel(event["ts"], event["ts"] + event["dur"], event["name"])
        for event in trace["traceEvents"]
        if event.get("cat") in kinds
    )


def steps_of(kernels: Sequence[Kernel], num_steps: int) -> list[Sequence[Kernel]]:
    """The kernels of each step. Raises RuntimeError unless all steps have the same kernels."""
    size, rest = divmod(len(kernels), num_steps)
    steps = [kernels[first : first + size] for first in range(0, size * num_steps, max(size, 1))]
    names = {tuple(sorted(kernel.name for kernel in step)) for step in steps}
    if rest or not size or len(names) != 1:
        raise RuntimeError(f"{len(kernels)} kernels: expected {num_steps} steps of the same ones")

    return steps


def roles_of(step: Sequence[Kernel], model: Model) -> list[str]:
    """The weight that each kernel of a step without chunks and drafts multiplies by, derived from its place
    among the kernels of its kind; "" for kernels that multiply by none."""
    weights = weight_roles(model)
    named = {role: f"{role} {weight}" for role, weight in weights.items()}
    head = named.pop("lm_head")
    if any(kernel.name == ROUTE for kernel in step):
        named.pop("router", None)
    by_layer = [name for role, name in named.items() if not weights[role].is_gated]
    dense = iter((*by_layer * model.spec.num_layers, head))
    products = {
        MULTIPLY: dense,
        FEW_ROWS: dense,
        GATED: iter([named.get("gate_up", "")] * model.spec.num_layers),
        EXPERT_PRODUCT: iter(list(EXPERT_SHARES) * model.num_expert_layers),
    }
    return [
        next(products[kernel.name], "") if kernel.name in products else EXPERT_ROLES.get(kernel.name, "")
        for kernel in step
    ]


def role_bytes(role: str, name: str, model: Model, batch: int, context: float, itemsize: int) -> float | None:
    """Bytes that a launch must read, for the kernels that read most; None for others.

    role: as `roles_of` returns it. name: of the kernel. Of experts, as many are counted as rows have whose
    experts are all equally likely.
    """
    for weight in weight_roles(model).values():
        if role and role.split(" ", 1)[1] == str(weight):
            return float(weight.num_columns * weight.inner * itemsize + batch * weight.inner * itemsize)

    if role in EXPERT_SHARES:
        return EXPERT_SHARES[role] * model.spread_experts(batch) * model.expert_bytes(itemsize)

    if name == ATTEND:
        return batch * model.kv_bytes(context, itemsize) / model.spec.num_layers

    return float(LOGIT_BYTES * batch * model.spec.vocab_size) if name == SAMPLE else None


def busy_us(kernels: Iterable[Kernel]) -> float:
    """Microseconds in which at least one of the kernels runs."""
    busy, reached = 0.0, float("-inf")
    for kernel in sorted(kernels):
        busy += max(0.0, kernel.end - max(kernel.start, reached))
        reached = max(reached, kernel.end)

    return busy


def profile_runs(
    kernels: Sequence[Kernel],
    num_steps: int,
    model: Model,
    scenario: Scenario,
    options: DecodeOptions,
    bandwidth_tb_s: float,
    num_prompt_tokens: int = 0,
    drafting: Drafting | None = None,
) -> Iterator[KernelRun]:
    """A run for each kernel and role in the order of the step, then one for the step. With chunks, rows of
    prompts and of the round share kernels, and with drafts the head and the model do, so there are no roles,
    and no bytes but those of the step."""
    tokens_per_round = 1.0 if drafting is None else drafting.simulated_length or 1.0
    context = scenario.context + 1 + (NUM_WARM_UP_ROUNDS + num_steps / 2) * tokens_per_round
    has_roles = not num_prompt_tokens and drafting is None
    fields: dict[str, Any] = {
        "engine": "drift",
        "model": model.name,
        "dtype": model.dtype_name or options.dtype_name,
        "scenario": scenario.name + (f"+{num_prompt_tokens}" if num_prompt_tokens else ""),
        "batch": scenario.batch,
        "context": scenario.context,
        "num_steps": num_steps,
    }
    if drafting is not None:
        fields |= drafting.fields
    steps = steps_of(kernels, num_steps)
    totals: dict[tuple[str, str], float] = {}
    launches: Counter[tuple[str, str]] = Counter()
    for step in steps:
        roles = roles_of(step, model) if has_roles else [""] * len(step)
        for kernel, role in zip(step, roles, strict=True):
            key = kernel.name, role
            totals[key] = totals.get(key, 0.0) + kernel.end - kernel.start
            launches[key] += 1

    for (name, role), total in totals.items():
        us = total / launches[name, role]
        run = KernelRun(
            **fields,
            kernel=name,
            shape=role,
            launches=launches[name, role] / num_steps,
            us=us,
            us_per_step=total / num_steps,
        )
        num_bytes = role_bytes(role, name, model, scenario.batch, context, options.itemsize)
        if num_bytes is not None and has_roles:
            run.num_bytes, run.tb_s = num_bytes, num_bytes / us / 1e6
            run.roofline_fraction = run.tb_s / bandwidth_tb_s
        yield run

    step_times = [max(kernel.end for kernel in step) - step[0].start for step in steps]
    step_us = sum(step_times) / num_steps
    num_bytes = model.decode_bytes(scenario.batch, context, options.itemsize)
    if drafting is not None:
        num_bytes += drafting.round_bytes(drafting.num_draft_tokens, scenario, options)
    yield KernelRun(
        **fields,
        kernel=STEP,
        shape="",
        launches=len(steps[0]),
        us=step_us,
        us_per_step=step_us,
        ms_per_round=step_us / 1e3,
        num_bytes=num_bytes,
        tb_s=num_bytes / step_us / 1e6,
        roofline_fraction=num_bytes / step_us / 1e6 / bandwidth_tb_s,
        idle_share=1 - sum(map(busy_us, steps)) / sum(step_times),
    )


def traced(work: Callable[[], None]) -> dict[str, Any]:
    """The profiler's trace of the GPU while `work` runs."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        work()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        trace: dict[str, Any] = json.loads(path.read_text())
    return trace


def main(arguments: Sequence[str] | None = None) -> None:
    made = parser(__doc__)
    made.add_argument("--scenario", nargs="+", type=Scenario.parse, default=SCENARIOS, metavar="NAME")
    made.add_argument("--steps", type=at_least(1), default=8)
    made.add_argument(
        "--prompt-tokens", type=at_least(0), default=0, metavar="N", help="of a chunk in each step"
    )
    made.add_argument("--num-draft-tokens", type=at_least(0), default=0, metavar="K", help="of each sequence")
    made.add_argument("--acceptance-length", type=over_zero, default=3.2, help="to simulate")
    given = made.parse_args(arguments)
    if not given.device.startswith("cuda"):
        made.error(f"device={given.device!r}: kernels are traced on a GPU")

    from drift_sdk.startup.model_startup import open_model

    recording = Recording("profile", given.device, given.out)
    num_rounds = NUM_WARM_UP_ROUNDS + given.steps
    chunks = [given.prompt_tokens] * num_rounds if given.prompt_tokens else []
    lengths = (0, num_rounds * (given.num_draft_tokens + 1) + 8 + sum(chunks))
    options = DecodeOptions(device=given.device, dtype=given.dtype, executor="graph", lengths=lengths)
    with tempfile.TemporaryDirectory() as folder:
        model = prepare(given.model, Path(folder) / given.model)
        scenarios = [Scenario(one.name, one.batch + bool(chunks), one.context) for one in given.scenario]
        config, drafting, acceptance = engine_config(model, scenarios, options), None, None
        if given.num_draft_tokens:
            drafting = Drafting(
                draft=prepare_draft(model),
                num_draft_tokens=given.num_draft_tokens,
                acceptance_length=given.acceptance_length,
            )
            config = drafting.config(config)
            acceptance = acceptance_of(drafting.simulated_length or 1.0)
        print(f"opening {model.name}", flush=True)
        opened = open_model(model.path, config, ignore_progress, acceptance=acceptance)
        slots = ManualDriver(opened.executor, prefill_token_budget=prefill_token_budget(config, "cuda"))

        def rounds(number: int) -> None:
            for _ in range(number):
                slots.round(given.num_draft_tokens)

        try:
            for scenario in given.scenario:
                max_lengths = [scenario.context + lengths[1] - sum(chunks)] * scenario.batch
                slots.fill(scenario.context, max_lengths, waiting=chunks)
                rounds(NUM_WARM_UP_ROUNDS)
                kernels = kernels_of_trace(traced(lambda: rounds(given.steps)))
                bandwidth = recording.bandwidth_tb_s
                for run in profile_runs(
                    kernels, given.steps, model, scenario, options, bandwidth, given.prompt_tokens, drafting
                ):
                    recording.add(run)
        finally:
            opened.executor.close()

    show(title_of(recording.results), COLUMNS, table_rows(recording.results.runs))
    print(f"written to {recording.path}")


COLUMNS = (
    "scenario",
    "drafts",
    "kernel",
    "place",
    "launches",
    "us",
    "us a step",
    "MB",
    "TB/s",
    "of limit",
    "idle",
)


def table_rows(runs: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """A table row for each run, with COLUMNS."""
    return [
        (
            run["scenario"],
            drafts_of(run),
            run["kernel"],
            run["shape"],
            f"{run['launches']:g}",
            f"{run['us']:.2f}",
            f"{run['us_per_step']:.1f}",
            f"{run['num_bytes'] / 1e6:.1f}" if "num_bytes" in run else "",
            f"{run['tb_s']:.2f}" if "tb_s" in run else "",
            f"{run['roofline_fraction']:.0%}" if run["roofline_fraction"] is not None else "",
            f"{run['idle_share']:.1%}" if "idle_share" in run else "",
        )
        for run in runs
    ]


if __name__ == "__main__":
    main()
