"""Probabilities of given answers to a prompt, `/v1/decide`: an endpoint of this package's own."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from drift_sdk import RequestError
from drift_sdk.openai.conversation import IGNORED, Message
from drift_sdk.openai.service import Service, new_id, unless_disconnected
from drift_sdk.openai.wire import Body


class DecideBody(Body, kw_only=True):
    """prompt: a text or token ids, in the place of messages. choices: the answers, likewise."""

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
    """The endpoint."""
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
