"""Tokens are the same with trees of drafts as without drafts, and faults in trees are found."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from draft_pass import whole_pass
from draft_zoo import make_draft
from model_zoo import logprob_bound, make_model
from near_ties import no_near_ties
from slow_cases import slow_after
from tolerances import assert_near
from tree_oracle import TreeOracle

from drift_sdk import (
    Chain,
    Completion,
    DynamicTree,
    Engine,
    EngineConfig,
    EngineStats,
    ExecutorError,
    Regex,
    SamplingParams,
    Speculation,
    StaticTree,
)
from drift_sdk.execution.drafter_factory import EagleDrafterFactory
from drift_sdk.execution.eager import eager_executor as eager
from drift_sdk.execution.eager.drafters import EagleDrafter, state_of
from drift_sdk.execution.eager.rounds import SlotRows
from drift_sdk.trees import Draft, TokenTree

VOCAB_SIZE = 500
NUM_REQUESTS = 8
MODEL = 0
STATIC = StaticTree(((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1), (0, 0, 0, 0)))


class Case:
    """A request: every second one is sampled, some have stops, penalties or limits of drafts."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed + 100)
        shared = [7 + (5 * i) % 300 for i in range(16)]
        self.prompt = shared[: rng.choice([0, 16])] + [rng.randrange(3, VOCAB_SIZE) for _ in range(5 + seed)]
        self.params = SamplingParams(
            max_tokens=rng.randint(12, 32),
            temperature=0.8 * (seed % 2),
            top_p=0.9,
            seed=seed,
            ignore_eos=seed % 3 > 0,
            stop_token_ids=tuple(range(100, 120)) if seed % 4 == 1 else (),
            repetition_penalty=1.2 if seed % 4 == 2 else 1.0,
            logprobs=2 if seed % 4 == 3 else None,
            num_draft_tokens={5: 20, 6: 5}.get(seed),
        )


