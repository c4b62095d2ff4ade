"""HostLink: the other process of a remote engine, from its start to its end."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable

import anyio

from drift_sdk.driver.life_cycle import Startable
from drift_sdk.driver.loops import LoopThread
from drift_sdk.driver.process_hooks import close_at_exit
from drift_sdk.driver.prompts import ModelText
from drift_sdk.errors import EngineClosed, ModelLoadError
from drift_sdk.remote.connection import Connection
from drift_sdk.remote.messages import Channel, HostLost, HostUnavailable, Opened

__all__ = ["HostLink"]

CLOSE_S = 30.0
"""Most seconds, after those of draining, that closing waits for the engine in the other process. A process
that does not answer, because it is stopped or hangs, is then ended."""
FLUSH_S = 10.0
"""Most seconds that closing waits for the last news of a closed engine."""


class HostLink(Startable):
    """What a `Driver` is to an `Engine`, for an engine in another process: it starts the process and the
    engine there, follows its news, and ends it. `start` and `close` may be called from any thread; everything
    else happens on `loop`.

    open_channel: starts the process. If it is cancelled, it leaves none.
    model:        the engine's, for messages.
    max_queued:   of the engine's config.

    channel:    None until the process has been started.
    host:       what is known of the engine; None until it is open, as are connection and model_text.
    connection: carries the requests.
    """

    def __init__(
        self,
        open_channel: Callable[[], Awaitable[Channel]],
        loop: LoopThread,
        model: str,
        max_queued: int | None,
    ) -> None:
        super().__init__()
        self.loop = loop
        self.channel: Channel | None = None
        self.host: Opened | None = None
        self.connection: Connection | None = None
        self.model_text: ModelText | None = None
        self._open_channel = open_channel
        self._model = model
        self._max_queued = max_queued
        self._is_closing = False
        self._scope: anyio.CancelScope | None = None  # of opening, then of serving
        self._close_error: Exception | None = None
        self._has_ended = threading.Event()
        self._at_exit = AtExit(self)

    def start(self) -> None:
        close_at_exit(self._at_exit)
        self.loop.spawn(self._run)

    def close(self, drain_s: float) -> None:
        if not self.is_from_parent:
            self._reject_requests()
            self.loop.spawn(self._close_host, drain_s)

    def end(self) -> None:
        """End the other process, whatever it does, and the requests that it has. Returns at once; from any
        thread."""
        if not self.is_from_parent:
            self._reject_requests()
            self.loop.post(self._cancel)

    def join(self, timeout_s: float | None = None) -> None:
        self._has_ended.wait(timeout_s)

    @property
    def is_closing(self) -> bool:
        return self._is_closing

    @property
    def is_open(self) -> bool:
        """Whether requests are admitted, as far as is known here."""
        connection = self.connection
        if self.is_from_parent or self._is_closing or connection is None:
            return False

        return connection.is_open

    def add_starter(self) -> bool:
        """As of every `Startable`. An engine that has failed is ended, so that another one can be started."""
        if self.connection is not None and not self.connection.is_open and not self._is_closing:
            self.end()
        return super().add_starter()

    def _reject_requests(self) -> None:
        self._is_closing = True
        if self.connection is not None:
            self.connection.close()

    def _cancel(self) -> None:
        if self._scope is not None:
            self._scope.cancel()

    async def _run(self) -> None:
        """Start the other process, follow its news, and end it."""
        try:
            await self._open()
            assert self.connection is not None
            with anyio.CancelScope() as self._scope:
                await self.connection.follow()
        except Exception as error:
            self._is_closing = True  # before the tasks that start it go on
            self.opened.set(error)
        finally:
            self._is_closing = True
            try:
                if self.channel is not None:
                    await self.channel.kill()
            finally:
                self._has_ended.set()
                self.closed.set(self._close_error)

    async def _open(self) -> None:
        """Start the other process and the engine there. ModelLoadError or ConfigError if that fails,
        EngineClosed if the link is closed meanwhile."""
        with anyio.CancelScope() as self._scope:
            if not self._is_closing:
                self.channel = await self._open_channel()
                try:
                    self.host = await self.channel.call("start")
                except (HostLost, HostUnavailable) as error:
                    raise ModelLoadError(
                        f"{self._model}: the process ended while it started: {error}"
                    ) from error
        host = self.host
        if self._is_closing or self.channel is None or host is None:
            raise EngineClosed("the engine was closed while it was starting")

        self.model_text = ModelText(
            tokenizer=host.tokenizer,
            chat_template=None,  # conversations are rendered by the host
            eos_token_ids=host.eos_token_ids,
            max_model_len=host.kind.max_model_len,
            vocab_size=host.vocab_size,
            default_params=host.kind.default_params,
            has_drafts=host.has_drafts,
        )
        limit = None if self._max_queued is None else host.num_slots + self._max_queued
        self.connection = Connection(self.channel, host.metrics, self.loop, limit)
        self.opened.set()

    async def _close_host(self, drain_s: float) -> None:
        """Close the engine there, and then end the other process. What is being opened is given up."""
        connection = self.connection
        if connection is None or self.channel is None:
            self._cancel()
            return

        connection.close()  # it may have been opened since the link was closed
        try:
            with anyio.move_on_after(drain_s + CLOSE_S):
                await self.channel.call("aclose", drain_s)
                with anyio.move_on_after(FLUSH_S):
                    await connection.ended.wait()
        except (HostLost, HostUnavailable):
            pass  # it is ended
        except Exception as error:
            self._close_error = error
        finally:
            self._cancel()


class AtExit:
    """Ends the other process of a link at the interpreter's exit, without closing the engine there."""

    def __init__(self, link: HostLink) -> None:
        self._link = link

    def close(self, drain_s: float) -> None:
        self._link.end()

    def join(self, timeout_s: float | None = None) -> None:
        self._link.join(timeout_s)
