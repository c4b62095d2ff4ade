"""The prefix trie against a model of it."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from drift_sdk.scheduling.prefix import PrefixNode, PrefixTrie

BLOCK_SIZE = 2
TOKENS = st.lists(st.integers(0, 1), max_size=4 * BLOCK_SIZE)

SALTS = st.sampled_from([None, "a", "b"])

Path = tuple[str | None, tuple[int, ...]]  # the salt, and the tokens from the root to a block's end


def paths_of(token_ids: list[int], salt: str | None) -> list[Path]:
    return [(salt, tuple(token_ids[:end])) for end in range(BLOCK_SIZE, len(token_ids) + 1, BLOCK_SIZE)]


class PrefixTrieMachine(RuleBasedStateMachine):
    """The trie against a dict from paths to blocks, with times of last use.

    A holder references the cached prefix of its tokens, inserts the rest, and releases all of it later. A
    guess is a match without references.
    """

    def __init__(self) -> None:
        super().__init__()
        self.trie = PrefixTrie(BLOCK_SIZE)
        self.blocks: dict[Path, int] = {}
        self.references: dict[Path, int] = {}
        self.last_use: dict[Path, int] = {}
        self.holders: list[tuple[list[Path], list[PrefixNode]]] = []
        self.guesses: list[tuple[list[int], str | None, list[PrefixNode]]] = []
        self.num_blocks = 0
        self.clock = 0

    @rule(token_ids=TOKENS, salt=SALTS)
    def hold(self, token_ids: list[int], salt: str | None) -> None:
        nodes: list[PrefixNode] = []
        paths = paths_of(token_ids, salt)
        self.trie.extend_match(nodes, token_ids, len(paths), salt)
        num_cached = len(nodes)
        assert [node.block_id for node in nodes] == [self.blocks[path] for path in paths[:num_cached]]
        assert all(path not in self.blocks for path in paths[num_cached : num_cached + 1])
        self.trie.acquire(nodes)
        for path in paths[num_cached:]:
            parent = nodes[-1] if nodes else self.trie.root
            key = self.trie.key(token_ids, len(nodes), salt)
            nodes.append(self.trie.insert(parent, key, self.num_blocks))
            self.blocks[path] = self.num_blocks
            self.num_blocks += 1

        for path in paths:
            self.references[path] = self.references.get(path, 0) + 1

        self.holders.append((paths, nodes))

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        paths, nodes = self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1)))
        self.trie.release(nodes)
        for path in reversed(paths):
            self.references[path] -= 1
            self.clock += 1
            self.last_use[path] = self.clock

    @rule(token_ids=TOKENS, salt=SALTS)
    def guess(self, token_ids: list[int], salt: str | None) -> None:
        self.guesses.append((token_ids, salt, []))

    @precondition(lambda self: self.guesses)
    @rule(data=st.data(), max_blocks=st.integers(0, 4))
    def match(self, data: st.DataObject, max_blocks: int) -> None:
        token_ids, salt, nodes = data.draw(st.sampled_from(self.guesses))
        known = len(nodes)
        self.trie.extend_match(nodes, token_ids, max_blocks, salt)
        wanted: list[int] = []
        for path in paths_of(token_ids, salt)[: max(max_blocks, known)]:
            if path not in self.blocks:
                break

            wanted.append(self.blocks[path])

        found = [node.block_id for node in nodes]
        assert found == wanted[: len(found)]
        assert len(found) >= min(len(wanted), max_blocks)
        unreferenced = [
            path for path in paths_of(token_ids, salt)[: len(found)] if self.references[path] == 0
        ]
        assert self.trie.count_unreferenced(nodes) == len(unreferenced)

    @precondition(lambda self: self.trie.num_evictable)
    @rule()
    def evict(self) -> None:
        evictable = [path for path, count in self.references.items() if count == 0]
        oldest = min(evictable, key=self.last_use.__getitem__)
        assert self.trie.evict() == self.blocks.pop(oldest)
        del self.references[oldest]

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def insert_twice(self, data: st.DataObject) -> None:
        paths, nodes = data.draw(st.sampled_from(self.holders))
        if nodes:
            parent = nodes[-1].parent
            assert parent is not None
            with pytest.raises(AssertionError, match="cached already"):
                self.trie.insert(parent, nodes[-1].key, 999)

    @invariant()
    def agrees(self) -> None:
        self.trie.check_integrity()
        assert self.trie.num_nodes == len(self.blocks)
        assert self.trie.num_evictable == sum(count == 0 for count in self.references.values())
        assert {node.block_id for node in self.trie.iter_nodes()} == set(self.blocks.values())


TestPrefixTrie = PrefixTrieMachine.TestCase
TestPrefixTrie.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def test_second_release_is_rejected() -> None:
    trie = PrefixTrie(1)
    node = trie.insert(trie.root, (1,), 0)
    trie.release([node])
    with pytest.raises(AssertionError, match="not referenced"):
        trie.release([node])


def test_eviction_takes_leaves_first_in_lru_order() -> None:
    trie = PrefixTrie(1)
    a = trie.insert(trie.root, (1,), 10)
    b = trie.insert(a, (2,), 11)
    c = trie.insert(trie.root, (3,), 12)
    trie.release([a, b])
    trie.release([c])
    trie.acquire([a])
    trie.release([a])
    assert [trie.evict() for _ in range(3)] == [11, 12, 10]
    assert [node.block_id for node in (a, b, c)] == [-1, -1, -1]
