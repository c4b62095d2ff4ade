"""Copies of captured kernels: launches into the same capture that differ in addresses alone.

A launch goes through tens of calls of Python before the driver gets it. A kernel that has been captured is
read back from the graph instead, and launched again by one call of the driver.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

from cuda.bindings import driver

from drift_sdk.execution.device.captured_kernels import CLUSTER, POLICY, WORD_BYTES, CapturedKernel

__all__ = ["AddressRange", "KernelCopy", "copies_of"]

DEPENDENT = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION

AddressRange = tuple[int, int]
"""The first address of a tensor's memory, and the address after the last."""


class Pointer(NamedTuple):
    """An address in a kernel's parameters.

    word: its number among the words of all parameters. tensor: the number of the tensor that it lies in.
    offset: bytes from the tensor's first address.
    """

    word: int
    tensor: int
    offset: int


class KernelCopy:
    """A kernel that can be launched with its pointers in other tensors."""

    def __init__(self, kernel: CapturedKernel, stream: int, pointers: Sequence[Pointer]) -> None:
        words = kernel.words
        self._words = array("Q", [word for each in words for word in each])
        begin, _ = self._words.buffer_info()
        firsts = [WORD_BYTES * sum(map(len, words[:number])) for number in range(len(words))]
        self._parameters = array("Q", [begin + first for first in firsts])
        self._parameters_at, _ = self._parameters.buffer_info()
        self._function, self._config = driver.CUfunction(kernel.function), _config(kernel, stream)
        self._pointers = pointers

    def launch(self, addresses: Sequence[int]) -> None:
        """Launch with tensors at these first addresses. Raises RuntimeError if the driver refuses it."""
        words = self._words
        for word, tensor, offset in self._pointers:
            words[word] = addresses[tensor] + offset
        (error,) = driver.cuLaunchKernelEx(self._config, self._function, self._parameters_at, 0)
        if error:
            raise RuntimeError(f"a kernel could not be launched again: {error!r}")


def copies_of(
    kernels: tuple[list[CapturedKernel] | None, list[CapturedKernel] | None],
    ranges: tuple[Sequence[AddressRange | None], Sequence[AddressRange | None]],
    stream: int,
) -> list[KernelCopy] | None:
    """Copies of the kernels of two launches, which differ in addresses in tensors alone; None if they differ
    in more.

    kernels: of either launch. ranges: of tensors that have other addresses in either; None for those that
    the kernels do not use. Tensors in the same place are taken for one.
    """
    first, second = kernels
    if first is None or second is None or len(first) != len(second):
        return None

    pointers = [_pointers(*pair, ranges) for pair in zip(first, second, strict=True)]
    found = [each for each in pointers if each is not None]
    if len(found) < len(pointers):
        return None

    return [KernelCopy(kernel, stream, each) for kernel, each in zip(second, found, strict=True)]


def _config(kernel: CapturedKernel, stream: int) -> Any:
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = kernel.sizes[:3]
    config.blockDimX, config.blockDimY, config.blockDimZ = kernel.sizes[3:6]
    config.sharedMemBytes = kernel.sizes[6]
    config.hStream = driver.CUstream(stream)
    attributes = []
    if kernel.is_dependent:
        attributes.append(_attribute(DEPENDENT))
        attributes[-1].value.programmaticStreamSerializationAllowed = 1
    if any(kernel.cluster):
        attributes += [_attribute(CLUSTER), _attribute(POLICY)]
        size = attributes[-2].value.clusterDim
        size.x, size.y, size.z, policy = kernel.cluster
        attributes[-1].value.clusterSchedulingPolicyPreference = driver.CUclusterSchedulingPolicy(policy)
    config.attrs, config.numAttrs = attributes, len(attributes)
    return config


def _attribute(kind: Any) -> Any:
    attribute = driver.CUlaunchAttribute()
    attribute.id = kind
    return attribute


def _pointers(
    first: CapturedKernel,
    second: CapturedKernel,
    ranges: tuple[Sequence[AddressRange | None], Sequence[AddressRange | None]],
) -> list[Pointer] | None:
    """The words in which two kernels differ; None if one of them is no pointer, or they differ in more."""
    if not first.has_launch_of(second):
        return None

    found = []
    pairs = zip(
        (w for each in first.words for w in each), (w for each in second.words for w in each), strict=True
    )
    for word, (one, other) in enumerate(pairs):
        if one == other:
            continue

        pointer = _pointer(word, one, other, ranges)
        if pointer is None:
            return None

        found.append(pointer)
    return found


def _pointer(
    word: int,
    one: int,
    other: int,
    ranges: tuple[Sequence[AddressRange | None], Sequence[AddressRange | None]],
) -> Pointer | None:
    """A word that is `one` in the first kernel and `other` in the second, as an address in the same tensor of
    both. None if there is no such tensor, or several in different places."""
    found: dict[tuple[AddressRange, AddressRange], Pointer] = {}
    for number, (range_of_one, range_of_other) in enumerate(zip(*ranges, strict=True)):
        if range_of_one is None or range_of_other is None:
            continue

        begin, end = range_of_one
        if begin <= one < end and one - begin == other - range_of_other[0]:
            found.setdefault((range_of_one, range_of_other), Pointer(word, number, one - begin))
    return next(iter(found.values())) if len(found) == 1 else None
