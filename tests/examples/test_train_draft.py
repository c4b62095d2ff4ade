"""Training of a draft head: what it is trained on, its pass, its loss, its files, and its acceptance."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import smollm2
import torch
from decoder_parity import inner_terms
from draft_pass import dflash_pass, whole_pass
from model_zoo import NUM_MODELS, make_model
from safetensors.torch import load_file
from slow_cases import slow_after
from tolerances import assert_near
from train_draft import answers, measuring, questions
from train_draft.acceptance import Acceptance, evaluate, walk
from train_draft.answers import Answer, AnswerError, AnswerFolder, repeated_share
from train_draft.batches import Batch, Conversation, draft_vocabulary, make_batches, unused_token
from train_draft.commands import main
from train_draft.dflash import DFlashHead, dflash_settings
from train_draft.eagle import EagleHead, EaglePass, eagle_settings
from train_draft.head import feature_sizes, mlp_width
from train_draft.questions import (
    KINDS,
    Overlaps,
    Question,
    QuestionError,
    Templates,
    evaluation_questions,
)
from train_draft.target import Target, load_chat_format, load_target
from train_draft.training import CheckpointError, Training, TrainingSettings, draft_loss

from drift_sdk import Chain, Engine, EngineConfig, SamplingParams, Speculation
from drift_sdk.loading.source import resolve
from drift_sdk.measurement import AcceptanceTrace
from drift_sdk.models.attention import AttentionBatch, SequenceRows
from drift_sdk.models.decoder import Decoder
from drift_sdk.models.dflash import DFlashDecoder
from drift_sdk.models.draft_head import DraftDecoder
from drift_sdk.spec.model import Experts, Mlp

CPU = torch.device("cpu")
CONFIG = EngineConfig(max_model_len=128, kv_cache_tokens=2048, max_num_seqs=8, dtype="float32")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with random weights, and a chat template."""
    folder = tmp_path_factory.mktemp("model")
    make_model(1, folder)
    template = "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    return folder


@pytest.fixture(scope="module")
def target(folder: Path) -> Target:
    return load_target(folder, CPU)


def new_head(target: Target, *, draft_vocab_size: int = 300) -> EagleHead:
    """A head whose weights are all random, so that no part of it can be left out unnoticed."""
    settings = eagle_settings(target.spec, draft_vocab_size, intermediate_size=48)
    ids = torch.randperm(target.spec.vocab_size, generator=torch.Generator().manual_seed(1))
    sizes = feature_sizes(target, (1, 2), [list(range(9)), list(range(50, 90))])
    sizes = torch.cat((sizes, sizes[: target.spec.hidden_size] * 3.0))
    head = EagleHead.start(settings, target, ids[:draft_vocab_size].sort().values, sizes, seed=2)
    return randomised(head)


def new_dflash(target: Target, *, draft_vocab_size: int = 300) -> DFlashHead:
    """As `new_head`, a DFlash head of the same features and vocabulary, with four masks."""
    other = new_head(target, draft_vocab_size=draft_vocab_size)
    settings = dflash_settings(
        target.spec,
        draft_vocab_size,
        48,
        aux_layers=other.aux_layers,
        num_layers=2,
        num_masks=4,
        mask_token_id=499,
    )
    return randomised(DFlashHead.start(settings, target, other.target_ids, other.feature_rms, seed=2))


NEW_HEADS = {"dflash": new_dflash, "eagle3": new_head}


def randomised(head: Any) -> Any:
    generator = torch.Generator().manual_seed(3)
    for weight in head.weights.values():
        weight.data += torch.randn(weight.shape, generator=generator) * 0.1
    return head


def drawn_answers(target: Target, number: int, seed: int = 0) -> list[Answer]:
    draw = random.Random(seed)

    def tokens(least: int, most: int) -> list[int]:
        return [draw.randrange(target.spec.vocab_size) for _ in range(draw.randint(least, most))]

    return [
        Answer(kind=KINDS[index % 3], temperature=0.0, prompt_ids=tokens(3, 9), token_ids=tokens(8, 30))
        for index in range(number)
    ]


def test_evaluation_questions_are_those_fixed_before_training() -> None:
    found = evaluation_questions()
    assert [sum(each.kind == kind for each in found) for kind in KINDS] == [40, 40, 40]
    assert len({each.prompt for each in found}) == 120


def test_changed_evaluation_questions_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changed = tmp_path / "prompts.jsonl"
    changed.write_bytes(questions.EVALUATION_FILE.read_bytes() + b"\n")
    monkeypatch.setattr(questions, "EVALUATION_FILE", changed)
    with pytest.raises(ValueError, match="is not the committed file"):
        evaluation_questions(changed)


