"""Routing: the replica that a request goes to, by load and by the beginnings of prompts.

`PromptBlocks` are blocks of a prompt, by which the router knows a common beginning before the prompt is
tokenised.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from typing import Annotated, Any

from msgspec import Meta, Struct

from drift_sdk._fields import ConfigFields, check_fields
from drift_sdk.driver.prompts import (
    AnsweredPrompt,
    ChatPrompt,
    CutPrompt,
    FramedPrompt,
    Prompt,
    TextPrompt,
    TokenPrompt,
)
from drift_sdk.errors import ConfigError


class Routing(Struct, frozen=True, kw_only=True, metaclass=ConfigFields):
    """Settings of an `EnginePool`. The fields are checked when it is made: a wrong value raises ConfigError.

    affinity: a request goes to the replica that has computed the longest beginning of its prompt, while the
              live tokens of that replica are at most 4,096, or at most so many times those of the least
              loaded replica, 1 to 1,000,000; else to the least loaded one. None = always to the least loaded
              one.
    replay:   a request whose replica has failed after its stream got tokens is run again on another replica,
              and the stream goes on where it was; False = the stream raises ReplicaFailed. The replicas must
              be of one kind: starting raises ConfigError if GPU, versions, tuned table or config differ.
    """

    affinity: Annotated[float, Meta(ge=1.0, le=1e6)] | None = 2.0
    replay: bool = False

    def __post_init__(self) -> None:
        check_fields(ConfigError, self)


BLOCK_TOKENS = 64
CHARS_PER_TOKEN = 4
"""Characters that count as a token: the mean of English text. Loads and prefixes are estimates."""
MAX_BLOCKS = 256
"""Most blocks that are hashed: prompts that agree in 16,384 tokens are as good as equal."""


class PromptBlocks(Struct, frozen=True):
    """The size of a prompt and its beginning.

    num_tokens: of the whole prompt; estimated unless it consists of token ids. At least 1.
    hashes:     one for each full block of 64 tokens, at most 256: of the block, all blocks before it and the
                salt. They are equal within this process alone.
    """

    num_tokens: int
    hashes: tuple[int, ...]

    @classmethod
    def of(cls, prompt: Prompt, salt: str | None = None) -> PromptBlocks:
        first = 0 if salt is None else hash(salt)
        if isinstance(prompt, AnsweredPrompt | CutPrompt):
            prompt = prompt.prompt  # all answers go where the prompt is
        if isinstance(prompt, TokenPrompt):
            return cls(max(1, len(prompt.ids)), tuple(rolling_hashes(prompt.ids, BLOCK_TOKENS, first)))

        text = written(prompt)
        num_tokens = max(1, len(text) // CHARS_PER_TOKEN)
        return cls(num_tokens, tuple(rolling_hashes(text, BLOCK_TOKENS * CHARS_PER_TOKEN, first)))


def rolling_hashes(items: Sequence[Any], block_size: int, first: int) -> Iterator[int]:
    """For each full block, a hash of the block and the hash before it, which is `first` for the first block.
    They end before a block with an item that has no hash, which the replica rejects."""
    found = first
    for end in range(block_size, min(len(items), block_size * MAX_BLOCKS) + 1, block_size):
        try:
            found = hash((found, items[end - block_size : end]))
        except Exception:  # of whatever a caller gives for a token id
            return

        yield found


def written(prompt: Prompt) -> str:
    """A text of the prompt whose beginning does not change when messages are added to a conversation."""
    if isinstance(prompt, TextPrompt):
        return prompt.text

    if isinstance(prompt, FramedPrompt):
        return prompt.before + prompt.text + prompt.after

    if isinstance(prompt, ChatPrompt):
        parts = (prompt.offered_tools, prompt.template_args, *prompt.messages)
        return "\n".join(map(text_of, parts))

    return ""


def text_of(part: object) -> str:
    """A text of plain data; none of an integer with more digits than Python writes."""
    try:
        return repr(part)
    except ValueError:
        return ""


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
