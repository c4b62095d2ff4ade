"""Scripts of scripted engines. Engines in other processes import this module, so it imports nothing else."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["next_character", "next_letter"]


def next_character(prompt_ids: Sequence[int], output_ids: Sequence[int], seed: int) -> int:
    """Printable characters in turn: the cheapest script."""
    return len(output_ids) % 64 + 32


def next_letter(prompt_ids: Sequence[int], output_ids: Sequence[int], seed: int) -> int:
    """A small letter that depends on all that tokens may depend on."""
    return 97 + (sum(prompt_ids) + seed + 7 * sum(output_ids) + len(output_ids)) % 26
