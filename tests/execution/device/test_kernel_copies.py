"""Captured kernels are read back and launched again with other addresses, from a driver in Python."""

from __future__ import annotations

import ctypes
import threading
from array import array
from collections.abc import Callable, Iterable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

pytest.importorskip("cuda.bindings.driver")

from cuda.bindings import driver

from drift_sdk.execution.device import captured_kernels, kernel_copies
from drift_sdk.execution.device.captured_kernels import (
    CLUSTER,
    COOPERATIVE,
    KERNEL_NODE,
    MAX_KERNELS,
    POLICY,
    CapturedKernel,
    GraphTail,
    capture_in_progress,
    capturing,
)
from drift_sdk.execution.device.kernel_copies import DEPENDENT, KernelCopy, copies_of

STREAM = 7
NOTHING = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_EMPTY
IDLE = driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE
SPREAD = driver.CUclusterSchedulingPolicy.CU_CLUSTER_SCHEDULING_POLICY_SPREAD
INVALID = driver.CUresult.CUDA_ERROR_INVALID_VALUE
FUNCTION, LIBRARY_FUNCTION = 100, 200
PARAMETERS = {FUNCTION: (8, 4, 4, 8, 24), LIBRARY_FUNCTION: (32,)}
"""Bytes of the parameters of two kernels."""


