"""Lark grammars, valid and invalid: compiled, then used to generate a few tokens."""

from __future__ import annotations

from following import follow
from hypothesis import strategies as st

from drift_sdk import Lark

NAMES = ["start", "a", "b", "A", "B", "c", "%ignore A", "%import common.INT", "nothing"]
ATOMS = st.sampled_from(
    [
        "a",
        "b",
        "A",
        "B",
        "INT",
        '"x"',
        '"é"i',
        '""',
        '"\\u0000"',
        "/a?b*/",
        r"/\d+\//",
        "/(/",
        '"a".."z"',
        "~A",
        "@a",
    ]
    + [
        "<|eos|>",
        "<[1-5]>",
        "<[*]>",
        "<[^0-255]>",
        "#",
        "//",
        '"',
        "->",
        "%if",
        "a::incr(_)",
        "/.*0.*/",
        "A & B",
    ]
    + [
        '%json {"type": "integer"}',
        '%json {"const": -9223372036854775808}',
        '%json {"minimum": 1e19}',
        "%json {",
    ]
    + ['%regex {"substring_chars": "abcabc"}', "%lark { start: a }", '%lark {\nstart: "x"\n}']
)
REPEATS = st.sampled_from(["?", "*", "+", "~3", "{2,}", "{0,1000}", "~1000000", "{4294967296}", "{5,2}"])


def combine(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    parts = st.lists(inner, min_size=1, max_size=4)
    return (
        parts.map(" ".join)
        | parts.map(" | ".join)
        | parts.map(" & ".join)
        | inner.map(lambda each: f"({each})")
        | inner.map(lambda each: f"[{each}]")
        | st.tuples(inner, REPEATS).map("".join)
        | st.tuples(inner, st.sampled_from([27, 400])).map(lambda p: " ".join([p[0]] * p[1]))
        | st.tuples(inner, st.sampled_from([27, 400])).map(lambda p: "(" * p[1] + p[0] + ")?" * p[1])
    )


bodies = st.recursive(ATOMS, combine, max_leaves=6).filter(lambda body: len(body) < 1 << 20)
rules = st.dictionaries(st.sampled_from(NAMES), bodies, max_size=6).map(
    lambda items: "\n".join(f"{name}: {body}" if name[0] != "%" else name for name, body in items.items())
)


def chain(length: int, body: str, name: str) -> str:
    links = "".join(f'{name}{i}: "b" {name}{i + 1}\n' for i in range(length))
    return f"start: {name}0\n{links}{name}{length}: {body}\n"


# One piece of a token repeated, so that the end of a token may be searched for many times.
PIECES = st.sampled_from(
    ['"', '\\"', "/", "/\\", "\\", "'", '"a', "/a", "#", "//", "/*", "%", "%json", "%json {", "(", "a:", "~"]
)
TIMES = st.sampled_from([27, 4000, 40_000])
repeated = st.tuples(st.sampled_from(["", "start: ", 'start: "a" ']), PIECES, TIMES).map(
    lambda drawn: drawn[0] + drawn[1] * drawn[2]
)

lengths = st.sampled_from([30, 900, 4000, 20_000])
strategy = (
    st.text(min_size=1, max_size=30)
    | repeated
    | bodies.map(lambda body: f'start: {body}\na: "y" | a b\nb: A\nA: "z"\nB: /[0-9]/ A?\n')
    | rules.filter(bool)
    | st.tuples(lengths, bodies, st.sampled_from("rR")).map(lambda drawn: chain(*drawn))
)


def run(data: str) -> None:
    follow(lambda: Lark(data))
