"""The pool of captured steps: its references, with a stand-in for torch's allocator, and on a GPU."""

from __future__ import annotations

import gc
import threading
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from torch import _C

from drift_sdk.execution.device.device import CapturePool

IS_GPU = torch.cuda.is_available()
Pool = tuple[int, tuple[int, int]]


class FakeAllocator:
    """The references to pools, which are an error to release where there are none, and what allocates."""

    def __init__(self) -> None:
        self.references, self.allocating = Counter[Pool](), set[Pool]()

    def begin(self, index: int, pool: tuple[int, int]) -> None:
        assert (index, pool) not in self.allocating
        self.references[index, pool] += 1
        self.allocating.add((index, pool))

    def end(self, index: int, pool: tuple[int, int]) -> None:
        self.allocating.remove((index, pool))

    def release(self, index: int, pool: tuple[int, int]) -> None:
        self.references[index, pool] -= 1
        assert self.references[index, pool] >= 0


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeAllocator]:
    fake = FakeAllocator()
    identities = iter(range(1, 9))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, next(identities)))
    for name, function in (
        ("_cuda_beginAllocateCurrentThreadToPool", fake.begin),
        ("_cuda_endAllocateToPool", fake.end),
        ("_cuda_releasePool", fake.release),
    ):
        monkeypatch.setattr(_C, name, function)
    yield fake
    gc.collect()  # pools of the test, while the stand-in is there


def test_a_pool_is_kept_until_it_is_released(fake: FakeAllocator) -> None:
    pool, other = CapturePool(3), CapturePool(3)
    assert fake.references == {(3, (0, 1)): 1, (3, (0, 2)): 1} and not fake.allocating
    with pool.allocations(), other.allocations():
        assert fake.references[3, (0, 1)] == 2 and len(fake.allocating) == 2
    with pytest.raises(ValueError), pool.allocations():
        raise ValueError
    assert fake.references[3, (0, 1)] == 1 and not fake.allocating
    pool.release()
    pool.release()
    assert fake.references == {(3, (0, 1)): 0, (3, (0, 2)): 1}


def test_a_collected_pool_is_released_once(fake: FakeAllocator) -> None:
    pool, released = CapturePool(0), CapturePool(0)
    released.release()
    del pool, released
    gc.collect()
    assert fake.references == {(0, (0, 1)): 0, (0, (0, 2)): 0}


@pytest.mark.gpu
@pytest.mark.parametrize("is_released", [True, False])
def test_memory_is_freed_while_another_pool_is_allocated_to(is_released: bool) -> None:
    """Errors would end the process."""
    NUM_BYTES = 1 << 26

    def use_pool() -> None:
        pool = CapturePool(0)
        with pool.allocations():
            kept, _ = torch.empty(NUM_BYTES, dtype=torch.uint8, device="cuda"), torch.ones(3, device="cuda")
        assert torch.cuda.memory_reserved(0) >= before + NUM_BYTES
        del kept
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved(0) >= before + NUM_BYTES
        if is_released:
            pool.release()

    torch.ones(3, device="cuda")
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(0)
    pool = CapturePool(0)
    with pool.allocations():
        thread = threading.Thread(target=use_pool)
        thread.start()
        thread.join()
        gc.collect()
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved(0) < before + NUM_BYTES
        held = torch.ones(NUM_BYTES // 4, device="cuda")
        torch.cuda.empty_cache()
    assert held.sum().item() == NUM_BYTES // 4
    pool.release()


@pytest.mark.gpu
def test_captured_memory_is_not_given_to_others() -> None:
    """Memory that a captured step has freed: as long as the pool is kept, others do not get it."""
    torch.cuda.init()
    pool = CapturePool(0)
    with pool.allocations():
        captured = torch.empty(1 << 22, dtype=torch.uint8, device="cuda")
    place = captured.data_ptr()
    del captured
    others = [torch.empty(1 << 22, dtype=torch.uint8, device="cuda") for _ in range(4)]
    assert place not in {other.data_ptr() for other in others}
    with pool.allocations():
        assert torch.empty(1 << 22, dtype=torch.uint8, device="cuda").data_ptr() == place
