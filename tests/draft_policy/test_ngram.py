"""The look-up of n-grams against a plain search of the whole sequence."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from drift_sdk.execution.ngram_history import FIRST_ROOM, NGramHistory


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
    tokens=st.lists(st.integers(0, 2), max_size=60),
    cut=st.integers(0, 60),
    lengths=st.tuples(st.integers(1, 3), st.integers(0, 13)),
    num_tokens=st.integers(0, 6),
)
def test_proposals_equal_a_search_of_the_whole_sequence(tokens, cut, lengths, num_tokens) -> None:
    min_length, max_length = lengths[0], lengths[0] + lengths[1]
    history = NGramHistory(min_length, max_length)
    history.extend(tokens[:cut])
    history.extend(tokens[cut:])
    assert history.propose(num_tokens) == naive(tokens, min_length, max_length, num_tokens)
    assert len(history) == len(tokens)


def test_repeated_phrase_is_continued() -> None:
    history = NGramHistory(2, 4)
    history.extend(list(b"to be or not to "))
    assert bytes(history.propose(6)) == b"be or "
    history.extend(list(b"x"))
    assert history.propose(6) == []


def test_longest_run_decides_over_the_latest() -> None:
    history = NGramHistory(1, 16)
    history.extend(list(b"a long phrase, then 1; the phrase, then 2; a long phrase, then "))
    assert bytes(history.propose(1)) == b"1"
    short = NGramHistory(1, 4)
    short.extend(list(b"a long phrase, then 1; the phrase, then 2; a long phrase, then "))
    assert bytes(short.propose(1)) == b"2"


def test_history_grows_beyond_its_first_room() -> None:
    tokens = list(range(FIRST_ROOM + 100))
    history = NGramHistory(2, 16)
    history.extend(tokens)
    history.extend([5, 6, 7])
    assert history.propose(3) == [8, 9, 10]
    history.extend([FIRST_ROOM + 98, FIRST_ROOM + 99])
    assert history.propose(3) == [5, 6, 7]
