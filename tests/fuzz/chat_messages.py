"""Messages, tools and template arguments of any form, rendered by a simple template."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from drift_sdk.testing import CHAT_TEMPLATE
from drift_sdk.text.chat import ChatTemplate

SOURCE = CHAT_TEMPLATE + "{{ tools | tojson }}{{ extra | tojson }}"

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=8,
)
messages = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "é"]) | values}, optional={"content": values})
)
depths = st.sampled_from([0, 10, 200, 2000, 100_000])
strategy = st.tuples(messages | values, st.none() | values, st.none() | values, depths)


def nest(value: object, depth: int) -> object:
    for _ in range(depth):
        value = [value]
    return value


def run(data: tuple[Any, Any, Any, int]) -> None:
    messages, tools, args, depth = data
    if isinstance(messages, list) and messages and isinstance(messages[0], dict) and depth:
        messages[0]["content"] = nest("x", depth)
    template = ChatTemplate(SOURCE, bos_token=None, eos_token=None)
    assert isinstance(template.render(messages, tools=tools, template_args=args), str)
