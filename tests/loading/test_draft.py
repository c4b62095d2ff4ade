"""Drafts from files: configs of all formats, invalid folders, weights shared with the target, and the
tools."""

from __future__ import annotations

import json
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from decoder_parity import load_decoder
from draft_zoo import VARIANTS, make_draft
from model_zoo import make_model
from safetensors.torch import load_file, save_file
from tolerances import assert_near, bound

from drift_sdk.errors import ModelLoadError
from drift_sdk.families import read_spec
from drift_sdk.loading.draft import TorchFile
from drift_sdk.loading.source import resolve
from drift_sdk.models.decoder import Decoder
from drift_sdk.models.draft_config import DraftConfig
from drift_sdk.models.draft_head import DraftDecoder
from drift_sdk.spec.model import ModelSpec
from drift_sdk.spec.rope import Rope
from perf import compare_stages, reduce_vocab
from perf.harness import draft_stages

LAYER_TYPES = ["sliding_attention", "full_attention"]


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    make_model(1, folder)
    return folder


@pytest.fixture(scope="module")
def target(target_folder: Path) -> Decoder:
    return load_decoder(target_folder)


@pytest.fixture
def folder(tmp_path: Path, target_folder: Path) -> Path:
    """A draft of the specforge variant, in one safetensors file."""
    make_draft("specforge", tmp_path, target_folder)
    return tmp_path


def _change_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def _change(folder: Path, changes: dict[str, torch.Tensor | None]) -> str:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in changes.items():
        tensors.pop(name, None)
        if tensor is not None:
            tensors[name] = tensor

    save_file(tensors, file)
    return str(file)


def _llama(num_layers: int, **changes: Any) -> tuple[dict[str, Any], ModelSpec]:
    """The flat config of a draft, and the config of a target it fits."""
    shape = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 500,
        "hidden_size": 64,
        "intermediate_size": 80,
        "num_attention_heads": 4,
    }
    target = {"num_hidden_layers": num_layers, "max_position_embeddings": 4096, "rope_theta": 5e5}
    return shape | {"num_hidden_layers": 1} | changes, read_spec(shape | target)


@pytest.mark.parametrize(
    "num_layers, expected",
    [(32, (2, 16, 29)), (16, (2, 8, 13)), (36, (2, 18, 33)), (24, (2, 12, 21)), (3, (0, 1, 2))],
)
def test_default_aux_layers(num_layers: int, expected: tuple[int, ...]) -> None:
    config, target = _llama(num_layers)
    for convention in ("output", "boundary", None):
        draft = DraftConfig.from_hf(config, target, aux_layer_convention=convention)
        assert draft.aux_layers == expected


@pytest.mark.parametrize(
    "ids, convention, expected",
    [
        ([1, 17, 33], None, (2, 18, 34)),
        ([1, 17, 32], "output", (2, 18, 33)),
        ([1, 17, 33], "boundary", (1, 17, 33)),
        ([24, 30, 36], None, (24, 30, 36)),
        ([33, 2, 18], "boundary", (2, 18, 33)),
        ([0, 35], "output", (1, 36)),
        ([], None, (2, 18, 33)),
    ],
)
@pytest.mark.parametrize("is_inside", [False, True])
def test_aux_layers_of_ids(
    ids: list[int], convention: str | None, expected: tuple[int, ...], is_inside: bool
) -> None:
    options = {"eagle_aux_hidden_state_layer_ids": ids}
    config, target = _llama(36, **({"eagle_config": options} if is_inside else options))
    assert DraftConfig.from_hf(config, target, aux_layer_convention=convention).aux_layers == expected


@pytest.mark.parametrize("convention, expected", [(None, (2, 18, 33)), ("output", (3, 19, 34))])
def test_ids_of_the_speculators_library_are_boundaries(
    convention: str | None, expected: tuple[int, ...]
) -> None:
    layer, target = _llama(36)
    config = {
        "architectures": layer.pop("architectures"),
        "eagle_aux_hidden_state_layer_ids": [2, 18, 33],
        "transformer_layer_config": layer,
    }
    assert DraftConfig.from_hf(config, target, aux_layer_convention=convention).aux_layers == expected


