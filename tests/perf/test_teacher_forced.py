"""Tokens of a random checkpoint against float32 logits of its files."""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from drift_sdk import EngineConfig
from drift_sdk.loading.source import resolve
from drift_sdk.models.channels import ExpertWeights
from drift_sdk.models.decoder import Decoder
from perf import teacher_forced
from perf.harness.checkpoint import ExpertGroups, write_checkpoint
from perf.harness.published import PUBLISHED
from perf.harness.shapes import Model, prepare
from perf.teacher_forced import CheckedRun, Reference, checked, main, own_answers

VLLM = """
from types import SimpleNamespace

__version__ = "0"

class SamplingParams:
    def __init__(self, *, max_tokens, **others):
        self.max_tokens = max_tokens

class LLM:
    def __init__(self, *, model, load_format, **settings):
        assert load_format == "auto"

    def generate(self, prompts, params, use_tqdm):
        tokens = SimpleNamespace(token_ids=[7] * params.max_tokens)
        return [SimpleNamespace(outputs=[tokens]) for _ in prompts]
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    model = prepare("tiny-experts", tmp_path_factory.mktemp("model"))
    write_checkpoint(model, "cpu", 8.0)
    return model


def test_checkpoint_has_the_random_weights_of_layers(model: Model) -> None:
    drawn = Decoder.random(model.spec, device="cpu", dtype=torch.bfloat16)
    loaded = Decoder.load(model.spec, resolve(model.path).tensors(), device="cpu", dtype=torch.bfloat16)
    own, other = (decoder.weights.layers[1] for decoder in (drawn, loaded))
    assert isinstance(own.channel, ExpertWeights) and isinstance(other.channel, ExpertWeights)
    assert torch.equal(own.mixer.qkv, other.mixer.qkv)
    for name in ("blocks", "scales"):
        assert torch.equal(getattr(own.channel.down, name), getattr(other.channel.down, name))


def test_routers_choose_the_group_of_a_token_by_a_wide_margin(model: Model) -> None:
    """And the head has no part in the directions of groups, so that logits depend on what layers compute."""
    loaded = Decoder.load(model.spec, resolve(model.path).tensors(), device="cpu", dtype=torch.float32)
    reference = Reference(model.path, model, "cpu")
    prompts = random.Random(0).choices(range(5, 320), k=100)
    logits, leads = reference.rows(prompts, [7] * 20)
    assert (leads > teacher_forced.SMALL_LEAD).float().mean() > 0.8
    assert len(set(logits.argmax(dim=1).tolist())) > 1
    directions = ExpertGroups(model, "cpu")._directions
    assert torch.allclose(directions @ directions.T, torch.eye(4), atol=1e-5)
    assert (loaded.weights.head @ directions.T).abs().max() < 0.02 * loaded.weights.head.std() * 8
    experts = loaded.weights.layers[1].channel
    assert isinstance(experts, ExpertWeights)
    chosen = (experts.router @ directions.T).argmax(dim=1)
    assert chosen.tolist() == [1, 1, 2, 2, 3, 3, 0, 0]


def test_a_fault_in_the_experts_is_found(model: Model, tmp_path: Path) -> None:
    """The reference has two experts of a layer in turn."""
    prompts = [random.Random(seed).choices(range(5, 320), k=60) for seed in range(3)]
    config = EngineConfig(device="cpu", max_num_seqs=3, max_model_len=100)
    answers, _ = asyncio.run(own_answers(model.path, config, prompts, 16))
    answered = [list(answer) for answer in answers]
    right = checked(Reference(model.path, model, "cpu"), prompts, answered)
    assert right["num_wrong"] == right["num_wrong_tied"] == 0
    shutil.copytree(model.path, tmp_path / "model")
    (file,) = (tmp_path / "model").glob("*.safetensors")
    tensors = load_file(file)
    name = "model.layers.1.mlp.experts.down_proj_blocks"
    tensors[name] = tensors[name].roll(1, dims=0)
    save_file(tensors, file)
    wrong = checked(Reference(tmp_path / "model", model, "cpu"), prompts, answered)
    assert wrong["num_wrong"] > 0


def test_wrong_tokens_are_counted_apart_from_tied_rows(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = Reference(model.path, model, "cpu")
    prompt = list(range(5, 25))
    answer = []
    for _ in range(6):
        logits, _ = reference.rows(prompt, [*answer, 0])
        answer.append(int(logits[-1].argmax()))
    monkeypatch.setattr(teacher_forced, "SMALL_LEAD", 0.0)
    right = checked(reference, [prompt], [answer])
    assert right["num_tokens"] == right["num_equal"] == 6
    assert not any(right[name] for name in ("num_tied", "num_wrong", "num_wrong_tied", "largest_gap"))
    lowest = int(logits[-1].argmin())
    wrong = checked(reference, [prompt], [[*answer[:-1], lowest]])
    assert (wrong["num_wrong"], wrong["num_equal"]) == (1, 5) and wrong["largest_gap"] > 1
    monkeypatch.setattr(teacher_forced, "SMALL_LEAD", 100.0)
    tied = checked(reference, [prompt], [[*answer[:-1], lowest]])
    assert (tied["num_tied"], tied["num_wrong"], tied["num_wrong_tied"]) == (6, 0, 1)


def test_gaps_that_are_no_numbers_are_wrong(model: Model) -> None:
    class Broken(Reference):
        def rows(self, prompt: Sequence[int], answer: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
            logits = torch.zeros(len(answer), 320)
            logits[0] = torch.nan
            return logits, torch.full((len(answer),), torch.inf)

    found = checked(Broken(model.path, model, "cpu"), [[5, 6]], [[7, 8]])
    assert (found["num_wrong"], found["num_equal"], found["largest_gap"]) == (2, 0, float("inf"))


def test_a_router_of_all_experts_has_no_ties(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    every = PUBLISHED["tiny-experts"] | {"num_experts_per_tok": 8, "experts_per_token": 8}
    monkeypatch.setitem(PUBLISHED, "tiny-experts", every)
    model = prepare("tiny-experts", tmp_path)
    write_checkpoint(model, "cpu", 8.0)
    _, leads = Reference(model.path, model, "cpu").rows([5, 6, 7], [8, 9])
    assert leads.isinf().all()


def test_files_of_a_model_are_never_replaced(model: Model, tmp_path: Path) -> None:
    shutil.copytree(model.path, tmp_path / "own")
    before = {path.name: path.read_bytes() for path in (tmp_path / "own").iterdir()}
    with pytest.raises(SystemExit):
        main(["--model", str(tmp_path / "own"), "--device", "cpu", "--out", str(tmp_path / "out.json")])
    own = prepare(str(tmp_path / "own"), tmp_path)
    with pytest.raises(ValueError, match="its files would be replaced"):
        write_checkpoint(own, "cpu", 8.0)
    assert {path.name: path.read_bytes() for path in (tmp_path / "own").iterdir()} == before


@pytest.mark.parametrize("num_wrong, num_wrong_tied, is_good", [(0, 2, True), (1, 0, False), (0, 3, False)])
def test_verdict(num_wrong: int, num_wrong_tied: int, is_good: bool) -> None:
    run = CheckedRun(
        engine="drift", model="m", dtype="bfloat16", scenario="teacher-forced", batch=1, context=1,
        num_tokens=40, num_tied=20, num_equal=30, num_wrong=num_wrong, num_wrong_tied=num_wrong_tied,
        largest_gap=0.1,
    )  # fmt: skip
    assert run.is_good == is_good


def test_engines_are_checked_and_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The own engine is right; the peer always answers with the same token."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "vllm.py").write_text(VLLM)
    monkeypatch.setenv("VLLM_PATH", str(tmp_path / "site"))
    out = tmp_path / "found.json"
    arguments = ["--model", "tiny-experts", "--device", "cpu", "--prompts", "2", "--tokens", "4"]
    with pytest.raises(SystemExit) as caught:
        main([*arguments, "--peer", "vllm", "--out", str(out)])
    assert caught.value.code == 1
    own, peer = msgspec.json.decode(out.read_bytes())["runs"]
    assert (own["engine"], own["num_tokens"], own["num_wrong"]) == ("drift", 8, 0)
    assert own["load_s"] > 0 and own["num_wrong_tied"] == 0
    assert peer["engine"] == "vllm" and peer["num_equal"] < 8
    assert peer["num_wrong"] + peer["num_wrong_tied"] > 0
