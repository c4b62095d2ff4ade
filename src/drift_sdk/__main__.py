"""The command line: `python -m drift_sdk doctor`, `chat MODEL` and `warm MODEL`."""

from __future__ import annotations

import argparse
import asyncio
import io
import os
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import msgspec

from drift_sdk import (
    Chain,
    ConfigError,
    DriftError,
    Engine,
    EngineConfig,
    NGram,
    Progress,
    PromptTooLong,
    RequestError,
    SamplingParams,
    Speculation,
    TokenStream,
)
from drift_sdk.cli.doctor import examine
from drift_sdk.cli.warm import warm

WARM_SETTINGS = {
    "device": (str, "auto, cpu, cuda or cuda:N"),
    "dtype": (str, "auto, float32, bfloat16 or float16"),
    "executor": (str, "auto, eager or graph"),
    "load": (str, "auto, or random: a folder with config and tokenizer is enough"),
    "max_num_seqs": (int, "most sequences running at once"),
    "max_model_len": (int, "most tokens of prompt and completion together; None = the model's own context"),
    "prefill_token_budget": (int, "most prompt tokens computed in one step"),
}
"""Of EngineConfig: what the kernels depend on."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return the exit status of the process.

    0: done. 1: an error, one line on stderr; also a machine that `doctor` finds unusable, and a reader of
    stdout that went away. 2: wrong arguments. 130: Ctrl-C.
    """
    # Text that a terminal cannot show, or input that is not in its encoding, does not end a conversation.
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    parser = make_parser()
    options = parser.parse_args(arguments)
    try:
        command = prepare(options)
    except DriftError as error:
        parser.error(str(error))

    try:
        status = command()
    except KeyboardInterrupt:
        status = 130
    except BrokenPipeError:
        status = 1
    except (DriftError, OSError) as error:
        say(error)
        status = 1
    return status if can_flush() else status or 1


def can_flush() -> bool:
    """Whether stdout accepts the buffered text; if not, it is dropped, or the interpreter would try again."""
    if sys.stdout is None:
        return True

    try:
        sys.stdout.flush()
        return True
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return False


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m drift_sdk")
    commands = parser.add_subparsers(dest="command", required=True)
    check = commands.add_parser("doctor", help="look at the machine and say what an engine would find")
    check.add_argument("--json", action="store_true", help="for programs")

    talk = commands.add_parser("chat", help="talk with a model; Ctrl-C stops an answer, Ctrl-D leaves")
    talk.add_argument("model", help="a folder, a .gguf file or a hub id")
    talk.add_argument("--system", help="the system message")
    talk.add_argument("--max-tokens", type=int, default=1024, help="of an answer (default: %(default)s)")
    talk.add_argument("--temperature", type=float, default=0.7, help="0 = greedy (default: %(default)s)")
    talk.add_argument("--top-p", type=float, default=0.95, help="default: %(default)s")
    talk.add_argument("--seed", type=int, help="gives the same answers again")
    talk.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: %(default)s)")
    add_drafts(talk)

    warmer = commands.add_parser(
        "warm",
        help="compile the kernels that serving a model needs, with the settings it will be served with",
    )
    warmer.add_argument("model", help="a folder, a .gguf file or a hub id")
    defaults = EngineConfig()
    for name, (kind, meaning) in WARM_SETTINGS.items():
        option, default = f"--{name.replace('_', '-')}", getattr(defaults, name)
        warmer.add_argument(option, type=kind, default=default, help=f"{meaning} (default: %(default)s)")
    add_drafts(warmer)

    tuner = commands.add_parser("tune", help="measure which launch configurations of the GEMMs suit this GPU")
    tuner.add_argument("shapes", nargs="+", metavar="SHAPE", help="NxK, or NxK:gated for gate and up")
    tuner.add_argument("--out", type=Path, required=True, help="the table; what it holds already is kept")
    tuner.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes that compile")
    return parser


def add_drafts(command: argparse.ArgumentParser) -> None:
    command.add_argument("--draft", help="an EAGLE-3 head, a folder or a hub id; or ngram")
    default = Chain().num_draft_tokens
    command.add_argument("--num-draft-tokens", type=int, help=f"a round, with --draft (default: {default})")


