"""How kernels are launched: compiled on a GPU, interpreted without one; one after the other, or overlapping.

Programmatic dependent launch lets a kernel's CTAs be placed while the kernel before it still runs. Each
kernel waits before it touches what others write, and a product or another long kernel says that its successor
may be placed only when it is nearly done, or the successor would sit on the multiprocessors. A short kernel
that always follows a long one says so at once, even before it waits.

So what is older than the two kernels before is there when a CTA is placed, and may be read without waiting;
past the L1 cache (".cg"), which may hold what was there before, unless it never changes. Every CTA waits
before it ends, or its successors could pass a kernel that is still at work. Both are checked when a step is
captured, see launch_order.py.
"""

from __future__ import annotations

from pathlib import Path

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

__all__ = [
    "cache_folder",
    "is_interpreted",
    "launch_options",
    "prefetch",
    "start_dependents",
    "uses_pdl",
    "wait_for_producers",
]


def is_interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on the CPU."""
    return bool(triton.knobs.runtime.interpret)


def cache_folder() -> Path:
    """Where compiled kernels are kept, from one process to the next."""
    return Path(triton.knobs.cache.dir)


def uses_pdl() -> bool:
    """Whether kernels overlap. The GPU must be of compute capability 9.0 or later."""
    return not is_interpreted()


def launch_options() -> dict[str, bool]:
    """Keyword arguments of every launch."""
    return {"launch_pdl": True} if uses_pdl() else {}


@triton.jit
def wait_for_producers(PDL: tl.constexpr):
    """Until every earlier kernel has finished and its writes are visible."""
    if PDL:
        gdc_wait()


@triton.jit
def start_dependents(PDL: tl.constexpr):
    """Let the next kernel's CTAs be placed as soon as there is room."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def prefetch(pointers, PDL: tl.constexpr):
    """Bring the lines of 128 bytes that these point into to the L2 cache, while the kernel waits."""
    if PDL:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
            "=r,l",
            [pointers.to(tl.int64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
