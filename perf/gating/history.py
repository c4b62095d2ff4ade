"""The record of the smaller gates: how often in a row they were green on a commit, machine and GPU."""

from __future__ import annotations

import platform
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from msgspec import Struct

from perf.harness.processes import ROOT

__all__ = ["FILE", "NUM_GREEN", "Attempt", "Place", "add_attempt", "num_green_in_a_row", "reason_to_refuse"]

FILE = ROOT / ".cache" / "perf" / "gates.json"
"""Ignored by git: the record belongs to the machine."""
NUM_GREEN = 3
"""Green runs of `micro` in a row before `full` runs."""
MOST_ATTEMPTS = 1000


class Place(Struct, frozen=True, kw_only=True):
    """A commit on a machine with a GPU. machine: its network name."""

    commit: str
    machine: str
    gpu: str

    @classmethod
    def here(cls, commit: str, gpu: str) -> Place:
        return cls(commit=commit, machine=platform.node(), gpu=gpu)

    @property
    def is_reproducible(self) -> bool:
        """Whether the commit names the code that ran."""
        return self.commit != "unknown" and not self.commit.endswith("-dirty")


class Attempt(Struct, frozen=True, kw_only=True):
    """One run of `micro`. at: UTC, ISO 8601."""

    place: Place
    is_green: bool
    at: str


def add_attempt(place: Place, is_green: bool, file: Path = FILE) -> None:
    """Append a run to the record, which keeps the newest MOST_ATTEMPTS."""
    attempts = [*read_attempts(file), Attempt(place=place, is_green=is_green, at=now())][-MOST_ATTEMPTS:]
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_suffix(".new")
    temporary.write_bytes(msgspec.json.format(msgspec.json.encode(attempts), indent=1) + b"\n")
    temporary.replace(file)


def num_green_in_a_row(place: Place, file: Path = FILE) -> int:
    """The number of green runs in this place since the last red one there."""
    count = 0
    for attempt in read_attempts(file):
        if attempt.place == place:
            count = count + 1 if attempt.is_green else 0
    return count


def reason_to_refuse(place: Place, file: Path = FILE) -> str:
    """The reason for which `full` may not run in this place; empty if it may."""
    if not place.is_reproducible:
        return f"commit {place.commit}: expected a commit without changes, which `micro` can be counted for"

    count = num_green_in_a_row(place, file)
    if count >= NUM_GREEN:
        return ""

    where = f"commit {place.commit}, machine {place.machine}, {place.gpu}"
    return f"`micro` was green {count} times in a row on {where}: expected {NUM_GREEN}"


def read_attempts(file: Path) -> list[Attempt]:
    """The record; empty without a file. Raises msgspec.ValidationError for another file."""
    return msgspec.json.decode(file.read_bytes(), type=list[Attempt]) if file.is_file() else []


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
