"""Kernels of trees: rows, acceptance, rewinding and attention, against references and chains."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from random_trees import accepted_path, random_tokens, random_tree
from references.trees import (
    kv_rewind_reference,
    tree_accept_reference,
    tree_attention_reference,
    tree_rows_reference,
)
from tolerances import assert_near

from drift_sdk._kernels.attention.decode import AttentionConfig, AttentionScratch, paged_attention
from drift_sdk._kernels.attention.layer_attention import LayerAttention, LayerKV
from drift_sdk._kernels.attention.plan import AttentionPlan, PlannedRows, plan_attention
from drift_sdk._kernels.attention.softmax import Partitions
from drift_sdk._kernels.commit import CommitTensors
from drift_sdk._kernels.sampling.logits import apply_logits_rules
from drift_sdk._kernels.sampling.rows import RowsToSample, SampleBuffers
from drift_sdk._kernels.slots import SlotColumns, SlotFlag, SlotState
from drift_sdk._kernels.trees.tree_attention import TreePaths, tree_attention
from drift_sdk._kernels.trees.tree_rows import (
    PATH_ENTRIES,
    kv_rewind,
    tree_accept,
    tree_record_words,
    tree_rows,
)
from drift_sdk.quantised.formats import E4M3
from drift_sdk.trees import TokenTree

pytestmark = pytest.mark.kernel

IS_GPU = torch.cuda.is_available()
VOCAB_SIZE = 40
POISON = torch.iinfo(torch.int32).max
NUM_PROGRAMS = 528 if IS_GPU else 72
SMALL = Partitions(narrow=32, narrow_end=64, num_doublings=2, tile=16)


def signed(word: int) -> int:
    return word - 2**64 if word >> 63 else word


class TreeRound:
    """Trees (None: padding) of sequences of given lengths, with random drafts. Results are poisoned, and the
    cache holds numbers that tell its places apart."""

    def __init__(
        self,
        trees: list[TokenTree | None],
        lengths: list[int],
        *,
        nodes_per_tree: int,
        device: str,
        block_size: int = 16,
        num_kv_heads: int = 2,
        group: int = 2,
        head_dim: int = 16,
        num_layers: int = 1,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> None:
        self.rng = random.Random(seed)
        self.trees, self.lengths, self.nodes_per_tree = trees, lengths, nodes_per_tree
        self.block_size = block_size
        num_trees, num_rows = len(trees), len(trees) * nodes_per_tree
        generator = torch.Generator().manual_seed(seed)
        most = max(lengths) + PATH_ENTRIES
        max_blocks = -(-most // block_size)
        num_blocks = (num_trees + 1) * max_blocks
        table = torch.randperm(num_blocks, generator=generator)[: num_trees * max_blocks]
        self.block_table = torch.cat((torch.zeros(1, max_blocks), table.view(num_trees, max_blocks))).int()
        self.first_tree_slot = num_blocks * block_size
        num_all = num_blocks + -(-num_rows // block_size)
        shape = (num_layers, num_all, num_kv_heads, block_size, head_dim)
        self.keys, self.values = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
        self.query = torch.randn(num_rows, num_kv_heads * group, head_dim, generator=generator).to(dtype)
        self.row_slot = torch.full((num_rows,), -1, dtype=torch.int32)
        self.row_parent = torch.full((num_rows,), POISON, dtype=torch.int32)
        self.row_token = torch.full((num_rows,), POISON, dtype=torch.int32)
        self.length = torch.full((num_trees + 1,), POISON, dtype=torch.int32)
        for index, (tree, length) in enumerate(zip(trees, lengths, strict=True)):
            if tree is not None:
                rows = slice(index * nodes_per_tree, index * nodes_per_tree + tree.num_nodes)
                self.row_slot[rows] = index + 1
                self.row_parent[rows] = torch.tensor(tree.parents, dtype=torch.int32)
                tokens = [3, *random_tokens(self.rng, tree, VOCAB_SIZE)]
                self.row_token[rows] = torch.tensor(tokens, dtype=torch.int32)
                self.length[index + 1] = length
        self.position = torch.full((num_rows,), POISON, dtype=torch.int32)
        self.bits = torch.full((num_rows,), POISON, dtype=torch.int64)
        self.kv_slot = torch.full((num_rows,), POISON, dtype=torch.int64)
        self.row_path = torch.full((num_rows, PATH_ENTRIES), POISON, dtype=torch.int32)
        for name, value in vars(self).items():
            if isinstance(value, torch.Tensor):
                setattr(self, name, value.to(device))

    def place(self, function: Any = tree_rows) -> None:
        function(
            self.row_slot,
            self.row_parent,
            self.length,
            self.block_table,
            (self.position, self.bits, self.kv_slot, self.row_path),
            nodes_per_tree=self.nodes_per_tree,
            block_size=self.block_size,
            first_tree_slot=self.first_tree_slot,
        )

    def kv_slot_of(self, index: int, position: int) -> int:
        block = int(self.block_table[index + 1, position // self.block_size])
        return block * self.block_size + position % self.block_size

    def rewind(self, path: torch.Tensor, function: Any = kv_rewind) -> None:
        function(
            self.keys,
            self.values,
            self.block_table,
            self.row_slot,
            self.position,
            self.kv_slot,
            path,
            nodes_per_tree=self.nodes_per_tree,
        )

    @property
    def paths(self) -> TreePaths:
        return TreePaths(self.position, self.kv_slot, self.row_path)

    @property
    def rows(self) -> PlannedRows:
        return PlannedRows(self.row_slot, self.position, self.nodes_per_tree)

    def layer(self, **options: Any) -> LayerAttention:
        return LayerAttention(
            query=self.query,
            out=torch.full_like(self.query, torch.nan),
            kv=LayerKV(self.keys[0], self.values[0]),
            block_table=self.block_table,
            **options,
        )

    def attend(
        self, partitions: Partitions, *, window: int = 0, num_programs: int = NUM_PROGRAMS, **more: Any
    ) -> torch.Tensor:
        """num_programs: where it is less than there are nodes and heads, programs own several nodes."""
        plan = AttentionPlan(
            len(self.trees),
            max(self.lengths) + 300,
            partitions,
            self.query.device,
            window=window,
            num_rows=self.nodes_per_tree,
        )
        layer = self.layer(window=window, **more)
        scratch = AttentionScratch.allocate(
            plan,
            num_kv_heads=layer.kv.num_heads,
            num_rows=self.nodes_per_tree,
            group=layer.group,
            head_dim=layer.head_dim,
        )
        plan_attention(self.rows, plan)
        for tensor in (scratch.sums, scratch.maxima, scratch.weights):
            tensor.fill_(torch.nan)  # the kernels between the plan and attention
        tree_attention(layer, self.rows, self.paths, scratch, AttentionConfig(num_programs=num_programs))
        return layer.out


def some_trees(seed: int, number: int, most_drafts: int) -> list[TokenTree | None]:
    rng = random.Random(seed)
    trees: list[TokenTree | None] = [random_tree(rng, most_drafts) for _ in range(number)]
    trees[number // 2] = None
    return trees


@pytest.mark.parametrize("nodes_per_tree", [1, 5, 32, 64])
def test_rows_equal_the_tree_and_the_reference(nodes_per_tree: int, device: str) -> None:
    trees = some_trees(nodes_per_tree, 4, nodes_per_tree - 1)
    found = TreeRound(trees, [1, 15, 16, 50], nodes_per_tree=nodes_per_tree, device=device)
    twin = copy.deepcopy(found)
    found.place()
    twin.place(tree_rows_reference)
    for name in ("position", "bits", "kv_slot", "row_path"):
        assert torch.equal(getattr(found, name), getattr(twin, name)), name
    for index, tree in enumerate(trees):
        for node in range(tree.num_nodes if tree is not None else 0):
            assert tree is not None
            row = index * nodes_per_tree + node
            position = found.lengths[index] - 1 + tree.depths[node]
            path = [*tree.path(node), *[-1] * (PATH_ENTRIES - tree.depths[node] - 1)]
            is_first = node in tree.first_path
            kv_slot = found.kv_slot_of(index, position) if is_first else found.first_tree_slot + row
            assert found.position[row] == position
            assert found.bits[row] == signed(tree.ancestor_bits[node])
            assert found.row_path[row].tolist() == path
            assert found.kv_slot[row] == kv_slot


class Acceptance:
    """A round in which a share of the tokens chosen are drafts, for `tree_accept`."""

    def __init__(self, found: TreeRound, share: float) -> None:
        rng, num_slots = found.rng, len(found.lengths) + 1
        device, num_rows = found.query.device, len(found.row_slot)
        self.round = found
        self.buffers = SampleBuffers.allocate(num_rows, VOCAB_SIZE, "cpu")
        for name in ("chosen_logprob", "top_logprob"):
            getattr(self.buffers, name).normal_()
        self.buffers.top_token.random_(-1, VOCAB_SIZE)
        chosen = [rng.randrange(VOCAB_SIZE) for _ in range(num_rows)]
        for index, tree in enumerate(found.trees):
            for node in range(tree.num_nodes if tree is not None else 0):
                assert tree is not None
                children = list(tree.children(node))
                if children and rng.random() < share:
                    first_row = index * found.nodes_per_tree
                    chosen[first_row + node] = int(found.row_token[first_row + rng.choice(children)])
        self.buffers.chosen.copy_(torch.tensor(chosen))
        self.columns = SlotColumns.allocate(num_slots, VOCAB_SIZE, "cpu")
        self.columns.num_logprobs.copy_(torch.tensor([rng.choice([-1, 2]) for _ in range(num_slots)]))
        flags = [rng.choice([0, SlotFlag.PENALTIES.value]) for _ in range(num_slots)]
        self.columns.flags.copy_(torch.tensor(flags))
        stops = [rng.choice([0, 0, 1 << rng.randrange(31)]) for _ in range(num_slots)]
        self.columns.stop_bits[:, 0] = torch.tensor(stops)
        rooms = [rng.choice([1, 2, 1000]) for _ in range(num_slots)]
        max_length = found.length.cpu() + torch.tensor(rooms, dtype=torch.int32)
        fill = torch.full((num_slots,), POISON, dtype=torch.int32)
        self.state = SlotState(found.length.cpu().clone(), fill.clone(), fill.clone(), max_length)
        words = tree_record_words(len(found.trees))
        self.ring = (
            torch.full((2, words), POISON, dtype=torch.int32),
            torch.tensor([1], dtype=torch.int32),
            torch.tensor([1], dtype=torch.int32),
        )
        if IS_GPU:
            self.ring = tuple(each.pin_memory() if each.dim() == 2 else each.to(device) for each in self.ring)
        self.path = torch.full((len(found.trees), PATH_ENTRIES), POISON, dtype=torch.int32).to(device)
        self.emitted = torch.full((len(found.trees),), POISON, dtype=torch.int32).to(device)
        self.columns, self.buffers = (
            type(tables)(**{name: getattr(tables, name).to(device) for name in tables.__slots__})
            for tables in (self.columns, self.buffers)
        )
        self.state = SlotState(
            *(getattr(self.state, name).to(device) for name in SlotState.__struct_fields__)
        )

    def run(self, function: Any = tree_accept) -> dict[str, Any]:
        """Everything that is written."""
        rows = self.round
        output_ring, current_entry, next_entry = self.ring
        tensors = CommitTensors(
            row_slot=rows.row_slot,
            row_token=rows.row_token,
            buffers=self.buffers,
            state=self.state,
            slots=self.columns,
            emitted=self.emitted,
            output_ring=output_ring,
            current_entry=current_entry,
            next_entry=next_entry,
            rows_per_slot=rows.nodes_per_tree,
            is_ngram=torch.arange(len(self.emitted), dtype=torch.int32, device=self.emitted.device) % 2,
        )
        function(tensors, rows.row_parent, self.path)
        if IS_GPU:
            torch.cuda.synchronize()
        state = {name: getattr(self.state, name).tolist() for name in SlotState.__struct_fields__}
        return state | {
            "counts": self.columns.counts.tolist(),
            "path": self.path.tolist(),
            "emitted": self.emitted.tolist(),
            "ring": [tensor.tolist() for tensor in self.ring],
        }


@pytest.mark.parametrize("share", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("nodes_per_tree", [2, 17, 64])
def test_acceptance_equals_the_reference(nodes_per_tree: int, share: float, device: str) -> None:
    trees = some_trees(nodes_per_tree, 4, nodes_per_tree - 1)
    found = Acceptance(TreeRound(trees, [1, 15, 16, 50], nodes_per_tree=nodes_per_tree, device=device), share)
    twin = copy.deepcopy(found)
    assert found.run() == twin.run(tree_accept_reference)


NUMBERS = [2500] if IS_GPU else [100, pytest.param(2500, marks=pytest.mark.slow)]


@pytest.mark.parametrize("number", NUMBERS)
def test_the_longest_right_path_is_accepted_and_its_rows_are_packed(number: int, device: str) -> None:
    """Found among all paths: of the kernels on a GPU, else of the references, which other tests compare."""
    place, accept, rewind = (
        (tree_rows, tree_accept, kv_rewind)
        if IS_GPU
        else (tree_rows_reference, tree_accept_reference, kv_rewind_reference)
    )
    rng = random.Random(1)
    lengths = [0] * (PATH_ENTRIES + 1)
    for seed, nodes_per_tree in enumerate((4, 8, 12, 64)):
        trees: list[TokenTree | None] = [random_tree(rng, nodes_per_tree - 1) for _ in range(number)]
        found = TreeRound(
            trees,
            [rng.randint(1, 20) for _ in trees],
            nodes_per_tree=nodes_per_tree,
            device=device,
            num_kv_heads=1,
            group=1,
            head_dim=1,
            seed=seed,
        )
        found.place(place)
        accepted = Acceptance(found, share=0.8)
        accepted.state.max_length.fill_(POISON)
        accepted.columns.stop_bits.zero_()
        accepted.columns.num_logprobs.fill_(-1)
        accepted.run(accept)
        before = found.keys[0, :, 0, :, 0].flatten().tolist()
        found.rewind(accepted.path, rewind)
        after = found.keys[0, :, 0, :, 0].flatten().tolist()
        found.block_table = found.block_table.cpu()
        chosen, tokens = accepted.buffers.chosen.tolist(), found.row_token.tolist()
        paths, kv_slots = accepted.path.tolist(), found.kv_slot.tolist()
        for index, tree in enumerate(trees):
            assert tree is not None
            first = index * nodes_per_tree
            drafts = tokens[first + 1 : first + tree.num_nodes]
            path = accepted_path(tree.parents, drafts, chosen[first : first + tree.num_nodes])
            assert [node for node in paths[index] if node >= 0] == path
            lengths[len(path)] += 1
            packed = [found.kv_slot_of(index, found.lengths[index] - 1 + depth) for depth in range(len(path))]
            assert [after[slot] for slot in packed] == [before[kv_slots[first + node]] for node in path]
    assert min(lengths[1:7]) > 5, lengths


@pytest.mark.parametrize(("block_size", "dtype"), [(1, torch.float32), (16, torch.float32), (16, E4M3)])
def test_rewinding_equals_the_reference(block_size: int, dtype: torch.dtype, device: str) -> None:
    trees = some_trees(5, 4, 15)
    found = TreeRound(
        trees,
        [1, 15, 16, 50],
        nodes_per_tree=16,
        device=device,
        block_size=block_size,
        num_layers=3,
        head_dim=24,
        dtype=dtype,
    )
    found.place()
    accepted = Acceptance(found, share=1.0)
    accepted.run()
    twin = copy.deepcopy(found)
    found.rewind(accepted.path)
    twin.rewind(accepted.path, kv_rewind_reference)
    assert torch.equal(found.keys, twin.keys) and torch.equal(found.values, twin.values)


def test_rewinding_reads_all_rows_before_it_writes(device: str) -> None:
    """Sources of a tree may be targets: here rows lie one place before or behind their own."""
    found = TreeRound([TokenTree.chain(5)], [20], nodes_per_tree=6, device=device)
    found.place()
    places = found.kv_slot.clone()
    path = torch.full((1, PATH_ENTRIES), -1, dtype=torch.int32, device=device)
    path[0, :6] = torch.arange(6)
    for shift in (1, -1):
        found.kv_slot = places.roll(shift)
        before = found.keys[0, places // 16, :, places % 16].clone()
        found.rewind(path)
        assert torch.equal(found.keys[0, places // 16, :, places % 16], before.roll(shift, 0))


def test_nothing_is_moved_for_a_chain(device: str) -> None:
    found = TreeRound([TokenTree.chain(7), TokenTree.chain(3)], [20, 5], nodes_per_tree=8, device=device)
    found.place()
    accepted = Acceptance(found, share=1.0)
    accepted.run()
    keys = found.keys.clone()
    found.rewind(accepted.path)
    assert torch.equal(found.keys, keys)
    for index, drafts in enumerate((7, 3)):
        for node in range(drafts + 1):
            place = found.kv_slot_of(index, found.lengths[index] - 1 + node)
            assert found.kv_slot[index * 8 + node] == place


def poison_unseen(found: TreeRound, first_key: int, window: int) -> None:
    """Fill the cache with NaN where no node may read: all but the prefixes and the nodes' own places."""
    seen = torch.zeros(found.keys.shape[1] * found.block_size, dtype=torch.bool)
    for index, tree in enumerate(found.trees):
        if tree is not None:
            root = found.lengths[index] - 1
            first = max(first_key, root - window + 1) if window else first_key
            for position in range(first, root):
                seen[found.kv_slot_of(index, position)] = True
            first = index * found.nodes_per_tree
            seen[found.kv_slot[first : first + tree.num_nodes].cpu()] = True
    unseen = (~seen).view(-1, found.block_size).nonzero()
    for cache in (found.keys, found.values):
        cache[:, unseen[:, 0], :, unseen[:, 1]] = torch.nan


