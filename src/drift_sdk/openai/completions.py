"""Text completions, `/v1/completions`."""

from __future__ import annotations

from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from drift_sdk import BaseEngine, Chunk, Completion, RequestError, SamplingParams
from drift_sdk.openai.choices import ChoicesAnswer, TextBody
from drift_sdk.openai.generation import Generation, respond
from drift_sdk.openai.sampling import REFUSED, Form, params_of
from drift_sdk.openai.service import Service
from drift_sdk.openai.token_log import TokenLog

__all__ = ["CompletionBody", "completions"]

KINDS = ("text_completion", "text_completion")
MAX_PROMPTS = 128


class CompletionBody(TextBody, kw_only=True):
    max_items = 2**20  # a prompt of a million token ids has fewer
    refused = {**REFUSED, "add_special_tokens": (True,)}

    prompt: str | list[str | int | list[int]]
    max_tokens: Any = 16
    logprobs: Any = None

    def prompts(self) -> list[str | list[int]]:
        """The prompts, each a text or token ids. In the protocol it may also be a single one."""
        given: Any = self.prompt
        is_list = isinstance(given, list) and (not given or not isinstance(given[0], int))
        found = given if is_list else [given]
        if not 1 <= len(found) <= MAX_PROMPTS:
            raise RequestError.of("prompt", given, f"1 to {MAX_PROMPTS} prompts")

        for each in found:
            if not isinstance(each, str | list) or not each:
                raise RequestError.of("prompt", each, "texts or lists of token ids, none of them empty")

        return found

    def params(self, defaults: SamplingParams) -> SamplingParams:
        """The engine's parameters. defaults: of the model."""
        return params_of(
            defaults,
            self.sampling,
            max_tokens=self.max_tokens,
            logprobs=self.logprobs,
            grammar=Form(self).grammar(),
        )


async def completions(service: Service, request: Request) -> Response:
    """The endpoint."""
    body = await service.read(request, CompletionBody)
    request.state.error_names = body.error_names()
    model = service.model(body.model)
    request_id = body.new_id("cmpl-")
    params = service.salted(request, body.params(model.engine.default_params))
    generation = Generation(
        partial(model.engine.samples, prompt, body.n, params, request_id=f"{request_id}-{place}")
        for place, prompt in enumerate(body.prompts())
    )
    answer = ChoicesAnswer(
        [TextChoice(model.engine, params) for _ in range(generation.num_choices)],
        body,
        KINDS,
        answer_id=request_id,
        model=model.name,
        shows_cached_tokens=service.shows_cached_tokens,
    )
    return await respond(request, generation, answer, is_streamed=body.stream)


class TextChoice:
    """One choice of an answer. Offsets of tokens count from the beginning of the text."""

    def __init__(self, engine: BaseEngine, params: SamplingParams) -> None:
        self._log = TokenLog(engine) if params.logprobs is not None else None

    def pieces(self, chunk: Chunk, completion: Completion | None) -> list[dict[str, Any]]:
        ended = ended_json(completion) if completion is not None else {"finish_reason": None}
        return [{"text": chunk.text, "logprobs": self._logprobs(chunk, completion), **ended}]

    def whole(self, completion: Completion) -> dict[str, Any]:
        logprobs = self._logprobs(completion, completion)
        return {"text": completion.text, "logprobs": logprobs, **ended_json(completion)}

    def _logprobs(self, part: Chunk | Completion, completion: Completion | None) -> dict[str, Any] | None:
        if self._log is None or part.logprobs is None:
            return None

        taken = self._log.take(part.text, part.logprobs, completion)
        text_of = self._log.text_of
        return {
            "tokens": [text_of(entry.token_id) for _, entry in taken],
            "token_logprobs": [entry.logprob for _, entry in taken],
            "top_logprobs": [{text_of(token): value for token, value in entry.top} for _, entry in taken],
            "text_offset": [offset for offset, _ in taken],
        }


def ended_json(completion: Completion) -> dict[str, Any]:
    """The reasons why a text ended. `stop_reason`, which is not in OpenAI's protocol, is the stop string or
    token, or "context" if the context was full."""
    return {"finish_reason": completion.finish_reason, "stop_reason": completion.stop_reason}
