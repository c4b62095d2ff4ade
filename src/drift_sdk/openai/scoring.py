"""Endpoints that generate no text: embeddings, the relevance of documents, and probabilities of answers.

`/v1/embeddings` is OpenAI's. `/v1/rerank`, in the form of Jina, Cohere and vLLM, and `/v1/score` give the
relevance of documents to a query. Without a `Reranker`, it is the cosine of the embeddings of the last
tokens. With one, the model judges each document, and it is the probability of the first of the two answers
that it may give. `/v1/decide`, an endpoint of this package's own, gives probabilities of given answers to a
prompt.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Literal

import anyio
import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from drift_sdk import BaseEngine, Decision, DriftError, Embedding, QueueFull, RequestError
from drift_sdk.driver.prompts import FramedPrompt, Prompt
from drift_sdk.jobs import POLL_S
from drift_sdk.openai.conversation import IGNORED, Message
from drift_sdk.openai.service import Model, Reranker, Service, check_room, new_id, unless_disconnected
from drift_sdk.openai.wire import Body, Wire

MAX_INPUTS = 2048
"""Most inputs of a request, as in OpenAI's protocol."""
ERROR_NAMES = {"prompts": "input"}
TRUNCATION: Mapping[str, tuple[Any, ...]] = {"truncation_side": ("right",)}
"""Fields of truncated prompts that are refused: the first tokens are kept."""


class EmbeddingBody(Body, kw_only=True):
    max_items = 2**21  # of tokens: each input may have as many as the context
    ignored: ClassVar[frozenset[str]] = IGNORED - TRUNCATION.keys()
    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "add_special_tokens": (True,),
        "input_type": (),
        "messages": (),
        "prompt_embeds": (),
        "use_activation": (),
        **TRUNCATION,
    }

    input: str | list[str | int | list[int]]
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    normalize: bool = True
    truncate_prompt_tokens: int | None = None
    priority: int = 0
    cache_salt: str | None = None

    def prompts(self) -> list[Any]:
        """The inputs, each a text or token ids. In the protocol it may also be a single one."""
        given: Any = self.input
        is_list = isinstance(given, list) and (not given or not isinstance(given[0], int))
        found = given if is_list else [given]
        if not 1 <= len(found) <= MAX_INPUTS:
            raise RequestError.of("input", given, f"1 to {MAX_INPUTS} inputs")

        for index, each in enumerate(found):
            if not isinstance(each, str | list) or not each:
                place = f"input[{index}]" if is_list else "input"
                raise RequestError.of(place, each, "a text or a list of token ids, not empty")

        return found


def most_tokens(engine: BaseEngine, given: int | None) -> int | None:
    """The tokens of a prompt that are kept, of vLLM's `truncate_prompt_tokens`: -1 stands for as many as the
    model takes. None: a longer prompt is an error."""
    if given is not None and (given == 0 or given < -1):
        raise RequestError.of("truncate_prompt_tokens", given, "at least 1, or -1 for what the model takes")

    # Besides the tokens of the prompt, there is one that is thrown away.
    most = engine.max_model_len - 1
    return most if given == -1 else given


async def embeddings(service: Service, request: Request) -> Response:
    """The endpoint of embeddings."""
    body = await service.read(request, EmbeddingBody)
    model, prompts = service.model(body.model), body.prompts()
    is_single = len(prompts) == 1 and body.input is not prompts
    request.state.error_names = {"prompts[0]": "input"} if is_single else ERROR_NAMES
    embed = partial(
        model.engine.embed,
        prompts,
        normalize=body.normalize,
        dimensions=body.dimensions,
        truncate_prompt_tokens=most_tokens(model.engine, body.truncate_prompt_tokens),
        priority=body.priority,
        cache_salt=service.salt(request, body.cache_salt),
    )
    check_room(model.engine)
    found = await unless_disconnected(request.receive, embed)
    data = []
    for index, each in enumerate(found):
        await anyio.lowlevel.checkpoint()  # between millions of numbers, other requests go on
        numbers = msgspec.Raw(msgspec.json.encode(encoded(each, body.encoding_format)))
        data.append({"object": "embedding", "index": index, "embedding": numbers})
    answer = {"object": "list", "data": data, "model": model.name, "usage": usage_of(found, service)}
    return Response(msgspec.json.encode(answer), media_type="application/json")


def usage_of(found: Sequence[Embedding], service: Service) -> dict[str, Any]:
    num_tokens = sum(each.num_tokens for each in found)
    usage: dict[str, Any] = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    if service.shows_cached_tokens:
        usage["prompt_tokens_details"] = {"cached_tokens": sum(each.cached_tokens for each in found)}
    return usage


def encoded(embedding: Embedding, form: Literal["float", "base64"]) -> list[float] | str:
    """The numbers of an embedding; as base64 they are float32, the least significant byte first."""
    vector = embedding.vector
    if form == "float":
        numbers: list[float] = vector.tolist()
        return numbers

    return base64.b64encode(vector.astype("<f4").tobytes()).decode()


MAX_AT_ONCE = 32
"""Documents of one request that are judged at once."""


