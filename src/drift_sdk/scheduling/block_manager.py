"""Allocation of KV blocks to sequences, with a cache of prefixes."""

from __future__ import annotations

from collections.abc import Iterable

from drift_sdk.scheduling.checkpoint_planner import CheckpointPlanner
from drift_sdk.scheduling.config import SchedulerConfig
from drift_sdk.scheduling.prefix import BlockKey, PrefixTrie
from drift_sdk.scheduling.sequence import Sequence

__all__ = ["BlockManager", "BlockPool"]


class BlockPool:
    """The free blocks. Blocks are numbered from 0; the block freed last is allocated first."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._is_free = bytearray(b"\x01") * num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    def is_free(self, block_id: int) -> bool:
        """Whether a block is in the pool."""
        return bool(self._is_free[block_id])

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks. AssertionError if fewer are free: the caller checks `num_free` first."""
        assert 0 <= count <= len(self._free), f"{count} blocks requested, {len(self._free)} free"
        split = len(self._free) - count
        block_ids = self._free[split:]
        del self._free[split:]
        for block_id in block_ids:
            self._is_free[block_id] = 0

        return block_ids

    def free(self, block_ids: Iterable[int]) -> None:
        """Return blocks to the pool. AssertionError for a block that is free already."""
        for block_id in block_ids:
            assert not self._is_free[block_id], f"block {block_id} is free already"
            self._is_free[block_id] = 1
            self._free.append(block_id)

    def check_integrity(self) -> None:
        """Raise AssertionError if the list and the flags disagree."""
        assert len(set(self._free)) == len(self._free), "a block is in the free list twice"
        assert sum(self._is_free) == len(self._free), "free flags and free list differ in number"
        assert all(self._is_free[block_id] for block_id in self._free), "a listed block is not flagged free"


