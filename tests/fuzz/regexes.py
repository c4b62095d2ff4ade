"""Regexes, valid and invalid: compiled, then used to generate a few tokens."""

from __future__ import annotations

from following import follow
from hypothesis import strategies as st

from drift_sdk import Regex

ATOMS = st.sampled_from(
    [
        "a",
        ".",
        r"\d",
        r"\D",
        r"\w",
        r"\W",
        r"\s",
        r"\S",
        r"\b",
        "[a-z]",
        r"[^\d/]",
        r"[\W&&[^a]]",
        r"\p{Nd}",
        "/",
        "\\",
    ]
    + [
        "é",
        "\x00",
        "\n",
        "🎉",
        "^",
        "$",
        "(?i)k",
        "(?x) ",
        "(?-u:a)",
        "(?=a)",
        r"\1",
        r"\u{10ffff}",
        r"\x7f",
        "#",
        '"',
    ]
)
REPEATS = st.sampled_from(
    ["?", "*", "+", "??", "{0}", "{3}", "{2,}", "{0,1000}", "{1000000}", "{4294967296}", "{,2}"]
)


def repeated(pair: tuple[str, int]) -> str:
    """A pattern, repeated. The length is bounded, so that drawing it does not exhaust the memory."""
    pattern, times = pair
    return pattern * min(times, 1 + (1 << 20) // len(pattern))


def combine(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    parts = st.lists(inner, min_size=1, max_size=4)
    return (
        parts.map("".join)
        | parts.map("|".join)
        | st.tuples(inner, REPEATS).map(lambda pair: f"({pair[0]}){pair[1]}")
        | st.tuples(inner, st.sampled_from([50, 990, 1000, 20_000])).map(repeated)
        | st.tuples(inner, st.sampled_from([50, 300, 5000])).map(lambda p: "(" * p[1] + p[0] + ")?" * p[1])
    )


strategy = st.text(min_size=1, max_size=20) | st.recursive(ATOMS, combine, max_leaves=8).filter(
    lambda pattern: len(pattern) < 1 << 20
)


def run(data: str) -> None:
    follow(lambda: Regex(data))
