"""Starting an engine from the command line: options for its config; errors and progress on stderr."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping

from drift_sdk.config import EngineConfig
from drift_sdk.errors import ConfigError
from drift_sdk.speculation import Chain, NGram, Speculation
from drift_sdk.progress import Download, Progress

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
}
"""Of fields whose default is None: its meaning."""


def option_name(field: str) -> str:
    return f"--{field.replace('_', '-')}"


def add_settings(command: argparse.ArgumentParser, settings: Settings) -> None:
    """Options for fields of EngineConfig."""
    defaults = EngineConfig()
    for name, (kind, meaning) in settings.items():
        default = getattr(defaults, name)
        shown = WITHOUT_OPTION.get(name, default)
        command.add_argument(
            option_name(name), type=kind, default=default, help=f"{meaning} (default: {shown})"
        )


def add_drafts(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--draft", help="an EAGLE-3 head or a smaller model, a folder or a hub id; or mtp or ngram"
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


def config_of(options: argparse.Namespace, settings: Settings) -> EngineConfig:
    """The config that the options of these settings make. Raises ConfigError for a value out of range."""
    given = {name: getattr(options, name) for name in settings}
    return EngineConfig(**given, speculation=speculation(options) if "draft" in options else None)


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
