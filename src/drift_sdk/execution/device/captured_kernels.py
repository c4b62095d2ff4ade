"""Kernels of a capture, read back from its graph.

The driver tells of each kernel of a graph how it is launched, and with which parameters.
"""

from __future__ import annotations

import ctypes
import threading
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from cuda.bindings import driver
from msgspec import Struct

__all__ = [
    "CLUSTER",
    "POLICY",
    "WORD_BYTES",
    "CapturedKernel",
    "GraphTail",
    "capture_in_progress",
    "capturing",
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
PACKED_END = int(driver.CU_LAUNCH_PARAM_END)
PACKED_BUFFER = int(driver.CU_LAUNCH_PARAM_BUFFER_POINTER)
PACKED_SIZE = int(driver.CU_LAUNCH_PARAM_BUFFER_SIZE)
NO_PARAMETER = driver.CUresult.CUDA_ERROR_INVALID_VALUE
"""The driver's status for the parameter after the last one."""


class CapturedKernel(Struct, frozen=True):
    """A kernel in the graph of a capture. Other attributes of a launch are not read: they change its speed
    alone, and kernels of this package and of Triton have none.

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
    """The kernel that a node launches; None for other nodes, and for kernels that cannot be read."""
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
    """The parameters of a kernel node; none if they cannot be read.

    found: what the driver says of the node, with pointers to the parameters or to a buffer with all of them.
    """
    packed = b"" if found.kernelParams else _packed(int(found.extra))
    parameters: list[bytes] = []
    while found.kernelParams or packed:
        error, offset, size = driver.cuFuncGetParamInfo(found.func, len(parameters))
        if error == NO_PARAMETER:
            break

        if error or (packed and offset + size > len(packed)):
            return []

        if packed:
            parameters.append(packed[offset : offset + size])
            continue

        pointer = int(found.kernelParams) + WORD_BYTES * len(parameters)
        parameters.append(ctypes.string_at(_word_at(pointer), size))
    return parameters


def _packed(extra: int) -> bytes:
    """The buffer of all parameters, as libraries pass them: `extra` is the address of pairs of words, an
    identifier and a value, up to a word of zero. Empty if there is none."""
    values: dict[int, int] = {}
    while extra and (identifier := _word_at(extra)) != PACKED_END:
        values[identifier] = _word_at(extra + WORD_BYTES)
        extra += 2 * WORD_BYTES
    if values.keys() != {PACKED_BUFFER, PACKED_SIZE}:
        return b""

    return ctypes.string_at(values[PACKED_BUFFER], _word_at(values[PACKED_SIZE]))


def _word_at(address: int) -> int:
    return ctypes.c_uint64.from_address(address).value
