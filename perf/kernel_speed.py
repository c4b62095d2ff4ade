"""Times single kernels in a captured graph: time, bytes a second, share of what the GPU can do at most.

    python -m perf.kernel_speed --model llama-3.1-8b --suite gemm --rows 1 4 16 64 256
    python -m perf.kernel_speed --suite attention norm rope sampling

A suite is a function of (model, row counts, tuned table, device) that yields cases, see perf/cases.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from drift_sdk._kernels.gemm.tuner import time_us
from drift_sdk._kernels.gemm.tuning import TunedTable, gpu_key, table_for
from perf.cases.attention import attention_cases
from perf.cases.case import Case
from perf.cases.experts import expert_cases
from perf.cases.gemm import gemm_cases
from perf.cases.latent import latent_cases
from perf.cases.ngrams import ngram_cases
from perf.cases.quantised import quantised_cases
from perf.cases.quantised_experts import quantised_expert_cases
from perf.cases.recurrent import recurrent_cases
from perf.cases.rows import norm_cases, rope_cases, sampling_cases
from perf.cases.trees import tree_cases
from perf.harness.bandwidth import matmul_tflop_s
from perf.harness.numbers import at_least
from perf.harness.record import Run
from perf.harness.recording import Recording, free_memory, parser
from perf.harness.shapes import Model, prepare
from perf.harness.table import show

__all__ = ["SUITES", "KernelRun", "cases_of", "limit_us", "main", "measure"]

LIBRARY = "cublas"
"""The kernel and engine of products by the vendor's library."""
ROW_COUNTS = (1, 4, 16, 64, 256)
"""Numbers of rows that are timed unless others are given."""

SUITES: dict[str, Callable[[Model, tuple[int, ...], TunedTable, str], Iterator[Case]]] = {
    "gemm": gemm_cases,
    "quantised": quantised_cases,
    "attention": attention_cases,
    "latent": latent_cases,
    "norm": norm_cases,
    "rope": rope_cases,
    "sampling": sampling_cases,
    "ngram": ngram_cases,
    "trees": tree_cases,
    "experts": expert_cases,
    "quantised_experts": quantised_expert_cases,
    "recurrent": recurrent_cases,
}


class KernelRun(Run, kw_only=True):
    """The measurement of a case, as recorded.

    engine: "drift", or the library compared with. us: microseconds a call.
    limit_us: the longer of reading `num_bytes` and computing `num_flops` at the speeds measured in this run;
    `roofline_fraction` is limit_us / us. tb_s: `num_bytes` over `us`.
    matmul_tflop_s: the speed of large products measured in this run.
    """

    kernel: str
    shape: str
    num_rows: int
    us: float
    limit_us: float
    num_bytes: float
    num_flops: float
    tb_s: float
    matmul_tflop_s: float


def measure(
    case: Case, model: str, bandwidth_tb_s: float, peak_tflop_s: float, dtype: str = "bfloat16"
) -> KernelRun:
    """Time a case. Raises RuntimeError for a kernel that leaves some of its output unwritten."""
    prepared = case.prepare()
    for output in prepared.outputs:
        output.fill_(torch.nan)
    prepared.step()
    if not all(output.isfinite().all() for output in prepared.outputs):
        raise RuntimeError(f"{case.kernel} {case.shape}, {case.num_rows} rows: output not finite")

    us = time_us(prepared.step, prepared.num_calls)
    limit = limit_us(case, bandwidth_tb_s, peak_tflop_s)
    return KernelRun(
        engine=LIBRARY if case.kernel == LIBRARY else "drift",
        model=model,
        dtype=dtype,
        scenario="kernel",
        batch=case.num_rows,
        context=0,
        kernel=case.kernel,
        shape=case.shape,
        num_rows=case.num_rows,
        us=us,
        limit_us=limit,
        num_bytes=case.num_bytes,
        num_flops=case.num_flops,
        tb_s=case.num_bytes / us / 1e6,
        matmul_tflop_s=peak_tflop_s,
        roofline_fraction=limit / us,
    )


def cases_of(
    suite: str, model: Model, rows: Sequence[int], table: TunedTable, device: str, *, has_library: bool
) -> Iterator[Case]:
    """The cases of a suite, with the vendor's library or without it."""
    for case in SUITES[suite](model, tuple(rows), table, device):
        if has_library or case.kernel != LIBRARY:
            yield case


def limit_us(case: Case, bandwidth_tb_s: float, peak_tflop_s: float) -> float:
    """Return the least microseconds of a call, at a bandwidth in TB/s and a speed of products in TFLOP/s."""
    return max(case.num_bytes / bandwidth_tb_s, case.num_flops / peak_tflop_s) / 1e6


def main(arguments: Sequence[str] | None = None) -> None:
    given_parser = parser(__doc__)
    given_parser.add_argument("--suite", nargs="+", choices=SUITES, default=tuple(SUITES))
    given_parser.add_argument("--no-library", action="store_true", help="leave the vendor's products out")
    given_parser.add_argument("--rows", type=at_least(1), nargs="+", default=ROW_COUNTS, help="row counts")
    given = given_parser.parse_args(arguments)
    if not given.device.startswith("cuda"):
        given_parser.error(f"device={given.device!r}: kernels are timed in CUDA graphs, expected a GPU")

    recording = Recording("kernels", given.device, given.out)
    peak_tflop_s = matmul_tflop_s(given.device)
    table = table_for(gpu_key(recording.results.gpu))
    with tempfile.TemporaryDirectory() as folder:
        model = prepare(given.model, Path(folder))

    for suite in given.suite:
        has_library = not given.no_library
        for case in cases_of(suite, model, given.rows, table, given.device, has_library=has_library):
            free_memory()
            dtype = model.dtype_name or "bfloat16"
            recording.add(measure(case, model.name, recording.bandwidth_tb_s, peak_tflop_s, dtype))

    rows = [
        (
            run["kernel"],
            run["shape"],
            str(run["num_rows"]),
            f"{run['us']:.1f}",
            f"{run['limit_us']:.1f}",
            f"{run['tb_s']:.2f}",
            f"{run['roofline_fraction']:.0%}",
        )
        for run in recording.results.runs
    ]
    columns = ("kernel", "shape", "rows", "us", "limit us", "TB/s", "of limit")
    show(f"{recording.results.gpu}, {recording.bandwidth_tb_s:.2f} TB/s", columns, rows)
    print(f"written to {recording.path}")


if __name__ == "__main__":
    main()
