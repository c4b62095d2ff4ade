"""Every example runs unchanged: as the program of a process of its own, or of this one."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import batch
import chat
import command_line
import dashboard
import httpx
import pytest
import smollm2
from model_zoo import make_model
from rich.console import Console
from rich.live import Live
from slow_cases import slow_after

import drift_sdk
from drift_sdk import Engine, EngineConfig, ModelLoadError, QueueFull, SamplingParams, TokenStream, ToolCall
from drift_sdk.driver.life_cycle import LoadedModel
from drift_sdk.testing import ScriptedEngine, ScriptedModel, scripted_engine

EXAMPLES = Path(__file__).parents[2] / "examples"
SUPPORT = {"command_line", "smollm2"}

Run = Callable[..., tuple[str, str]]


@pytest.fixture(scope="session", autouse=True)
def real() -> str:
    """SmolLM2. If it is missing, the first test downloads it."""
    return str(smollm2.path())


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model with random weights, for examples whose text does not matter. SmolLM2 takes seconds to load."""
    folder = tmp_path_factory.mktemp("small")
    make_model(1, folder)
    (folder / "chat_template.jinja").write_text(
        "{% for message in messages %}{{ message.content }}\n{% endfor %}"
    )
    return str(folder)


@contextmanager
def running(name: str, *arguments: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), *arguments]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env={**os.environ, **environment}
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs an example as the program of this process, which has imported torch already; returns its output on
    stdout and stderr."""

    def run_program(name: str, *arguments: str, stdin: str = "", status: int = 0) -> tuple[str, str]:
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        said = capsys.readouterr()
        assert ended.value.code == status, said.err
        return said

    return run_program


def use_script(monkeypatch: pytest.MonkeyPatch, reply: object, **options: Any) -> None:
    """Give examples a scripted engine in place of that of their model."""
    monkeypatch.setattr(drift_sdk, "Engine", lambda model: scripted_engine(reply, **options))


@pytest.mark.parametrize("is_short", slow_after(1, [True, False]))
def test_hello_streams_an_answer_of_the_default_model(is_short: bool) -> None:
    arguments = (str(smollm2.path()), "What is the capital of France?") if is_short else ()
    with running("hello", *arguments) as process:
        out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert "Warning" not in err and "Traceback" not in err, err
    assert "Paris" in out
    assert re.search(r"\[\d+ tokens, first after \d+ ms, [\d.]+ tok/s\]", out)
    drafted = re.search(r"\[with drafts: \d\.\d\d tokens a round, [\d.]+ times the speed without\]", out)
    assert bool(drafted) == smollm2.DRAFT.exists()  # an sdist has no drafts


def test_chat_answers_and_ends_at_end_of_input(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    use_script(monkeypatch, "Hello! How are you?")
    out, _ = run("chat", "any", "--max-tokens", "6", stdin="Say hello in one word.\n")
    assert out == "> Hello! [length]\n> "


def test_concurrent_streams_prints_all_answers(run: Run, small: str) -> None:
    out, _ = run("concurrent_streams", small, "3")
    assert [index for index in range(3) if f"\n{index:3d}  " in f"\n{out}"] == [0, 1, 2]
    assert re.search(r"3 streams, \d+ tokens in [\d.]+ s", out)


def test_pool_replays_the_streams_of_a_restarted_replica(run: Run, small: str) -> None:
    out, _ = run("pool", small)
    assert "replica 0 on cpu: open" in out
    # Which replica runs a request when it is restarted, and near ties of a real model, are not fixed.
    assert re.search(r"\d of 8 answers have the same tokens undisturbed", out)


def test_speculate_prints_equal_tokens(run: Run, small: str) -> None:
    out, _ = run("speculate", small)
    assert "the same tokens: True" in out
    # How much is drafted depends on measured times, and what is accepted on the text, which is a CPU's own.
    assert re.search(r"tokens per round: \d+\.\d\d\n", out)


def test_two_gpus_prints_equal_tokens(run: Run, small: str) -> None:
    out, _ = run("two_gpus", small, "--gpus", "1")
    assert "the same tokens: True" in out
    assert re.search(r"1 GPUs: [\d.]+ tok/s\none GPU: [\d.]+ tok/s", out)


def test_cancel_ends_requests_early(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    # A story takes eight seconds, and is read for half a second at most.
    use_script(monkeypatch, "la " * 200, step_s=0.02)
    out, _ = run("cancel", "any")
    assert "left the block after 'l" in out
    assert "cancel(): cancelled 'l" in out
    assert "timed out: True" in out
    assert "nothing lost: 'la la la la la l'" in out
    assert "running: 0 " in out


def test_dashboard_draws_for_some_seconds(run: Run, small: str) -> None:
    out, _ = run("dashboard", small, "--seconds", "3", "--streams", "3", "--max-tokens", "8")
    for word in ("drift_sdk", "running", "KV cache", "tokens/s", "streams"):
        assert word in out
    assert out.count("Write ") == 3
    assert re.search(r"[▁▂▃▄▅▆▇█]", out)


@pytest.mark.skipif(sys.platform == "win32", reason="no signals to send")
def test_dashboard_exits_without_traceback_on_ctrl_c(small: str) -> None:
    # As in a terminal, where every frame is drawn instead of only the last one.
    with running("dashboard", small, "--streams", "2", "--max-tokens", "8", FORCE_COLOR="1") as process:
        while "streams" not in process.stdout.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=300)
    assert (process.returncode, err) == (130, "")


def test_batch_continues_an_interrupted_run(run: Run, tmp_path: Path, small: str) -> None:
    prompts, answers = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    lines = (EXAMPLES / "prompts.jsonl").read_text().splitlines()[:5]
    options = (small, "--input", str(prompts), "--output", str(answers), "--max-tokens", "6")
    prompts.write_text("\n".join(lines[:3]) + "\n")
    _, err = run("batch", *options)
    assert "3/3" in err
    first = answers.read_text()
    assert len(first.splitlines()) == 3

    prompts.write_text("\n".join(lines) + "\n")
    answers.write_text(first + '{"text": "half a li')
    _, err = run("batch", *options)
    assert "3 of 5 are already in" in err
    assert "1/2" in err and "2/2" in err
    assert answers.read_text().startswith(first)
    assert [json.loads(line)["finish_reason"] for line in answers.read_text().splitlines()] == ["length"] * 5

    again = answers.read_text()
    run("batch", *options)
    assert answers.read_text() == again


OWN = '{"text": "a", "finish_reason": "stop"}\n'


@pytest.fixture
def scripted_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch example with a scripted engine."""
    config = EngineConfig(max_model_len=64, kv_cache_tokens=256)
    monkeypatch.setattr(batch, "Engine", lambda model: scripted_engine("fine", config=config))


