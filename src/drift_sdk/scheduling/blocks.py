"""Allocation of KV blocks to sequences, with a cache of prefixes, and checkpoints of recurrent states.

Checkpoints: the places that hold them, from which a sequence goes on, and where it leaves new ones.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable
from math import lcm

from drift_sdk.scheduling.planning import PlannedStep, SchedulerConfig
from drift_sdk.scheduling.prefix import BlockKey, PrefixNode, PrefixTrie
from drift_sdk.scheduling.sequence import KeptCheckpoint, Sequence
from drift_sdk.steps import PrefillChunk

Holder = PrefixNode | KeptCheckpoint


class CheckpointPool:
    """The owner of every place of a checkpoint. A place is free, planned or held.

    A planned place belongs to a chunk in flight, which writes it. A held one belongs to a node of the prefix
    cache, or to a running sequence that has not published the node's block. A freed place can be allocated in
    the next plan, as blocks can: steps run in the order of their launch, so what was planned before reads the
    old content.
    """

    def __init__(self, num_places: int) -> None:
        self.num_places = num_places
        self._free = list(range(num_places - 1, -1, -1))
        self._holders: OrderedDict[Holder, None] = OrderedDict()  # least recently used first

    @property
    def num_held(self) -> int:
        """Places that are held."""
        return len(self._holders)

    def allocate(self) -> int | None:
        """Take a free place, else the one of the least recently used holder. None: all places are planned."""
        if self._free:
            return self._free.pop()

        return self.take(next(iter(self._holders))) if self._holders else None

    def free(self, place: int) -> None:
        """Return a planned place, or one that was taken from its holder."""
        self._free.append(place)

    def attach(self, holder: Holder, place: int) -> None:
        """Let a holder have a planned place, which counts as a use."""
        assert holder.checkpoint < 0, f"the place {place} for a holder of {holder.checkpoint}"
        holder.checkpoint = place
        self._holders[holder] = None

    def use(self, node: PrefixNode) -> None:
        """Count a use of a node's checkpoint."""
        self._holders.move_to_end(node)

    def take(self, holder: Holder) -> int:
        """Take the place of a holder, which has it no more."""
        del self._holders[holder]
        place, holder.checkpoint = holder.checkpoint, -1
        return place

    def check_integrity(self, holders: Iterable[Holder], planned: Iterable[int]) -> None:
        """Raise AssertionError unless every place has exactly one owner.

        holders: all nodes of the prefix cache, and what running sequences keep. planned: the places of chunks
        in flight.
        """
        having = [holder for holder in holders if holder.checkpoint >= 0]
        assert {*having} == {*self._holders}, "holders of checkpoints and their LRU order differ"
        owned = sorted([*self._free, *planned, *[holder.checkpoint for holder in having]])
        assert owned == [*range(self.num_places)], f"places free, planned or held: {owned}"


INTERVAL = 4096
"""Tokens from one checkpoint of a long prompt to the next, rounded up to the positions that are possible."""


