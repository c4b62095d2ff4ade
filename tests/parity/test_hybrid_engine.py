"""Requests of models with recurrent layers have the same tokens alone and together, from checkpoints or from
the beginning, with drafts and without."""

from __future__ import annotations

import random
from pathlib import Path

import anyio
import pytest
from draft_zoo import make_draft
from hybrid_requests import (
    NEAR_TIE,
    PREFIX,
    VARIANTS,
    VOCAB_SIZE,
    Case,
    config_of,
    draw_cases,
    run_all,
    run_alone,
    tokens_of,
)
from hybrid_zoo import make_hybrid_model
from loops import until
from msgspec.structs import replace
from near_ties import no_near_ties
from oracle_drafter import OracleDrafter
from slow_cases import slow_after

from drift_sdk import (
    Chain,
    Completion,
    ConfigError,
    DynamicTree,
    Engine,
    NGram,
    PartialVerification,
    SamplingParams,
    Speculation,
)
from drift_sdk.execution.drafter_factory import NGramDrafterFactory
from drift_sdk.execution.eager.eager_executor import EagerExecutor
from drift_sdk.models.kv_cache import LayerState, SequenceState
from drift_sdk.spec.model import BORDER

SHARED_SEED = 1
"""Of prompts without near ties."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hybrid")
    model = make_hybrid_model("qwen3_next", 2, folder)
    assert model.config.num_hidden_layers == 4
    return folder


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    return draw_cases()


@pytest.fixture(scope="module")
def alone(folder: Path, cases: list[Case]) -> list[Completion]:
    return run_alone(folder, cases)


@pytest.mark.slow
@pytest.mark.parametrize("variant", [2, 0, 1])
def test_requests_together_equal_requests_alone(
    folder: Path, cases: list[Case], alone: list[Completion], variant: int
) -> None:
    preemptions: list[int] = []
    found = anyio.run(
        lambda: run_all(
            folder,
            config_of(**VARIANTS[variant]),
            cases,
            num_passes=2,
            on_end=lambda engine: preemptions.append(engine.stats().num_preemptions),
        )
    )
    assert tokens_of(found) == tokens_of(alone)
    assert sum(each.usage.cached_tokens for each in found) > 0
    assert (preemptions[0] > 0) == (variant == 2)
    assert all(each.usage.cached_tokens % BORDER == 0 for each in found)


@pytest.mark.parametrize("corruption", slow_after(1, [0.3, 0.0, 0.7]))
@pytest.mark.parametrize("variant", slow_after(1, [2, 0, 1]))
def test_drafts_do_not_change_tokens(
    folder: Path,
    cases: list[Case],
    alone: list[Completion],
    monkeypatch: pytest.MonkeyPatch,
    variant: int,
    corruption: float,
) -> None:
    """Drafts of which any number is accepted."""
    found, oracle = draft(folder, cases, alone, monkeypatch, corruption, VARIANTS[variant])
    assert tokens_of(found) == tokens_of(alone)
    stats = [each.speculation for each in found]
    num_drafted, num_accepted = (
        sum(each.num_drafted for each in stats if each),
        sum(each.num_accepted for each in stats if each),
    )
    assert num_accepted > 100 and (num_drafted > num_accepted) == (corruption > 0)
    assert sorted(oracle.histogram)[-1] == 4
    assert sum(each.usage.cached_tokens for each in found) > 0


def draft(
    folder: Path,
    cases: list[Case],
    alone: list[Completion],
    monkeypatch: pytest.MonkeyPatch,
    corruption: float,
    fields: dict[str, int],
) -> tuple[list[Completion], OracleDrafter]:
    answers = {
        case.params.seed: [*case.prompt, *completion.token_ids]
        for case, completion in zip(cases, alone, strict=True)
    }
    oracle = OracleDrafter(answers, corruption, VOCAB_SIZE)
    monkeypatch.setattr(NGramDrafterFactory, "eager_drafter", lambda *_: oracle)
    speculation = Speculation(draft=NGram(), shape=Chain(4), adaptive=False)
    config = config_of(speculation=speculation, **fields)
    return anyio.run(lambda: run_all(folder, config, cases, num_passes=2)), oracle


@pytest.mark.slow
@pytest.mark.parametrize("draft_name", ["reference", "ngram"])
def test_heads_and_ngrams_do_not_change_tokens(
    folder: Path, cases: list[Case], alone: list[Completion], tmp_path: Path, draft_name: str
) -> None:
    if draft_name == "reference":
        make_draft("reference", tmp_path, folder)
    given = tmp_path if draft_name == "reference" else NGram(min_length=1)
    speculation = Speculation(draft=given, shape=Chain(3), adaptive=False)
    config = config_of(speculation=speculation, **VARIANTS[2])
    found = anyio.run(lambda: run_all(folder, config, cases, num_passes=2))
    assert tokens_of(found) == tokens_of(alone)
    assert sum(each.speculation.num_drafted for each in found if each.speculation) > 0
    assert sum(each.usage.cached_tokens for each in found) > 0


@pytest.mark.slow
def test_a_rejected_row_that_stays_is_found(
    folder: Path, cases: list[Case], alone: list[Completion], monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = LayerState.begin

    def begin_late(state: LayerState, position: int) -> None:
        begin(state, min(position + 1, state.position))
        state.border -= state.position - position

    monkeypatch.setattr(LayerState, "begin", begin_late)
    found, _ = draft(folder, cases, alone, monkeypatch, 0.3, VARIANTS[0])
    assert tokens_of(found) != tokens_of(alone)


@pytest.mark.slow
def test_a_checkpoint_of_another_place_is_found(
    folder: Path, cases: list[Case], alone: list[Completion], monkeypatch: pytest.MonkeyPatch
) -> None:
    state_of = EagerExecutor._state

    def wrong_state(executor: EagerExecutor, place: int | None) -> SequenceState:
        state = state_of(executor, place)
        if place is not None:
            other = next(iter(executor._checkpoints.values()))
            for layer, (content, _) in zip(state.layers.values(), other.layers, strict=True):
                layer.state = content
        return state

    monkeypatch.setattr(EagerExecutor, "_state", wrong_state)
    found = anyio.run(lambda: run_all(folder, config_of(), cases, num_passes=2))
    assert tokens_of(found) != tokens_of(alone)


def test_third_request_after_a_shared_prefix_hits(folder: Path) -> None:
    """The first leaves a checkpoint at its end, the second where it leaves the first."""

    async def main() -> None:
        async with Engine(folder, config_of(max_num_seqs=2)) as engine:
            params = SamplingParams(max_tokens=2, ignore_eos=True)
            cached = []
            for number in range(3):
                own = [3 + number] * 40
                completion = await engine.generate(PREFIX[:150] + own, params)
                cached.append(completion.usage.cached_tokens)
            assert cached == [0, 0, 128]
            again = await engine.generate(PREFIX[:150] + [3] * 40, params)
            assert again.usage.cached_tokens == 160
            stats = engine.stats()
            assert stats.num_checkpoints == 4 and stats.num_checkpoint_hits == 2
            # The second computed 9 cached blocks again, the others what is between checkpoint and branch.
            assert stats.num_recomputed_tokens == 144 + 16 + 16

    anyio.run(main)


def shared_by_all(seed: int) -> list[Case]:
    """Requests that share so many tokens of PREFIX, one for each number modulo 128, in random order."""
    rng = random.Random(seed)
    given = [Case(rng, index) for index in range(128)]
    for index, case in enumerate(given):
        own = [rng.randrange(3, VOCAB_SIZE) for _ in range(4)]
        case.prompt = [*PREFIX[: 20 + index], *own]
        case.params = SamplingParams(max_tokens=5, ignore_eos=True, seed=index, cache_salt=str(index))
    rng.shuffle(given)
    return given


@pytest.mark.slow
def test_shared_prefixes_of_every_length(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts and prefix cache together give the tokens of neither."""
    given = shared_by_all(SHARED_SEED)
    with no_near_ties(NEAR_TIE):
        alone = anyio.run(lambda: run_all(folder, config_of(max_num_seqs=8), given))
    assert not any(each.usage.cached_tokens for each in alone)
    for case in given:
        case.params = replace(case.params, cache_salt=None)
    found, oracle = draft(folder, given, alone, monkeypatch, 0.3, {"max_num_seqs": 8})
    assert tokens_of(found) == tokens_of(alone)
    assert sorted(oracle.histogram) == [0, 1, 2, 3]
    assert sum(each.usage.cached_tokens > 0 for each in found) > 100


