"""Engines of the command line: their settings, progress and errors, and the commands `serve` and `chat`."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import signal
import sys
import tomllib
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from msgspec import Struct

from drift_sdk.config import EngineConfig
from drift_sdk.engine import Engine
from drift_sdk.errors import ConfigError, PromptTooLong, RequestError
from drift_sdk.events import Download, EngineFailed, Event, Progress
from drift_sdk.results import Completion
from drift_sdk.sampling_params import SamplingOptions
from drift_sdk.speculation import Chain, NGram, Speculation
from drift_sdk.stream import TokenStream

MAX_QUEUED = 256
"""Requests that may wait to start in a server, where neither an option nor a file says it."""

Settings = Mapping[str, tuple[type[int] | type[float] | type[str], str]]

WARM_SETTINGS: Settings = {
    "device": (str, "auto, cpu, cuda or cuda:N"),
    "dtype": (str, "auto, float32, bfloat16 or float16"),
    "executor": (str, "auto, eager or graph"),
    "load": (str, "auto, or random: a folder with config and tokenizer is enough"),
    "max_num_seqs": (int, "most sequences running at once"),
    "max_model_len": (int, "most tokens of prompt and completion together"),
    "prefill_token_budget": (int, "most prompt tokens computed in one step"),
    "kv_dtype": (str, "fp8: a KV cache of a byte a number; nvfp4: of 4.5 bits, eagerly"),
}
"""Fields of EngineConfig that decide which kernels are compiled: type and help of each one's option."""

INSPECT_SETTINGS: Settings = {
    **{name: setting for name, setting in WARM_SETTINGS.items() if name != "prefill_token_budget"},
    "weights": (str, "stored, expanded, fp8, int4 or nvfp4"),
    "tensor_parallel": (int, "GPUs that the model is divided between"),
    "kv_cache_tokens": (int, "tokens that the KV cache holds"),
    "revision": (str, "branch, tag or commit of a hub id"),
}
"""Fields of EngineConfig that decide whether a model can be served, as in WARM_SETTINGS."""

SERVE_SETTINGS: Settings = {
    **WARM_SETTINGS,
    **INSPECT_SETTINGS,
    "gpu_memory_fraction": (float, "share of the GPU's free memory that the engine may use"),
    "num_threads": (int, "threads of an operation on the CPU"),
    "tokenizer": (str, "folder, tokenizer.json, .gguf file or hub id to read the tokenizer from"),
    "tool_format": (str, "the format of tool calls"),
    "reasoning_format": (str, "the format of reasoning"),
    "max_queued_requests": (int, "most requests that wait to start; further ones get a 429"),
}
"""Fields of EngineConfig that a server is started with, as in WARM_SETTINGS."""

WITHOUT_OPTION = {
    "max_model_len": "the model's own context",
    "prefill_token_budget": "2048 on a GPU, 256 on a CPU",
    "kv_dtype": "as dtype",
    "weights": "stored where kernels multiply by them, else expanded",
    "kv_cache_tokens": "as many as fit",
    "revision": "the hub's own",
    "num_threads": "one per core",
    "tokenizer": "the model's",
    "max_queued_requests": MAX_QUEUED,
}
"""Of fields whose default is None: its meaning."""


def option_name(field: str) -> str:
    return f"--{field.replace('_', '-')}"


def add_settings(command: argparse.ArgumentParser, settings: Settings) -> None:
    """Options for fields of EngineConfig. Those that are not given are missing in what is parsed."""
    defaults = EngineConfig()
    for name, (kind, meaning) in settings.items():
        shown = WITHOUT_OPTION.get(name, getattr(defaults, name))
        help_text = f"{meaning} (default: {shown})"
        command.add_argument(option_name(name), type=kind, default=argparse.SUPPRESS, help=help_text)


def add_drafts(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--draft", help="a draft head or a smaller model, a folder or a hub id; or mtp or ngram"
    )
    default = Chain().num_draft_tokens
    command.add_argument(
        "--num-draft-tokens", type=int, help=f"most tokens drafted a round, with --draft (default: {default})"
    )


def speculation(options: argparse.Namespace) -> Speculation | None:
    """Raises ConfigError for a number of drafts without a draft, and for one out of range."""
    if options.draft is None:
        if options.num_draft_tokens is not None:
            raise ConfigError.of("num_draft_tokens", options.num_draft_tokens, "--draft beside it")

        return None

    draft = NGram() if options.draft == "ngram" else options.draft
    shape = Chain() if options.num_draft_tokens is None else Chain(options.num_draft_tokens)
    return Speculation(draft=draft, shape=shape)


def config_of(
    options: argparse.Namespace, settings: Settings, base: Mapping[str, Any] | None = None
) -> EngineConfig:
    """The config that the options of these settings make; `base` has fields that they do not give. Raises
    ConfigError for a value out of range."""
    given = {name: getattr(options, name) for name in settings if name in options}
    if "draft" in options and (drafts := speculation(options)) is not None:
        given["speculation"] = drafts
    return EngineConfig.from_dict({**(base or {}), **given})


