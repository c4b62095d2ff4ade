"""Chat templates, valid and invalid: compiled and rendered."""

from __future__ import annotations

from hypothesis import strategies as st

from drift_sdk.text import sandbox
from drift_sdk.text.chat import ChatTemplate

sandbox.MAX_STEPS = 200_000  # fewer steps, so that more examples run

VALUES = st.sampled_from(
    [
        "messages",
        "messages[0].content",
        "x",
        "ns.s",
        "'a'",
        "'a\n' * 1000",
        "10 ** 9",
        "range(99999)",
        "[ns.s, ns.s]",
    ]
    + [
        "range(99999) | list",
        "messages[1:]",
        "{'a': x}",
        "namespace(a=ns.s)",
        "m(x)",
        "none",
        "loop.index",
        "'%s{0}'",
    ]
    + ["5", "1.5", "-1", "(ns.s, ns.s)", "(ns.s,)", "{x: 1}", "{'a': x}.items()", "[[]] * 40000"]
    + ["'x' * 10000000", "'{:>99999}' * 1000", "'f' * 5000", "range(0, 99999 * 2**61, 2**61 - 1)"]
)
FILTERS = [
    "length",
    "tojson",
    "join",
    "list",
    "string",
    "trim",
    "upper",
    "reverse",
    "first",
    "sum",
    "unique",
    "sort",
]
FILTERS += [
    "map('string')",
    "select",
    "batch(10 ** 9)",
    "slice(10 ** 9)",
    "center(10 ** 9)",
    "indent(10 ** 6)",
]
FILTERS += [
    "replace('a', x)",
    "replace('', ns.s)",
    "tojson(indent=10 ** 9)",
    "default(x)",
    "groupby('role')",
    "int",
]
# Extreme arguments.
FILTERS += ["round(3000000)", "round(-20000000)", "round(3000000, 'ceil')", "map('round', -20000000) | list"]
FILTERS += ["sum(start=x)", "sum(start=ns.s)", "sum('role', x)", "tojson(indent=x)", "tojson(indent=ns.s)"]
FILTERS += ["tojson(separators=(ns.s, x))", "slice(32000000) | list | length", "batch(32000000, x) | list"]
FILTERS += ["int(base=16)", "unique | list", "select | list", "trim(x)", "trim(ns.s)", "join(x)", "format(x)"]
FILTERS += ["replace(new=ns.s, old='a')", "groupby(x)", "map(attribute=x) | list", "dictsort(by='value')"]
FILTERS += ["map(attribute='a.' * 99999, default={}) | list", "in({})", "max", "urlencode", "title", "list"]
METHODS = [
    "center(10 ** 9)",
    "replace('a', x)",
    "join(messages)",
    "format(x)",
    "split('a')",
    "zfill(10 ** 9)",
    "items()",
]
METHODS += [
    "encode()",
    "to_bytes(10 ** 9, 'little')",
    "ljust(10 ** 9)",
    "expandtabs(10 ** 9)",
    "translate(x)",
]
METHODS += ["rfind(x)", "rfind(ns.s)", "strip(ns.s)", "rsplit(ns.s)", "split()", "splitlines()", "index(x)"]
METHODS += [
    "get(x)",
    "count(ns.s)",
    "keys()",
    "fromkeys(range(99999))",
    "format(*range(99999))",
    "join('a' * 9**7)",
]


def combine(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    pairs = st.tuples(inner, inner)
    operators = st.sampled_from(["+", "~", "*", "%", "**", "in", "==", "//", "-", "<"])
    return (
        st.tuples(inner, operators, inner).map(lambda p: f"({p[0]} {p[1]} {p[2]})")
        | st.tuples(inner, st.sampled_from(FILTERS)).map(lambda p: f"({p[0]}) | {p[1]}")
        | st.tuples(inner, st.sampled_from(METHODS)).map(lambda p: f"({p[0]}).{p[1]}")
        | pairs.map(lambda p: f"[{p[0]}, {p[1]}]")
    )


values = st.recursive(VALUES, combine, max_leaves=5)
# Functions with extreme arguments. Values that depend on the messages are not computed by compiling.
NUMBERS = ["5", "1.5", "-7", "messages | length", "10 ** 9"]
TEXTS = ["'a'", "messages[0].content", "'a\n' * 99999", "'{:>99999}' * 9999", "'f' * 99999"]
LISTS = [
    "[1]",
    "range(99999)",
    "messages",
    "[[]] * 40000",
    "range(0, 99999 * 2**61, 2**61 - 1)",
    "[1] * 9**6",
]
SIZES = ["9**8", "-9**8", "9**8 * (messages | length)", "'x' * 9**7", "[0] * 9**6", "none"]
extremes = (
    st.tuples(
        st.sampled_from(NUMBERS),
        st.sampled_from(["|round(%s)", "|round(%s, 'ceil')", ".to_bytes(%s, 'little')", "** (%s)", "* (%s)"]),
        st.sampled_from(SIZES),
    )
    | st.tuples(
        st.sampled_from(TEXTS),
        st.sampled_from(
            ["|center(%s)", ".encode().ljust(%s)", ".format(*%s)", "|indent(%s)", ".rfind(%s)", ".strip(%s)"]
            + ["|replace('a', %s)", "|int(0, %s)", "|truncate(%s)", ".zfill(%s)", ".split(%s)", "|join(%s)"]
        ),
        st.sampled_from(SIZES),
    )
    | st.tuples(
        st.sampled_from(LISTS),
        st.sampled_from(
            ["|sum(start=%s)", "|list|tojson(indent=%s)", "|list|tojson(separators=(%s, ':'))", "|join(%s)"]
            + ["|slice(%s)|list", "|batch(%s, 1)|list", "|unique|list|join(%s)", "|map('round', %s)|list"]
            + ["|map(attribute=%s, default={})|list", "|groupby(%s)", "|map('center', %s)|list"]
        ),
        st.sampled_from(SIZES),
    )
).map(lambda drawn: f"{{{{ ({drawn[0]}){drawn[1] % drawn[2]} }}}}")


def block(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return (
        st.tuples(values, inner).map(lambda p: f"{{% for x in {p[0]} %}}{p[1]}{{% endfor %}}")
        | st.tuples(values, values, inner).map(
            lambda p: f"{{% for x in {p[0]} if {p[1]} %}}{p[2]}{{% endfor %}}"
        )
        | inner.map(lambda body: f"{{% for x in range(99999) %}}{body}{{% endfor %}}")
        | inner.map(lambda body: f"{{% set x %}}{body}{{% endset %}}")
        | inner.map(lambda body: f"{{% macro m(x) %}}{body}{{% endmacro %}}{{{{ m(m(1)) }}}}")
        | st.tuples(inner, inner).map("".join)
        | values.map(lambda value: f"{{% set ns.s = {value} %}}")
    )


statements = st.recursive(
    values.map(lambda value: f"{{{{ {value} }}}}") | st.just("text"), block, max_leaves=5
)
strategy = (
    extremes | statements.map(lambda body: "{% set ns = namespace(s='x') %}" + body) | st.text(max_size=20)
)


def run(data: str) -> None:
    messages = [
        {"role": "user", "content": "a b\n" * 10},
        {"role": "assistant", "content": [{"type": "text"}]},
    ]
    template = ChatTemplate(data, bos_token="<s>", eos_token="</s>")
    assert isinstance(template.render(messages), str)