def test_templates_fill_all_words_and_repeat_for_a_seed() -> None:
    first, again, other = (list(itertools.islice(Templates(seed).questions(), 90)) for seed in (1, 1, 2))
    assert first == again != other
    assert {each.kind for each in first} == set(KINDS)
    assert not any("{" in each.prompt.replace("{'", "") for each in first)


def test_overlaps_finds_questions_of_the_evaluation() -> None:
    overlaps = Overlaps([Question("chat", "How do I keep a sourdough starter alive for two weeks?")])
    assert overlaps.has("Tell me: how do I keep a Sourdough starter, alive?")
    assert not overlaps.has("How do I keep a sourdough bread fresh for two weeks?")


def test_repeated_share_counts_runs_that_occurred_before() -> None:
    assert repeated_share(list(range(100))) == 0.0
    assert repeated_share([1, 2, 3]) == 0.0
    assert repeated_share(list(range(8)) * 2) == pytest.approx(1 / 9)
    assert repeated_share([7] * 20) == pytest.approx(12 / 13)


def test_answers_are_read_without_a_line_that_is_not_whole(target: Target, tmp_path: Path) -> None:
    written = drawn_answers(target, 3)
    file = tmp_path / "answers-0.jsonl"
    lines = b"".join(msgspec.json.encode(each) + b"\n" for each in written)
    file.write_bytes(lines + b'{"kind":"chat","tem')
    folder = AnswerFolder(tmp_path)
    assert folder.training() == written
    with file.open("ab") as output:
        output.write(b'perature":0.0,"prompt_ids":[1],"token_ids":[2]}\n')
    assert folder.training() == [
        *written,
        Answer(kind="chat", temperature=0.0, prompt_ids=[1], token_ids=[2]),
    ]
    assert folder.evaluation() == []


def test_draft_vocabulary_has_the_most_frequent_tokens() -> None:
    answer = Answer(kind="chat", temperature=0.0, prompt_ids=[9] * 9, token_ids=[5, 5, 5, 3, 3, 8, 7])
    ids, share = draft_vocabulary([answer], 3)
    assert (ids.tolist(), share) == ([3, 5, 7], 6 / 7)
    ids, share = draft_vocabulary([answer], 6)  # more than occur
    assert (ids.tolist(), share) == ([0, 1, 3, 5, 7, 8], 1.0)


def test_unused_token_is_one_that_no_text_has() -> None:
    answer = Answer(kind="chat", temperature=0.0, prompt_ids=[4], token_ids=[0, 2])
    assert unused_token([answer], 5) == 3
    assert unused_token([answer], 1) == 0
    assert (
        unused_token([answer, Answer(kind="chat", temperature=0.0, prompt_ids=[1, 3], token_ids=[4])], 5) == 3
    )


def test_batch_lists_the_rows_that_draft_tokens_of_answers() -> None:
    first = Conversation(token_ids=[1, 2, 3, 4, 5, 6], start=3)
    batch = Batch([first, Conversation(token_ids=[1, 2, 3], start=1)], CPU)
    assert batch.token_ids.tolist() == [[1, 2, 3, 4, 5, 6], [1, 2, 3, 0, 0, 0]]
    # Row i drafts token i + 2, and in step k token i + 2 + k.
    assert batch.rows.tolist() == [1, 2, 3, 6]
    assert [batch.known(step).tolist() for step in range(4)] == [[0, 1, 2, 3], [0, 1], [0], []]


def test_batches_hold_all_conversations_within_their_size() -> None:
    draw = random.Random(0)
    conversations = [Conversation(token_ids=[index] * draw.randint(5, 60), start=2) for index in range(300)]
    batches = make_batches(conversations, 200, seed=1)
    assert sorted(each.token_ids[0] for batch in batches for each in batch) == list(range(300))
    assert all(len(batch) * max(len(each.token_ids) for each in batch) <= 200 for batch in batches)
    padded = sum(len(batch) * max(len(each.token_ids) for each in batch) for batch in batches)
    assert padded < 1.1 * sum(len(each.token_ids) for each in conversations)
    assert batches == make_batches(conversations, 200, seed=1) != make_batches(conversations, 200, seed=2)


def test_walk_takes_the_rounds_of_decoding() -> None:
    # Token 4 is the first of the answer; a round whose newest token is i + 1 accepts counts[i].
    counts = [9, 9, 9, 1, 9, 3, 9, 9, 9, 0, 2, 9, 9, 9]
    found = walk(counts, start=4, end=16)
    assert found == Acceptance(num_rounds=4, accepted_at=(3, 2, 1))
    assert found.length == 1 + 6 / 4
    assert found.rates == (0.75, 0.5, 0.25)


