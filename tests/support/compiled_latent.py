"""Compiles the kernels of latent attention for GPUs that are not here, and prints what they take.

Arguments: names of models of published shapes, whose KV caches are of bfloat16 and of e4m3. Prints, as JSON,
the kernels that break a rule, and those that keep values of registers in local memory.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import triton

from drift_sdk.speculation import NGram
from perf.cross_compile import kernels_of, violations
from perf.harness.published import PUBLISHED

__all__ = ["main"]

MODULES = ("attention.latent", "layers.latent_rows")
TOOL = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


def main(arguments: Sequence[str]) -> int:
    found: dict[str, list[str]] = {"errors": [], "spills": [], "kernels": []}
    for model, has_kv_scales in product(arguments, (False, True)):
        settings = PUBLISHED[model] | {"num_hidden_layers": 2}
        recorded = kernels_of(settings, 90, drafts=NGram(), has_kv_scales=has_kv_scales)
        kernels = [kernel for kernel in recorded if kernel.module.endswith(MODULES)]
        found["kernels"] += sorted({kernel.name for kernel in kernels})
        found["errors"] += [f"{model}: {each.kernel.name}: {each.error}" for each in violations(kernels)]
        for kernel in kernels:
            if _stack_bytes(kernel.compile().asm["cubin"]):
                found["spills"].append(f"{model}: {kernel.name} {kernel.constants}")
    sys.stdout.write(json.dumps(found))
    return 0


def _stack_bytes(binary: bytes) -> int:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        command = [str(TOOL), "-res-usage", file.name]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return int(printed.rpartition("STACK:")[2].split()[0])