def test_rope_settings_are_the_drafts() -> None:
    config, target = _llama(36)
    draft = DraftConfig.from_hf(config, target)
    assert draft.attention.rope == Rope(theta=10_000.0, rotary_dim=draft.attention.head_dim)
    assert target.ropes[0].theta == 5e5


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"architectures": ["LlamaForCausalLMEagle"]}, "architectures=.*LlamaForCausalLMEagle3"),
        ({"architectures": None}, "architectures=None"),
        ({"model_type": "qwen3"}, "model_type='qwen3'"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"eagle_config": {"eh_proj_before_attn": True}}, "eh_proj_before_attn=True"),
        ({"eh_proj_before_attn": True}, "eh_proj_before_attn=True"),
        ({"next_layer_regular": False}, "next_layer_regular=False"),
        ({"eagle_config": {"use_mtp_layernorm": True}}, "use_mtp_layernorm=True"),
        ({"eagle_config": {"parallel_draft_step": 4}}, "parallel_draft_step=4"),
        ({"eagle_config": {"something_new": 1}}, "eagle_config has something_new=1"),
        ({"eagle_config": 3}, "eagle_config=3"),
        ({"eagle_config": {"norm_output": True}, "norm_output": False}, "norm_output=False, but True"),
        ({"bias": True}, "bias=True"),
        ({"pard_token": 3, "vocab_size": [1]}, r"vocab_size=\[1\]"),
        ({"pard_token": 500}, "pard_token=500: expected one token id below vocab_size=500"),
        ({"speculators_config": {"algorithm": "eagle"}}, "algorithm='eagle'"),
        ({"norm_before_fc": 1}, "norm_before_fc=1"),
        ({"norm_before_fc": True, "fc_norm": True}, "norm_before_fc and fc_norm"),
        ({"use_aux_hidden_state": False, "fc_norm": True}, "use_aux_hidden_state=False"),
        ({"use_aux_hidden_state": False, "hidden_size": 32, "target_hidden_size": 64}, "hidden_size=32.*64"),
        ({"vocab_size": 499}, "vocab_size=499, its target 500"),
        ({"hidden_size": 32}, "hidden size 32 .*its target has 64"),
        ({"target_hidden_size": 72}, "hidden size 72 .*its target has 64"),
        ({"draft_vocab_size": 501}, "draft_vocab_size=501.*vocab_size=500"),
        ({"draft_vocab_size": 100, "truncated_vocab_size": 90}, "truncated_vocab_size=90"),
        ({"num_aux_hidden_states": 2}, "num_aux_hidden_states=2: expected 3"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 1, 5]}, r"\[1, 1, 5\] as output ids"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 5, 37]}, r"\[1, 5, 37\] as output ids.*0 to 35"),
        ({"eagle_aux_hidden_state_layer_ids": [-1, 5, 36]}, r"\[-1, 5, 36\] as boundary ids.*0 to 36"),
        ({"eagle_aux_hidden_state_layer_ids": 5}, "=5: expected a list"),
        ({"eagle_aux_hidden_state_layer_ids": [True]}, "expected a list of integers"),
        ({"rope_scaling": {"rope_type": "xpos"}}, "rope_type='xpos'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "fp8"),
        (
            {
                "sliding_window": 64,
                "num_hidden_layers": 2,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            "layers with windows of 64, none: expected all layers alike in a draft",
        ),
        ({"hidden_act": "gelu_pytorch_tanh"}, "hidden_act='gelu_tanh': only 'silu'"),
    ],
)
def test_setting_that_is_not_implemented_is_rejected(changes: dict[str, Any], message: str) -> None:
    config, target = _llama(36, **changes)
    with pytest.raises(ModelLoadError, match=message):
        DraftConfig.from_hf(config, target)


def test_unknown_convention_and_small_target_are_rejected() -> None:
    config, target = _llama(36)
    with pytest.raises(ModelLoadError, match="aux_layer_convention='input'"):
        DraftConfig.from_hf(config, target, aux_layer_convention="input")

    with pytest.raises(ModelLoadError, match="a target of 2 layers: expected 3"):
        DraftConfig.from_hf(*_llama(2))

    config_of_one, small = _llama(1, eagle_aux_hidden_state_layer_ids=[0, 0, 0])
    with pytest.raises(ModelLoadError, match=r"as output ids, and a target of 1 layers: expected 3 or more"):
        DraftConfig.from_hf(config_of_one, small)

    ids = {"eagle_aux_hidden_state_layer_ids": [1, 17, 36]}
    with pytest.raises(ModelLoadError, match="as output ids"):
        DraftConfig.from_hf(config | ids, target, aux_layer_convention="output")