ATTENTION = [
    {"nodes_per_tree": 8},
    {"nodes_per_tree": 5, "num_kv_heads": 1, "group": 1, "head_dim": 24, "block_size": 64},
    {"nodes_per_tree": 24, "num_kv_heads": 1, "group": 3, "block_size": 4},
]


@pytest.mark.parametrize(
    ("shape", "window", "more"),
    [
        *((shape, 0, {}) for shape in ATTENTION),
        (ATTENTION[0], 20, {"scale": 0.3}),
        (ATTENTION[2], 3, {"num_programs": 12}),
        (ATTENTION[0], 0, {"first_key": 1, "sinks": True, "num_programs": 12}),
    ],
    ids=str,
)
def test_attention_is_near_the_reference(
    shape: dict[str, int], window: int, more: dict[str, Any], device: str
) -> None:
    """Lengths at and around borders of tiles and partitions."""
    more, first_key = dict(more), more.get("first_key", 0)
    lengths = [1 + first_key, 65, 17, 50, 126]
    trees = some_trees(8, len(lengths), shape["nodes_per_tree"] - 1)
    found = TreeRound(trees, lengths, device=device, **shape)
    if "sinks" in more:
        more["sinks"] = torch.randn(found.query.shape[1]).to(device)
    found.place()
    poison_unseen(found, first_key, window)
    out = found.attend(SMALL, window=window, **more)
    more.pop("num_programs", None)
    expected = tree_attention_reference(found.layer(window=window, **more), found.rows, found.paths)
    assert_near(out, expected, inner=200, magnitude=5.0)


