"""From which checkpoint a sequence goes on, and where it leaves new ones."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from math import lcm

from drift_sdk.scheduling.checkpoints import CheckpointPool
from drift_sdk.scheduling.prefix import PrefixNode, PrefixTrie
from drift_sdk.scheduling.sequence import KeptCheckpoint, Sequence
from drift_sdk.scheduling.step_builder import PlannedStep
from drift_sdk.steps import PrefillChunk

__all__ = ["CheckpointPlanner"]

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
