"""The command line, partly in separate processes, as a user runs it."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from model_zoo import make_model
from random_folder import make_random_folder

from drift_sdk import (
    Chain,
    Download,
    Engine,
    EngineConfig,
    NGram,
    Progress,
    SamplingOptions,
    SamplingParams,
    Speculation,
    TokenStream,
    __version__,
)
from drift_sdk.cli import readiness
from drift_sdk.cli.command_line import main
from drift_sdk.cli.engine_start import hide_progress, show_progress
from drift_sdk.cli.readiness import Device, Warmed, examine, kernel_cache
from drift_sdk.driver.life_cycle import LoadedModel
from drift_sdk.testing import EOS_TOKEN_ID, ScriptedEngine, ScriptedModel, scripted_engine

COMMAND = [sys.executable, "-m", "drift_sdk"]
SCRIPTED = """
import json, sys
from drift_sdk.cli import command_line
from drift_sdk.cli import engine_start
from drift_sdk.testing import scripted_engine
reply = json.loads(sys.argv.pop(1))
engine_start.Engine = lambda *arguments, **options: scripted_engine(reply)
sys.exit(command_line.main())
"""
"""The command line with a scripted engine, whose reply is the first argument, as JSON."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_model(0, folder)
    template = "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    return folder


def run(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], input=stdin, capture_output=True, text=True, timeout=300)


def test_doctor_prints_what_it_finds() -> None:
    ran = run("doctor")
    assert ran.returncode == 0, ran.stderr
    for word in ("Python", "torch", "CUDA driver", "executor", "ready to run"):
        assert word in ran.stdout


def test_doctor_prints_the_same_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    diagnosis = examine()
    assert found["is_usable"] is True
    assert found["python"] == diagnosis.python == ".".join(map(str, sys.version_info[:3]))
    assert found["torch"] == diagnosis.torch
    assert found["executor"] == diagnosis.executor
    assert found["free_memory"] > 0
    assert found["packages"]["tokenizers"]


def test_doctor_fails_where_no_engine_can_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(readiness, "version_of", lambda name: None if name == "tokenizers" else "1.0")
    monkeypatch.setattr(readiness, "MIN_TORCH", (99, 0))
    assert main(["doctor"]) == 1
    said = capsys.readouterr().out
    assert "problem: tokenizers is not installed" in said
    assert "expected at least 99.0" in said
    assert "not usable" in said


def test_doctor_reports_a_gpu_that_torch_cannot_use(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(torch):
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(readiness, "gpus", broken)
    diagnosis = examine()
    assert not diagnosis.is_usable
    assert diagnosis.problems == ["CUDA does not work: no kernel image"]


def test_doctor_runs_where_the_engine_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """For example without numpy or gguf: users run doctor in such a case."""
    monkeypatch.setitem(sys.modules, "drift_sdk.startup.executor_factory", None)
    diagnosis = examine()
    assert diagnosis.executor is None
    (problem,) = diagnosis.problems
    assert problem.startswith("the engine cannot be imported: ")
    assert "drift_sdk.startup.executor_factory" in problem


def test_doctor_needs_packages_for_gpus_only_where_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readiness, "FOR_GPU", ("triton", "cuda-core"))
    monkeypatch.setattr(readiness, "version_of", lambda name: None if name in readiness.FOR_GPU else "9.9")
    gpu = Device(name="GPU", compute_capability="9.0", free_memory=1, total_memory=1)
    monkeypatch.setattr(readiness, "gpus", lambda torch: [])
    diagnosis = examine()
    assert (diagnosis.problems, diagnosis.is_usable) == ([], True)
    assert (
        "without triton, cuda-core: an engine on a GPU needs them, on the CPU it does not" in diagnosis.notes
    )
    monkeypatch.setattr(readiness, "gpus", lambda torch: [gpu])
    monkeypatch.setattr(readiness, "chosen_executor", lambda device: ("eager", "triton not installed"))
    assert examine().problems == ["triton is not installed", "cuda-core is not installed"]


