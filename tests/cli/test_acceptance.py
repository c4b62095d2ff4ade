"""The command that measures acceptance under each meaning of a draft's layer ids."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from dflash_zoo import make_dflash
from draft_zoo import make_draft
from model_zoo import make_model

from drift_sdk import (
    Chain,
    ConfigError,
    EngineConfig,
    Progress,
    SamplingParams,
    Speculation,
    SpeculationStats,
)
from drift_sdk.cli import drafts
from drift_sdk.cli.command_line import main
from drift_sdk.cli.drafts import PROMPTS, Measured, layers_by_convention, measure, read_prompts, verdict
from drift_sdk.models.draft_head import DraftDecoder

CONFIG = EngineConfig(device="cpu", dtype="float32", max_model_len=128, max_num_seqs=4, kv_cache_tokens=1024)
PARAMS = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    target, draft = tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("draft")
    make_model(0, target)
    make_draft("specforge", draft, target)
    return target, draft


def with_ids(draft: Path, folder: Path, ids: list[int] | None) -> EngineConfig:
    """A config with a copy of the draft, whose config has other layer ids."""
    for file in draft.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    config["eagle_config"] = {} if ids is None else {"eagle_aux_hidden_state_layer_ids": ids}
    (folder / "config.json").write_text(json.dumps(config))
    return CONFIG.replace(speculation=Speculation(draft=folder))


async def test_each_convention_has_rounds_of_its_own_layers(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = folders
    loaded: list[tuple[int, ...]] = []
    load = DraftDecoder.load

    def noted(*args: Any, **kwargs: Any) -> DraftDecoder:
        decoder = load(*args, **kwargs)
        loaded.append(decoder.aux_layers)
        return decoder

    monkeypatch.setattr(DraftDecoder, "load", noted)
    found = await measure(target, with_ids(draft, tmp_path, [0, 1, 2]), PROMPTS[:2], PARAMS)
    assert [(one.convention, one.layers) for one in found] == [("output", (1, 2, 3)), ("boundary", (0, 1, 2))]
    assert loaded == [(1, 2, 3), (0, 1, 2)]
    for one in found:
        assert one.speculation is not None
        assert one.speculation.num_rounds >= 4 and len(one.speculation.accepted_at) == 3


async def test_ids_that_one_convention_alone_permits_are_measured_so(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    target, draft = folders
    num_layers = json.loads((target / "config.json").read_text())["num_hidden_layers"]
    config = with_ids(draft, tmp_path, [0, 1, num_layers])
    found = await measure(target, config, PROMPTS[:1], PARAMS)
    assert found[0].speculation is None and str(num_layers) in found[0].reason
    assert found[1].layers == (0, 1, num_layers)
    assert verdict(found).startswith('"boundary" fits')


async def test_dflash_head_is_measured_under_both_conventions(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    target, seed = folders[0], 4
    make_dflash(seed, tmp_path, target)
    table = json.loads((tmp_path / "config.json").read_text())["dflash_config"]
    config = CONFIG.replace(speculation=Speculation(draft=tmp_path, shape=Chain(2)))
    found = await measure(target, config, PROMPTS[:1], PARAMS)
    outputs, boundaries = (found[index].layers for index in range(2))
    assert boundaries == tuple(table["target_layer_ids"])
    assert outputs == tuple(layer + 1 for layer in boundaries)
    assert all(one.speculation is not None and one.speculation.num_rounds >= 2 for one in found)


@pytest.mark.parametrize("ids", [[0, 1, 2], None])
async def test_parallel_head_is_measured(
    ids: list[int] | None, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    target = folders[0]
    make_draft("peagle", tmp_path, target)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eagle_aux_hidden_state_layer_ids": ids}))
    config = CONFIG.replace(speculation=Speculation(draft=tmp_path, shape=Chain(3)))
    found = await measure(target, config, PROMPTS[:1], PARAMS)
    layers = [(1, 2, 3), (0, 1, 2)] if ids else [(0, 1, 2)]
    assert [one.layers for one in found] == layers
    assert all(one.speculation is not None and one.speculation.num_rounds >= 2 for one in found)
    assert verdict(found).startswith("no difference" if ids else "the head names no layers")


def test_command_refuses_more_drafts_than_masks(
    folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_dflash(1, tmp_path, folders[0])
    number = json.loads((tmp_path / "config.json").read_text())["block_size"]
    arguments = ["acceptance", str(folders[0]), "--draft", str(tmp_path), "--device", "cpu"]
    assert main([*arguments, "--max-tokens", "4", "--num-draft-tokens", str(number)]) == 1
    assert f"expected a Chain of at most {number - 1} with this head" in capsys.readouterr().err


def counts(right: int, num_rounds: int = 1000) -> SpeculationStats:
    return SpeculationStats(
        num_rounds=num_rounds, num_drafted=num_rounds, num_accepted=right, accepted_at=(right,)
    )


@pytest.mark.parametrize(
    "output, boundary, expected",
    [
        (counts(600), counts(80), '"output" fits'),
        (counts(5), counts(700), '"boundary" fits'),
        (counts(6, 10), counts(4, 10), "no difference"),
        (counts(0), counts(0), "no difference"),
        (counts(0, 0), counts(700), "no difference"),
    ],
)
def test_verdict_needs_a_difference_that_is_certain(
    output: SpeculationStats, boundary: SpeculationStats, expected: str
) -> None:
    found = [
        Measured(convention="output", layers=(1,), speculation=output),
        Measured(convention="boundary", layers=(0,), speculation=boundary),
    ]
    assert verdict(found).startswith(expected)


def test_verdict_without_a_choice() -> None:
    assert "nothing to choose" in verdict([Measured(convention="output", speculation=counts(1))])
    neither = [Measured(convention="output", reason="a"), Measured(convention="boundary", reason="b")]
    assert "neither" in verdict(neither)


def test_command_prints_each_convention(
    folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, draft = folders
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("One two three\n\n")
    arguments = [str(target), "--draft", str(draft), "--prompts", str(prompts), "--max-tokens", "6"]
    assert main(["acceptance", *arguments, "--device", "cpu", "--num-draft-tokens", "2"]) == 0
    printed = capsys.readouterr().out
    for part in (
        '"output": the head reads the hidden states before layers 1, 2, 3',
        '"boundary": the head reads the hidden states before layers 0, 1, 2',
        "tokens a round",
    ):
        assert part in printed


def test_progress_is_shown_while_prompts_are_answered(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = folders
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("One\nTwo\n")
    shown: list[tuple[str, float]] = []

    def show_progress(progress: Progress) -> None:
        shown.append((progress.stage, progress.fraction))

    monkeypatch.setattr("drift_sdk.cli.drafts.show_progress", show_progress)
    arguments = [str(target), "--draft", str(draft), "--prompts", str(prompts), "--max-tokens", "6"]
    assert main(["acceptance", *arguments, "--device", "cpu", "--num-draft-tokens", "2"]) == 0
    for convention in ("output", "boundary"):
        stage = f'measure "{convention}"'
        assert [fraction for name, fraction in shown if name == stage] == [0.5, 1.0]


def test_missing_head_is_an_error_of_its_own(
    folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And not a reason that neither convention can be used."""
    status = main(["acceptance", str(folders[0]), "--draft", str(tmp_path / "missing"), "--device", "cpu"])
    printed = capsys.readouterr()
    assert status == 1 and printed.out == ""
    assert printed.err.startswith("ModelLoadError: draft") and printed.err.count("does not exist") == 1


