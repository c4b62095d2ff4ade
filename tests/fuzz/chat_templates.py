"""Chat templates, valid and invalid: compiled and rendered."""

from __future__ import annotations

from hypothesis import strategies as st

from drift_sdk.text import template_budget
from drift_sdk.text.chat import ChatTemplate

template_budget.MAX_STEPS = 200_000  # fewer steps, so that more examples run

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
METHODS = [
    "center(10 ** 9)",
    "replace('a', x)",
    "join(messages)",
    "format(x)",
    "split('a')",
    "zfill(10 ** 9)",
    "items()",
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
strategy = statements.map(lambda body: "{% set ns = namespace(s='x') %}" + body) | st.text(max_size=20)


def run(data: str) -> None:
    messages = [
        {"role": "user", "content": "a b\n" * 10},
        {"role": "assistant", "content": [{"type": "text"}]},
    ]
    template = ChatTemplate(data, bos_token="<s>", eos_token="</s>")
    assert isinstance(template.render(messages), str)
