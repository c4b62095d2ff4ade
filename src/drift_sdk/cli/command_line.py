"""The command line: parses arguments and runs a command."""

from __future__ import annotations

import argparse
import asyncio
import io
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import cast

from drift_sdk import (
    Chain,
    ConfigError,
    DriftError,
    EngineConfig,
    NGram,
    SamplingOptions,
    SamplingParams,
    __version__,
)
from drift_sdk.cli.drafts import read_prompts, run_acceptance, run_tree
from drift_sdk.cli.engine_start import (
    INSPECT_SETTINGS,
    WARM_SETTINGS,
    add_drafts,
    add_serve_options,
    add_settings,
    chat,
    config_of,
    option_name,
    print_error,
    serve_command,
    speculation,
)
from drift_sdk.cli.readiness import run_doctor, run_inspect, run_warm
from drift_sdk.errors import FieldError, short_repr
from drift_sdk.speculation import MTP

MODEL_HELP = "a folder, a .gguf file, a hub id, or a hub id with a quantisation, such as owner/name:Q4_K_M"
ONLY_READING = ("doctor", "inspect", "tree")
"""Commands that have nothing to clean up when they are interrupted."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return the exit status of the process.

    0: done. 1: an error, one line on stderr; also a machine that `doctor` finds unusable, and a reader of
    stdout that went away. 2: wrong arguments. 130: Ctrl-C.

    If SIGINT has its default action, commands that only read leave it so; others raise KeyboardInterrupt.
    """
    # Text that the terminal cannot show, and input that is not in its encoding, do not end a conversation.
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    parser = make_parser()
    options = parser.parse_args(arguments)
    try:
        command = make_command(options)
    except DriftError as error:
        options.parser.error(describe_error(error, options))

    has_default = signal.getsignal(signal.SIGINT) is signal.SIG_DFL
    if has_default and options.command not in ONLY_READING:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        status = command()
    except KeyboardInterrupt:
        status = 130
    except BrokenPipeError:
        status = 1
    except (DriftError, OSError) as error:
        print_error(error, describe_error(error, options))
        status = 1
    return status if flush_stdout() else status or 1


def flush_stdout() -> bool:
    """Write the buffered text to stdout. False if that fails: the text is dropped, or the interpreter would
    try again at its end."""
    if sys.stdout is None:
        return True

    try:
        sys.stdout.flush()
        return True
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return False


def describe_error(error: Exception, options: argparse.Namespace) -> str:
    """The error's message, naming the option instead of the field where the field has one."""
    # The model is an argument without a name.
    if not isinstance(error, FieldError) or error.field == "model" or not hasattr(options, error.field):
        return str(error)

    return f"{option_name(error.field)} {short_repr(error.value)}: expected {error.allowed}"


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m drift_sdk")
    parser.add_argument("--version", action="version", version=f"drift_sdk {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    add_doctor(commands)
    add_inspect(commands)
    add_chat(commands)
    add_serve(commands)
    add_warm(commands)
    add_tune(commands)
    add_tree(commands)
    add_acceptance(commands)
    for command in commands.choices.values():
        command.set_defaults(parser=command)  # whose usage is printed with an error
    return parser


Commands = argparse._SubParsersAction  # what add_subparsers returns; it has no public name


def add_doctor(commands: Commands[argparse.ArgumentParser]) -> None:
    command = commands.add_parser(
        "doctor",
        help="examine this machine and report what an engine would find",
        epilog="`inspect MODEL` reports whether a model can be served here.",
    )
    command.add_argument("--json", action="store_true", help="print the report as JSON")


def add_inspect(commands: Commands[argparse.ArgumentParser]) -> None:
    command = commands.add_parser(
        "inspect", help="report whether a model can be served here, and what it takes; loads no weights"
    )
    command.add_argument("model", help=MODEL_HELP)
    add_settings(command, INSPECT_SETTINGS)
    command.add_argument("--json", action="store_true", help="print the report as JSON")


def add_chat(commands: Commands[argparse.ArgumentParser]) -> None:
    command = commands.add_parser("chat", help="talk with a model; Ctrl-C stops an answer, Ctrl-D leaves")
    command.add_argument("model", help=MODEL_HELP)
    command.add_argument("--system", help="the system message")
    command.add_argument(
        "--max-tokens", type=int, default=1024, help="most tokens of an answer (default: %(default)s)"
    )
    command.add_argument("--temperature", type=float, help="0 = greedy (default: the model's own)")
    command.add_argument(
        "--top-p",
        type=float,
        help="probability that the most likely tokens kept add up to (default: the model's own)",
    )
    command.add_argument("--seed", type=int, help="gives the same answers again")
    command.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: %(default)s)")
    add_drafts(command)


