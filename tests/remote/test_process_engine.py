"""Engines in child processes: streams, signals, killed children, and the ends of parents."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from failing_models import end_process, fail_to_open
from letters import HeldLetters, letters, outcome, outcomes, tokens_of
from loops import WAIT_S, run, until
from model_zoo import make_model

from drift_sdk import (
    Completion,
    ConfigError,
    DriftError,
    Engine,
    EngineConfig,
    EnginePool,
    ExecutorError,
    ModelLoadError,
    ProcessEngine,
    ReplicaFailed,
    RequestError,
    Routing,
    SamplingParams,
    TokenStream,
)
from drift_sdk.remote import connection, remote_engine
from drift_sdk.remote.host import read_frame
from drift_sdk.remote.remote_engine import PROGRAM, Program
from drift_sdk.testing import ScriptedModel
from perf.service.children import is_alive

SUPPORT = Path(__file__).parents[1] / "support"
TINY = EngineConfig(device="cpu", num_threads=1, max_model_len=64, kv_cache_tokens=512)


def engine_of(reply: Any = letters, **options: Any) -> ProcessEngine:
    model = ScriptedModel(reply, **options)
    return ProcessEngine("scripted", model.config, open_model=model)


def test_modules_of_the_working_directory_are_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("json", "asyncio", "msgspec", "drift_sdk", "sitecustomize", "letters"):
        (tmp_path / f"{module}.py").write_text("open(__file__ + '.ran', 'w')")
    monkeypatch.chdir(tmp_path)

    async def main() -> str:
        async with engine_of() as engine:
            return (await engine.generate([5], max_tokens=2)).text

    assert run("asyncio", main)
    assert not list(tmp_path.glob("*.ran"))


async def begin(pool: EnginePool, number: int, **options: Any) -> list[TokenStream]:
    """Streams that begin at once: none is held before all have a token."""
    await pool.pause()
    streams = [pool.generate(f"p{index}", seed=index, **options) for index in range(number)]
    for stream in streams:
        await stream.accepted()
    await pool.resume()
    return streams


def kill(engine: ProcessEngine) -> None:
    assert engine.pid is not None
    os.kill(engine.pid, signal.SIGKILL)


def check_nothing_is_left(pool: EnginePool) -> None:
    assert not pool._state.traffic._live
    assert all((load.num_requests, load.num_tokens) == (0, 0) for load in pool._state.router.loads)
    for engine in pool.engines:
        assert isinstance(engine, ProcessEngine) and engine._link is not None
        assert not engine._link.connection._live


class Unpicklable:
    def __call__(self, report: Any, limits: Any = None) -> Any: ...

    def __reduce__(self) -> Any:
        raise ValueError("no copy")


async def test_token_ids_that_cannot_be_sent_are_errors_of_the_prompt() -> None:
    class Local(int):
        pass

    async with engine_of() as engine:
        assert (await engine.generate([Local(ord("a"))], max_tokens=9, seed=1)).token_ids == tokens_of(
            "a", 1, 9
        )
        with pytest.raises(RequestError, match="prompt: expected a request that can be sent") as caught:
            await engine.generate([lambda: 1])
        assert caught.value.field == "prompt"
        with pytest.raises(RequestError, match="prompt: expected a request that can be sent"):
            await engine.count_tokens([lambda: 1])


async def test_child_serves_cancels_and_ignores_signals_for_its_parent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = engine_of(step_s=0.002)
    assert engine.pid is None
    async with engine:
        pid = engine.pid
        assert pid is not None and psutil.Process(pid).ppid() == os.getpid()
        os.kill(pid, signal.SIGINT)
        os.kill(pid, signal.SIGTERM)
        stream = engine.generate("a", max_tokens=None, ignore_eos=True)
        await anext(stream)
        stream.cancel()
        _, end = await outcome(stream)
        assert isinstance(end, Completion) and end.finish_reason == "cancelled"
        assert (
            engine.stats().num_cancelled == 1
        )  # the newest statistics come with the end of the last request
        assert (await engine.generate("a", max_tokens=9, seed=1)).token_ids == tokens_of("a", 1, 9)
        unread = engine.generate("b", max_tokens=500, seed=2)
        assert (await unread).token_ids == tokens_of("b", 2, 500)
        assert (await anext(unread)).token_ids == tokens_of("b", 2, 500)
        with monkeypatch.context() as forked:
            forked.setattr("drift_sdk.driver.life_cycle.num_forks", lambda: -1)
            assert engine.pid is None  # the child of another process
        await engine.aclose()
        assert not psutil.pid_exists(pid)


async def test_killed_children_of_a_pool_are_replayed_and_started_again(tmp_path: Path) -> None:
    """Replica 0 is killed while streams run on both; then replica 1, which has all that were replayed. No
    stream ends before."""
    held = HeldLetters(tmp_path / "go on", 250)
    engines = [engine_of(held), engine_of(held, tokens_per_step=2)]
    pool = EnginePool(engines, Routing(replay=True))
    async with pool:
        streams = await begin(pool, 40, max_tokens=300)
        first = [await anext(stream) for stream in streams]
        kill(engines[0])
        await until(lambda: pool.replicas()[0].num_replayed > 0)
        await pool.restart(0)
        kill(engines[1])
        held.file.touch()
        for index, (tokens, end) in enumerate(await outcomes(streams)):
            assert isinstance(end, Completion), end
            assert first[index].token_ids + tokens == end.token_ids == tokens_of(f"p{index}", index, 300)
        await until(lambda: pool.replicas()[1].state == "closed")
        assert pool.replicas()[0].state == "open"
        check_nothing_is_left(pool)


async def test_killed_child_without_replay_ends_its_streams_alone(tmp_path: Path) -> None:
    held = HeldLetters(tmp_path / "go on", 50)
    engines = [engine_of(held), engine_of(held)]
    async with EnginePool(engines) as pool:
        streams = await begin(pool, 8, max_tokens=100)
        for stream in streams:
            await anext(stream)
        kill(engines[1])
        held.file.touch()
        ends = [end for _, end in await outcomes(streams)]
        assert pool.stats().num_running == 0 and pool.replicas()[1].engine is not None
        lost = [end for end in ends if isinstance(end, ReplicaFailed)]
        assert len(lost) == pool.replicas()[1].num_lost == 4
        assert all("status -9" in str(end) and end.replica == 1 for end in lost)
        for index, end in enumerate(ends):
            if isinstance(end, Completion):
                assert end.token_ids == tokens_of(f"p{index}", index, 100)
        check_nothing_is_left(pool)


async def test_stopped_child_is_lost_after_a_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    async with engine_of(step_s=0.05) as engine:
        stream = engine.generate("a", max_tokens=300)
        await anext(stream)
        monkeypatch.setattr(connection, "SILENCE_S", 10.0)
        for _ in range(3):
            await anext(stream)  # from then on the new limit holds
        assert engine.pid is not None
        child = psutil.Process(engine.pid)
        child.suspend()
        _, end = await outcome(stream)
        assert isinstance(end, ExecutorError) and "it has not answered for 10 s" in str(end)
        await until(lambda: not is_alive(child))
        await engine.start()
        assert (await engine.generate("b", max_tokens=2)).finish_reason == "length"


def test_real_model_in_a_child_has_the_tokens_of_an_engine_here(tmp_path: Path) -> None:
    make_model(0, tmp_path)
    params = SamplingParams(max_tokens=12, temperature=0.9, seed=3, ignore_eos=True)

    async def main() -> None:
        async with Engine(tmp_path, TINY) as here:
            expected = await here.generate([5, 6, 7], params)
        async with ProcessEngine(tmp_path, TINY) as engine:
            found = await engine.generate([5, 6, 7], params)
            assert (found.token_ids, engine.executor) == (expected.token_ids, "eager")

    run("trio", main)


async def test_failing_starts_are_reported_and_leave_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = psutil.Process().children()
    with pytest.raises(ConfigError, match="open_model=.*another process can import"):
        await ProcessEngine("m", open_model=lambda report, limits=None: None).start()  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="open_model=.*another process can import"):
        await ProcessEngine("m", open_model=Unpicklable()).start()
    with pytest.raises(ModelLoadError, match="no such file"):
        await ProcessEngine("m", open_model=fail_to_open).start()
    with pytest.raises(ModelLoadError, match="ended while it started: its process has ended with status 7"):
        await ProcessEngine("m", open_model=end_process).start()
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(ModelLoadError, match="no process can be started"):
        await engine_of().start()
    assert set(psutil.Process().children()) <= set(before)


def test_child_ends_with_its_parent_though_a_fork_of_it_lives_on() -> None:
    """The fork has the parent's end of the socket: the child does not see that the other end is closed."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, str(SUPPORT / "orphan_parent.py")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        (fork,) = (each for each in psutil.Process(parent.pid).children() if each != child)
        parent.kill()
        try:
            deadline = time.monotonic() + WAIT_S
            while is_alive(child) and time.monotonic() < deadline:
                time.sleep(0.01)
            assert not is_alive(child) and is_alive(fork)
        finally:
            fork.kill()


