"""The service benchmark: its load, client, figures, and the processes that it starts and kills."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from perf import serving
from perf.harness.record import read
from perf.service.benchmark import Benchmark, Plan, visible_devices
from perf.service.children import Child, ChildFailed, ask_all
from perf.service.client import Drive, Record, drive, figures_of, token_gaps
from perf.service.engines import drift_engine, parse_settings, peer_of
from perf.service.load import CASES, OUTPUTS, PROMPTS, Case, Lengths, Request, requests_of
from perf.service.runs import ratio_table

SHORT = {"prompts": Lengths(8, 0.5, 4, 16), "outputs": Lengths(6, 0.5, 4, 12)}
VLLM = {
    "__init__.py": """
import sys
__version__ = "0.0.fake"
foreign = {"drift_sdk", "torch", "perf.harness.record", "perf.harness.shapes"} & set(sys.modules)
assert not foreign, foreign
""",
    "engine/arg_utils.py": """
class AsyncEngineArgs:
    def __init__(self, *, model, load_format, max_model_len, max_num_seqs, **settings):
        assert load_format == "dummy"
        self.max_model_len, self.max_num_seqs, self.settings = max_model_len, max_num_seqs, settings
""",
    "inputs.py": """
def tokens_input(prompt_token_ids):
    return {"type": "token", "prompt_token_ids": prompt_token_ids}
""",
    "sampling_params.py": """
class RequestOutputKind:
    DELTA = 1

class SamplingParams:
    def __init__(self, *, max_tokens, ignore_eos, temperature, top_p, detokenize, output_kind, skip_clone):
        assert ignore_eos and not detokenize and output_kind == RequestOutputKind.DELTA
        self.max_tokens = max_tokens
""",
    "usage/usage_lib.py": """
class UsageContext:
    OPENAI_API_SERVER = "server"
""",
    "v1/engine/async_llm.py": """
import asyncio
from types import SimpleNamespace

class AsyncLLM:
    def __init__(self, args):
        self.vllm_config = SimpleNamespace(
            cache_config=SimpleNamespace(num_gpu_blocks=100, block_size=16),
            scheduler_config=SimpleNamespace(max_num_seqs=args.max_num_seqs),
            model_config=SimpleNamespace(max_model_len=args.max_model_len),
        )
        self.seen = set()

    @classmethod
    def from_engine_args(cls, args, usage_context):
        return cls(args)

    async def generate(self, prompt, params, request_id):
        assert request_id not in self.seen
        self.seen.add(request_id)
        for number in (1, params.max_tokens - 1):
            await asyncio.sleep(0)
            completion = SimpleNamespace(token_ids=[7] * number)
            yield SimpleNamespace(outputs=[completion], num_cached_tokens=len(prompt["prompt_token_ids"]))