class RelevanceBody(Body, kw_only=True):
    """Fields that both endpoints have."""

    ignored: ClassVar[frozenset[str]] = IGNORED - TRUNCATION.keys()
    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "activation": (),
        "add_special_tokens": (True,),
        "max_chunks_per_doc": (),
        "max_tokens_per_doc": (),
        "rank_fields": (["text"],),
        "use_activation": (),
        **TRUNCATION,
    }

    model: str | None = None
    instruction: str | None = None
    truncate_prompt_tokens: int | None = None
    priority: int = 0
    cache_salt: str | None = None


class Document(Wire):
    text: str


class RerankBody(RelevanceBody, kw_only=True):
    """top_n: results that are wanted, the best ones; 0 = all, as in vLLM."""

    query: str
    documents: list[str | Document]
    top_n: int = 0
    return_documents: bool = True

    def texts(self) -> list[str]:
        texts = [each if isinstance(each, str) else each.text for each in self.documents]
        if not self.query:
            raise RequestError.of("query", self.query, "a text that is not empty")

        check_texts("documents", texts)
        if self.top_n < 0:
            raise RequestError.of("top_n", self.top_n, "a number of results, or 0 for all")

        return texts


class ScoreBody(RelevanceBody, kw_only=True):
    """Texts that are compared: each of text_1 with the one of text_2 at its place, or one with all."""

    text_1: str | list[str]
    text_2: str | list[str]

    def pairs(self) -> list[Pair]:
        first, second = placed("text_1", self.text_1), placed("text_2", self.text_2)
        if len(first) == 1:
            first = first * len(second)
        if len(first) != len(second):
            allowed = f"{len(first)} texts, as many as text_1, which may also be one text for all"
            raise RequestError(
                f"text_2 has {len(second)}: expected {allowed}", field="text_2", allowed=allowed
            )

        return [Pair(*one, *other) for one, other in zip(first, second, strict=True)]


def check_texts(field: str, texts: Sequence[str]) -> None:
    """RequestError for none, too many, and the first one that is empty."""
    if not 1 <= len(texts) <= MAX_INPUTS:
        raise RequestError.of(field, texts, f"1 to {MAX_INPUTS} texts")

    for index, text in enumerate(texts):
        if not text:
            raise RequestError.of(f"{field}[{index}]", text, "a text that is not empty")


def placed(field: str, given: str | list[str]) -> list[tuple[str, str]]:
    """The texts of a field, each with its place in the request. RequestError as of `check_texts`."""
    if not isinstance(given, str):
        check_texts(field, given)
        return [(text, f"{field}[{index}]") for index, text in enumerate(given)]

    if not given:
        raise RequestError.of(field, given, "a text that is not empty")

    return [(given, field)]


class Pair(Struct, frozen=True):
    """A query and a document, each with its place in the request."""

    query: str
    query_field: str
    document: str
    document_field: str


class Relevance(Struct, frozen=True):
    """The relevance of each pair, and the usage of the request."""

    scores: list[float]
    usage: dict[str, Any]


async def rerank(service: Service, request: Request) -> Response:
    """The endpoint of documents in the order of their relevance."""
    body = await service.read(request, RerankBody)
    texts, model = body.texts(), service.model(body.model)
    pairs = [Pair(body.query, "query", text, f"documents[{index}]") for index, text in enumerate(texts)]
    found = await relevance(service, request, model, body, pairs)
    order = sorted(range(len(texts)), key=lambda index: -found.scores[index])
    results = []
    for index in order[: body.top_n or None]:
        document = {"document": {"text": texts[index]}} if body.return_documents else {}
        results.append({"index": index, **document, "relevance_score": found.scores[index]})
    return JSONResponse(
        {"id": new_id("rerank-"), "model": model.name, "results": results, "usage": found.usage}
    )


async def scores(service: Service, request: Request) -> Response:
    """The endpoint of pairs of texts."""
    body = await service.read(request, ScoreBody)
    model = service.model(body.model)
    found = await relevance(service, request, model, body, body.pairs())
    data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(found.scores)]
    shown = {"id": new_id("score-"), "object": "list", "created": int(time.time()), "model": model.name}
    return JSONResponse({**shown, "data": data, "usage": found.usage})


async def relevance(
    service: Service, request: Request, model: Model, body: RelevanceBody, pairs: Sequence[Pair]
) -> Relevance:
    """The relevance of the pairs. RequestError naming the field of a text that is too long."""
    if body.instruction is not None and model.reranker is None:
        allowed = "null: this model is served without a Reranker, and compares embeddings"
        raise RequestError.of("instruction", body.instruction, allowed)

    most, salt = (
        most_tokens(model.engine, body.truncate_prompt_tokens),
        service.salt(request, body.cache_salt),
    )
    check_room(model.engine)
    if model.reranker is not None:
        judge = partial(judged, request, model.engine, model.reranker, body, pairs, most, salt)
        return await unless_disconnected(request.receive, judge)

    fields: dict[str, str] = {}  # of each text, the first one that it is from
    for pair in pairs:
        fields.setdefault(pair.query, pair.query_field)
        fields.setdefault(pair.document, pair.document_field)
    request.state.error_names = {f"prompts[{place}]": field for place, field in enumerate(fields.values())}
    embed = partial(
        model.engine.embed,
        list(fields),
        truncate_prompt_tokens=most,
        priority=body.priority,
        cache_salt=salt,
    )
    embeddings = await unless_disconnected(request.receive, embed)
    vectors = {text: found.vector for text, found in zip(fields, embeddings, strict=True)}
    cosines = [float(vectors[pair.query] @ vectors[pair.document]) for pair in pairs]
    return Relevance(cosines, usage_of(embeddings, service))


