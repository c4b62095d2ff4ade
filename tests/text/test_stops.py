"""Stop strings are found in text cut into any pieces, and only the beginning of one is held back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from drift_sdk.text.answers.reader import StopMatcher

STOPS = st.lists(st.text("abc", min_size=1, max_size=5), max_size=4).map(tuple)
TEXT = st.text("abcd", max_size=30)


def search_whole(text: str, stops: Sequence[str], include_stop: bool) -> tuple[str, str | None]:
    """Expected result: the first end of any stop in the whole text; of those that end there, the longest."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end if include_stop else end - len(longest)], longest

    return text, None


def run(matcher: StopMatcher, pieces: Sequence[str]) -> tuple[str, str | None]:
    """The emitted text and the stop string that ended it."""
    emitted = ""
    for piece in pieces:
        text, match = matcher.push(piece)
        emitted += text
        if match is not None:
            return emitted, match

    return emitted + matcher.flush(), None


def all_cuts(text: str) -> Iterator[list[str]]:
    """Every way to cut a text into pieces."""
    if not text:
        yield []

    for size in range(1, len(text) + 1):
        for rest in all_cuts(text[size:]):
            yield [text[:size], *rest]


@pytest.mark.parametrize("include_stop", [False, True])
@pytest.mark.parametrize(
    ("stops", "text"),
    [
        (("ab", "abc"), "xabcx"),
        (("b", "abc"), "aabcx"),
        (("abc", "bc", "c"), "xabcx"),
        (("c", "bc", "abc"), "xabcx"),
        (("abcd", "bd"), "abcabd"),
        (("aab",), "aaaab"),
        (("abab",), "abaabab"),
        (("abcx", "bcy", "cz"), "abcz"),
        (("abc",), "ababab"),
        (("🎉!",), "🎉🎉!"),
        (("a",), ""),
        ((), "abc"),
    ],
)
def test_result_is_the_same_for_every_way_to_cut_the_text(
    stops: tuple[str, ...], text: str, include_stop: bool
) -> None:
    expected = search_whole(text, stops, include_stop)
    for pieces in all_cuts(text):
        assert run(StopMatcher(stops, include_stop), pieces) == expected


@given(stops=STOPS, pieces=st.lists(TEXT, max_size=8), include_stop=st.booleans())
@example(stops=("b", "abc"), pieces=["a", "bc"], include_stop=False)
def test_result_is_the_same_for_random_cuts(
    stops: tuple[str, ...], pieces: list[str], include_stop: bool
) -> None:
    assert run(StopMatcher(stops, include_stop), pieces) == search_whole("".join(pieces), stops, include_stop)


@given(stops=STOPS, pieces=st.lists(TEXT, max_size=8))
def test_text_held_back_is_the_beginning_of_a_stop(stops: tuple[str, ...], pieces: list[str]) -> None:
    matcher = StopMatcher(stops, False)
    seen = emitted = ""
    for piece in pieces:
        text, match = matcher.push(piece)
        if match is not None:
            return

        seen += piece
        emitted += text
        held = seen[len(emitted) :]
        assert seen.startswith(emitted)
        assert not held or any(stop.startswith(held) and stop != held for stop in stops)

    assert emitted + matcher.flush() == seen
    assert matcher.flush() == ""


def test_earliest_end_wins_and_of_equal_ends_the_longest() -> None:
    assert StopMatcher(("b", "abc"), False).push("abc") == ("a", "b")
    assert StopMatcher(("b", "ab"), False).push("xab") == ("x", "ab")
    assert StopMatcher(("ab", "b"), True).push("xaby") == ("xab", "ab")


def test_nothing_more_is_emitted_after_a_match() -> None:
    matcher = StopMatcher(("stop",), False)
    assert matcher.push("a st") == ("a ", None)
    assert matcher.push("op here") == ("", "stop")
    assert matcher.push("more") == ("", "stop")
    assert matcher.flush() == ""


def test_all_text_is_emitted_without_stops() -> None:
    matcher = StopMatcher((), False)
    assert matcher.push("anything") == ("anything", None)
    assert matcher.flush() == ""