""",
}


def short(name: str, num_requests: int, **fields: Any) -> Case:
    return Case(name, num_requests, **SHORT | fields)


# The load.


def test_requests_depend_on_case_and_seed_only() -> None:
    for case in CASES:
        few = replace(case, num_requests=20)
        first, again = (requests_of(few, 1000, "0/0") for _ in range(2))
        assert first == again
        assert requests_of(few, 1000, "0/1") != first
        assert requests_of(replace(few, num_requests=10), 1000, "0/0") == first[:10]
        assert all(10 <= token < 1000 for request in first for token in request.prompt)
    closed, sampled = (requests_of(Case.parse(name), 1000, "0/0") for name in ("closed-64", "sampled-64"))
    assert not {tuple(request.prompt) for request in closed} & {tuple(request.prompt) for request in sampled}


def test_lengths_follow_their_distribution() -> None:
    requests = requests_of(replace(Case.parse("closed-64"), num_requests=2000), 100, "0/0")
    for lengths, found in (
        (PROMPTS, [len(request.prompt) for request in requests]),
        (OUTPUTS, [request.num_tokens for request in requests]),
    ):
        assert statistics.median(found) == pytest.approx(lengths.median, rel=0.1)
        assert lengths.least <= min(found) <= max(found) <= lengths.most


def test_prompts_share_prefixes() -> None:
    case = replace(Case.parse("prefix"), num_requests=60)
    requests = requests_of(case, 100_000, "0/0")
    assert len({tuple(request.prompt[:2000]) for request in requests}) == 8
    assert len({tuple(request.prompt[:2001]) for request in requests}) == 60
    assert all(2016 <= len(request.prompt) <= 2256 for request in requests)


def test_arrivals_of_an_open_loop_are_exponential() -> None:
    times = [request.due_s for request in requests_of(Case.parse("open-20"), 100, "0/0")]
    assert times == sorted(times)
    assert times[-1] == pytest.approx(20, rel=0.15)
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert statistics.stdev(gaps) == pytest.approx(statistics.mean(gaps), rel=0.2)  # exponential


def test_cases_are_fitted_to_model_and_drafts() -> None:
    prefix = Case.parse("prefix").fitted(1024)
    longest = prefix.prefix_tokens + prefix.prompts.most + prefix.outputs.most
    assert prefix.prefix_tokens > 0 and longest <= 1024
    assert Case.parse("closed-64").fitted(131_072) == Case.parse("closed-64")
    assert Case.parse("closed-64").with_drafts().num_requests > 530
    assert Case.parse("open-20").with_drafts().num_requests == 400
    assert Case.parse("prefix-30").num_prefixes == 30
    with pytest.raises(ValueError, match="max_model_len=600"):
        Case.parse("closed-1").fitted(600)
    for name in ("closed-0", "closed", "open-", "half-1", "prefix-0"):
        with pytest.raises(ValueError, match=name):
            Case.parse(name)


# The client.


class Ticks:
    """A clock that advances by one with every reading."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1
        return self.now


class FakeService:
    """Yields the first token of a request, then all others.

    wrong, missing, endless: number of the request that fails, that lacks a token, that does not end.
    on_alone:                called when all others have ended.
    """

    on_alone: Callable[[], None] = staticmethod(lambda: None)

    def __init__(self, wrong: int = -1, missing: int = -1, endless: int = -1) -> None:
        self.wrong, self.missing, self.endless = wrong, missing, endless
        self.num_sent = self.num_running = self.most_running = 0

    async def stream(self, request: Request, is_sampled: bool) -> AsyncIterator[int]:
        number = self.num_sent
        self.num_sent += 1
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            await asyncio.sleep(0)
            yield 1
            if number == self.endless:
                while self.num_running > 1:  # noqa: ASYNC110 - the others run at the loop's next turn
                    await asyncio.sleep(0)
                self.on_alone()
                await asyncio.Event().wait()
            if number == self.wrong:
                raise RuntimeError("out of order")

            await asyncio.sleep(0)
            yield request.num_tokens - 1 - (number == self.missing)
        finally:
            self.num_running -= 1


async def test_closed_loop_keeps_its_clients_busy() -> None:
    case = short("closed", 12, clients=3)
    requests, service = requests_of(case, 100, "0"), FakeService()
    driven = await drive(service, case, requests, 60, Ticks())
    assert service.most_running == 3
    assert [record.num_tokens for record in driven.records] == [request.num_tokens for request in requests]
    ends = sorted(record.ended_at for record in driven.records if record.ended_at is not None)
    assert len(ends) == 12
    begin, end = driven.window
    # The window opens when three have ended, and closes when a client finds nothing left to send.
    assert ends[2] < begin < ends[3]
    assert max(record.sent_at for record in driven.records) < end < driven.total_s
    assert ends[-3] < end < ends[-2]


async def test_open_loop_sends_requests_when_due() -> None:
    case = short("open", 20, rate=2000.0)
    requests = requests_of(case, 100, "0")
    driven = await drive(FakeService(), case, requests, 60)
    assert [record.sent_at for record in driven.records] == [request.due_s for request in requests]
    assert driven.window[0] == requests[4].due_s
    assert requests[-1].due_s <= driven.window[1] <= driven.total_s
    assert all(record.chunks[0][0] >= record.sent_at for record in driven.records)


