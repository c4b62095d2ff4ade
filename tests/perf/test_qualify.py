"""Qualification of a head, on tiny models."""

from __future__ import annotations

import importlib
import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from assistant_zoo import make_assistant
from decoder_parity import load_decoder
from dflash_zoo import make_dflash
from draft_zoo import make_draft
from family_zoo import draw_model
from model_zoo import make_model
from safetensors.torch import load_file, save_file

from drift_sdk import ModelLoadError
from perf import acceptance, compare_stages, qualify, report
from perf.harness.commands import Command, CommandFailed
from perf.harness.decoding import DecodeOptions
from perf.harness.head_files import check_files
from perf.harness.plain_draft import PlainDraft
from perf.harness.record import read
from perf.harness.scenario import Scenario, Text
from perf.harness.shapes import model_name, prepare

TEXT = "The sea rises and falls twice a day, and no two tides are alike. " * 4


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    make_model(1, folder)
    return folder


@pytest.fixture(scope="module")
def head(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A head that names its layers, so that their numbers have two meanings."""
    folder = tmp_path_factory.mktemp("head")
    make_draft("specforge", folder, target)
    return folder


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text(TEXT)
    return file


@pytest.fixture(autouse=True)
def quick(even_clock: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRIFT_COMMIT", "abc")
    monkeypatch.setattr("perf.harness.recording.read_bandwidth_tb_s", lambda device: 0.01)
    monkeypatch.setattr(report, "find_spec", lambda name: None)  # no pictures
    monkeypatch.setattr("perf.speculative.DecodeOptions", partial(DecodeOptions, lengths=(2, 30)))


class Runner:
    """Runs commands in this process; those of modules in `failing` fail at once, others do nothing if it is
    not `real`."""

    def __init__(self, *failing: str, real: bool = False) -> None:
        self.seen: list[str] = []
        self._failing, self._real = failing, real

    def __call__(self, command: Command, device: str, folder: Path, on_line: Callable[[str], None]) -> None:
        self.seen.append(command.module)
        if command.module in self._failing:
            raise CommandFailed(f"{command.module}: too far")
        if self._real:
            arguments = command.line(device, folder)[3:]
            if importlib.import_module(command.module).main(arguments):
                raise CommandFailed(f"{command.module}: exit status 1")


def run_qualify(target: Path, head: Path, text: Path, out: Path, runner: Runner, *more: str) -> int:
    shared = ("--device", "cpu", "--text", str(text), "--out", str(out))
    return qualify.main([str(target), "--draft", str(head), *shared, *more], runner)


def test_head_is_qualified_and_reported(target: Path, head: Path, text: Path, tmp_path: Path) -> None:
    out, runner = tmp_path / "out", Runner(real=True)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("One two three\n")
    settings = ("--scenario", "single-16", "single-8k", "batch2-24", "--num-draft-tokens", "2")
    settings += ("--repeats", "1", "--max-tokens", "6", "--prompts", str(prompts))
    assert run_qualify(target, head, text, out, runner, *settings) == 0
    modules = ["perf.compare_stages", "perf.acceptance", "perf.speculative", "perf.speculative"]
    assert runner.seen == modules
    outcome = json.loads((out / "qualify.json").read_text())
    assert outcome["is_qualified"]
    assert list(outcome["checks"]) == ["files", "stages", "acceptance", "single", "batch"]
    assert outcome["left_out"] == {"single-8k": "the target has a context of 512 tokens"}
    assert outcome["head"]["aux_layers"] == [1, 2, 3] and outcome["head"]["draft_vocab_size"] == 96
    found = read(out / "results" / "speculative.json").runs
    assert [(run["scenario"], run["num_draft_tokens"]) for run in found] == [
        ("single-16", 0), ("single-16", 2), ("batch2-24", 0), ("batch2-24", 2),
    ]  # fmt: skip
    assert {run["text"] for run in found} == {"text.txt"}
    assert [run.get("draft") for run in found] == [None, head.name] * 2
    measured = read(out / "results" / "acceptance.json").runs
    assert [(run["convention"], run["temperature"], run["is_used"]) for run in measured] == [
        ("output", 0.0, True), ("boundary", 0.0, False), ("output", 1.0, True), ("boundary", 1.0, False),
    ]  # fmt: skip
    shown = (out / "report.md").read_text()
    for part in ("Qualified.", "| single-8k | left out |", "## Acceptance of a head", "## Stages of a head"):
        assert part in shown
    again = Runner()
    assert run_qualify(target, head, text, out, again, *settings) == 0
    assert again.seen == []


def test_failed_check_does_not_stop_the_others_and_is_tried_again(
    target: Path, head: Path, text: Path, tmp_path: Path
) -> None:
    out, failing = tmp_path / "out", Runner("perf.compare_stages")
    settings = ("--scenario", "single-16")
    assert run_qualify(target, head, text, out, failing, *settings) == 1
    assert failing.seen == ["perf.compare_stages", "perf.acceptance", "perf.speculative"]
    outcome = json.loads((out / "qualify.json").read_text())
    assert not outcome["is_qualified"]
    assert outcome["checks"]["stages"]["reason"] == "perf.compare_stages: too far"
    runner = Runner()
    assert run_qualify(target, head, text, out, runner, *settings) == 0
    assert runner.seen == ["perf.compare_stages"]


def test_results_of_another_head_or_other_settings_are_not_mixed_in(
    target: Path, head: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, other = tmp_path / "out", tmp_path / "other"
    shutil.copytree(head, other)
    settings = ("--scenario", "single-16")
    assert run_qualify(target, other, text, out, Runner(), *settings) == 0
    with pytest.raises(SystemExit):
        run_qualify(target, other, text, out, Runner(), *settings, "--num-draft-tokens", "4")
    tensors = load_file(other / "model.safetensors")
    save_file(tensors | {"norm.weight": tensors["norm.weight"] * 2}, other / "model.safetensors")
    with pytest.raises(SystemExit):
        run_qualify(target, other, text, out, Runner(), *settings)
    assert capsys.readouterr().err.count("--fresh removes them") == 2
    notes = out / "results" / "notes.txt"
    notes.write_text("mine")
    with pytest.raises(SystemExit):
        run_qualify(target, other, text, out, Runner(), *settings, "--fresh")
    assert f"--fresh: out='{notes}'" in capsys.readouterr().err and notes.exists()
    notes.unlink()
    runner = Runner()
    assert run_qualify(target, other, text, out, runner, *settings, "--fresh") == 0
    assert len(runner.seen) == 3


@pytest.mark.parametrize(
    "value, reason", [(torch.nan, "has NaN"), (None, "norm.weight of shape [64] is missing")]
)
def test_head_with_bad_files_is_not_measured(
    value: float | None, reason: str, target: Path, head: Path, text: Path, tmp_path: Path
) -> None:
    bad, runner = tmp_path / "bad", Runner()
    shutil.copytree(head, bad)
    tensors = load_file(bad / "model.safetensors")
    norm = tensors.pop("norm.weight")
    if value is not None:
        norm[3] = value
        tensors["norm.weight"] = norm
    save_file(tensors, bad / "model.safetensors")
    assert run_qualify(target, bad, text, tmp_path / "out", runner) == 1
    outcome = json.loads((tmp_path / "out" / "qualify.json").read_text())
    assert list(outcome["checks"]) == ["files"] and reason in outcome["checks"]["files"]["reason"]
    assert runner.seen == []


def test_hash_covers_settings_and_tensors(target: Path, head: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(head, other)
    first = check_files(target, other)
    assert first.sha256 == check_files(target, head).sha256 and first.num_bytes > 10_000
    settings = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(settings | {"rms_norm_eps": 1e-3}))
    assert check_files(target, other).sha256 != first.sha256
    assert check_files(target, other, "boundary").aux_layers == (0, 1, 2)


@pytest.mark.parametrize("option", ["--text", "--reference", "--prompts"])
def test_missing_files_are_refused(
    option: str, target: Path, head: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        qualify.main([str(target), "--draft", str(head), option, "nowhere.txt"], Runner())
    assert f"{option} nowhere.txt: expected a file" in capsys.readouterr().err


def reference_of(target: Path, head: Path, file: Path) -> dict[str, torch.Tensor]:
    """The stages of an engine whose target differs a little, computed in float64."""
    decoder = load_decoder(target)
    tokens = torch.tensor(range(7, 40))
    generator = torch.Generator().manual_seed(0)
    aux = [torch.randn(32, 64, generator=generator) for _ in range(3)]
    ids = torch.arange(96) + load_file(head / "model.safetensors")["d2t"]
    stages = PlainDraft(head, decoder).stages(aux, aux[0], tokens[1:], ids)
    tensors = {"token_ids": tokens, "aux_hidden": torch.stack(aux)}
    tensors |= {name: stage.float().contiguous() for name, stage in stages.items()}
    save_file(tensors, file)
    return tensors


def test_reference_of_another_engine_is_compared(
    target: Path, head: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = tmp_path / "stages.safetensors", tmp_path / "out.json"
    tensors = reference_of(target, head, file)
    arguments = [str(target), str(head), "--reference", str(file), "--out", str(out)]
    assert compare_stages.main(arguments) == 0
    runs = read(out).runs
    stages = ["fc", "attention.0", "mlp.0", "pre_head", "logits"]
    assert [(run["reference"], run["stage"]) for run in runs] == [
        (name, stage) for name in ("float64", "stages.safetensors") for stage in stages
    ]
    assert all(run["is_good"] and run["min_cosine"] > 0.9999 for run in runs)
    capsys.readouterr()
    # The later stages in the file are not computed from the wrong one, so only that stage differs.
    save_file(tensors | {"mlp.0": tensors["mlp.0"].roll(1, 0)}, file)
    assert compare_stages.main(arguments) == 1
    assert "mlp.0 differs from stages.safetensors: cosine" in capsys.readouterr().err
    assert [run["stage"] for run in read(out).runs if not run["is_good"]] == ["mlp.0"]
    assert compare_stages.main([*arguments, "--min-cosine", "-1", "--min-overlap", "0"]) == 0


def test_own_stages_are_a_reference(
    target: Path, head: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "own.safetensors"
    tokens = [str(token) for token in range(7, 40)]
    assert compare_stages.main([str(target), str(head), "--tokens", *tokens, "--save", str(file)]) == 0
    assert compare_stages.main([str(target), str(head), "--reference", str(file), "--json"]) == 0
    text = capsys.readouterr().out
    rows = [row for row in json.loads(text[text.index("[") :]) if row["reference"] == "own.safetensors"]
    assert len(rows) == 5 and all(row["max_difference"] == 0 for row in rows)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"token_ids": None}, "token_ids: expected two or more integers"),
        ({"token_ids": torch.tensor([1.0, 2.0])}, "token_ids: expected two or more integers"),
        ({"token_ids": torch.tensor([5] * 32 + [10**6])}, "token ids from 5 to 1000000: expected 0 to"),
        ({"aux_hidden": torch.zeros(3, 32, 9)}, "aux_hidden of shapes"),
        ({"aux_hidden": torch.zeros(3, 9, 64)}, "aux_hidden has shape [3, 9, 64], expected [*, 32, *]"),
        ({"fc": torch.zeros(31, 64)}, "fc has shape [31, 64], expected [32, *]"),
        ({"fc": torch.zeros(32, 63)}, "fc has shape [32, 63], expected [32, 64]"),
        ({"other": torch.zeros(32, 64)}, "other: expected a stage of the draft: fc, attention.0"),
    ],
)
def test_references_that_do_not_fit_are_refused(
    changes: dict[str, torch.Tensor | None],
    message: str,
    target: Path,
    head: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "stages.safetensors"
    tensors = reference_of(target, head, file) | changes
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, file)
    with pytest.raises(SystemExit):
        compare_stages.main([str(target), str(head), "--reference", str(file)])
    assert message in capsys.readouterr().err


def test_short_acceptance_fails(
    target: Path, head: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts, out = tmp_path / "prompts.txt", tmp_path / "acceptance.json"
    prompts.write_text("One two three\n")
    arguments = [str(target), "--draft", str(head), "--prompts", str(prompts), "--max-tokens", "6"]
    arguments += ["--device", "cpu", "--aux-layer-convention", "boundary", "--out", str(out)]
    assert acceptance.main([*arguments, "--min-length", "1"]) == 0
    assert [run["is_used"] for run in read(out).runs] == [False, True]
    assert acceptance.main([*arguments, "--min-length", "4.1"]) == 1
    assert "expected 4.1 or more" in capsys.readouterr().err


def test_prompts_of_a_text_begin_at_different_places() -> None:
    text = Text("text.txt", tuple(range(10)))
    assert Scenario.parse("batch2-4").text_prompts(text) == [[0, 1, 2, 3], [5, 6, 7, 8]]
    assert Scenario.parse("single-12").text_prompts(text) == [[*range(10), 0, 1]]


def test_models_are_named_or_paths(target: Path, tmp_path: Path) -> None:
    model = prepare(model_name(str(target)), tmp_path)
    assert (model.name, model.path, model.load) == (target.name, target, "auto")
    assert model_name("tiny") == "tiny"
    with pytest.raises(Exception, match="expected a path that exists, or one of .*llama-3.1-8b"):
        model_name("nothing")


@pytest.mark.parametrize("kind", ["peagle", "dflash"])
def test_heads_that_draft_in_one_pass_are_qualified(
    kind: str, target: Path, text: Path, tmp_path: Path
) -> None:
    head, out, prompts = tmp_path / "head", tmp_path / "out", tmp_path / "prompts.txt"
    number = "4"
    if kind == "peagle":
        make_draft("peagle", head, target)
    else:
        make_dflash(1, head, target)
        number = str(json.loads((head / "config.json").read_text())["block_size"])
    prompts.write_text("One two three\n")
    settings = ("--scenario", "single-16", "--num-draft-tokens", "2", number, "--repeats", "1")
    settings += ("--max-tokens", "6", "--prompts", str(prompts))
    assert run_qualify(target, head, text, out, Runner(real=True), *settings) == 0
    outcome = json.loads((out / "qualify.json").read_text())
    found = read(out / "results" / "speculative.json").runs
    measured = read(out / "results" / "acceptance.json").runs
    rounds = [run["num_rounds"] for run in measured if run["is_used"]]
    assert len(rounds) == 2 and min(rounds) > 0
    if kind == "peagle":
        assert list(outcome["checks"]) == ["files", "stages", "acceptance", "single"]
        assert outcome["left_out"] == {} and outcome["head"]["num_masks"] is None
        assert [run["num_draft_tokens"] for run in found] == [0, 2, 4]
    else:
        masks = int(number) - 1
        assert list(outcome["checks"]) == ["files", "acceptance", "single"]
        assert outcome["left_out"].pop(f"{number} drafts") == f"the head has {masks} masks"
        assert list(outcome["left_out"]) == ["stages"] and outcome["head"]["num_masks"] == masks
        assert [run["num_draft_tokens"] for run in found] == [0, 2]
        assert {run["convention"] for run in measured} == {"output", "boundary"}
        assert {run["convention"] for run in measured if run["is_used"]} == {"boundary"}


def test_dflash_head_with_a_broken_tensor_is_not_qualified(target: Path, text: Path, tmp_path: Path) -> None:
    make_dflash(1, tmp_path / "head", target)
    file = tmp_path / "head" / "model.safetensors"
    save_file(load_file(file) | {"hidden_norm.weight": torch.full((64,), torch.nan)}, file)
    assert run_qualify(target, tmp_path / "head", text, tmp_path / "out", Runner()) == 1
    outcome = json.loads((tmp_path / "out" / "qualify.json").read_text())
    assert (
        list(outcome["checks"]) == ["files"] and "hidden_norm.weight" in outcome["checks"]["files"]["reason"]
    )


def test_drafts_that_are_no_heads_are_named(target: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="a whole model: expected a draft head"):
        check_files(target, target)
    model = draw_model("gemma4", 0)
    make_assistant(0, tmp_path, model)
    with pytest.raises(ModelLoadError, match="an assistant: expected a draft head"):
        check_files(target, tmp_path)


def test_layers_of_the_model_are_not_qualified(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        qualify.main([str(target), "--draft", "mtp", "--out", str(tmp_path / "out")])
    assert "--draft mtp: expected a draft head" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
