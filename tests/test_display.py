"""Descriptions of engines, streams, completions and statistics, as `__repr__` and as HTML."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Sequence
from html.parser import HTMLParser

import anyio
import pytest

from drift_sdk import (
    Completion,
    ConfigError,
    Engine,
    EngineConfig,
    EngineStats,
    ExecutorError,
    SyncEngine,
    ToolCall,
)
from drift_sdk.results import Timing, Usage
from drift_sdk.stream import TokenStream
from drift_sdk.sync import SyncStream
from drift_sdk.testing import Reply, ScriptedModel, scripted_engine

HOSTILE = '</pre></td></table><script>alert(1)</script>&amp;"<img src=x onerror=y>'
TAGS = {"div", "b", "table", "tr", "th", "td", "pre"}


class Tags(HTMLParser):
    """The tags of a page, and its text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()
        self.text = ""
        self.feed(html)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open.append(tag)
        self.seen.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += f"{data}|"


def shown(thing: object) -> str:
    """The text of an object's HTML, which has no tags but our own."""
    page = Tags(thing._repr_html_())
    assert page.seen <= TAGS
    return page.text


def completion(**fields: object) -> Completion:
    known = {
        "request_id": "r",
        "text": "Paris.",
        "token_ids": tuple(range(500)),
        "finish_reason": "stop",
        "stop_reason": 256,
        "usage": Usage(prompt_tokens=1234, cached_tokens=16, completion_tokens=501),
        "timing": Timing(queued_s=0.0, prefill_s=0.25, first_token_s=0.25, decode_s=2.0),
        "seed": 7,
    }
    return Completion(**{**known, **fields})


def test_completion_repr_is_short_and_leaves_out_defaults() -> None:
    described = repr(completion(raw_text="x" * 5000))
    assert described.startswith("Completion(request_id='r', text='Paris.', token_ids=(0, 1, 2, ")
    assert "finish_reason='stop', stop_reason=256, usage=Usage(prompt_tokens=1234" in described
    assert "499" not in described
    assert "logprobs" not in described
    assert len(described) < 1000


def test_completion_html_shows_reason_tokens_rate_and_text() -> None:
    text = shown(completion())
    for part in (
        "finish reason|stop (256)|",
        "tokens|1,234 (16 cached) + 501|",
        "tokens/s|250.0|",
        "Paris.|",
    ):
        assert part in text
    assert "tokens/s" not in shown(
        completion(timing=Timing(queued_s=0.0, prefill_s=0.0, first_token_s=0.0, decode_s=0.0))
    )
    assert len(completion(text="x" * 10**6)._repr_html_()) < 4000


def test_hostile_text_is_escaped_in_html() -> None:
    call = ToolCall(name=HOSTILE, arguments={HOSTILE: HOSTILE})
    hostile = completion(
        request_id=HOSTILE, text=HOSTILE, reasoning=HOSTILE, stop_reason=HOSTILE, tool_calls=(call,)
    )
    assert HOSTILE in shown(hostile)
    assert "<script" not in hostile._repr_html_()
    assert "<img" not in hostile._repr_html_()
    assert HOSTILE in shown(Engine(HOSTILE))
    assert HOSTILE in shown(SyncEngine(HOSTILE))


async def test_hostile_request_id_and_error_are_escaped_in_html() -> None:
    async with scripted_engine(Reply(raises=ValueError(HOSTILE))) as engine:
        stream = engine.generate("x", request_id=HOSTILE)
        with pytest.raises(ExecutorError):
            await stream
        assert HOSTILE in shown(stream)
        assert "failed (ExecutorError" in shown(stream)


async def test_samples_show_their_streams() -> None:
    async with scripted_engine("a") as engine:
        samples = engine.samples("x", 2, request_id="both")
        await samples
        assert repr(samples) == (
            "<Samples [<TokenStream request_id=both-0, state=ended (stop)>, "
            "<TokenStream request_id=both-1, state=ended (stop)>]>"
        )


def test_stats_show_what_is_not_zero() -> None:
    stats = EngineStats(num_running=3, num_blocks=200, num_free_blocks=150, tokens_per_second=1234.5)
    assert repr(stats) == (
        "EngineStats(num_running=3, num_blocks=200, num_free_blocks=150, tokens_per_second=1234.5)"
    )
    assert repr(EngineStats()) == "EngineStats()"
    assert "running|3|waiting|0|KV|25% of 200 blocks|tokens/s|1,234.5|" in shown(stats)
    assert "KV|0% of 0 blocks|" in shown(EngineStats())


