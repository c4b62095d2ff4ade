"""The graph executor with models of the kinds of Gemma 4 against the eager executor: heads of two sizes, keys
that are values, layers that read the keys of others, inputs of layers, experts beside an MLP, and drafts of
an assistant."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import steady_dots
import torch
from drawn_decoder import drawn_decoder
from interpreted_device import InterpretedDevice
from msgspec.structs import replace
from scheduled_run import run_scheduled, sampling_of
from slow_cases import slow_after, slow_rows_after
from tolerances import bound

from drift_sdk._kernels.draft.draft_rows import keep_last_rows
from drift_sdk._kernels.gemm.tuning import TunedTable, WatchedTable, read_products
from drift_sdk.execution.drafter_factory import (
    AssistantDrafterFactory,
    DrafterFactory,
    HybridDrafterFactory,
    NGramDrafterFactory,
)
from drift_sdk.execution.eager.drafters import AssistantDrafter
from drift_sdk.execution.eager.eager_executor import EagerExecutor
from drift_sdk.execution.forward.kernel_weights import arrange_decoder
from drift_sdk.execution.forward.rows import Rows
from drift_sdk.execution.graph.gpu_graphs import GraphOptions
from drift_sdk.execution.graph.graph_executor import GraphExecutor
from drift_sdk.execution.rounds.drafters import AssistantRoundDrafter, VerifiedRows
from drift_sdk.families import read_spec
from drift_sdk.models import assistant
from drift_sdk.models.assistant import AssistantConfig, AssistantDecoder
from drift_sdk.models.decoder import Decoder
from drift_sdk.models.kv_cache import KVScales, kv_heads
from drift_sdk.speculation import NGram
from drift_sdk.startup.graph_startup import weights_to_tune
from drift_sdk.steps import ExecutorLimits, SlotOutput, SlotSampling
from drift_sdk.trees import Draft

pytestmark = pytest.mark.kernel

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
COMMON: dict[str, Any] = {
    "model_type": "gemma4_text",
    "vocab_size": 120,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "sliding_window": 9,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "global_head_dim": 16,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 5.0,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}
KINDS = {
    "12B and 31B": COMMON,
    "26B": COMMON
    | {
        "enable_moe_block": True,
        "num_experts": 6,
        "top_k_experts": 2,
        "moe_intermediate_size": 12,
        "num_key_value_heads": 1,
    },
    "E2B and E4B": COMMON
    | {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "attention_k_eq_v": False,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 6,
        "vocab_size_per_layer_input": 120,
    },
    "wide heads": COMMON | {"num_key_value_heads": 4, "global_head_dim": 264},
}
LIMITS = ExecutorLimits(vocab_size=120, max_num_seqs=3, max_model_len=72, num_blocks=32, block_size=8)
BUDGET = 24
NO_TABLE = TunedTable()
LOGPROB_BOUND = bound(16.0, inner=280, depth=12)

Request = tuple[list[int], SlotSampling]


def requests_of(num_tokens: int) -> list[Request]:
    """Prompts shorter and longer than the window and than a step; three begin alike, one repeats itself."""
    rng = random.Random(5)

    def tokens(number: int) -> list[int]:
        return [rng.randrange(3, 120) for _ in range(number)]

    shared = tokens(19)
    prompts = [[*shared, *tokens(8)], tokens(1), [*shared, *tokens(3)], tokens(4) * 4, [*shared, *tokens(30)]]
    return [(prompt, sampling_of(len(prompt), num_tokens, num_logprobs=1)) for prompt in prompts]


def run(
    executor: EagerExecutor | GraphExecutor, requests: list[Request], *, num_drafts: int = 0
) -> tuple[list[list[int]], list[SlotOutput]]:
    outputs: list[SlotOutput] = []
    tokens = run_scheduled(
        executor,
        requests,
        prefill_token_budget=BUDGET,
        draft_choices=(0, num_drafts) if num_drafts else (),
        wants_history=num_drafts > 0,
        on_step=lambda plan, result: outputs.extend([*result.prefill, *result.decode]),
    )
    executor.close()
    return tokens, outputs


def graph_executor(
    decoder: Decoder, num_drafts: int = 0, table: TunedTable = NO_TABLE, **options: bool
) -> GraphExecutor:
    found = GraphOptions(prefill_token_budget=BUDGET, **options)
    factory = {}
    if num_drafts:
        factory = {"drafter_factory": NGramDrafterFactory(NGram(min_length=1), (num_drafts,))}
    return GraphExecutor(InterpretedDevice(), decoder, LIMITS, table, found, **factory)


def decoder_of(kind: str, *, has_e4m3: bool = False) -> Decoder:
    """has_e4m3: with a KV cache of e4m3, whose scales differ between layers and heads."""
    decoder = drawn_decoder(read_spec(KINDS[kind]), DEVICE, seed=3)
    if has_e4m3:
        sizes = decoder.spec.num_layers, max(kv_heads(decoder.spec).values())
        count = torch.arange(sizes[0] * sizes[1], device=DEVICE).view(sizes)
        scales = KVScales(0.01 * (1 + count / 7), 0.013 * (1 + count / 5))
        decoder.weights = dataclasses.replace(decoder.weights, kv_scales=scales)
    return decoder


@pytest.mark.skipif(DEVICE == "cuda", reason="for the interpreter: kernels run on the CPU")
@pytest.mark.parametrize(
    ("kind", "fast_prompts"),
    slow_rows_after(
        1,
        [
            (kind, is_fast)
            for is_fast in (False, True)
            for kind in ("E2B and E4B", "12B and 31B", "26B", "wide heads")
        ],
    ),
)
def test_steps_equal_those_of_the_eager_executor(kind: str, fast_prompts: bool) -> None:
    decoder, requests = decoder_of(kind), requests_of(3)
    expected_tokens, expected = run(EagerExecutor(decoder, LIMITS), requests)
    arrange_decoder(decoder)
    table = WatchedTable(element_bytes=4)
    executor = graph_executor(decoder, table=table, fast_prompts=fast_prompts)
    mixed = executor._graphs.mixed.values()
    tokens, found = run(executor, requests)
    assert tokens == expected_tokens
    assert sum(replay.num_launches for replay in mixed) > 0
    assert table.used == {weight.key for weight in weights_to_tune(decoder.weights, None)}
    for output, other in zip(found, expected, strict=True):
        assert output.token_ids == other.token_ids
        for entry, wanted in zip(output.logprobs or (), other.logprobs or (), strict=True):
            assert entry.logprob == pytest.approx(wanted.logprob, abs=LOGPROB_BOUND)


@pytest.mark.skipif(DEVICE == "cuda", reason="for the interpreter: kernels run on the CPU")
@pytest.mark.parametrize("kind", slow_after(0, KINDS))
def test_rejected_drafts_change_no_token(kind: str) -> None:
    decoder, requests = decoder_of(kind), requests_of(8)
    expected, _ = run(EagerExecutor(decoder, LIMITS), requests)
    tokens, outputs = run(graph_executor(decoder, 2), requests, num_drafts=2)
    assert tokens == expected
    drafted, accepted = (
        sum(getattr(each, name) for each in outputs) for name in ("num_drafted", "num_accepted")
    )
    assert 0 < accepted < drafted


@pytest.mark.usefixtures("steady_dots")
@pytest.mark.skipif(DEVICE == "cuda", reason="for the interpreter: kernels run on the CPU")
@pytest.mark.parametrize("num_drafts", slow_after(1, [0, 2]))
def test_steps_that_no_prompt_ends_in_leave_out_layers_without_keys(num_drafts: int) -> None:
    """With the bits of steps that do not, also behind prefix hits. None is left out if rows are read."""
    decoder, (long, sampling) = decoder_of("E2B and E4B"), requests_of(2)[4]
    asking = sampling_of(len(long), 2, num_logprobs=1, num_prompt_logprobs=1)
    results, counts = [], []
    twice, once = [(long, sampling)] * 2, [(long, asking)]
    for case, is_cut in ((twice, True), (twice, False), (once, True)):
        executor = graph_executor(decoder, num_drafts)
        graphs = executor._graphs
        ((size, inner),) = graphs.inner.items()
        assert size == max(graphs.prefill)
        if not is_cut:
            graphs.inner.clear()
        results.append(run(executor, case, num_drafts=num_drafts))
        counts.append(inner.num_launches)
    assert results[0] == results[1]
    assert counts[0] > 0 and counts[1:] == [0, 0]
    assert results[2][0][0] == results[0][0][0]


@pytest.mark.skipif(DEVICE == "cuda", reason="for the interpreter: kernels run on the CPU")
def test_models_whose_layers_all_keep_keys_have_no_shorter_steps() -> None:
    executor = graph_executor(decoder_of("12B and 31B"))
    assert not executor._graphs.inner
    executor.close()


@pytest.mark.usefixtures("steady_dots")
@pytest.mark.skipif(DEVICE == "cuda", reason="for the interpreter: kernels run on the CPU")
@pytest.mark.parametrize("kind", slow_after(1, KINDS))
def test_tokens_have_the_bits_that_they_have_alone(kind: str) -> None:
    """Beside other rows, behind prefix hits, in other chunks, and verified with drafts."""
    assert_bits(decoder_of(kind))


def assert_bits(decoder: Decoder) -> None:
    requests = requests_of(5)
    alone = Counter(
        each for request in requests for each in scored(run(graph_executor(decoder), [request])[1])
    )
    assert alone.total() == 5 * len(requests)
    assert Counter(scored(run(graph_executor(decoder), requests)[1])) == alone
    _, outputs = run(graph_executor(decoder, 2), requests, num_drafts=2)
    assert Counter(scored(outputs)) == alone
    assert sum(each.num_accepted for each in outputs) > 0


@pytest.mark.skipif(DEVICE == "cuda", reason="for the interpreter: kernels run on the CPU")
@pytest.mark.parametrize("kind", slow_after(1, ["wide heads", "12B and 31B", "E2B and E4B"]))
def test_steps_with_a_cache_of_e4m3_are_near_those_of_the_eager_executor(kind: str) -> None:
    """A key that lies between two codes may be rounded to either: sums differ in the last bits."""
    decoder, requests = decoder_of(kind, has_e4m3=True), requests_of(3)
    expected_tokens, expected = run(EagerExecutor(decoder, LIMITS), requests)
    tokens, found = run(graph_executor(decoder), requests)
    assert tokens == expected_tokens
    _, rounded = run(EagerExecutor(decoder_of(kind), LIMITS), requests)
    assert scored(rounded) != scored(expected)
    for output, other in zip(found, expected, strict=True):
        for entry, wanted in zip(output.logprobs or (), other.logprobs or (), strict=True):
            assert entry.logprob == pytest.approx(wanted.logprob, abs=0.01)


@pytest.mark.skipif(DEVICE == "cuda", reason="for the interpreter: kernels run on the CPU")
@pytest.mark.parametrize("kind", slow_after(0, KINDS))
def test_tokens_with_a_cache_of_e4m3_have_the_bits_that_they_have_alone(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside other rows, behind prefix hits, in other chunks, and verified with drafts."""
    steady_dots.install(monkeypatch, is_chained=True)
    assert_bits(decoder_of(kind, has_e4m3=True))


