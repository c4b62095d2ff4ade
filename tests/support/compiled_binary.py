"""A kernel of which Triton's cache has the binary alone, and what is read of it then.

A module for a process whose kernels are not interpreted.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence

import triton

from drift_sdk._kernels.launch.launch_order import ttir_of
from perf.cross_compile import kernels_of
from perf.harness.published import LLAMA, PUBLISHED

__all__ = ["main"]


def main(arguments: Sequence[str]) -> int:
    """Print as JSON what Triton returns of it, at first and later, and whether the environment is kept."""
    settings = LLAMA | PUBLISHED["smollm2-shapes"] | {"num_hidden_layers": 1}
    kernel = kernels_of(settings, 90, num_steps=1)[0]
    environment = dict(os.environ)
    triton.knobs.compilation.__dict__["store_binary_only"] = True

    def compiled() -> triton.compiler.CompiledKernel:
        return triton.compile(kernel.source(), target=kernel.target, options=dict(kernel.options))

    binary = compiled()
    ttir = ttir_of(binary)
    again = compiled()
    found = {
        "binary": sorted(binary.asm),
        "is_same": (again.hash, again.asm["ttir"], ttir_of(again)) == (binary.hash, ttir, ttir),
        "is_kept": triton.knobs.compilation.store_binary_only and dict(os.environ) == environment,
    }
    sys.stdout.write(json.dumps(found))
    return 0