def add_serve(commands: Commands[argparse.ArgumentParser]) -> None:
    command = commands.add_parser("serve", help="serve a model by the protocols of OpenAI and Anthropic")
    command.add_argument("model", help=MODEL_HELP)
    add_serve_options(command)


def add_warm(commands: Commands[argparse.ArgumentParser]) -> None:
    command = commands.add_parser(
        "warm",
        help="compile the kernels that serving a model needs, with the settings it will be served with",
    )
    command.add_argument("model", help=MODEL_HELP)
    add_settings(command, WARM_SETTINGS)
    add_drafts(command)


def add_tune(commands: Commands[argparse.ArgumentParser]) -> None:
    command = commands.add_parser(
        "tune", help="measure the fastest launch configurations of products on this GPU; tokens stay the same"
    )
    command.add_argument(
        "targets",
        nargs="*",
        metavar="MODEL or SHAPE",
        help=f"a model: {MODEL_HELP}; or shapes of weights: NxK, N output features by K input features; "
        "NxK:gated for gate and up projection together, N counting both",
    )
    command.add_argument("--log", type=Path, help="JSON file that EngineConfig.shape_log named: its shapes")
    command.add_argument(
        "--out",
        type=Path,
        help="of shapes: JSON file of the table, whose other entries are kept (default: the user's cache)",
    )
    command.add_argument(
        "--jobs", type=int, help="of shapes: processes that compile (default: one for each CPU)"
    )
    command.add_argument(
        "--from",
        dest="known",
        type=Path,
        metavar="TABLE",
        help="of shapes: JSON file of a similar GPU's table, whose configurations alone are tried; without "
        "SHAPE and --log, of all its shapes",
    )
    add_drafts(command)


def add_tree(commands: Commands[argparse.ArgumentParser]) -> None:
    command = commands.add_parser(
        "tree", help="draw a tree of drafts, its statistics and the buffers that it implies"
    )
    command.add_argument(
        "path",
        metavar="FILE",
        type=Path,
        help="a .toml, .json or .yaml file: paths of ranks, or top_k, depth and num_draft_tokens",
    )


def add_acceptance(commands: Commands[argparse.ArgumentParser]) -> None:
    command = commands.add_parser(
        "acceptance",
        help="measure how many tokens a round with a draft head emits, under each meaning of its layer ids",
    )
    command.add_argument("model", help=MODEL_HELP)
    command.add_argument("--draft", required=True, help="a draft head, a folder or a hub id")
    command.add_argument(
        "--num-draft-tokens", type=int, help=f"tokens drafted a round (default: {Chain().num_draft_tokens})"
    )
    command.add_argument("--prompts", type=Path, metavar="FILE", help="text, a prompt in each line")
    command.add_argument(
        "--max-tokens", type=int, default=128, help="most tokens of a completion (default: %(default)s)"
    )
    command.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: %(default)s)")


Shape = tuple[int, int, bool]
"""N, K, and whether a weight is gated."""


def weight_shape(text: str) -> Shape | None:
    """The shape that NxK or NxK:gated names; None for other text."""
    found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)(:gated)?", text)
    return None if found is None else (int(found[1]), int(found[2]), found[3] is not None)


