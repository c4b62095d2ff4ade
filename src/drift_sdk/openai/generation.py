"""The samples of an HTTP request, and the responses that carry them: one JSON object or server-sent events.

A client that disconnects cancels its request, whatever the request waits for.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, Protocol, TypeVar

import anyio
import msgspec
from anyio.abc import TaskGroup
from anyio.streams.memory import MemoryObjectSendStream
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from drift_sdk import Chunk, Completion, DriftError, Samples
from drift_sdk.openai.wire import Cancelled

ResultT = TypeVar("ResultT")
Found = tuple[int, Chunk]


class Event(Struct, frozen=True):
    """A server-sent event. name: None where the protocol names no events."""

    data: Mapping[str, Any]
    name: str | None = None

    def encode(self) -> bytes:
        name = b"" if self.name is None else b"event: %b\n" % self.name.encode()
        return b"%bdata: %b\n\n" % (name, msgspec.json.encode(self.data))


DONE = b"data: [DONE]\n\n"


class Answer(Protocol):
    """An answer as a protocol writes it, for one response.

    headers: of the response.
    """

    headers: Mapping[str, str]

    def whole(self, completions: list[Completion]) -> Mapping[str, Any]:
        """The answer as one JSON object."""
        ...

    def begin(self, num_prompt_tokens: int) -> Iterable[Event]:
        """Events before the first chunk. num_prompt_tokens: of all prompts together."""
        ...

    def chunk(self, index: int, chunk: Chunk, completion: Completion | None) -> Iterable[Event]:
        """Events of a chunk of one choice. completion: given with its last chunk."""
        ...

    def end(self, completions: list[Completion]) -> Iterable[Event | bytes]:
        """Events after the last chunk."""
        ...

    def failed(self, error: DriftError) -> Iterable[Event]:
        """Events of a stream that an error ends."""
        ...


class Generation:
    """The samples of an HTTP request: `n` for each of its prompts. Choices are numbered in this order."""

    def __init__(self, makers: Iterable[Callable[[], Samples]]) -> None:
        """Submit all prompts. If one is rejected, the others are cancelled and its error is raised."""
        self._groups: list[Samples] = []
        try:
            for make in makers:
                samples = make()
                self._groups.append(samples)
        except BaseException:
            self.cancel()
            raise

    @property
    def num_choices(self) -> int:
        return sum(map(len, self._groups))

    def cancel(self) -> None:
        for samples in self._groups:
            samples.cancel()

    async def accepted(self) -> int:
        """Wait until all prompts are accepted, and return the number of their tokens; raises the error of one
        that is not accepted."""
        return sum([await samples.accepted() or 0 for samples in self._groups])

    async def completions(self) -> list[Completion]:
        """Wait for the end of all choices. Cancelled if one was cancelled by its id."""
        return [uncancelled(completion) for samples in self._groups for completion in await samples]

    async def completion(self, choice: int) -> Completion:
        """Wait for the end of one choice. Cancelled if it was cancelled by its id."""
        size = len(self._groups[0])
        return uncancelled(await self._groups[choice // size][choice % size])

    async def chunks(self, tasks: TaskGroup) -> AsyncIterator[Found]:
        """The chunks of all choices as they arrive, each with the index of its choice.

        tasks: runs what reads the prompts beside each other."""
        if len(self._groups) == 1:
            async for found in self._groups[0]:
                yield found
            return

        sender, receiver = anyio.create_memory_object_stream[Found | DriftError]()
        with sender, receiver:
            for place, samples in enumerate(self._groups):
                tasks.start_soon(forward, samples, place * len(samples), sender.clone())
            sender.close()
            async for received in receiver:
                if isinstance(received, DriftError):
                    raise received

                yield received

    async def __aenter__(self) -> Generation:
        async with AsyncExitStack() as owner:
            for samples in self._groups:
                await owner.enter_async_context(samples)
            self._owner = owner.pop_all()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._owner.aclose()


def uncancelled(completion: Completion) -> Completion:
    if completion.finish_reason == "cancelled":
        raise Cancelled("the request was cancelled")

    return completion


async def forward(samples: Samples, first: int, sender: MemoryObjectSendStream[Found | DriftError]) -> None:
    """Send the chunks of one prompt's samples, or the error that ends them. first: number of its first
    choice."""
    with sender:
        try:
            async for index, chunk in samples:
                await sender.send((first + index, chunk))
        except DriftError as error:
            await sender.send(error)


async def while_connected(
    receive: Receive, generation: Generation, wait: Callable[[], Awaitable[ResultT]]
) -> ResultT:
    """Wait for a result. If that fails or is cancelled, or the client disconnects, cancel the generation."""

    async def watch() -> None:
        await disconnected(receive)
        generation.cancel()

    error: DriftError | None = None
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(watch)
            try:
                result = await wait()
            except DriftError as caught:  # raised outside of the group, which would wrap it
                error = caught
            tasks.cancel_scope.cancel()
        if error is not None:
            raise error

        return result
    except BaseException:
        generation.cancel()
        raise


async def unless_disconnected(receive: Receive, wait: Callable[[], Awaitable[ResultT]]) -> ResultT:
    """Wait for a result. If the client disconnects, waiting is cancelled and Cancelled raised."""
    results: list[ResultT] = []
    error: DriftError | None = None
    async with anyio.create_task_group() as tasks:

        async def watch() -> None:
            await disconnected(receive)
            tasks.cancel_scope.cancel()

        tasks.start_soon(watch)
        try:
            results.append(await wait())
        except DriftError as caught:  # raised outside of the group, which would wrap it
            error = caught
        tasks.cancel_scope.cancel()
    if error is not None:
        raise error

    if not results:
        raise Cancelled("the client has left")

    return results[0]


async def disconnected(receive: Receive) -> None:
    """Wait until the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def respond(request: Request, generation: Generation, answer: Answer, *, is_streamed: bool) -> Response:
    """The response that carries an answer. Raises the error of a request that cannot be served, streamed or
    not: nothing has been sent then."""
    if is_streamed:
        num_prompt_tokens = await while_connected(request.receive, generation, generation.accepted)
        return EventStream(generation, answer, num_prompt_tokens)

    completions = await while_connected(request.receive, generation, generation.completions)
    return JSONResponse(answer.whole(completions), headers=answer.headers)


