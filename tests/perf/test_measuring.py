"""The measuring scripts on a tiny model and the CPU: they run, and their figures are right."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from msgspec import UNSET, to_builtins
from msgspec.structs import replace

from drift_sdk import ConfigError, Engine, PromptTooLong, SamplingParams, TokenStream
from drift_sdk.testing import scripted_engine
from perf import decode, models, startup
from perf.decode import measure, measure_one
from perf.harness.decoding import DecodeOptions, generation_seconds
from perf.harness.host import LoopLag, percentile, thread_seconds
from perf.harness.scenario import Scenario
from perf.harness.shapes import Model, prepare
from perf.harness.startup_process import Job, Startup
from perf.prefill import main as prefill_main

SHORT = (2, 66)
"""Lengths of generations that differ by more than what else happens on a busy machine."""


@pytest.fixture
def tiny(tmp_path: Path) -> Model:
    return prepare("tiny", tmp_path / "tiny")


@pytest.fixture(autouse=True)
def quick_speeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Speeds of the machine are measured in tests of their own."""
    monkeypatch.setattr("perf.harness.recording.read_bandwidth_tb_s", lambda device: 0.01)
    monkeypatch.setattr("perf.prefill.matmul_tflop_s", lambda device: 0.5)


@pytest.fixture
def short(even_clock: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command measures shorter generations."""
    monkeypatch.setattr(decode, "DecodeOptions", partial(DecodeOptions, lengths=SHORT))


@pytest.mark.slow
@pytest.mark.usefixtures("even_clock")
async def test_decode_run_has_plausible_figures(tiny: Model) -> None:
    options = DecodeOptions(repeats=2, lengths=(2, 34), max_model_len=128)
    reported: list[Any] = []
    scenarios = [Scenario.parse("single-16"), Scenario.parse("batch3-40")]
    runs = await measure(tiny, scenarios, options, 0.01, reported.append)
    assert reported == runs
    assert [(run.scenario, run.batch, run.context) for run in runs] == [
        ("single-16", 1, 16),
        ("batch3-40", 3, 40),
    ]
    for run in runs:
        assert run.executor == "eager" and run.dtype == "float32"
        assert run.tokens_per_s_min <= run.tokens_per_s <= run.tokens_per_s_max
        assert run.tokens_per_s == pytest.approx(run.batch / run.ms_per_round * 1e3)
        assert run.bytes_per_round == tiny.decode_bytes(run.batch, run.context + 18, 4)
        assert run.engine_cpu_ms_per_round is None or 0 < run.engine_cpu_ms_per_round < 1000
        assert 0 < run.loop_cpu_us_per_chunk < 100_000
        assert run.loop_lag_ms_p99 >= 0 and run.loop_lag_idle_ms_p99 >= 0


async def test_fixed_costs_of_a_generation_cancel_out(tiny: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """A generation takes 1 s plus 10 ms per token; the warm-up generations take a second longer."""
    calls: list[int] = []

    async def seconds(engine: object, prompts: object, num_tokens: int, **options: object) -> float:
        calls.append(num_tokens)
        return 1.0 + 0.01 * num_tokens + (len(calls) < 4)

    async def no_host(*arguments: object) -> None: ...

    monkeypatch.setattr("perf.decode.generation_seconds", seconds)
    monkeypatch.setattr("perf.decode.measure_host", no_host)
    async with scripted_engine() as engine:
        scenario, halves = Scenario.parse("batch2-16"), DecodeOptions(tensor_parallel=2, compares_gpus=True)
        run = await measure_one(engine, tiny, scenario, DecodeOptions(), 0.01)
        divided = await measure_one(engine, tiny, scenario, halves, 0.01)
    assert (run.num_gpus, divided.num_gpus) == (UNSET, 2)
    assert divided.bytes_per_round == run.bytes_per_round / 2
    del calls[13:]
    assert calls == [8, 264, 264] + [8, 264] * 5
    assert run.ms_per_round == pytest.approx(10.0)
    assert run.tokens_per_s_min == pytest.approx(200.0) and run.tokens_per_s_max == pytest.approx(200.0)


async def test_clock_starts_when_all_requests_are_queued() -> None:
    """32 additional steps of 2 ms take 64 ms, for one sequence and for four."""
    async with scripted_engine(lambda prompt, generated, seed: 65, step_s=0.002) as engine:
        for batch in (1, 4):
            prompts = [[70 + index] * 8 for index in range(batch)]
            short = await generation_seconds(engine, prompts, 2)
            long = await generation_seconds(engine, prompts, 34)
            assert 0.04 <= long - short < 0.4
        assert engine.stats().num_steps < 2 * (2 + 34) + 8


async def test_generation_cut_short_raises_an_error() -> None:
    async with scripted_engine(lambda prompt, generated, seed: 65) as engine:
        with pytest.raises(RuntimeError, match=r"completions of \[4\] tokens: expected 300 each"):
            await generation_seconds(engine, [[70] * (engine.max_model_len - 4)], 300)


async def test_rejected_prompt_ends_the_wait() -> None:
    async with scripted_engine() as engine:
        with pytest.raises(PromptTooLong):
            await generation_seconds(engine, [[70] * 8, [70] * engine.max_model_len], 2)


@pytest.mark.usefixtures("short")
def test_decode_writes_a_result_file(tmp_path: Path) -> None:
    out = tmp_path / "decode.json"
    arguments = ["--model", "tiny", "--device", "cpu", "--scenario", "batch2-16", "--repeats", "1"]
    decode.main([*arguments, "--out", str(out)])
    written = json.loads(out.read_text())
    assert written["read_bandwidth_tb_s"] == 0.01
    assert [run["scenario"] for run in written["runs"]] == ["batch2-16"]
    assert "temperature" not in written["runs"][0]


@pytest.mark.slow
def test_models_are_measured_in_turn_into_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "LENGTHS", (2, 18))
    out = tmp_path / "models.json"
    arguments = ["--models", "tiny", "tiny-experts", "--scenario", "batch2-16", "--device", "cpu"]
    models.main([*arguments, "--repeats", "1", "--tuning", "short", "--out", str(out)])
    runs = json.loads(out.read_text())["runs"]
    assert [(run["model"], run["scenario"]) for run in runs] == [
        ("tiny", "batch2-16"),
        ("tiny-experts", "batch2-16"),
    ]
    assert {run["config"] for run in runs} == {"tuning=short"}


def test_peers_leave_out_models_with_weights_of_their_own(
    tiny: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured: list[str] = []

    def peer(model: Model, *others: object) -> list[Any]:
        measured.append(model.name)
        return []

    async def note(model: Model, *others: object) -> None:
        """Measure nothing."""

    found = {"tiny": tiny, "tiny-experts": replace(tiny, name="tiny-experts", load="auto")}
    monkeypatch.setattr(models, "prepare", lambda name, folder: found[name])
    monkeypatch.setattr(models, "measure", note)
    monkeypatch.setitem(models.PEERS, "vllm", peer)
    arguments = ["--models", "tiny-experts", "tiny", "--peer", "vllm", "--device", "cpu"]
    models.main([*arguments, "--out", str(tmp_path / "models.json")])
    assert measured == ["tiny"]
    assert "tiny-experts: not measured with vllm, which take random weights alone" in capsys.readouterr().out


def test_numbers_of_gpus_are_measured_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[tuple[int, bool]] = []

    async def note(model: object, scenarios: object, options: DecodeOptions, *others: object) -> None:
        found.append((options.tensor_parallel, options.compares_gpus))

    monkeypatch.setattr("perf.decode.measure", note)
    arguments = ["--model", "tiny", "--device", "cpu", "--out", str(tmp_path / "runs.json")]
    decode.main([*arguments, "--tensor-parallel", "1", "2"])
    assert found == [(1, True), (2, True)]


@pytest.mark.slow
@pytest.mark.usefixtures("short")
def test_sampled_runs_are_sampled_and_recorded_as_sampled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: set[tuple[float, float]] = set()
    generate = Engine.generate

    def noting(engine: Engine, prompt: Any, params: SamplingParams) -> TokenStream:
        asked.add((params.temperature, params.top_p))
        return generate(engine, prompt, params)

    monkeypatch.setattr(Engine, "generate", noting)
    out = tmp_path / "sampled.json"
    arguments = ["--model", "tiny", "--device", "cpu", "--scenario", "batch2-16", "--repeats", "1"]
    decode.main([*arguments, "--temperature", "0.8", "--top-p", "0.9", "--out", str(out)])
    (run,) = json.loads(out.read_text())["runs"]
    assert (run["temperature"], run["top_p"]) == (0.8, 0.9)
    assert asked == {(0.8, 0.9)}
    with pytest.raises(SystemExit):
        decode.main([*arguments, "--temperature", "0.8", "--peer", "vllm"])


@pytest.mark.usefixtures("short")
def test_every_eighth_request_has_the_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []
    generate = Engine.generate

    def noting(engine: Engine, prompt: Any, params: SamplingParams) -> TokenStream:
        asked.append(params.logits_processors)
        return generate(engine, prompt, params)

    monkeypatch.setattr(Engine, "generate", noting)
    out = tmp_path / "decode.json"
    arguments = ["--model", "tiny", "--device", "cpu", "--scenario", "batch9-16", "--repeats", "1"]
    decode.main([*arguments, "--processor", "bias", "--out", str(out)])
    runs = json.loads(out.read_text())["runs"]
    assert [run.get("config") for run in runs] == [None, "processor=bias"]
    num_plain = asked.index((decode.PROCESSORS["bias"],))
    assert not any(asked[:num_plain])
    assert [bool(given) for given in asked[num_plain:]] == [True, *[False] * 7, True] * (
        len(asked[num_plain:]) // 9
    )


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (["--weights", "int4", "--peer", "vllm"], "--peer vllm: expected none with --weights int4"),
        (["--peer", "vllm-marlin"], "--peer vllm-marlin: expected transformers or vllm without --weights"),
    ],
)
def test_peers_are_not_compared_with_other_weights(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        decode.main(["--model", "tiny", "--device", "cpu", *arguments])
    assert expected in capsys.readouterr().err


def test_prefill_writes_a_result_file(tmp_path: Path) -> None:
    out = tmp_path / "prefill.json"
    arguments = ["--model", "tiny", "--device", "cpu", "--tokens", "64", "200", "--repeats", "2"]
    prefill_main([*arguments, "--prefill-token-budget", "128", "--out", str(out)])
    runs = json.loads(out.read_text())["runs"]
    assert [(run["context"], run["prefill_token_budget"]) for run in runs] == [(64, 128), (200, 128)]
    for run in runs:
        assert run["tokens_per_s"] == pytest.approx(run["context"] / run["seconds"], rel=1e-3)
        assert run["seconds_min"] <= run["seconds"] <= run["seconds_max"]


def test_fast_prompts_need_the_graph_executor(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        prefill_main(["--model", "tiny", "--device", "cpu", "--fast-prompts"])
    assert "--fast-prompts: expected the graph executor" in capsys.readouterr().err


def test_strict_prefill_is_refused_on_a_cpu(tmp_path: Path) -> None:
    arguments = ["--model", "tiny", "--device", "cpu", "--tokens", "64", "--strict-performance"]
    with pytest.raises(ConfigError, match="strict_performance"):
        prefill_main([*arguments, "--out", str(tmp_path / "prefill.json")])


@pytest.mark.slow
def test_startup_measures_a_cold_and_a_warm_run(tiny: Model) -> None:
    runs = startup.measure(tiny, device="cpu", dtype="float32", executor="auto", repeats=1)
    assert [run.kernel_cache for run in runs] == ["cold", "warm"]
    for run in runs:
        assert run.import_s > 0  # of a process of its own
        assert list(run.stages)[:4] == ["imports", "find", "load tokenizer", "load weights"]
        assert sum(run.stages.values()) == pytest.approx(run.start_s, abs=0.01)
        assert run.start_s < run.first_token_s < run.process_s
        assert run.gpu_memory_gib is None and 0.05 < run.process_memory_gib < 20
        assert to_builtins(run)["scenario"] == "startup"


def test_warm_startup_is_the_median_of_all(tiny: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = iter((9.0, 3.0, 2.0, 5.0, 4.0))  # from the imports to the first token

    begun_at = list[float]()

    def start(job: Job, environment: dict[str, str]) -> Startup:
        begun_at.append(job.started_at)
        length = next(lengths)
        stages = {"imports": 10.0 - length}
        return Startup(
            executor="eager",
            num_prompt_tokens=8,
            stages=stages,
            start_s=9.5,
            first_token_s=10.0,
            process_s=11.0,
            gpu_memory_gib=None,
            process_memory_gib=1.0,
        )

    monkeypatch.setattr(startup, "start_up", start)
    monkeypatch.setattr(startup, "import_seconds", lambda environment: 0.1)
    clock = count()
    monkeypatch.setattr(startup.time, "time", lambda: next(clock))
    cold, warm = startup.measure(tiny, device="cpu", dtype="float32", executor="auto", repeats=4)
    assert (cold.num_repeats, cold.after_imports_s_min, cold.after_imports_s_max) == (1, 9.0, 9.0)
    assert (warm.num_repeats, warm.after_imports_s_min, warm.after_imports_s_max) == (4, 2.0, 5.0)
    assert warm.stages == {"imports": 7.0}
    assert begun_at == [0, 1, 2, 3, 4], "each process has its own start"


@pytest.mark.slow
def test_startup_keeps_bytecode(tiny: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A warm start compiles no modules, even in an environment that keeps none of the compiled ones."""
    environments = []

    def failing_start(job: Job, environment: dict[str, str]) -> Startup:
        environments.append(environment)
        raise InterruptedError

    monkeypatch.setattr(startup, "start_up", failing_start)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", str(tmp_path))
    with pytest.raises(InterruptedError):
        startup.measure(tiny, device="cpu", dtype="float32", executor="auto", repeats=1)
    assert [each["PYTHONDONTWRITEBYTECODE"] for each in environments] == [""]
    compiled = {file.name.partition(".")[0] for file in tmp_path.rglob("drift_sdk/*.pyc")}
    assert {"engine", "stream"} <= compiled


async def test_lag_equals_the_time_that_the_loop_was_blocked() -> None:
    async with LoopLag() as idle:
        await asyncio.sleep(0.05)
    async with LoopLag() as held:
        await asyncio.sleep(0.01)
        time.sleep(0.05)  # noqa: ASYNC251 - blocks the loop on purpose
        await asyncio.sleep(0.01)
    assert held.ms_p99 >= 45
    assert idle.lags_s
    assert min(idle.lags_s) > -0.001


def test_percentile_is_the_smallest_value_not_exceeded_by_its_share() -> None:
    values = [float(value) for value in range(1, 101)]
    assert [percentile(values, share) for share in (0.0, 0.5, 0.99, 1.0)] == [1.0, 50.0, 99.0, 100.0]
    assert percentile([3.0], 0.99) == 3.0


def test_thread_seconds_measures_the_cpu_time_of_a_thread() -> None:
    is_busy, is_over = threading.Event(), threading.Event()

    def work() -> None:
        while time.thread_time() < 0.05:
            sum(range(1000))
        is_busy.set()
        is_over.wait()

    thread = threading.Thread(target=work, name="measured")
    thread.start()
    try:
        is_busy.wait()
        assert 0.04 < (thread_seconds("measured") or 0.05) < 1.0
        with pytest.raises(ValueError, match="unknown"):
            thread_seconds("unknown")
    finally:
        is_over.set()
        thread.join()
