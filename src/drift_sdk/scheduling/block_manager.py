from __future__ import annotations

from collections.abc import Iterable

from drift_sdk.scheduling.blocks import BlockPool
from drift_sdk.scheduling.prefix import PrefixTrie
from drift_sdk.scheduling.sequence import Sequence

__all__ = ["BlockManager"]


class BlockManager:
    """Which sequence holds which blocks. A block is free, private to one running sequence, or cached.

    A sequence holds its table's first `len(prefix_nodes)` blocks as references on cached nodes and the rest
    privately. Only committed KV is published; steps in flight write at `num_computed_tokens` or above, so
    never into a cached block. Blocks are free for later plans as soon as they are given up: steps run in
    the order of their launch, so a new holder's writes come after those still in flight.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self.trie = PrefixTrie(block_size)

    @property
    def num_available(self) -> int:
        return self.pool.num_free + self.trie.num_evictable

    def num_blocks(self, num_slots: int) -> int:
        return -(-num_slots // self.block_size)

    def try_admit(self, sequence: Sequence, max_emitted_tokens: int) -> bool:
        """Give a waiting sequence its cached prefix and blocks for the rest of its tokens, or nothing
        unless its first decode row would find room too."""
        length = len(sequence.token_ids)
        nodes = sequence.prefix_nodes
        # At least the last token is computed: its output is the next token.
        max_hits = (length - 1) // self.block_size if sequence.can_share_prefix else 0
        self.trie.extend_match(nodes, sequence.token_ids, max_hits)

        first_row = self.num_blocks(sequence.num_kv_slots(length + 1 + max_emitted_tokens))
        num_missing = first_row - len(nodes)
        if num_missing > self.num_available:
            return False

        if num_missing > self.num_available - self.trie.count_unreferenced(nodes):
            return False

        self.trie.acquire(nodes)
        sequence.block_table = [node.block_id for node in nodes]
        sequence.is_publishing = True
        sequence.num_computed_tokens = len(nodes) * self.block_size
        self.extend(sequence, self.num_blocks(sequence.num_kv_slots(length + 1)))
        return True

    def extend(self, sequence: Sequence, num_blocks: int) -> None:
        """Lengthen the table to `num_blocks` entries; the caller has checked `num_available`."""
        count = num_blocks - len(sequence.block_table)
        if count > self.pool.num_free:
            self.pool.free([self.trie.evict() for _ in range(count - self.pool.num_free)])

        sequence.block_table += self.pool.allocate(count)

    def trim(self, sequence: Sequence) -> None:
        """After a row that emitted less than it might have: give back what steps in flight cannot reach."""
        num_slots = sequence.num_kv_slots(len(sequence.token_ids) + sequence.max_in_flight_tokens)
        num_blocks = self.num_blocks(num_slots)
        assert num_blocks >= len(sequence.prefix_nodes), f"{sequence}: a cached block is given back"
        self.pool.free(sequence.block_table[num_blocks:])
        del sequence.block_table[num_blocks:]

    def publish(self, sequence: Sequence) -> None:
        """Offer blocks that have become full to others."""
        nodes = sequence.prefix_nodes
        while sequence.is_publishing and (len(nodes) + 1) * self.block_size <= sequence.num_computed_tokens:
            parent = nodes[-1] if nodes else self.trie.root
            key = self._key(sequence, len(nodes))
            # A reference on an equal block of somebody else would keep two blocks from eviction for one
            # table entry, and the largest sequence could then outgrow the pool. The rest is offered when
            # the sequence lets go of its blocks.
            if key in parent.children:
                sequence.is_publishing = False
                break

            nodes.append(self.trie.insert(parent, key, sequence.block_table[len(nodes)]))

    def release(self, sequence: Sequence) -> None:
        """Take all blocks from a sequence; full committed ones stay cached."""
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

        self.trie.release(nodes)
        self.pool.free(private)
        sequence.prefix_nodes = []
        sequence.block_table = []

    def forget_cached(self) -> None:
        """Free every block that is cached; no sequence holds any."""
        self.pool.free([self.trie.evict() for _ in range(self.trie.num_evictable)])

    def check_integrity(self, running: Iterable[Sequence]) -> None:
        """Raise AssertionError unless every block has exactly one owner and references are counted right."""
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
        assert num_owned == self.pool.num_blocks, f"{num_owned} owners of {self.pool.num_blocks} blocks"

    def _key(self, sequence: Sequence, index: int) -> tuple[int, ...]:
        start = index * self.block_size
        return tuple(sequence.token_ids[start : start + self.block_size])
