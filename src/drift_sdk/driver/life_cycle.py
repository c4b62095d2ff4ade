"""Starting and closing an engine, by any number of tasks of any event loops at once."""

from __future__ import annotations

from collections.abc import Callable

from anyio.lowlevel import checkpoint_if_cancelled

from drift_sdk.driver.driver import Driver
from drift_sdk.driver.process_hooks import life_cycle_lock
from drift_sdk.errors import EngineClosed

__all__ = ["LifeCycle"]


class LifeCycle:
    """The driver of an engine: `driver`, None while the engine is closed.

    The first `start` makes and starts a driver, and later ones share it. While a driver is closing, `start`
    waits for its end and then makes a new one. `was_started`: whether there has ever been a driver.
    """

    def __init__(self) -> None:
        self.driver: Driver | None = None
        self.was_started = False

    async def start(self, make_driver: Callable[[], Driver]) -> None:
        """Wait until a driver has opened its model. Raises the error of opening, or EngineClosed if it is
        closed meanwhile. If the task is cancelled, the driver is closed unless another task starts it too."""
        driver = await self._share_driver(make_driver)
        try:
            error = await driver.opened.wait_shielded()
            await checkpoint_if_cancelled()  # anyio's and trio's cancellation was held off until here
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
        seconds."""
        driver = self.driver
        if driver is None:
            return

        if driver.is_from_parent:  # there is nothing to close in this process
            self.driver = None
            return

        driver.close(drain_s)
        await self._finish(driver)

    async def _share_driver(self, make_driver: Callable[[], Driver]) -> Driver:
        """The driver that is starting or open, counted as wanted by this task; a new one if there is none."""
        while True:
            with life_cycle_lock():
                driver = self.driver
                if driver is None or driver.is_over:
                    driver = self.driver = make_driver()
                    self.was_started = True
                    driver.add_starter()
                    driver.start()
                    return driver

                if driver.add_starter():
                    return driver

            await driver.closed.wait()

    async def _finish(self, driver: Driver) -> None:
        """Wait for the end of a driver that is closing, and forget it."""
        try:
            await driver.closed.wait_shielded()
        finally:
            driver.join()
            with life_cycle_lock():
                if self.driver is driver:  # another task may have started the engine again
                    self.driver = None