def test_config_error_names_the_folder(folder: Path, target: Decoder) -> None:
    _change_config(folder, hidden_act="relu")
    with pytest.raises(ModelLoadError, match="hidden_act='relu'") as caught:
        DraftDecoder.load(folder, target)

    assert str(folder) in str(caught.value)


def test_convention_reaches_the_config(folder: Path, target: Decoder) -> None:
    assert DraftDecoder.load(folder, target).aux_layers == (1, 2, 3)
    found = DraftDecoder.load(str(folder), target, aux_layer_convention="boundary")
    assert found.aux_layers == (0, 1, 2)


def test_missing_tensors_are_shared_with_the_target(
    target: Decoder, target_folder: Path, tmp_path: Path
) -> None:
    drafts = {}
    for name in ("final hidden", "ids only", "narrow", "tied"):
        make_draft(name, tmp_path / name, target_folder)
        drafts[name] = DraftDecoder.load(tmp_path / name, target).weights

    embedding, head = target.weights.embedding, target.weights.head
    assert drafts["final hidden"].embedding.data_ptr() == embedding.data_ptr()
    assert drafts["final hidden"].head.data_ptr() == head.data_ptr()
    assert drafts["final hidden"].target_ids.tolist() == list(range(500))
    ids = drafts["ids only"].target_ids
    assert torch.equal(drafts["ids only"].head, head[ids]) and len(ids) == 96
    assert drafts["ids only"].embedding.data_ptr() == embedding.data_ptr()
    assert drafts["narrow"].embedding.shape == (500, 40)
    assert drafts["tied"].head.data_ptr() == drafts["tied"].embedding.data_ptr() != embedding.data_ptr()


DOWN = "midlayer.mlp.down_proj.weight"


@pytest.mark.parametrize(
    "changes, parts",
    [
        (
            {DOWN: None, "norm.weight": None},
            ["layers.0.mlp.down_proj.weight", "[64, 56] is missing", "1 more"],
        ),
        ({DOWN: torch.ones(56, 64)}, ["layers.0.mlp.down_proj.weight", "[56, 64]", "expected [64, 56]"]),
        ({"midlayer.self_attn.q_norm.weight": torch.ones(10)}, ["q_norm", "[10]", "not part of this draft"]),
        ({"input_norm.weight": torch.ones(192)}, ["input_norm.weight", "not part of this draft"]),
        (
            {"layers.0.mlp.down_proj.weight": torch.ones(64, 56)},
            ["midlayer.mlp.down_proj.weight", "expected one"],
        ),
        ({"lm_head.weight": torch.ones(95, 64)}, ["lm_head.weight", "[95, 64]", "expected [96, 64]"]),
        ({"embed_tokens.weight": torch.ones(96, 64)}, ["embed_tokens.weight", "expected [500, 64]"]),
        ({"fc.weight": torch.ones(64, 128)}, ["fc.weight", "[64, 128]", "expected [64, 192]"]),
        (
            {"fc.weight": torch.ones(64, 192, dtype=torch.int8)},
            ["fc.weight", "torch.int8", "expected float32"],
        ),
        ({"d2t": None, "t2d": None}, ["d2t of shape [96] is missing", "96 of 500"]),
        ({"d2t": torch.zeros(95, dtype=torch.int64)}, ["d2t", "[95]", "expected [96]"]),
        ({"d2t": torch.zeros(96)}, ["d2t", "torch.float32", "expected int64"]),
        ({"d2t": torch.full((96,), 405)}, ["d2t", "draft id 95 to 500", "0 to 499"]),
        ({"d2t": -torch.ones(96, dtype=torch.int64)}, ["d2t", "draft id 0 to -1"]),
        ({"d2t": 95 - torch.arange(96)}, ["d2t", "ids 0 and 1 to [95, 95]", "increasing"]),
        ({"d2t": torch.zeros(96, dtype=torch.int64)}, ["t2d", "marks 96 tokens", "expected the 96"]),
        ({"t2d": torch.ones(500, dtype=torch.bool)}, ["t2d", "marks 500 tokens", "expected the 96"]),
        ({"t2d": torch.ones(499, dtype=torch.bool)}, ["t2d", "[499]", "expected [500]"]),
    ],
)
def test_wrong_tensor_is_named(
    folder: Path, target: Decoder, changes: dict[str, torch.Tensor | None], parts: list[str]
) -> None:
    file = _change(folder, changes)
    with pytest.raises(ModelLoadError) as caught:
        DraftDecoder.load(folder, target)

    place = str(folder) if "missing" in str(caught.value) else file
    for part in (place, *parts):
        assert part in str(caught.value)


