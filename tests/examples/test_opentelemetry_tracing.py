"""Spans of the tracing example: of requests that finish, fail or are rejected."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from model_zoo import make_model

from drift_sdk import Engine, EngineConfig, PromptTooLong, QueueFull, SamplingParams
from drift_sdk.testing import ScriptedModel

pytest.importorskip("opentelemetry")

import opentelemetry_tracing
from opentelemetry import context
from opentelemetry.trace import NoOpTracer, StatusCode


class FakeSpan:
    def __init__(self, name: str, **given: Any) -> None:
        self.name = name
        self.given = given
        self.attributes = dict(given["attributes"])
        self.events: list[tuple[str, int]] = []
        self.errors: list[Exception] = []
        self.status: Any = None
        self.ended_at: int | None = None

    def add_event(self, name: str, *, timestamp: int) -> None:
        self.events.append((name, timestamp))

    def set_attribute(self, name: str, value: Any) -> None:
        self.attributes[name] = value

    def record_exception(self, error: Exception, *, timestamp: int) -> None:
        self.errors.append(error)

    def set_status(self, status: Any) -> None:
        self.status = status.status_code

    def end(self, end_time: int) -> None:
        self.ended_at = end_time


class FakeTracer(NoOpTracer):
    def __init__(self) -> None:
        self.spans: list[FakeSpan] = []

    def start_span(self, name: str, **given: Any) -> Any:
        self.spans.append(FakeSpan(name, **given))
        return self.spans[-1]


async def test_spans_of_requests() -> None:
    tracer = FakeTracer()
    spans = opentelemetry_tracing.RequestSpans(tracer, "scripted")
    config = EngineConfig(max_model_len=64, kv_cache_tokens=256, max_num_seqs=1, max_queued_requests=1)
    model = ScriptedModel("Hello!", config=config)
    async with Engine("scripted", config, on_event=spans, open_model=model) as engine:
        token = context.attach(context.set_value("caller", "here"))
        completion = await engine.generate("hi", SamplingParams(), request_id=spans.follow("mine"))
        context.detach(token)
        with pytest.raises(PromptTooLong):
            await engine.generate("x" * 99, SamplingParams())
        await engine.pause()
        streams = [engine.generate("a", SamplingParams()) for _ in range(2)]
        with pytest.raises(QueueFull):
            engine.generate("b", SamplingParams())
        await engine.resume()
        for stream in streams:
            await stream

    assert spans.num_ended == len(tracer.spans) == 5
    finished = tracer.spans[0]
    assert finished.name == "text_completion scripted"
    assert finished.given["context"]["caller"] == "here"
    assert [name for name, _ in finished.events] == ["admitted", "first token"]
    times = [finished.given["start_time"], *(time for _, time in finished.events), finished.ended_at]
    assert times == sorted(times)
    assert finished.attributes["gen_ai.response.id"] == completion.request_id == "mine"
    assert finished.attributes["gen_ai.usage.input_tokens"] == 2
    assert finished.attributes["gen_ai.usage.output_tokens"] == 7
    assert finished.attributes["gen_ai.response.finish_reasons"] == ["stop"]
    assert (finished.status, finished.errors) == (None, [])

    failed, rejected = (
        next(s for s in tracer.spans if s.errors and type(s.errors[0]) is kind)
        for kind in (PromptTooLong, QueueFull)
    )
    for span in (failed, rejected):
        assert span.status is StatusCode.ERROR and span.ended_at is not None
        assert span.given["context"] is None
    assert rejected.given["start_time"] == rejected.ended_at


def test_example_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_model(1, tmp_path)
    asyncio.run(opentelemetry_tracing.main(str(tmp_path)))
    assert capsys.readouterr().out.endswith("requests with a span: 2\n")