def read_config(file: Path) -> dict[str, Any]:
    """The fields of EngineConfig in a file, TOML or, by its name, JSON. Raises ConfigError for others."""
    try:
        text = file.read_text("utf-8")
        found = json.loads(text) if file.suffix == ".json" else tomllib.loads(text)
    except (OSError, ValueError) as error:
        raise ConfigError.of("config", str(file), f"a TOML file, or a .json file: {error}") from error

    if not isinstance(found, dict):
        raise ConfigError.of("config", str(file), "an object with fields of EngineConfig")

    return found


def print_error(error: Exception, text: str | None = None) -> None:
    """Print one line on stderr: the name of the error's class and `text`, by default the error's message."""
    print(f"{type(error).__name__}: {text if text is not None else error}", file=sys.stderr)


def show_progress(progress: Progress) -> None:
    """Overwrite the current line of stderr with a stage, its percentage and what has been downloaded; nothing
    if it is no terminal."""
    if sys.stderr.isatty():
        line = f"{progress.stage}: {progress.fraction:.0%}"
        if progress.download is not None:
            line += f" ({describe_download(progress.download)})"
        print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)


def describe_download(download: Download) -> str:
    """Files and bytes, such as "1 of 3 files, 0.40 of 4.08 GB"."""
    done, total = (num_bytes / 1e9 for num_bytes in (download.num_bytes_done, download.num_bytes))
    return f"{download.num_files_done} of {download.num_files} files, {done:.2f} of {total:.2f} GB"


def hide_progress() -> None:
    """Clear the line that `show_progress` wrote."""
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr)