class EventStream(Response):
    """A response of server-sent events that owns its generation: when sending ends, for any reason, the
    requests are cancelled."""

    media_type = "text/event-stream"

    def __init__(self, generation: Generation, answer: Answer, num_prompt_tokens: int) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", **answer.headers})
        del self.headers["content-length"]
        self._generation = generation
        self._answer = answer
        self._num_prompt_tokens = num_prompt_tokens

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._generation, anyio.create_task_group() as tasks:

            async def watch() -> None:
                await disconnected(receive)
                tasks.cancel_scope.cancel()

            tasks.start_soon(watch)
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for data in self._events(tasks):
                await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
            tasks.cancel_scope.cancel()

    async def _events(self, tasks: TaskGroup) -> AsyncIterator[bytes]:
        """The encoded events, those of a chunk together."""
        generation, answer = self._generation, self._answer
        try:
            if begun := encoded(answer.begin(self._num_prompt_tokens)):
                yield begun
            async for index, chunk in generation.chunks(tasks):
                completion = await generation.completion(index) if chunk.finish_reason is not None else None
                if data := encoded(answer.chunk(index, chunk, completion)):
                    yield data
            yield encoded(answer.end(await generation.completions()))
        except DriftError as error:
            yield encoded(answer.failed(error))


def encoded(events: Iterable[Event | bytes]) -> bytes:
    return b"".join(event if isinstance(event, bytes) else event.encode() for event in events)
