"""Router: the replica that a request goes to, by load and by the beginnings of prompts."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence

from drift_sdk.pool.prompt_blocks import PromptBlocks

__all__ = ["Load", "Router"]

MAX_REMEMBERED = 65_536
"""Most blocks that are remembered of a replica, 4,194,304 tokens: more than a prefix cache holds."""
IDLE_TOKENS = 4096
"""A replica with this many live tokens or fewer counts as free for prompts whose beginning it has."""


class Prefixes:
    """Hashes of prompt blocks that a replica has computed; the least recently used are forgotten."""

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._hashes: OrderedDict[int, None] = OrderedDict()

    def num_known(self, hashes: Sequence[int]) -> int:
        """The number of blocks of a prompt that are known, from its beginning on."""
        return next((index for index, each in enumerate(hashes) if each not in self._hashes), len(hashes))

    def add(self, hashes: Sequence[int]) -> None:
        # Later blocks are of no use without earlier ones, so these are forgotten last.
        for each in reversed(hashes):
            self._hashes[each] = None
            self._hashes.move_to_end(each)
        while len(self._hashes) > self._max_blocks:
            self._hashes.popitem(last=False)

    def clear(self) -> None:
        self._hashes.clear()


class Load:
    """Load of a replica, and what it has computed.

    num_requests, num_tokens: live requests, and tokens of their prompts and completions so far.
    num_routed:               requests that were given to it.
    num_by_prefix:            of them, those whose beginning it had got before.
    """

    __slots__ = ("num_by_prefix", "num_requests", "num_routed", "num_tokens", "prefixes")

    def __init__(self, max_blocks: int) -> None:
        self.num_requests: int = 0
        self.num_tokens: int = 0
        self.num_routed: int = 0
        self.num_by_prefix: int = 0
        self.prefixes: Prefixes = Prefixes(max_blocks)


class Router:
    """Loads of replicas, and the order in which they are offered a request. Used from any thread.

    affinity: a replica that has the beginning of a prompt is preferred while its live tokens are at most so
              many times those of the least loaded one, or 4,096. None = the least loaded one is preferred.
    """

    def __init__(
        self, num_replicas: int, affinity: float | None, *, max_remembered: int = MAX_REMEMBERED
    ) -> None:
        self._affinity = affinity
        self._lock = threading.RLock()
        self.loads: list[Load] = [Load(max_remembered) for _ in range(num_replicas)]

    def order(self, blocks: PromptBlocks, candidates: Collection[int]) -> list[int]:
        """The candidates, best first: the one with the longest known beginning unless it is overloaded, then
        by live tokens, by live requests and by the number of requests that they got before."""
        with self._lock:
            ordered = sorted(candidates, key=self._load)
            preferred = self._preferred(blocks, ordered)
        if preferred is not None:
            ordered.remove(preferred)
            ordered.insert(0, preferred)
        return ordered

    def begin(self, index: int, blocks: PromptBlocks) -> None:
        """A request with this prompt is given to a replica."""
        with self._lock:
            load = self.loads[index]
            load.num_requests += 1
            load.num_tokens += blocks.num_tokens

    def remember(self, index: int, blocks: PromptBlocks) -> None:
        """A replica has taken a request with this prompt, and computes it."""
        with self._lock:
            load = self.loads[index]
            load.num_routed += 1
            load.num_by_prefix += load.prefixes.num_known(blocks.hashes) > 0
            load.prefixes.add(blocks.hashes)

    def grow(self, index: int, num_tokens: int) -> None:
        """A request of a replica has got so many tokens."""
        with self._lock:
            self.loads[index].num_tokens += num_tokens

    def end(self, index: int, num_tokens: int) -> bool:
        """A request with so many tokens, those of the prompt included, has ended. Returns whether it was the
        replica's last."""
        with self._lock:
            load = self.loads[index]
            load.num_requests -= 1
            load.num_tokens -= num_tokens
            return not load.num_requests

    def forget(self, index: int) -> None:
        """A replica has lost its prefix cache."""
        with self._lock:
            self.loads[index].prefixes.clear()

    def _load(self, index: int) -> tuple[int, int, int, int]:
        load = self.loads[index]
        return load.num_tokens, load.num_requests, load.num_routed, index

    def _preferred(self, blocks: PromptBlocks, ordered: Sequence[int]) -> int | None:
        """The candidate with the longest known beginning, the least loaded of several; None if there is none,
        or it is overloaded."""
        if self._affinity is None or not ordered or not blocks.hashes:
            return None

        known = [self.loads[index].prefixes.num_known(blocks.hashes) for index in ordered]
        longest = max(known)
        found = ordered[known.index(longest)]
        most = max(self._affinity * self.loads[ordered[0]].num_tokens, IDLE_TOKENS)
        return found if longest and self.loads[found].num_tokens <= most else None