def test_child_ends_if_its_parent_has_ended_before_its_program_began() -> None:
    """As above, while the child's interpreter starts: the system has given it another parent then."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        no_process = str(2**30)
        command = [sys.executable, "-c", PROGRAM, str(theirs.fileno()), no_process, json.dumps(sys.path)]
        assert (
            subprocess.run(command, pass_fds=[theirs.fileno()], timeout=WAIT_S, check=False).returncode == 0
        )


def test_a_loop_that_has_failed_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_engine, "_shared", {})
    failed = remote_engine.calls_loop()
    failed.post(sys.exit)
    failed._thread.join(WAIT_S)
    loop = remote_engine.calls_loop()
    assert loop is not failed and remote_engine.calls_loop() is loop
    loop.stop()


def test_forked_child_gets_a_loop_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread of the parent may have held the lock when it forked."""
    ours = remote_engine.calls_loop()
    num_forks = remote_engine.num_forks()
    with ThreadPoolExecutor(1) as threads, remote_engine._shared[num_forks].lock:
        monkeypatch.setattr(remote_engine, "num_forks", lambda: num_forks + 1)
        loop = threads.submit(remote_engine.calls_loop).result(WAIT_S)
        assert loop is not ours and remote_engine.calls_loop() is loop
    del remote_engine._shared[num_forks + 1]
    loop.stop()