def test_head_in_place_of_a_model_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    head = str(Path(__file__).parents[2] / "examples/drafts/smollm2-135m-eagle3")
    assert main(["acceptance", head, "--draft", head, "--device", "cpu"]) == 1
    assert f"{head} holds a draft head: expected the model that it drafts for" in capsys.readouterr().err


def test_model_in_place_of_a_head_is_rejected(folders: tuple[Path, Path]) -> None:
    config = EngineConfig(speculation=Speculation(draft=folders[0]))
    with pytest.raises(ConfigError, match="expected a draft head; this is a whole model"):
        layers_by_convention(folders[0], config)


@pytest.mark.parametrize(
    "arguments, named",
    [
        (["--draft", "ngram"], "--draft 'ngram': expected a draft head"),
        (["--draft", "head", "--max-tokens", "0"], "--max-tokens 0"),
        (["--draft", "head", "--prompts", "missing.txt"], "--prompts"),
        (["--draft", "head", "--num-draft-tokens", "0"], "--num-draft-tokens 0"),
    ],
)
def test_wrong_arguments_are_named(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["acceptance", "model", *arguments])
    assert caught.value.code == 2
    assert named in capsys.readouterr().err


def test_prompts_are_lines_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("a\n \nb\n")
    assert read_prompts(file) == ["a", "b"]
    assert read_prompts(None) == PROMPTS
    file.write_text("\n")
    with pytest.raises(ConfigError, match="prompts"):
        read_prompts(file)


def test_prompts_that_are_no_regular_file_or_too_large_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fifo, large = tmp_path / "fifo", tmp_path / "large"
    os.mkfifo(fifo)
    large.write_text("prompt\n")
    monkeypatch.setattr(drafts, "MAX_FILE_BYTES", 6)
    cases = ((fifo, "is a FIFO"), (tmp_path, "is a directory"), (tmp_path / "none", "that exists"))
    for path, message in (*cases, (large, "at most 6 bytes")):
        with pytest.raises(ConfigError, match=message) as caught:
            read_prompts(path)
        assert (caught.value.field, caught.value.value) == ("prompts", str(path))