def run_batch(source: Path, output: Path) -> None:
    anyio.run(batch.main, "any", source, output, SamplingParams(max_tokens=8))


@pytest.mark.parametrize(
    "content",
    [
        *("my notes", "my notes\n", "\n", "5\n", "[]\n", "{", "\xff\n"),
        *('{"prompt": "x"}\n', '{"text": "x"}\n', '{"text": 5, "finish_reason": "stop"}\n'),
        *(OWN + "notes\n", OWN + "notes", "notes\n" + OWN, OWN + "\n" + OWN, 3 * OWN),
    ],
)
def test_batch_does_not_change_a_file_of_others(content: str, tmp_path: Path, scripted_batch: None) -> None:
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "notes.txt"
    prompts.write_text(2 * '{"prompt": "x"}\n')
    output.write_text(content, encoding="latin-1")
    with pytest.raises(batch.FileError, match="notes.txt: "):
        run_batch(prompts, output)
    assert output.read_text(encoding="latin-1") == content


@pytest.mark.parametrize("rest", ["", "{", '{"te', '{"text": "half a \xe9', '{"error": "half'])
def test_batch_continues_after_complete_lines(rest: str, tmp_path: Path, scripted_batch: None) -> None:
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    prompts.write_text(3 * '{"prompt": "x"}\n')
    output.write_text(OWN + '{"error": "too long"}\n' + rest, encoding="latin-1")
    run_batch(prompts, output)
    new = '{"text": "fine", "finish_reason": "stop"}\n'
    assert output.read_text() == OWN + '{"error": "too long"}\n' + new


def test_batch_rejects_its_input_as_output(tmp_path: Path, scripted_batch: None) -> None:
    prompts = tmp_path / "prompts.jsonl"
    content = '{"prompt": "x"}\n{"prompt": "y"}'
    prompts.write_text(content)
    (tmp_path / "linked").symlink_to(prompts)
    os.link(prompts, tmp_path / "same")
    for name in ("prompts.jsonl", "linked", "same"):
        with pytest.raises(batch.FileError, match="is the input"):
            run_batch(prompts, tmp_path / name)
    assert prompts.read_text() == content