async def test_load_is_cut_off_at_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is reached when one request is left."""
    case, service = short("closed", 6, clients=2), FakeService(endless=4)
    now = [0.0]
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now[0])
    service.on_alone = lambda: now.append(now.pop() + 1.0)
    driven = await drive(service, case, requests_of(case, 100, "0"), 0.05)
    monkeypatch.undo()
    found = figures_of(driven)
    assert (found["num_requests"], found["num_unfinished"], found["num_errors"]) == (6, 1, 0)
    assert driven.records[4].ended_at is None


async def test_failures_are_counted() -> None:
    case = short("closed", 6, clients=2)
    driven = await drive(FakeService(wrong=1, missing=3), case, requests_of(case, 100, "0"), 60)
    found = figures_of(driven)
    assert found["num_errors"] == 2
    assert found["first_error"] == "RuntimeError: out of order"
    expected = driven.records[3].num_tokens
    assert driven.records[3].error == f"{expected - 1} tokens: expected {expected}"


# The figures.


def test_chunk_of_several_tokens_has_a_gap_per_token() -> None:
    record = Record(8, 6, 0.0, [(1.0, 2), (1.6, 3), (1.7, 1)])
    gaps = list(token_gaps(record))
    assert [at for at, _ in gaps] == [1.6, 1.6, 1.6, 1.7]
    assert [gap for _, gap in gaps] == pytest.approx([0.2, 0.2, 0.2, 0.1])


def test_figures_cover_the_window() -> None:
    records = [
        Record(100, 3, 0.0, [(1.0, 1), (5.0, 2)], ended_at=5.0),  # sent before; its last tokens count
        Record(50, 3, 4.0, [(4.5, 1), (5.5, 1), (9.0, 1)], ended_at=9.0),  # ends after; its latencies count
        Record(20, 2, 7.0, [(8.5, 2)], ended_at=8.5),  # sent before the end of the window
        Record(30, 1, 7.5, [], ended_at=7.6, error="gone"),
        Record(10, 1, 8.5, [(9.5, 1)], ended_at=9.5),  # sent after the window
        Record(10, 9, 8.6, [(9.6, 1)]),  # cut off
    ]
    found = figures_of(Drive(records, (4.0, 8.0), 10.0))
    assert (found["window_s"], found["total_s"]) == (4.0, 10.0)
    assert found["tokens_per_s"] == (2 + 2) / 4
    assert found["whole_tokens_per_s"] == (3 + 3 + 2 + 1 + 1) / 10
    assert found["prompt_tokens_per_s"] == 50 / 4
    assert found["ttft_ms"] == {"p50": 500.0, "p95": 1500.0, "p99": 1500.0}
    assert found["itl_ms"] == {"p50": 2000.0, "p95": 2000.0, "p99": 2000.0}  # of 2.0, 2.0 and 1.0
    assert found["e2e_s"] == {"p50": 1.5, "p95": 5.0, "p99": 5.0}
    assert (found["num_requests"], found["num_window_requests"]) == (6, 2)
    assert (found["num_errors"], found["first_error"], found["num_unfinished"]) == (1, "gone", 1)


def test_latencies_have_percentiles() -> None:
    records = [Record(1, 1, 0.0, [(value / 1000, 1)], ended_at=1.0) for value in range(1, 101)]
    found = figures_of(Drive(records, (0.0, 1.0), 1.0))
    assert found["ttft_ms"] == {"p50": 50.0, "p95": 95.0, "p99": 99.0}
    assert found["itl_ms"] == {"p50": 0.0, "p95": 0.0, "p99": 0.0}


# Processes.

LIMIT_S = 120.0  # of an answer that comes
CHILD = """
import json, subprocess, sys
started = [subprocess.Popen(["sleep", "600"], start_new_session=is_alone).pid for is_alone in (False, True)]
for line in sys.stdin:
    doing = json.loads(line)["do"]
    if doing == "die":
        sys.exit(3)
    if doing == "hang":
        sys.stdin.read()
    print(json.dumps({"error": "refused"} if doing == "fail" else {"started": started}), flush=True)
"""


@pytest.fixture
def children(tmp_path: Path) -> Iterator[list[Child]]:
    """Two children, each with two processes: one in the child's group and one that has left it."""
    command = [sys.executable, "-I", "-S", "-c", CHILD]
    made = [Child(name, command, os.environ, tmp_path / name) for name in ("one", "two")]
    yield list(made)
    for child in made:
        child.kill()


