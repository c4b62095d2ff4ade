"""Layers that attend to the keys of earlier ones compute the rows of prompts that are read, with the tokens,
log-probabilities and hidden states that all rows give."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch
from drawn_decoder import drawn_decoder
from scheduled_run import run_scheduled, sampling_of
from slow_cases import slow_after
from tolerances import assert_near
from torch.utils.flop_counter import FlopCounterMode

from drift_sdk.execution.eager.drafters import Drafter, ModelDrafter, NGramDrafter
from drift_sdk.execution.eager.eager_executor import EagerExecutor
from drift_sdk.families import read_spec
from drift_sdk.models.attention import AttentionBatch, LastRows, SequenceRows
from drift_sdk.models.decoder import Decoder
from drift_sdk.models.weights import LayerWeights
from drift_sdk.spec.model import ModelSpec
from drift_sdk.steps import ExecutorLimits, PrefillChunk, SlotOutput

CONFIG: dict[str, Any] = {
    "model_type": "gemma4_text",
    "vocab_size": 120,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 5,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"] + ["full_attention"] * 2,
    "sliding_window": 9,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "global_head_dim": 16,
    "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 6,
    "vocab_size_per_layer_input": 120,
    "max_position_embeddings": 256,
}
FIRST_READER = 2
LIMITS = ExecutorLimits(vocab_size=120, max_num_seqs=3, max_model_len=72, num_blocks=32, block_size=8)
BUDGET = 24
NUM_TOKENS = 4


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return drawn_decoder(read_spec(CONFIG), "cpu", seed=3)


def prompts() -> list[list[int]]:
    """Longer and shorter than the window and than a step; three begin alike."""
    rng = random.Random(5)

    def tokens(number: int) -> list[int]:
        return [rng.randrange(3, 120) for _ in range(number)]

    shared = tokens(19)
    return [[*shared, *tokens(8)], tokens(1), [*shared, *tokens(3)], tokens(4) * 4, [*shared, *tokens(30)]]


class Run:
    """Requests that an executor has run: their tokens, outputs and chunks, and the multiply-adds of products
    with weights."""

    def __init__(
        self,
        executor: EagerExecutor,
        asking: Sequence[int] = range(5),
        *,
        num_drafts: int = 0,
        **sampling: Any,
    ) -> None:
        """asking: the requests with the parameters `sampling`."""
        self.outputs: list[SlotOutput] = []
        self.chunks: list[PrefillChunk] = []
        requests = []
        for index, prompt in enumerate(prompts()):
            own = sampling if index in asking else {}
            requests.append((prompt, sampling_of(len(prompt), NUM_TOKENS, num_logprobs=1, **own)))

        def note(plan: Any, result: Any) -> None:
            self.chunks += plan.prefill
            self.outputs += [*result.prefill, *result.decode]

        with FlopCounterMode(display=False) as counter:
            self.tokens = run_scheduled(
                executor,
                requests,
                prefill_token_budget=BUDGET,
                draft_choices=(0, num_drafts) if num_drafts else (),
                has_draft_kv=num_drafts > 0,
                wants_history=num_drafts > 0,
                on_step=note,
            )
        counts = counter.get_flop_counts()["Global"]
        self.num_products = sum(counts.get(op, 0) for op in (torch.ops.aten.mm, torch.ops.aten.addmm)) // 2
        executor.close()

    @property
    def num_unread(self) -> int:
        """Rows of prompts whose output is not read."""
        return sum(len(chunk.token_ids) - chunk.is_last for chunk in self.chunks)


def weights_of(layers: Iterable[LayerWeights]) -> int:
    """Numbers of all matrices of layers."""
    matrices = [
        matrix
        for layer in layers
        for matrix in (
            *layer.mixer.matrices.values(),
            layer.channel.gate_up,
            layer.channel.down,
            *(() if layer.input is None else (layer.input.gate, layer.input.projection)),
        )
    ]
    return sum(rows * columns for rows, columns in (matrix.shape for matrix in matrices))


def compute_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelSpec, "first_reader", property(lambda spec: spec.num_layers))


def test_multiply_adds_of_rows_that_are_not_read_are_saved(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than half of those of prompts: the layers have wider MLPs."""
    assert decoder.spec.first_reader == FIRST_READER
    found = Run(EagerExecutor(decoder, LIMITS))
    compute_all(monkeypatch)
    expected = Run(EagerExecutor(decoder, LIMITS))
    assert found.tokens == expected.tokens
    assert found.chunks == expected.chunks and any(not chunk.is_last for chunk in found.chunks)
    assert len({token for tokens in found.tokens for token in tokens}) > 5
    readers = weights_of(decoder.weights.layers[FIRST_READER:])
    assert expected.num_products - found.num_products == found.num_unread * readers > 0
    assert readers > 0.6 * weights_of(decoder.weights.layers)
    for output, other in zip(found.outputs, expected.outputs, strict=True):
        for entry, wanted in zip(output.logprobs or (), other.logprobs or (), strict=True):
            assert entry.logprob == pytest.approx(wanted.logprob, abs=1e-4)


