"""Finding stop strings in text that arrives in pieces."""

from __future__ import annotations

from collections import deque

__all__ = ["StopMatcher"]


class StopMatcher:
    """Watches a growing text for stop strings and holds back only what could still begin one.

    The text ends at the first moment at which any stop string is complete: of all occurrences the one that
    ends first wins, and of those that end together the longest. With stops "b" and "abc", "abc" ends at its
    "b". That can be decided as text arrives, so the result does not depend on how the text was cut.

    Matching walks an Aho-Corasick automaton (Aho and Corasick 1975): its state is the longest suffix of the
    text that begins some stop string, which is also exactly the text to hold back. Time is linear in the
    text; less than the longest stop string is held.
    """

    def __init__(self, stops: tuple[str, ...], include_stop: bool) -> None:
        self._root = _build_automaton(stops)
        self._include_stop = include_stop
        self._state = self._root
        self._matched: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """Add text; return what is safe to emit now, and the stop string that ended the text or None.

        The emitted text leaves the stop string out, or ends with it if `include_stop`. After a match nothing
        more is emitted and the same stop string is returned again.
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
        """The text still held back, once no more will come."""
        held = self._state.prefix()
        self._state = self._root
        return held

    def _end(self, before: _State, text: str, match: str) -> str:
        self._matched = match
        self._state = self._root
        return _emit(before, text, num_held=0 if self._include_stop else len(match))


class _State:
    """A prefix of a stop string. `fallback` is the longest proper suffix of it which is a prefix too; `match`
    is the longest stop string it ends with."""

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

    # Breadth first, so that the fallbacks of all shorter prefixes are known.
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
    """The held text of `before` and `text` joined, less the last `num_held` characters."""
    num_emitted = before.depth + len(text) - num_held
    if num_emitted <= before.depth:
        return before.stop[:num_emitted]

    return before.prefix() + text[: num_emitted - before.depth]
