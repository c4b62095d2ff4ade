"""Cases of the kernels of trees: attention, acceptance, rewinding, choice of drafts, attention plan."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from drift_sdk._kernels.attention.decode import AttentionConfig, AttentionScratch
from drift_sdk._kernels.attention.layer_attention import LayerAttention
from drift_sdk._kernels.attention.plan import AttentionPlan, PlannedRows, plan_attention
from drift_sdk._kernels.attention.softmax import Partitions
from drift_sdk._kernels.commit import CommitTensors
from drift_sdk._kernels.draft.draft_choose import choose_drafts, num_draft_chunks
from drift_sdk._kernels.gemm.tuning import TunedTable
from drift_sdk._kernels.sampling.rows import SampleBuffers
from drift_sdk._kernels.slots import SlotColumns, SlotState
from drift_sdk._kernels.trees.tree_attention import TreePaths, tree_attention
from drift_sdk._kernels.trees.tree_growth import CandidateBuffers, rank_candidates
from drift_sdk._kernels.trees.tree_rows import (
    PATH_ENTRIES,
    kv_rewind,
    tree_accept,
    tree_record_words,
    tree_rows,
)
from drift_sdk.spec.model import Attention, ModelSpec
from perf.cases.attention import BLOCK_SIZE, cache_of
from perf.cases.case import Case, Prepared, num_copies
from perf.cases.gemm import ITEMSIZE
from perf.harness.shapes import DRAFT_VOCAB_SIZE, Model

__all__ = ["PlacedTrees", "attention_case", "choice_case", "rewind_case", "tree_cases"]

SHAPES = ((1, 8), (1, 16), (1, 64), (4, 16), (16, 16))
"""Trees and nodes of each."""
CONTEXTS = (512, 16_384)
NUM_CANDIDATES = 4


class PlacedTrees:
    """Trees in which node n is a child of node (n - 1) // 2, behind contexts of the same length."""

    def __init__(self, num_trees: int, num_nodes: int, context: int, table: Tensor, num_blocks: int) -> None:
        device, num_rows = table.device, num_trees * num_nodes

        def rows(values: Tensor) -> Tensor:
            return values.to(device, torch.int32).repeat(num_trees)

        node = torch.arange(num_nodes)
        self.slot = torch.arange(num_trees, device=device, dtype=torch.int32).repeat_interleave(num_nodes)
        self.parent = rows(torch.where(node > 0, (node - 1) // 2, -1))
        self.token = rows(node)
        self.length = torch.full((num_trees,), context, dtype=torch.int32, device=device)
        self.position = torch.empty(num_rows, dtype=torch.int32, device=device)
        self.bits = torch.empty(num_rows, dtype=torch.int64, device=device)
        self.kv_slot = torch.empty(num_rows, dtype=torch.int64, device=device)
        self.path = torch.empty(num_rows, PATH_ENTRIES, dtype=torch.int32, device=device)
        tree_rows(
            self.slot,
            self.parent,
            self.length,
            table,
            (self.position, self.bits, self.kv_slot, self.path),
            nodes_per_tree=num_nodes,
            block_size=BLOCK_SIZE,
            first_tree_slot=num_blocks * BLOCK_SIZE,
        )


def tree_cases(model: Model, row_counts: tuple[int, ...], table: TunedTable, device: str) -> Iterator[Case]:
    """Yield the cases of SHAPES; row_counts and table have no influence."""
    spec = model.spec.attention
    if not isinstance(spec, Attention):
        return

    for num_trees, num_nodes in SHAPES:
        for context in CONTEXTS:
            yield attention_case(spec, num_trees, num_nodes, context, device)
        yield accept_case(model.spec.vocab_size, num_trees, num_nodes, device)
        yield rewind_case(model.spec, num_trees, num_nodes, device)
    for num_rows in (1, 4, 16, 64):
        for num_candidates in (1, NUM_CANDIDATES, 16):
            yield choice_case(num_rows, num_candidates, device)
    for num_trees, num_nodes in SHAPES:
        yield plan_case(num_trees, num_nodes, device)


def attention_case(spec: Attention, num_trees: int, num_nodes: int, context: int, device: str) -> Case:
    """The case of all nodes of trees behind `context` tokens. Bytes: the keys once, as of chains."""
    row_size, num_rows = spec.num_heads * spec.head_dim, num_trees * num_nodes
    num_keys = num_trees * (context + num_nodes)
    return Case(
        kernel="tree attention",
        shape=f"{num_trees} of {num_nodes}, {context} keys",
        num_rows=num_rows,
        num_bytes=(num_keys * 2 * spec.num_kv_heads * spec.head_dim + 2 * num_rows * row_size) * ITEMSIZE,
        num_flops=4 * num_rows * context * row_size,
        prepare=partial(prepare_attention, spec, num_trees, num_nodes, context, device),
    )


def prepare_attention(spec: Attention, num_trees: int, num_nodes: int, context: int, device: str) -> Prepared:
    caches, table = cache_of(spec, context + BLOCK_SIZE, num_trees + 1, device)
    num_blocks = table.numel() - table.shape[1]  # the last sequence's blocks are those of the nodes
    table = torch.arange(num_blocks, dtype=torch.int32, device=device).view(num_trees, -1)
    trees = PlacedTrees(num_trees, num_nodes, context, table, num_blocks)
    plan = AttentionPlan(num_trees, context + PATH_ENTRIES, Partitions(), torch.device(device))
    scratch = AttentionScratch.allocate(
        plan, num_kv_heads=spec.num_kv_heads, num_rows=num_nodes, group=spec.group, head_dim=spec.head_dim
    )
    rows = PlannedRows(trees.slot, trees.position, num_nodes)
    plan_attention(rows, plan)
    shape = (num_trees * num_nodes, spec.num_heads, spec.head_dim)
    query = torch.randn(shape, device=device).to(torch.bfloat16)
    out, paths = torch.empty_like(query), TreePaths(trees.position, trees.kv_slot, trees.path)
    layers = [LayerAttention(query=query, out=out, kv=kv, block_table=table) for kv in caches]

    def step() -> None:
        for layer in layers:
            tree_attention(layer, rows, paths, scratch, AttentionConfig())

    return Prepared(step, len(caches), (out,))


def accept_case(vocab_size: int, num_trees: int, num_nodes: int, device: str) -> Case:
    """The case of a walk along the first path of each tree."""
    return Case(
        kernel="tree accept",
        shape=f"{num_trees} of {num_nodes}",
        num_rows=num_trees * num_nodes,
        num_bytes=float(num_trees * (56 + 20 * num_nodes)),
        num_flops=0.0,
        prepare=partial(prepare_accept, vocab_size, num_trees, num_nodes, device),
    )


def prepare_accept(vocab_size: int, num_trees: int, num_nodes: int, device: str) -> Prepared:
    table = torch.zeros(num_trees, 1, dtype=torch.int32, device=device)
    trees = PlacedTrees(num_trees, num_nodes, 1, table, 1)
    buffers = SampleBuffers.allocate(num_trees * num_nodes, vocab_size, device)
    buffers.chosen.copy_(trees.token * 2 + 1)  # the first child of each node
    columns = SlotColumns.allocate(num_trees, vocab_size, device)
    state = SlotState(*(torch.zeros(num_trees, dtype=torch.int32, device=device) for _ in range(4)))
    state.max_length.fill_(2**30)
    output = torch.zeros(2, tree_record_words(num_trees), dtype=torch.int32, pin_memory=device != "cpu")
    entry = torch.zeros(1, dtype=torch.int32, device=device)
    path = torch.empty(num_trees, PATH_ENTRIES, dtype=torch.int32, device=device)
    emitted = torch.empty(num_trees, dtype=torch.int32, device=device)

    def step() -> None:
        for _ in range(8):
            tensors = CommitTensors(
                row_slot=trees.slot,
                row_token=trees.token,
                buffers=buffers,
                state=state,
                slots=columns,
                emitted=emitted,
                output_ring=output,
                current_entry=entry,
                next_entry=entry.clone(),
                rows_per_slot=num_nodes,
            )
            tree_accept(tensors, trees.parent, path)

    return Prepared(step, 8, ())


def rewind_case(spec: ModelSpec, num_trees: int, num_nodes: int, device: str) -> Case:
    """The case of paths of four nodes, three of which are moved, in all layers."""
    row_bytes = spec.num_layers * spec.attention.kv.size * ITEMSIZE
    return Case(
        kernel="kv rewind",
        shape=f"{num_trees} of {num_nodes}",
        num_rows=num_trees * num_nodes,
        num_bytes=2.0 * num_trees * 3 * row_bytes,
        num_flops=0.0,
        prepare=partial(prepare_rewind, spec, num_trees, num_nodes, device),
    )


def prepare_rewind(spec: ModelSpec, num_trees: int, num_nodes: int, device: str) -> Prepared:
    num_blocks, kv = num_trees + -(-num_trees * num_nodes // BLOCK_SIZE), spec.attention.kv
    shape = (spec.num_layers, num_blocks, kv.num_kv_heads, BLOCK_SIZE, kv.head_dim)
    copies = num_copies(2 * spec.num_layers * num_blocks * BLOCK_SIZE * kv.num_kv_heads * 256)
    caches = [
        [torch.zeros(shape, dtype=torch.bfloat16, device=device) for _ in range(2)] for _ in range(copies)
    ]
    table = torch.arange(num_trees, dtype=torch.int32, device=device)[:, None]
    trees = PlacedTrees(num_trees, num_nodes, 1, table, num_trees)
    path = torch.full((num_trees, PATH_ENTRIES), -1, dtype=torch.int32, device=device)
    path[:, :4] = torch.tensor([0, 2, 5, 6], dtype=torch.int32)

    def step() -> None:
        for keys, values in caches:
            kv_rewind(
                keys, values, table, trees.slot, trees.position, trees.kv_slot, path,
                nodes_per_tree=num_nodes,
            )  # fmt: skip

    return Prepared(step, copies, ())


def choice_case(num_rows: int, num_candidates: int, device: str) -> Case:
    """The case of the best tokens of rows of a draft's logits; of one token, as chains choose it."""
    return Case(
        kernel="draft choose",
        shape=f"best {num_candidates} of {DRAFT_VOCAB_SIZE}",
        num_rows=num_rows,
        num_bytes=float(num_rows * DRAFT_VOCAB_SIZE * 4),
        num_flops=0.0,
        prepare=partial(prepare_choice, num_rows, num_candidates, device),
    )


def prepare_choice(num_rows: int, num_candidates: int, device: str) -> Prepared:
    copies = num_copies(num_rows * DRAFT_VOCAB_SIZE * 4)
    logits = [torch.randn(1, num_rows, DRAFT_VOCAB_SIZE, device=device) for _ in range(copies)]
    target_ids = torch.arange(DRAFT_VOCAB_SIZE, dtype=torch.int32, device=device)
    slot = torch.arange(num_rows, dtype=torch.int32, device=device)
    temperature = torch.full((num_rows,), 0.8, device=device)
    seed = torch.zeros(num_rows, dtype=torch.int64, device=device)
    num_chunks = num_draft_chunks(DRAFT_VOCAB_SIZE)

    def empty(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.zeros(num_rows, *shape, dtype=dtype, device=device)

    buffers = CandidateBuffers(
        token=empty(torch.int32, num_candidates),
        logprob=empty(torch.float32, num_candidates),
        chunk_max=empty(torch.float32, num_chunks),
        chunk_sum=empty(torch.float32, num_chunks),
        chunk_value=empty(torch.float32, num_chunks, num_candidates),
        chunk_token=empty(torch.int32, num_chunks, num_candidates),
    )
    chunks = (buffers.chunk_max, empty(torch.int32, num_chunks))
    row_slot, row_token, row_position = (slot.repeat_interleave(2) for _ in range(3))
    out = (empty(torch.int32), empty(torch.int32), empty(torch.int32))

    def step() -> None:
        for each in logits:
            if num_candidates == 1:
                choose_drafts(
                    each, target_ids, row_slot, row_token, row_position, temperature, seed, chunks, out,
                    depth=1,
                )  # fmt: skip
            else:
                rank_candidates(each, target_ids, slot, slot, temperature, seed, buffers)

    return Prepared(step, copies, () if num_candidates == 1 else (buffers.logprob,))


def plan_case(num_trees: int, num_nodes: int, device: str) -> Case:
    """The case of the attention plan of a step of trees."""
    return Case(
        kernel="attention plan",
        shape=f"{num_trees} of {num_nodes}, {CONTEXTS[-1]} keys",
        num_rows=num_trees * num_nodes,
        num_bytes=float(8 * num_trees * num_nodes),
        num_flops=0.0,
        prepare=partial(prepare_plan, num_trees, num_nodes, device),
    )


def prepare_plan(num_trees: int, num_nodes: int, device: str) -> Prepared:
    context = CONTEXTS[-1]
    slot = torch.arange(num_trees, dtype=torch.int32, device=device).repeat_interleave(num_nodes)
    rows = PlannedRows(slot, torch.full_like(slot, context - 1), num_nodes)
    plan = AttentionPlan(num_trees, context, Partitions(), torch.device(device))

    def step() -> None:
        for _ in range(8):
            plan_attention(rows, plan)

    return Prepared(step, 8, ())
