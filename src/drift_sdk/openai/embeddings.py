"""Embeddings, `/v1/embeddings`, and similarities of texts by them, `/v1/score`."""

from __future__ import annotations

import base64
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Literal

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from drift_sdk import Embedding, RequestError
from drift_sdk.openai.conversation import IGNORED
from drift_sdk.openai.service import Service, new_id, unless_disconnected
from drift_sdk.openai.wire import Body

MAX_INPUTS = 2048
"""Most inputs of a request, as in OpenAI's protocol."""
ERROR_NAMES = {"prompt": "input", "prompts": "input"}


class EmbeddingBody(Body, kw_only=True):
    max_items = 2**21  # of tokens: each input may have as many as the context
    ignored: ClassVar[frozenset[str]] = IGNORED
    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "add_special_tokens": (True,),
        "input_type": (),
        "messages": (),
        "prompt_embeds": (),
        "truncate_prompt_tokens": (),
        "use_activation": (),
    }

    input: str | list[str | int | list[int]]
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    normalize: bool = True
    priority: int = 0
    cache_salt: str | None = None

    def prompts(self) -> list[Any]:
        """The inputs, each a text or token ids. In the protocol it may also be a single one."""
        given: Any = self.input
        is_list = isinstance(given, list) and (not given or not isinstance(given[0], int))
        found = given if is_list else [given]
        if not 1 <= len(found) <= MAX_INPUTS:
            raise RequestError.of("input", given, f"1 to {MAX_INPUTS} inputs")

        for each in found:
            if not isinstance(each, str | list) or not each:
                raise RequestError.of("input", each, "texts or lists of token ids, none of them empty")

        return found


class ScoreBody(Body, kw_only=True):
    """Texts that are compared: each of text_1 with the one of text_2 at its place, or one with all."""

    ignored: ClassVar[frozenset[str]] = IGNORED
    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "add_special_tokens": (True,),
        "truncate_prompt_tokens": (),
        "use_activation": (),
    }

    text_1: str | list[str]
    text_2: str | list[str]
    model: str | None = None
    priority: int = 0
    cache_salt: str | None = None

    def pairs(self) -> list[tuple[str, str]]:
        lists = []
        for field, given in (("text_1", self.text_1), ("text_2", self.text_2)):
            texts = [given] if isinstance(given, str) else given
            if not 1 <= len(texts) <= MAX_INPUTS or not all(texts):
                raise RequestError.of(field, given, f"1 to {MAX_INPUTS} texts, none of them empty")

            lists.append(texts)
        first, second = lists
        if len(first) == 1:
            first = first * len(second)
        if len(first) != len(second):
            allowed = f"{len(first)} texts, as many as text_1, which may also be one text for all"
            raise RequestError(
                f"text_2 has {len(second)}: expected {allowed}", field="text_2", allowed=allowed
            )

        return list(zip(first, second, strict=True))


async def scores(service: Service, request: Request) -> Response:
    """The endpoint of similarities: the cosine of the embeddings of the last tokens."""
    body = await service.read(request, ScoreBody)
    pairs = body.pairs()
    model, salt = service.model(body.model), service.salt(request, body.cache_salt)
    found: dict[str, Embedding] = {}
    for field, texts in zip(("text_1", "text_2"), zip(*pairs, strict=True), strict=True):
        request.state.error_names = {"prompt": field}
        new = [text for text in dict.fromkeys(texts) if text not in found]
        embed = partial(model.engine.embed, new, priority=body.priority, cache_salt=salt)
        found |= zip(new, await unless_disconnected(request.receive, embed), strict=True)
    data = [
        {"index": index, "object": "score", "score": float(found[one].vector @ found[other].vector)}
        for index, (one, other) in enumerate(pairs)
    ]
    usage = usage_of(list(found.values()), service)
    shown = {"id": new_id("score-"), "object": "list", "created": int(time.time()), "model": model.name}
    return JSONResponse({**shown, "data": data, "usage": usage})


async def embeddings(service: Service, request: Request) -> Response:
    """The endpoint."""
    body = await service.read(request, EmbeddingBody)
    request.state.error_names = ERROR_NAMES
    model = service.model(body.model)
    embed = partial(
        model.engine.embed,
        body.prompts(),
        normalize=body.normalize,
        dimensions=body.dimensions,
        priority=body.priority,
        cache_salt=service.salt(request, body.cache_salt),
    )
    found = await unless_disconnected(request.receive, embed)
    data = [
        {"object": "embedding", "index": index, "embedding": encoded(each, body.encoding_format)}
        for index, each in enumerate(found)
    ]
    return JSONResponse(
        {"object": "list", "data": data, "model": model.name, "usage": usage_of(found, service)}
    )


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