def test_ends_of_messages_are_resumable(folder: Path) -> None:
    """A conversation whose last message was edited goes on behind the answer before it, and another one with
    the first message in common behind that."""
    end = 1  # the model's end of sequence
    system, question, answer = ([token] * 63 + [end] for token in (5, 6, 7))

    async def main() -> None:
        async with Engine(folder, config_of()) as engine:
            params = SamplingParams(max_tokens=2)
            prompts = (
                [*system, *question, *answer, *[8] * 40, end, 9],
                [*system, *question, *answer, *[8] * 20, *[10] * 20, end, 9],
                [*system, *[10] * 60],
            )
            completions = [await engine.generate(prompt, params) for prompt in prompts]
            assert [each.usage.cached_tokens for each in completions] == [0, 192, 64]

    anyio.run(main)


def test_sleep_and_pause_keep_what_requests_need(
    folder: Path, cases: list[Case], alone: list[Completion]
) -> None:
    async def main() -> None:
        async with Engine(folder, config_of()) as engine:
            streams = [engine.generate(case.prompt, case.params) for case in cases]
            await until(lambda: engine.stats().num_steps >= 8)
            await engine.pause()
            await engine.resume()
            await engine.sleep()
            await engine.wake()
            found = [await stream for stream in streams]
            assert tokens_of(found) == tokens_of(alone)
            again = [await engine.generate(case.prompt, case.params) for case in cases]
            assert tokens_of(again) == tokens_of(alone)
            assert sum(each.usage.cached_tokens for each in again) > 0

    anyio.run(main)


@pytest.mark.parametrize(
    ("field", "speculation"),
    [
        ("shape", Speculation(draft="head", shape=DynamicTree())),
        (
            "partial_verification",
            Speculation(draft="head", partial_verification=PartialVerification()),
        ),
    ],
)
def test_unsupported_speculation_is_refused(
    folder: Path, tmp_path: Path, field: str, speculation: Speculation
) -> None:
    make_draft("reference", tmp_path, folder)

    async def main() -> None:
        async with Engine(folder, config_of(speculation=replace(speculation, draft=tmp_path))):
            pass

    with pytest.raises(ConfigError) as caught:
        anyio.run(main)
    assert caught.value.field == field


def test_recurrent_draft_models_are_refused(folder: Path) -> None:
    async def main() -> None:
        async with Engine(folder, config_of(speculation=Speculation(draft=folder))):
            pass

    with pytest.raises(ConfigError) as caught:
        anyio.run(main)
    assert caught.value.field == "draft"
