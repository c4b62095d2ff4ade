"""The command line: `python -m drift_sdk doctor` and `python -m drift_sdk chat MODEL`."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import Sequence

import msgspec

from drift_sdk import DriftError, Engine, EngineConfig, Progress, RequestError, SamplingParams, TokenStream
from drift_sdk.doctor import examine


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the process's exit status."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    if options.command == "doctor":
        return doctor(as_json=options.json)

    try:
        params = SamplingParams(
            max_tokens=options.max_tokens,
            temperature=options.temperature,
            top_p=options.top_p,
            seed=options.seed,
        )
        config = EngineConfig(device=options.device)
    except DriftError as error:
        parser.error(str(error))

    try:
        return asyncio.run(chat(options.model, config, params, options.system))
    except DriftError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


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
    return parser


def doctor(*, as_json: bool) -> int:
    diagnosis = examine()
    if as_json:
        found = {"is_usable": diagnosis.is_usable, **msgspec.to_builtins(diagnosis)}
        print(msgspec.json.format(msgspec.json.encode(found)).decode())
    else:
        print(diagnosis.text())

    return 0 if diagnosis.is_usable else 1


async def chat(model: str, config: EngineConfig, params: SamplingParams, system: str | None) -> int:
    messages = [{"role": "system", "content": system}] if system is not None else []
    stream: TokenStream | None = None

    def stop() -> None:
        if stream is not None:
            stream.cancel()

    async with Engine(model, config, on_progress=show_progress) as engine:
        if sys.stderr.isatty():
            print("\r\x1b[K", end="", file=sys.stderr)
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

            messages.append({"role": "user", "content": question})
            try:
                stream = engine.chat(messages, params)
                async for chunk in stream:
                    print(chunk.text, end="", flush=True)

                completion = await stream
            except RequestError as error:
                messages.pop()
                print(f"{type(error).__name__}: {error}", file=sys.stderr)
                continue

            messages.append({"role": "assistant", "content": completion.text})
            print("" if completion.finish_reason == "stop" else f" [{completion.finish_reason}]")


def show_progress(progress: Progress) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{progress.stage}: {progress.fraction:.0%}", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
