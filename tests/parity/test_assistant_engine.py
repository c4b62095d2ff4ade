"""Requests that the assistant of a Gemma 4 model drafts for: they have the tokens that they have alone and
without drafts, and every draft begins with the assistant's output over the whole sequence at once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import pytest
import torch
import transformers
from assistant_zoo import make_assistant, make_often_right
from draft_pass import assistant_pass
from hybrid_requests import VARIANTS, VOCAB_SIZE, Case, config_of, draw_cases, run_all, run_alone, tokens_of
from model_zoo import make_model, random_model, save_tokenizer
from oracle_drafter import OracleDrafter
from slow_cases import slow_after
from tolerances import assert_near, bound

from drift_sdk import (
    Chain,
    Completion,
    ConfigError,
    DynamicTree,
    Engine,
    ModelLoadError,
    NGram,
    Speculation,
)
from drift_sdk.execution.drafter_factory import AssistantDrafterFactory
from drift_sdk.execution.eager.drafters import AssistantDrafter, Span, assistant_state_of
from drift_sdk.execution.eager.slot import Slot
from drift_sdk.models.assistant import AssistantDecoder
from drift_sdk.models.decoder import Decoder
from drift_sdk.steps import ExecutorLimits
from drift_sdk.trees import Draft, DraftLimit

NUM_REQUESTS, NUM_DRAFTS, WINDOW = 14, 4, 24
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": WINDOW,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 60.0,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,  # or most tokens would be followed by themselves
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
KINDS: dict[str, dict[str, Any]] = {
    "12B and 31B": COMMON,
    "E2B and E4B": COMMON
    | {
        "attention_k_eq_v": False,
        "num_global_key_value_heads": None,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": VOCAB_SIZE,
    },
}
SEEDS = {"12B and 31B": 1, "E2B and E4B": 1}
"""Of models without near ties."""
NEAR_TIE = bound(20.0, inner=96, depth=1 + 4 * 2)
SPECULATION = {"shape": Chain(NUM_DRAFTS), "adaptive": False}


class Model(NamedTuple):
    """folder: of the model, with its assistant. alone: what the requests are answered alone and without
    drafts."""

    folder: Path
    cases: list[Case]
    alone: list[Completion]

    @property
    def sequences(self) -> dict[int, list[int]]:
        """All tokens of each request, by its seed."""
        pairs = zip(self.cases, self.alone, strict=True)
        return {case.params.seed: [*case.prompt, *one.token_ids] for case, one in pairs}


def save(kind: str, folder: Path) -> None:
    """Save a model and its assistant, with clusters where published ones have them."""
    config = transformers.Gemma4TextConfig(**KINDS[kind])
    target = random_model(transformers.Gemma4ForCausalLM, config, seed=SEEDS[kind])
    target.save_pretrained(folder)
    save_tokenizer(folder, VOCAB_SIZE)
    make_assistant(SEEDS[kind], folder / "assistant", target, num_clusters=40 if "E2B" in kind else 0)
    make_often_right(folder, folder / "assistant")


@pytest.fixture(scope="module", params=slow_after(1, KINDS))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder, cases = tmp_path_factory.mktemp("model"), draw_cases()[:NUM_REQUESTS]
    save(request.param, folder)
    return Model(folder, cases, run_alone(folder, cases, NEAR_TIE))


class Watched(AssistantDrafter):
    """Records seed, number of known tokens and output of the first row of each draft, and proposes the tokens
    of an oracle in place of its own."""

    oracle: OracleDrafter | None = None

    def __init__(self, draft: AssistantDecoder, target: Decoder) -> None:
        super().__init__(draft, target)
        self.draft, self.target = draft, target
        self.seen: list[tuple[int, int, torch.Tensor]] = []
        self._is_first = False

    def _forward(self, features: torch.Tensor, tokens: Sequence[int], slots: Sequence[Slot]) -> torch.Tensor:
        outputs = super()._forward(features, tokens, slots)
        if self._is_first:
            for slot, output in zip(slots, outputs, strict=True):
                self.seen.append((slot.sampling.seed, slot.length, output.clone()))
        self._is_first = False
        return outputs

    def propose(self, slots: Sequence[Slot], limits: Sequence[DraftLimit]) -> list[Draft]:
        self._is_first = True
        drafts = super().propose(slots, limits)
        return drafts if self.oracle is None else self.oracle.propose(slots, limits)


class FeatureOfFirstRow(Watched):
    """Fault: features of the first row of a step in the place of the last one that was accepted."""

    def draft_extend(self, spans: Sequence[Span], aux_hidden: Any, hidden: torch.Tensor) -> None:
        super().draft_extend(spans, aux_hidden, hidden)
        for span in spans:
            first = self.target.final_normed(hidden[span.rows[0]][None])[0]
            assistant_state_of(span.slot).feature = first


class FeatureOfRejected(Watched):
    """Fault: features of the row behind the last one that was accepted."""

    def draft_extend(self, spans: Sequence[Span], aux_hidden: Any, hidden: torch.Tensor) -> None:
        super().draft_extend(spans, aux_hidden, hidden.roll(-1, 0))


class StaleTable(Watched):
    """Fault: layers with windows are read through the blocks of the others."""

    def _forward(self, features: torch.Tensor, tokens: Sequence[int], slots: Sequence[Slot]) -> torch.Tensor:
        tables = [slot.window_table for slot in slots]
        assert any(tables)
        for slot in slots:
            slot.window_table = slot.window_table[::-1]
        outputs = super()._forward(features, tokens, slots)
        for slot, table in zip(slots, tables, strict=True):
            slot.window_table = table
        return outputs


class Run(NamedTuple):
    completions: list[Completion]
    drafter: Watched
    num_preemptions: int
    num_window_blocks: int


def run(
    model: Model,
    variant: dict[str, int],
    *,
    corruption: float | None = None,
    kind: type[Watched] = Watched,
    **options: Any,
) -> Run:
    """Run all requests twice, with the assistant's drafts or an oracle's; with hits in the second pass."""
    drafters: list[Watched] = []
    stats: list[Any] = []

    def eager_drafter(factory: AssistantDrafterFactory, target: Decoder, limits: ExecutorLimits) -> Watched:
        drafters.append(kind(factory.assistant, target))
        if corruption is not None:
            drafters[-1].oracle = OracleDrafter(model.sequences, corruption, VOCAB_SIZE)
        return drafters[-1]

    given = {"draft": model.folder / "assistant"} | SPECULATION | options
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AssistantDrafterFactory, "eager_drafter", eager_drafter)
        found = anyio.run(
            lambda: run_all(
                model.folder,
                config_of(speculation=Speculation(**given), **variant),
                model.cases,
                num_passes=2,
                on_end=lambda engine: stats.append(engine.stats()),
            )
        )
    return Run(found, drafters[0], stats[0].num_preemptions, stats[0].num_window_blocks)


def assert_drafts(model: Model, drafter: Watched) -> None:
    """The outputs that were seen equal those of a pass over the whole sequence."""
    assert len(drafter.seen) > 150
    for seed, tokens in model.sequences.items():
        seen = [(length, output) for other, length, output in drafter.seen if other == seed]
        if not seen:
            continue

        outputs = torch.stack([output for _, output in seen])
        expected = assistant_pass(drafter.target, drafter.draft, tokens, [length for length, _ in seen])
        assert_near(outputs, expected, inner=96, depth=24, name=f"drafts of seed {seed}")


def num_drafts(found: Run) -> tuple[int, int]:
    """Drafts that were accepted, and all."""
    stats = [each.speculation for each in found.completions if each.speculation is not None]
    return sum(each.num_accepted for each in stats), sum(each.num_drafted for each in stats)


@pytest.mark.parametrize("variant", slow_after(1, VARIANTS[::-1]), ids=str)
def test_drafts_do_not_change_tokens(model: Model, variant: dict[str, int]) -> None:
    """With prefix hits, chunks of prompts, preemptions, recycled blocks of windows, and drafts of which any
    number is accepted."""
    found = run(model, variant, corruption=0.3)
    assert tokens_of(found.completions) == tokens_of(model.alone)
    assert sorted(found.drafter.oracle.histogram) == list(range(NUM_DRAFTS + 1))
    accepted, drafted = num_drafts(found)
    assert 100 < accepted < drafted - 100
    assert sum(each.usage.cached_tokens for each in found.completions) > 0
    assert (found.num_preemptions > 0) == ("kv_cache_tokens" in variant)
    assert found.num_window_blocks > 0
    assert_drafts(model, found.drafter)


@pytest.mark.parametrize("variant", slow_after(1, VARIANTS), ids=str)
def test_own_drafts_do_not_change_tokens(model: Model, variant: dict[str, int]) -> None:
    """Drafts of the assistant itself, which are often right and often wrong."""
    found = run(model, variant)
    assert tokens_of(found.completions) == tokens_of(model.alone)
    accepted, drafted = num_drafts(found)
    assert 40 < accepted < drafted - 100
    assert_drafts(model, found.drafter)


def test_ngrams_beside_the_assistant(model: Model) -> None:
    found = run(model, VARIANTS[0], ngrams=NGram(min_length=1))
    assert tokens_of(found.completions) == tokens_of(model.alone)
    stats = [each.speculation for each in found.completions if each.speculation is not None]
    assert 0 < sum(each.num_ngram_drafted for each in stats) < sum(each.num_drafted for each in stats)
    assert_drafts(model, found.drafter)


@pytest.mark.slow
def test_adaptive_drafts(model: Model) -> None:
    """With numbers of drafts that the policy chooses."""
    assert tokens_of(run(model, VARIANTS[0], adaptive=True).completions) == tokens_of(model.alone)


@pytest.mark.slow
@pytest.mark.parametrize("form", [None, "fp8", "int4"])
def test_checked_rounds_and_random_weights(model: Model, form: str | None) -> None:
    """With random weights the assistant has some too."""
    folder, cases, _ = model
    speculation = Speculation(draft=folder / "assistant", checks=True, draft_weights=form, **SPECULATION)
    found = anyio.run(lambda: run_all(folder, config_of(load="random", speculation=speculation), cases))
    expected = anyio.run(lambda: run_all(folder, config_of(load="random", max_num_seqs=1), cases))
    assert tokens_of(found) == tokens_of(expected)
    assert all(each.speculation is not None for each in found)


@pytest.mark.slow
@pytest.mark.parametrize("fault", [FeatureOfFirstRow, FeatureOfRejected, StaleTable])
def test_planted_faults_are_found(model: Model, fault: type[Watched]) -> None:
    """Which do not change tokens."""
    found = run(model, VARIANTS[0], corruption=0.3, kind=fault)
    assert tokens_of(found.completions) == tokens_of(model.alone)
    with pytest.raises(AssertionError, match="drafts of seed"):
        assert_drafts(model, found.drafter)


def start(folder: Path, **options: Any) -> None:
    speculation = Speculation(**{"draft": folder / "assistant"} | SPECULATION | options)

    async def main() -> None:
        async with Engine(folder, config_of(speculation=speculation)):
            pass

    anyio.run(main)


@pytest.mark.parametrize(
    ("options", "field"),
    [({"shape": DynamicTree()}, "shape"), ({"aux_layer_convention": "output"}, "aux_layer_convention")],
)
def test_settings_that_assistants_do_not_have_are_refused(
    options: dict[str, Any], field: str, tmp_path: Path
) -> None:
    save("12B and 31B", tmp_path)
    with pytest.raises(ConfigError, match="with an assistant as the draft") as caught:
        start(tmp_path, **options)
    assert caught.value.field == field


@pytest.mark.parametrize("required", [True, False])
def test_an_assistant_of_another_model_is_refused(
    required: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """If it is required; otherwise a warning names what differs."""
    save("12B and 31B", tmp_path / "gemma")
    make_model(1, tmp_path / "llama")
    message = "the draft has vocab_size=160, its target 500"
    options = {"draft": tmp_path / "gemma" / "assistant", "required": required}
    if required:
        with pytest.raises(ModelLoadError, match=message):
            start(tmp_path / "llama", **options)
    else:
        start(tmp_path / "llama", **options)
        assert message in caplog.text
