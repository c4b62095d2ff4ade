"""Parts that the endpoints of all protocols share: served models, access, limits, samples and responses.

A model that judges documents is served with a `Reranker`.

A client that disconnects cancels its request, whatever the request waits for.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, Protocol, TypeVar

import anyio
import msgspec
from anyio.abc import TaskGroup
from anyio.streams.memory import MemoryObjectSendStream
from msgspec import Struct
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from drift_sdk import (
    BaseEngine,
    Chunk,
    Completion,
    ConfigError,
    DriftError,
    QueueFull,
    RequestError,
    Samples,
    SamplingParams,
)
from drift_sdk._fields import ConfigFields, is_unicode
from drift_sdk.openai.wire import BodyT, Cancelled, Unauthorised, UnknownModel, decode

PLACE = re.compile(r"\{(instruction|query|document)\}")


class Reranker(Struct, frozen=True, kw_only=True, metaclass=ConfigFields):
    """How a model that generates text judges a document.

    template:    the prompt, tokenised without special tokens: a text with {query}, with {document} once, and
                 with {instruction} if the model is to read one.
    instruction: what the query asks for, where a request does not say it.
    choices:     two different answers, of which the first one means that the document is relevant.

    ConfigError for a value of another form.
    """

    template: str
    instruction: str
    choices: tuple[str, str] = ("yes", "no")

    def __post_init__(self) -> None:
        for field in ("template", "instruction"):
            text = getattr(self, field)
            if not isinstance(text, str) or not is_unicode(text):
                raise ConfigError.of(field, text, "a text without lone surrogates")

        choices = tuple(self.choices) if isinstance(self.choices, list) else self.choices
        is_pair = isinstance(choices, tuple) and len(choices) == 2 and choices[0] != choices[1]
        if not is_pair or not all(isinstance(each, str) and each and is_unicode(each) for each in choices):
            allowed = "two different texts, not empty, without lone surrogates"
            raise ConfigError.of("choices", choices, allowed)

        msgspec.structs.force_setattr(self, "choices", choices)
        places = PLACE.findall(self.template)
        if "query" not in places or places.count("document") != 1:
            raise ConfigError.of("template", self.template, "a text with {query}, and {document} once")

    def prompt(self, query: str, document: str, instruction: str | None) -> tuple[str, str, str]:
        """The prompt in three parts: what is before the document, the document, and what is after it."""
        values = {"query": query, "instruction": self.instruction if instruction is None else instruction}
        before, _, after = self.template.partition("{document}")
        first, last = (PLACE.sub(lambda match: values[match[1]], each) for each in (before, after))
        return first, document, last


RERANKERS: Mapping[str, Reranker] = {
    "qwen3": Reranker(
        template=(
            "<|im_start|>system\n"
            "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
            'Note that the answer can only be "yes" or "no".<|im_end|>\n'
            "<|im_start|>user\n"
            "<Instruct>: {instruction}\n"
            "<Query>: {query}\n"
            "<Document>: {document}<|im_end|>\n"
            "<|im_start|>assistant\n<think>\n\n</think>\n\n"
        ),
        instruction="Given a web search query, retrieve relevant passages that answer the query",
    ),
}
"""Of published models, by names for the command line: Qwen3-Reranker."""


CLOSE = {"Connection": "close"}
BODY_TIMEOUT_S = 60.0
"""Most seconds until a body has arrived; a slower one gets a 408."""
DIGEST_CHARS = 32


class Service:
    """Engines and options of one application.

    models:              engines by name; several names may have one engine.
    rerankers:           how models judge documents, by name; the others compare embeddings.
    keys:                whom it lets in.
    salts_keys:          requests of different keys share no cached prefixes.
    shows_cached_tokens: answers say how many tokens of the prompt were cached.
    max_body_bytes:      of the largest body that is read.
    """

    def __init__(
        self,
        engines: Mapping[str, BaseEngine],
        keys: Keys,
        *,
        rerankers: Mapping[str, Reranker],
        salts_keys: bool,
        shows_cached_tokens: bool,
        max_body_bytes: int,
    ) -> None:
        self.models = {name: Model(name, engine, rerankers.get(name)) for name, engine in engines.items()}
        self.engines = list({id(engine): engine for engine in engines.values()}.values())
        self.created = int(time.time())
        self.shows_cached_tokens = shows_cached_tokens
        self._keys = keys
        self._salts_keys = salts_keys
        self._max_body_bytes = max_body_bytes

    def admit(self, request: Request) -> None:
        """Unauthorised for a request without one of the keys."""
        request.state.key = self._keys.check(request)

    async def read(self, request: Request, kind: type[BodyT]) -> BodyT:
        """The body of a request. HTTPException if it is too large or does not arrive, RequestError if it is
        not of this kind."""
        limit = self._max_body_bytes
        too_large = HTTPException(413, f"the body is larger than {limit} bytes", CLOSE)
        length = request.headers.get("content-length", "")
        if length.isdecimal() and int(length[:20]) > limit:
            raise too_large

        data = bytearray()
        try:
            with anyio.fail_after(BODY_TIMEOUT_S):
                async for part in request.stream():
                    data += part
                    if len(data) > limit:
                        raise too_large
        except TimeoutError as error:
            raise HTTPException(408, f"the body took over {BODY_TIMEOUT_S} s to arrive", CLOSE) from error
        except ClientDisconnect as error:
            raise HTTPException(400, "the client left before the body had arrived", CLOSE) from error

        return decode(bytes(data), kind)

    def model(self, name: str | None) -> Model:
        """The model of a request. UnknownModel for one that is not served; RequestError if there are several
        and the request names none."""
        if name is None:
            if len(self.engines) == 1:
                return next(iter(self.models.values()))

            raise RequestError.of("model", None, f"one of {self.names}")

        found = self.models.get(name)
        if found is None:
            raise UnknownModel(f"model {name[:200]!r}: this server has {self.names}")

        return found

    @property
    def names(self) -> str:
        return ", ".join(map(repr, self.models))

    def salted(self, request: Request, params: SamplingParams) -> SamplingParams:
        """The parameters with the salt of the request's key."""
        salt = self.salt(request, params.cache_salt)
        return params if salt == params.cache_salt else params.replace(cache_salt=salt)

    def salt(self, request: Request, own: str | None) -> str | None:
        """The salt of a request, which has `own`, with the salt of its key."""
        key = request.state.key
        if key is None or not self._salts_keys:
            return own

        # The salt of the request may be as long as salts can be.
        digest = hashlib.sha256((own or "").encode(errors="replace")).hexdigest()
        return f"{key}-{digest[:DIGEST_CHARS]}"