class BlockManager:
    """The owner of every KV block. A block is free, private to one running sequence, or cached.

    The first `len(prefix_nodes)` blocks of a sequence's table are references on cached nodes, the others are
    private. Only committed KV is published; steps in flight write at position `num_computed_tokens` or above,
    so never into a cached block. A freed block can be allocated in the next plan even with steps in flight:
    steps run in the order of their launch, so the writes of the new owner come after those of the old one.

    checkpoints: None without recurrent states.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.block_size = config.block_size
        self.pool: BlockPool = BlockPool(config.num_blocks)
        self.trie: PrefixTrie = PrefixTrie(config.block_size)
        self.checkpoints: CheckpointPlanner | None = None
        if config.checkpoint_tokens:
            self.checkpoints = CheckpointPlanner(config.num_checkpoints, config.checkpoint_tokens, self.trie)

    @property
    def num_available(self) -> int:
        """Blocks that can be allocated: free ones, and cached ones that no sequence references."""
        return self.pool.num_free + self.trie.num_evictable

    def num_blocks(self, num_slots: int) -> int:
        """Blocks needed for KV of `num_slots` tokens."""
        return -(-num_slots // self.block_size)

    def match(self, sequence: Sequence) -> None:
        """Find the cached prefix of a waiting sequence, without references: it can be evicted again."""
        # The last token is always computed, because the next token follows from its logits.
        last = len(sequence.token_ids) - 1
        max_hits = last // self.block_size if sequence.can_share_prefix else 0
        self.trie.extend_match(sequence.prefix_nodes, sequence.token_ids, max_hits, sequence.cache_salt)
        num_hits = len(sequence.prefix_nodes)
        if self.checkpoints is not None:
            num_hits = self.checkpoints.num_resumable(sequence.prefix_nodes)
        sequence.num_computed_tokens = num_hits * self.block_size

    def try_admit(self, sequence: Sequence, max_emitted_tokens: int) -> bool:
        """Assign a waiting sequence its cached prefix and new blocks for the rest of its tokens.

        Returns False, with nothing assigned, unless there are also blocks for its first decode row, of at
        most `max_emitted_tokens` tokens.
        """
        self.match(sequence)
        length, nodes = len(sequence.token_ids), sequence.prefix_nodes
        if self.checkpoints is not None:
            nodes = nodes[: sequence.num_computed_tokens // self.block_size]
        num_needed = self.num_blocks(sequence.num_kv_slots(length + 1 + max_emitted_tokens))
        num_missing = num_needed - len(nodes)
        if num_missing > self.num_available:
            return False

        # The unreferenced nodes of the prefix are counted as available, but cannot be evicted for it.
        if num_missing > self.num_available - self.trie.count_unreferenced(nodes):
            return False

        self.trie.acquire(nodes)
        sequence.block_table = [node.block_id for node in nodes]
        sequence.is_publishing = True
        if self.checkpoints is not None:
            self.checkpoints.admit(sequence)
        self.extend(sequence, self.num_blocks(sequence.num_kv_slots(length + 1)))
        return True

    def extend(self, sequence: Sequence, num_blocks: int) -> None:
        """Lengthen a sequence's table to `num_blocks` entries, evicting cached blocks if necessary.

        The caller has checked `num_available`.
        """
        count = num_blocks - len(sequence.block_table)
        if count > self.pool.num_free:
            self._evict(count - self.pool.num_free)

        sequence.block_table += self.pool.allocate(count)

    def trim(self, sequence: Sequence) -> None:
        """Free the blocks that steps in flight cannot reach, after a row that emitted fewer tokens than it
        was planned for."""
        num_slots = sequence.num_kv_slots(len(sequence.token_ids) + sequence.max_in_flight_tokens)
        num_blocks = self.num_blocks(num_slots)
        assert num_blocks >= len(sequence.prefix_nodes), f"{sequence}: a cached block would be freed"
        self.pool.free(sequence.block_table[num_blocks:])
        del sequence.block_table[num_blocks:]

    def publish(self, sequence: Sequence) -> None:
        """Insert the sequence's blocks that have become full and committed into the prefix cache."""
        nodes = sequence.prefix_nodes
        while sequence.is_publishing and (len(nodes) + 1) * self.block_size <= sequence.num_computed_tokens:
            parent = nodes[-1] if nodes else self.trie.root
            key = self._key(sequence, len(nodes))
            # An equal block of another sequence is cached already. A reference on it would keep two blocks
            # from eviction for one table entry, and the longest sequence could then need more blocks than
            # there are. The remaining blocks are published when the sequence releases its blocks.
            if key in parent.children:
                sequence.is_publishing = False
                break

            nodes.append(self.trie.insert(parent, key, sequence.block_table[len(nodes)]))

    def release(self, sequence: Sequence) -> None:
        """Take all blocks from a sequence. Full committed blocks stay cached, the others are freed."""
        nodes = sequence.prefix_nodes
        table = sequence.block_table
        num_full = sequence.num_computed_tokens // self.block_size
        private = table[num_full:]
        for index in range(len(nodes), num_full):
            parent = nodes[-1] if nodes else self.trie.root
            key = self._key(sequence, index)
            node = parent.children.get(key)
            if node is None:
                node = self.trie.insert(parent, key, table[index])
            else:
                self.trie.acquire([node])
                private.append(table[index])
            nodes.append(node)

        if self.checkpoints is not None:
            self.checkpoints.release(sequence)
        self.trie.release(nodes)
        self.pool.free(private)
        sequence.prefix_nodes = []
        sequence.block_table = []

    def forget_cached(self) -> None:
        """Free all cached blocks. No sequence may hold any block."""
        self._evict(self.trie.num_evictable)

    def check_integrity(self, running: Iterable[Sequence]) -> None:
        """Raise AssertionError unless every block has exactly one owner and all references are counted.

        running: all sequences that hold blocks.
        """
        self.pool.check_integrity()
        self.trie.check_integrity()
        nodes = self.trie.iter_nodes()
        cached = {node.block_id for node in nodes}
        references = dict.fromkeys(nodes, 0)
        private: list[int] = []
        for sequence in running:
            path, table = sequence.prefix_nodes, sequence.block_table
            is_committed = len(path) * self.block_size <= sequence.num_computed_tokens
            assert is_committed, f"{sequence}: published before its commit"
            parent = self.trie.root
            for index, node in enumerate(path):
                assert node in references, f"{sequence}: block {table[index]} was evicted while referenced"
                assert node.parent is parent, f"{sequence}: its path is broken at block {index}"
                assert node.key == self._key(sequence, index), f"{sequence}: block {index} holds other tokens"
                assert node.block_id == table[index], f"{sequence}: table and path differ at block {index}"
                references[node] += 1
                parent = node

            private += table[len(path) :]
            length = len(sequence.token_ids) + sequence.max_in_flight_tokens
            wanted = self.num_blocks(sequence.num_kv_slots(max(length, sequence.num_prefill_tokens + 1)))
            assert len(table) == wanted, f"{sequence}: {len(table)} blocks held, steps reach {wanted}"

        for node, count in references.items():
            assert node.num_references == count, (
                f"block {node.block_id}: {node.num_references} references counted, {count} held"
            )
        assert len(set(private)) == len(private), "two sequences hold one private block"
        assert not cached.intersection(private), "a cached block is private too"
        assert not any(map(self.pool.is_free, cached)), "a cached block is free"
        assert not any(map(self.pool.is_free, private)), "a private block is free"
        num_owned = self.pool.num_free + len(cached) + len(private)
        assert num_owned == self.pool.num_blocks, f"{num_owned} owned of {self.pool.num_blocks} blocks"

    def _evict(self, count: int) -> None:
        """Free the blocks of `count` nodes, and the places of their checkpoints."""
        if self.checkpoints is None:
            self.pool.free([self.trie.evict() for _ in range(count)])
            return

        for _ in range(count):
            self.checkpoints.evict(self.trie.oldest)
            self.pool.free([self.trie.evict()])

    def _key(self, sequence: Sequence, index: int) -> BlockKey:
        return self.trie.key(sequence.token_ids, index, sequence.cache_salt)