def offsets_of(function: int) -> list[int]:
    """Places of a kernel's parameters in a buffer: multiples of their sizes, or of 8."""
    found, end = list[int](), 0
    for size in PARAMETERS[function]:
        found.append(-(-end // min(size, 8)) * min(size, 8))
        end = found[-1] + size
    return found


CALLS = ("capture", "before", "type", "kernel", str(COOPERATIVE), str(CLUSTER), str(POLICY))


class Node:
    """A node of a graph with one before it."""

    def __init__(
        self, function: int, words: Iterable[int], *, is_dependent: bool = True, **changes: Any
    ) -> None:
        self.function, self.is_dependent = function, is_dependent
        self.words, self.before = array("Q", words), list[int]()
        self.kind, self.is_cooperative = KERNEL_NODE, 0
        self.is_kernel_object, self.packing = False, ""
        self.sizes, self.cluster, self.policy = (3, 2, 5, 32, 4, 6, 64), (0, 0, 0), 0
        for name, value in changes.items():
            setattr(self, name, value)
        begin, _ = self.words.buffer_info()
        lengths = [-(-size // 8) for size in PARAMETERS[function]]
        self.pointers = array("Q", [begin + 8 * sum(lengths[:number]) for number in range(len(lengths))])
        buffer = bytearray()
        for offset, size, pointer in zip(
            offsets_of(function), PARAMETERS[function], self.pointers, strict=True
        ):
            buffer += bytes(offset - len(buffer)) + ctypes.string_at(pointer, size)
        self.buffer, self.size = array("B", buffer), array("Q", [len(buffer)])
        addresses = {"buffer": self.buffer.buffer_info()[0], "size": self.size.buffer_info()[0], "other": 0}
        pairs = {name: (number, addresses[name]) for number, name in enumerate(addresses, 1)}
        self.extra = array("Q", [word for name in self.packing.split() for word in pairs[name]] + [0])

    @property
    def description(self) -> tuple[object, ...]:
        return self.function, [*self.words], self.sizes, self.cluster, self.policy, self.is_dependent


class Driver:
    """The driver's functions that a capture of one stream needs. nodes: by handle, from 1 on."""

    def __init__(self) -> None:
        self.nodes: dict[int, Node] = {}
        self.is_capturing, self.last, self.refused = True, list[int](), 0
        self.after_parameters, self.failing = INVALID, ""
        for name in vars(driver):
            if name.startswith("CU"):
                setattr(self, name, getattr(driver, name))

    def status(self, call: str) -> int:
        """Return the status of a call, whose results are right in any case."""
        return int(INVALID) if call == self.failing else 0

    def add(self, node: Node) -> None:
        node.before, handle = self.last, len(self.nodes) + 1
        self.nodes[handle], self.last = node, [handle]

    def cuStreamGetCaptureInfo(self, stream: int) -> tuple[Any, ...]:
        assert stream == STREAM
        status = captured_kernels.CAPTURING if self.is_capturing else IDLE
        return self.status("capture"), status, 1, None, self.last, [], len(self.last)

    def cuGraphNodeGetDependencies(self, node: int, number: int) -> tuple[Any, ...]:
        found = self.nodes[node]
        edge = SimpleNamespace(type=captured_kernels.PROGRAMMATIC if found.is_dependent else 0)
        return self.status("before"), [*found.before, 0, 0][:number], [edge] * number, len(found.before)

    def cuGraphNodeGetType(self, node: int) -> tuple[Any, ...]:
        return self.status("type"), self.nodes[node].kind

    def cuGraphKernelNodeGetParams(self, node: int) -> tuple[Any, ...]:
        found = self.nodes[node]
        names = ("gridDimX", "gridDimY", "gridDimZ", "blockDimX", "blockDimY", "blockDimZ", "sharedMemBytes")
        return self.status("kernel"), SimpleNamespace(
            func=0 if found.is_kernel_object else found.function,
            kernelParams=0 if found.packing else found.pointers.buffer_info()[0],
            extra=found.extra.buffer_info()[0] if found.packing else 0,
            **dict(zip(names, found.sizes, strict=True)),
        )

    def cuFuncGetParamInfo(self, function: int, number: int) -> tuple[Any, ...]:
        sizes = PARAMETERS[function]
        if number < len(sizes):
            return 0, offsets_of(function)[number], sizes[number]

        return self.after_parameters, None, None

    def cuGraphKernelNodeGetAttribute(self, node: int, attribute: Any) -> tuple[Any, ...]:
        found, value = self.nodes[node], driver.CUlaunchAttributeValue()
        if attribute == COOPERATIVE:
            value.cooperative = found.is_cooperative
        elif attribute == CLUSTER:
            value.clusterDim.x, value.clusterDim.y, value.clusterDim.z = found.cluster
        elif attribute == POLICY:
            value.clusterSchedulingPolicyPreference = driver.CUclusterSchedulingPolicy(found.policy)
        else:
            return INVALID, None
        return self.status(str(attribute)), value

    def cuLaunchKernelEx(self, config: Any, function: Any, parameters: int, extra: int) -> tuple[Any]:
        if self.refused:
            return (driver.CUresult(self.refused),)

        assert (int(config.hStream), extra) == (STREAM, 0)
        sizes = PARAMETERS[int(function)]
        pointers = (ctypes.c_uint64 * len(sizes)).from_address(parameters)
        contents = [ctypes.string_at(at, size) for at, size in zip(pointers, sizes, strict=True)]
        attributes = {each.id: each.value for each in config.attrs}
        assert len(attributes) == config.numAttrs
        changes: dict[str, Any] = {}
        if CLUSTER in attributes:
            size = attributes[CLUSTER].clusterDim
            policy = attributes[POLICY].clusterSchedulingPolicyPreference
            changes = {"cluster": (size.x, size.y, size.z), "policy": int(policy)}
        grid = config.gridDimX, config.gridDimY, config.gridDimZ
        block = config.blockDimX, config.blockDimY, config.blockDimZ
        node = Node(
            int(function),
            array("Q", b"".join(each + bytes(-len(each) % 8) for each in contents)),
            is_dependent=DEPENDENT in attributes,
            sizes=(*grid, *block, config.sharedMemBytes),
            **changes,
        )
        self.add(node)
        return (driver.CUresult.CUDA_SUCCESS,)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Driver:
    found = Driver()
    for module in (captured_kernels, kernel_copies):
        monkeypatch.setattr(module, "driver", found)
    found.add(Node(FUNCTION, [0] * 7))
    return found


BEGINS = ((1000, 5000), (2000, 6500), (3600, 7000))
"""First addresses of the two tensors of three layers."""
SIZE = 100


def ranges(begins: Iterable[int]) -> list[tuple[int, int] | None]:
    return [(begin, begin + SIZE) for begin in begins]


Launched = Callable[[int, int], list[Node]]
"""The nodes of a launch with tensors at two addresses."""


def small(first: int, second: int, **changes: Any) -> list[Node]:
    """A pointer, two numbers of four bytes, a pointer into the second tensor, and a struct with both."""
    return [Node(FUNCTION, [first, 17, 18, second + 24, first + 8, 5, second], **changes)]


def product(first: int, second: int) -> list[Node]:
    """Two kernels of a library: the second one takes sums of the first."""
    return [
        Node(LIBRARY_FUNCTION, [first, 1, second, 0xFF00], is_dependent=False),
        Node(
            LIBRARY_FUNCTION,
            [0xFF00, 2, second + 99, 9],
            sizes=(7, 8, 9, 64, 2, 3, 1024),
            cluster=(2, 3, 4),
            policy=SPREAD,
        ),
    ]


def repeated(
    gpu: Driver, launched: Launched, known: Iterable[int] = (0, 1)
) -> tuple[list[KernelCopy] | None, list[Node]]:
    """Copies of the launch, which was made for two layers, and the nodes after launching for the third."""
    tail = GraphTail(STREAM)

    def launch(first: int, second: int) -> None:
        for node in launched(first, second):
            gpu.add(node)

    kernels = [tail.kernels_of(lambda begins=begins: launch(*begins)) for begins in BEGINS[:2]]
    places = [
        [each if number in known else None for number, each in enumerate(ranges(begins))]
        for begins in BEGINS[:2]
    ]
    copies = copies_of((kernels[0], kernels[1]), (places[0], places[1]), STREAM)
    before = len(gpu.nodes)
    for copy in copies or ():
        copy.launch(BEGINS[2])
    return copies, [gpu.nodes[handle] for handle in range(before + 1, len(gpu.nodes) + 1)]


def most(first: int, second: int) -> list[Node]:
    """As many kernels as are read."""
    return [each for _ in range(MAX_KERNELS) for each in small(first, second)]


def packed(first: int, second: int, packing: str = "buffer size") -> list[Node]:
    """`small` with all parameters in a buffer, as libraries pass them."""
    return small(first, second, packing=packing)


def packed_size_first(first: int, second: int) -> list[Node]:
    return packed(first, second, "size buffer")


@pytest.mark.parametrize("launched", [small, product, most, packed, packed_size_first])
def test_copies_are_the_launches_with_other_addresses(gpu: Driver, launched: Launched) -> None:
    copies, nodes = repeated(gpu, launched)
    assert copies is not None
    expected = launched(*BEGINS[2])
    assert [node.description for node in nodes] == [node.description for node in expected]


def test_a_copy_is_launched_again_and_again(gpu: Driver) -> None:
    copies, _ = repeated(gpu, small)
    assert copies is not None
    for begins in ((10, 20), (30, 40)):
        copies[0].launch(begins)
        (expected,) = small(*begins)
        assert gpu.nodes[len(gpu.nodes)].description == expected.description


def varied(change: Callable[[Node, bool], None]) -> Launched:
    """`small` with a change, which is told whether the layer is the second one."""

    def launched(first: int, second: int) -> list[Node]:
        nodes = small(first, second)
        change(nodes[0], first == BEGINS[1][0])
        return nodes

    return launched


def counting(node: Node, is_second: bool) -> None:
    node.words[1] += is_second


def pointing_elsewhere(node: Node, is_second: bool) -> None:
    node.words[0] += 8 * is_second


def pointing_before(node: Node, is_second: bool) -> None:
    node.words[0] -= 8


def pointing_behind(node: Node, is_second: bool) -> None:
    node.words[0] += SIZE


def growing(node: Node, is_second: bool) -> None:
    node.sizes = (3 + is_second, *node.sizes[1:])


def waiting(node: Node, is_second: bool) -> None:
    node.is_dependent = is_second


def clustering(node: Node, is_second: bool) -> None:
    node.cluster = (1 + is_second, 1, 1)


def cooperating(node: Node, is_second: bool) -> None:
    node.is_cooperative = 1


def copying_memory(node: Node, is_second: bool) -> None:
    node.kind = NOTHING


def without_parameters(node: Node, is_second: bool) -> None:
    node.pointers = array("Q")


def without_function(node: Node, is_second: bool) -> None:
    node.is_kernel_object = True


CHANGES = (
    counting,
    pointing_elsewhere,
    pointing_before,
    pointing_behind,
    growing,
    waiting,
    clustering,
    cooperating,
    copying_memory,
    without_parameters,
    without_function,
)


@pytest.mark.parametrize("change", CHANGES)
def test_launches_that_differ_in_more_have_no_copies(
    gpu: Driver, change: Callable[[Node, bool], None]
) -> None:
    assert repeated(gpu, varied(change)) == (None, [])


def test_kernels_without_parameters_have_no_copies(gpu: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those of which the driver does not tell them."""
    monkeypatch.setitem(PARAMETERS, FUNCTION, ())
    assert repeated(gpu, lambda first, second: [Node(FUNCTION, [])]) == (None, [])


def test_kernels_whose_parameters_cannot_be_read_have_no_copies(gpu: Driver) -> None:
    gpu.after_parameters = driver.CUresult.CUDA_ERROR_NOT_SUPPORTED
    assert repeated(gpu, small) == (None, [])


@pytest.mark.parametrize("packing", ["buffer", "size", "buffer size other"])
def test_kernels_with_another_description_of_a_buffer_have_no_copies(gpu: Driver, packing: str) -> None:
    assert repeated(gpu, partial(packed, packing=packing)) == (None, [])


@pytest.mark.parametrize(("size", "is_copied"), [(48, True), (47, False), (8, False), (0, False)])
def test_kernels_with_parameters_behind_their_buffer_have_no_copies(
    gpu: Driver, size: int, is_copied: bool
) -> None:
    def launched(first: int, second: int) -> list[Node]:
        (node,) = packed(first, second)
        node.size[0] = size
        return [node]

    copies, _ = repeated(gpu, launched)
    assert (copies is not None) is is_copied


def test_addresses_in_tensors_that_a_launch_does_not_take_are_not_replaced(gpu: Driver) -> None:
    assert repeated(gpu, small, known=[0]) == (None, [])


def test_another_number_of_kernels_has_no_copies(gpu: Driver) -> None:
    def launched(first: int, second: int) -> list[Node]:
        is_second = first == BEGINS[1][0]
        return [*small(first, second), *(small(first, second) if is_second else ())]

    assert repeated(gpu, launched) == (None, [])


def test_launches_without_a_kernel_have_no_copies(gpu: Driver) -> None:
    """Such as those that go to another stream."""
    assert repeated(gpu, lambda first, second: []) == (None, [])


def test_an_address_that_may_be_in_either_of_two_tensors_is_not_replaced(gpu: Driver) -> None:
    """As in tensors that share memory, which those of other layers may not."""
    tail = GraphTail(STREAM)
    first, second = (
        tail.kernels_of(lambda begin=begin: gpu.add(small(begin, begin)[0])) for begin in (1000, 2000)
    )

    def copies(*changes: int) -> list[KernelCopy] | None:
        ranges = [[(begin, begin + SIZE - change) for change in changes] for begin in (1000, 2000)]
        return copies_of((first, second), (ranges[0], ranges[1]), STREAM)

    assert copies(0, 1) is None
    for same in (copies(0), copies(0, 0)):
        assert same is not None
        same[0].launch([5000, 6000])
        assert gpu.nodes[len(gpu.nodes)].description == small(5000, 5000)[0].description


@pytest.mark.parametrize("call", CALLS)
def test_kernels_of_which_the_driver_tells_nothing_have_no_copies(gpu: Driver, call: str) -> None:
    gpu.failing = call
    assert repeated(gpu, partial(small, cluster=(2, 1, 1), policy=SPREAD)) == (None, [])


def test_launches_differ_by_each_field_and_the_lengths_of_parameters() -> None:
    kernel = CapturedKernel(
        function=1,
        sizes=(1, 2, 3, 4, 5, 6, 7),
        cluster=(0, 0, 0, 0),
        is_dependent=True,
        parameters=(b"abcd",),
    )
    changes: list[dict[str, Any]] = [
        {"function": 2},
        *(
            {"sizes": tuple(size + (place == number) for place, size in enumerate(kernel.sizes))}
            for number in range(7)
        ),
        *({"cluster": tuple(int(place == number) for place in range(4))} for number in range(4)),
        {"is_dependent": False},
        {"parameters": (b"abcde",)},
        {"parameters": (b"abcd", b"")},
    ]
    for change in changes:
        assert not kernel.has_launch_of(replace(kernel, **change)), change
    assert kernel.has_launch_of(replace(kernel, parameters=(b"efgh",)))


def test_more_kernels_than_are_read_have_no_copies(gpu: Driver) -> None:
    def launched(first: int, second: int) -> list[Node]:
        return [each for _ in range(MAX_KERNELS + 1) for each in small(first, second)]

    assert repeated(gpu, launched) == (None, [])


def test_a_graph_that_forks_is_not_read(gpu: Driver) -> None:
    def fork() -> None:
        gpu.add(small(1, 2)[0])
        gpu.last = [1, 2]

    assert GraphTail(STREAM).kernels_of(fork) is None


def test_a_graph_that_joins_is_not_read(gpu: Driver) -> None:
    def join() -> None:
        gpu.add(small(1, 2)[0])
        gpu.last = [1, 2]
        gpu.add(small(1, 2)[0])

    assert GraphTail(STREAM).kernels_of(join) is None


def test_nothing_is_read_outside_of_a_capture_or_before_its_first_node(gpu: Driver) -> None:
    launched: list[int] = []
    gpu.is_capturing = False
    assert GraphTail(STREAM).kernels_of(lambda: launched.append(1)) is None
    gpu.is_capturing, gpu.last = True, []
    assert GraphTail(STREAM).kernels_of(lambda: launched.append(2)) is None
    assert launched == [1, 2]


def test_a_launch_that_the_driver_refuses_is_an_error(gpu: Driver) -> None:
    copies, _ = repeated(gpu, small)
    assert copies is not None
    gpu.refused = int(INVALID)
    with pytest.raises(RuntimeError, match="CUDA_ERROR_INVALID_VALUE"):
        copies[0].launch(BEGINS[2])


def test_only_the_thread_that_captures_has_a_capture_in_progress() -> None:
    seen: list[GraphTail | None] = []
    assert capture_in_progress() is None
    with capturing(STREAM):
        tail = capture_in_progress()
        assert tail is not None and tail.stream == STREAM
        thread = threading.Thread(target=lambda: seen.append(capture_in_progress()))
        thread.start()
        thread.join()
        with capturing(STREAM + 1):
            pass
        assert capture_in_progress() is tail
    assert seen == [None]
    assert capture_in_progress() is None
    with pytest.raises(KeyError), capturing(STREAM):
        raise KeyError
    assert capture_in_progress() is None
