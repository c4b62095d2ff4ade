"""Trees of an EAGLE-3 draft against the chain that leads to each of their nodes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from draft_zoo import make_draft
from msgspec.structs import replace
from tiny_llama import tiny_llama

from drift_sdk import DynamicTree, StaticTree
from drift_sdk.execution.eager.drafters import EagleDrafter, Span, max_draft_rows, state_of, target_logits
from drift_sdk.execution.eager.sampling import rank
from drift_sdk.execution.eager.slot import Slot
from drift_sdk.families import read_spec
from drift_sdk.models.attention import AttentionBatch, SequenceRows
from drift_sdk.models.decoder import Decoder
from drift_sdk.models.draft_head import DraftDecoder
from drift_sdk.steps import ExecutorLimits, SlotSampling
from drift_sdk.trees import Draft, DraftLimit

TARGET = tiny_llama(vocab_size=160, num_hidden_layers=3)
LIMITS = ExecutorLimits(max_num_seqs=3, max_model_len=40, num_blocks=30, block_size=4, vocab_size=160)
STATIC = StaticTree(((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (1, 0, 0), (1, 0, 1), (0, 0, 0, 0)))
SAMPLING = SlotSampling(
    temperature=0.0,
    top_k=0,
    top_p=1.0,
    min_p=0.0,
    seed=0,
    stop_token_ids=(),
    num_prompt_tokens=1,
    max_length=40,
)


class Prefilled:
    """Three slots of different lengths, whose prompts target and draft have computed."""

    def __init__(self, folder: Path, tree: StaticTree | DynamicTree) -> None:
        (folder / "config.json").write_text(json.dumps(TARGET))
        make_draft("reference", folder / "draft", folder)
        self.target = Decoder.random(read_spec(TARGET), device="cpu", dtype=torch.float32)
        self.draft = DraftDecoder.load(folder / "draft", self.target)
        self.drafter = EagleDrafter(self.draft, self.target, LIMITS, tree)
        cache = self.target.empty_kv_cache(30, 4)
        blocks = torch.randperm(30, generator=torch.Generator().manual_seed(1)).tolist()
        self.slots = []
        for index, length in enumerate((9, 4, 14)):
            slot = Slot(replace(SAMPLING, seed=index, temperature=0.9 * (index % 2)))
            slot.block_table = blocks[index * 10 : index * 10 + 10]
            prompt = [(7 * index + 3 * place) % 160 for place in range(length)]
            slot.length, slot.last_token = length + 1, 11
            rows = [SequenceRows(slot.block_table, 0, length)]
            hidden, aux = self.target.forward(
                torch.tensor(prompt), AttentionBatch(rows, cache), cache, self.draft.aux_layers
            )
            self.drafter.enter(slot, ())
            self.drafter.draft_extend(
                [Span(slot, 0, prompt[0], [*prompt[1:], 11], range(length))], aux, hidden
            )
            self.slots.append(slot)

    def candidates(self, slot: Slot, path: list[int], number: int) -> tuple[list[int], list[float]]:
        """The best tokens after a path, which the draft computes token by token, as a chain."""
        hidden = state_of(slot).hidden
        assert hidden is not None
        hidden = hidden[None]
        for depth, token in enumerate(path):
            rows = [SequenceRows(slot.block_table, slot.length - 1 + depth, 1)]
            hidden = self.drafter._forward(hidden, [token], rows)
        logits = target_logits(self.draft, hidden, 160)
        ids, logprobs = rank(logits, [slot.sampling], [slot.length + len(path)], number)
        return ids[0], logprobs[0]


def tokens_to(draft: Draft, node: int) -> list[int]:
    return [draft.token_ids[each - 1] for each in draft.tree.path(node)[1:]]


@pytest.mark.parametrize("depth", [2, 4])
@torch.inference_mode()
def test_nodes_of_a_static_tree_are_candidates_after_their_path(tmp_path: Path, depth: int) -> None:
    found = Prefilled(tmp_path, STATIC)
    drafts = found.drafter.propose(found.slots, [DraftLimit(10, depth, is_chain=False)] * 3)
    for slot, draft in zip(found.slots, drafts, strict=True):
        assert draft.tree.max_depth == depth
        for node in range(draft.tree.num_nodes):
            children = [draft.token_ids[child - 1] for child in draft.tree.children(node)]
            ids, _ = found.candidates(slot, tokens_to(draft, node), 3)
            assert children == ids[: len(children)]


@torch.inference_mode()
def test_nodes_of_a_dynamic_tree_are_the_likeliest(tmp_path: Path) -> None:
    found = Prefilled(tmp_path, DynamicTree(top_k=3, depth=4, num_draft_tokens=12))
    drafts = found.drafter.propose(found.slots, [DraftLimit(12, 4, is_chain=False)] * 3)
    for slot, draft in zip(found.slots, drafts, strict=True):
        assert draft.tree.num_drafts == 12 and not draft.tree.is_chain
        probability = [0.0]
        for node in range(1, 13):
            above, own = tokens_to(draft, node)[:-1], draft.token_ids[node - 1]
            ids, logprobs = found.candidates(slot, above, 3)
            probability.append(probability[draft.tree.parents[node]] + logprobs[ids.index(own)])
        assert probability == pytest.approx(sorted(probability, reverse=True))


@torch.inference_mode()
def test_constrained_slot_gets_the_chain_of_the_best_candidates(tmp_path: Path) -> None:
    found = Prefilled(tmp_path, STATIC)
    limits = [DraftLimit(3, 3), DraftLimit(10, 4, is_chain=False), DraftLimit(0, 0)]
    chain, tree, none = found.drafter.propose(found.slots, limits)
    assert (chain.tree.is_chain, tree.tree.is_chain, none.token_ids) == (True, False, [])
    expected: list[int] = []
    for _ in range(3):
        expected.append(found.candidates(found.slots[0], expected, 1)[0][0])
    assert chain.token_ids == expected


def test_draft_rows_of_a_round_are_bounded() -> None:
    assert max_draft_rows(StaticTree(((0,),))) == 0
    # 64 sequences have room for all three drafts; the draft computes the first two of each.
    assert max_draft_rows(DynamicTree(top_k=1, depth=3, num_draft_tokens=3)) == 128
    for shape in (STATIC, DynamicTree(), DynamicTree(top_k=16, depth=5, num_draft_tokens=63)):
        assert 0 < max_draft_rows(shape) < 4000