def test_doctor_notes_that_torch_has_no_bytecode(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.__spec__, "cached", str(tmp_path / "torch.pyc"))
    (note,) = (note for note in examine().notes if "bytecode" in note)
    assert f"python -m compileall -q {Path(torch.__file__).parents[1]} writes it" in note
    (tmp_path / "torch.pyc").touch()
    assert not any("bytecode" in note for note in examine().notes)
    assert readiness.keeps_bytecode(sys)  # built in: nothing to compile


def test_progress_of_a_download_shows_files_and_bytes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    done = Download(num_files=3, num_files_done=1, num_bytes=4_080_000_000, num_bytes_done=400_000_000)
    show_progress(Progress(stage="download", fraction=0.098, download=done))
    show_progress(Progress(stage="load weights", fraction=0.5))
    hide_progress()
    _, first, second, hidden = capsys.readouterr().err.split("\r\x1b[K")
    assert first == "download: 10% (1 of 3 files, 0.40 of 4.08 GB)"
    assert (second, hidden) == ("load weights: 50%", "")


def test_doctor_names_the_extra_of_an_optional_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readiness, "version_of", lambda name: None if name == "llguidance" else "1.0")
    monkeypatch.setattr(readiness, "keeps_bytecode", lambda module: True)
    diagnosis = examine()
    assert diagnosis.notes == ['without llguidance: pip install "drift-engine[grammar]" adds it']
    assert diagnosis.is_usable


