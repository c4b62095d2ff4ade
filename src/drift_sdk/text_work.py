"""What takes a tokenizer or a grammar, done beside the engine's thread and the caller's loop."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from drift_sdk.commands import Command, Continue, Submit
from drift_sdk.errors import DriftError, EngineClosed
from drift_sdk.request import ModelText, Request

__all__ = ["TextWork"]


class TextWork:
    """Prepares requests and follows their constraints; the outcome goes to the engine's thread by `tell`.

    Two threads, so that a long prompt does not hold up a grammar.
    """

    def __init__(self, tell: Callable[[Command], None]) -> None:
        self._tell = tell
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="drift-text")

    def prepare(self, request: Request, model_text: ModelText) -> None:
        def work() -> None:
            self._tell(Submit(request, attempt(request, lambda: request.prepare(model_text))))

        try:
            self._threads.submit(work)
        except RuntimeError:  # shut down since
            raise EngineClosed("the engine was closed") from None

    def advance(self, request: Request, token_ids: tuple[int, ...]) -> None:
        def work() -> None:
            self._tell(Continue(request, attempt(request, lambda: request.advance(token_ids))))

        self._threads.submit(work)

    def close(self) -> None:
        """Drop what has not begun and wait for the rest."""
        self._threads.shutdown(wait=True, cancel_futures=True)


def attempt(request: Request, work: Callable[[], None]) -> DriftError | None:
    """Do some of a request's work; what its stream is told if that fails."""
    try:
        work()
    except DriftError as error:
        return error
    except Exception as cause:
        failure = DriftError(f"request {request.request_id} could not be prepared: {cause!r}")
        failure.__cause__ = cause
        return failure

    return None