def test_batch_writes_errors_in_place_of_answers(
    tmp_path: Path, scripted_batch: None, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    texts = ["a", "long " * 20, "b", "\ud800", *("c" * n for n in range(80))]
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    run_batch(prompts, output)
    answers = [json.loads(line) for line in output.read_text().splitlines()]
    is_wrong = [len(text) > 63 or text in ("", "\ud800") for text in texts]
    assert ["error" in answer for answer in answers] == is_wrong
    assert "100 tokens" in answers[1]["error"]
    assert "line 2: prompt of 100 tokens" in capsys.readouterr().err
    before = output.read_bytes()
    run_batch(prompts, output)
    assert output.read_bytes() == before


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", None),
        (b'{"prompt": "x"}\nnot JSON\n', "line 2"),
        (b'{"prompt": 5}\n', "line 1"),
        (b'{"prompt": "x"}\n\n', "line 2"),
        (b"\xff\n", "expected UTF-8"),
        (None, "expected a file of prompts"),
    ],
)
def test_batch_names_the_error_in_its_input(
    content: bytes | None, message: str | None, tmp_path: Path, scripted_batch: None
) -> None:
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    if content is not None:
        prompts.write_bytes(content)
    if message is None:
        run_batch(prompts, output)
    else:
        with pytest.raises(batch.FileError, match=message):
            run_batch(prompts, output)
    assert not output.exists()


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (None, 0, ""),
        (KeyboardInterrupt(), 130, ""),
        (BrokenPipeError(32, "Broken pipe"), 1, ""),
        (ModelLoadError("no such model"), 1, "ModelLoadError: no such model\n"),
        (ExceptionGroup("tasks", [QueueFull("full")]), 1, "QueueFull: full\n"),
        (
            PermissionError(13, "Permission denied", "x"),
            1,
            "PermissionError: [Errno 13] Permission denied: 'x'\n",
        ),
    ],
)
def test_examples_exit_with_a_status_and_one_line(
    error: BaseException | None, status: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def program() -> None:
        if error is not None:
            raise error

    assert command_line.status_of(program) == status
    assert capsys.readouterr() == ("", said)


@pytest.mark.parametrize(
    "arguments", ["dashboard --max-tokens 3", "dashboard --seconds nan", "batch --max-tokens 0"]
)
def test_wrong_arguments_are_rejected(run: Run, arguments: str) -> None:
    name, *rest = arguments.split()
    out, err = run(name, *rest, status=2)
    assert out == ""
    assert f"error: argument {rest[0]}" in err.splitlines()[-1]


def ask(questions: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the chat example with a scripted engine."""
    config = EngineConfig(max_model_len=64, kv_cache_tokens=256)
    lines = iter(questions)

    def next_line(prompt: str) -> str:
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr(chat, "Engine", lambda model: scripted_engine("fine", config=config))
    monkeypatch.setattr("builtins.input", next_line)
    asyncio.run(chat.main("any", 64))


def test_chat_samples_as_the_model_recommends(monkeypatch: pytest.MonkeyPatch) -> None:
    defaults = SamplingParams(temperature=0.6, top_k=20)
    used: list[SamplingParams] = []
    submit = ScriptedEngine._submit

    def noting(engine: ScriptedEngine, prompt: Any, params: SamplingParams, *given: Any) -> TokenStream:
        used.append(params)
        return submit(engine, prompt, params, *given)

    monkeypatch.setattr(ScriptedEngine, "default_params", defaults)
    monkeypatch.setattr(ScriptedEngine, "_submit", noting)
    ask(["hello"], monkeypatch)
    assert used == [defaults.replace(max_tokens=64)]


def test_chat_continues_after_a_too_long_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ask(["long " * 20, "one", "two", "three", "four"], monkeypatch)
    said = capsys.readouterr()
    assert said.out.count("fine\n") == 3
    first, second, cleared = said.err.splitlines()
    assert first.startswith("PromptTooLong: ") and second.startswith("PromptTooLong: ")
    assert cleared == "the conversation is cleared: ask again"


@pytest.mark.skipif(sys.platform == "win32", reason="no signals to send")
def test_chat_exits_on_ctrl_c_while_loading_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ScriptedModel("fine")

    def interrupted(report: Callable[[str, float], None], limits: object = None) -> LoadedModel:
        os.kill(os.getpid(), signal.SIGINT)
        return model(report)

    engine = Engine("scripted", model.config, open_model=interrupted)
    monkeypatch.setattr(chat, "Engine", lambda model: engine)
    monkeypatch.setattr("builtins.input", lambda _: pytest.fail("asked for a question"))
    assert command_line.status_of(lambda: anyio.run(chat.main, "any", 64)) == 130


@pytest.mark.parametrize(("width", "height"), [(1, 1), (5, 3), (20, 5), (40, 100), (300, 80)])
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_dashboard_fits_terminals_of_any_size(width: int, height: int, encoding: str) -> None:
    async def draw() -> bytes:
        async with scripted_engine("fine " * 50) as engine:
            load = dashboard.Load(engine, num_lanes=3, max_tokens=20)
            for lane in load.lanes:
                lane.state, lane.question, lane.text = "running", "Write a limerick.", "There was é " * 20
            board = dashboard.Dashboard(load)
            board._rates.extend(range(100))
            raw = io.BytesIO()
            file = io.TextIOWrapper(raw, encoding, errors="replace")
            console = Console(file=file, width=width, height=height, force_terminal=True, color_system=None)
            with Live(board, console=console, auto_refresh=False) as live:
                live.refresh()
            file.flush()
            return raw.getvalue()

    drawn = re.sub(rb"\x1b\[[?\d;]*[A-Za-z]", b"", asyncio.run(draw())).decode(encoding)
    lines = drawn.replace("\r", "\n").splitlines()
    assert max(map(len, lines)) <= width


def test_structured_prints_a_recipe(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = {"title": "Soup", "minutes": 30, "level": "easy", "ingredients": ["tomatoes", "salt"]}
    use_script(monkeypatch, [json.dumps(recipe), "1969-07-20"])
    out, _ = run("structured", "any")
    assert "decoded: Recipe(title='Soup', minutes=30," in out
    assert "shopping list: tomatoes, salt\n" in out
    assert out.endswith("a date: 1969-07-20\n")


def test_embed_decide_prints_similarities_and_probabilities(run: Run, small: str) -> None:
    lines = run("embed_decide", small)[0].splitlines()
    assert [float(line[:6]) <= 1 for line in lines[:3]] == [True] * 3
    assert sorted(line.split()[-1] for line in lines[3:]) == ["cat", "dog", "fish"]
    assert sum(float(line.split("%")[0]) for line in lines[3:]) == pytest.approx(100, abs=0.3)


@pytest.mark.slow
def test_embed_decide_answers_with_a_real_model(run: Run, real: str) -> None:
    lines = run("embed_decide", real)[0].splitlines()
    similarities = {line[8:]: float(line[:6]) for line in lines[:3]}
    assert max(similarities, key=similarities.__getitem__).startswith("Dogs bark")
    assert [line.split()[-1] for line in lines[3:]] == ["dog", "cat", "fish"]
    assert sum(float(line.split("%")[0]) for line in lines[3:]) == pytest.approx(100, abs=0.3)


def test_tools_prints_call_and_result(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    call = ToolCall(name="get_weather", arguments={"city": "Lisbon", "unit": "celsius"})
    use_script(monkeypatch, [call, "Sunny, 21 degrees."])
    out, _ = run("tools", "any")
    assert "call:  get_weather {'city': 'Lisbon', 'unit': 'celsius'}\n" in out
    assert 'result: {"city": "Lisbon", "sky": "sunny", "temperature": 21, "unit": "celsius"}\n' in out
    assert out.endswith("\nSunny, 21 degrees.\n")


@contextmanager
def served(name: str, model: str) -> Iterator[httpx.Client]:
    """A client of an example that serves, which is interrupted at the end."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=300)
    with running(name, model, "--port", str(port)) as process, client:
        while True:
            try:
                client.get("/health")
                break
            except httpx.ConnectError:
                assert process.poll() is None
                time.sleep(0.1)
        yield client
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=300)
    assert process.returncode == 130, err
    assert "Application shutdown complete" in err


QUESTION = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 12}


@pytest.mark.skipif(sys.platform == "win32", reason="no signals to send")
def test_http_server_serves_until_interrupted(small: str) -> None:
    with served("http_server", small) as client:
        answer = client.post("/v1/chat/completions", json={**QUESTION, "temperature": 0}).json()
        assert answer["choices"][0]["message"]["role"] == "assistant"
        assert 1 <= answer["usage"]["completion_tokens"] <= 12


@pytest.mark.skipif(sys.platform == "win32", reason="no signals to send")
def test_embed_fastapi_serves_endpoints_of_its_own_and_those_of_the_protocol(small: str) -> None:
    with served("embed_fastapi", small) as client:
        assert client.post("/summary", json={"text": "Once upon a time"}).json()["summary"]
        assert client.post("/summary", json={"text": "long" * 1000}).status_code == 400
        assert client.post("/llm/v1/messages", json=QUESTION).json()["role"] == "assistant"


def test_every_example_is_tested() -> None:
    names = {file.stem for file in EXAMPLES.glob("*.py")} - SUPPORT
    files = (file.stem for file in Path(__file__).parent.glob("test_*.py"))
    tests = "\n".join((*files, *(name for name in globals() if name.startswith("test_"))))
    assert not [name for name in names if f"test_{name}" not in tests]
