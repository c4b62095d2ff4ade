"""Options of commands that stand for fields of EngineConfig."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from drift_sdk import Chain, ConfigError, EngineConfig, NGram, Speculation

__all__ = [
    "INSPECT_SETTINGS",
    "SERVE_SETTINGS",
    "WARM_SETTINGS",
    "add_drafts",
    "add_settings",
    "config_of",
    "option_name",
    "speculation",
]

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