@pytest.mark.parametrize(
    "asked",
    slow_after(1, [{"prompt_states": "mean"}, {"num_prompt_logprobs": 1}, {"prompt_states": "all"}]),
    ids=str,
)
def test_all_rows_are_computed_for_requests_that_ask_for_them(
    asked: dict[str, Any], decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Run(EagerExecutor(decoder, LIMITS), **asked)
    compute_all(monkeypatch)
    expected = Run(EagerExecutor(decoder, LIMITS), **asked)
    assert found.num_products == expected.num_products
    assert found.outputs == expected.outputs


def test_requests_that_ask_for_all_rows_are_computed_beside_others(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some chunks of a step have all of their rows, others the last one or none."""
    asking = (0, 3)
    found = Run(EagerExecutor(decoder, LIMITS), asking, num_prompt_logprobs=1)
    compute_all(monkeypatch)
    expected = Run(EagerExecutor(decoder, LIMITS), asking, num_prompt_logprobs=1)
    assert found.tokens == expected.tokens and found.num_products < expected.num_products
    pairs = [
        (one.prompt_logprobs, other.prompt_logprobs)
        for one, other in zip(found.outputs, expected.outputs, strict=True)
        if other.prompt_logprobs is not None
    ]
    assert len(pairs) == len(asking)
    for one, other in pairs:
        assert one is not None and other is not None and len(one) == len(other) > 10
        for entry, wanted in zip(one, other, strict=True):
            assert entry.logprob == pytest.approx(wanted.logprob, abs=1e-4)


def test_the_last_hidden_state_needs_no_other_rows(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    found = Run(EagerExecutor(decoder, LIMITS), prompt_states="last")
    compute_all(monkeypatch)
    expected = Run(EagerExecutor(decoder, LIMITS), prompt_states="last")
    assert found.num_products < expected.num_products
    states = [
        [torch.frombuffer(bytearray(each.prompt_states.data), dtype=torch.float32) for each in run.outputs
         if each.prompt_states is not None]
        for run in (found, expected)
    ]  # fmt: skip
    assert len(states[0]) == len(prompts())
    for one, other in zip(*states, strict=True):
        assert_near(one, other, inner=80, depth=6)


class ReadingDrafter:
    """n-grams, by a drafter that is not known to read tokens alone."""

    aux_layers = ()
    max_tree_rows = 0

    def __init__(self) -> None:
        self.num_rows = 0
        self._ngrams = NGramDrafter(1, 4)
        self.enter, self.propose = self._ngrams.enter, self._ngrams.propose

    def draft_extend(self, spans: Any, aux_hidden: Any, hidden: torch.Tensor) -> None:
        self.num_rows += len(hidden)
        self._ngrams.draft_extend(spans, aux_hidden, hidden)


def test_drafters_get_all_rows_unless_they_read_tokens_alone(decoder: Decoder) -> None:
    plain = Run(EagerExecutor(decoder, LIMITS))
    reading = ReadingDrafter()
    drafters: tuple[Drafter, ...] = (NGramDrafter(1, 4), reading)
    found = [Run(EagerExecutor(decoder, LIMITS, drafter), num_drafts=2) for drafter in drafters]
    assert [run.tokens for run in found] == [plain.tokens] * 2
    assert sum(output.num_accepted for output in found[0].outputs) > 0
    num_drafted = sum(output.num_drafted for output in found[1].outputs)
    num_decoded = sum(len(tokens) for tokens in plain.tokens) - len(plain.tokens)
    num_prompt_rows = sum(len(chunk.token_ids) for chunk in found[1].chunks)
    assert num_prompt_rows < reading.num_rows <= num_prompt_rows + num_decoded + num_drafted
    assert found[1].num_products > found[0].num_products


@pytest.mark.slow
def test_a_small_model_computes_its_last_rows_alone(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft of the same family."""

    def drafter() -> Drafter:
        return ModelDrafter(decoder, LIMITS)

    plain = Run(EagerExecutor(decoder, LIMITS))
    found = Run(EagerExecutor(decoder, LIMITS, drafter()), num_drafts=2)
    rows: list[int] = []
    usual = LastRows.of

    def noting(sequences: Any, numbers: Any) -> LastRows:
        rows.append(sum(each.num_rows for each in sequences) - sum(numbers))
        return usual(sequences, numbers)

    monkeypatch.setattr(LastRows, "of", noting)
    assert Run(EagerExecutor(decoder, LIMITS, drafter()), num_drafts=2).tokens == plain.tokens
    assert sum(rows) > 0
    compute_all(monkeypatch)
    expected = Run(EagerExecutor(decoder, LIMITS, drafter()), num_drafts=2)
    assert found.tokens == expected.tokens == plain.tokens
    assert found.num_products < expected.num_products
    assert sum(output.num_accepted for output in found.outputs) > 0


@pytest.mark.parametrize("numbers", [(3, 0), (0, 1), (0, 0), (17, 5), (1, 5)], ids=str)
@torch.inference_mode()
def test_a_pass_returns_the_rows_that_are_wanted(numbers: tuple[int, int], decoder: Decoder) -> None:
    """Behind cached tokens of a sequence, and with the keys that all rows write."""
    generator = torch.Generator().manual_seed(1)
    token_ids = torch.randint(0, 120, (34,), generator=generator)
    found = []
    for is_cut in (True, False):
        cache = decoder.empty_kv_cache(16, 8)
        for tensor in cache.tensors:
            tensor.fill_(torch.nan)
        before = [SequenceRows([4, 2, 9, 1], 0, 12)]
        decoder.forward(token_ids[:12], AttentionBatch(before, cache), cache)
        rows = [SequenceRows([4, 2, 9, 1], 12, 17), SequenceRows([7], 0, 5)]
        last = LastRows.of(rows, numbers)
        given = last if is_cut else None
        hidden, _ = decoder.forward(token_ids[12:], AttentionBatch(rows, cache), cache, last=given)
        found.append((hidden if is_cut else hidden[last.index], [*cache.tensors]))
    (one, keys), (other, other_keys) = found
    assert one.shape == (sum(numbers), 32)
    assert one.isfinite().all()
    assert_near(one, other, inner=80, depth=6)
    assert all(
        torch.equal(
            *pair,
        )
        for pair in zip(map(filled, keys), map(filled, other_keys), strict=True)
    )


def filled(keys: torch.Tensor) -> torch.Tensor:
    """Keys or values without NaN."""
    return keys.nan_to_num(nan=7.0)


def test_models_whose_layers_keep_all_keys_return_the_rows_too() -> None:
    spec = read_spec(CONFIG | {"num_kv_shared_layers": 0})
    assert spec.first_reader == spec.num_layers
    decoder, token_ids = drawn_decoder(spec, "cpu", seed=3), torch.arange(10)
    cache = decoder.empty_kv_cache(4, 8)
    rows = [SequenceRows([1, 2], 0, 10)]
    batch, last = AttentionBatch(rows, cache), LastRows.of(rows, [2])
    expected, _ = decoder.forward(token_ids, batch, cache)
    found, (aux,) = decoder.forward(token_ids, batch, cache, (spec.num_layers,), last=last)
    assert torch.equal(found, expected[-2:]) and torch.equal(aux, expected)
    with pytest.raises(ValueError, match=r"aux_layers=\[3\]: expected each from 0 to 2"):
        shared = drawn_decoder(read_spec(CONFIG), "cpu", seed=3)
        shared.forward(token_ids, batch, shared.empty_kv_cache(4, 8), (3,), last=last)
