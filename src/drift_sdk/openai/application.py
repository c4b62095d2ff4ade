"""The application: routes to endpoints, errors, models, health and metrics."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from drift_sdk import BaseEngine, ConfigError, DriftError, EngineClosed
from drift_sdk.openai.chat import chat, completions
from drift_sdk.openai.messages import count_tokens, messages
from drift_sdk.openai.responses import responses
from drift_sdk.openai.scoring import decide, embeddings, rerank, scores
from drift_sdk.openai.service import Keys, Reranker, Service
from drift_sdk.openai.wire import error_response

MAX_BODY_BYTES = 2**23
"""Eight MiB are about two million tokens of text. What decodes slowest in such a body takes a second."""

Endpoint = Callable[[Service, Request], Awaitable[Response]]


def app(
    engine: BaseEngine | Mapping[str, BaseEngine],
    *,
    reranker: Reranker | Mapping[str, Reranker] | None = None,
    api_keys: Collection[str] = (),
    salts_keys: bool = False,
    shows_cached_tokens: bool = True,
    max_body_bytes: int = MAX_BODY_BYTES,
) -> Starlette:
    """An ASGI application that serves engines, to run by itself or to mount in another one, under any prefix.
    It has no state outside of itself.

    engine:              an `Engine`, an `EnginePool` or another engine, or several by the names that clients
                         use. The name of a single one is its hub id, or the name of its folder or file.
    reranker:            how the model judges documents for `/v1/rerank` and `/v1/score`, of several engines
                         by their names, or one for all; engines without one compare embeddings.
    api_keys:            a request needs one of them, as a Bearer token or in the header `x-api-key`, except
                         to `/health`; none = every request is let in.
    salts_keys:          requests of different keys share no cached prefixes, so that none can find out by
                         the time of an answer what another has asked.
    shows_cached_tokens: answers say how many tokens of the prompt were cached.
    max_body_bytes:      a larger body gets a 413 and is not read to its end.

    Run by itself, it starts the engines that are not open, and closes those at its end. A parent does not
    start or close what is mounted in it, so the engines are the parent's then. ConfigError for a wrong
    argument."""
    if max_body_bytes < 1:
        raise ConfigError.of("max_body_bytes", max_body_bytes, "1 or more")

    engines = by_name(engine)
    service = Service(
        engines,
        Keys(api_keys),
        rerankers=rerankers_by_name(reranker, engines),
        salts_keys=salts_keys,
        shows_cached_tokens=shows_cached_tokens,
        max_body_bytes=max_body_bytes,
    )
    routes = [
        route("POST", "/v1/chat/completions", chat, service),
        route("POST", "/v1/completions", completions, service),
        route("POST", "/v1/responses", responses, service),
        route("POST", "/v1/embeddings", embeddings, service),
        route("POST", "/v1/decide", decide, service),
        route("POST", "/v1/score", scores, service),
        *(route("POST", path, rerank, service) for path in ("/rerank", "/v1/rerank", "/v2/rerank")),
        route("POST", "/v1/messages", messages, service),
        route("POST", "/v1/messages/count_tokens", count_tokens, service),
        route("GET", "/v1/models", list_models, service),
        route("GET", "/v1/models/{name:path}", describe_model, service),
        route("GET", "/metrics", metrics, service),
        route("GET", "/health", health, service, is_open=True),
    ]
    return Starlette(
        routes=routes,
        lifespan=partial(lifespan, service),
        exception_handlers={
            404: partial(unknown_route, [each.path for each in routes]),
            HTTPException: error_response,
            DriftError: error_response,
            Exception: error_response,
        },
    )


def by_name(engine: object) -> dict[str, BaseEngine]:
    """Engines by the names that clients use. ConfigError for what is no engine."""
    if isinstance(engine, BaseEngine):
        return {name_of(engine.model): engine}

    given: dict[Any, Any] = dict(engine) if isinstance(engine, Mapping) else {}
    if given and all(isinstance(name, str) and name for name in given):
        if all(isinstance(each, BaseEngine) for each in given.values()):
            return given

    raise ConfigError.of("engine", engine, "an engine, or engines by their names")


def rerankers_by_name(given: object, engines: Mapping[str, BaseEngine]) -> dict[str, Reranker]:
    """The rerankers of engines. ConfigError for what is none, and for a name that no engine has."""
    if given is None:
        return {}

    if isinstance(given, Reranker):
        return dict.fromkeys(engines, given)

    found: dict[Any, Any] = dict(given) if isinstance(given, Mapping) else {}
    if found and found.keys() <= engines.keys():
        if all(isinstance(each, Reranker) for each in found.values()):
            return found

    allowed = f"a Reranker, or some by names of {', '.join(map(repr, engines))}"
    raise ConfigError.of("reranker", given, allowed)


def name_of(model: str | Path) -> str:
    """The name of a model for clients: the file's or folder's name without the path, or the hub id."""
    return Path(model).name.removesuffix(".gguf") if Path(model).exists() else str(model)


def route(method: str, path: str, endpoint: Endpoint, service: Service, *, is_open: bool = False) -> Route:
    """is_open: needs no key."""

    async def answer(request: Request) -> Response:
        if not is_open:
            service.admit(request)
        return await endpoint(service, request)

    return Route(path, answer, methods=[method])


@asynccontextmanager
async def lifespan(service: Service, app: Starlette) -> AsyncIterator[None]:
    """Open the engines that are not open, and close them at the end."""
    async with AsyncExitStack() as opened:
        for engine in service.engines:
            if not engine.is_open:
                await opened.enter_async_context(engine)
        yield


def model_json(service: Service, name: str) -> dict[str, Any]:
    """A model, with the fields of both protocols."""
    created = datetime.fromtimestamp(service.created, UTC).isoformat().replace("+00:00", "Z")
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "drift_sdk",
        "type": "model",
        "display_name": name,
        "created_at": created,
    }


async def list_models(service: Service, request: Request) -> Response:
    data = [model_json(service, name) for name in service.models]
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"], "has_more": False}
    return JSONResponse({"object": "list", "data": data, **ends})


async def describe_model(service: Service, request: Request) -> Response:
    return JSONResponse(model_json(service, service.model(request.path_params["name"]).name))


async def metrics(service: Service, request: Request) -> Response:
    """The statistics of the engine; of several, each sample has the label `engine`."""
    if len(service.engines) == 1:
        text = service.engines[0].metrics_text()
    else:
        from prometheus_client import CollectorRegistry, generate_latest

        from drift_sdk.prometheus import collector

        registry = CollectorRegistry()
        names = {id(model.engine): name for name, model in reversed(service.models.items())}
        registry.register(collector({names[id(engine)]: engine for engine in service.engines}))
        text = generate_latest(registry).decode()
    return PlainTextResponse(text, media_type="text/plain; version=0.0.4")


async def health(service: Service, request: Request) -> Response:
    """200 while all engines are open."""
    if not all(engine.is_open for engine in service.engines):
        raise EngineClosed("the engine is not open")

    stats = [engine.stats() for engine in service.engines]
    is_asleep, is_paused = any(each.is_asleep for each in stats), any(each.is_paused for each in stats)
    return JSONResponse(
        {
            "status": "asleep" if is_asleep else "paused" if is_paused else "ok",
            "num_running": sum(each.num_running for each in stats),
            "num_waiting": sum(each.num_waiting for each in stats),
        }
    )


async def unknown_route(paths: list[str], request: Request, error: Exception) -> Response:
    path = request.scope["path"][:200]
    there = HTTPException(404, f"{path!r} is not served: there are {', '.join(paths)}")
    return await error_response(request, there)