def test_loss_leaves_out_tokens_that_cannot_be_proposed(target: Target) -> None:
    head = new_head(target, draft_vocab_size=100)
    known, unknown = (
        head.target_ids[:6].tolist(),
        [token for token in range(500) if token not in head.target_ids.tolist()][:6],
    )
    settings = TrainingSettings(num_steps=1, seconds=1.0, unrolled=2)

    def loss(tokens: list[int]) -> float:
        batch = Batch([Conversation(token_ids=[3, 4, *tokens], start=2)], CPU)
        return float(draft_loss(head, target, batch, settings)[0].detach())

    assert loss(unknown) == 0.0
    assert loss(known) > 0.0
    # The last token is drafted, but nothing is computed from it.
    assert loss([*known, unknown[0]]) == pytest.approx(loss(known), rel=1e-4)


def test_loss_compares_each_draft_with_the_model_at_its_position(target: Target) -> None:
    head, unrolled, decay = new_head(target), 3, 0.5
    draw = random.Random(5)
    ends, start = (14, 10), 4
    conversations = [
        Conversation(token_ids=[draw.randrange(500) for _ in range(end)], start=start) for end in ends
    ]
    settings = TrainingSettings(num_steps=1, seconds=1.0, unrolled=unrolled, decay=decay)
    loss, shares = draft_loss(head, target, Batch(conversations, CPU), settings)

    sums, counts, right = [0.0] * unrolled, [0] * unrolled, [0] * unrolled
    totals = [0] * unrolled
    for each in conversations:
        tokens = torch.tensor([each.token_ids])
        features, final = target.run(tokens, head.config.aux_layers)
        head_pass = EaglePass(head, head.cast(torch.float32), tokens.shape[1])
        hidden = head_pass.fuse(features)
        for step in range(unrolled):
            hidden = head_pass.step(hidden, target.embed(tokens.roll(-1 - step, 1)))
            for row in range(start - 2, len(each.token_ids) - 2 - step):
                drafted = each.token_ids[row + 2 + step]
                wanted = target.logits(final[0, row + 1 + step], head.target_rows).softmax(-1)
                logits = head_pass.logits(hidden[0, row])
                totals[step] += 1
                right[step] += int(head.target_ids[logits.argmax()]) == drafted
                if head.is_proposable[drafted]:
                    sums[step] -= float((wanted * logits.log_softmax(-1)).sum().detach())
                    counts[step] += 1

    weights = [decay**step for step in range(unrolled)]
    means = [total / count for total, count in zip(sums, counts, strict=True)]
    expected = sum(a * b for a, b in zip(weights, means, strict=True)) / sum(weights)
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-4)
    assert shares.tolist() == pytest.approx([a / b for a, b in zip(right, totals, strict=True)])