@pytest.mark.parametrize(
    ("text", "version"),
    [
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024",
            "550.54.15",
        ),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.124.06  Release Build", "570.124.06"),
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65  Sun Jul 27 07:15:51 UTC 2025", "580.65"),
        ("nothing of the kind", None),
    ],
)
def test_cuda_driver_version_is_read_from_the_kernel_module(
    text: str, version: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "version"
    file.write_text(f"{text}\nGCC version:  gcc version 11.4.0 (Ubuntu 11.4.0-1ubuntu1~22.04)\n")
    monkeypatch.setattr(readiness, "DRIVER_FILE", file)
    assert readiness.cuda_driver() == version


def test_diagnosis_lists_gpus() -> None:
    gib = 2**30
    device = Device(name="GPU", compute_capability="9.0", free_memory=70 * gib, total_memory=80 * gib)
    lines = msgspec.structs.replace(examine(), devices=[device], cuda_driver="570.1").text().splitlines()
    assert [line.split("  ")[-1] for line in lines if line.startswith("GPU 0")] == [
        "GPU, compute 9.0, 70.0 of 80.0 GiB free"
    ]


def test_chat_answers_every_line_and_ends_with_its_input(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(stdin: str, *options: str) -> str:
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        assert main(["chat", str(model), "--temperature", "0", "--max-tokens", "8", *options]) == 0
        return capsys.readouterr().out

    once = said("hello\n", "--system", "be brief")
    twice = said("hello\n\nagain\n", "--system", "be brief")
    assert twice.startswith(once.removesuffix("> \n"))
    assert (once.count("> "), twice.count("> ")) == (2, 4)
    assert twice.count("[length]") == 2
    assert said("hello\n") != once


@pytest.mark.parametrize(
    ("arguments", "changes"),
    [
        ([], {}),
        (["--temperature", "0", "--seed", "5"], {"temperature": 0.0, "seed": 5}),
        (["--top-p", "0.5", "--max-tokens", "9"], {"top_p": 0.5, "max_tokens": 9}),
    ],
)
def test_chat_samples_as_the_model_recommends(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], changes: SamplingOptions
) -> None:
    defaults = SamplingParams(temperature=0.6, top_k=20, top_p=0.9, repetition_penalty=1.1)
    used: list[SamplingParams] = []

    submit = ScriptedEngine._submit

    def noting(engine: ScriptedEngine, prompt: Any, params: SamplingParams, *given: Any) -> TokenStream:
        used.append(params)
        return submit(engine, prompt, params, *given)

    questions = iter(["hello"])
    monkeypatch.setattr("drift_sdk.cli.engine_start.Engine", lambda *_, **__: scripted_engine("fine"))
    monkeypatch.setattr(ScriptedEngine, "default_params", defaults)
    monkeypatch.setattr(ScriptedEngine, "_submit", noting)
    monkeypatch.setattr("builtins.input", lambda _: next_line(questions))
    assert main(["chat", "any", *arguments]) == 0
    assert used == [defaults.replace(**{"max_tokens": 1024, **changes})]


def test_chat_passes_the_draft_options_on(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[EngineConfig] = []

    async def chat(model: str, config: EngineConfig, options: object, system: object) -> int:
        given.append(config)
        return 0

    monkeypatch.setattr("drift_sdk.cli.command_line.chat", chat)
    assert main(["chat", str(model)]) == 0
    assert main(["chat", str(model), "--draft", "ngram", "--num-draft-tokens", "2"]) == 0
    drafts = Speculation(draft=NGram(), shape=Chain(2))
    assert given == [EngineConfig(), EngineConfig(speculation=drafts)]


def test_chat_drops_messages_that_no_longer_fit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Otherwise every question after the first that does not fit would be rejected too."""
    config = EngineConfig(max_model_len=160, kv_cache_tokens=320)
    questions = iter([*(f"question {number}" for number in range(6)), "long " * 40, "the last"])
    monkeypatch.setattr(
        "drift_sdk.cli.engine_start.Engine", lambda *_, **__: scripted_engine("fine", config=config)
    )
    monkeypatch.setattr("builtins.input", lambda _: next_line(questions))
    assert main(["chat", "any", "--system", "be brief"]) == 0
    said = capsys.readouterr()
    assert said.out == 7 * "fine\n" + "\n"
    forgotten, *_, rejected = said.err.splitlines()
    assert forgotten == "[4 earlier messages no longer fit]"
    assert rejected.startswith("PromptTooLong: ")


def test_chat_shows_reasoning_before_the_answer_and_remembers_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    template = "<think>{% for m in messages %}{{ m.role }} {{ m.content }} {{ m.thinking }}{% endfor %}"
    prompts: list[bytes] = []

    def answer(prompt_ids: Sequence[int], output_ids: Sequence[int], seed: int) -> int:
        prompts.append(bytes(prompt_ids))
        return [*b"<think>Hm.</think>Yes.", EOS_TOKEN_ID][len(output_ids)]

    config = EngineConfig(max_model_len=512, chat_template=template)
    questions = iter(["one", "two"])
    monkeypatch.setattr(
        "drift_sdk.cli.engine_start.Engine", lambda *_, **__: scripted_engine(answer, config=config)
    )
    monkeypatch.setattr("builtins.input", lambda _: next_line(questions))
    assert main(["chat", "any"]) == 0
    assert capsys.readouterr().out == 2 * "Hm.\n\nYes.\n" + "\n"
    assert prompts[-1] == b"<think>user one assistant Yes. Hm.user two "


def next_line(lines: Iterator[str]) -> str:
    try:
        return next(lines)
    except StopIteration:
        raise EOFError from None


INTERRUPTED = """
import os, runpy, signal, sys
class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == module:
            os.kill(os.getpid(), signal.SIGINT)
module = sys.argv.pop(1)
sys.meta_path.insert(0, Interrupt())
if sys.argv[1] == "ignoring":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    del sys.argv[1]
runpy.run_module("drift_sdk", run_name="__main__", alter_sys=True)
"""
"""The command line, with Ctrl-C while the module that the first argument names is imported; after "ignoring",
by a process that ignores it."""


@pytest.mark.skipif(sys.platform == "win32", reason="no signals to send")
@pytest.mark.parametrize(
    ("module", "command"), [("drift_sdk.cli.command_line", "doctor"), ("torch", "inspect {model}")]
)
def test_ctrl_c_during_imports_leaves_no_traceback(module: str, command: str, model: Path) -> None:
    arguments = command.format(model=model).split()
    ran = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, module, *arguments], capture_output=True, text=True, timeout=300
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (-signal.SIGINT, "", "")


@pytest.mark.skipif(sys.platform == "win32", reason="no signals to send")
def test_a_process_that_ignores_ctrl_c_still_does() -> None:
    command = [sys.executable, "-c", INTERRUPTED, "drift_sdk.cli.command_line", "ignoring", "--version"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert __version__ in ran.stdout


@pytest.mark.skipif(sys.platform == "win32", reason="no signals to send")
def test_ctrl_c_ends_chat_while_the_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object, **__: object) -> Engine:
        model = ScriptedModel("fine")

        def open_model(report: Callable[[str, float], None], limits: object = None) -> LoadedModel:
            os.kill(os.getpid(), signal.SIGINT)
            return model(report)

        return Engine("scripted", model.config, open_model=open_model)

    monkeypatch.setattr("drift_sdk.cli.engine_start.Engine", interrupted)
    monkeypatch.setattr("builtins.input", lambda _: pytest.fail("asked for a question"))
    assert main(["chat", "any"]) == 130
    assert capsys.readouterr() == ("", "")


def test_chat_ends_silently_when_its_output_is_closed() -> None:
    command = [sys.executable, "-c", SCRIPTED, '"fine"', "chat", "any"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as chat:
        chat.stdout.close()
        _, err = chat.communicate("hello\n", timeout=300)
    assert (chat.returncode, err) == (1, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
def test_error_of_writing_output_is_one_line() -> None:
    with open("/dev/full", "w") as full:
        ran = subprocess.run(
            [sys.executable, "-c", SCRIPTED, '"fine"', "chat", "any"],
            input="hello\n",
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=300,
        )
    assert ran.returncode == 1
    assert re.fullmatch(r"OSError: .*No space left on device\n", ran.stderr)


def test_chat_works_in_an_ascii_terminal() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPTED, '"é and ✓"', "chat", "any"],
        input=b"caf\xc3\xa9 \xff?\n",
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii:strict"},
        timeout=300,
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, b"> ? and ?\n> \n", b"")


@contextmanager
def chat_in_terminal() -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A chat whose answers are "fine", and its terminal, which shows the first prompt. Ctrl-D must end it."""
    import pty

    pytest.importorskip("readline")
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", SCRIPTED, '"fine"', "chat", "any"]
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs) as chat:
        try:
            os.close(theirs)
            read_until(ours, b"> ")
            yield chat, ours
            os.write(ours, b"\x04")
            assert chat.wait(timeout=300) == 0
        finally:
            chat.kill()
            os.close(ours)


@pytest.mark.skipif(sys.platform == "win32", reason="no pseudo-terminals")
def test_chat_lines_can_be_edited_and_recalled() -> None:
    with chat_in_terminal() as (_, terminal):
        os.write(terminal, b"helo\x1b[Dl\n")  # arrow left, then the missing letter
        read_until(terminal, b"fine\r\n> ")
        os.write(terminal, b"\x1b[A\n")  # arrow up
        assert b"hello" in read_until(terminal, b"fine\r\n> ")


def read_until(terminal: int, end: bytes) -> bytes:
    """The output of a terminal up to `end`, without the sequences that switch its modes."""
    shown = b""
    while not shown.endswith(end):
        shown = re.sub(rb"\x1b\[\?[0-9]+[hl]", b"", shown + os.read(terminal, 4096))
    return shown


@pytest.mark.skipif(sys.platform == "win32", reason="no pseudo-terminals")
def test_ctrl_c_without_an_answer_drops_the_line_and_says_how_to_leave() -> None:
    with chat_in_terminal() as (chat, terminal):
        os.write(terminal, b"one\n")
        read_until(terminal, b"fine\r\n> ")
        os.write(terminal, b"half a li")
        read_until(terminal, b"half a li")
        chat.send_signal(signal.SIGINT)
        read_until(terminal, b"[Ctrl-D leaves]\r\n> ")
        os.write(terminal, b"two\n")
        assert b"half" not in read_until(terminal, b"fine\r\n> ")


def test_chat_with_a_model_without_a_template_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_model(0, tmp_path)
    assert main(["chat", str(tmp_path), "--device", "cpu"]) == 1
    assert "chat template" in capsys.readouterr().err


@pytest.mark.skipif(sys.platform == "win32", reason="no signals to send")
def test_ctrl_c_stops_the_answer_and_not_the_program() -> None:
    """The answer takes a minute if it is not stopped."""
    replies = [{"text": "la " * 1000, "token_s": 0.02}, "fine"]
    command = [sys.executable, "-c", SCRIPTED, json.dumps(replies), "chat", "any", "--max-tokens", "3000"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as chat:
        try:
            chat.stdin.write("hello\n")
            chat.stdin.flush()
            assert chat.stdout.read(len("> ") + 1) == "> l"
            chat.send_signal(signal.SIGINT)
            rest, _ = chat.communicate("again\n", timeout=300)
        finally:
            chat.kill()
    assert chat.returncode == 0
    assert rest.endswith(" [cancelled]\n> fine\n> \n")


def test_warm_needs_no_weights_and_compiles_nothing_for_a_cpu(tmp_path: Path) -> None:
    folder = make_random_folder(
        tmp_path / "model", "qwen3", vocab_size=500, hidden_size=64, num_hidden_layers=1
    )
    ran = run("warm", str(folder), "--load", "random", "--device", "cpu", "--max-model-len", "64")
    assert (ran.returncode, ran.stderr) == (0, "")
    *stages, last = ran.stdout.splitlines()
    assert [line.rsplit(maxsplit=2)[0] for line in stages] == [
        *("imports", "find", "load tokenizer", "load weights")
    ]
    assert all(re.fullmatch(r".+ +\d+\.\d\d s", line) for line in stages)
    assert last == "nothing to compile: the eager executor runs torch's own kernels"


def test_warm_starts_with_the_settings_it_is_given(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given: list[tuple[str, EngineConfig]] = []

    async def warm(model: str, config: EngineConfig, on_progress: object) -> Warmed:
        given.append((model, config))
        seconds = (("load weights", 1.5), ("capture graphs", 12.0))
        return Warmed(executor="graph", start_seconds=seconds, kernel_cache=Path("/cache"))

    monkeypatch.setattr("drift_sdk.cli.readiness.warm", warm)
    settings = {
        "device": "cpu",
        "dtype": "bfloat16",
        "executor": "eager",
        "load": "random",
        "max_num_seqs": 3,
        "max_model_len": 64,
        "prefill_token_budget": 128,
    }
    options = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    assert main(["warm", str(model), *options]) == 0
    assert main(["warm", str(model)]) == 0
    assert main(["warm", str(model), "--draft", "ngram"]) == 0
    assert main(["warm", str(model), "--draft", "some/head", "--num-draft-tokens", "5"]) == 0
    ngram, head = Speculation(draft=NGram()), Speculation(draft="some/head", shape=Chain(5))
    configs = [EngineConfig(**settings), EngineConfig()]
    configs += [EngineConfig(speculation=drafts) for drafts in (ngram, head)]
    assert given == [(str(model), config) for config in configs]
    said = "load weights       1.50 s\ncapture graphs    12.00 s\nkernels are in /cache\n"
    assert capsys.readouterr().out == 4 * said


@pytest.mark.skipif(sys.platform != "linux", reason="Triton is there on Linux alone")
def test_kernel_cache_is_the_folder_of_triton(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert kernel_cache("graph") == tmp_path
    assert kernel_cache("eager") is None


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        ("chat model --temperature -1", 2, "error: --temperature -1.0: expected a finite number"),
        ("chat model --max-tokens x", 2, "--max-tokens: invalid int value"),
        ("chat model --draft ngram --num-draft-tokens 0", 2, "error: --num-draft-tokens 0: expected"),
        ("chat model --device tpu", 2, "error: --device 'tpu': expected"),
        ("warm model --num-draft-tokens 2", 2, "error: --num-draft-tokens 2: expected --draft beside it"),
        ("warm model --max-num-seqs 0", 2, "error: --max-num-seqs 0: expected"),
        ("warm model --max-model-len None", 2, "--max-model-len: invalid int value"),
        ("tune", 2, "error: MODEL or SHAPE='': expected one MODEL"),
        ("tune --out table.json 64", 2, "error: MODEL or SHAPE='64': expected one MODEL"),
        ("tune 64x64 64x0", 2, "error: MODEL or SHAPE='64x64 64x0': expected one MODEL"),
        ("tune folder --log shapes.json", 2, "error: MODEL or SHAPE='folder': expected one MODEL"),
        ("tune 64x64 --draft folder", 2, "error: MODEL or SHAPE='64x64': expected one MODEL"),
        ("tune 64x64 --jobs 0", 2, "error: --jobs 0: expected 1 or more"),
        ("tune folder --draft ngram --num-draft-tokens 0", 2, "error: --num-draft-tokens 0: expected"),
        ("tune --log /nowhere/at/all", 1, "DriftError: --log: /nowhere/at/all: No such file"),
        ("tune --log /dev/zero", 1, "DriftError: --log: /dev/zero: not a regular file"),
        ("tune --from /nowhere/at/all", 1, "DriftError: /nowhere/at/all: No such file"),
        ("tune --from /dev/zero", 1, "DriftError: /dev/zero: not a regular file"),
        ("tune --from /dev", 1, "DriftError: /dev: not a regular file"),
        ("", 2, "the following arguments are required: command"),
        ("chat /nowhere/at/all", 1, "ModelLoadError: "),
        ("warm /nowhere/at/all", 1, "ModelLoadError: "),
    ],
)
def test_command_line_errors_are_one_line(
    arguments: str, status: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        found = main(arguments.split())
    except SystemExit as exit:
        found = exit.code
    assert found == status
    last = capsys.readouterr().err.splitlines()[-1]
    assert said in last


def test_wrong_values_show_the_usage_of_their_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["inspect", "any", "--max-num-seqs", "0"])
    shown = capsys.readouterr().err
    assert ended.value.code == 2 and "--max-num-seqs 0: expected" in shown
    assert shown.startswith("usage: python -m drift_sdk inspect")


def test_an_error_of_the_start_names_the_option(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["warm", str(model), "--device", "cpu", "--max-model-len", "100000"]) == 1
    assert capsys.readouterr().err.startswith("ConfigError: --max-model-len 100000: expected at most")


def test_an_argument_that_is_no_option_keeps_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", ""]) == 1
    assert capsys.readouterr().err.startswith("ConfigError: model='': expected a folder, a .gguf file or")


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"drift_sdk {__version__}\n"


def test_help_shows_only_valid_values(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["warm", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "most tokens of prompt and completion together (default: the model's own context)" in shown
    assert "None" not in shown


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
@pytest.mark.parametrize("targets", [["64x64", "128x64:gated", "--out", "table.json"], ["64x64"], ["folder"]])
def test_tune_without_a_gpu_is_an_error(
    targets: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert main(["tune", *targets]) == 1
    assert capsys.readouterr().err.startswith("DriftError: tune needs ")
    assert list(tmp_path.iterdir()) == []
