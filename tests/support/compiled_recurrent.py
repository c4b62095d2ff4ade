"""The Triton kernels around the gated delta rule as they are compiled for GPUs that are not here.

A module for a process whose kernels are not interpreted.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from drift_sdk._kernels.launch.launch_order import access_of
from drift_sdk._kernels.launch.parallel_compile import KernelToCompile, recorded_kernels
from drift_sdk._kernels.recurrent.gated_delta import (
    MixedRows,
    PromptRuns,
    keep_rows,
    move_borders_of_prompts,
    move_borders_of_rows,
)
from drift_sdk._kernels.recurrent.rows import fill_gates, keep_inputs, mix_rows, norm_gated
from drift_sdk.spec.model import BORDER, GatedDelta, Norm, num_input_rows, num_ring_rows
from perf.cross_compile import GPUS, target, violations

__all__ = ["main"]

NUM_ROWS, NUM_RUNS = 70, 3


def main(arguments: Sequence[str]) -> int:
    """Print as JSON, for compute capabilities, what is wrong with the kernels, and what each reads and writes
    before it waits, with whether it permits its dependents to start before that."""
    errors: list[str] = []
    early: dict[str, tuple[set[str], bool]] = {}
    for capability in map(int, arguments):
        kernels = recorded(capability)
        errors += [f"{capability}: {found.kernel.name}: {found.error}" for found in violations(kernels)]
        for kernel in kernels if GPUS[capability].has_pdl and not errors else ():
            found = access_of(kernel.compile().asm["ttir"])
            names, triggers = early.get(kernel.name, (set[str](), False))
            names = names | found.reads_early | found.writes_early
            early[kernel.name] = names, triggers or found.triggers_early
    results = {name: [sorted(names), triggers] for name, (names, triggers) in early.items()}
    sys.stdout.write(json.dumps({"errors": errors, "early": results}))
    return 0


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def numbers(*shape: int) -> Tensor:
    return empty(*shape, dtype=torch.int32)


def recorded(capability: int) -> list[KernelToCompile]:
    """The kernels of a layer, for products that are sums and partial sums."""
    spec = GatedDelta(
        num_key_heads=2, num_value_heads=6, key_dim=96, value_dim=48, conv_width=4, norm=Norm(eps=1e-6)
    )
    rows = MixedRows(
        empty(NUM_ROWS, spec.num_channels),
        empty(NUM_ROWS, 2 * spec.num_key_heads, dtype=torch.float32),
        empty(NUM_ROWS, 2 * spec.num_value_heads, dtype=torch.float32),
        empty(NUM_ROWS, spec.output_size),
    )
    runs = PromptRuns(numbers(NUM_RUNS, 4), numbers(NUM_ROWS // BORDER + NUM_RUNS + 1))
    heads = empty(spec.num_value_heads, dtype=torch.float32), empty(spec.num_value_heads)
    weight, norm = empty(spec.num_channels, 1, spec.conv_width), empty(spec.value_dim)
    ring = empty(5, num_input_rows(spec, 4), spec.num_channels)
    checkpoints = empty(2, spec.conv_width - 1, spec.num_channels)
    places = numbers(NUM_ROWS), numbers(NUM_ROWS)
    with target(capability), recorded_kernels() as kernels:
        for num_slices in (0, 3):
            slices = [num_slices] if num_slices else []
            dtype = torch.float32 if num_slices else torch.bfloat16
            fill_gates(empty(*slices, NUM_ROWS, 2 * spec.num_value_heads, dtype=dtype), *heads, rows.gates)
            product = empty(*slices, NUM_ROWS, spec.num_channels + spec.output_size, dtype=dtype)
            for is_kept in (True, False):
                mix_rows(spec, product, weight, *places, ring, rows, is_kept=is_kept)
            keep_inputs(spec, product, runs, ring, checkpoints)
            gate = product[..., spec.num_channels :]
            for kind in ("rounded", "wide", "offset"):
                norm_gated(rows.out, gate, norm, eps=1e-6, norm_kind=kind)
        keys = empty(5, spec.num_key_heads, num_ring_rows(1), spec.key_dim)
        decays = empty(5, spec.num_value_heads, num_ring_rows(1), dtype=torch.float32)
        rings = keys, decays[:, : spec.num_key_heads].contiguous(), decays
        keep_rows(spec, runs.runs, (rows.mixed, rows.scales, rows.gates), rings)
        move_borders_of_rows(numbers(5), *places, 2)
        move_borders_of_prompts(numbers(5), runs.runs)
    return [each for each in kernels if isinstance(each, KernelToCompile)]
