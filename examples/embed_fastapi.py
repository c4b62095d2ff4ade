"""An engine in a FastAPI application that serves OpenAI's protocol, in the same process and event loop.

python examples/embed_fastapi.py [MODEL] [--port 8000]

curl localhost:8000/v1/chat/completions -H 'Content-Type: application/json' -d '{
    "messages": [{"role": "user", "content": "What is the capital of France?"}], "stream": true}'

A client that disconnects cancels its request. A request that cannot be served gets its error status, streamed
or not: the response begins when the engine has accepted the request. On SIGINT and SIGTERM the server stops
listening, and open answers have --drain seconds to end.

http_server.py has the shutdown, http_answers.py the responses, openai_protocol.py the requests and errors,
openai_fields.py their fields, openai_answers.py the JSON of answers.
"""

import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import command_line
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse
from http_answers import Generation, LimitedBodies, streamed_answer, whole_answer
from http_server import DrainingServer, LimitedHeads
from openai_answers import ChatAnswer, TextAnswer, usage
from openai_protocol import ChatBody, CompletionBody, error_body, shaped_error
from starlette.exceptions import HTTPException

from drift_sdk import DriftError, Engine, EngineClosed, EngineConfig

CLOSE_TIMEOUT_S = 5
"""Seconds that a client has to read the rest of its answer after the engine has been closed."""


class UnknownModel(Exception):
    """The request names a model that this server does not have."""


def make_app(engine: Engine, model: str, *, shows_cached_tokens: bool = True) -> FastAPI:
    """The application. It starts the engine when it starts, and closes it at its end.

    model:               the name by which clients know the engine's model.
    shows_cached_tokens: answers say how many tokens of the prompt were cached. Clients who do not trust each
                         other should not see it, unless each has its own `cache_salt`.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with engine:
            yield

    app = FastAPI(title="drift_sdk", lifespan=lifespan)
    app.add_middleware(LimitedBodies)
    add_answers(app, engine, model, shows_cached_tokens)
    add_models(app, model)
    add_status(app, engine)
    add_error_handlers(app)
    return app


def check_model(asked: str | None, model: str) -> None:
    if asked not in (None, model):
        raise UnknownModel(f"model {asked!r}: this server has {model!r}")


def add_answers(app: FastAPI, engine: Engine, model: str, shows_cached_tokens: bool) -> None:
    """The endpoints that generate text."""

    @app.post("/v1/chat/completions")
    async def chat(body: ChatBody, request: Request) -> Response:
        check_model(body.model, model)
        request.state.error_names = body.error_names()
        request_id, params = new_id(ChatAnswer, body), body.sampling(engine.default_params)
        submit = partial(
            engine.samples,
            [message.plain() for message in body.messages],
            body.n,
            params,
            body.offered_tools,
            body.template_args,
            tool_choice=body.choice_of_tools,
            continue_final=body.continue_final_message,
            request_id=request_id,
        )
        choices = [
            ChatAnswer(engine, is_forced=body.is_call_forced, max_calls=body.max_calls) for _ in range(body.n)
        ]
        return await answer(request, body, Generation([submit]), choices, request_id)

    @app.post("/v1/completions")
    async def complete(body: CompletionBody, request: Request) -> Response:
        check_model(body.model, model)
        request.state.error_names = body.error_names()
        request_id, params = new_id(TextAnswer, body), body.sampling(engine.default_params)
        generation = Generation(
            partial(engine.samples, prompt, body.n, params, request_id=f"{request_id}-{place}")
            for place, prompt in enumerate(body.prompt)
        )
        choices = [TextAnswer(engine) for _ in range(generation.num_choices)]
        return await answer(request, body, generation, choices, request_id)

    async def answer(
        request: Request,
        body: ChatBody | CompletionBody,
        generation: Generation,
        choices: Sequence[ChatAnswer | TextAnswer],
        request_id: str,
    ) -> Response:
        common = {"id": request_id, "created": int(time.time()), "model": model}
        respond = streamed_answer if body.stream else whole_answer
        count = partial(usage, choices_per_prompt=body.n, shows_cached_tokens=shows_cached_tokens)
        return await respond(request, body, generation, choices, common, count)


def new_id(shape: type[ChatAnswer | TextAnswer], body: ChatBody | CompletionBody) -> str:
    """A request id: of the answer, and of the request in the engine."""
    return f"{shape.id_prefix}-{body.request_id or uuid.uuid4().hex}"


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
        status = "asleep" if stats.is_asleep else "paused" if stats.is_paused else "ok"
        return {"status": status, "num_running": stats.num_running, "num_waiting": stats.num_waiting}


def add_error_handlers(app: FastAPI) -> None:
    """Errors become responses in OpenAI's form."""

    @app.exception_handler(DriftError)
    async def drift_error(request: Request, error: DriftError) -> JSONResponse:
        status, body = error_body(error, getattr(request.state, "error_names", {}))
        return JSONResponse(body, status)

    @app.exception_handler(RequestValidationError)
    async def wrong_body(request: Request, error: RequestValidationError) -> JSONResponse:
        found = error.errors()
        param = next((part for part in found[0]["loc"][1:2] if isinstance(part, str)), None)
        # A field that may have several types has an error for each of them.
        places = [
            "body" if each["type"] == "json_invalid" else ".".join(map(str, each["loc"][1:])) or "body"
            for each in found
        ]
        wrong = "; ".join(f"{place}: {each['msg']}" for place, each in zip(places, found, strict=True))
        return JSONResponse(shaped_error(wrong[:2000], "invalid_request_error", param=param), 400)

    @app.exception_handler(UnknownModel)
    async def unknown_model(request: Request, error: UnknownModel) -> JSONResponse:
        body = shaped_error(str(error), "invalid_request_error", param="model", code="model_not_found")
        return JSONResponse(body, 404)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        body = shaped_error(error.detail, "invalid_request_error")
        return JSONResponse(body, error.status_code, headers=error.headers)


def name_of(model: str) -> str:
    """The name that clients use: the file's or folder's name without the path, or the hub id."""
    return Path(model).name.removesuffix(".gguf") if Path(model).exists() else model


async def main(
    model: str, host: str, port: int, max_queued: int, drain_s: int, hides_cached_tokens: bool
) -> None:
    # Started before the server: if the model cannot be loaded, the program ends with one line.
    async with Engine(model, EngineConfig(max_queued_requests=max_queued)) as engine:
        config = uvicorn.Config(
            make_app(engine, name_of(model), shows_cached_tokens=not hides_cached_tokens),
            host=host,
            port=port,
            http=LimitedHeads,
            timeout_graceful_shutdown=CLOSE_TIMEOUT_S,
        )
        await DrainingServer(config, engine, drain_s).serve()


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
    parser.add_argument(
        "--drain",
        type=command_line.whole(0, 86_400),
        default=20,
        help="seconds that open answers have to end after SIGTERM",
    )
    parser.add_argument(
        "--hide-cached-tokens",
        action="store_true",
        help="do not tell clients how many tokens of a prompt were cached",
    )
    options = parser.parse_args()
    command_line.run(
        main,
        options.model,
        options.host,
        options.port,
        options.max_queued,
        options.drain,
        options.hide_cached_tokens,
    )