def speculation(options: argparse.Namespace) -> Speculation | None:
    """Raises ConfigError for a number of drafts without a draft, and for one out of range."""
    if options.draft is None:
        if options.num_draft_tokens is not None:
            raise ConfigError.of("num_draft_tokens", options.num_draft_tokens, "--draft beside it")

        return None

    draft = NGram() if options.draft == "ngram" else options.draft
    shape = Chain() if options.num_draft_tokens is None else Chain(options.num_draft_tokens)
    return Speculation(draft=draft, shape=shape)


def prepare(options: argparse.Namespace) -> Callable[[], int]:
    """The command. Raises DriftError for an argument out of range."""
    if options.command == "doctor":
        return partial(doctor, as_json=options.json)

    if options.command == "warm":
        settings = {name: getattr(options, name) for name in WARM_SETTINGS}
        config = EngineConfig(**settings, speculation=speculation(options))
        return lambda: asyncio.run(warm_up(options.model, config))

    if options.command == "tune":
        return partial(tune, options.shapes, options.out, options.jobs)

    params = SamplingParams(
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        top_p=options.top_p,
        seed=options.seed,
    )
    config = EngineConfig(device=options.device, speculation=speculation(options))
    return lambda: asyncio.run(chat(options.model, config, params, options.system))


def doctor(*, as_json: bool) -> int:
    diagnosis = examine()
    if as_json:
        found = {"is_usable": diagnosis.is_usable, **msgspec.to_builtins(diagnosis)}
        print(msgspec.json.format(msgspec.json.encode(found)).decode())
    else:
        print(diagnosis.text())

    return 0 if diagnosis.is_usable else 1


def tune(shapes: Sequence[str], out: Path, num_jobs: int) -> int:
    from drift_sdk.cli.tune import tune_shapes  # only here, for it needs torch and Triton

    tune_shapes(shapes, out, num_jobs)
    return 0


async def chat(model: str, config: EngineConfig, params: SamplingParams, system: str | None) -> int:
    fixed = [{"role": "system", "content": system}] if system is not None else []
    history: list[dict[str, str]] = []
    stream: TokenStream | None = None

    def stop() -> None:
        if stream is not None:
            stream.cancel()

    async with Engine(model, config, on_progress=show_progress) as engine:
        hide_progress()
        # Ctrl-C ends the program while the model is loaded, and an answer from here on.
        if sys.platform != "win32":
            asyncio.get_running_loop().add_signal_handler(signal.SIGINT, stop)
        while True:
            try:
                question = await asyncio.to_thread(input, "> ")
            except EOFError:
                print()
                return 0

            if not question.strip():
                continue

            asked = {"role": "user", "content": question}
            completion = None
            while completion is None:
                stream = engine.chat([*fixed, *history, asked], params)
                try:
                    async for chunk in stream:
                        print(chunk.text, end="", flush=True)

                    completion = await stream
                except RequestError as error:
                    if not (isinstance(error, PromptTooLong) and history):
                        say(error)
                        break

                    print(f"[{forget_half(history)} earlier messages no longer fit]", file=sys.stderr)

            if completion is not None:
                history += [asked, {"role": "assistant", "content": completion.text}]
                print("" if completion.finish_reason == "stop" else f" [{completion.finish_reason}]")


def forget_half(history: list[dict[str, str]]) -> int:
    """Drop the older half of the questions and answers, so that there is room for an answer; how many."""
    num_exchanges = len(history) // 2
    num_messages = 2 * ((num_exchanges + 1) // 2)
    del history[:num_messages]
    return num_messages


def say(error: Exception) -> None:
    print(f"{type(error).__name__}: {error}", file=sys.stderr)


async def warm_up(model: str, config: EngineConfig) -> int:
    warmed = await warm(model, config, show_progress)
    hide_progress()
    print(warmed.text())
    return 0


def show_progress(progress: Progress) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{progress.stage}: {progress.fraction:.0%}", end="", file=sys.stderr, flush=True)


def hide_progress() -> None:
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