def test_pool_on_devices_makes_processes_if_asked() -> None:
    pool = EnginePool.on_devices("m", EngineConfig(max_num_seqs=4), devices=["cuda:0", "cpu"], processes=True)
    assert [(type(each), each.config.device) for each in pool.engines] == [
        (ProcessEngine, "cuda:0"), (ProcessEngine, "cpu"),
    ]  # fmt: skip
    for wrong in ({"processes": 1}, {"on_event": print}, {"on_progress": print}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            EnginePool.on_devices("m", devices=["cpu"], **({"processes": True} | wrong))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="open_model=3"):
        ProcessEngine("m", open_model=3)  # type: ignore[arg-type]


WRONG_HOST = """
import os, pickle, socket, sys
end = socket.socket(fileno=int(sys.argv[1]))
end.recv(8)
send = lambda data, length=None: end.sendall((length or len(data)).to_bytes(8, "big") + data)
{send}
while end.recv(65536): pass
"""


@pytest.mark.parametrize(
    ("send", "message"),
    [
        ("send(b'no pickle')", "cannot be read: UnpicklingError"),
        ("send(b'a', 2**62)", "a message of 4611686018427387904 bytes: expected at most 1073741824"),
        ("send(pickle.dumps(5))", "cannot be read: TypeError"),
        ("send(pickle.dumps((7, None, b'')))", "cannot be read: KeyError"),
        ("send(pickle.dumps((0, StopIteration(), b'')))", "cannot be read: TypeError"),
        ("send(pickle.dumps((0, None, b'no pickle')))", "the answer of the engine's host to open cannot be"),
        ("send(b'a', 500), os._exit(3)", "status 3"),
    ],
)
async def test_child_that_sends_something_else_is_ended(
    send: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("drift_sdk.remote.remote_engine.PROGRAM", WRONG_HOST.format(send=send))
    children = set(psutil.Process().children())
    async with asyncio.timeout(WAIT_S):
        with pytest.raises(ModelLoadError, match=message):
            await engine_of().start()
    assert set(psutil.Process().children()) <= children


async def test_message_that_is_too_large_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async with engine_of() as engine:
        monkeypatch.setattr("drift_sdk.remote.host.MAX_FRAME_BYTES", 20_000)
        prompt = list(range(256)) * 50
        with pytest.raises(DriftError, match="bytes: expected at most 20000"):
            await engine.count_tokens("a" * 20_000)
        with pytest.raises(DriftError, match="bytes: expected at most 20000"):
            await engine.generate(prompt, max_tokens=3)
        assert (await engine.generate("a", max_tokens=9, seed=1)).token_ids == tokens_of("a", 1, 9)


async def test_answer_that_is_too_large_becomes_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Host:
        async def kind(self) -> str:
            return "a" * 5000

    monkeypatch.setattr("drift_sdk.remote.host.MAX_FRAME_BYTES", 2000)
    ours, theirs = socket.socketpair()
    reader, parent = await asyncio.open_connection(sock=ours)
    _, writer = await asyncio.open_connection(sock=theirs)
    program = Program(writer)
    program._host = Host()  # type: ignore[assignment]  # of one method
    await program._answer(3, "kind", pickle.dumps(()))
    number, error, found = await read_frame(reader)
    assert (number, found) == (3, b"") and "expected at most 2000" in str(error)
    for end in (parent, writer):
        end.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_forked_child_finds_the_engines_closed() -> None:
    command = [sys.executable, str(SUPPORT / "fork_remote.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