async def judged(
    request: Request,
    engine: BaseEngine,
    reranker: Reranker,
    body: RelevanceBody,
    pairs: Sequence[Pair],
    most: int | None,
    salt: str | None,
) -> Relevance:
    """The probabilities of the first answer, of equal pairs computed once. most: tokens of a prompt, whose
    document is cut."""
    if most is not None:
        tokenizer = engine.tokenizer
        longest = max(len(tokenizer.encode(each, add_special_tokens=False)) for each in reranker.choices)
        most = min(most, engine.max_model_len - 1 - longest)
    different: dict[tuple[str, str], Pair] = {}
    for pair in pairs:
        different.setdefault((pair.query, pair.document), pair)
    decisions: dict[Pair, Decision] = {}
    errors: dict[Pair, DriftError] = {}
    limiter = anyio.CapacityLimiter(MAX_AT_ONCE)

    async def decide(pair: Pair) -> None:
        async with limiter:
            before, document, after = reranker.prompt(pair.query, pair.document, body.instruction)
            prompt = FramedPrompt(before, document, after, most)
            try:
                decisions[pair] = await decision(engine, prompt, reranker, body.priority, salt)
            except DriftError as error:
                errors[pair] = error
                tasks.cancel_scope.cancel()

    async with anyio.create_task_group() as tasks:
        for pair in different.values():
            tasks.start_soon(decide, pair)
    for pair in different.values():
        if pair in errors:
            fields = ("prompt", "choices[0]", "choices[1]")  # an answer that does not fit behind a document
            request.state.error_names = dict.fromkeys(fields, pair.document_field)
            raise errors[pair]

    num_tokens = sum(each.num_tokens for each in decisions.values())
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    found = [decisions[different[pair.query, pair.document]] for pair in pairs]
    return Relevance([each.probabilities[0] for each in found], usage)


async def decision(
    engine: BaseEngine, prompt: Prompt, reranker: Reranker, priority: int, salt: str | None
) -> Decision:
    """The decision about a document. Waits while the queue is full: the documents of one request may be more
    than it takes."""
    while True:
        if engine._has_room:
            try:
                return await engine._decide(prompt, reranker.choices, priority=priority, cache_salt=salt)
            except QueueFull:  # of an engine in another process, where other requests took the room
                pass
        await anyio.sleep(POLL_S)


class DecideBody(Body, kw_only=True):
    """prompt: a text or token ids, in the place of messages. choices: the answers, as texts or token ids."""

    max_items = 2**20  # of tokens, as of completions
    ignored: ClassVar[frozenset[str]] = IGNORED
    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {"tools": ([],)}

    choices: list[str | list[int]]
    prompt: str | list[int] | None = None
    messages: list[Message] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    model: str | None = None
    priority: int = 0
    cache_salt: str | None = None

    def asked(self) -> Any:
        """The prompt or the messages in the form that engines take."""
        if (self.prompt is None) == (self.messages is None):
            allowed = "either a prompt or messages"
            raise RequestError(f"prompt: expected {allowed}", field="prompt", allowed=allowed)

        if self.messages is None:
            return self.prompt

        if not self.messages:  # which an engine would take for token ids
            raise RequestError.of("messages", self.messages, "at least one message")

        return [message.plain(f"messages[{index}]") for index, message in enumerate(self.messages)]


async def decide(service: Service, request: Request) -> Response:
    """The endpoint of probabilities of answers."""
    body = await service.read(request, DecideBody)
    request.state.error_names = {"template_args": "chat_template_kwargs"}
    model = service.model(body.model)
    wait = partial(
        model.engine.decide,
        body.asked(),
        body.choices,
        template_args=body.chat_template_kwargs,
        priority=body.priority,
        cache_salt=service.salt(request, body.cache_salt),
    )
    found = await unless_disconnected(request.receive, wait)
    choices = [
        {"index": index, "choice": choice, "logprob": logprob, "probability": probability}
        for index, (choice, logprob, probability) in enumerate(
            zip(body.choices, found.logprobs, found.probabilities, strict=True)
        )
    ]
    return JSONResponse(
        {
            "id": new_id("decide-"),
            "object": "decision",
            "created": int(time.time()),
            "model": model.name,
            "best": found.best,
            "choices": choices,
            "usage": {"prompt_tokens": found.num_tokens, "total_tokens": found.num_tokens},
        }
    )