async def test_engine_is_described_in_every_state() -> None:
    may_go_on = threading.Event()  # until then the model computes no more than a first token
    states: list[str] = []

    def next_token(prompt_ids: Sequence[int], output_ids: Sequence[int], seed: int) -> int:
        assert not output_ids or may_go_on.wait(60.0)
        return ord("a")

    async def ahead_of_tokens(command: Callable[[], Awaitable[None]]) -> None:
        """Give the engine a command before the model goes on, which ends the reply at its longest."""
        async with anyio.create_task_group() as group:
            group.start_soon(command)
            await anyio.wait_all_tasks_blocked()
            may_go_on.set()
        may_go_on.clear()

    model = ScriptedModel(next_token)

    def open_model(report, limits=None):
        states.append(repr(engine))
        return model(report, limits)

    engine = Engine("tiny", model.config, open_model=open_model)
    assert repr(engine) == "<Engine model='tiny', state=not started>"
    async with engine:
        assert repr(engine).startswith(
            "<Engine model='tiny', state=open, executor=scripted, running=0, waiting=0, KV=0% of 4,096 blocks"
        )
        stream = engine.generate("x", max_tokens=None)
        await stream.__anext__()
        assert "running=1, waiting=0" in repr(engine)
        assert "executor|scripted|running|1|waiting|0|KV|" in shown(engine)
        await ahead_of_tokens(engine.pause)
        assert "state=paused" in repr(engine)
        await engine.resume()
        assert "state=open" in repr(engine)
        await ahead_of_tokens(engine.sleep)
        assert "state=asleep" in repr(engine)
    assert states == ["<Engine model='tiny', state=starting>"]
    assert repr(engine) == "<Engine model='tiny', state=closed>"
    assert shown(engine) == "Engine|model|'tiny'|state|closed|"
    assert "failed (EngineClosed" in repr(stream)


async def test_failed_engine_and_one_that_could_not_start_are_described() -> None:
    engine = scripted_engine(OSError("lost"))
    async with engine:
        with pytest.raises(ExecutorError):
            await engine.generate("x")
        assert "state=cl" in repr(engine)  # closing, then closed
    broken = scripted_engine({"reasoning": "hm"})
    with pytest.raises(ConfigError):
        await broken.start()
    assert "state=closed" in repr(broken)


async def test_stream_is_described_in_every_state() -> None:
    config = EngineConfig(max_model_len=256, kv_cache_tokens=4096)
    async with scripted_engine("abc", config=config) as engine:
        await engine.pause()
        stream, other = engine.generate("x", request_id="mine"), engine.generate("x")
        assert repr(stream) in (
            "<TokenStream request_id=mine, state=submitted>",
            "<TokenStream request_id=mine, state=accepted>",
        )
        await stream.accepted()
        assert repr(stream) == "<TokenStream request_id=mine, state=accepted>"
        other.cancel()
        assert "state=cancelled>" in repr(other)
        await engine.resume()
        await stream
        await other
        assert repr(stream) == "<TokenStream request_id=mine, state=ended (stop)>"
        assert shown(stream) == "TokenStream|request_id|mine|state|ended (stop)|"
        assert "state=ended (cancelled)" in repr(other)


def test_blocking_engine_and_stream_are_described() -> None:
    model = ScriptedModel("abc")
    engine = SyncEngine("tiny", model.config, open_model=model)
    assert repr(engine) == "<SyncEngine model='tiny', state=not started>"
    with engine:
        stream = engine.generate("x", request_id="mine")
        assert stream.result().text == "abc"
        assert repr(stream) == "<SyncStream request_id=mine, state=ended (stop)>"
        assert shown(stream) == "SyncStream|request_id|mine|state|ended (stop)|"
        assert "state=open, executor=scripted" in repr(engine)
        assert "state|open|executor|scripted|" in shown(engine)
    assert repr(engine) == "<SyncEngine model='tiny', state=closed>"


@pytest.mark.parametrize("cls", [Engine, SyncEngine, TokenStream, SyncStream])
def test_objects_whose_constructor_has_failed_are_described(cls: type) -> None:
    half_made = cls.__new__(cls)
    assert repr(half_made).startswith(f"<{cls.__name__} state=not ")
    assert shown(half_made).startswith(f"{cls.__name__}|state|not ")
