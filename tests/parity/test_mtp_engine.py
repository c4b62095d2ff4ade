"""Requests that a model's own MTP layer drafts for: they have the tokens that they have alone and without
drafts, and every state of the drafter equals the layer's output over the whole sequence at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from draft_pass import whole_pass
from hybrid_requests import NEAR_TIE, VARIANTS, Case, config_of, draw_cases, run_all, run_alone, tokens_of
from hybrid_zoo import make_hybrid_model
from msgspec.structs import replace
from mtp_zoo import LATENT_FAMILIES, add_mtp, make_mtp_model, make_often_right
from slow_cases import slow_after
from tolerances import assert_near, bound

from drift_sdk import Chain, Completion, ConfigError, DynamicTree, Engine, NGram, Speculation
from drift_sdk.execution.drafter_factory import EagleDrafterFactory
from drift_sdk.execution.eager.drafters import EagleDrafter, Span, state_of
from drift_sdk.models.decoder import Decoder
from drift_sdk.models.draft_head import DraftDecoder
from drift_sdk.steps import ExecutorLimits

MODELS = {"deepseek_v3": 0, "qwen3_5": 6, "glm4_moe_lite": 2, "qwen3_5_moe": 12, "qwen3_next": 6}
"""Seeds of models without near ties."""
LATENT_NEAR_TIE = bound(16.0, inner=96, depth=1 + 3 * 2)
"""More than the rounding of logits of a model with three layers of chained products."""
SPECULATION = Speculation(draft="mtp", shape=Chain(3), adaptive=False)

Model = tuple[Path, list[Case], list[Completion]]


@pytest.fixture(scope="module", params=slow_after(1, MODELS))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    """The folder of a model, requests, and what they are answered alone and without drafts."""
    folder, cases = tmp_path_factory.mktemp(request.param), draw_cases()
    is_latent = request.param in LATENT_FAMILIES
    sizes: dict[str, Any] = {"num_hidden_layers": 3 if is_latent else 4}
    if request.param == "glm4_moe_lite":
        sizes["mlp_layer_types"] = ["dense", "sparse", "sparse"]
    make_mtp_model(request.param, MODELS[request.param], folder, **sizes)
    make_often_right(folder)
    return folder, cases, run_alone(folder, cases, LATENT_NEAR_TIE if is_latent else NEAR_TIE)


class WatchedDrafter(EagleDrafter):
    """Records its state after each step: seed, number of rows and newest output of each slot."""

    def __init__(self, draft: DraftDecoder, target: Decoder, limits: ExecutorLimits) -> None:
        super().__init__(draft, target, limits)
        self.draft, self.target = draft, target
        self.seen: list[tuple[int, int, torch.Tensor]] = []

    def draft_extend(
        self, spans: Sequence[Span], aux_hidden: Sequence[torch.Tensor], hidden: torch.Tensor
    ) -> None:
        super().draft_extend(spans, aux_hidden, hidden)
        for span in spans:
            state = state_of(span.slot)
            if state.hidden is not None:
                self.seen.append((span.slot.sampling.seed, state.num_rows, state.hidden.clone()))


class FeatureBeforeNorm(WatchedDrafter):
    """Fault: the feature is the residual stream."""

    def __init__(self, draft: DraftDecoder, target: Decoder, limits: ExecutorLimits) -> None:
        super().__init__(draft, target, limits)
        self._draft = DraftDecoder(draft.config, draft.weights, target)
        self._draft.fuse = lambda aux_hidden, hidden: hidden


class TokenOfTheFeature(WatchedDrafter):
    """Fault: a feature is joined with the token of its own position."""

    def draft_extend(self, spans: Sequence[Span], *inputs: Any) -> None:
        super().draft_extend(
            [replace(s, next_token_ids=(s.token_id, *s.next_token_ids[:-1])) for s in spans], *inputs
        )


class RejectedRowKept(WatchedDrafter):
    """Fault: keys and values of the layer that were computed from its own outputs stay."""

    def draft_extend(self, spans: Sequence[Span], *inputs: Any) -> None:
        kept = [tensor.clone() for tensor in self._cache.tensors]
        super().draft_extend(spans, *inputs)
        if all(span.start > 0 and len(span.next_token_ids) <= 4 for span in spans):
            for tensor, old in zip(self._cache.tensors, kept, strict=True):
                tensor.copy_(old)


class NoRowBehindHits(WatchedDrafter):
    """Fault: the row that a prefix hit did not cover is left out."""

    def draft_extend(self, spans: Sequence[Span], *inputs: Any) -> None:
        for span in spans:
            state_of(span.slot).num_rows = max(state_of(span.slot).num_rows, span.start)
        super().draft_extend(spans, *inputs)


def run_watched(
    model: Model, variant: dict[str, int], kind: type[WatchedDrafter]
) -> tuple[list[Completion], WatchedDrafter, int]:
    """Completions of the requests with drafts, the drafter, and the number of preemptions."""
    folder, cases, _ = model
    drafters: list[WatchedDrafter] = []
    preemptions: list[int] = []

    def eager_drafter(factory: EagleDrafterFactory, target: Decoder, limits: ExecutorLimits) -> EagleDrafter:
        drafters.append(kind(factory.draft, target, limits))
        return drafters[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EagleDrafterFactory, "eager_drafter", eager_drafter)
        found = anyio.run(
            lambda: run_all(
                folder,
                config_of(speculation=SPECULATION, **variant),
                cases,
                num_passes=2,
                on_end=lambda engine: preemptions.append(engine.stats().num_preemptions),
            )
        )
    return found, drafters[0], preemptions[0]


def assert_states(model: Model, drafter: WatchedDrafter) -> None:
    _, cases, alone = model
    expected = {
        case.params.seed: whole_pass(drafter.target, drafter.draft, [*case.prompt, *one.token_ids])
        for case, one in zip(cases, alone, strict=True)
    }
    assert len(drafter.seen) > 400
    for seed, num_rows, hidden in drafter.seen:
        name = f"{num_rows} rows of seed {seed}"
        if num_rows <= len(expected[seed]):
            assert_near(hidden, expected[seed][num_rows - 1], inner=144, depth=24, name=name)


@pytest.mark.parametrize("variant", slow_after(1, [*VARIANTS[::-1], {"max_num_seqs": 1}]), ids=str)
def test_drafts_do_not_change_tokens(model: Model, variant: dict[str, int]) -> None:
    """Together and alone, with prefix hits, preemptions, and drafts that are rejected."""
    found, drafter, num_preemptions = run_watched(model, variant, WatchedDrafter)
    assert tokens_of(found) == tokens_of(model[2])
    stats = [each.speculation for each in found if each.speculation is not None]
    num_drafted, num_accepted = (
        sum(getattr(each, name) for each in stats) for name in ("num_drafted", "num_accepted")
    )
    assert 40 < num_accepted < num_drafted - 100
    assert sum(each.usage.cached_tokens for each in found) > 0
    assert (num_preemptions > 0) == ("kv_cache_tokens" in variant)
    assert_states(model, drafter)


@pytest.mark.slow
@pytest.mark.parametrize("fault", [FeatureBeforeNorm, TokenOfTheFeature, RejectedRowKept, NoRowBehindHits])
def test_planted_faults_are_found(model: Model, fault: type[WatchedDrafter]) -> None:
    """Which do not change tokens."""
    found, drafter, _ = run_watched(model, VARIANTS[0], fault)
    assert tokens_of(found) == tokens_of(model[2])
    with pytest.raises(AssertionError, match="differ by"):
        assert_states(model, drafter)


@pytest.mark.slow
def test_ngrams_beside_the_layer(model: Model) -> None:
    folder, cases, alone = model
    speculation = replace(SPECULATION, ngrams=NGram(min_length=1))
    found = anyio.run(lambda: run_all(folder, config_of(speculation=speculation), cases))
    assert tokens_of(found) == tokens_of(alone)
    stats = [each.speculation for each in found if each.speculation is not None]
    assert 0 < sum(each.num_ngram_drafted for each in stats) < sum(each.num_drafted for each in stats)


@pytest.mark.slow
def test_random_weights_and_adaptive_drafts(model: Model) -> None:
    """With random weights the layer has some too."""
    folder, cases, _ = model
    config = config_of(load="random", speculation=replace(SPECULATION, adaptive=True))
    found = anyio.run(lambda: run_all(folder, config, cases))
    expected = anyio.run(lambda: run_all(folder, config_of(load="random", max_num_seqs=1), cases))
    assert tokens_of(found) == tokens_of(expected)
    assert all(each.speculation is not None for each in found)


def start(folder: Path, **fields: Any) -> None:
    async def main() -> None:
        async with Engine(folder, config_of(**fields)):
            pass

    anyio.run(main)


def without_tensors(folder: Path) -> None:
    """The config alone says that there is such a layer."""
    add_mtp(folder)
    make_hybrid_model("qwen3_5", 0, folder)


@pytest.mark.parametrize("change", [lambda folder: None, without_tensors])
@pytest.mark.parametrize("required", [True, False])
def test_models_without_the_layer_are_refused(
    change: Callable[[Path], None], required: bool, tmp_path: Path
) -> None:
    make_hybrid_model("qwen3_5", 0, tmp_path)
    change(tmp_path)
    with pytest.raises(ConfigError) as caught:
        start(tmp_path, speculation=replace(SPECULATION, required=required))
    assert caught.value.field == "draft"


def test_trees(model: Model) -> None:
    """Models with recurrent layers refuse them."""
    folder, cases, alone = model
    speculation = replace(SPECULATION, shape=DynamicTree())
    if "qwen3" in folder.name:
        with pytest.raises(ConfigError) as caught:
            start(folder, speculation=speculation)
        assert caught.value.field == "shape"
        return

    found = anyio.run(lambda: run_all(folder, config_of(speculation=speculation), cases))
    assert tokens_of(found) == tokens_of(alone)
    stats = [each.speculation for each in found if each.speculation is not None]
    assert 0 < sum(each.num_accepted for each in stats) < sum(each.num_drafted for each in stats)