@pytest.mark.parametrize(
    ("num_nodes", "window"), [(7, 0), (40, 0), (12, 100), (12, 2100)] if IS_GPU else [(7, 0), (7, 20)]
)
def test_node_gets_the_bits_that_it_gets_in_a_chain(
    num_nodes: int, window: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interpreter multiplies by BLAS, whose order of summation may vary. Tensor cores' does not."""
    monkeypatch.setattr(np, "matmul", lambda a, b, dtype: (a[:, :, None] * b).sum(1, dtype=dtype))
    rng = random.Random(num_nodes)
    tree = random_tree(rng, 0)
    while tree.num_nodes != num_nodes or tree.max_depth < 3 or tree.is_chain:
        tree = random_tree(rng, num_nodes - 1)
    lengths = [2040, 2047, 4600, 62, 2] if IS_GPU else [62, 126]
    partitions = Partitions.of_layer(64, window) if IS_GPU else SMALL
    found = TreeRound(
        [tree] * len(lengths),
        lengths,
        nodes_per_tree=num_nodes,
        device=device,
        block_size=64 if IS_GPU else 16,
        head_dim=128 if IS_GPU else 16,
        group=4,
        dtype=torch.bfloat16 if IS_GPU else torch.float32,
    )
    found.place()
    out = found.attend(partitions, window=window)
    assert torch.equal(found.attend(partitions, window=window, num_programs=8), out)
    for index, length in enumerate(lengths):
        for node in range(num_nodes) if IS_GPU else (0, 3, num_nodes - 1):
            chain = copy.deepcopy(found)
            path = tree.path(node)
            rows = torch.tensor([index * num_nodes + each for each in path], device=device)
            accepted = torch.full((len(lengths), PATH_ENTRIES), -1, dtype=torch.int32, device=device)
            accepted[index, : len(path)] = torch.tensor(path, dtype=torch.int32)
            chain.rewind(accepted)
            plan = AttentionPlan(
                1,
                max(lengths) + 300,
                partitions,
                torch.device(device),
                window=window,
                num_rows=len(path),
            )
            scratch = AttentionScratch.allocate(
                plan, num_kv_heads=2, num_rows=len(path), group=4, head_dim=found.query.shape[2]
            )
            slots = torch.full((len(path),), index + 1, dtype=torch.int32, device=device)
            positions = torch.arange(len(path), dtype=torch.int32, device=device) + length - 1
            planned = PlannedRows(slots, positions, len(path))
            plan_attention(planned, plan)
            query = found.query[rows]
            alone = replace(chain.layer(window=window), query=query, out=torch.full_like(query, torch.nan))
            paged_attention(alone, planned, scratch, AttentionConfig(num_programs=8))
            row = index * num_nodes + node
            assert torch.equal(out[row], alone.out[-1])


def test_errors_name_the_argument(device: str) -> None:
    found = TreeRound([TokenTree.chain(2)], [5], nodes_per_tree=3, device=device)
    found.nodes_per_tree = 65
    with pytest.raises(ValueError, match="nodes_per_tree=65: expected 1 to 64"):
        found.place()
    found.nodes_per_tree = 2
    with pytest.raises(ValueError, match="row_slot: 3 rows: expected a multiple of 2"):
        found.place()
    found.nodes_per_tree = 3
    found.place()
    path = torch.full((1, PATH_ENTRIES), -1, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match=r"path: \[1, 16\] torch.int32: expected \[1, 17\] torch.int32"):
        found.rewind(path[:, :-1])
    accepted = Acceptance(found, share=0.0)
    accepted.ring = (accepted.ring[0][:, :-1].contiguous(), *accepted.ring[1:])
    with pytest.raises(ValueError, match="output_ring: .* words an entry: expected at least"):
        accepted.run()
    found.kv_slot = found.kv_slot.int()
    with pytest.raises(ValueError, match=r"kv_slot: \[3\] torch.int32: expected \[3\] torch.int64"):
        found.attend(SMALL)


def test_penalties_of_a_node_are_those_of_its_path(device: str) -> None:
    """Rules of the rows of a tree, and of each path as a chain."""
    generator = torch.Generator().manual_seed(0)
    tree = TokenTree([-1, 0, 0, 1, 3, 2])
    tokens = [9, 5, 6, 5, 7, 5]
    columns = SlotColumns.allocate(1, VOCAB_SIZE, "cpu")
    columns.flags.fill_(SlotFlag.PENALTIES.value)
    columns.frequency_penalty.fill_(0.5)
    columns.presence_penalty.fill_(0.25)
    columns.repetition_penalty.fill_(1.5)
    columns.num_logprobs.fill_(-1)
    columns.counts[0, 5] = 2
    columns = type(columns)(**{name: getattr(columns, name).to(device) for name in columns.__slots__})
    logits = torch.randn(tree.num_nodes, VOCAB_SIZE, generator=generator)

    def ruled(nodes: Sequence[int], path: torch.Tensor | None) -> torch.Tensor:
        planes = torch.stack((logits[list(nodes)],) * 2).to(device)
        words = torch.zeros(len(nodes), 2, dtype=torch.int32)
        columns_of_rows = (
            torch.zeros(len(nodes), dtype=torch.int32),
            torch.tensor([20 + tree.depths[node] for node in nodes], dtype=torch.int32),
            torch.tensor([tokens[node] for node in nodes], dtype=torch.int32),
        )
        rows = RowsToSample(
            planes,
            *(column.to(device) for column in columns_of_rows),
            columns,
            words.to(device),
            SampleBuffers.allocate(len(nodes), VOCAB_SIZE, device),
            len(nodes),
            None if path is None else path.to(device),
        )
        apply_logits_rules(rows)
        return planes[1].cpu()

    path = torch.full((tree.num_nodes, PATH_ENTRIES), -1, dtype=torch.int32)
    for node in range(tree.num_nodes):
        path[node, : tree.depths[node] + 1] = torch.tensor(tree.path(node), dtype=torch.int32)
    found = ruled(range(tree.num_nodes), path)
    for node in range(tree.num_nodes):
        assert torch.equal(found[node], ruled(tree.path(node), None)[-1])
    assert not torch.equal(found, logits)
