"""The command `warm`: compiles the kernels that serving a model needs, before it is served."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from msgspec import Struct

from drift_sdk.cli.terminal import hide_progress, show_progress
from drift_sdk.config import EngineConfig
from drift_sdk.engine import Engine
from drift_sdk.progress import Progress

__all__ = ["Warmed", "run_warm", "warm"]


class Warmed(Struct, frozen=True, kw_only=True):
    """An engine that was started and closed so that its kernels are compiled.

    executor:      how it runs steps.
    start_seconds: stages of the start and the seconds that each took, in order.
    kernel_cache:  the folder that holds the compiled kernels; None if the executor has none.
    """

    executor: str
    start_seconds: tuple[tuple[str, float], ...]
    kernel_cache: Path | None

    def text(self) -> str:
        """A line for each stage, and where the kernels are."""
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
    """Start an engine, which compiles every kernel that is not in the cache, and close it. Raises what
    starting the engine raises."""
    async with Engine(model, config, on_progress=on_progress) as engine:
        executor, seconds = engine.executor, engine.stats().start_seconds

    return Warmed(executor=executor, start_seconds=seconds, kernel_cache=kernel_cache(executor))


async def run_warm(model: str | Path, config: EngineConfig) -> int:
    """Run `warm` and print its outcome; the exit status, always 0."""
    warmed = await warm(model, config, show_progress)
    hide_progress()
    print(warmed.text())
    return 0


def kernel_cache(executor: str) -> Path | None:
    """The folder of the kernels that an executor compiles; None if it compiles none."""
    if executor != "graph":
        return None

    from drift_sdk._kernels.launch.kernel import cache_folder  # imported here, for it needs Triton

    return cache_folder()
