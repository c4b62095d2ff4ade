"""Finds stop strings in text that arrives in pieces."""

from __future__ import annotations

from collections import deque


class StopMatcher:
    """Searches a growing text for stop strings and holds back only text that may be the start of one.

    stops:         the stop strings, none of them empty.
    include_stop:  whether the emitted text includes the stop string that ended it.

    The text ends as soon as any stop string is complete: of all occurrences, the one that ends first wins,
    and of those that end together, the longest. With the stops "b" and "abc", the text "abc" ends at its "b".
    This can be decided while text arrives, so the result does not depend on how the text is cut into pieces.

    Matching walks an Aho-Corasick automaton (Aho and Corasick 1975). Its state is the longest suffix of the
    text that is a prefix of some stop string, which is also exactly the text to hold back. Time is linear in
    the length of the text; the text held back is shorter than the longest stop string.
    """

    def __init__(self, stops: tuple[str, ...], include_stop: bool) -> None:
        self._root = _build_automaton(stops)
        self._include_stop = include_stop
        self._state = self._root
        self._matched: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """Add text; returns the text to emit now, and the stop string that ended the text or None.

        The emitted text excludes the stop string, or ends with it if `include_stop`. After a match, nothing
        more is emitted and the same stop string is returned.
        """
        if self._matched is not None:
            return "", self._matched

        before = self._state
        state = before
        for index, char in enumerate(text):
            while char not in state.children and state.fallback is not None:
                state = state.fallback

            state = state.children.get(char, state)
            if state.match is not None:
                return self._end(before, text[: index + 1], state.match), state.match

        self._state = state
        return _emit(before, text, num_held=state.depth), None

    def flush(self) -> str:
        """End the text; returns the text that was held back."""
        held = self._state.prefix()
        self._state = self._root
        return held

    def _end(self, before: _State, text: str, match: str) -> str:
        self._matched = match
        self._state = self._root
        return _emit(before, text, num_held=0 if self._include_stop else len(match))


class _State:
    """A state of the automaton: a prefix of a stop string, the first `depth` characters of `stop`.

    children:  next character -> state.
    fallback:  the longest proper suffix of the prefix that is also a prefix of a stop string; None for the
               root.
    match:     the longest stop string that the prefix ends with; None if there is none.
    """

    __slots__ = ("children", "depth", "fallback", "match", "stop")

    def __init__(self, stop: str, depth: int) -> None:
        self.stop = stop
        self.depth = depth
        self.children: dict[str, _State] = {}
        self.fallback: _State | None = None
        self.match: str | None = None

    def prefix(self) -> str:
        return self.stop[: self.depth]


def _build_automaton(stops: tuple[str, ...]) -> _State:
    root = _State("", 0)
    for stop in stops:
        state = root
        for depth, char in enumerate(stop, start=1):
            state = state.children.setdefault(char, _State(stop, depth))

        state.match = stop

    # Breadth first: a fallback is computed from the fallbacks of shorter prefixes.
    states = deque([root])
    while states:
        parent = states.popleft()
        for char, state in parent.children.items():
            state.fallback = _find_fallback(parent, char, root)
            state.match = state.match or state.fallback.match
            states.append(state)

    return root


def _find_fallback(parent: _State, char: str, root: _State) -> _State:
    candidate = parent.fallback
    while candidate is not None and char not in candidate.children:
        candidate = candidate.fallback

    return root if candidate is None else candidate.children[char]


def _emit(before: _State, text: str, *, num_held: int) -> str:
    """The text held back in state `before`, followed by `text`, without the last `num_held` characters."""
    num_emitted = before.depth + len(text) - num_held
    if num_emitted <= before.depth:
        return before.stop[:num_emitted]

    return before.prefix() + text[: num_emitted - before.depth]