def test_narrow_draft_needs_embedding_and_head(target: Decoder, target_folder: Path, tmp_path: Path) -> None:
    for name in ("embed_tokens.weight", "lm_head.weight"):
        make_draft("narrow", tmp_path, target_folder)
        _change(tmp_path, {name: None})
        with pytest.raises(ModelLoadError, match=rf"{name} of shape .* is missing"):
            DraftDecoder.load(tmp_path, target)


def test_stored_frequencies_are_ignored(folder: Path, target: Decoder) -> None:
    expected = DraftDecoder.load(folder, target)
    _change(folder, {"midlayer.self_attn.rotary_emb.inv_freq": torch.ones(5)})
    assert torch.equal(DraftDecoder.load(folder, target).weights.head, expected.weights.head)


def test_identity_offsets_of_a_whole_vocabulary(target: Decoder, target_folder: Path, tmp_path: Path) -> None:
    make_draft("whole vocabulary", tmp_path, target_folder)
    marks = torch.ones(500, dtype=torch.bool)
    _change(tmp_path, {"d2t": torch.zeros(500, dtype=torch.int64), "t2d": marks})
    assert DraftDecoder.load(tmp_path, target).target_ids.tolist() == list(range(500))


@pytest.mark.parametrize("name", ["reference", "legacy", "specforge", "deep"])
@pytest.mark.parametrize("damage", ["truncated", "cut", "empty", "noise", "missing"])
def test_broken_file_is_named(
    name: str, damage: str, target: Decoder, target_folder: Path, tmp_path: Path
) -> None:
    make_draft(name, tmp_path, target_folder)
    files = [file for file in sorted(tmp_path.iterdir()) if file.suffix in (".bin", ".safetensors")]
    data = files[-1].read_bytes()
    if damage == "missing":
        files[-1].unlink()
    else:
        broken = {"truncated": data[:-1], "cut": data[:40], "empty": b"", "noise": b"\x80\x02?" + data[3:]}
        files[-1].write_bytes(broken[damage])

    with pytest.raises(ModelLoadError) as caught:
        DraftDecoder.load(tmp_path, target)

    named = files[-1] if damage != "missing" or name == "deep" else tmp_path
    assert str(named) in str(caught.value)


class _Code:
    def __reduce__(self) -> tuple[Any, ...]:
        return (print, ("run",))


