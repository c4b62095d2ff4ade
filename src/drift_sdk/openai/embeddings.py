"""Embeddings, `/v1/embeddings`."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Literal

import anyio
import msgspec
from starlette.requests import Request
from starlette.responses import Response

from drift_sdk import BaseEngine, Embedding, RequestError
from drift_sdk.openai.conversation import IGNORED
from drift_sdk.openai.service import Service, check_room, unless_disconnected
from drift_sdk.openai.wire import Body

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
    """The endpoint."""
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
