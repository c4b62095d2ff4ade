"""How the prompts of a step share its tokens."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drift_sdk.scheduling.planning import MAX_STEPS_WITHOUT_TOKENS, share_tokens
from drift_sdk.steps import MAX_CHUNKS


def shares(num_tokens: int, *prompts: tuple[int, int], num_steps_without_tokens: int = 0) -> list[int]:
    """prompts: (priority, tokens). num_steps_without_tokens: of the first one."""
    made: list[Any] = [
        SimpleNamespace(priority=priority, num_unplanned_tokens=size, num_steps_without_tokens=0)
        for priority, size in prompts
    ]
    for first in made[:1]:
        first.num_steps_without_tokens = num_steps_without_tokens
    return share_tokens(num_tokens, made)


@pytest.mark.parametrize(
    ("num_tokens", "prompts", "expected"),
    [
        (8, [], []),
        (8, [(0, 20)], [8]),
        (8, [(0, 3)], [3]),
        (7, [(0, 20), (0, 9)], [0, 7]),
        (8, [(0, 20), (0, 9), (0, 2)], [0, 6, 2]),
        (8, [(0, 5), (0, 9)], [5, 3]),
        (8, [(0, 20), (1, 1), (0, 9)], [0, 0, 8]),  # priority comes before length
        (8, [(0, 20), (1, 1), (0, 5)], [3, 0, 5]),
        (1, [(0, 1), (0, 20)], [1, 0]),
        (0, [(0, 20), (0, 1)], [0, 0]),
    ],
)
def test_shortest_prompts_come_first(
    num_tokens: int, prompts: list[tuple[int, int]], expected: list[int]
) -> None:
    assert shares(num_tokens, *prompts) == expected
    assert shares(num_tokens, *prompts, num_steps_without_tokens=MAX_STEPS_WITHOUT_TOKENS - 1) == expected


@pytest.mark.parametrize(
    ("num_tokens", "prompts", "expected"),
    [
        (8, [], []),
        (8, [(0, 3)], [3]),
        (7, [(0, 20), (0, 9)], [4, 3]),  # half, rounded up
        (8, [(0, 20), (0, 9), (0, 2)], [4, 2, 2]),
        (8, [(0, 20), (1, 1), (0, 9)], [4, 0, 4]),
        (1, [(0, 20), (0, 1)], [1, 0]),
    ],
)
def test_first_prompt_gets_half_if_it_was_passed_over(
    num_tokens: int, prompts: list[tuple[int, int]], expected: list[int]
) -> None:
    assert shares(num_tokens, *prompts, num_steps_without_tokens=MAX_STEPS_WITHOUT_TOKENS) == expected


def test_number_of_prompts_with_tokens_is_bounded() -> None:
    prompts = [(0, 9), *[(0, 2)] * MAX_CHUNKS]
    assert shares(500, *prompts) == [0, *[2] * MAX_CHUNKS]
    assert shares(500, *prompts, num_steps_without_tokens=MAX_STEPS_WITHOUT_TOKENS) == [
        9,
        *[2] * (MAX_CHUNKS - 1),
        0,
    ]


@given(
    st.integers(0, 50),
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 30)), max_size=8),
    st.integers(0, MAX_STEPS_WITHOUT_TOKENS + 1),
)
def test_all_tokens_are_given_within_what_prompts_need(
    num_tokens: int, prompts: list[tuple[int, int]], num_steps_without_tokens: int
) -> None:
    found = shares(num_tokens, *prompts, num_steps_without_tokens=num_steps_without_tokens)
    sizes = [size for _, size in prompts]
    assert all(0 <= share <= size for share, size in zip(found, sizes, strict=True))
    assert sum(found) == min(num_tokens, sum(sizes))
    if prompts and num_steps_without_tokens >= MAX_STEPS_WITHOUT_TOKENS:
        assert found[0] >= min(sizes[0], num_tokens / 2)
    for (prompt, share), (other, other_share) in zip(
        zip(prompts[1:], found[1:], strict=True), zip(prompts[2:], found[2:], strict=True), strict=False
    ):
        if prompt < other and other_share:
            assert share == prompt[1]
