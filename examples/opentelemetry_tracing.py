"""A span of OpenTelemetry for every request, with its waiting, first token and end.

python examples/opentelemetry_tracing.py [MODEL]

Needs the package opentelemetry-api. Without an SDK that the application has configured, spans go nowhere.
Attributes have the names of the semantic conventions for generative AI.
"""

from __future__ import annotations

import asyncio

import command_line
from opentelemetry import context, trace
from opentelemetry.context import Context
from opentelemetry.trace import Status, StatusCode, Tracer

from drift_sdk import Engine, SamplingParams
from drift_sdk.events import (
    Event,
    RequestAdmitted,
    RequestFailed,
    RequestFinished,
    RequestFirstToken,
    RequestPreempted,
    RequestQueued,
    RequestRejected,
)

NAMES = {
    RequestAdmitted: "admitted",
    RequestPreempted: "preempted",
    RequestFirstToken: "first token",
}


class RequestSpans:
    """Turns events into spans: the `on_event` of an engine.

    A span is made when its request ends, with the times of its events.
    """

    def __init__(self, tracer: Tracer, model: str) -> None:
        self._tracer = tracer
        self._model = model
        self._events: dict[str, list[Event]] = {}
        self._parents: dict[str, Context] = {}
        self.num_ended = 0

    def follow(self, request_id: str) -> str:
        """Make the current span the parent of the span of a request that is about to be submitted: events
        come on another thread, where the caller's span is not known. Returns the id."""
        self._parents[request_id] = context.get_current()
        return request_id

    def __call__(self, event: Event) -> None:
        match event:
            case RequestQueued(request_id=name):
                self._events[name] = [event]
            case RequestAdmitted(request_id=name) | RequestPreempted(request_id=name):
                self._events[name].append(event)
            case RequestFirstToken(request_id=name):
                self._events[name].append(event)
            case RequestFinished(request_id=name) | RequestFailed(request_id=name):
                self._end(name, [*self._events.pop(name), event])
            case RequestRejected(request_id=name):
                self._end(name, [event])

    def _end(self, request_id: str, events: list[Event]) -> None:
        first, last = events[0], events[-1]
        span = self._tracer.start_span(
            f"text_completion {self._model}",
            context=self._parents.pop(request_id, None),
            start_time=nanoseconds(first),
            attributes={
                "gen_ai.operation.name": "text_completion",
                "gen_ai.request.model": self._model,
                "gen_ai.response.id": request_id,
            },
        )
        for event in events:
            if type(event) in NAMES:
                span.add_event(NAMES[type(event)], timestamp=nanoseconds(event))

        if isinstance(last, RequestFinished):
            span.set_attribute("gen_ai.usage.input_tokens", last.usage.prompt_tokens)
            span.set_attribute("gen_ai.usage.output_tokens", last.usage.completion_tokens)
            span.set_attribute("gen_ai.response.finish_reasons", [last.finish_reason])
        elif isinstance(last, RequestFailed | RequestRejected):
            span.record_exception(last.error, timestamp=nanoseconds(last))
            span.set_status(Status(StatusCode.ERROR, type(last.error).__name__))
        span.end(nanoseconds(last))
        self.num_ended += 1


def nanoseconds(event: Event) -> int:
    return int(event.time * 1e9)


async def main(model: str) -> None:
    tracer = trace.get_tracer("drift_sdk")
    spans = RequestSpans(tracer, model)
    async with Engine(model, on_event=spans) as engine:
        with tracer.start_as_current_span("two questions"):
            questions = {"france": "The capital of France is", "italy": "The capital of Italy is"}
            params = SamplingParams(max_tokens=8)
            streams = [
                engine.generate(question, params, request_id=spans.follow(name))
                for name, question in questions.items()
            ]
            for completion in await asyncio.gather(*(stream.completion() for stream in streams)):
                print(completion.request_id, repr(completion.text))

    print("requests with a span:", spans.num_ended)  # closing the engine has waited for all events


if __name__ == "__main__":
    command_line.run(main, command_line.parser(__doc__).parse_args().model)
