"""Starting and closing, by any number of tasks of any loops at once."""

from __future__ import annotations

from collections.abc import Callable

from anyio.lowlevel import checkpoint_if_cancelled

from drift_sdk.driver.driver import Driver
from drift_sdk.driver.process_hooks import life_cycle_lock
from drift_sdk.errors import EngineClosed

__all__ = ["LifeCycle"]


class LifeCycle:
    """Which driver an engine has; None while it is closed.

    A driver is started by the first `start`; later ones join in. Once it is closing nobody joins: a `start`
    waits for the end and then makes a new one.
    """

    def __init__(self) -> None:
        self.driver: Driver | None = None

    async def start(self, make_driver: Callable[[], Driver]) -> None:
        driver = await self._join(make_driver)
        try:
            error = await driver.opened.wait_shielded()
            await checkpoint_if_cancelled()  # anyio's and trio's cancellation, which has been held off
        except BaseException:
            if driver.leave():
                await self._finish(driver)
            raise

        if error is not None:
            await self._finish(driver)
            raise error

        if driver.is_closing:
            raise EngineClosed("the engine was closed while it was starting")

    async def aclose(self, drain_s: float) -> None:
        driver = self.driver
        if driver is None:
            return

        if driver.is_foreign:  # the parent's: there is nothing to close in this process
            self.driver = None
            return

        driver.close(drain_s)
        await self._finish(driver)

    async def _join(self, make_driver: Callable[[], Driver]) -> Driver:
        while True:
            with life_cycle_lock():
                driver = self.driver
                if driver is None or driver.is_over:
                    driver = self.driver = make_driver()
                    driver.join_in()
                    driver.start()
                    return driver

                if driver.join_in():
                    return driver

            await driver.closed.wait()

    async def _finish(self, driver: Driver) -> None:
        """Wait for the end of a driver that is closing."""
        try:
            await driver.closed.wait_shielded()
        finally:
            driver.join()
            with life_cycle_lock():
                if self.driver is driver:  # another task may have started the engine anew meanwhile
                    self.driver = None
