"""An engine inside a FastAPI application, behind OpenAI's protocol: same process, same event loop.

python examples/embed_fastapi.py [MODEL] [--port 8000]

curl localhost:8000/v1/chat/completions -H 'Content-Type: application/json' -d '{
    "messages": [{"role": "user", "content": "What is the capital of France?"}], "stream": true}'

A client that goes away frees its request. Signals are uvicorn's to handle.
"""

import argparse
import asyncio
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import smollm2
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from openai_protocol import ChatAnswer, ChatBody, CompletionBody, TextAnswer, error_body, shaped_error, usage
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from drift_sdk import Chunk, DriftError, Engine, EngineClosed, EngineConfig, TokenStream

ResultT = TypeVar("ResultT")
CLIENT_CLOSED_REQUEST = 499


class EventStream(StreamingResponse):
    """Owns the request while it is sent: however sending ends, the request ends with it."""

    def __init__(self, stream: TokenStream, events: AsyncIterator[bytes]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self.stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self.stream:
            await super().__call__(scope, receive, send)


async def while_connected(request: Request, stream: TokenStream, result: Awaitable[ResultT]) -> ResultT:
    """Wait for a result of the stream; if the client leaves meanwhile, cancel the request."""

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        stream.cancel()

    watcher = asyncio.create_task(watch())
    try:
        return await result
    finally:
        watcher.cancel()


async def answer(
    request: Request,
    body: ChatBody | CompletionBody,
    stream: TokenStream,
    shape: ChatAnswer | TextAnswer,
    model: str,
) -> Response:
    common = {"id": f"{shape.id_prefix}-{stream.request_id}", "created": int(time.time()), "model": model}
    if not body.stream:
        completion = await while_connected(request, stream, stream)
        if completion.finish_reason == "cancelled":
            return Response(status_code=CLIENT_CLOSED_REQUEST)

        choice = {"index": 0, **shape.whole(completion), "finish_reason": completion.finish_reason}
        whole = {**common, "object": shape.kind, "choices": [choice], "usage": usage(completion.usage)}
        return JSONResponse(whole)

    common["object"] = shape.chunk_kind
    # A request that cannot be served still gets its status: nothing is sent before the first chunk.
    first = await while_connected(request, stream, anext(stream))

    def event_of(chunk: Chunk, *, is_first: bool = False) -> bytes:
        piece = shape.piece(chunk, is_first=is_first)
        return event({**common, "choices": [{"index": 0, **piece, "finish_reason": chunk.finish_reason}]})

    async def events() -> AsyncIterator[bytes]:
        yield event_of(first, is_first=True)
        try:
            async for chunk in stream:
                yield event_of(chunk)

            completion = await stream
        except DriftError as error:
            yield event(error_body(error, request.url.path)[1])
            return

        if body.stream_options is not None and body.stream_options.include_usage:
            yield event({**common, "choices": [], "usage": usage(completion.usage)})
        yield b"data: [DONE]\n\n"

    return EventStream(stream, events())


def event(values: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(values) + b"\n\n"


def make_app(engine: Engine, model: str) -> FastAPI:
    """The application; the engine lives as long as it does."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with engine:
            yield

    app = FastAPI(title="drift_sdk", lifespan=lifespan)
    started_at = int(time.time())

    def check_model(asked: str | None) -> None:
        if asked not in (None, model):
            raise HTTPException(404, f"model {asked!r}: this server has {model!r}")

    @app.post("/v1/chat/completions")
    async def chat(body: ChatBody, request: Request) -> Response:
        check_model(body.model)
        stream = engine.chat([message.plain() for message in body.messages], body.sampling())
        return await answer(request, body, stream, ChatAnswer(engine), model)

    @app.post("/v1/completions")
    async def complete(body: CompletionBody, request: Request) -> Response:
        check_model(body.model)
        stream = engine.generate(body.prompt, body.sampling())
        return await answer(request, body, stream, TextAnswer(engine), model)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        entry = {"id": model, "object": "model", "created": started_at, "owned_by": "drift_sdk"}
        return {"object": "list", "data": [entry]}

    @app.get("/metrics")
    async def metrics() -> Response:
        return PlainTextResponse(engine.metrics_text(), media_type="text/plain; version=0.0.4")

    @app.get("/health")
    async def health() -> dict[str, Any]:
        if not engine.is_open:
            raise EngineClosed("the engine is not open")

        stats = engine.stats()
        return {"status": "ok", "num_running": stats.num_running, "num_waiting": stats.num_waiting}

    @app.exception_handler(DriftError)
    async def drift_error(request: Request, error: DriftError) -> JSONResponse:
        status, body = error_body(error, request.url.path)
        return JSONResponse(body, status)

    @app.exception_handler(RequestValidationError)
    async def wrong_body(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        param = next((part for part in first["loc"][1:2] if isinstance(part, str)), None)
        return JSONResponse(
            shaped_error(f"{param or 'body'}: {first['msg']}", "invalid_request_error", param=param), 400
        )

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        return JSONResponse(shaped_error(error.detail, "invalid_request_error"), error.status_code)

    return app


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?", help="a folder, a .gguf file or a hub id (default: SmolLM2-135M)")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--max-queued", type=int, default=256, help="more waiting requests get a 429")
    options = parser.parse_args()

    model = options.model or str(smollm2.path())
    engine = Engine(model, EngineConfig(max_queued_requests=options.max_queued))
    app = make_app(engine, Path(model).stem)
    uvicorn.run(app, host=options.host, port=options.port, timeout_graceful_shutdown=5)


if __name__ == "__main__":
    main()