@pytest.mark.parametrize("contents", [[1, 2], {"a": 1}, {3: torch.ones(2)}, {"a": _Code()}])
def test_file_without_named_tensors_is_rejected(
    contents: Any, target: Decoder, target_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_draft("reference", tmp_path, target_folder)
    torch.save(contents, tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match=r"pytorch_model\.bin"):
        DraftDecoder.load(tmp_path, target)

    assert capsys.readouterr().out == ""


def _marks(file: Path, form: str) -> None:
    """A file whose pickle has 200,000 marks: of torch before 1.6, broken or not, or a zip archive."""
    marks = b"\x80\x02" + b"(" * 200_000 + b"."
    if form == "zip":
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("archive/data.pkl", marks)
            archive.writestr("archive/version", "3\n")
    elif form == "old":
        torch.save({"a": torch.ones(2)}, file, _use_new_zipfile_serialization=False)
        before = file.read_bytes()
        file.write_bytes(before[: before.index(b"ctorch")] + marks[2:])
    else:
        file.write_bytes(marks)


@pytest.mark.parametrize("form", ["zip", "old", "broken"])
def test_pickles_of_many_operations_are_rejected_before_they_run(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch runs a million in several seconds."""
    file = tmp_path / "pytorch_model.bin"
    _marks(file, form)
    monkeypatch.setattr(torch, "load", None)
    with pytest.raises(ModelLoadError, match=f"{file}: .*: a pickle of more than 100000 operations"):
        TorchFile(file)


@pytest.mark.parametrize("is_zip", [True, False])
def test_files_of_all_versions_of_torch_are_read(is_zip: bool, tmp_path: Path) -> None:
    tensors = {f"t{index}": torch.full((2,), float(index)) for index in range(500)}
    torch.save(tensors, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=is_zip)
    found = TorchFile(tmp_path / "pytorch_model.bin")
    assert found.names() == tensors.keys()
    assert all(torch.equal(found.get(name), tensor) for name, tensor in tensors.items())


def test_folder_without_a_draft(target: Decoder, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError) as caught:
        DraftDecoder.load(tmp_path, target)

    assert str(caught.value) == f"draft: {tmp_path}: holds no config.json"

    with pytest.raises(ModelLoadError, match="never a hub id"):
        DraftDecoder.load(tmp_path / "nothing", target)


@pytest.mark.parametrize("has_weights", [True, False])
def test_whole_model_as_a_draft(
    has_weights: bool, target: Decoder, target_folder: Path, tmp_path: Path
) -> None:
    folder = target_folder
    if not has_weights:
        folder = tmp_path
        shutil.copy(target_folder / "config.json", folder)
    with pytest.raises(ModelLoadError) as caught:
        DraftDecoder.load(folder, target)

    assert str(caught.value) == f"draft: {folder}: holds a whole model, expected a draft head"


def test_error_about_a_draft_names_it_once(folder: Path, target: Decoder) -> None:
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelLoadError, match=f"^draft: {folder}/config.json: not a JSON object") as caught:
        DraftDecoder.load(folder, target)

    assert str(caught.value).count(str(folder)) == 1


@pytest.mark.parametrize("name", ["specforge", "whole vocabulary", "ids only", "tied", "speculators", "deep"])
def test_reduced_vocabulary(name: str, target: Decoder, target_folder: Path, tmp_path: Path) -> None:
    make_draft(name, tmp_path / "draft", target_folder)
    whole = DraftDecoder.load(tmp_path / "draft", target)
    own_ids = whole.target_ids.tolist()
    generator = torch.Generator().manual_seed(2)
    frequent = [own_ids[i] for i in torch.randperm(len(own_ids), generator=generator)[:12].tolist()]
    kept = next(token for token in reversed(own_ids) if token not in frequent)
    counts = {token: 100 - index for index, token in enumerate(frequent)}
    (tmp_path / "counts.json").write_text(json.dumps(counts))
    arguments = ["--size", "11", "--frequencies", str(tmp_path / "counts.json"), "--keep", str(kept)]
    reduce_vocab.main([str(tmp_path / "draft"), str(tmp_path / "small"), *arguments])
    assert len({file.stat().st_mode for file in (tmp_path / "small").iterdir()}) == 1  # others may read them

    small = DraftDecoder.load(tmp_path / "small", target)
    assert small.target_ids.tolist() == sorted([*frequent[:10], kept])
    assert small.config.draft_vocab_size == 11
    rows = torch.searchsorted(whole.target_ids, small.target_ids)
    assert torch.equal(small.weights.head, whole.weights.head[rows])
    assert torch.equal(small.weights.layers[-1].channel.down, whole.weights.layers[-1].channel.down)
    hidden = torch.randn(3, whole.config.hidden_size, generator=generator)
    assert_near(small.logits(hidden), whole.logits(hidden)[:, rows], inner=whole.config.hidden_size)
    assert ("lm_head.weight" in load_file(tmp_path / "small" / "model.safetensors")) == (name != "ids only")


def test_reduced_vocabulary_of_texts(
    target: Decoder, target_folder: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_draft("whole vocabulary", folder / "draft", target_folder)
    text = folder / "text.txt"
    text.write_text("bbb cc c d")
    arguments = ["--size", "3", "--texts", str(text), "--tokenizer", str(target_folder)]
    reduce_vocab.main([str(folder / "draft"), str(folder / "small"), *arguments])
    tokenizer = resolve(target_folder).tokenizer()
    counts = torch.bincount(torch.tensor(tokenizer.encode(text.read_text(), add_special_tokens=False)))
    expected = sorted(counts.argsort(descending=True, stable=True)[:3].tolist())
    assert DraftDecoder.load(folder / "small", target).target_ids.tolist() == expected
    assert "3 tokens" in capsys.readouterr().out


def test_reducing_rejects_invalid_arguments(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tool = reduce_vocab
    (folder / "counts.json").write_text("{}")
    for size, keep, output, message in (
        ("97", [], "small", "size=97: expected 1 (ids to keep) to 96 (ids available)"),
        ("0", [], "small", "size=0"),
        ("5", ["--keep", "600"], "small", r"keep=[600]"),
        ("5", [], ".", "not an empty folder"),
    ):
        arguments = ["--size", size, "--frequencies", str(folder / "counts.json"), *keep]
        with pytest.raises(SystemExit):
            tool.main([str(folder), str(folder / output), *arguments])

        assert message in capsys.readouterr().err

    assert not (folder / "small").exists()


@pytest.mark.parametrize("name", VARIANTS)
def test_stages_equal_a_plain_forward_pass(
    name: str, target: Decoder, target_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_draft(name, tmp_path, target_folder)
    tokens = [str(token) for token in range(7, 90, 4)]
    compare_stages.main([str(target_folder), str(tmp_path), "--json", "--tokens", *tokens])
    found = json.loads(capsys.readouterr().out)
    stages = [f"{part}.{i}" for i in range(VARIANTS[name].num_layers) for part in ("attention", "mlp")]
    assert [stage["stage"] for stage in found] == ["fc", *stages, "pre_head", "logits"]
    most = bound(16.0, inner=192, depth=VARIANTS[name].num_layers + 1)
    for stage in found:
        assert stage["mean_difference"] <= stage["max_difference"] <= most, stage
        assert stage["min_cosine"] > 0.99999 and stage["top_k_overlap"] > 0.98, stage


def test_wrong_stage_is_found(
    target: Decoder, target_folder: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = draft_stages
    mlp = DraftDecoder._mlp
    monkeypatch.setattr(DraftDecoder, "_mlp", lambda *inputs: mlp(*inputs) * 1.5)
    found = {row.stage: row for row in tool.compare(target, folder, list(range(7, 40)))}
    assert found["attention.0"].max_difference < bound(16.0, inner=192) < 0.01
    assert found["mlp.0"].max_difference > 0.01
    assert found["mlp.0"].min_cosine > 0.9999 > found["pre_head"].min_cosine
    assert found["logits"].max_difference > 0.01


def test_stages_of_a_text(
    target_folder: Path, folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("A text of some letters.")
    arguments = [
        "--text",
        str(text),
        "--max-tokens",
        "9",
        "--dtype",
        "bfloat16",
        "--aux-layer-convention",
        "output",
    ]
    compare_stages.main([str(target_folder), str(folder), *arguments])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["stage", "mean", "max", "cosine", "top-k"]
    assert [line.split()[0] for line in lines[1:]] == ["fc", "attention.0", "mlp.0", "pre_head", "logits"]


def test_safetensors_take_precedence(
    target: Decoder, target_folder: Path, folder: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    make_draft("reference", other, target_folder)
    shutil.copy(other / "pytorch_model.bin", folder)
    expected = load_file(folder / "model.safetensors")["norm.weight"]
    assert torch.equal(DraftDecoder.load(folder, target).weights.final_norm, expected)


def test_draft_weights_that_are_not_finite(folder: Path, target: Decoder) -> None:
    norm = load_file(folder / "model.safetensors")["norm.weight"]
    norm[-1] = torch.inf
    file = _change(folder, {"norm.weight": norm})
    with pytest.raises(ModelLoadError, match=f"{file}: tensor norm.weight has NaN, infinity"):
        DraftDecoder.load(folder, target)


@pytest.mark.filterwarnings("ignore:Validating sparse tensor invariants")  # of torch 2.15
def test_sparse_and_meta_tensors_are_rejected(folder: Path, target: Decoder) -> None:
    """A pytorch_model.bin may hold kinds of tensors that no weight has."""
    (folder / "model.safetensors").unlink()
    for odd in (torch.eye(3).to_sparse(), torch.empty(3, device="meta")):
        torch.save({"norm.weight": odd}, folder / "pytorch_model.bin")
        with pytest.raises(ModelLoadError, match="pytorch_model.bin: holds a dict, expected plain tensors"):
            DraftDecoder.load(folder, target)