def is_running(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize(
    ("doing", "message"), [("hang", "two did not answer in 1 s"), ("fail", "two failed:\nrefused")]
)
def test_failing_child_is_killed_with_its_descendants(
    children: list[Child],
    doing: str,
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one, two = children
    answers = ask_all(children, lambda child: {"do": "tell"}, LIMIT_S)
    two.send({"do": doing})
    with pytest.raises(ChildFailed, match=message):
        two.receive(1 if doing == "hang" else LIMIT_S)
    if doing == "hang":
        receive, offset_s = one.receive, [0.0]

        def receive_and_wait(limit_s: float) -> dict[str, Any]:
            answer = receive(limit_s)
            offset_s[0] += LIMIT_S  # so much later
            return answer

        monkeypatch.setattr(one, "receive", receive_and_wait)
        monotonic = time.monotonic
        monkeypatch.setattr(time, "monotonic", lambda: monotonic() + offset_s[0])
        assert list(ask_all(children, lambda child: {"do": "tell"}, LIMIT_S)) == [one]
    else:
        assert list(ask_all(children, lambda child: {"do": "fail" if child is two else "tell"}, LIMIT_S)) == [
            one
        ]
    assert children == [one]
    assert "two" in capsys.readouterr().err
    assert not any(map(is_running, [two.pid, *answers[two]["started"]]))
    assert all(map(is_running, [one.pid, *answers[one]["started"]]))
    one.kill()
    one.kill()
    assert not any(map(is_running, [one.pid, *answers[one]["started"]]))


def test_death_of_a_child_is_reported(children: list[Child], capsys: pytest.CaptureFixture[str]) -> None:
    one, two = children
    answers = ask_all(children, lambda child: {"do": "tell"}, LIMIT_S)
    # The processes that it started keep its output open.
    assert list(ask_all(children, lambda child: {"do": "die" if child is two else "tell"}, LIMIT_S)) == [one]
    assert "two ended with exit code 3" in capsys.readouterr().err
    in_group, alone = answers[two]["started"]
    assert not is_running(in_group)
    os.kill(alone, signal.SIGKILL)
    with pytest.raises(ChildFailed, match="two"):
        two.send({"do": "tell"})


def plan(folder: Path, **fields: Any) -> Plan:
    cases = [short("closed-2", 8, clients=2), short("open-500", 8, rate=500.0)]
    warm_ups = [short("warm-up", 2, clients=2)]
    return Plan(
        **{
            "cases": cases,
            "devices": [0],
            "logs": folder,
            "out": folder / "serving.json",
            "warm_ups": warm_ups,
            **fields,
        }
    )


def test_two_engines_are_measured_at_the_same_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    site = tmp_path / "site"
    for name, text in VLLM.items():
        (site / "vllm" / name).parent.mkdir(parents=True, exist_ok=True)
        (site / "vllm" / name).write_text(text)
    ours = drift_engine(None, None, [])
    theirs = peer_of(ours, "vllm", str(site), ["max_num_seqs=32"])
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    benchmark = Benchmark(plan(tmp_path, devices=[4, 5], repeats=2, swap=True), [ours, theirs])
    benchmark.measure()
    assert benchmark.num_failed == 0
    runs = read(tmp_path / "serving.json").runs
    assert {(run["case"], run["repeat"], run["engine"], run["gpu_index"]) for run in runs} == {
        (case, repeat, engine, gpu)
        for case in ("closed-2", "open-500")
        for repeat, engine, gpu in ((0, "drift", 4), (0, "vllm", 5), (1, "vllm", 4), (1, "drift", 5))
    }
    # One case after the other, each on both engines.
    assert [run["case"] for run in runs] == ["closed-2"] * 2 + ["open-500"] * 2 + ["closed-2"] * 2 + [
        "open-500"
    ] * 2
    for run, other in zip(runs[::2], runs[1::2], strict=True):
        assert run["num_tokens"] == other["num_tokens"] > 0
        assert run["num_prompt_tokens"] == other["num_prompt_tokens"]
        assert run["num_errors"] == other["num_errors"] == 0
    ours_first, theirs_first = sorted(runs[:2], key=lambda run: run["engine"])
    assert (ours_first["config"], ours_first["kv_cache_tokens"], ours_first["executor"]) == (
        None,
        65_536,
        "scripted",
    )
    assert (theirs_first["config"], theirs_first["kv_cache_tokens"]) == ("max_num_seqs=32", 1600)
    assert (
        "max_num_seqs=32" in theirs_first["settings"]
        and "enable_prefix_caching=True" in theirs_first["settings"]
    )
    assert theirs_first["num_cached_tokens"] == theirs_first["num_prompt_tokens"]
    assert ours_first["clients"] == 2 and ours_first["cpu_s"] > 0 and ours_first["num_steps"] > 0
    assert benchmark.results is not None
    rows = ratio_table(benchmark.results, "vllm")[2]
    assert [row[0] for row in rows] == ["closed-2", "open-500"]
    assert {process.pid for process in psutil.Process().children(recursive=True)} == before


def test_failing_engine_does_not_stop_the_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ours = drift_engine(None, None, [])
    benchmark = Benchmark(plan(tmp_path, devices=[0, 1]), [ours, peer_of(ours, "vllm", None, [])])
    benchmark.measure()
    assert benchmark.num_failed == 1
    assert [run["engine"] for run in read(tmp_path / "serving.json").runs] == ["drift", "drift"]
    assert "No module named 'vllm'" in capsys.readouterr().err


def test_command_compares_configurations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "WARM_UPS", ())
    out = tmp_path / "serving.json"
    serving.main(
        ["--model", "scripted", "--cases", "closed-2", "--num-requests", "8", "--out", str(out)]
        + ["--compare-set", "", "--compare-set", "max_num_seqs=1"]
    )
    runs = read(out).runs
    assert [run["config"] for run in runs] == [None, "max_num_seqs=1"]
    assert [run["max_num_seqs"] for run in runs] == [256, 1]
    assert runs[0]["num_tokens"] == runs[1]["num_tokens"]


def test_command_compares_replicas_and_routing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "WARM_UPS", ())
    out = tmp_path / "serving.json"
    serving.main(
        ["--model", "scripted", "--replicas", "3", "--cases", "closed-3", "--num-requests", "8"]
        + ["--out", str(out), "--compare-set", ""]
        + ["--compare-set", "affinity=null", "--compare-set", "replicas=1 processes=true"]
    )
    pooled, unrouted, single = read(out).runs
    assert [run["num_replicas"] for run in (pooled, unrouted, single)] == [3, 3, 1]
    assert pooled["num_tokens"] == unrouted["num_tokens"] == single["num_tokens"]
    assert not any(run["num_errors"] or run["num_unfinished"] for run in (pooled, unrouted, single))


