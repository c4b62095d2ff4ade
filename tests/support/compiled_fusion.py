"""Compiles the kernels of exact attention with and without the fusion of multiplications and additions.

Prints, as JSON, the fused operations of each kernel, in both ways. Layers have sinks, and heads of 256 and
512 dimensions.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from perf.cross_compile import kernels_of
from perf.harness.published import PUBLISHED

__all__ = ["main"]

NAMES = ("_add_partitions", "_attend", "_exact_prefill_attention", "_wide_prefill_attention")
SINKS = "sinks_ptr"


def main(arguments: Sequence[str]) -> int:
    kernels = {kernel.name: kernel for kernel in kernels_of(PUBLISHED["gemma-4-31b"], 90)}
    found = {}
    for name in NAMES:
        source = kernels[name].source()
        constants, signature, names = dict(source.constants), dict(source.signature), source.fn.arg_names
        if SINKS in names:
            constants.pop((names.index(SINKS),), None)
            signature[SINKS] = "*bf16"
        compiled = ASTSource(source.fn, signature, constants, source.attrs)
        found[name] = [
            triton.compile(
                compiled, GPUTarget("cuda", 90, 32), {"num_warps": 4, "enable_fp_fusion": is_fused}
            )
            .asm["ptx"]
            .count("fma.rn.f32")
            for is_fused in (True, False)
        ]
    sys.stdout.write(json.dumps(found))
    return 0
