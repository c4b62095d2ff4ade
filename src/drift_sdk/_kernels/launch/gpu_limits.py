"""Limits of a GPU that launch configurations depend on: its compute capability, and memory of a CTA."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
import triton
from msgspec import Struct

PDL_CAPABILITY = (9, 0)
"""The least compute capability with programmatic dependent launch and wgmma."""


class GpuLimits(Struct, frozen=True, kw_only=True):
    """Properties of a GPU.

    capability:                  CUDA compute capability.
    num_multiprocessors:         multiprocessors.
    shared_bytes:                shared memory that a CTA may have.
    multiprocessor_shared_bytes: shared memory of a multiprocessor, which its CTAs share.
    l2_bytes:                    L2 cache.
    """

    capability: tuple[int, int]
    num_multiprocessors: int
    shared_bytes: int
    multiprocessor_shared_bytes: int
    l2_bytes: int

    @property
    def has_pdl(self) -> bool:
        """Whether kernels can be launched before the kernels that they depend on have ended."""
        return self.capability >= PDL_CAPABILITY


HOPPER = GpuLimits(
    capability=(9, 0),
    num_multiprocessors=132,
    shared_bytes=227 * 1024,
    multiprocessor_shared_bytes=228 * 1024,
    l2_bytes=50 * 2**20,
)
"""An H100 or H200: assumed where there is no GPU and kernels are interpreted or compiled for another
machine."""

_limited: list[GpuLimits] = []


def gpu_limits() -> GpuLimits:
    """Return the limits of the current CUDA device, those of `limited_gpu`, or HOPPER without a GPU."""
    if _limited:
        return _limited[-1]

    # Every launch asks: is_initialized() takes less time than is_available().
    has_gpu = torch.cuda.is_initialized() or torch.cuda.is_available()
    return limits_of(torch.cuda.current_device()) if has_gpu else HOPPER


@cache
def limits_of(device_index: int) -> GpuLimits:
    """Return the limits of a CUDA device, as its driver reports them."""
    found = torch.cuda.get_device_properties(device_index)
    return GpuLimits(
        capability=(found.major, found.minor),
        num_multiprocessors=found.multi_processor_count,
        shared_bytes=triton.runtime.driver.active.utils.get_device_properties(device_index)["max_shared_mem"],
        multiprocessor_shared_bytes=found.shared_memory_per_multiprocessor,
        l2_bytes=found.L2_cache_size,
    )


@contextmanager
def limited_gpu(limits: GpuLimits) -> Iterator[None]:
    """Have launch configurations chosen for a GPU of these limits, in the whole process: for tests and
    measurements of what another GPU would run. The kernels still run on the current one."""
    _limited.append(limits)
    try:
        yield
    finally:
        _limited.remove(limits)