def test_process_ends_when_its_input_is_closed(tmp_path: Path) -> None:
    engine = drift_engine(None, None, [])
    with Child("orphan", engine.job.command, engine.environment, tmp_path / "log") as child:
        assert child._process.stdin is not None
        child._process.stdin.close()
        assert child._process.wait(120) == -signal.SIGKILL


def test_wrong_options_of_the_command_line_are_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse_settings("a=1 b=0.5 c=true d=null e=graph") == {
        "a": 1,
        "b": 0.5,
        "c": True,
        "d": None,
        "e": "graph",
    }
    for arguments, message in (
        (["--set", "max_num_seqs"], "expected field=value"),
        (["--devices", "0", "1"], "--devices"),
        (["--peer", "vllm", "--compare-set", ""], "--compare-set"),
        (["--peer", "vllm", "--replicas", "2"], "--replicas"),
        (["--devices", "0", "--replicas", "2"], "expected 2, one for each replica"),
        (["--model", "scripted", "--peer", "vllm"], "expected both"),
        (["--cases", "closed"], "closed"),
    ):
        with pytest.raises(SystemExit):
            serving.arguments_of(arguments)
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("seen", "devices", "expected"),
    [
        (None, [1], "1"),
        ("", [0, 1], "0,1"),
        ("3", [0], "3"),
        ("2,GPU-ab", [1, 0], "GPU-ab,2"),
    ],
)
def test_devices_are_counted_among_those_that_the_process_sees(
    seen: str | None, devices: list[int], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """perf.measure gives each measurement a GPU: a service that took the first one disturbed another."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if seen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen)
    assert visible_devices(devices) == expected


def test_a_device_that_the_process_does_not_see_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with pytest.raises(ValueError, match=r"devices=\[1\]: expected below 1: CUDA_VISIBLE_DEVICES is 3"):
        visible_devices([1])
