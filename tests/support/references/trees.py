"""References of the kernels of `drift_sdk._kernels.trees`."""

from __future__ import annotations

from heapq import nsmallest

import torch
from torch import Tensor

from drift_sdk._kernels.attention.cache import cache_words
from drift_sdk._kernels.attention.layer_attention import LayerAttention
from drift_sdk._kernels.attention.plan import PlannedRows
from drift_sdk._kernels.commit import (
    FINISHED_LENGTH,
    FINISHED_STOP,
    RECORD_HEADER_WORDS,
    CommitTensors,
    record_words,
)
from drift_sdk._kernels.sampling.rows import MAX_TOP
from drift_sdk._kernels.slots import SlotFlag, SlotState
from drift_sdk._kernels.trees.tree_attention import TreePaths
from drift_sdk._kernels.trees.tree_growth import CandidateBuffers, CandidatePool, Frontier, StaticTables
from drift_sdk._kernels.trees.tree_rows import PATH_ENTRIES, RootTensors, TreeRowTensors
from drift_sdk.execution.eager.sampling import gumbel_noise
from references.attention import cache_numbers


def rank_candidates_reference(
    logits: Tensor,
    target_ids: Tensor,
    position: Tensor,
    temperature: Tensor,
    seed: Tensor,
    num_candidates: int,
) -> tuple[Tensor, Tensor]:
    """(token, logprob) [M, num_candidates] of logits [M, D] fp32, at position, temperature and seed [M] of
    the rows."""
    noise = gumbel_noise(seed, position.long() + 1, int(target_ids[-1]) + 1)[:, target_ids.long()]
    is_sampled = temperature[:, None] > 0
    scale = temperature[:, None].where(is_sampled, 1.0)
    scores = (logits / scale + noise).where(is_sampled, logits)
    top = scores.log_softmax(-1).topk(num_candidates, -1)
    return target_ids[top.indices], top.values


def expand_dynamic_reference(
    candidates: CandidateBuffers,
    pool: CandidatePool,
    rows: RootTensors,
    before: Frontier,
    after: Frontier | None,
    *,
    depth: int,
    first_candidate: int,
    first_node: int,
) -> None:
    """`expand_dynamic` in plain torch, one candidate after the other. Of rows of slot -1 of the frontier only
    the slot is written."""
    num_trees, (_, num_candidates) = len(rows.limits), candidates.token.shape
    num_nodes, num_sources = len(rows.slot) // num_trees, len(before.slot) // num_trees
    size = len(pool.cost) // num_trees
    num_frontier = 0 if after is None else len(after.slot) // num_trees
    for tree, (_, most_depth, is_chain) in enumerate(rows.limits.tolist()):
        slot, first = int(rows.slot[tree * num_nodes]), tree * size
        costs = []
        for number in range(num_sources * num_candidates):
            source, rank = tree * num_sources + number // num_candidates, number % num_candidates
            parent = -1 if depth == 1 else int(before.node[source])
            cost = 0.0 if depth == 1 else float(pool.cost[first + parent])
            logprob = float(candidates.logprob[source, rank])
            if logprob < 0:
                cost -= logprob
            if slot < 0 or depth > most_depth or (is_chain and number):
                cost = float("inf")
            costs.append((cost, number))
            place = first + first_candidate + number
            pool.cost[place], pool.parent[place] = cost, parent
            pool.token[place] = candidates.token[source, rank]

        for index, (cost, number) in enumerate(nsmallest(num_frontier, costs)):
            assert after is not None
            row, source = tree * num_frontier + index, tree * num_sources + number // num_candidates
            after.slot[row], after.node[row] = -1, first_candidate + number
            if cost < float("inf") and depth < most_depth:
                path = [0] if depth == 1 else before.path[source, :depth].tolist()
                path += [first_node + index]
                after.slot[row], after.source[row] = slot, source
                after.token[row] = candidates.token[source, number % num_candidates]
                after.kv_slot[row] = rows.draft_kv_slot.view(num_trees, -1)[tree, first_node + index]
                after.position[row] = rows.position[tree * num_nodes] + depth
                after.path[row] = -1
                after.path[row, : len(path)] = torch.tensor(path, dtype=torch.int32)


