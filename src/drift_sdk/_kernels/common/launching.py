"""Launches of kernels: compiled or interpreted, one after the other or overlapping.

On a GPU kernels are compiled; without one, Triton's interpreter runs them on the CPU.

Programmatic dependent launch (PDL) lets the CTAs of a kernel be placed on multiprocessors while the kernel
before it still runs. Two device functions control it:

- `wait_for_producers` blocks until every earlier kernel has finished and its writes are visible. Every CTA
  calls it before it ends, also one without any work: otherwise later kernels could start while an earlier one
  still runs. In CUDA C++, every thread does.
- `start_dependents` permits the CTAs of the next kernel to be placed: once a thread of every CTA has called
  it, or the CTA has ended. A product or another long kernel calls it when it is nearly done, since waiting
  CTAs would occupy the multiprocessors that it needs. A short kernel that always follows a long one calls it
  first, even before it waits. Kernels whose CTAs are all placed at once may call it as soon as they have
  waited, and so may one beside which the next kernel shall run; the permission takes effect when the last CTA
  has been placed.

Before it waits, a kernel may read what no kernel that may still run writes, and write what none of them uses.
Those are the kernel before it and, if that one permitted its dependents before it had waited, those before
that. Early loads bypass the L1 cache (`cache_modifier=".cg"`), which may hold earlier contents; data that
never changes, like a weight, may be read through L1.

These rules are checked when a step is captured, see launch_order.py.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from drift_sdk._kernels.common.device_function import device_function
from drift_sdk._kernels.common.gpu_limits import gpu_limits

__all__ = [
    "cache_folder",
    "is_interpreted",
    "launch_options",
    "prefetch",
    "start_dependents",
    "uses_pdl",
    "wait_for_producers",
]


@cache
def is_interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on the CPU. Decided when kernels are decorated."""
    return bool(triton.knobs.runtime.interpret)


def cache_folder() -> Path:
    """The folder that keeps compiled kernels from one process to the next."""
    return Path(triton.knobs.cache.dir)


def uses_pdl() -> bool:
    """Whether kernels are compiled for PDL and launched with it: on GPUs that have it, from compute
    capability 9.0 on. On others each kernel starts when the one before it has ended."""
    return not is_interpreted() and gpu_limits().has_pdl


def launch_options() -> dict[str, bool]:
    """Keyword arguments of every launch."""
    return {"launch_pdl": True} if uses_pdl() else {}


@device_function
def wait_for_producers(PDL: tl.constexpr):
    """Block until every earlier kernel has finished and its writes are visible."""
    if PDL:
        gdc_wait()


@device_function
def start_dependents(PDL: tl.constexpr):
    """Permit the next kernel's CTAs to be placed as soon as there is room."""
    if PDL:
        gdc_launch_dependents()


@device_function
def prefetch(pointers, PDL: tl.constexpr):
    """Load the 128-byte lines that a tile of pointers points into to the L2 cache, without waiting for them.

    Called before `wait_for_producers`, for data that never changes. The result of the assembly is a dummy.
    """
    if PDL:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
            "=r,l",
            [pointers.to(tl.int64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