def scored(outputs: list[SlotOutput]) -> list[tuple[int, float]]:
    """All tokens, with their log-probabilities."""
    return [(entry.token_id, entry.logprob) for each in outputs for entry in each.logprobs or ()]


NUM_DRAFTS, WINDOW_BLOCKS = 3, 16
TYPES = ["sliding_attention", "full_attention"]
Drafts: TypeAlias = Counter[tuple[int, int, tuple[int, ...]]]
"""Position of the newest token, this token, and the drafts behind it."""


@torch.inference_mode()
def assistant_of(target: Decoder, kind: str, *, num_clusters: int = 0) -> AssistantDecoder:
    """A random assistant that is sometimes right: its stream begins with the target's embedding."""
    absent = {"enable_moe_block": False, "use_double_wide_mlp": False, "hidden_size_per_layer_input": 0}
    layers = {
        "num_hidden_layers": 2,
        "layer_types": TYPES,
        "num_kv_shared_layers": 2,
        "num_attention_heads": 8,
    }
    text = KINDS[kind] | absent | layers
    settings = {
        "model_type": "gemma4_assistant",
        "backbone_hidden_size": target.spec.hidden_size,
        "text_config": text,
        "use_ordered_embeddings": num_clusters > 0,
        "num_centroids": num_clusters,
        "centroid_intermediate_top_k": max(num_clusters // 4, 1),
    }
    draft = AssistantDecoder.random(AssistantConfig.from_hf(settings, target.spec), target, seed=2)
    draft.weights.pre[:, : target.spec.hidden_size] += torch.eye(target.spec.hidden_size)
    draft.weights.head.copy_(target.weights.embedding)
    return draft


def run_assistant(
    executor: EagerExecutor | GraphExecutor, requests: list[Request], window: int = 0
) -> tuple[list[list[int]], list[SlotOutput]]:
    outputs: list[SlotOutput] = []
    tokens = run_scheduled(
        executor,
        requests,
        prefill_token_budget=BUDGET,
        draft_choices=(0, NUM_DRAFTS),
        wants_history=True,
        window=window,
        on_step=lambda plan, result: outputs.extend([*result.prefill, *result.decode]),
    )
    executor.close()
    return tokens, outputs


def eager_assistant(
    decoder: Decoder, factory: DrafterFactory, limits: ExecutorLimits = LIMITS
) -> EagerExecutor:
    return EagerExecutor(decoder, limits, factory.eager_drafter(decoder, limits))


def graph_assistant(
    decoder: Decoder,
    factory: DrafterFactory,
    limits: ExecutorLimits = LIMITS,
    table: TunedTable = NO_TABLE,
    shape_log: Path | None = None,
) -> GraphExecutor:
    options = GraphOptions(prefill_token_budget=BUDGET, shape_log=shape_log)
    return GraphExecutor(InterpretedDevice(), decoder, limits, table, options, drafter_factory=factory)


class Oracle:
    """Takes the place of what was drafted, which is recorded: the first drafts are right, as many as the
    position says, and the others wrong.

    answers: by seed, all tokens of a request; None: the drafts remain.
    """

    def __init__(self) -> None:
        self.answers: list[list[int]] | None = None
        self.drafts: Drafts = Counter()

    def __call__(self, seed: int, position: int, token: int, drafts: Sequence[int]) -> list[int]:
        """The drafts that are verified."""
        self.drafts[position, token, tuple(drafts)] += 1
        if self.answers is None:
            return list(drafts)

        right = [*self.answers[seed], *[0] * NUM_DRAFTS][position + 1 : position + 1 + len(drafts)]
        num_right = position % (NUM_DRAFTS + 1)
        return [each if index < num_right else (each + 1) % 120 for index, each in enumerate(right)]


@pytest.fixture
def eager_oracle(monkeypatch: pytest.MonkeyPatch) -> Oracle:
    """Of assistants on the eager executor."""
    oracle, propose = Oracle(), AssistantDrafter.propose

    def watched(self: AssistantDrafter, slots: Any, limits: Any) -> list[Draft]:
        drafts = propose(self, slots, limits)
        return [
            Draft.chain(oracle(slot.sampling.seed, slot.length - 1, slot.last_token, draft.token_ids))
            if draft.token_ids
            else draft
            for slot, draft in zip(slots, drafts, strict=True)
        ]

    monkeypatch.setattr(AssistantDrafter, "propose", watched)
    return oracle


@pytest.fixture
def graph_oracle(monkeypatch: pytest.MonkeyPatch) -> Oracle:
    """Of assistants on the graph executor, which are watched not to write to the cache."""
    oracle, propose = Oracle(), AssistantRoundDrafter.propose

    def watched(self: AssistantRoundDrafter, rows: Rows, *, num_slots: int, num_draft_tokens: int) -> None:
        groups = self._model.cache.groups
        before = [each.keys.clone() for each in groups]
        propose(self, rows, num_slots=num_slots, num_draft_tokens=num_draft_tokens)
        for one, other in zip(before, groups, strict=True):
            assert torch.equal(one.view(torch.int32), other.keys.view(torch.int32))
        slots, positions, tokens = (
            each.view(num_slots, -1) for each in (rows.slot, rows.position, rows.token)
        )
        for slot, position, token in zip(slots.tolist(), positions.tolist(), tokens, strict=True):
            number = sum(each >= 0 for each in slot[1:])
            if number:
                seed = int(self._table.columns.seed[slot[0]])
                newest, *drafts = token[: 1 + number].tolist()
                token[1 : 1 + number] = torch.tensor(oracle(seed, position[0], newest, drafts))

    monkeypatch.setattr(AssistantRoundDrafter, "propose", watched)
    return oracle


def seeded(requests: list[Request]) -> list[Request]:
    """The requests, with their numbers as seeds."""
    return [(prompt, replace(sampling, seed=index)) for index, (prompt, sampling) in enumerate(requests)]


def drafts_of_both(
    kind: str,
    eager: Oracle,
    graph: Oracle,
    *,
    num_clusters: int,
    window_blocks: int,
    is_oracle: bool,
    shape_log: Path | None = None,
) -> list[SlotOutput]:
    """Run requests without drafts, and with an assistant on both executors: the tokens are the same. Returns
    the outputs of the graph executor."""
    decoder, requests = decoder_of(kind), seeded(requests_of(10))
    expected, _ = run(EagerExecutor(decoder, LIMITS), requests)
    if is_oracle:
        eager.answers = graph.answers = [
            [*prompt, *tokens] for (prompt, _), tokens in zip(requests, expected, strict=True)
        ]
    factory = AssistantDrafterFactory(assistant_of(decoder, kind, num_clusters=num_clusters), (NUM_DRAFTS,))
    limits = replace(LIMITS, num_window_blocks=window_blocks)
    window = KINDS[kind]["sliding_window"] + 63 if window_blocks else 0
    tokens, _ = run_assistant(eager_assistant(decoder, factory, limits), requests, window)
    assert tokens == expected
    arrange_decoder(decoder, factory.draft)
    table = WatchedTable(element_bytes=4)
    executor = graph_assistant(decoder, factory, limits, table, shape_log)
    tokens, found = run_assistant(executor, requests, window)
    assert tokens == expected
    assert table.used == {weight.key for weight in weights_to_tune(decoder.weights, factory.draft.weights)}
    return found


@pytest.mark.skipif(DEVICE == "cuda", reason="for the interpreter: kernels run on the CPU")
@pytest.mark.parametrize(
    ("kind", "num_clusters", "window_blocks", "is_oracle"),
    slow_rows_after(
        1,
        [
            ("12B and 31B", 20, WINDOW_BLOCKS, True),
            ("wide heads", 0, 0, True),
            ("12B and 31B", 0, 0, False),
            ("E2B and E4B", 20, WINDOW_BLOCKS, False),
            ("26B", 0, 0, True),
            ("wide heads", 0, WINDOW_BLOCKS, False),
        ],
    ),
)
def test_assistants_draft_as_on_the_eager_executor(
    kind: str,
    num_clusters: int,
    window_blocks: int,
    is_oracle: bool,
    eager_oracle: Oracle,
    graph_oracle: Oracle,
    tmp_path: Path,
) -> None:
    """In requests that share beginnings, with chunks of prompts, more requests than slots, and drafts that
    are accepted and rejected; with those of an oracle, every number of them."""
    shape_log = None if kind == "26B" else tmp_path / "shapes.json"  # products of experts are not logged
    found = drafts_of_both(
        kind,
        eager_oracle,
        graph_oracle,
        num_clusters=num_clusters,
        window_blocks=window_blocks,
        is_oracle=is_oracle,
        shape_log=shape_log,
    )
    if shape_log is not None:
        check_log(shape_log, has_clusters=num_clusters > 0)
    assert graph_oracle.drafts == eager_oracle.drafts
    assert graph_oracle.drafts.total() > 10
    drafted, accepted = (
        sum(getattr(each, name) for each in found) for name in ("num_drafted", "num_accepted")
    )
    assert 0 < accepted < drafted
    if is_oracle:
        counts = {each.num_accepted for each in found if each.num_drafted == NUM_DRAFTS}
        assert counts == set(range(NUM_DRAFTS + 1))


def check_log(file: Path, *, has_clusters: bool) -> None:
    """What was logged are the products that ran: for each draft all weights of an assistant of two layers,
    but that of the next feature for the last draft of a round."""
    counts = Counter[str]()
    for product, number in read_products(file).items():
        counts[product.role.removeprefix("draft ")] += number * product.role.startswith("draft ")
    num_drafts = counts["head"]
    assert counts["post"] * NUM_DRAFTS == num_drafts * (NUM_DRAFTS - 1) > 0
    assert counts["pre"] == num_drafts and counts["centroids"] == num_drafts * has_clusters
    for role in ("qkv", "output", "gate_up", "down"):
        assert counts[role] == 2 * num_drafts


def row_of_rejected(self: AssistantRoundDrafter, verified: VerifiedRows) -> None:
    """Fault: the last row of a round is kept, whether it was accepted or not."""
    keep_last_rows(verified.rows.slot, verified.hidden.final, self._streams)


def position_before(self: AssistantRoundDrafter, *arguments: Any) -> Rows:
    """Fault: queries stand at the position before the newest token's."""
    newest = NEWEST_ROWS(self, *arguments)
    newest.position.sub_(1)
    return newest


def first_layer_of_a_type(*arguments: Any) -> tuple[int, Any]:
    """Fault: keys of another layer, the only other one of its heads."""
    index, mixer = KEPT_LAYER(*arguments)
    return max(index - 2, 0) if mixer.window is not None else index, mixer


NEWEST_ROWS, KEPT_LAYER = AssistantRoundDrafter._newest_rows, assistant._kept_layer


@pytest.mark.slow
@pytest.mark.skipif(DEVICE == "cuda", reason="for the interpreter: kernels run on the CPU")
@pytest.mark.parametrize(
    ("name", "fault"), [("draft_extend", row_of_rejected), ("_newest_rows", position_before)]
)
def test_planted_faults_in_assistants_are_found(
    name: str,
    fault: Any,
    eager_oracle: Oracle,
    graph_oracle: Oracle,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Which do not change tokens."""
    monkeypatch.setattr(AssistantRoundDrafter, name, fault)
    drafts_of_both("12B and 31B", eager_oracle, graph_oracle, num_clusters=0, window_blocks=0, is_oracle=True)
    assert graph_oracle.drafts.total() == eager_oracle.drafts.total() > 10
    assert graph_oracle.drafts != eager_oracle.drafts


@pytest.mark.slow
@pytest.mark.skipif(DEVICE == "cuda", reason="for the interpreter: kernels run on the CPU")
def test_keys_of_another_layer_are_found(
    eager_oracle: Oracle, graph_oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In drafts of graphs, with a model of two layers of each type."""
    monkeypatch.setitem(KINDS, "deep", COMMON | {"num_hidden_layers": 4, "layer_types": TYPES * 2})
    decoder, requests = decoder_of("deep"), requests_of(4)
    right = AssistantDrafterFactory(assistant_of(decoder, "deep"), (NUM_DRAFTS,))
    expected, _ = run_assistant(eager_assistant(decoder, right), requests)
    monkeypatch.setattr(assistant, "_kept_layer", first_layer_of_a_type)
    wrong = AssistantDrafterFactory(assistant_of(decoder, "deep"), (NUM_DRAFTS,))
    arrange_decoder(decoder, wrong.draft)
    tokens, _ = run_assistant(graph_assistant(decoder, wrong), requests)
    assert tokens == expected
    assert graph_oracle.drafts != eager_oracle.drafts


@pytest.mark.slow
@pytest.mark.usefixtures("steady_dots")
@pytest.mark.skipif(DEVICE == "cuda", reason="for the interpreter: kernels run on the CPU")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("has_ngrams", [False, True])
def test_assistants_change_no_bit(kind: str, has_ngrams: bool) -> None:
    """Of log-probabilities, alone without drafts and together with them; also with n-grams beside them."""
    decoder, requests = decoder_of(kind), requests_of(5)
    alone = Counter(
        each for request in requests for each in scored(run(graph_executor(decoder), [request])[1])
    )
    factory: DrafterFactory = AssistantDrafterFactory(assistant_of(decoder, kind), (NUM_DRAFTS,))
    if has_ngrams:
        factory = HybridDrafterFactory(factory, NGram(min_length=1))
    _, outputs = run_assistant(graph_assistant(decoder, factory), requests)
    assert Counter(scored(outputs)) == alone
    accepted, drafted = (
        sum(getattr(each, f"num_{name}") for each in outputs) for name in ("accepted", "drafted")
    )
    assert 0 < accepted < drafted