def show_log() -> None:
    """Write the log `drift_sdk` to stderr from INFO on, in uvicorn's form, unless something handles it."""
    log = logging.getLogger("drift_sdk")
    if log.hasHandlers():
        return

    handler = logging.StreamHandler()
    cleared = "\r\x1b[K" if sys.stderr.isatty() else ""  # the line that `show_progress` wrote
    handler.setFormatter(logging.Formatter(f"{cleared}%(levelname)s:     %(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)


PROMPT = "> "


async def chat(model: str, config: EngineConfig, options: SamplingOptions, system: str | None) -> int:
    """Answer each line of stdin until its end; the exit status, always 0.

    options: replace fields of the model's own parameters. system: the system message; None = none.

    Ctrl-C stops an answer (not on Windows). Raises what starting the engine raises, RequestError if the model
    has no chat template, and OSError if stdout cannot be written.
    """
    async with Engine(model, config, on_progress=show_progress) as engine:
        hide_progress()
        conversation = Conversation(engine, options, system)
        await conversation.check()
        # Ctrl-C ends the program while the model is loaded, and stops an answer from here on.
        if sys.platform != "win32":
            asyncio.get_running_loop().add_signal_handler(signal.SIGINT, conversation.stop)
        while (question := await read_question()) is not None:
            if question.strip():
                await conversation.ask(question)
    return 0


class Conversation:
    """Questions and answers so far, sent again with each question after the system message."""

    def __init__(self, engine: Engine, options: SamplingOptions, system: str | None) -> None:
        self._engine = engine
        self._options = options
        self._system = [{"role": "system", "content": system}] if system is not None else []
        self._history: list[dict[str, Any]] = []
        self._stream: TokenStream | None = None

    async def check(self) -> None:
        """Raise RequestError for a model that no messages can be sent to."""
        await self._engine.count_tokens([*self._system, {"role": "user", "content": "Hello"}])

    def stop(self) -> None:
        """End the answer in progress; without one, say how to leave and ask again."""
        if self._stream is not None:
            self._stream.cancel()
        else:
            print(f"\n[Ctrl-D leaves]\n{PROMPT}", end="", file=sys.stderr, flush=True)

    async def ask(self, question: str) -> None:
        """Print the answer and why it ended, unless that is its own end. A prompt that is too long is sent
        again without the older half of the history; any other RequestError is printed."""
        asked = {"role": "user", "content": question}
        completion: Completion | None = None
        while completion is None:
            try:
                completion = await self._print_answer(asked)
            except RequestError as error:
                self._stream = None
                if not (isinstance(error, PromptTooLong) and self._history):
                    print_error(error)
                    return

                num_dropped = drop_older_half(self._history)
                print(f"[{num_dropped} earlier messages no longer fit]", file=sys.stderr)

        self._history += [asked, completion.message()]
        print("" if completion.finish_reason == "stop" else f" [{completion.finish_reason}]")

    async def _print_answer(self, asked: dict[str, str]) -> Completion:
        self._stream = self._engine.chat([*self._system, *self._history, asked], **self._options)
        is_thinking = False
        async for chunk in self._stream:
            print(chunk.reasoning, end="", flush=True)
            is_thinking |= bool(chunk.reasoning)
            if chunk.text and is_thinking:
                print("\n\n", end="")  # between reasoning and answer
                is_thinking = False
            print(chunk.text, end="", flush=True)
        completion, self._stream = await self._stream, None
        return completion


async def read_question() -> str | None:
    """The next line of stdin, read on a thread; None at its end.

    In a terminal the line can be edited, and the arrow keys recall earlier ones.
    """
    with suppress(ImportError):  # Windows has no readline
        import readline  # noqa: F401  # makes input() edit lines

    try:
        return await asyncio.to_thread(input, PROMPT)
    except EOFError:
        print()
        return None


def drop_older_half(history: list[dict[str, Any]]) -> int:
    """Remove the older half of the exchanges, rounded up, each a question and its answer; returns the number
    of messages removed."""
    num_exchanges = len(history) // 2
    num_messages = 2 * ((num_exchanges + 1) // 2)
    del history[:num_messages]
    return num_messages


KEY_VARIABLE = "DRIFTSDK_API_KEY"
RERANKER_NAMES = ("qwen3",)
"""Of `drift_sdk.openai.RERANKERS`, which needs an extra."""
MAX_PORT = 65_535
MAX_DRAIN_S = 1e6


class Server(Struct, frozen=True, kw_only=True):
    """Where and how to serve.

    names: by which clients know the model; empty = the name of its folder or file, or its hub id.
    reranker: a name of `drift_sdk.openai.RERANKERS`; None = relevance by embeddings.
    drain: seconds that open answers have to end after SIGTERM.
    """

    host: str
    port: int
    drain: float
    names: tuple[str, ...]
    reranker: str | None
    api_keys: tuple[str, ...]
    salt_keys: bool
    hide_cached_tokens: bool


def add_serve_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    command.add_argument("--port", type=int, default=8000, help="port to listen on (default: %(default)s)")
    command.add_argument(
        "--api-key",
        action="append",
        default=[],
        metavar="KEY",
        help=f"a key that requests need; repeat it for several (default: {KEY_VARIABLE}, if it is set)",
    )
    command.add_argument(
        "--served-model-name",
        action="append",
        default=[],
        metavar="NAME",
        help="name of the model for clients; repeat it for several (default: its hub id or file name)",
    )
    command.add_argument(
        "--reranker",
        choices=RERANKER_NAMES,
        help="the prompt by which a model that generates text judges documents (default: their embeddings)",
    )
    command.add_argument(
        "--salt-keys", action="store_true", help="requests of different keys share no cached prefixes"
    )
    command.add_argument(
        "--hide-cached-tokens",
        action="store_true",
        help="do not tell clients how many tokens of a prompt were cached",
    )
    command.add_argument(
        "--drain",
        type=float,
        default=20.0,
        metavar="SECONDS",
        help="time that open answers have to end after SIGTERM (default: %(default)s)",
    )
    command.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="fields of EngineConfig, in TOML or in a .json file; options take precedence",
    )
    add_settings(command, SERVE_SETTINGS)
    add_drafts(command)


def serve_command(options: argparse.Namespace) -> Callable[[], int]:
    """The command. Raises ConfigError for a number out of range."""
    if not 0 <= options.port <= MAX_PORT:
        raise ConfigError.of("port", options.port, f"0 to {MAX_PORT}")

    if not 0.0 <= options.drain <= MAX_DRAIN_S:
        raise ConfigError.of("drain", options.drain, f"0 to {MAX_DRAIN_S:g} seconds")

    given = {} if options.config is None else read_config(options.config)
    config = config_of(options, SERVE_SETTINGS, {"max_queued_requests": MAX_QUEUED, **given})
    variable = os.environ.get(KEY_VARIABLE)
    server = Server(
        host=options.host,
        port=options.port,
        drain=options.drain,
        names=tuple(options.served_model_name),
        reranker=options.reranker,
        api_keys=tuple(options.api_key or filter(None, [variable])),
        salt_keys=options.salt_keys,
        hide_cached_tokens=options.hide_cached_tokens,
    )
    return lambda: asyncio.run(run_serve(options.model, config, server))


async def run_serve(model: str, config: EngineConfig, server: Server) -> int:
    """Load the model and serve it until SIGTERM; the exit status, 1 if the engine has failed."""
    import drift_sdk.openai  # imported here, for it needs an extra
    from drift_sdk.openai.server import check_port, serve

    check_port(server.host, server.port)  # before the model is loaded
    show_log()
    is_serving = has_failed = False

    def end_if_failed(event: Event) -> None:
        nonlocal has_failed
        if isinstance(event, EngineFailed) and is_serving:
            has_failed = True
            os.kill(os.getpid(), signal.SIGTERM)  # the server shuts down as at any other SIGTERM

    engine = Engine(model, config, on_progress=show_progress, on_event=end_if_failed)
    application = drift_sdk.openai.app(
        dict.fromkeys(server.names, engine) or engine,
        reranker=None if server.reranker is None else drift_sdk.openai.RERANKERS[server.reranker],
        api_keys=server.api_keys,
        salts_keys=server.salt_keys,
        shows_cached_tokens=not server.hide_cached_tokens,
    )
    async with engine:
        hide_progress()
        is_serving = True
        await serve(application, [engine], host=server.host, port=server.port, drain_s=server.drain)

    return 1 if has_failed else 0
