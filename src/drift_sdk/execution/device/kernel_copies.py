"""Copies of captured kernels: launches into the same capture that differ in addresses alone.

A launch goes through tens of calls of Python before the driver gets it. A kernel that has been captured is
read back from the graph instead, and launched again by one call of the driver.
"""

from __future__ import annotations

import ctypes
import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from cuda.bindings import driver
from msgspec import Struct

__all__ = [
    "AddressRange",
    "CapturedKernel",
    "GraphTail",
    "KernelCopy",
    "capture_in_progress",
    "capturing",
    "copies_of",
]

WORD_BYTES = 8
"""Bytes of an address, which parameters have at multiples of as many bytes."""
MAX_KERNELS = 4
"""Most kernels of a launch that are read: a product of a library may have two."""

KERNEL_NODE = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL
PROGRAMMATIC = driver.CUgraphDependencyType.CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC
CAPTURING = driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE
CLUSTER = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
POLICY = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE
COOPERATIVE = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
DEPENDENT = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
NO_PARAMETER = driver.CUresult.CUDA_ERROR_INVALID_VALUE
"""What the driver returns for the parameter after the last one."""

AddressRange = tuple[int, int]
"""The first address of a tensor's memory, and the address after the last."""


class CapturedKernel(Struct, frozen=True):
    """A kernel in the graph of a capture. What else a launch may set is not read: kernels of this package and
    of Triton do not set it.

    function: handle of the driver. sizes: of the grid, of a CTA, and bytes of dynamic shared memory. cluster:
    its size and how clusters are placed, zeros without one. is_dependent: launched by programmatic dependent
    launch. parameters: bytes of each.
    """

    function: int
    sizes: tuple[int, int, int, int, int, int, int]
    cluster: tuple[int, int, int, int]
    is_dependent: bool
    parameters: tuple[bytes, ...]

    @property
    def words(self) -> list[list[int]]:
        """The parameters as numbers of 64 bits, the last of each filled up with zeros."""
        return [[*array("Q", each + bytes(-len(each) % WORD_BYTES))] for each in self.parameters]

    def has_launch_of(self, other: CapturedKernel) -> bool:
        """Return True if another kernel differs in the contents of parameters at most."""
        return (
            (self.function, self.sizes, self.cluster) == (other.function, other.sizes, other.cluster)
            and self.is_dependent == other.is_dependent
            and [*map(len, self.parameters)] == [*map(len, other.parameters)]
        )


class GraphTail:
    """The end of the graph that a stream captures. stream: its handle."""

    def __init__(self, stream: int) -> None:
        self.stream = stream

    def kernels_of(self, launch: Callable[[], object]) -> list[CapturedKernel] | None:
        """Call a function that launches into the capture, and return the kernels that it adds, in order.

        None if it adds none, too many or something else, and for kernels that cannot be read.
        """
        before = self._last_node()
        launch()
        node, found = self._last_node(), list[CapturedKernel]()
        while before is not None and node is not None:
            if int(node) == int(before):
                return found[::-1] or None

            if len(found) == MAX_KERNELS:
                return None

            error, nodes, edges, number = driver.cuGraphNodeGetDependencies(node, 2)
            kernel = None if error or number != 1 else _kernel(node, edges[0].type == PROGRAMMATIC)
            if kernel is None:
                return None

            found.append(kernel)
            node = nodes[0]
        return None

    def _last_node(self) -> Any:
        """The node that the next one will depend on; None if there is no such node, or several."""
        error, status, _, _, nodes, _, number = driver.cuStreamGetCaptureInfo(self.stream)
        return None if error or status != CAPTURING or number != 1 else nodes[0]