class CheckpointPlanner:
    """Plans checkpoints of recurrent states, and gives them to the nodes of the prefix cache.

    A sequence goes on from the deepest node of its cached prefix that holds a checkpoint, or from position 0.
    The keys and values of deeper nodes are of no use to it. On its way it leaves checkpoints, all at
    multiples of `checkpoint_tokens` and before its last token: at the deepest such position, at the branch,
    where it leaves the cached prefix, every `INTERVAL` tokens, and at the borders that its request names.

    A chunk that computes past such a position writes a place that is allocated when the chunk is planned. At
    its commit the place is given to the node at the position, whichever sequence has published it: the states
    are a function of the tokens. A sequence that computes cached tokens again publishes its blocks only when
    it releases them. Until then it keeps the places itself, and other chunks may take them as they take
    places of nodes.

    num_hits:         admissions that went on from a checkpoint.
    num_lost_tokens:  cached tokens that admitted sequences compute again for want of a checkpoint.
    """

    def __init__(self, num_checkpoints: int, checkpoint_tokens: int, trie: PrefixTrie) -> None:
        self.num_hits: int = 0
        self.num_lost_tokens: int = 0
        self.pool: CheckpointPool = CheckpointPool(num_checkpoints)
        self._trie = trie
        self._tokens = checkpoint_tokens
        self._num_blocks = checkpoint_tokens // trie.block_size
        self._interval = lcm(INTERVAL, checkpoint_tokens)
        self._planned: dict[int, tuple[Sequence, int]] = {}  # sequence and position of places in flight

    def num_resumable(self, nodes: list[PrefixNode]) -> int:
        """The number of nodes of a path from the root to the deepest one with a checkpoint; 0: none has."""
        for number in range(len(nodes) // self._num_blocks * self._num_blocks, 0, -self._num_blocks):
            if nodes[number - 1].checkpoint >= 0:
                return number

        return 0

    def admit(self, sequence: Sequence) -> None:
        """Let a sequence that is being admitted go on from the deepest checkpoint of its match."""
        matched = sequence.prefix_nodes
        num_cached = sequence.num_computed_tokens
        sequence.matched_nodes = matched
        sequence.prefix_nodes = matched[: num_cached // self._trie.block_size]
        if sequence.prefix_nodes:
            self.pool.use(sequence.prefix_nodes[-1])
            self.num_hits += 1
        branch = len(matched) * self._trie.block_size
        self.num_lost_tokens += branch - num_cached
        last = len(sequence.token_ids) - 1
        positions = [last, branch, *range(self._interval, last, self._interval), *sequence.borders]
        wanted = {position // self._tokens * self._tokens for position in positions}
        sequence.wanted_checkpoints = sorted(each for each in wanted if num_cached < each <= last)

    def plan(self, sequence: Sequence, num_tokens: int) -> tuple[tuple[int, int], ...]:
        """The (position, place) pairs of the next chunk of a sequence, which has `num_tokens` tokens.

        Left out is what the cache has, what another chunk in flight writes, and what no place can be had for.
        """
        wanted = sequence.wanted_checkpoints
        number = bisect_right(wanted, sequence.num_planned_tokens + num_tokens)
        pairs: list[tuple[int, int]] = []
        for position in wanted[:number]:
            if self._is_known(sequence, position):
                continue

            place = self.pool.allocate()
            if place is None:
                break

            self._planned[place] = sequence, position
            pairs.append((position, place))

        del wanted[:number]
        return tuple(pairs)

    def commit(self, sequence: Sequence, chunk: PrefillChunk) -> None:
        """Give the places of a committed chunk to nodes, after the sequence's blocks have been published.

        Places are freed if the sequence has ended or was preempted since the chunk was planned, or if the
        node at their position has a checkpoint. If there is no node, the sequence keeps them.
        """
        for position, place in chunk.checkpoints:
            del self._planned[place]
            holder = self._node(sequence, position) if sequence.is_running else None
            if holder is None and sequence.is_running:
                kept = KeptCheckpoint(position)
                sequence.kept_checkpoints.append(kept)
                self.pool.attach(kept, place)
            elif holder is None or holder.checkpoint >= 0:
                self.pool.free(place)
            else:
                self.pool.attach(holder, place)

    def release(self, sequence: Sequence) -> None:
        """Give the places that a sequence keeps to its nodes, which are all that it can publish, and forget
        the positions that it wants."""
        nodes = sequence.prefix_nodes
        for kept in sequence.kept_checkpoints:
            if kept.checkpoint < 0:
                continue

            place = self.pool.take(kept)
            number = kept.position // self._trie.block_size
            if number > len(nodes) or nodes[number - 1].checkpoint >= 0:
                self.pool.free(place)
            else:
                self.pool.attach(nodes[number - 1], place)

        sequence.matched_nodes = []
        sequence.wanted_checkpoints = []
        sequence.kept_checkpoints = []

    def evict(self, node: PrefixNode) -> None:
        """Free the place of a node that is being evicted, if it has one."""
        if node.checkpoint >= 0:
            self.pool.free(self.pool.take(node))

    def check_integrity(self, steps: Iterable[PlannedStep], sequences: Iterable[Sequence]) -> None:
        """Raise AssertionError unless places, their nodes and what sequences want are consistent.

        steps: those in flight. sequences: all that run or wait.
        """
        planned = {
            place: (sequence, position)
            for step in steps
            for sequence, chunk in zip(step.prefill, step.plan.prefill, strict=True)
            for position, place in chunk.checkpoints
        }
        assert planned == self._planned, "planned places and places of chunks in flight differ"
        nodes, sequences = self._trie.iter_nodes(), list(sequences)
        kept = [each for sequence in sequences for each in sequence.kept_checkpoints]
        self.pool.check_integrity([*nodes, *kept], planned)
        depths = {self._trie.root: 0}
        for node in nodes:
            assert node.parent is not None
            depths[node] = depths[node.parent] + 1
            at_border = depths[node] % self._num_blocks == 0
            assert node.checkpoint < 0 or at_border, f"block {node.block_id} has a checkpoint, at no border"
        for sequence in sequences:
            wanted, start = sequence.wanted_checkpoints, sequence.num_planned_tokens
            kept_at = [each.position for each in sequence.kept_checkpoints]
            assert sequence.is_running or not (wanted or kept_at), f"{sequence} waits and has checkpoints"
            assert wanted == sorted({*wanted}), f"{sequence} wants checkpoints at {wanted}"
            assert all(position > start for position in wanted), f"{sequence}: {wanted}, {start} planned"
            assert all(position <= sequence.num_computed_tokens for position in kept_at), (
                f"{sequence}: {kept_at}"
            )
            assert not any(position % self._tokens for position in [*wanted, *kept_at]), (
                f"{sequence}: no border"
            )

    def _node(self, sequence: Sequence, position: int) -> PrefixNode | None:
        """The cached node of the block that ends at a position of a running sequence."""
        number, nodes = position // self._trie.block_size, sequence.matched_nodes
        self._trie.extend_match(nodes, sequence.token_ids, number, sequence.cache_salt)
        return nodes[number - 1] if len(nodes) >= number else None

    def _is_known(self, sequence: Sequence, position: int) -> bool:
        """Return True if there is a checkpoint of the same tokens already, or a chunk in flight writes it."""
        node = self._node(sequence, position)
        if node is not None and node.checkpoint >= 0:
            return True

        # Sequences with one beginning often come together. Each would take a place from a node.
        return any(
            position == other_position
            and other.is_running
            and other.cache_salt == sequence.cache_salt
            and other.token_ids[:position] == sequence.token_ids[:position]
            for other, other_position in self._planned.values()
        )


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
        max_hits = sequence.num_sharable_tokens // self.block_size
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
