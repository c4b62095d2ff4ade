"""Contexts of GPUs that are made while torch is imported."""

from __future__ import annotations

import ctypes

import pytest

from drift_sdk import _cuda_driver
from drift_sdk._cuda_driver import device_contexts


class Driver:
    """A driver of a machine with `num_gpus` GPUs. num_kept: contexts by GPU."""

    def __init__(self, num_gpus: int, status: int = 0) -> None:
        self.num_gpus, self.status = num_gpus, status
        self.num_kept = [0] * num_gpus

    def cuInit(self, flags: int) -> int:
        return self.status

    def cuDeviceGet(self, device: object, index: int) -> int:
        if index >= self.num_gpus:
            return 101

        device._obj.value = index  # type: ignore[attr-defined]  # of ctypes.byref
        return 0

    def cuThreadExchangeStreamCaptureMode(self, mode: object) -> int:
        return 0

    def cuDevicePrimaryCtxRetain(self, context: object, device: ctypes.c_int) -> int:
        self.num_kept[device.value] += 1
        return 0

    def cuDevicePrimaryCtxRelease_v2(self, device: ctypes.c_int) -> int:
        self.num_kept[device.value] -= 1
        return 0


@pytest.mark.parametrize(
    "device, size, num_gpus, kept",
    [
        ("auto", 1, 2, [1, 0]),
        ("cuda", 1, 1, [1]),
        ("cuda:1", 1, 3, [0, 1, 0]),
        ("cuda:1", 2, 3, [0, 1, 1]),
        ("auto", 4, 2, [1, 1]),
        ("cuda:7", 1, 2, [0, 0]),
        ("cpu", 1, 2, [0, 0]),
    ],
)
def test_contexts_of_the_engines_gpus_are_kept_until_the_block_ends(
    device: str, size: int, num_gpus: int, kept: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(num_gpus)
    monkeypatch.setattr(_cuda_driver.ctypes, "CDLL", lambda name: driver)
    during: list[int] = []
    original = driver.cuDevicePrimaryCtxRelease_v2

    def release(index: ctypes.c_int) -> int:
        during.append(sum(driver.num_kept))
        return original(index)

    monkeypatch.setattr(driver, "cuDevicePrimaryCtxRelease_v2", release)
    with pytest.raises(RuntimeError, match="not opened"), device_contexts(device, size):
        raise RuntimeError("not opened")

    assert driver.num_kept == [0] * num_gpus
    assert during == list(range(sum(kept), 0, -1))


@pytest.mark.parametrize("status", [100, 999])
def test_a_driver_that_finds_no_gpu_is_left_alone(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(1, status)
    monkeypatch.setattr(_cuda_driver.ctypes, "CDLL", lambda name: driver)
    with device_contexts("auto", 1):
        pass
    assert driver.num_kept == [0]


def test_a_machine_without_a_driver_needs_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_library(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(_cuda_driver.ctypes, "CDLL", no_library)
    with device_contexts("auto", 1):
        pass