class Model(Struct, frozen=True, eq=False):
    """An engine under the name by which clients know it. reranker: how it judges documents; None: it compares
    embeddings."""

    name: str
    engine: BaseEngine
    reranker: Reranker | None = None


class Keys:
    """The keys of which a request needs one. Without keys, every request is let in."""

    def __init__(self, keys: Collection[str]) -> None:
        if isinstance(keys, str):
            raise ConfigError.of("api_keys", "a string", "a collection of strings")

        for key in keys:
            if not isinstance(key, str) or not key.isascii() or not key.strip() or key != key.strip():
                raise ConfigError(
                    "api_keys: expected texts of ASCII characters that do not begin or end with a blank",
                    field="api_keys",
                )

        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]
        self._secret = secrets.token_bytes(32)

    def check(self, request: Request) -> str | None:
        """Text that stands for the key of a request, the same for the same key; None without keys.
        Unauthorised without one of the keys."""
        if not self._digests:
            return None

        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        given = token.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")
        digest = hashlib.sha256(given.encode(errors="replace")).digest()
        matches = [hmac.compare_digest(digest, each) for each in self._digests]  # all: time tells nothing
        if not any(matches):
            what = "wrong" if given else "missing"
            raise Unauthorised(f"{what} API key: expected one as a Bearer token, or in x-api-key")

        return hmac.new(self._secret, digest, hashlib.sha256).hexdigest()[:DIGEST_CHARS]


def new_id(prefix: str, given: str | None = None) -> str:
    """An id of an answer, and of its request in the engine."""
    return f"{prefix}{given or uuid.uuid4().hex}"


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


def check_room(engine: BaseEngine) -> None:
    """QueueFull if a request would be rejected now. A request that is admitted may have more inputs than the
    queue takes: these wait."""
    if not engine._has_room:
        raise QueueFull("max_queued_requests: as many requests are waiting already; try again later")


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
