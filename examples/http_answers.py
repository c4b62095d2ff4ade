"""HTTP responses to generation requests: one JSON object or server-sent events.

A client that disconnects cancels its request, whatever the request waits for.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, TypeVar

import msgspec
from fastapi import Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from openai_answers import ChatAnswer, TextAnswer
from openai_protocol import ChatBody, CompletionBody, error_body
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from drift_sdk import Chunk, Completion, DriftError, Samples, Usage

ResultT = TypeVar("ResultT")
Found = tuple[int, Chunk]
Counter = Callable[[Sequence[Usage]], dict[str, Any]]
CLOSE = {"Connection": "close"}
CLIENT_CLOSED_REQUEST = 499
MAX_BODY_BYTES = 2**25
"""Largest body of a request; a larger one gets a 413. 32 MiB are about eight million tokens of text."""
BODY_TIMEOUT_S = 60.0
"""Most seconds until a body has arrived; a slower one gets a 408."""


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

    async def accepted(self) -> None:
        """Wait until all prompts are accepted; raises the error of one that is not."""
        for samples in self._groups:
            await samples.accepted()

    async def completions(self) -> list[Completion]:
        return [completion for samples in self._groups for completion in await samples]

    async def completion(self, choice: int) -> Completion:
        size = len(self._groups[0])
        return await self._groups[choice // size][choice % size]

    async def chunks(self) -> AsyncIterator[Found]:
        """The chunks of all choices as they arrive, each with the index of its choice."""
        if len(self._groups) == 1:
            async for found in self._groups[0]:
                yield found
            return

        waiting = {next_of(samples): place for place, samples in enumerate(self._groups)}
        try:
            while waiting:
                done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    next_found = task.result()
                    place = waiting.pop(task)
                    if next_found is not None:
                        samples = self._groups[place]
                        waiting[next_of(samples)] = place
                        yield place * len(samples) + next_found[0], next_found[1]
        finally:
            for task in waiting:
                task.cancel()
                # exception() marks an error as retrieved, so that asyncio does not log it.
                task.add_done_callback(lambda task: task.cancelled() or task.exception())

    async def __aenter__(self) -> "Generation":
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


def next_of(samples: Samples) -> "asyncio.Task[Found | None]":
    """A task that waits for the next chunk; None at the end."""

    async def chunk() -> Found | None:
        return await anext(samples, None)

    return asyncio.create_task(chunk())


class LimitedBodies:
    """Middleware that ends requests whose body is larger than `MAX_BODY_BYTES`, since it is read into memory,
    or takes longer than `BODY_TIMEOUT_S` to arrive."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        num_bytes, is_whole = 0, False
        deadline = asyncio.get_running_loop().time() + BODY_TIMEOUT_S

        async def limited() -> Message:
            nonlocal num_bytes, is_whole
            try:
                async with asyncio.timeout_at(None if is_whole else deadline):
                    message = await receive()
            except TimeoutError as error:
                raise HTTPException(408, f"the body took over {BODY_TIMEOUT_S} s to arrive", CLOSE) from error

            is_whole = not message.get("more_body", False)
            num_bytes += len(message.get("body", b""))
            if num_bytes > MAX_BODY_BYTES:
                raise HTTPException(413, f"the body is larger than {MAX_BODY_BYTES} bytes", CLOSE)

            return message

        await self._app(scope, limited, send)


class EventStream(StreamingResponse):
    """A response of server-sent events that owns its generation: when sending ends, for any reason, the
    requests are cancelled."""

    def __init__(self, generation: Generation, events: AsyncIterator[bytes], headers: dict[str, str]) -> None:
        headers = {"Cache-Control": "no-cache", **headers}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self.generation = generation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self.generation:
            await super().__call__(scope, receive, send)


async def while_connected(request: Request, generation: Generation, result: Awaitable[ResultT]) -> ResultT:
    """Wait for a result. If it fails or the client disconnects, cancel the generation."""

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        generation.cancel()

    watcher = asyncio.create_task(watch())
    try:
        return await result
    except BaseException:
        generation.cancel()
        raise
    finally:
        watcher.cancel()


async def whole_answer(
    request: Request,
    body: ChatBody | CompletionBody,
    generation: Generation,
    choices: Sequence[ChatAnswer | TextAnswer],
    common: dict[str, Any],
    count: Counter,
) -> Response:
    """All choices in one JSON object. common: fields that every object of the answer has. count: makes the
    JSON of all choices' token counts."""
    completions = await while_connected(request, generation, generation.completions())
    if any(completion.finish_reason == "cancelled" for completion in completions):
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    written = [
        {"index": index, **choice.whole(completion)}
        for index, (choice, completion) in enumerate(zip(choices, completions, strict=True))
    ]
    counts = count([completion.usage for completion in completions])
    values = {**common, "object": choices[0].kind, "choices": written, "usage": counts}
    return JSONResponse(values, headers=id_header(common))


async def streamed_answer(
    request: Request,
    body: ChatBody | CompletionBody,
    generation: Generation,
    choices: Sequence[ChatAnswer | TextAnswer],
    common: dict[str, Any],
    count: Counter,
) -> Response:
    """The chunks of all choices as server-sent events. common, count: as of `whole_answer`."""
    # Nothing is sent before: a request that cannot be served raises here, and gets its status.
    await while_connected(request, generation, generation.accepted())
    common = {**common, "object": choices[0].chunk_kind}

    async def events() -> AsyncIterator[bytes]:
        try:
            async for index, chunk in generation.chunks():
                is_last = chunk.finish_reason is not None
                completion = await generation.completion(index) if is_last else None
                for piece in choices[index].pieces(chunk, completion):
                    yield event({**common, "choices": [{"index": index, **piece}]})

            completions = await generation.completions()
        except DriftError as error:
            yield event(error_body(error, request.state.error_names)[1])
            return

        if body.stream_options.include_usage:
            counts = count([completion.usage for completion in completions])
            yield event({**common, "choices": [], "usage": counts})
        yield b"data: [DONE]\n\n"

    return EventStream(generation, events(), id_header(common))


def event(values: dict[str, Any]) -> bytes:
    """A server-sent event."""
    return b"data: " + msgspec.json.encode(values) + b"\n\n"


def id_header(common: dict[str, Any]) -> dict[str, str]:
    """The header in which clients look for the id of their request, which is also in the engine's log."""
    return {"x-request-id": common["id"]}
