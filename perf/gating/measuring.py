"""The measurements of each suite of gates, as commands."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from perf.gating.gate import Suite
from perf.harness.commands import Command, CommandFailed, RunCommand, run_command
from perf.harness.own_folder import remove_results, result_names

__all__ = ["COMMANDS", "DRAFTS", "STRICT", "Measurement", "commands_of", "measure"]

STRICT = ("--strict-performance",)
DRAFTS = ("--num-draft-tokens", "3", "--acceptance-length")
SHORT = ("--scenario", "single-512", "single-32k", "batch4-16k")
REST = ("--scenario", "batch8-512", "batch64-512")
COMMANDS: dict[str, tuple[Command, ...]] = {
    "micro": (
        Command(
            module="perf.speculative",
            topic="speculative",
            arguments=(*STRICT, *DRAFTS, "3.2", "3.0", "--repeats", "3", *SHORT),
        ),
    ),
    "full": (
        Command(module="perf.speculative", topic="speculative", arguments=(*STRICT, *DRAFTS, "3.2", *REST)),
        Command(
            module="perf.decode",
            topic="decode",
            arguments=(*STRICT, "--scenario", "single-512", "batch64-512"),
        ),
        Command(module="perf.prefill", topic="prefill", arguments=STRICT),
        Command(module="perf.startup", topic="startup"),
        Command(
            module="perf.kernel_speed",
            topic="kernels",
            arguments=("--suite", "gemm", "attention", "--rows", "1", "4", "64", "--no-library"),
        ),
    ),
}
"""The measurements of a suite. One process measures plain and speculative decoding, which are compared.
`perf.decode` is about the host's time; plain decoding is measured beside drafts. `full` does not repeat what
`micro` has measured three times: its gates judge the last results of `micro` too."""
PEER_COMMANDS = {
    "perf.speculative": (*STRICT, *DRAFTS, "3.2", "--peer", "vllm"),
    "perf.prefill": (*STRICT, "--peer", "vllm"),
}
"""Arguments of the commands that measure the peer as well, in all scenarios."""


class Measurement(Struct, frozen=True, kw_only=True):
    """A command that has ended. seconds: wall time. error: the reason if it failed, else empty."""

    command: Command
    seconds: float
    error: str = ""


def commands_of(suite: Suite, *, peer: bool = False) -> tuple[Command, ...]:
    """The measurements of a suite, with those of the peer if it is asked for."""
    return tuple(
        msgspec.structs.replace(command, arguments=PEER_COMMANDS[command.module])
        if peer and command.module in PEER_COMMANDS
        else command
        for command in COMMANDS[suite]
    )


def measure(
    commands: Sequence[Command], device: str, folder: Path, *, run: RunCommand = run_command
) -> Iterator[Measurement]:
    """Run commands, which write result files into `folder`. The folder is emptied first. If this process is
    interrupted, the measurement that it interrupts is the last.

    Raises ConfigError, which names the file, for a folder with anything but results of these commands.
    """
    remove_results(folder, result_names(command.topic for command in commands))
    for command in commands:
        print(f"measuring {' '.join((command.module, *command.arguments))}", flush=True)
        started_at = time.perf_counter()

        def ended(error: str = "", *, command: Command = command, at: float = started_at) -> Measurement:
            return Measurement(command=command, seconds=time.perf_counter() - at, error=error)

        try:
            run(command, device, folder, lambda line: print(f"  {line}", flush=True))
        except CommandFailed as error:
            yield ended(str(error))
        except KeyboardInterrupt:
            yield ended("interrupted")
            raise
        else:
            yield ended()