CASES = [Case(seed) for seed in range(NUM_REQUESTS)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_model(MODEL, folder / "target")
    make_draft("reference", folder / "draft", folder / "target")
    return folder


def config_of(folder: Path, shape: Any = None, *, checks: bool = True, **fields: object) -> EngineConfig:
    speculation = None
    if shape is not None:
        speculation = Speculation(draft=folder / "draft", shape=shape, adaptive=False, checks=checks)
    return EngineConfig(
        dtype="float32",
        device="cpu",
        **{"max_model_len": 256, "block_size": 8, "max_num_seqs": 4, **fields},
        speculation=speculation,
    )


async def run_all(
    folder: Path, config: EngineConfig, cases: Sequence[Case] = CASES
) -> tuple[list[Any], EngineStats]:
    """The completion, or the error, of each case."""
    async with Engine(folder / "target", config) as engine:
        streams = [engine.generate(case.prompt, case.params) for case in cases]
        results: list[Any] = []
        for stream in streams:
            try:
                results.append(await stream)
            except ExecutorError as error:
                results.append(error)
        return results, engine.stats()


@pytest.fixture(scope="module")
def plain(folder: Path) -> list[Completion]:
    with no_near_ties(logprob_bound(MODEL)):
        return anyio.run(run_all, folder, config_of(folder, max_num_seqs=1))[0]


def use_oracle(
    monkeypatch: pytest.MonkeyPatch,
    plain: list[Completion],
    corruption: float,
    make: Callable[..., TreeOracle] = TreeOracle,
) -> TreeOracle:
    answers = {
        case.params.seed: [*case.prompt, *completion.token_ids]
        for case, completion in zip(CASES, plain, strict=True)
    }
    oracle = make(answers, corruption, VOCAB_SIZE)
    monkeypatch.setattr(EagleDrafterFactory, "eager_drafter", lambda *_: oracle)
    return oracle


def assert_same(found: list[Any], expected: list[Completion]) -> None:
    for index, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert not isinstance(one, ExecutorError), (index, one)
        assert one.token_ids == other.token_ids, f"request {index}"
        assert (one.text, one.finish_reason, one.stop_reason) == (
            other.text,
            other.finish_reason,
            other.stop_reason,
        )
        for a, b in zip(one.logprobs or (), other.logprobs or (), strict=True):
            assert abs(a.logprob - b.logprob) < logprob_bound(MODEL)


@pytest.mark.parametrize(
    ("corruption", "fields"),
    [
        (0.0, {}),
        (0.2, {"max_num_seqs": 1}),
        (
            0.2,
            {"kv_cache_tokens": 96, "max_model_len": 96, "max_num_seqs": 8, "prefill_token_budget": 16},
        ),  # with preemption
        (0.5, {"block_size": 1}),
    ],
)
def test_tokens_are_those_of_plain_decoding(
    folder: Path,
    plain: list[Completion],
    monkeypatch: pytest.MonkeyPatch,
    corruption: float,
    fields: dict[str, object],
) -> None:
    oracle = use_oracle(monkeypatch, plain, corruption)
    shape = DynamicTree(top_k=4, depth=5, num_draft_tokens=15)
    found, stats = anyio.run(run_all, folder, config_of(folder, shape, **fields))
    assert_same(found, plain)
    assert stats.violations == ()
    assert oracle.num_moved > 5
    assert stats.num_draft_rounds == sum(oracle.accepted.values())
    assert stats.num_accepted_tokens == sum(length * times for length, times in oracle.accepted.items())
    assert stats.speculation.multiple_rate > 0.1
    capped = found[6].speculation
    assert capped.num_drafted <= 5 * capped.num_rounds
    if "kv_cache_tokens" in fields:
        assert stats.num_preemptions > 0


class StatefulOracle(EagleDrafter):
    """An EAGLE drafter that drafts the trees of an oracle. Records its output after each step, with the
    request's seed and the number of draft rows."""

    def __init__(self, oracle: TreeOracle, *args: Any) -> None:
        super().__init__(*args)
        self.parts, self.oracle = args[:2], oracle
        self.seen: list[tuple[int, int, torch.Tensor]] = []

    def propose(self, slots: Sequence[Any], limits: Sequence[Any]) -> list[Draft]:
        return self.oracle.propose(slots, limits)

    def draft_extend(self, spans: Sequence[Any], *hidden: Any) -> None:
        super().draft_extend(spans, *hidden)
        for span in spans:
            state = state_of(span.slot)
            self.seen.append((span.slot.sampling.seed, state.num_rows, state.hidden.clone()))


def test_draft_is_extended_by_the_rows_of_the_accepted_path(
    folder: Path, plain: list[Completion], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its output after each round is that of a pass over the whole sequence."""
    oracle = use_oracle(monkeypatch, plain, 0.2)
    drafters: list[StatefulOracle] = []

    def eager_drafter(factory: EagleDrafterFactory, target: Any, limits: Any) -> StatefulOracle:
        drafters.append(StatefulOracle(oracle, factory.draft, target, limits, STATIC))
        return drafters[-1]

    monkeypatch.setattr(EagleDrafterFactory, "eager_drafter", eager_drafter)
    found, _ = anyio.run(run_all, folder, config_of(folder, STATIC), CASES[:4])
    assert_same(found, plain[:4])
    (drafter,) = drafters
    draft, target = drafter.parts
    depth = target.spec.num_layers + draft.num_layers + 1
    for case, completion in zip(CASES[:4], plain, strict=False):
        expected = whole_pass(target, draft, [*case.prompt, *completion.token_ids])
        outputs = [(rows, hidden) for seed, rows, hidden in drafter.seen if seed == case.params.seed]
        assert len(outputs) > 3
        for num_rows, hidden in outputs:
            assert_near(hidden, expected[num_rows - 1], inner=192, depth=depth)


def test_cancelled_requests_do_not_change_the_others(
    folder: Path, plain: list[Completion], monkeypatch: pytest.MonkeyPatch
) -> None:
    use_oracle(monkeypatch, plain, 0.2)

    async def main() -> None:
        async with Engine(folder / "target", config_of(folder, STATIC)) as engine:
            streams = [engine.generate(case.prompt, case.params) for case in CASES]
            async for _ in streams[3]:
                streams[3].cancel()
            others = [await stream for index, stream in enumerate(streams) if index != 3]
            assert_same(others, plain[:3] + plain[4:])
            assert engine.stats().violations == ()

    anyio.run(main)


@pytest.mark.parametrize(
    "shape", slow_after(1, [DynamicTree(top_k=3, depth=4, num_draft_tokens=20), STATIC]), ids=repr
)
def test_trees_of_an_eagle_draft(folder: Path, plain: list[Completion], shape: Any) -> None:
    found, stats = anyio.run(run_all, folder, config_of(folder, shape), CASES[:6])
    assert_same(found, plain[:6])
    assert stats.violations == ()
    assert stats.num_drafted_tokens > 5 * stats.num_draft_rounds > 0


def test_tree_without_branches_is_the_chain_round_for_round(folder: Path, plain: list[Completion]) -> None:
    shapes = [
        Chain(3),
        StaticTree(((0,), (0, 0), (0, 0, 0))),
        DynamicTree(top_k=1, depth=3, num_draft_tokens=3),
    ]
    results = [anyio.run(run_all, folder, config_of(folder, shape), CASES[:4]) for shape in shapes]
    chain = results[0][0]
    assert sum(each.speculation.num_accepted for each in chain) > 0
    for index, (found, _) in enumerate(results):
        assert_same(found, plain[:4])
        assert [each.speculation for each in found] == [each.speculation for each in chain], shapes[index]


def test_constrained_sequences_draft_chains(
    folder: Path, plain: list[Completion], monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = [Case(seed) for seed in range(2)]
    grammar = Regex("[a-f]{5,12}")
    for case in cases:
        case.params = SamplingParams(max_tokens=20, temperature=0.9, seed=case.params.seed, grammar=grammar)
    expected, _ = anyio.run(run_all, folder, config_of(folder), cases)
    oracle = use_oracle(monkeypatch, plain, 0.2)
    for case, completion in zip(cases, expected, strict=True):
        oracle._answers[case.params.seed] = [*case.prompt, *completion.token_ids]
    found, stats = anyio.run(run_all, folder, config_of(folder, STATIC), cases)
    assert_same(found, expected)
    assert stats.violations == () and stats.num_accepted_tokens > 0
    assert stats.num_drafted_tokens <= STATIC.depth * stats.num_draft_rounds


def mask_one_off(slot_rows: Sequence[SlotRows], cache: Any) -> Any:
    """Fault: each node sees the ancestors of the node before it, and itself."""
    return batch_with(slot_rows, cache, lambda tree, node: tree.ancestor_bits[max(node - 1, 0)] | 1 << node)


def wrong_ancestor(slot_rows: Sequence[SlotRows], cache: Any) -> Any:
    """Fault: nodes of depth 2 or more see a sibling of their parent instead of it, if it has any."""

    def bits(tree: TokenTree, node: int) -> int:
        path = tree.path(node)
        siblings = [each for each in tree.children(path[-3]) if each < node] if len(path) > 2 else []
        other = next((each for each in siblings if each != path[-2]), None)
        return tree.ancestor_bits[node] if other is None else tree.ancestor_bits[other] | 1 << node

    return batch_with(slot_rows, cache, bits)


class FaultyTree(TokenTree):
    """A tree whose ancestors are replaced."""

    __slots__ = ()

    def __init__(self, tree: TokenTree, bits: Callable[[TokenTree, int], int]) -> None:
        super().__init__(tree.parents)
        self.ancestor_bits = tuple(bits(tree, node) for node in range(tree.num_nodes))


attention_batch, rewind = eager.attention_batch, eager.rewind


def batch_with(slot_rows: Sequence[SlotRows], cache: Any, bits: Callable[[TokenTree, int], int]) -> Any:
    faulty = [
        rows._replace(draft=Draft(FaultyTree(rows.draft.tree, bits), rows.draft.token_ids))
        for rows in slot_rows
    ]
    return attention_batch(faulty, cache)


def rewind_one_short(slot_rows: Sequence[SlotRows], paths: Sequence[Sequence[int]], cache: Any) -> None:
    """Fault: the last accepted row is not moved."""
    rewind(slot_rows, [path[:-1] for path in paths], cache)


def wrong_sibling(rows: SlotRows, node: int, token_id: int) -> int | None:
    """Fault: the sibling after the child with the token is accepted, if there is one."""
    for child in rows.draft.tree.children(node):
        if rows.draft.token_ids[child - 1] == token_id:
            sibling = rows.draft.tree.next_sibling[child]
            return sibling if sibling >= 0 else child
    return None


FAULTS = {
    "mask": (eager, "attention_batch", mask_one_off, "mask"),
    "ancestor": (eager, "attention_batch", wrong_ancestor, "mask"),
    "rewind": (eager, "rewind", rewind_one_short, "kv"),
    "sibling": (SlotRows, "child_with", wrong_sibling, "acceptance"),
}


@pytest.mark.parametrize("fault", slow_after(1, FAULTS))
def test_planted_fault_changes_tokens_and_is_found_by_the_checks(
    folder: Path, plain: list[Completion], monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    owner, name, function, reason = FAULTS[fault]
    use_oracle(monkeypatch, plain, 0.2)
    monkeypatch.setattr(owner, name, function)
    cases = CASES[:4]
    found, _ = anyio.run(run_all, folder, config_of(folder, STATIC, checks=False), cases)
    assert [each.token_ids for each in found] != [each.token_ids for each in plain[:4]]
    checked, stats = anyio.run(run_all, folder, config_of(folder, STATIC), cases)
    errors = [each for each in checked if isinstance(each, ExecutorError)]
    assert errors and stats.num_failed == len(errors)
    assert dict(stats.violations)[reason] > 0
    for one, other in zip(checked, plain[:4], strict=True):
        assert isinstance(one, ExecutorError) or one.token_ids == other.token_ids


class TokensOutsideTheVocabulary(TreeOracle):
    def _propose(self, slot: Any, limit: Any) -> Draft:
        draft = super()._propose(slot, limit)
        if slot.sampling.seed == 2 and draft.token_ids:
            draft.token_ids[-1] = VOCAB_SIZE
        return draft


class TooManyTokens(TreeOracle):
    def _propose(self, slot: Any, limit: Any) -> Draft:
        more = limit._replace(num_tokens=limit.num_tokens + 1) if slot.sampling.seed == 2 else limit
        return super()._propose(slot, more)


class WrongLinks(TreeOracle):
    def _propose(self, slot: Any, limit: Any) -> Draft:
        draft = super()._propose(slot, limit)
        if slot.sampling.seed != 2 or not draft.token_ids:
            return draft

        tree = TokenTree(draft.tree.parents)
        tree.first_child = tuple(-1 for _ in tree.parents)
        return Draft(tree, draft.token_ids)


@pytest.mark.parametrize(
    ("drafter", "reason"),
    [
        (TokensOutsideTheVocabulary, "draft_tokens"),
        (TooManyTokens, "draft_tokens"),
        (WrongLinks, "draft_tree"),
    ],
)
def test_request_with_wrong_drafts_goes_on_without_drafts(
    folder: Path,
    plain: list[Completion],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    drafter: type[TreeOracle],
    reason: str,
) -> None:
    use_oracle(monkeypatch, plain, 0.0, drafter)
    with caplog.at_level(logging.INFO, logger="drift_sdk"):
        found, stats = anyio.run(run_all, folder, config_of(folder, STATIC), CASES[1:4])
    assert_same(found, plain[1:4])
    ((found_reason, number),) = stats.violations
    assert found_reason == reason
    assert found[1].speculation.num_rounds == 0 < found[0].speculation.num_rounds
    assert stats.num_undrafted_by_checks > 0
    lines = [record.getMessage() for record in caplog.records]
    assert any(f"violation {reason} {number}" in line and "no draft by checks" in line for line in lines)


def test_wrong_block_table_fails_its_request_alone(
    folder: Path, plain: list[Completion], monkeypatch: pytest.MonkeyPatch
) -> None:
    use_oracle(monkeypatch, plain, 0.0)
    propose = eager.EagerExecutor._run_round

    def cut(executor: Any, *arguments: Any) -> Any:
        outputs = propose(executor, *arguments)
        for slot in executor._slots.values():
            if slot.sampling.seed == 2:
                slot.block_table[-1] = slot.block_table[0]
        return outputs

    monkeypatch.setattr(eager.EagerExecutor, "_run_round", cut)
    found, stats = anyio.run(run_all, folder, config_of(folder, STATIC), CASES[1:4])
    assert isinstance(found[1], ExecutorError) and "block table" in str(found[1])
    assert_same([found[0], found[2]], [plain[1], plain[3]])
    assert dict(stats.violations)["block_table"] > 0
