"""Compiles the kernels that serving a model needs, before it is served."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from msgspec import Struct

from drift_sdk.config import EngineConfig
from drift_sdk.engine import Engine
from drift_sdk.progress import Progress

__all__ = ["Warmed", "warm"]


class Warmed(Struct, frozen=True, kw_only=True):
    """A start for the kernels' sake. `kernel_cache`: the folder they lie in; None where there are none."""

    executor: str
    start_seconds: tuple[tuple[str, float], ...]
    kernel_cache: Path | None

    def text(self) -> str:
        """For people."""
        width = max(len(stage) for stage, _ in self.start_seconds)
        lines = [f"{stage:<{width}}  {seconds:7.2f} s" for stage, seconds in self.start_seconds]
        if self.kernel_cache is None:
            lines.append(f"nothing to compile: the {self.executor} executor runs torch's own kernels")
        else:
            lines.append(f"kernels are in {self.kernel_cache}")

        return "\n".join(lines)


async def warm(
    model: str | Path, config: EngineConfig, on_progress: Callable[[Progress], None] | None = None
) -> Warmed:
    """Start an engine, which compiles whatever is not in the cache, and close it."""
    async with Engine(model, config, on_progress=on_progress) as engine:
        executor, seconds = engine.executor, engine.stats().start_seconds

    return Warmed(executor=executor, start_seconds=seconds, kernel_cache=kernel_cache(executor))


def kernel_cache(executor: str) -> Path | None:
    if executor != "graph":
        return None

    from drift_sdk._kernels.common.launching import cache_folder  # only here, for it needs Triton

    return cache_folder()
