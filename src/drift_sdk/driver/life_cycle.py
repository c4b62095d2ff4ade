"""Starting and closing an engine, by any number of tasks of any event loops at once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Generic, TypeVar

import anyio
from anyio.lowlevel import checkpoint_if_cancelled

from drift_sdk.driver.loops import Latch, life_cycle_lock, num_forks
from drift_sdk.errors import EngineClosed, ModelLoadError


class Startable(ABC):
    """What serves the requests of an engine between a start and the close after it.

    opened: set when it serves, or with the error that prevented that.
    closed: set when it has released everything, with the error of closing if there was one.

    In a forked child, `is_from_parent` is true, and it does nothing.
    """

    def __init__(self) -> None:
        self.opened: Latch = Latch()
        self.closed: Latch = Latch()
        self._num_forks = num_forks()
        self._num_starters = 0

    @abstractmethod
    def start(self) -> None:
        """Begin to open, without waiting for that. Called once."""

    @abstractmethod
    def close(self, drain_s: float) -> None:
        """Reject new requests, and end once the live ones have ended, after `drain_s` seconds at the latest.
        What is being opened is given up. Returns at once. May be called again, from any thread."""

    @abstractmethod
    def join(self, timeout_s: float | None = None) -> None:
        """Block until the end, `timeout_s` seconds at most (None = no limit)."""

    @property
    @abstractmethod
    def is_closing(self) -> bool:
        """Whether `close` has been called, or it has ended by itself."""

    @property
    def is_from_parent(self) -> bool:
        """Whether it was made by a process that this one is a fork of."""
        return self._num_forks != num_forks()

    @property
    def is_over(self) -> bool:
        """Whether it will do nothing more."""
        return self.is_from_parent or self.closed.is_set

    def add_starter(self) -> bool:
        """Count one more task that wants the engine open. Returns False, and counts nothing, if it is
        closing."""
        with life_cycle_lock():
            self._num_starters += not self.is_closing
            return not self.is_closing

    def remove_starter(self) -> bool:
        """Called when a task that `add_starter` has counted is cancelled. If it was the only one, `close` is
        called and True is returned."""
        with life_cycle_lock():
            self._num_starters -= 1
            if self._num_starters:
                return False

            self.close(0.0)
            return True


def starting_error(error: Exception) -> ModelLoadError:
    """The ModelLoadError for an error of the system, which lacks something that an engine needs."""
    return ModelLoadError(f"the engine cannot be started: {error}")


StartableT = TypeVar("StartableT", bound=Startable)


class LifeCycle(Generic[StartableT]):
    """The driver of an engine: `driver`, None while the engine is closed.

    The first `start` makes and starts a driver, and later ones share it. While a driver is closing, `start`
    waits for its end and then makes a new one. `was_started`: whether there has ever been a driver.
    """

    def __init__(self) -> None:
        self.driver: StartableT | None = None
        self.was_started: bool = False

    async def start(self, make_driver: Callable[[], StartableT]) -> None:
        """Wait until a driver has opened its model. Raises the error of opening, or EngineClosed if it is
        closed meanwhile. If the task is cancelled, the driver is closed unless another task starts it too."""
        try:
            await self._start(make_driver)
        except OSError as error:  # of the first use of an event loop, for which anyio imports a module
            raise starting_error(error) from error

    async def _start(self, make_driver: Callable[[], StartableT]) -> None:
        driver = await self._share_driver(make_driver)
        try:
            with anyio.CancelScope():  # keeps a pending task, which asyncio reports if the exit destroys it
                error = await driver.opened.wait()
                await checkpoint_if_cancelled()
        except GeneratorExit:  # the coroutine is destroyed, and cannot wait
            driver.remove_starter()
            raise
        except BaseException:
            if driver.remove_starter():
                await self._finish(driver)
            raise

        if error is not None:
            await self._finish(driver)
            raise error

        if driver.is_closing:
            raise EngineClosed("the engine was closed while it was starting")

    async def aclose(self, drain_s: float) -> None:
        """Close the driver, if there is one, and wait for its end. Live requests may go on for `drain_s`
        seconds. Raises the error of closing."""
        driver = self.driver
        if driver is None:
            return

        if driver.is_from_parent:  # there is nothing to close in this process
            self.driver = None
            return

        driver.close(drain_s)
        error = await self._finish(driver)
        if error is not None:
            raise error

    async def _share_driver(self, make_driver: Callable[[], StartableT]) -> StartableT:
        """The driver that is starting or open, counted as wanted by this task; a new one if there is none."""
        while True:
            with life_cycle_lock():
                driver = self.driver
                if driver is None or driver.is_over:
                    driver = self.driver = make_driver()
                    self.was_started = True
                    driver.add_starter()
                    try:
                        driver.start()
                    except BaseException as error:
                        self.driver = None
                        driver.close(0.0)
                        if isinstance(error, RuntimeError):  # the process may not have more threads
                            raise starting_error(error) from error

                        raise

                    return driver

                if driver.add_starter():
                    return driver

            await driver.closed.wait()

    async def _finish(self, driver: StartableT) -> BaseException | None:
        """Wait for the end of a driver that is closing, and forget it. Returns the error of closing."""
        try:
            return await driver.closed.wait_shielded()
        finally:
            driver.join()
            with life_cycle_lock():
                if self.driver is driver:  # another task may have started the engine again
                    self.driver = None
