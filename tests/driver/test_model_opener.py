"""Errors of opening a model that are none of this package: they are ModelLoadErrors that state the reason."""

from __future__ import annotations

import errno
import os
from typing import Any

import anyio
import pytest

from drift_sdk import Engine, ModelLoadError
from drift_sdk.testing import ScriptedModel

OF_TORCH = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory"
OF_SAFETENSORS = "Cannot allocate memory (os error 12)"
ERRORS = [
    (OSError(errno.EMFILE, os.strerror(errno.EMFILE)), "the model cannot be opened: .*Too many open files"),
    (ImportError("libtorch.so: Too many open files"), "the model cannot be opened: .*Too many open files"),
    (
        PermissionError(errno.EACCES, "Permission denied", "x"),
        "the model cannot be opened: .*Permission denied",
    ),
    (MemoryError(), "not enough memory for the model: MemoryError.*kv_cache_tokens"),
    (MemoryError(OF_SAFETENSORS), "not enough memory for the model: .*os error 12"),
    (RuntimeError(OF_TORCH), "not enough memory for the model: .*DefaultCPUAllocator"),
    (RuntimeError("std::bad_alloc"), "not enough memory for the model: .*bad_alloc"),
    (RuntimeError("can't start new thread"), "the model cannot be opened: .*can't start new thread"),
    (BaseException("of a library"), "the model cannot be opened: .*of a library"),
]


@pytest.mark.parametrize(("error", "said"), ERRORS)
def test_errors_of_opening_are_typed(error: BaseException, said: str) -> None:
    model = ScriptedModel("ok")
    fails = True

    def open_model(report: Any, limits: Any = None) -> Any:
        if fails:
            raise error

        return model(report, limits)

    async def main() -> None:
        nonlocal fails
        engine = Engine("scripted", open_model=open_model)
        with pytest.raises(ModelLoadError, match=said) as caught:
            await engine.start()
        assert caught.value.__cause__ is error

        fails = False
        async with engine:
            await engine.sleep()
            fails = True
            with pytest.raises(ModelLoadError, match=said):
                await engine.wake()
            fails = False
            await engine.wake()
            assert (await engine.generate("x")).text == "ok"

    anyio.run(main)
