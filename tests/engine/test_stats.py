"""Statistics, histograms and log lines of an engine."""

from __future__ import annotations

import builtins
import logging
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import msgspec
import pytest
import torch
from loops import WAIT_S, on_every_loop, run, until
from prometheus_client import REGISTRY, CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from drift_sdk import (
    Chunk,
    ConfigError,
    DriftError,
    Engine,
    EngineClosed,
    EngineConfig,
    EngineStats,
    ExecutorError,
    QueueFull,
    RequestError,
    SamplingParams,
    prometheus,
)
from drift_sdk.driver.requests import RequestRegistry
from drift_sdk.driver.stats_recorder import StatsRecorder
from drift_sdk.startup.executor_factory import choose_executor
from drift_sdk.stats import Histogram, Histograms
from drift_sdk.steps import SlotOutput, StepResult
from drift_sdk.testing import ScriptedModel, scripted_engine

ENDLESS = SamplingParams(max_tokens=None, ignore_eos=True)
SECRET = "the quick brown fox"


def samples(text: str) -> dict[tuple[str, ...], float]:
    """Every sample of a Prometheus text by (name, label values...)."""
    return {
        (sample.name, *(str(value) for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def one_token() -> SimpleNamespace:
    """A stand-in for a `Delta` of one token."""
    return SimpleNamespace(output=SlotOutput(token_ids=(1,)), verification="whole")


def idle_scheduler() -> Any:
    return SimpleNamespace(
        config=SimpleNamespace(max_num_seqs=1, num_blocks=1, num_window_blocks=0),
        num_running=0,
        num_waiting=0,
        num_queued=0,
        num_free_blocks=1,
        num_cached_blocks=0,
        num_free_window_blocks=0,
        num_recomputed_tokens=0,
        num_preemptions=0,
        checkpoints=None,
    )


def test_histogram_bounds_are_inclusive() -> None:
    histogram = Histogram((1.0, 2.0, 5.0))
    for value in (0.5, 1.0, 1.1, 5.0, 5.1, 100.0):
        histogram.observe(value)
    histogram.observe(2.0, times=3)
    assert histogram.counts == [2, 4, 1, 2]
    assert histogram.total == 0.5 + 1.0 + 1.1 + 5.0 + 5.1 + 100.0 + 3 * 2.0


@on_every_loop
def test_every_request_is_counted_by_its_end(loop: str) -> None:
    async def main() -> None:
        async with scripted_engine("Hello!", step_s=0.001) as engine:
            before = engine.stats()
            assert before.num_submitted == before.num_generated_tokens == before.num_steps == 0
            assert before.num_blocks == before.num_free_blocks > 0

            completions = [await engine.generate("abc") for _ in range(3)]
            completions.append(await engine.generate("abcd", SamplingParams(max_tokens=2)))
            completions.append(await engine.generate("abc", SamplingParams(stop="l")))
            stream = engine.generate("abcde", ENDLESS)
            await anext(stream)
            stream.cancel()
            completions.append(await stream)
            with pytest.raises(RequestError):
                await engine.generate([10_000])

            stats = engine.stats()
            assert stats.num_submitted == 7
            assert (stats.num_stopped, stats.num_length_limited) == (4, 1)
            assert (stats.num_cancelled, stats.num_failed) == (1, 1)
            assert stats.num_prompt_tokens == sum(c.usage.prompt_tokens for c in completions) == 21
            assert stats.num_cached_tokens == sum(c.usage.cached_tokens for c in completions)
            assert stats.num_generated_tokens == sum(c.usage.completion_tokens for c in completions)
            assert stats.num_steps >= 14
            assert stats.step_seconds == pytest.approx(stats.num_steps * 0.001)

            await until(lambda: engine.stats().num_running == 0)
            assert engine.stats().kv_use == 0.0

    run(loop, main)


async def test_stats_are_current_without_a_step() -> None:
    config = EngineConfig(max_model_len=512, kv_cache_tokens=2048, max_queued_requests=0, max_num_seqs=2)
    async with scripted_engine("Hello!", config=config) as engine:
        await engine.pause()
        streams = [engine.generate("x") for _ in range(2)]
        await until(lambda: engine.stats().num_waiting == 2)
        with pytest.raises(QueueFull):
            engine.generate("y")
        streams[0].cancel()
        await streams[0]
        stats = engine.stats()
        assert (stats.num_waiting, stats.num_cancelled, stats.num_rejected) == (1, 1, 1)
        await engine.resume()
        await streams[1]


async def test_stats_show_rows_and_kv_use_of_a_running_batch() -> None:
    """All are queued before the first step, and the fifth tokens wait until the test has looked."""
    has_looked = threading.Event()

    def held(prompt_ids: Sequence[int], output_ids: Sequence[int], seed: int) -> int:
        if len(output_ids) == 4:
            assert has_looked.wait(WAIT_S)
        return 65

    config = EngineConfig(max_model_len=512, kv_cache_tokens=1024, block_size=16, max_num_seqs=4)
    async with scripted_engine(held, config=config) as engine:
        await engine.pause()
        streams = [engine.generate(f"prompt {index}", ENDLESS) for index in range(3)]
        await until(lambda: engine.stats().num_queued == 3)
        await engine.resume()
        await until(lambda: engine.stats().num_decode_rows == 3)
        stats = engine.stats()
        assert stats.num_prefill_rows == 0
        assert stats.kv_use == 1 - stats.num_free_blocks / 64
        assert 3 / 64 <= stats.kv_use < 1.0
        has_looked.set()
        for stream in streams:
            stream.cancel()
            await stream


def test_rate_covers_the_last_five_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    recorder, scheduler = StatsRecorder(RequestRegistry(None)), idle_scheduler()
    request = SimpleNamespace(last_chunk_at=0.0, has_drafts=False)
    chunk, delta = (
        Chunk(text="x", token_ids=(1,) * 4),
        SimpleNamespace(output=SlotOutput(token_ids=(1,)), verification="whole"),
    )
    rates = []
    for step in range(1000):
        now[0] += 0.01 if step < 500 else 0.02
        recorder.collected(StepResult(step_id=step, prefill=(), decode=(), duration_s=0.01))
        recorder.extended(request, delta, chunk)
        recorder.publish(scheduler)
        rates.append(recorder.read().tokens_per_second)
    assert rates[400] == pytest.approx(400.0, rel=0.02)
    assert 210.0 < rates[600] < 390.0
    assert rates[999] == pytest.approx(200.0, rel=0.02)
    now[0] += 6.0
    assert recorder.read().tokens_per_second == 0.0


async def test_prometheus_text_agrees_with_the_statistics() -> None:
    async with scripted_engine("Hello!", step_s=0.002) as engine:
        async with anyio.create_task_group() as tasks:
            for index in range(5):
                tasks.start_soon(engine.generate(f"prompt {index}").completion)
        await engine.generate("x", SamplingParams(max_tokens=3))
        found, stats = samples(engine.metrics_text()), engine.stats()

    assert found["drift_engine_info", "scripted", "scripted"] == 1
    assert found["drift_requests_submitted_total",] == 6
    assert found["drift_requests_ended_total", "stop"] == 5
    assert found["drift_requests_ended_total", "length"] == 1
    assert found["drift_prompt_tokens_total",] == 41
    assert found["drift_generated_tokens_total",] == stats.num_generated_tokens == 5 * 7 + 3
    assert found["drift_kv_blocks",] == stats.num_blocks
    assert found["drift_time_to_first_token_seconds_count",] == 6
    assert found["drift_queue_seconds_count",] == 6
    assert found["drift_request_seconds_count",] == 6
    assert found["drift_time_between_tokens_seconds_count",] == 5 * 6 + 2
    assert found["drift_time_between_tokens_seconds_bucket", "0.001"] == 0
    assert found["drift_time_between_tokens_seconds_sum",] >= 32 * 0.002
    assert found["drift_step_seconds_count",] == stats.num_steps
    assert found["drift_step_seconds_sum",] == stats.step_seconds
    assert found["drift_request_prompt_tokens_sum",] == 41
    assert found["drift_request_completion_tokens_sum",] == 38
    assert found["drift_request_completion_tokens_bucket", "4.0"] == 1
    assert found["drift_request_completion_tokens_bucket", "+Inf"] == 6


def test_drafts_are_counted_round_by_round() -> None:
    recorder = StatsRecorder(RequestRegistry(None))
    rounds = [(3, 0), (3, 3), (3, 1), (0, 0), (2, 2), (3, 1), (1, 0)]
    for half in (rounds[:3], rounds[3:]):
        outputs = [SlotOutput(token_ids=(1,), num_drafted=d, num_accepted=a) for d, a in half]
        recorder.collected(StepResult(step_id=0, prefill=(), decode=tuple(outputs), duration_s=0.001))
    recorder.publish(idle_scheduler())
    stats = recorder.stats
    assert (stats.num_draft_rounds, stats.num_drafted_tokens, stats.num_accepted_tokens) == (6, 15, 7)
    assert stats.accepted_at == (4, 2, 1)
    assert stats.speculation.acceptance_length == 1 + 7 / 6
    assert stats.speculation.acceptance_histogram == (2, 2, 1, 1)

    found = samples(prometheus.metrics_text(stats, recorder.histograms, model="m", executor="e"))
    assert found["drift_draft_rounds_total",] == 6
    assert found["drift_rewound_tokens_total",] == 15 - 7
    assert found["drift_acceptance_length",] == 1 + 7 / 6
    assert [found["drift_acceptance_ratio", str(i)] for i in range(3)] == [4 / 6, 2 / 6, 1 / 6]
    assert found["drift_round_accepted_tokens_count",] == 6
    assert found["drift_round_accepted_tokens_sum",] == 7
    buckets = [found["drift_round_accepted_tokens_bucket", f"{bound}.0"] for bound in (0, 1, 2, 3, 16)]
    assert buckets == [2, 4, 5, 6, 6]


def test_streams_share_a_gap_only_from_the_same_step(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = StatsRecorder(RequestRegistry(None))
    chunk, delta = (
        Chunk(text="x", token_ids=(1,)),
        SimpleNamespace(output=SlotOutput(token_ids=(1,)), verification="whole"),
    )
    requests = [SimpleNamespace(last_chunk_at=last, has_drafts=False) for last in (10.0, 7.0, 10.0, 10.0)]
    monkeypatch.setattr("time.monotonic", lambda: 10.004)
    recorder.collected(StepResult(step_id=0, prefill=(), decode=(), duration_s=0.004))
    for request in requests:
        recorder.extended(request, delta, chunk)
    recorder._close_gap()
    gaps = recorder.histograms.time_between_tokens
    assert gaps.counts[gaps.bounds.index(0.005)] == 3
    assert gaps.counts[gaps.bounds.index(5.0)] == 1
    assert gaps.total == pytest.approx(3 * 0.004 + 3.004)
    assert {request.last_chunk_at for request in requests} == {10.004}


async def test_request_counts_as_running_before_its_first_step_is_done() -> None:
    has_looked = threading.Event()

    def held(prompt_ids: Sequence[int], output_ids: Sequence[int], seed: int) -> int:
        assert has_looked.wait(WAIT_S)
        return 65

    async with scripted_engine(held) as engine:
        stream = engine.generate("x", SamplingParams(max_tokens=1))
        await until(lambda: engine.stats().num_running == 1)
        assert engine.stats().num_steps == 0
        has_looked.set()
        await stream


async def test_engines_have_separate_prometheus_registries() -> None:
    async with scripted_engine("a") as first, scripted_engine("b") as second:
        await first.generate("x")
        assert samples(first.metrics_text())["drift_requests_submitted_total",] == 1
        assert samples(second.metrics_text())["drift_requests_submitted_total",] == 0

    assert not any(family.name.startswith("drift") for family in REGISTRY.collect())


async def test_engines_share_the_families_of_a_collector() -> None:
    engines = {"one": scripted_engine("a"), "two": scripted_engine("bcd"), "closed": scripted_engine("e")}
    registry = CollectorRegistry()
    registry.register(prometheus.collector(engines, labels={"zone": "eu"}))
    async with engines["one"] as one, engines["two"] as two:
        await one.generate("x")
        await two.generate("xyz")
        await two.generate("xyz")
        text = generate_latest(registry).decode()
        types = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
        assert len(types) == len(set(types)) > 20

        alone = {engine: samples(engines[engine].metrics_text()) for engine in ("one", "two")}
        families = [family for family in text_string_to_metric_families(text) if family.samples]
        labels = [sample.labels for family in families for sample in family.samples]
        assert {(label["engine"], label["zone"]) for label in labels} == {("one", "eu"), ("two", "eu")}
        for engine in ("one", "two"):
            for name in ("requests_submitted_total", "generated_tokens_total", "request_prompt_tokens_sum"):
                value = registry.get_sample_value(f"drift_{name}", {"engine": engine, "zone": "eu"})
                assert value == alone[engine][f"drift_{name}",]
        stopped = {"engine": "two", "zone": "eu", "reason": "stop"}
        assert registry.get_sample_value("drift_requests_ended_total", stopped) == 2

    assert "drift_requests_submitted_total{" not in generate_latest(registry).decode()
    engines["four"] = scripted_engine("f")
    async with engines["four"]:
        assert 'engine="four"' in generate_latest(registry).decode()


@pytest.mark.parametrize("auto_describe", [True, False])
def test_second_collector_in_a_registry_is_rejected(auto_describe: bool) -> None:
    """Two would give two families of each name, also while no engine is open."""
    registry = CollectorRegistry(auto_describe=auto_describe)
    registry.register(prometheus.collector({"one": scripted_engine("a")}))
    with pytest.raises(ValueError, match="Duplicated"):
        registry.register(prometheus.collector({"two": scripted_engine("b")}))


@pytest.mark.parametrize(
    "labels", [{"engine": "x"}, {"le": "x"}, {"a b": "x"}, {"": "x"}, {"__x": "x"}, {"1": "x"}, {7: "x"}]
)
def test_names_that_cannot_be_labels_are_rejected(labels: Any) -> None:
    with pytest.raises(ConfigError, match=r"labels=.*: expected names of letters"):
        prometheus.collector({}, labels=labels)


def test_wrong_arguments_of_a_collector_are_rejected() -> None:
    with pytest.raises(ConfigError, match="labels=7: expected strings as values"):
        prometheus.collector({}, labels={"zone": 7})
    for labels in ([("zone", "eu")], "zone", [], ""):
        with pytest.raises(ConfigError, match="labels=.*: expected a mapping of names to strings, or None"):
            prometheus.collector({}, labels=labels)
    with pytest.raises(ConfigError, match="engines=.*: expected a mapping"):
        prometheus.collector([scripted_engine("a")])
    with pytest.raises(ConfigError, match="values that are engines"):
        prometheus.collector({"a": scripted_engine("a"), "b": 5})


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("owner/name", "owner/name"),
        ("owner/name:Q4_K_M", "owner/name:Q4_K_M"),
        ("/srv/secret/small", "small"),
        (Path("/srv/secret/small.gguf"), "small.gguf"),
        ("/srv/secret/small/", "small"),
        ("./secret/small", "small"),
        ("../small", "small"),
        ("~/small", "small"),
        (".", Path.cwd().name),
        (Path("models/small"), "small"),
        ("/", "/"),
    ],
)
async def test_metrics_name_the_model_without_its_folder(model: str | Path, name: str) -> None:
    async with Engine(model, open_model=ScriptedModel("x")) as engine:
        assert engine.metrics().model == name
        assert samples(engine.metrics_text())["drift_engine_info", "scripted", name] == 1


async def test_names_that_cannot_be_encoded_are_escaped() -> None:
    """A path may have bytes that are no UTF-8, for which Python has lone surrogates."""
    async with Engine("a\udcffb", open_model=ScriptedModel("x")) as engine:
        assert r'model="a\\udcffb"' in engine.metrics_text()
        registry = CollectorRegistry()
        registry.register(prometheus.collector({"e\udcff": engine}, labels={"zone": "z\udcff"}))
        text = generate_latest(registry).decode()
        assert all(shown in text for shown in (r"a\\udcffb", r"e\\udcff", r"z\\udcff"))


def test_docstring_lists_every_metric() -> None:
    text = prometheus.metrics_text(EngineStats(), Histograms(), model="m", executor="e")
    listed = {
        line.split()[0].partition("{")[0] for line in prometheus.__doc__.splitlines() if line[:6] == "drift_"
    }
    found = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
    assert listed == found


async def test_metrics_text_without_prometheus_client_names_the_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    importing = builtins.__import__

    def without(name: str, *args: object):
        if name.startswith("prometheus_client"):
            raise ModuleNotFoundError(name)
        return importing(name, *args)

    monkeypatch.delitem(sys.modules, "drift_sdk.prometheus", raising=False)
    monkeypatch.setattr(builtins, "__import__", without)
    async with scripted_engine("a") as engine:
        with pytest.raises(DriftError, match=r"drift-engine\[metrics\]"):
            engine.metrics_text()


async def test_engine_is_open_until_it_is_closed_or_fails() -> None:
    engine = scripted_engine("a")
    assert not engine.is_open
    async with engine:
        assert engine.is_open
    assert not engine.is_open

    failing = scripted_engine(lambda *_: 1 // 0)
    async with failing:
        assert failing.is_open
        with pytest.raises(ExecutorError):
            await failing.generate("x")
        assert not failing.is_open


async def test_executor_has_a_name_while_the_engine_is_open() -> None:
    engine = scripted_engine("a")
    with pytest.raises(EngineClosed):
        _ = engine.executor
    async with engine:
        assert engine.executor == "scripted"
        await engine.sleep()
        assert engine.executor == "scripted"


async def test_log_contains_requests_but_no_texts(caplog: pytest.LogCaptureFixture) -> None:
    """At level DEBUG the log has the start and end of every request, and no text of prompts, completions or
    messages."""
    caplog.set_level(logging.DEBUG, "drift_sdk")
    answer = "jumps over the lazy dog"
    async with scripted_engine(answer) as engine:
        stream = engine.generate(SECRET, SamplingParams(stop=("lazy dog",)))
        assert SECRET not in (await stream).text
        await engine.chat([{"role": "user", "content": SECRET}])
        for prompt in (f"{SECRET} " * 400, [10**6, 10**7]):
            with pytest.raises(RequestError):
                await engine.generate(prompt)
        with pytest.raises(DriftError):
            await engine.chat([{"role": "user", "content": SECRET, "tool_calls": object()}, {SECRET: SECRET}])
        await engine.sleep()
        await engine.wake()

    messages = [record.getMessage() for record in caplog.records if record.name == "drift_sdk"]
    log = "\n".join([*messages, *(str(record.args) for record in caplog.records)])
    for text in (SECRET, "quick", answer, "lazy", "fox"):
        assert text not in log
    assert f"{stream.request_id} starts: prompt of {len(SECRET)} tokens" in messages
    assert any(line.startswith(f"{stream.request_id} ends (stop): {len(SECRET)} prompt") for line in messages)
    assert any(line.endswith("ends: PromptTooLong") for line in messages)
    levels = {line.split()[0]: record.levelno for line, record in zip(messages, caplog.records, strict=True)}
    for word in ("ready", "asleep", "awake", "closed"):
        assert levels[word] == logging.INFO


async def test_fallback_of_executor_auto_is_logged_as_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    model = ScriptedModel("a")

    def open_fallback(report, limits=None):
        return msgspec.structs.replace(
            model(report, limits), executor_name="eager", fallback="no graphs here"
        )

    async with Engine("scripted", model.config, open_model=open_fallback) as engine:
        await engine.sleep()
        await engine.wake()
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warnings == ["executor=auto chose eager: no graphs here"]


def test_executor_auto_gives_its_reason_for_eager_on_a_gpu() -> None:
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    name, fallback = choose_executor(EngineConfig(), gpu)
    assert (name == "eager") == (fallback is not None)
    assert choose_executor(EngineConfig(), cpu) == ("eager", None)
    assert choose_executor(EngineConfig(executor="eager"), gpu) == ("eager", None)
    with pytest.raises(ConfigError, match="executor='graph'.*NVIDIA GPU"):
        choose_executor(EngineConfig(executor="graph"), cpu)
