"""The n-gram index against a search of the whole sequence."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from drift_sdk.draft_policy.ngram import NGramIndex


def naive(tokens: list[int], min_length: int, max_length: int, num_tokens: int) -> list[int]:
    for length in range(max_length, min_length - 1, -1):
        if length > len(tokens):
            continue
        suffix = tokens[len(tokens) - length :]
        for end in range(len(tokens) - 1, length - 1, -1):
            if tokens[end - length : end] == suffix:
                return tokens[end : end + num_tokens]
    return []


@given(
    tokens=st.lists(st.integers(0, 3), max_size=60),
    cut=st.integers(0, 60),
    lengths=st.tuples(st.integers(1, 3), st.integers(0, 3)),
    num_tokens=st.integers(0, 6),
)
def test_proposals_equal_a_search_of_the_whole_sequence(tokens, cut, lengths, num_tokens) -> None:
    min_length, max_length = lengths[0], lengths[0] + lengths[1]
    index = NGramIndex(min_length, max_length)
    index.extend(tokens[:cut])
    index.extend(tokens[cut:])
    assert index.propose(num_tokens) == naive(tokens, min_length, max_length, num_tokens)
    assert len(index) == len(tokens)


def test_repeated_phrase_is_continued() -> None:
    index = NGramIndex(2, 4)
    index.extend(b"to be or not to ")
    assert bytes(index.propose(6)) == b"be or "
    index.extend(b"x")
    assert index.propose(6) == []
