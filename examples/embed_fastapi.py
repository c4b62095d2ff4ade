"""An engine in a FastAPI application that serves OpenAI's protocol, in the same process and event loop.

python examples/embed_fastapi.py [MODEL] [--port 8000]

curl localhost:8000/v1/chat/completions -H 'Content-Type: application/json' -d '{
    "messages": [{"role": "user", "content": "What is the capital of France?"}], "stream": true}'

A client that disconnects cancels its request. A request that cannot be served gets its error status, streamed
or not: the response begins after the first chunk. uvicorn handles SIGINT and SIGTERM: it waits up to 5
seconds for open responses, then the engine is closed.
"""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import command_line
import msgspec
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from openai_answers import ChatAnswer, TextAnswer, usage
from openai_protocol import ChatBody, CompletionBody, error_body, shaped_error
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from drift_sdk import Chunk, Completion, DriftError, Engine, EngineClosed, EngineConfig, TokenStream

ResultT = TypeVar("ResultT")
CLIENT_CLOSED_REQUEST = 499
SHUTDOWN_TIMEOUT_S = 5  # without a limit, uvicorn would wait for every open stream


class UnknownModel(Exception):
    """The request names a model that this server does not have."""


class EventStream(StreamingResponse):
    """A response of server-sent events that owns its requests.

    When sending ends, for any reason, the requests are cancelled.
    """

    def __init__(self, streams: Sequence[TokenStream], events: AsyncIterator[bytes]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self.streams = streams

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with AsyncExitStack() as owner:
            for stream in self.streams:
                await owner.enter_async_context(stream)
            await super().__call__(scope, receive, send)


def submit(makers: Iterable[Callable[[], TokenStream]]) -> list[TokenStream]:
    """Submit all requests. If one is rejected, the others are cancelled and its error is raised."""
    streams: list[TokenStream] = []
    try:
        for make in makers:
            stream = make()
            streams.append(stream)
    except BaseException:
        cancel(streams)
        raise

    return streams


def cancel(streams: Iterable[TokenStream]) -> None:
    for stream in streams:
        stream.cancel()


async def while_connected(
    request: Request, streams: Sequence[TokenStream], result: Awaitable[ResultT]
) -> ResultT:
    """Wait for a result of the streams. If it fails or the client disconnects, cancel the requests."""

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        cancel(streams)

    watcher = asyncio.create_task(watch())
    try:
        return await result
    except BaseException:
        cancel(streams)
        raise
    finally:
        watcher.cancel()


async def all_of(streams: Sequence[TokenStream]) -> list[Completion]:
    return [await stream for stream in streams]


async def merged(streams: Sequence[TokenStream]) -> AsyncIterator[tuple[int, Chunk]]:
    """The chunks of all streams as they arrive, each with the index of its stream."""
    if len(streams) == 1:
        async for chunk in streams[0]:
            yield 0, chunk
        return

    waiting = {next_of(stream): index for index, stream in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                found = task.result()
                index = waiting.pop(task)
                if found is not None:
                    waiting[next_of(streams[index])] = index
                    yield index, found
    finally:
        for task in waiting:
            task.cancel()
            # exception() marks an error as retrieved, so that asyncio does not log it.
            task.add_done_callback(lambda task: task.cancelled() or task.exception())


def next_of(stream: TokenStream) -> "asyncio.Task[Chunk | None]":
    """A task that waits for the next chunk; None at the end of the stream."""

    async def chunk() -> Chunk | None:
        return await anext(stream, None)

    return asyncio.create_task(chunk())


async def answer(
    request: Request,
    body: ChatBody | CompletionBody,
    streams: Sequence[TokenStream],
    choices: Sequence[ChatAnswer | TextAnswer],
    model: str,
) -> Response:
    """The response to a request: server-sent events or one JSON object, as its body asks."""
    shape, request_id = choices[0], streams[0].request_id
    common = {"id": f"{shape.id_prefix}-{request_id}", "created": int(time.time()), "model": model}
    if body.stream:
        return await streamed_answer(request, body, streams, choices, {**common, "object": shape.chunk_kind})

    return await whole_answer(request, body, streams, choices, {**common, "object": shape.kind})


async def whole_answer(
    request: Request,
    body: ChatBody | CompletionBody,
    streams: Sequence[TokenStream],
    choices: Sequence[ChatAnswer | TextAnswer],
    common: dict[str, Any],
) -> Response:
    """All choices in one JSON object. common: fields that every object of the answer has."""
    completions = await while_connected(request, streams, all_of(streams))
    if any(completion.finish_reason == "cancelled" for completion in completions):
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    written = [
        {"index": index, **choice.whole(completion)}
        for index, (choice, completion) in enumerate(zip(choices, completions, strict=True))
    ]
    counts = usage([completion.usage for completion in completions], body.n)
    return JSONResponse({**common, "choices": written, "usage": counts})


async def streamed_answer(
    request: Request,
    body: ChatBody | CompletionBody,
    streams: Sequence[TokenStream],
    choices: Sequence[ChatAnswer | TextAnswer],
    common: dict[str, Any],
) -> Response:
    """The chunks of all choices as server-sent events."""
    chunks = merged(streams)
    # Nothing is sent before the first chunk: a request that cannot be served raises here, and gets its
    # status.
    first = await while_connected(request, streams, anext(chunks))

    async def event_of(index: int, chunk: Chunk) -> bytes:
        completion = await streams[index] if chunk.finish_reason is not None else None
        return event({**common, "choices": [{"index": index, **choices[index].piece(chunk, completion)}]})

    async def events() -> AsyncIterator[bytes]:
        try:
            yield await event_of(*first)
            async for index, chunk in chunks:
                yield await event_of(index, chunk)

            completions = await all_of(streams)
        except DriftError as error:
            yield event(error_body(error, request.url.path)[1])
            return

        if body.stream_options.include_usage:
            counts = usage([completion.usage for completion in completions], body.n)
            yield event({**common, "choices": [], "usage": counts})
        yield b"data: [DONE]\n\n"

    return EventStream(streams, events())


def event(values: dict[str, Any]) -> bytes:
    """A server-sent event."""
    return b"data: " + msgspec.json.encode(values) + b"\n\n"


def make_app(engine: Engine, model: str) -> FastAPI:
    """The application. It starts the engine when it starts, and closes it at its end.

    model: the name by which clients know the engine's model.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with engine:
            yield

    app = FastAPI(title="drift_sdk", lifespan=lifespan)
    add_answers(app, engine, model)
    add_models(app, model)
    add_status(app, engine)
    add_error_handlers(app)
    return app


def check_model(asked: str | None, model: str) -> None:
    if asked not in (None, model):
        raise UnknownModel(f"model {asked!r}: this server has {model!r}")


def add_answers(app: FastAPI, engine: Engine, model: str) -> None:
    """The endpoints that generate text."""

    @app.post("/v1/chat/completions")
    async def chat(body: ChatBody, request: Request) -> Response:
        check_model(body.model, model)
        messages, tools = [message.plain() for message in body.messages], body.offered_tools
        all_params = [body.sampling(index) for index in range(body.n)]
        streams = submit(partial(engine.chat, messages, params, tools or None) for params in all_params)
        choices = [ChatAnswer(engine, stream.request_id, has_tools=bool(tools)) for stream in streams]
        return await answer(request, body, streams, choices, model)

    @app.post("/v1/completions")
    async def complete(body: CompletionBody, request: Request) -> Response:
        check_model(body.model, model)
        all_params = [body.sampling(index) for index in range(body.n)]
        pairs = itertools.product(body.prompt, all_params)
        streams = submit(partial(engine.generate, prompt, params) for prompt, params in pairs)
        return await answer(request, body, streams, [TextAnswer(engine) for _ in streams], model)


def add_models(app: FastAPI, model: str) -> None:
    """The endpoints that list and describe the model."""
    entry = {"id": model, "object": "model", "created": int(time.time()), "owned_by": "drift_sdk"}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [entry]}

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> dict[str, Any]:
        check_model(name, model)
        return entry


def add_status(app: FastAPI, engine: Engine) -> None:
    """The endpoints for monitoring."""

    @app.get("/metrics")
    async def metrics() -> Response:
        return PlainTextResponse(engine.metrics_text(), media_type="text/plain; version=0.0.4")

    @app.get("/health")
    async def health() -> dict[str, Any]:
        if not engine.is_open:
            raise EngineClosed("the engine is not open")

        stats = engine.stats()
        return {"status": "ok", "num_running": stats.num_running, "num_waiting": stats.num_waiting}


def add_error_handlers(app: FastAPI) -> None:
    """Errors become responses in OpenAI's form."""

    @app.exception_handler(DriftError)
    async def drift_error(request: Request, error: DriftError) -> JSONResponse:
        status, body = error_body(error, request.url.path)
        return JSONResponse(body, status)

    @app.exception_handler(RequestValidationError)
    async def wrong_body(request: Request, error: RequestValidationError) -> JSONResponse:
        found = error.errors()
        param = next((part for part in found[0]["loc"][1:2] if isinstance(part, str)), None)
        # A field that may have several types has an error for each of them.
        places = [".".join(map(str, each["loc"][1:])) or "body" for each in found]
        wrong = "; ".join(f"{place}: {each['msg']}" for place, each in zip(places, found, strict=True))
        return JSONResponse(shaped_error(wrong[:2000], "invalid_request_error", param=param), 400)

    @app.exception_handler(UnknownModel)
    async def unknown_model(request: Request, error: UnknownModel) -> JSONResponse:
        body = shaped_error(str(error), "invalid_request_error", param="model", code="model_not_found")
        return JSONResponse(body, 404)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        return JSONResponse(shaped_error(error.detail, "invalid_request_error"), error.status_code)


def name_of(model: str) -> str:
    """The name that clients use: the file's or folder's name without the path, or the hub id."""
    return Path(model).name.removesuffix(".gguf") if Path(model).exists() else model


async def main(model: str, host: str, port: int, max_queued: int) -> None:
    # Started before the server: if the model cannot be loaded, the program ends with one line.
    async with Engine(model, EngineConfig(max_queued_requests=max_queued)) as engine:
        config = uvicorn.Config(
            make_app(engine, name_of(model)),
            host=host,
            port=port,
            timeout_graceful_shutdown=SHUTDOWN_TIMEOUT_S,
        )
        await uvicorn.Server(config).serve()


if __name__ == "__main__":
    parser = command_line.parser(__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=command_line.whole(0, 65_535), default=8000)
    parser.add_argument(
        "--max-queued",
        type=command_line.whole(1),
        default=256,
        help="waiting requests; more get a 429",
    )
    options = parser.parse_args()
    command_line.run(main, options.model, options.host, options.port, options.max_queued)
