"""Errors of CUDA and its libraries as ExecutorError."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from drift_sdk.errors import DriftError, ExecutorError

# The driver's name of an error, which cuda.core gives, and its description, which torch and Triton give.
# After each of these errors every further CUDA call of the process fails. cuBLAS has its own names of errors,
# but they do not tell whether the context is lost; the next call does.
FATAL = {
    "CUDA_ERROR_DEINITIALIZED": "driver shutting down",
    "CUDA_ERROR_ECC_UNCORRECTABLE": "uncorrectable ECC error",
    "CUDA_ERROR_NVLINK_UNCORRECTABLE": "uncorrectable NVLink error",
    "CUDA_ERROR_CONTAINED": "contained by the GPU's error containment",
    "CUDA_ERROR_ILLEGAL_ADDRESS": "an illegal memory access was encountered",
    "CUDA_ERROR_LAUNCH_TIMEOUT": "the launch timed out and was terminated",
    "CUDA_ERROR_CONTEXT_IS_DESTROYED": "context is destroyed",
    "CUDA_ERROR_ASSERT": "device-side assert triggered",
    "CUDA_ERROR_HARDWARE_STACK_ERROR": "hardware stack error",
    "CUDA_ERROR_ILLEGAL_INSTRUCTION": "an illegal instruction was encountered",
    "CUDA_ERROR_MISALIGNED_ADDRESS": "misaligned address",
    "CUDA_ERROR_INVALID_ADDRESS_SPACE": "operation not supported on global/shared address space",
    "CUDA_ERROR_INVALID_PC": "invalid program counter",
    "CUDA_ERROR_LAUNCH_FAILED": "unspecified launch failure",
    "CUDA_ERROR_TENSOR_MEMORY_LEAK": "tensor memory not completely freed",
    "CUDA_ERROR_MPS_CLIENT_TERMINATED": "MPS client has been terminated",
    "CUDA_ERROR_EXTERNAL_DEVICE": "an async error has occurred in external entity outside of CUDA",
}
_kept: set[int] = set()
OUT_OF_MEMORY = ("CUDA_ERROR_OUT_OF_MEMORY", "out of memory")


def executor_error(error: BaseException) -> ExecutorError:
    """The ExecutorError of a failing step or start.

    It has `process_unusable` set if the error, or an error that led to it, is one that CUDA does not recover
    from.
    """
    texts = [f"{type(each).__name__}: {each}" for each in _with_causes(error)]
    brief = texts[0].splitlines()[0]
    for text in texts:
        if any(name in text or words in text for name, words in FATAL.items()):
            reason = "no engine of this process can use the GPU any more"
            return ExecutorError(f"{reason}: {brief}", process_unusable=True)

    if isinstance(error, torch.OutOfMemoryError) or any(words in texts[0] for words in OUT_OF_MEMORY):
        advice = "a smaller kv_cache_tokens, max_num_seqs or prefill_token_budget needs less"
        return ExecutorError(f"the GPU has too little memory left: {brief} ({advice})")

    return ExecutorError(f"failed on the device: {brief}")


@contextmanager
def typed_errors(owner: object) -> Iterator[None]:
    """Raise errors of the block as ExecutorError, unless they are errors of this package already.

    After an error that leaves the process unusable, `owner`, which holds the device's memory, is never freed.
    """
    try:
        yield
    except DriftError as error:
        if isinstance(error, ExecutorError) and error.process_unusable:
            keep_forever(owner)
        raise
    except Exception as error:
        found = executor_error(error)
        if found.process_unusable:
            keep_forever(owner)
        raise found from error


def keep_forever(thing: object) -> None:
    """Prevent `thing` from being freed, even when the interpreter exits.

    After a fatal error torch cannot free device memory: the driver refuses, torch raises inside a destructor,
    and that ends the process. Memory of a device that hangs cannot be freed either.
    """
    _kept.add(id(thing))
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def is_kept(thing: object) -> bool:
    """Whether `keep_forever` was called with `thing`."""
    return id(thing) in _kept


def _with_causes(error: BaseException) -> list[BaseException]:
    """The error, then the errors that led to it, each once."""
    found: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in found:
        found.append(current)
        current = current.__cause__ or current.__context__

    return found