def keep_best_reference(pool: CandidatePool, rows: RootTensors) -> None:
    """`keep_best` in plain torch."""
    num_trees = len(rows.limits)
    size, num_nodes = len(pool.cost) // num_trees, len(rows.slot) // num_trees
    for tree, (most_drafts, _, _) in enumerate(rows.limits.tolist()):
        first = tree * num_nodes
        if int(rows.slot[first]) < 0:
            continue

        costs = pool.cost[tree * size : (tree + 1) * size].tolist()
        allowed = [(cost, number) for number, cost in enumerate(costs) if cost < float("inf")]
        kept = [number for _, number in nsmallest(min(most_drafts, num_nodes - 1), allowed)]
        for node, number in enumerate(kept, 1):
            parent = int(pool.parent[tree * size + number])
            rows.slot[first + node] = rows.slot[first]
            rows.token[first + node] = pool.token[tree * size + number]
            rows.parent[first + node] = 0 if parent < 0 else kept.index(parent) + 1


def kv_rewind_reference(
    keys: Tensor,
    values: Tensor,
    block_table: Tensor,
    row_slot: Tensor,
    row_position: Tensor,
    row_kv_slot: Tensor,
    path: Tensor,
    *,
    nodes_per_tree: int,
) -> None:
    """`kv_rewind` in plain torch, one tree after the other."""
    block_size = keys.shape[3]
    for tree, nodes in enumerate(path.tolist()):
        first_row = tree * nodes_per_tree
        slot, start = int(row_slot[first_row]), int(row_position[first_row])
        kept = [node for node in nodes if node >= 0]
        if slot < 0 or not kept:
            continue

        source = row_kv_slot[first_row + torch.tensor(kept, dtype=torch.int64)]
        position = start + torch.arange(len(kept))
        block = block_table[slot, position // block_size].long()
        for cache in (cache_words(keys), cache_words(values)):
            rows = cache[:, source // block_size, :, source % block_size].clone()
            cache[:, block, :, position % block_size] = rows


def path_rows_reference(
    row_slot: Tensor, row_position: Tensor, chosen: Tensor, path: Tensor, *, nodes_per_tree: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(slot, token, position, source) as `path_rows` writes them, for E = PATH_ENTRIES."""
    first = torch.arange(len(path), dtype=torch.int32, device=path.device)[:, None] * nodes_per_tree
    source = (first + path).where(path >= 0, -1).flatten()
    row, is_live = source.clamp(min=0).long(), source >= 0
    return (
        row_slot[row].where(is_live, -1),
        chosen[row].where(is_live, -1),
        row_position[row].where(is_live, -1) + 1,
        source,
    )


def gather_hidden_reference(source: Tensor, hidden: Tensor, out: Tensor) -> None:
    """`gather_hidden` in plain torch."""
    out.copy_(hidden[source.clamp(min=0).long()].where((source >= 0)[:, None], 0))


def grow_static_reference(
    candidates: CandidateBuffers,
    tables: StaticTables,
    rows: RootTensors,
    before: Frontier,
    after: Frontier | None,
    *,
    depth: int,
    first_node: int,
) -> None:
    """`grow_static` in plain torch, one node after the other. Of rows of slot -1 of the frontier only the
    slot is written."""
    num_trees, num_nodes = rows.limits.shape[0], len(tables.depth)
    num_sources = len(before.slot) // num_trees
    for tree, (most_drafts, most_depth, is_chain) in enumerate(rows.limits.tolist()):
        first, first_source, slot = tree * num_nodes, tree * num_sources, int(rows.slot[tree * num_nodes])
        is_grown = slot >= 0 and depth <= most_depth

        def places(node: int, is_chain: bool = is_chain) -> tuple[int, int, int]:
            """Depth, source and rank of a node."""
            own = tables.depth[node], tables.source[node], tables.rank[node]
            return (node, 0, 0) if is_chain else (int(own[0]), int(own[1]), int(own[2]))

        for node in range(1, min(most_drafts + 1, num_nodes) if is_grown else 0):
            own_depth, source, rank = places(node)
            if own_depth == depth:
                rows.slot[first + node] = slot
                rows.token[first + node] = candidates.token[first_source + source, rank]
                rows.parent[first + node] = depth - 1 if is_chain else tables.parent[node]

        if after is None:
            continue

        nodes = tables.frontier[depth - 1].tolist()
        for index, listed in enumerate(nodes):
            node = (depth if index == 0 else -1) if is_chain else listed
            row = tree * len(nodes) + index
            after.slot[row] = -1
            if not is_grown or not 0 <= node <= most_drafts or depth >= most_depth:
                continue

            _, source, rank = places(node)
            path = [0] if depth == 1 else before.path[first_source + source, :depth].tolist()
            path += [first_node + index]
            after.slot[row], after.source[row] = slot, first_source + source
            after.token[row] = candidates.token[first_source + source, rank]
            after.kv_slot[row] = rows.draft_kv_slot.view(num_trees, -1)[tree, first_node + index]
            after.position[row] = rows.position[first] + depth
            after.path[row] = -1
            after.path[row, : len(path)] = torch.tensor(path, dtype=torch.int32)


def tree_accept_reference(tensors: CommitTensors, row_parent: Tensor, path: Tensor) -> None:
    """`tree_accept` in plain torch, one slot after the other."""
    buffers, state, slots, emitted = tensors.buffers, tensors.state, tensors.slots, tensors.emitted
    row_slot, row_token, nodes_per_tree = tensors.row_slot, tensors.row_token, tensors.rows_per_slot
    output_ring, current_entry, next_entry = tensors.output_ring, tensors.current_entry, tensors.next_entry
    is_ngram = tensors.is_ngram
    size, row_words = record_words(PATH_ENTRIES), record_words(1) - RECORD_HEADER_WORDS
    all_slots, parents, drafts = row_slot.tolist(), row_parent.tolist(), row_token.tolist()
    for index in range(len(emitted)):
        first = index * nodes_per_tree
        record = output_ring[int(current_entry), index * size : (index + 1) * size]
        record[:RECORD_HEADER_WORDS] = 0
        nodes_at = len(emitted) * size + index * PATH_ENTRIES
        path_record = output_ring[int(current_entry), nodes_at : nodes_at + PATH_ENTRIES]
        emitted[index], path[index], path_record[:], slot = 0, -1, -1, all_slots[first]
        if slot < 0:
            continue

        nodes = [node for node in range(1, nodes_per_tree) if all_slots[first + node] >= 0]
        walked, tokens, finish, num_accepted = [0], list[int](), 0, 0
        while len(tokens) < len(walked):
            token = int(buffers.chosen[first + walked[-1]])
            tokens.append(token)
            if int(slots.stop_bits[slot, token // 32]) >> token % 32 & 1:
                finish = FINISHED_STOP
            elif int(state.length[slot]) + len(tokens) >= int(state.max_length[slot]):
                finish = FINISHED_LENGTH
            right = [n for n in nodes if parents[first + n] == walked[-1] and drafts[first + n] == token]
            num_accepted += bool(right)
            if right and not finish:
                walked.append(right[0])

        state.length[slot] += len(tokens)
        state.last_token[slot], state.finish[slot], emitted[index] = tokens[-1], finish, len(tokens)
        mark = 0 if is_ngram is None else int(is_ngram[index])
        header = [len(tokens), finish, len(nodes), num_accepted, mark]
        record[:RECORD_HEADER_WORDS] = torch.tensor(header, dtype=torch.int32)
        for depth, (token, node) in enumerate(zip(tokens, walked, strict=True)):
            path[index, depth], path_record[depth] = node, node
            row_record = record[RECORD_HEADER_WORDS + depth * row_words :][:row_words]
            row_record[0] = token
            if int(slots.flags[slot]) & SlotFlag.PENALTIES:
                slots.counts[slot, token] += 1
            if int(slots.num_logprobs[slot]) >= 0:
                row_record[1] = buffers.chosen_logprob[first + node].view(torch.int32)
                row_record[2 : 2 + MAX_TOP] = buffers.top_token[first + node]
                row_record[2 + MAX_TOP :] = buffers.top_logprob[first + node].view(torch.int32)

    next_entry.add_(1).remainder_(len(output_ring))


def tree_attention_reference(layer: LayerAttention, rows: PlannedRows, paths: TreePaths) -> Tensor:
    """Return the attention of each node in float64, one after the other: [R, num_heads, head_dim]."""
    kv, block_size, device = layer.kv, layer.kv.block_size, layer.query.device
    keys, values = cache_numbers(kv.keys, kv.key_scale), cache_numbers(kv.values, kv.value_scale)
    num_trees = rows.num_sequences
    kv_slot, root = paths.kv_slot.view(num_trees, -1), paths.root_position.view(num_trees, -1)[:, 0]
    out = torch.zeros(layer.query.shape, dtype=torch.float64, device=device)
    for row, slot in enumerate(rows.slot.tolist()):
        if slot < 0:
            continue

        tree = row // rows.rows_per_sequence
        prefix = torch.arange(int(root[tree]), device=device)
        block = layer.block_table[slot, prefix // block_size].long()
        ancestors = paths.path[row][paths.path[row] >= 0].long()
        kv_slots = torch.cat((block * block_size + prefix % block_size, kv_slot[tree, ancestors]))
        first = layer.first_key
        if layer.window:
            first = max(first, int(rows.position[row]) - layer.window + 1)
        kv_slots = kv_slots[first:]
        key, value = (
            cache[kv_slots // block_size, :, kv_slots % block_size]
            .double()
            .repeat_interleave(layer.group, dim=1)
            for cache in (keys, values)
        )
        scores = torch.einsum("hd,nhd->hn", layer.query[row].double(), key) * layer.score_scale
        if layer.sinks is not None:
            scores = torch.cat((scores, layer.sinks.double()[:, None]), dim=1)
        out[row] = torch.einsum("hn,nhd->hd", scores.softmax(-1)[:, : len(key)], value)

    return out


def tree_roots_reference(
    slots: Tensor,
    max_drafts: Tensor,
    state: SlotState,
    flags: Tensor,
    block_table: Tensor,
    out: RootTensors,
    *,
    max_depth: int,
    block_size: int,
    first_draft_slot: int,
) -> None:
    """`tree_roots` in plain torch, except what belongs to trees without a root."""
    nodes, draft_nodes = (len(tensor) // len(slots) for tensor in (out.slot, out.draft_kv_slot))
    for tree, slot in enumerate(slots.tolist()):
        first, is_live = tree * nodes, slot >= 0 and int(state.finish[slot]) == 0
        out.slot[first : first + nodes], out.token[first : first + nodes] = -1, -1
        out.parent[first : first + nodes] = 0
        out.parent[first] = -1
        out.root_slot[tree] = slot if is_live else -1
        if not is_live:
            continue

        length = int(state.length[slot])
        depth = max(min(max_depth, int(state.max_length[slot]) - length - 1), 0)
        is_chain = bool(int(flags[slot]) & SlotFlag.CONSTRAINT)
        num_drafts = int(max_drafts[tree]) if depth else 0
        out.limits[tree] = torch.tensor([num_drafts, depth, is_chain], dtype=torch.int32)
        out.slot[first], out.token[first], out.position[first] = slot, state.last_token[slot], length - 1
        out.root_position[tree] = length - 1
        own = block_table[slot, (length - 1) // block_size] * block_size + (length - 1) % block_size
        places = torch.arange(draft_nodes) + first_draft_slot + tree * draft_nodes
        out.draft_kv_slot[tree * draft_nodes : (tree + 1) * draft_nodes] = places
        out.draft_kv_slot[tree * draft_nodes] = own


def tree_rows_reference(
    row_slot: Tensor,
    row_parent: Tensor,
    length: Tensor,
    block_table: Tensor,
    out: TreeRowTensors,
    *,
    nodes_per_tree: int,
    block_size: int,
    first_tree_slot: int,
) -> None:
    """`tree_rows` in plain torch, one node after the other."""
    position, bits, kv_slot, path = out
    slots, parents = row_slot.tolist(), row_parent.tolist()
    for first_row in range(0, len(slots), nodes_per_tree):
        if slots[first_row] < 0:
            continue

        on_first_path = {0}
        taken: set[int] = set()  # parents whose lowest child has been seen
        for node in range(nodes_per_tree):
            row = first_row + node
            path[row], bits[row] = -1, 0
            if slots[row] < 0:
                continue

            ancestors: list[int] = [node]
            while parents[first_row + ancestors[-1]] >= 0:
                ancestors.append(parents[first_row + ancestors[-1]])
            if parents[row] in on_first_path and parents[row] not in taken:
                on_first_path.add(node)
            taken.add(parents[row])
            depth = len(ancestors) - 1
            position[row] = length[slots[row]] - 1 + depth
            word = sum(1 << ancestor for ancestor in ancestors)
            bits[row] = word - 2**64 if word >= 2**63 else word
            path[row, : depth + 1] = torch.tensor(ancestors[::-1], dtype=torch.int32)
            at = int(position[row])
            block = int(block_table[slots[row], at // block_size]) if node in on_first_path else 0
            own = block * block_size + at % block_size
            kv_slot[row] = own if node in on_first_path else first_tree_slot + row