class KernelCopy:
    """A kernel that can be launched with addresses in other tensors."""

    def __init__(self, kernel: CapturedKernel, stream: int, places: Sequence[tuple[int, int, int]]) -> None:
        """places: of each address its word, counted over all parameters, the number of the tensor that it
        lies in, and the bytes between the tensor's first address and it."""
        words = kernel.words
        self._words = array("Q", [word for each in words for word in each])
        begin, _ = self._words.buffer_info()
        firsts = [WORD_BYTES * sum(map(len, words[:number])) for number in range(len(words))]
        self._parameters = array("Q", [begin + first for first in firsts])
        self._parameters_at, _ = self._parameters.buffer_info()
        self._function, self._config = driver.CUfunction(kernel.function), _config(kernel, stream)
        self._places = places

    def launch(self, addresses: Sequence[int]) -> None:
        """Launch with tensors at these first addresses. Raises RuntimeError if the driver refuses it."""
        words = self._words
        for word, tensor, offset in self._places:
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
    the kernels do not use.
    """
    first, second = kernels
    if first is None or second is None or len(first) != len(second):
        return None

    places = [_places(*pair, ranges) for pair in zip(first, second, strict=True)]
    found = [each for each in places if each is not None]
    if len(found) < len(places):
        return None

    return [KernelCopy(kernel, stream, each) for kernel, each in zip(second, found, strict=True)]


@contextmanager
def capturing(stream: int) -> Iterator[None]:
    """Have `capture_in_progress` return the end of the graph of a stream, which this thread captures in a
    `with` block."""
    outer, _current.tail = capture_in_progress(), GraphTail(stream)
    try:
        yield
    finally:
        _current.tail = outer


def capture_in_progress() -> GraphTail | None:
    """The end of the graph that this thread captures; None if it captures none."""
    tail: GraphTail | None = getattr(_current, "tail", None)
    return tail


_current = threading.local()


def _kernel(node: Any, is_dependent: bool) -> CapturedKernel | None:
    """What a node launches; None if that is no kernel, or one that cannot be copied."""
    error, kind = driver.cuGraphNodeGetType(node)
    if error or kind != KERNEL_NODE:
        return None

    error, found = driver.cuGraphKernelNodeGetParams(node)
    if error or not int(found.func):
        return None

    error, value = driver.cuGraphKernelNodeGetAttribute(node, COOPERATIVE)
    if error or value.cooperative:
        return None

    error, cluster = _cluster(node)
    parameters = _parameters(found)
    if error or not parameters:
        return None

    return CapturedKernel(
        function=int(found.func),
        sizes=(
            found.gridDimX,
            found.gridDimY,
            found.gridDimZ,
            found.blockDimX,
            found.blockDimY,
            found.blockDimZ,
            found.sharedMemBytes,
        ),
        cluster=cluster,
        is_dependent=is_dependent,
        parameters=tuple(parameters),
    )


def _cluster(node: Any) -> tuple[int, tuple[int, int, int, int]]:
    """The driver's status, and the cluster of a kernel node as `CapturedKernel` has it."""
    error, value = driver.cuGraphKernelNodeGetAttribute(node, CLUSTER)
    if error or not value.clusterDim.x:
        return error, (0, 0, 0, 0)

    size = value.clusterDim
    error, value = driver.cuGraphKernelNodeGetAttribute(node, POLICY)
    policy = 0 if error else int(value.clusterSchedulingPolicyPreference)
    return error, (size.x, size.y, size.z, policy)


def _parameters(found: Any) -> list[bytes]:
    """The parameters of a kernel node; none if they cannot be read, as those that a library has packed.

    found: what the driver says of the node, with pointers to the parameters.
    """
    parameters: list[bytes] = []
    while found.kernelParams:
        error, _, size = driver.cuFuncGetParamInfo(found.func, len(parameters))
        if error == NO_PARAMETER:
            break

        if error:
            return []

        pointer = int(found.kernelParams) + WORD_BYTES * len(parameters)
        parameters.append(ctypes.string_at(ctypes.c_uint64.from_address(pointer).value, size))
    return parameters


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


def _places(
    first: CapturedKernel,
    second: CapturedKernel,
    ranges: tuple[Sequence[AddressRange | None], Sequence[AddressRange | None]],
) -> list[tuple[int, int, int]] | None:
    """The places of `KernelCopy` for words in which two kernels differ; None if they differ in more."""
    if not first.has_launch_of(second):
        return None

    found = []
    pairs = zip(
        (w for each in first.words for w in each), (w for each in second.words for w in each), strict=True
    )
    for word, (one, other) in enumerate(pairs):
        if one == other:
            continue

        place = _place(one, other, ranges)
        if place is None:
            return None

        found.append((word, *place))
    return found


def _place(
    one: int, other: int, ranges: tuple[Sequence[AddressRange | None], Sequence[AddressRange | None]]
) -> tuple[int, int] | None:
    """The number of the tensor in which two addresses lie, and how far from its beginning. None if that is
    none, or if it may be one of several, of which other layers may have other places."""
    found = [
        (number, one - pair[0][0])
        for number, pair in enumerate(zip(*ranges, strict=True))
        if pair[0] is not None and pair[1] is not None and _has_same_place(one, other, pair[0], pair[1])
    ]
    return found[0] if len(found) == 1 else None


def _has_same_place(one: int, other: int, range_of_one: AddressRange, range_of_other: AddressRange) -> bool:
    """Whether two addresses lie in their ranges, as far from the beginning."""
    begin, end = range_of_one
    return begin <= one < end and one - begin == other - range_of_other[0]
