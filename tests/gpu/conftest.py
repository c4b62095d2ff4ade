"""Every launch of these tests is checked: a repeated one uses the kernel that Triton would choose."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from triton.runtime.jit import JITFunction

from drift_sdk._kernels.launch.kernel import DEFAULT_OPTIONS, RepeatedKernel


@pytest.fixture(scope="session", autouse=True)
def launches_as_triton_chooses() -> Iterator[None]:
    run = RepeatedKernel.run

    def checked(kernel: Any, *values: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        compiled = run(kernel, *values, grid=grid, warmup=warmup, **options)
        if not warmup and compiled is not None:
            given = DEFAULT_OPTIONS | options
            chosen = JITFunction.run(kernel, *values, grid=grid, warmup=True, **given)
            assert compiled is chosen, f"{kernel.__name__} {values} {options}"
        return compiled

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RepeatedKernel, "run", checked)
        yield
