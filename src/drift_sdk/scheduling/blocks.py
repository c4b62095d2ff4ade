"""Allocation of KV blocks to sequences, with a cache of prefixes, and checkpoints of recurrent states.

Checkpoints: the places that hold them, from which a sequence goes on, and where it leaves new ones. Blocks of
layers with windows: which are kept, and from where a sequence can go on with them.
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


class WindowBlocks:
    """The owner of every block of the layers with a window, which keep what their rows can still see.

    A block is free, private to one running sequence, or cached by a node of the prefix cache, beside the
    node's block of the other layers. A sequence's table has an entry for each of its blocks, of which the
    first `num_recycled_blocks` lie behind the window: it owns and reads them no more. Such a block is never
    overwritten, but loses a reference, and behind committed tokens alone: no row in flight or planned later
    can see it, whatever drafts are rejected. A cached block that no window contains stays until it is needed;
    then the least recently used one is evicted, and its node remains. First are blocks that sequences have
    passed, or one long prompt would evict the windows at the ends of all others. Last are those at the ends
    of prompts and sequences, and where prompts have parted.

    A sequence goes on from the deepest node of its cached prefix in front of which a window of cached blocks
    lies. It computes the tokens behind this node again, as `CheckpointPlanner` says, and gives the window
    blocks of nodes that have none back to these.

    A prompt gets as many blocks as a window needs when it is admitted, and those of a chunk when this is
    planned, because a whole prompt is longer than what is kept of it.

    num_lost_tokens: cached tokens that admitted sequences compute again for want of a window before them.
    """

    def __init__(self, config: SchedulerConfig, trie: PrefixTrie) -> None:
        self.num_lost_tokens: int = 0
        self.pool: BlockPool = BlockPool(config.num_window_blocks)
        self._trie = trie
        self._size, self._window = config.block_size, config.window
        self._max_emitted_tokens = config.max_emitted_tokens
        # Left free by admissions beside other sequences, for their chunks.
        self._chunk_room = min(-(-config.prefill_token_budget // self._size), config.num_window_blocks // 4)
        self._num_admitted = 0
        # Nodes without references, oldest first: passed ones, and those of windows to go on from.
        self._passed: OrderedDict[PrefixNode, None] = OrderedDict()
        self._ends: OrderedDict[PrefixNode, None] = OrderedDict()

    @property
    def num_available(self) -> int:
        """Blocks that can be allocated: free ones, and cached ones that no window contains."""
        return self.pool.num_free + self.num_cached

    @property
    def num_cached(self) -> int:
        """Cached blocks that no window contains."""
        return len(self._passed) + len(self._ends)

    def first_block(self, position: int) -> int:
        """The index of the first block that a row at `position` sees."""
        return max(position - self._window + 1, 0) // self._size

    def num_resumable(self, nodes: list[PrefixNode]) -> int:
        """The number of nodes of a path from the root to the deepest one that ends a whole window; 0: none
        does."""
        number = index = len(nodes)
        while index > self.first_block(number * self._size):
            index -= 1
            if nodes[index].window_block < 0:
                number = index
        return number

    def can_admit(self, sequence: Sequence, num_cached: int, num_blocks: int) -> bool:
        """Return True if there are the blocks of a window for a sequence, which has that many cached nodes
        and whose table gets `num_blocks` entries."""
        nodes = sequence.prefix_nodes[self.first_block(num_cached * self._size) : num_cached]
        room = self.num_available - sum([not node.num_window_references for node in nodes])
        if self._num_admitted:
            room -= self._chunk_room
        return self._num_first(num_cached, num_blocks) - num_cached <= room

    def admit(self, sequence: Sequence, num_blocks: int) -> None:
        """Give a sequence the window before the end of its cached prefix, and blocks behind it."""
        nodes = sequence.prefix_nodes
        first = self.first_block(len(nodes) * self._size)
        for node in nodes[first:]:
            if not node.num_window_references:
                self._forget(node)
            node.num_window_references += 1

        sequence.window_table = [0] * first + [node.window_block for node in nodes[first:]]
        sequence.num_recycled_blocks = first
        sequence.num_matched_blocks = len(sequence.matched_nodes)
        self._num_admitted += 1
        self.num_lost_tokens += (len(sequence.matched_nodes) - len(nodes)) * self._size
        self.extend(sequence, self._num_first(len(nodes), num_blocks))

    def extend(self, sequence: Sequence, num_blocks: int) -> None:
        """Lengthen a sequence's table to `num_blocks` entries, unless it is longer, evicting cached blocks if
        necessary. The caller has checked `num_available`."""
        count = max(num_blocks - len(sequence.window_table), 0)
        while count > self.pool.num_free:
            self.evict(next(iter(self._passed or self._ends)))

        sequence.window_table += self.pool.allocate(count)

    def extend_for_chunk(self, sequence: Sequence, num_tokens: int) -> int:
        """Lengthen the table of a sequence for its next chunk, of at most `num_tokens` tokens, and return the
        number of tokens that there are blocks for."""
        end = sequence.num_planned_tokens + num_tokens
        most = len(sequence.window_table) + self.num_available
        if self.num_blocks_of_chunk(sequence, end) > most:
            end = min(most * self._size, sequence.num_prefill_tokens - 1)
        self.extend(sequence, self.num_blocks_of_chunk(sequence, end))
        return max(end - sequence.num_planned_tokens, 0)

    def num_blocks_of_chunk(self, sequence: Sequence, end: int) -> int:
        """The length of the table for a chunk that ends before position `end`. The last one makes it as long
        as the table of the other layers."""
        return len(sequence.block_table) if end == sequence.num_prefill_tokens else -(-end // self._size)

    def trim(self, sequence: Sequence, num_blocks: int) -> None:
        """Free the blocks behind the first `num_blocks`, which are private."""
        self.pool.free(sequence.window_table[num_blocks:])
        del sequence.window_table[num_blocks:]

    def publish(self, sequence: Sequence, node: PrefixNode, index: int) -> None:
        """Let a node that the sequence has just inserted have its block at `index`."""
        if index >= sequence.num_recycled_blocks:
            node.window_block = sequence.window_table[index]
            node.num_window_references = 1

    def recycle(self, sequence: Sequence) -> None:
        """Drop the blocks that no row at or behind the first token that is not committed can see. Called
        after the sequence's blocks have been published."""
        first = self.first_block(sequence.num_computed_tokens)
        ends = sequence.num_matched_blocks, (sequence.num_prompt_tokens - 1) // self._size
        while sequence.num_recycled_blocks < first:
            index = sequence.num_recycled_blocks
            is_before_end = any(self.first_block(end * self._size) <= index < end for end in ends)
            unused = self._ends if is_before_end else self._passed
            if index < len(sequence.prefix_nodes):
                self._release(sequence.prefix_nodes[index], unused)
            else:
                nodes = sequence.matched_nodes
                self._trie.extend_match(nodes, sequence.token_ids, index + 1, sequence.cache_salt)
                node = nodes[index] if index < len(nodes) else None
                self._give(sequence.window_table[index], node, unused)
            sequence.num_recycled_blocks = index + 1

    def release(self, sequence: Sequence, num_published: int) -> None:
        """Take all blocks from a sequence whose path has all nodes that it can publish, of which it had the
        first `num_published` before."""
        nodes, table = sequence.prefix_nodes, sequence.window_table
        for index in range(len(table) - 1, sequence.num_recycled_blocks - 1, -1):
            if index < num_published:
                self._release(nodes[index], self._ends)
            else:
                self._give(table[index], nodes[index] if index < len(nodes) else None, self._ends)

        self._num_admitted -= 1
        sequence.window_table = []
        sequence.matched_nodes = []
        sequence.num_recycled_blocks = 0

    def evict(self, node: PrefixNode) -> None:
        """Free the window block of a node without references, if it has one."""
        if node.window_block >= 0:
            self._forget(node)
            self.pool.free([node.window_block])
            node.window_block = -1

    def check_integrity(self, running: Iterable[Sequence]) -> None:
        """Raise AssertionError unless every block has exactly one owner, all references are counted, and
        windows are whole. running: all sequences that hold blocks."""
        self.pool.check_integrity()
        nodes = [node for node in self._trie.iter_nodes() if node.window_block >= 0]
        cached = {node.window_block for node in nodes}
        assert len(cached) == len(nodes), "two nodes hold one window block"
        references = dict.fromkeys(nodes, 0)
        private: list[int] = []
        running = list(running)
        assert len(running) == self._num_admitted, f"{self._num_admitted} sequences counted"
        for sequence in running:
            first, table, path = sequence.num_recycled_blocks, sequence.window_table, sequence.prefix_nodes
            least = self.first_block(sequence.num_computed_tokens)
            assert first <= least or sequence.has_wrong_drafts, f"{sequence}: block {least} was recycled"
            for index, node in enumerate(path[first:], first):
                assert node.window_block == table[index], f"{sequence}: window and path differ at {index}"
                references[node] += 1
            private += table[max(first, len(path)) :]
            length, planned = len(table), sequence.num_planned_tokens
            is_right = length == len(sequence.block_table)
            if sequence.is_prefilling:
                is_right = -(-planned // self._size) <= length <= len(sequence.block_table)
            assert is_right, f"{sequence}: {length} window blocks held, {planned} tokens planned"

        for node, count in references.items():
            assert node.num_window_references == count, (
                f"window block {node.window_block}: {node.num_window_references} references, {count} held"
            )
        unreferenced = {node for node, count in references.items() if not count}
        assert unreferenced == {*self._passed, *self._ends}, "cached window blocks and their LRU order differ"
        assert len(unreferenced) == self.num_cached, "a window block is in the LRU order twice"
        assert len({*private, *cached}) == len(private) + len(cached), "a window block has two owners"
        assert not any(map(self.pool.is_free, [*private, *cached])), "an owned window block is free"
        num_owned = self.pool.num_free + len(cached) + len(private)
        assert num_owned == self.pool.num_blocks, f"{num_owned} owned of {self.pool.num_blocks} window blocks"

    def _num_first(self, num_cached: int, num_blocks: int) -> int:
        """Entries of the table of a sequence that is admitted with so many cached nodes: it holds what it
        holds later, or the window before it and a block."""
        num_held = -(-(self._window + self._max_emitted_tokens) // self._size) + 1
        first = self.first_block(num_cached * self._size)
        return min(num_blocks, max(first + num_held, num_cached + 1))

    def _forget(self, node: PrefixNode) -> None:
        """Take a node out of the LRU order."""
        del (self._passed if node in self._passed else self._ends)[node]

    def _release(self, node: PrefixNode, unused: OrderedDict[PrefixNode, None]) -> None:
        """Drop a reference from a node's window block. unused: where the node goes without any."""
        assert node.num_window_references > 0, f"window block {node.window_block} is not referenced"
        node.num_window_references -= 1
        if not node.num_window_references:
            unused[node] = None

    def _give(self, block_id: int, node: PrefixNode | None, unused: OrderedDict[PrefixNode, None]) -> None:
        """Let a node of the same tokens have a private block; free it if there is none, or it has one."""
        if node is None or node.window_block >= 0:
            self.pool.free([block_id])
        else:
            node.window_block = block_id
            unused[node] = None


class BlockManager:
    """The owner of every KV block. A block is free, private to one running sequence, or cached.

    The first `len(prefix_nodes)` blocks of a sequence's table are references on cached nodes, the others are
    private. Only committed KV is published; steps in flight write at position `num_computed_tokens` or above,
    so never into a cached block. A freed block can be allocated in the next plan even with steps in flight:
    steps run in the order of their launch, so the writes of the new owner come after those of the old one.

    checkpoints: None without recurrent states. windows: None if layers with windows have no blocks of their
    own; blocks are those of the other layers then.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.block_size = config.block_size
        self.pool: BlockPool = BlockPool(config.num_blocks)
        self.trie: PrefixTrie = PrefixTrie(config.block_size)
        self.checkpoints: CheckpointPlanner | None = None
        if config.checkpoint_tokens:
            self.checkpoints = CheckpointPlanner(config.num_checkpoints, config.checkpoint_tokens, self.trie)
        self.windows: WindowBlocks | None = WindowBlocks(config, self.trie) if config.window else None

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
        self.trie.extend_match(
            sequence.prefix_nodes,
            sequence.token_ids,
            max_hits,
            sequence.cache_salt,
            sequence.num_expanded_tokens,
        )
        num_hits = len(sequence.prefix_nodes)
        if self.checkpoints is not None:
            num_hits = self.checkpoints.num_resumable(sequence.prefix_nodes)
        elif self.windows is not None:
            num_hits = self.windows.num_resumable(sequence.prefix_nodes)
        sequence.num_computed_tokens = num_hits * self.block_size

    def try_admit(self, sequence: Sequence, max_emitted_tokens: int) -> bool:
        """Assign a waiting sequence its cached prefix and new blocks for the rest of its tokens.

        Returns False, with nothing assigned, unless there are also blocks for its first decode row, of at
        most `max_emitted_tokens` tokens.
        """
        self.match(sequence)
        length = len(sequence.token_ids)
        nodes = sequence.prefix_nodes[: sequence.num_computed_tokens // self.block_size]
        num_needed = self.num_blocks(sequence.num_kv_slots(length + 1 + max_emitted_tokens))
        num_missing = num_needed - len(nodes)
        if num_missing > self.num_available:
            return False

        # The unreferenced nodes of the prefix are counted as available, but cannot be evicted for it.
        if num_missing > self.num_available - self.trie.count_unreferenced(nodes):
            return False

        num_blocks = self.num_blocks(sequence.num_kv_slots(length + 1))
        if self.windows is not None and not self.windows.can_admit(sequence, len(nodes), num_blocks):
            return False

        self.trie.acquire(nodes)
        sequence.block_table = [node.block_id for node in nodes]
        sequence.is_publishing = True
        if self.checkpoints is not None:
            self.checkpoints.admit(sequence)
        elif self.windows is not None:
            sequence.matched_nodes, sequence.prefix_nodes = sequence.prefix_nodes, nodes
            self.windows.admit(sequence, num_blocks)
        self._extend(sequence, num_blocks)
        return True

    def has_room(self, sequence: Sequence, num_blocks: int) -> bool:
        """Return True if a sequence's tables can be lengthened to `num_blocks` entries."""
        if num_blocks - len(sequence.block_table) > self.num_available:
            return False

        windows = self.windows
        return windows is None or num_blocks - len(sequence.window_table) <= windows.num_available

    def extend(self, sequence: Sequence, num_blocks: int) -> None:
        """Lengthen a sequence's tables to `num_blocks` entries, evicting cached blocks if necessary.

        The caller has checked `has_room`.
        """
        if self.windows is not None:
            self.windows.extend(sequence, num_blocks)
        self._extend(sequence, num_blocks)

    def _extend(self, sequence: Sequence, num_blocks: int) -> None:
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
        if self.windows is not None:
            self.windows.trim(sequence, num_blocks)

    def publish(self, sequence: Sequence) -> None:
        """Insert the sequence's blocks that have become full and committed into the prefix cache, and drop
        those behind its window."""
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
            if self.windows is not None:
                self.windows.publish(sequence, nodes[-1], len(nodes) - 1)

        if self.windows is not None:
            self.windows.recycle(sequence)

    def release(self, sequence: Sequence) -> None:
        """Take all blocks from a sequence. Full committed blocks stay cached, the others are freed."""
        nodes = sequence.prefix_nodes
        table = sequence.block_table
        num_full = sequence.num_computed_tokens // self.block_size
        num_published = len(nodes)
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
        elif self.windows is not None:
            self.windows.release(sequence, num_published)
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
        running = list(running)
        if self.windows is not None:
            self.windows.check_integrity(running)
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
        """Free the blocks of `count` nodes, and what else they hold."""
        if self.checkpoints is None and self.windows is None:
            self.pool.free([self.trie.evict() for _ in range(count)])
            return

        for _ in range(count):
            if self.checkpoints is not None:
                self.checkpoints.evict(self.trie.oldest)
            if self.windows is not None:
                self.windows.evict(self.trie.oldest)
            self.pool.free([self.trie.evict()])

    def _key(self, sequence: Sequence, index: int) -> BlockKey:
        return self.trie.key(sequence.token_ids, index, sequence.cache_salt, sequence.num_expanded_tokens)