def make_command(options: argparse.Namespace) -> Callable[[], int]:
    """The command to run, which returns the exit status. Raises DriftError for an argument out of range."""
    match options.command:
        case "doctor":
            return partial(run_doctor, as_json=options.json)
        case "inspect":
            config = config_of(options, INSPECT_SETTINGS)
            return partial(run_inspect, options.model, config, as_json=options.json)
        case "warm":
            config = config_of(options, WARM_SETTINGS)
            return lambda: asyncio.run(run_warm(options.model, config))
        case "serve":
            return serve_command(options)
        case "tree":
            return partial(run_tree, options.path)
        case "tune":
            return tune_command(options)
        case "acceptance":
            return acceptance_command(options)

    given = {name: getattr(options, name) for name in ("max_tokens", "temperature", "top_p", "seed")}
    sampling = cast("SamplingOptions", {name: value for name, value in given.items() if value is not None})
    SamplingParams().replace(**sampling)  # raises before the model is loaded
    config = EngineConfig(device=options.device, speculation=speculation(options))
    return lambda: asyncio.run(chat(options.model, config, sampling, options.system))


def acceptance_command(options: argparse.Namespace) -> Callable[[], int]:
    """The command `acceptance`. Raises ConfigError for n-grams, which read no layers, for a file without
    prompts, and for numbers out of range."""
    drafts = speculation(options)
    if drafts is None or isinstance(drafts.draft, NGram) or drafts.draft == MTP:
        raise ConfigError.of("draft", options.draft, "a draft head")

    config = EngineConfig(device=options.device, speculation=drafts)
    params = SamplingParams(max_tokens=options.max_tokens, temperature=0.0)
    prompts = read_prompts(options.prompts)
    return lambda: asyncio.run(run_acceptance(options.model, config, prompts, params))


def tune_command(options: argparse.Namespace) -> Callable[[], int]:
    """The command `tune`, of one model or of shapes. Raises ConfigError for arguments that do not go
    together, and for a draft out of range."""
    if options.jobs is not None and options.jobs < 1:
        raise ConfigError.of("jobs", options.jobs, "1 or more")

    shapes = [shape for shape in map(weight_shape, options.targets) if shape is not None]
    is_model = len(options.targets) == 1 and not shapes and options.log is None
    if is_model and options.out is None and options.jobs is None and options.known is None:
        return partial(run_tune_model, options.targets[0], EngineConfig(speculation=speculation(options)))

    has_shapes = bool(shapes or options.log or options.known)
    if is_model or len(shapes) < len(options.targets) or options.draft or not has_shapes:
        allowed = (
            "one MODEL, with --draft or without; or SHAPEs such as 6144x4096 or 512x64:gated, --log or --from"
        )
        raise ConfigError.of("MODEL or SHAPE", " ".join(options.targets), allowed)

    return partial(run_tune_shapes, shapes, options)


def run_tune_model(model: str, config: EngineConfig) -> int:
    with needs_triton():
        from drift_sdk.cli.tune import tune_model

    tune_model(model, config)
    return 0


def run_tune_shapes(shapes: Sequence[Shape], options: argparse.Namespace) -> int:
    with needs_triton():
        from drift_sdk._kernels.gemm.tuning import shape_of_key
        from drift_sdk.cli.tune import read_log, read_table, tune_shapes

    known = None if options.known is None else read_table(options.known)
    wanted = [*shapes, *([] if options.log is None else read_log(options.log))]
    if known is not None and not wanted:
        wanted = [shape_of_key(key) for key in known.gemms]
    tune_shapes(list(dict.fromkeys(wanted)), options.out, options.jobs, known)
    return 0


@contextmanager
def needs_triton() -> Iterator[None]:
    """A block that imports what `tune` needs, and only then is imported."""
    try:
        yield
    except ImportError as error:
        raise DriftError(f"tune needs torch and Triton: {error}") from error