def test_saved_head_has_the_published_format(target: Target, tmp_path: Path) -> None:
    head = new_head(target, draft_vocab_size=100)
    head.save(tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    tensors = load_file(tmp_path / "model.safetensors")
    layer = ["input_layernorm", "hidden_norm", "post_attention_layernorm"]
    layer += [f"self_attn.{name}_proj" for name in "qkvo"]
    layer += [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
    names = ["fc", "norm", "lm_head", *(f"midlayer.{name}" for name in layer)]
    assert sorted(tensors) == sorted([*(f"{name}.weight" for name in names), "d2t", "t2d"])
    assert all(tensors[f"{name}.weight"].dtype == torch.bfloat16 for name in names)
    assert (torch.arange(100) + tensors["d2t"]).tolist() == tensors["t2d"].nonzero().view(-1).tolist()
    again = EagleHead.load(tmp_path, target, head.feature_rms)
    assert torch.equal(again.target_ids, head.target_ids)
    for name, weight in head.cast(torch.bfloat16).items():
        assert torch.equal(again.cast(torch.bfloat16)[name], weight)
        assert torch.equal(tensors[name], weight)


@pytest.mark.skipif(not smollm2.DRAFT.exists(), reason="an sdist has no drafts")
def test_committed_head_is_that_of_its_record() -> None:
    file = smollm2.DRAFT / "model.safetensors"
    content = file.read_bytes()
    record = json.loads((smollm2.DRAFT / "record.json").read_text())
    assert hashlib.sha256(content).hexdigest() == record["draft_sha256"]
    assert record["evaluation_prompts_sha256"] == questions.EVALUATION_SHA256
    assert len(content) <= 16 * 2**20


@pytest.mark.parametrize("index", range(NUM_MODELS))
def test_features_are_those_of_the_decoder(index: int, tmp_path: Path) -> None:
    make_model(index, tmp_path)
    target = load_target(tmp_path, CPU)
    spec, decoder = target.spec, target.decoder
    token_ids = torch.randint(spec.vocab_size, (2, 40), generator=torch.Generator().manual_seed(index))
    aux_layers = (1, spec.num_layers - 1, spec.num_layers)
    features, final = target.run(token_ids, aux_layers)
    cache = decoder.empty_kv_cache(80, 1)
    rows = [SequenceRows(range(first, first + 40), 0, 40) for first in (0, 40)]
    hidden, aux = decoder.forward(token_ids.view(-1), AttentionBatch(rows, cache), cache, aux_layers)
    inner, depth = inner_terms(spec), 2 * spec.num_layers  # a mixer and a channel in each layer
    assert_near(features.flatten(0, 1), torch.cat(aux, -1), inner=inner, depth=depth, name="features")
    wanted = decoder.logits(hidden)
    logits = target.logits(final, target.head_rows(torch.arange(spec.vocab_size)))
    assert_near(logits.flatten(0, 1), wanted, inner=inner, depth=depth + 1, name="logits")


def test_capped_logits_are_those_of_the_decoder(target: Target) -> None:
    spec = msgspec.structs.replace(target.spec, logits_cap=0.5, logits_divisor=2.0)
    capped = Target(Decoder(spec, target.decoder.weights))
    rows = SequenceRows(range(9), 0, 9)
    cache, token_ids = capped.decoder.empty_kv_cache(9, 1), torch.arange(9)
    hidden, _ = capped.decoder.forward(token_ids, AttentionBatch([rows], cache), cache)
    _, final = capped.run(token_ids[None], (1,))
    found = capped.logits(final, capped.head_rows(torch.arange(spec.vocab_size)))[0]
    assert found.abs().max() < 0.5
    torch.testing.assert_close(found, capped.decoder.logits(hidden).clone(), rtol=1e-3, atol=1e-4)


def test_width_of_a_head_is_that_of_the_target_for_a_row(target: Target) -> None:
    assert mlp_width(target.spec) == target.spec.mlp_size > 0
    experts = Experts(num_experts=8, num_active=3, intermediate_size=40, shared=Mlp(intermediate_size=50))
    for channel, width in (
        (experts, 170),
        (msgspec.structs.replace(experts, shared=None), 120),
        (Mlp(intermediate_size=200), 200),
    ):
        dense = msgspec.structs.replace(target.spec.layers[0], channel=Mlp(intermediate_size=60))
        layers = dense, msgspec.structs.replace(dense, channel=channel)
        assert mlp_width(msgspec.structs.replace(target.spec, layers=layers)) == width


def test_pass_equals_that_of_the_draft_decoder(target: Target, tmp_path: Path) -> None:
    head = new_head(target)
    head.save(tmp_path)
    head = EagleHead.load(tmp_path, target, head.feature_rms)  # as exact as files are
    draft = DraftDecoder.load(tmp_path, target.decoder)
    tokens = torch.randint(500, (24,), generator=torch.Generator().manual_seed(0)).tolist()
    verified, num_steps = 20, 4
    token_ids = torch.tensor([tokens])
    head_pass = EaglePass(head, head.cast(torch.float32), len(tokens))
    hidden = head_pass.fuse(target.run(token_ids, head.config.aux_layers)[0])
    steps = []
    for step in range(num_steps):
        hidden = head_pass.step(hidden, target.embed(token_ids.roll(-1 - step, 1)))
        steps.append(hidden[0].detach())

    torch.testing.assert_close(
        steps[0][: verified + 1], whole_pass(target.decoder, draft, tokens[: verified + 2]).clone()
    )
    cache = draft.empty_kv_cache(32, 1)
    features = target.run(token_ids, draft.aux_layers)[0][0]
    fused = draft.fuse(features.chunk(3, -1), features[:, :0])
    first, count = 0, verified
    rows = fused[:verified]
    for step in range(num_steps):
        batch = AttentionBatch([SequenceRows(range(32), first, count)], cache, slot_offset=1)
        ids = torch.tensor(tokens[first + 1 : first + 1 + count])
        rows = draft.forward(rows, ids, batch, cache)[-1:]
        torch.testing.assert_close(steps[step][verified - 1], rows[0].clone())
        torch.testing.assert_close(head_pass.logits(steps[step][verified - 1 : verified]), draft.logits(rows))
        first, count = verified + step, 1


def test_blocks_equal_those_of_the_draft_decoder(target: Target, tmp_path: Path) -> None:
    head = new_dflash(target)
    head.save(tmp_path)
    head = DFlashHead.load(tmp_path, target, head.feature_rms)  # as exact as files are
    draft = DFlashDecoder.load(resolve(tmp_path), target.decoder)
    tokens = torch.randint(499, (2, 24), generator=torch.Generator().manual_seed(0))
    head_pass, num_masks = head.open(head.cast(torch.float32), tokens.shape[1]), draft.config.num_masks
    steps: list[torch.Tensor] = []

    def take(step: int, hidden: torch.Tensor) -> torch.Tensor:
        steps.append(hidden.detach())
        return tokens

    head_pass.draft(target, tokens, target.run(tokens, head.aux_layers)[0], num_masks, take)
    assert len(steps) == num_masks
    for row in (0, 7, 22):
        for sequence in range(2):
            known = tokens[sequence, : row + 2].tolist()
            expected = dflash_pass(target.decoder, draft, known, num_masks).clone()
            found = torch.stack([hidden[sequence, row] for hidden in steps])
            torch.testing.assert_close(found, expected)
            torch.testing.assert_close(head_pass.logits(found), draft.logits(expected))


def test_saved_dflash_head_has_the_published_format(target: Target, tmp_path: Path) -> None:
    head = new_dflash(target, draft_vocab_size=100)
    head.save(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    layer = ["input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm"]
    layer += [f"self_attn.{name}_proj" for name in "qkvo"]
    layer += [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
    names = ["fc", "hidden_norm", "norm", "lm_head"]
    names += [f"layers.{index}.{name}" for index in range(2) for name in layer]
    assert sorted(tensors) == sorted([*(f"{name}.weight" for name in names), "d2t", "t2d"])
    again = DFlashHead.load(tmp_path, target, head.feature_rms)
    for name, weight in head.cast(torch.bfloat16).items():
        assert torch.equal(again.cast(torch.bfloat16)[name], weight)
        assert torch.equal(tensors[name], weight)


@pytest.mark.parametrize("kind", slow_after(1, NEW_HEADS))
def test_acceptance_is_that_of_the_engine(
    kind: str, folder: Path, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head trained on what it is asked for, so that drafts are accepted; in float32, so that the engine's
    tokens do not depend on drafting."""
    prompts = [[5, 6, 7, 8], [9, 10, 11]]
    params = SamplingParams(max_tokens=30, ignore_eos=True)

    async def ask(config: EngineConfig) -> list[tuple[tuple[int, ...], Acceptance]]:
        async with Engine(folder, config) as engine:
            completions = [completion async for completion in engine.map(prompts, params)]
        stats = [each.speculation for each in completions]
        return [
            (
                each.token_ids,
                Acceptance(num_rounds=found.num_rounds, accepted_at=found.accepted_at)
                if found
                else Acceptance(),
            )
            for each, found in zip(completions, stats, strict=True)
        ]

    plain = asyncio.run(ask(CONFIG))
    answers = [
        Answer(kind="chat", temperature=0.0, prompt_ids=prompt, token_ids=list(tokens))
        for prompt, (tokens, _) in zip(prompts, plain, strict=True)
    ]
    settings = TrainingSettings(
        num_steps=120, seconds=1e9, evaluate_every_s=1e9, learning_rate=5e-3, unrolled=3
    )
    head = NEW_HEADS[kind](target, draft_vocab_size=450)
    losses: list[float] = []
    update = Training._update

    def noted(self: Training, loss: torch.Tensor) -> None:
        losses.append(float(loss.detach()))
        update(self, loss)

    monkeypatch.setattr(Training, "_update", noted)
    untrained = sum(evaluate(head, target, [answer]).length for answer in answers)
    Training(head, target, tmp_path, settings).run(lambda: answers, answers)
    assert len(losses) == 120 and max(losses[-5:]) < min(losses[:5]) - 1.0
    speculation = Speculation(draft=tmp_path / "draft", shape=Chain(3), adaptive=False)
    drafted = asyncio.run(ask(CONFIG.replace(speculation=speculation)))
    head = type(head).load(tmp_path / "draft", target, head.feature_rms)
    assert sum(evaluate(head, target, [answer]).length for answer in answers) > untrained + 0.5
    for answer, (tokens, counted) in zip(answers, drafted, strict=True):
        assert list(tokens) == answer.token_ids
        found = evaluate(head, target, [answer])
        assert found.length > 1.3  # else the comparison says nothing
        # The engine also counts rounds at the end of the answer.
        assert 0 <= counted.num_rounds - found.num_rounds <= 3
        assert all(0 <= a - b <= 3 for a, b in zip(counted.accepted_at, found.accepted_at, strict=True))


def test_training_continues_where_it_was_stopped(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = drawn_answers(target, 12)

    def train(name: str) -> Training:
        (tmp_path / name).mkdir(exist_ok=True)
        settings = TrainingSettings(
            num_steps=6, seconds=1e9, evaluate_every_s=0.0, tokens_per_batch=128, unrolled=2
        )
        training = Training(new_head(target), target, tmp_path / name, settings)
        training.restore()
        training.run(lambda: answers, answers[:1])
        return training

    def stop(self: Training, loss: torch.Tensor) -> None:
        if self.step == 3:
            raise KeyboardInterrupt
        update(self, loss)

    update = Training._update
    whole = train("whole")
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Training, "_update", stop)
        train("parts")
    parts = train("parts")
    assert whole.step == parts.step == 6
    assert whole.num_tokens == parts.num_tokens
    one, other = (torch.load(each.checkpoint, weights_only=True) for each in (whole, parts))
    for name, weight in one["weights"].items():
        torch.testing.assert_close(weight, other["weights"][name], rtol=0, atol=0)
    lines = (tmp_path / "parts" / "curve.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4, 5, 6]


def test_resumed_head_proposes_the_tokens_that_it_proposed(target: Target, tmp_path: Path) -> None:
    """Answers that were added meanwhile make other tokens frequent."""
    settings, found = TrainingSettings(num_steps=1, seconds=1e9), drawn_answers(target, 2)
    head, other = new_head(target), new_head(target)
    Training(head, target, tmp_path, settings).run(lambda: found, found)
    other.propose(target, torch.arange(300))
    assert Training(other, target, tmp_path, settings).restore()
    assert torch.equal(other.target_ids, head.target_ids)
    assert torch.equal(other.is_proposable, head.is_proposable)
    assert torch.equal(other.target_rows, head.target_rows)


def test_checkpoints_that_are_damaged_or_of_another_head_are_refused(target: Target, tmp_path: Path) -> None:
    settings, found = TrainingSettings(num_steps=1, seconds=1e9), drawn_answers(target, 2)
    training = Training(new_head(target), target, tmp_path, settings)
    training.run(lambda: found, found)
    with pytest.raises(CheckpointError, match=r"target_ids has shape \[300\], expected \[200\]"):
        Training(new_head(target, draft_vocab_size=200), target, tmp_path, settings).restore()
    whole = training.checkpoint.read_bytes()
    for damaged in (b"", b"junk", whole[: len(whole) // 2]):
        training.checkpoint.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"checkpoint.pt: not a checkpoint of this head"):
            training.restore()


@pytest.mark.parametrize("line", ["{", '{"kind": 1}', None])
def test_answers_that_cannot_be_trained_with_are_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str | None
) -> None:
    foreign = Answer(kind="chat", temperature=0.0, prompt_ids=[1], token_ids=[10**6])
    text = msgspec.json.encode(foreign).decode() if line is None else line
    for name in ("answers-0.jsonl", "evaluation.jsonl"):
        (tmp_path / name).write_text(f"{text}\n")
    assert main(["train", str(folder), "--work", str(tmp_path), "--device", "cpu"]) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert ("answers of another model" if line is None else "a line is no answer") in said


def test_commands_make_a_head_for_the_engine(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = [Question("chat", "One?"), Question("code", "Two?"), Question("maths", "Three?")]
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"kind": q.kind, "prompt": q.prompt}) + "\n" for q in asked))
    monkeypatch.setattr(answers, "evaluation_questions", lambda: asked)
    monkeypatch.setattr(measuring, "SPEED_ROUNDS", 1)
    monkeypatch.setattr(answers, "Templates", lambda seed: Scripted())
    work, output = tmp_path / "work", tmp_path / "measured.json"

    def run(*arguments: object) -> None:
        assert main([str(argument) for argument in arguments]) == 0

    run("generate", folder, "--work", work, "--tokens", 200, "--lanes", 4, "--max-answer", 12)
    num_answers = len(AnswerFolder(work).training())
    run(
        *("generate", folder, "--work", work, "--tokens", 20, "--lanes", 4, "--max-answer", 12),
        *("--own-share", 0),
    )
    added = AnswerFolder(work).training()[num_answers:]
    assert added and num_answers
    chat_format = load_chat_format(folder)
    templates = [chat_format.prompt_ids(f"Number {number}?") for number in range(64)]
    assert all(answer.prompt_ids in templates for answer in added)
    settings = ("--vocabulary", 60, "--steps", 2, "--batch-tokens", 256, "--device", "cpu")
    settings += ("--wait-tokens", 100)
    run("train", folder, "--work", work, *settings)
    shared, further = tmp_path / "shared", tmp_path / "further"
    settings += ("--answers", work)
    run("train", folder, "--work", shared, "--shared-head", "--intermediate", 40, *settings)
    run("train", folder, "--work", further, "--start", shared / "draft", *settings)
    heads = [load_file(each / "draft" / "model.safetensors") for each in (work, shared, further)]
    assert ["lm_head.weight" in head for head in heads] == [True, False, False]
    assert heads[2]["midlayer.mlp.down_proj.weight"].shape[1] == 40
    (mode,) = {each.stat().st_mode for each in (further / "draft").iterdir()}  # of both files
    assert mode & 0o044 == (work / "curve.jsonl").stat().st_mode & 0o044
    parallel, more = tmp_path / "parallel", tmp_path / "more"
    kind = ("--kind", "dflash")
    run("train", folder, "--work", parallel, *kind, "--unrolled", 4, "--layers", 1, *settings)
    run("train", folder, "--work", more, *kind, "--start", parallel / "draft", *settings)
    config = json.loads((more / "draft" / "config.json").read_text())
    assert (config["block_size"], config["transformer_layer_config"]["num_hidden_layers"]) == (5, 1)
    options = ("--prompts", file, "--max-tokens", 8)
    run("measure", folder, "--draft", more / "draft", "--output", output, *options, "--batches")
    record = json.loads(output.read_text())
    assert all(found["num_rounds"] > 0 for found in record["acceptance"].values())
    for refused, message in (
        ((*kind, "--unrolled", 2), "unrolled=2: expected at least 3 masks"),
        ((*kind, "--start", shared / "draft"), "expected a head of --kind dflash"),
        ((*kind, "--unrolled", 5, "--start", more / "draft"), "unrolled=5: expected the head's 4 masks"),
        (("--start", more / "draft"), "expected a head of --kind eagle3"),
    ):
        arguments = ["train", folder, "--work", tmp_path / "refused", *settings, *refused]
        assert main([str(argument) for argument in arguments]) == 1
        assert message in capsys.readouterr().err
    options = ("--prompts", file, "--max-tokens", 8, "--batches", 2)
    run("measure", folder, "--draft", further / "draft", "--output", output, *options)
    record = json.loads(output.read_text())
    assert record["same_answers"] == {"always": 1.0, "adaptive": 1.0}
    assert record["num_draft_tokens"] == 3
    assert all(found["num_rounds"] > 0 for found in record["acceptance"].values())
    assert record["tokens_per_s"]["2"].keys() == {"plain", "always", "adaptive", "gain"}
    trace = tmp_path / "trace.json"
    monkeypatch.setattr(measuring, "MAX_REPEATED_SHARE", 1.0)
    options = ("--draft", work / "draft", "--output", output, "--prompts", file, "--max-tokens", 8)
    run("measure", folder, *options, "--trace", trace, "--batches")
    (lengths,) = AcceptanceTrace.load(trace).sequences  # of the one question that is conversation
    counted = json.loads(output.read_text())["acceptance"]["chat 0"]
    assert len(lengths) >= counted["num_rounds"] > 0 and sum(lengths) <= 8
    shapes = ("--shapes", "chain-2", "tree-5", "ngram-2", "hybrid-2", "--executor", "eager")
    run("measure", folder, *options, *shapes, "--batches", 2)
    record = json.loads(output.read_text())
    assert record["executor"] == "eager" and record["max_tokens"] == 8
    assert all(found["tokens_per_s"]["2"] > 0 for found in record["shapes"].values())
    for shape in ("chain-2", "ngram-2"):
        groups = record["shapes"][shape]["acceptance"]
        assert sum(group["num_answers"] for group in groups.values()) == 2 * len(
            file.read_text().splitlines()
        )
        assert all(group["tokens_per_step"] >= 1 for group in groups.values())
    assert {name: found["num_verified"] for name, found in record["shapes"].items()} == {
        "plain": 1,
        "chain-2": 3,
        "tree-5": 6,
        "ngram-2": 3,
        "hybrid-2": 3,
    }


def test_several_processes_may_write_the_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_text, file = Path.write_text, tmp_path / "evaluation.jsonl"

    def interrupted(path: Path, text: str, **options: Any) -> int:
        """Another process writes the file between this one's writing and renaming."""
        monkeypatch.setattr(Path, "write_text", write_text)
        num_characters = path.write_text(text, **options)
        answers.write_whole(file, "second")
        return num_characters

    monkeypatch.setattr(Path, "write_text", interrupted)
    answers.write_whole(file, "first")
    assert file.read_text() == "first" and list(tmp_path.iterdir()) == [file]


def test_training_without_answers_is_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    work = tmp_path / "work"
    assert main(["train", str(folder), "--work", str(work), "--device", "cpu"]) == 1
    assert "holds no answers: run generate first" in capsys.readouterr().err
    assert not work.exists()


def test_training_on_too_short_answers_is_refused(target: Target, tmp_path: Path) -> None:
    short = [Answer(kind="chat", temperature=0.0, prompt_ids=[1, 2], token_ids=[3, 4])]
    training = Training(new_head(target), target, tmp_path, TrainingSettings(num_steps=1, seconds=1.0))
    with pytest.raises(AnswerError, match="expected answers of 5 tokens or more"):
        training.run(lambda: short, short)


@pytest.mark.parametrize("option", ["--seconds", "--evaluate-every", "--learning-rate"])
@pytest.mark.parametrize("value", ["0", "-1", "nan"])
def test_numbers_that_are_not_positive_are_refused(
    option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--work", "anywhere", f"{option}={value}"])
    assert f"{value}: expected a number over 0" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["chain", "ring-3", "chain-17", "tree-64", "ngram-x"])
def test_unknown_shapes_are_refused(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["measure", "--draft", "anywhere", "--output", "anywhere", "--shapes", name])
    assert "argument --shapes" in capsys.readouterr().err


def test_tokens_of_all_steps_are_counted() -> None:
    """Three drafted tokens of ten: seven steps. The other answer has none."""
    assert measuring.per_step([(10, 3)]) == pytest.approx(10 / 7)
    assert measuring.per_step([(10, 3), (5, 0)]) == pytest.approx(15 / 12)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--shapes", "chain-2", "chain-2"), "shapes=['chain-2', 'chain-2']: expected different ones"),
        (("--shapes", "chain-2", "--trace", "trace.json"), "trace='trace.json': expected none with --shapes"),
        (("--shapes", "tree-63", "--batches", "8"), "batches=8: expected at most 4 with rounds of 64 rows"),
        (("--output", "missing/record.json"), "missing/record.json'"),
        (("--draft", "missing"), "--draft missing: expected the folder of a head; it has no config.json"),
    ],
)
def test_measurements_that_cannot_be_made_are_refused_first(
    options: tuple[str, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ("--draft", smollm2.DRAFT, "--output", tmp_path / "record.json", *options)
    assert main(["measure", "anywhere", *map(str, given)]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\n \n", 'expected lines with "kind" and "prompt"; it has none'),
        (b'{"kind": "chat", "prompt": "one"}\n{"kind": ', ", line 2: expected an object"),
        (b'{"prompt": "one"}', ", line 1: expected an object"),
        (b'{"kind": "chat", "prompt": ""}', ", line 1: expected a prompt that is not empty"),
        (b"\xff\xfe", ", line 1: expected an object"),
    ],
)
def test_questions_of_another_form_are_refused(content: bytes, message: str, tmp_path: Path) -> None:
    file = tmp_path / "questions.jsonl"
    file.write_bytes(content)
    with pytest.raises(QuestionError) as raised:
        evaluation_questions(file)
    assert str(raised.value).startswith(str(file)) and message in str(raised.value)


def test_blank_lines_between_questions_are_left_out(tmp_path: Path) -> None:
    file = tmp_path / "questions.jsonl"
    file.write_text('\n{"kind": "poem", "prompt": "one"}\n\n{"kind": "chat", "prompt": "two"}\n')
    assert [question.prompt for question in evaluation_questions(file)] == ["one", "two"]


@pytest.mark.parametrize("device", ["tpu", "cuda:x", "meta"])
def test_devices_that_cannot_train_are_refused(device: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--work", "anywhere", "--device", device])
    assert f"argument --device: {device}: expected cpu" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["-0.1", "1.1", "nan"])
def test_shares_out_of_range_are_refused(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["generate", "--work", "anywhere", f"--own-share={value}"])
    assert f"{value}: expected a number from 0 to 1" in capsys.readouterr().err


class Scripted:
    """Stands for templates of questions."""

    def questions(self) -> Iterator[Question]:
        for number in itertools.count():
            yield Question("chat", f"Number {number}?")
