"""Classification of errors of CUDA and its libraries by their messages."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from drift_sdk import ExecutorError, RequestError
from drift_sdk.execution.device.device import FATAL, executor_error, keep_forever, typed_errors


class CUDAError(Exception):
    """An error as cuda.core raises it: the driver's name of the error and an explanation."""


class OutOfResources(Exception):
    """An error as Triton raises it."""


@pytest.mark.parametrize("name", FATAL)
def test_errors_that_lose_the_context_are_fatal(name: str) -> None:
    words = FATAL[name]
    for error in (
        CUDAError(f"{name}: While executing a kernel, something happened."),
        torch.AcceleratorError(f"CUDA error: {words}\nCompile with `TORCH_USE_CUDA_DSA`."),
        RuntimeError(f"Triton Error [CUDA]: {words}"),
    ):
        found = executor_error(error)
        assert found.process_unusable
        assert type(error).__name__ in str(found)
        assert "no engine of this process" in str(found)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3072.00 GiB. GPU 0 has ..."),
        CUDAError("CUDA_ERROR_OUT_OF_MEMORY: The API call failed because it was unable to allocate memory."),
        RuntimeError("Triton Error [CUDA]: out of memory"),
    ],
)
def test_out_of_memory_is_recoverable_and_names_settings(error: Exception) -> None:
    found = executor_error(error)
    assert not found.process_unusable
    assert "too little memory" in str(found) and "kv_cache_tokens" in str(found)


@pytest.mark.parametrize(
    "error",
    [
        CUDAError("CUDA_ERROR_STREAM_CAPTURE_INVALIDATED: The current capture has been invalidated."),
        CUDAError("CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES: a launch did not occur."),
        CUDAError("CUDA_ERROR_INVALID_VALUE: a parameter is not within an acceptable range."),
        torch.AcceleratorError("CUDA error: invalid configuration argument"),
        RuntimeError("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasGemmEx`"),
        OutOfResources("out of resource: shared memory, Required: 278528, Hardware limit: 232448."),
        ValueError("x: torch.float32 of shape [3]: expected [4]"),
        KeyError(3),
    ],
)
def test_other_errors_are_recoverable(error: Exception) -> None:
    found = executor_error(error)
    assert not found.process_unusable
    assert str(found) == f"failed on the device: {type(error).__name__}: {error}"


def test_fatal_causes_make_an_error_fatal() -> None:
    with pytest.raises(ExecutorError) as caught, typed_errors(None):
        try:
            raise CUDAError("CUDA_ERROR_ILLEGAL_ADDRESS: ...")
        except CUDAError:
            raise RuntimeError("while ending the capture")  # noqa: B904 - as libraries do
    assert caught.value.process_unusable
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_circular_contexts_are_read_once() -> None:
    one, other = RuntimeError("one"), RuntimeError("other")
    one.__context__, other.__context__ = other, one
    assert not executor_error(one).process_unusable


def test_errors_of_the_package_are_not_wrapped() -> None:
    for error in (RequestError("grammar"), ExecutorError("lost", process_unusable=True)):
        with pytest.raises(type(error)) as caught, typed_errors(None):
            raise error
        assert caught.value is error


def test_interrupts_are_not_wrapped() -> None:
    with pytest.raises(KeyboardInterrupt), typed_errors(None):
        raise KeyboardInterrupt


class Owner:
    pass


def test_kept_objects_are_never_freed() -> None:
    kept, lost, other = Owner(), Owner(), Owner()
    references = [weakref.ref(owner) for owner in (kept, lost, other)]
    keep_forever(kept)
    with pytest.raises(ExecutorError), typed_errors(lost):
        raise CUDAError("CUDA_ERROR_LAUNCH_FAILED: ...")
    with pytest.raises(ExecutorError), typed_errors(other):
        raise CUDAError("CUDA_ERROR_INVALID_VALUE: ...")
    del kept, lost, other
    gc.collect()
    assert [reference() is None for reference in references] == [False, False, True]
