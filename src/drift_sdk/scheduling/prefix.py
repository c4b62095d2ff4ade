"""The prefix cache: committed KV blocks in a trie over token ids, apart for each salt."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Seq

BlockKey = tuple[int | str, ...]
"""The token ids of a block; in a prompt's first block the salt stands before them, if there is one. Behind
them stands how many of them attended to expanded keys, if they are not all, in a model with both forms."""


class PrefixNode:
    """A full block of committed KV.

    key:             names the block among the children of its parent. The tokens before it, and the salt, are
                     in the keys on the path from the root.
    block_id:        the KV block; -1 at the root and once the node has been evicted.
    num_references:  running sequences whose tables contain the block.
    checkpoint:      place of the recurrent states after the block's last token; -1: they are not kept.
    window_block:    block of the layers with windows for the same tokens; -1: it is not kept, or there is one
                     block for all layers.
    num_window_references: running sequences whose windows contain it.
    """

    __slots__ = (
        "block_id",
        "checkpoint",
        "children",
        "key",
        "num_references",
        "num_window_references",
        "parent",
        "window_block",
    )

    def __init__(self, parent: PrefixNode | None, key: BlockKey, block_id: int) -> None:
        self.parent: PrefixNode | None = parent
        self.key: BlockKey = key
        self.block_id: int = block_id
        self.children: dict[BlockKey, PrefixNode] = {}
        self.num_references: int = 0
        self.checkpoint: int = -1
        self.window_block: int = -1
        self.num_window_references: int = 0


class PrefixTrie:
    """Cached blocks by content. A child is looked up by its token ids themselves, so keys cannot collide.
    Sequences share blocks only if their salts are equal: no path of one salt is a path of another. They share
    them only if their rows had the same form of attention, too: what they hold depends on it.

    A sequence that references a node references all its ancestors too, so the children of an unreferenced
    node are unreferenced. A path is released from its end to the root, and a node enters the LRU order when
    its last reference is dropped, so a child is always older in that order than its parent: the oldest node
    is a leaf.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.num_nodes: int = 0
        self.root: PrefixNode = PrefixNode(None, (), -1)
        self._unreferenced: OrderedDict[PrefixNode, None] = OrderedDict()  # oldest first

    @property
    def num_evictable(self) -> int:
        """Nodes without references."""
        return len(self._unreferenced)

    @property
    def oldest(self) -> PrefixNode:
        """The node that is evicted next. There must be one."""
        return next(iter(self._unreferenced))

    def key(
        self, token_ids: Seq[int], index: int, salt: str | None, num_expanded: int | None = None
    ) -> BlockKey:
        """The key of block `index` of a sequence. A salt, which is no token id, is a part of the first.

        num_expanded: of the sequence, see `num_expanded_tokens`.
        """
        start = index * self.block_size
        key: BlockKey = tuple(token_ids[start : start + self.block_size])
        if num_expanded is not None and num_expanded < start + self.block_size:
            key = (*key, f"{max(num_expanded - start, 0)} expanded")
        return key if salt is None or index else (salt, *key)

    def extend_match(
        self,
        nodes: list[PrefixNode],
        token_ids: Seq[int],
        max_blocks: int,
        salt: str | None,
        num_expanded: int | None = None,
    ) -> None:
        """Update `nodes`, the path of an earlier match of `token_ids` from the root, in place.

        Evicted nodes are removed, and nodes are appended as long as they match, up to `max_blocks` in all. No
        references are taken. The time is proportional to the number of nodes that change.
        """
        # An ancestor outlives its descendants, so only nodes at the end of the path can have been evicted.
        while nodes and nodes[-1].block_id < 0:
            nodes.pop()

        node = nodes[-1] if nodes else self.root
        for index in range(len(nodes), max_blocks):
            child = node.children.get(self.key(token_ids, index, salt, num_expanded))
            if child is None:
                break

            nodes.append(child)
            node = child

    def count_unreferenced(self, nodes: list[PrefixNode]) -> int:
        """The number of nodes of a path without references, which `acquire` would make unevictable."""
        count = 0
        for node in reversed(nodes):
            if node.num_references:
                break

            count += 1

        return count

    def acquire(self, nodes: list[PrefixNode]) -> None:
        """Add one reference to every node of a path from the root."""
        for node in nodes:
            if node.num_references == 0:
                del self._unreferenced[node]
            node.num_references += 1

    def release(self, nodes: list[PrefixNode]) -> None:
        """Drop one reference from every node of a path from the root. The blocks stay cached until
        evicted."""
        for node in reversed(nodes):
            assert node.num_references > 0, f"block {node.block_id} is released but not referenced"
            node.num_references -= 1
            if node.num_references == 0:
                self._unreferenced[node] = None

    def insert(self, parent: PrefixNode, key: BlockKey, block_id: int) -> PrefixNode:
        """Add a block below a node that the caller references. The new node has one reference, the
        caller's."""
        assert key not in parent.children, f"the tokens of block {block_id} are cached already"
        assert parent is self.root or parent.num_references > 0, "the parent is not referenced"
        node = PrefixNode(parent, key, block_id)
        node.num_references = 1
        parent.children[key] = node
        self.num_nodes += 1
        return node

    def evict(self) -> int:
        """Remove the least recently used node without references and return its block."""
        node, _ = self._unreferenced.popitem(last=False)
        assert not node.children and node.parent is not None, f"block {node.block_id} is not a leaf"
        del node.parent.children[node.key]
        self.num_nodes -= 1
        block_id, node.block_id = node.block_id, -1
        return block_id

    def iter_nodes(self) -> list[PrefixNode]:
        """All nodes, parents before children, without the root."""
        nodes = list(self.root.children.values())
        for node in nodes:
            nodes.extend(node.children.values())

        return nodes

    def check_integrity(self) -> None:
        """Raise AssertionError if links, counts or the LRU order are broken."""
        nodes = self.iter_nodes()
        assert len(nodes) == self.num_nodes, f"{len(nodes)} nodes linked, {self.num_nodes} counted"
        assert len({node.block_id for node in nodes}) == len(nodes), "two nodes hold one block"
        age = {node: index for index, node in enumerate(self._unreferenced)}
        for node in nodes:
            parent = node.parent
            assert parent is not None and parent.children.get(node.key) is node, "a link is broken"
            assert node.block_id >= 0, "an evicted node is still linked"
            is_salted = parent is self.root and isinstance(node.key[0], str)
            num_tokens = len(node.key) - is_salted - isinstance(node.key[-1], str)
            assert num_tokens == self.block_size, f"key of {num_tokens} tokens"
            assert (node.num_references == 0) == (node in age), f"block {node.block_id}: LRU membership"
            if parent is not self.root:
                assert parent.num_references >= node.num_references, "referenced below an unreferenced node"
                if parent in age:
                    assert age[node] < age[parent], f"block {node.block_id} is younger than its parent"
        assert len(age) == sum(node.num_references == 0 for node in nodes), "an unlinked node is evictable"
