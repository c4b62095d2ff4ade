"""Models with quantised weights compute what the same models do whose weights are the dequantised numbers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from decoder_parity import poisoned_cache, random_tokens, shuffled_blocks
from draft_zoo import make_draft
from expert_zoo import make_expert_model
from family_zoo import draw_model
from gguf import GGMLQuantizationType
from gguf_files import write_gguf
from hybrid_parity import stacked_and_each
from model_zoo import make_model, random_model
from quantised_files import write_checkpoint
from safetensors.torch import load_file, save_file
from slow_cases import slow_after

from drift_sdk.config import EngineConfig
from drift_sdk.errors import ModelLoadError
from drift_sdk.families import read_spec
from drift_sdk.loading.source import Source
from drift_sdk.models.allocation import PAIRED, QUANTISERS, WeightForm
from drift_sdk.models.attention import AttentionBatch, SequenceRows
from drift_sdk.models.channels import MlpWeights, ParallelWeights
from drift_sdk.models.decoder import Decoder
from drift_sdk.models.draft_head import DRAFT_KV_OFFSET, DraftDecoder
from drift_sdk.models.weights import weight_bytes
from drift_sdk.quantised.formats import BlockWeight, Fp8Weight, Int4Weight, Nvfp4Weight
from drift_sdk.quantised.weight import QuantisedWeight, StackedWeight
from drift_sdk.startup.model_parts import bytes_without_files

TIED, UNTIED, PHI3 = 6, 1, 29
"""Models of the zoo. The first has matrices of 24, 72 and 80 rows and columns, and a tied head."""
QWEN3_MOE = "qwen3_moe"
GEMMA4, GEMMA4_EXPERTS = "gemma4", "gemma4 experts"
GEMMA4_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
GEMMA4_SEED = 3
"""Of a model with keys of other layers and inputs of layers."""


def make_gemma4(family: str, folder: Path) -> None:
    """A model with a tensor for each matrix of an expert, as tools write them."""
    experts = {"moe_intermediate_size": 24} if "experts" in family else {}
    model = draw_model(family, GEMMA4_SEED, **GEMMA4_SIZES, **experts)
    assert model.config.num_kv_shared_layers or experts
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    if "experts" in family:
        save_file(stacked_and_each(load_file(file))[1], file)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int | str], Path]:
    """The folder of a model of a zoo, by its index or name."""
    made: dict[int | str, Path] = {}

    def folder(model: int | str) -> Path:
        if model not in made:
            made[model] = tmp_path_factory.mktemp("model")
            if isinstance(model, int):
                make_model(model, made[model])
            elif model in (GEMMA4, GEMMA4_EXPERTS):
                make_gemma4(model, made[model])
            else:
                make_expert_model(model, made[model])
        return made[model]

    return folder


def load(path: Path, form: WeightForm = "expanded", dtype: torch.dtype = torch.float32) -> Decoder:
    source = Source(path)
    spec = read_spec(source.config)
    return Decoder.load(spec, source.tensors(), device="cpu", dtype=dtype, form=form)


@torch.inference_mode()
def logits(decoder: Decoder) -> torch.Tensor:
    """Logits after a prompt, and after one more token."""
    cache, blocks = poisoned_cache(decoder.spec, dtype=decoder.dtype), shuffled_blocks()
    tokens = random_tokens(decoder.spec, 12)
    found = []
    for start, num_rows in ((0, 11), (11, 1)):
        batch = AttentionBatch([SequenceRows(blocks, start, num_rows)], cache)
        hidden, _ = decoder.forward(tokens[start : start + num_rows], batch, cache)
        found.append(decoder.logits(hidden))
    return torch.cat(found)


def all_matrices(decoder: Decoder) -> Iterator[Any]:
    weights = decoder.weights
    yield weights.embedding
    if weights.head is not weights.embedding:
        yield weights.head
    if weights.layer_inputs is not None:
        yield from (weights.layer_inputs.embedding, weights.layer_inputs.projection)
    for layer in weights.layers:
        yield from (layer.mixer.qkv, layer.mixer.output)
        if layer.input is not None:
            yield from (layer.input.gate, layer.input.projection)
        channel = layer.channel
        if isinstance(channel, ParallelWeights):
            yield from (channel.mlp.gate_up, channel.mlp.down)
            channel = channel.experts
        if isinstance(channel, MlpWeights):
            yield from (channel.gate_up, channel.down)
        else:
            yield from (*channel.gate_up, *channel.down)


def kinds_of(decoder: Decoder) -> set[type]:
    return {type(matrix) for matrix in all_matrices(decoder)}


NO_VOCABULARY = ("embed_tokens", "lm_head")
INT4, FP8, NVFP4 = ({kind, torch.Tensor} for kind in (Int4Weight, Fp8Weight, Nvfp4Weight))


@pytest.mark.parametrize(
    "model, kind, ignored, kinds",
    [
        (TIED, "awq", NO_VOCABULARY, INT4),
        (TIED, "gptq", NO_VOCABULARY, INT4),
        (TIED, "packed, zero points", (), {Int4Weight}),
        (TIED, "fp8, tensor", (), {Fp8Weight}),
        (TIED, "fp8, blocks", NO_VOCABULARY, FP8),
        (TIED, "nvfp4", (), {Nvfp4Weight}),
        (UNTIED, "nvfp4, modelopt", ("embed_tokens", "v_proj"), NVFP4 | {StackedWeight}),
        (QWEN3_MOE, "nvfp4, modelopt", (*NO_VOCABULARY, "mlp.gate."), NVFP4),
        (UNTIED, "gptq, whole rows", ("lm_head", "embed", "k_proj", "layers.2."), INT4 | {StackedWeight}),
        (UNTIED, "fp8, channel", ("embed_tokens", "up_proj"), FP8 | {StackedWeight}),
        (PHI3, "packed", NO_VOCABULARY, INT4),
        (QWEN3_MOE, "gptq", (*NO_VOCABULARY, "mlp.gate."), INT4),
        (QWEN3_MOE, "fp8, blocks", (*NO_VOCABULARY, "3.up_proj"), FP8 | {StackedWeight}),
        (GEMMA4, "packed", NO_VOCABULARY, INT4),
        (GEMMA4, "packed", (), {Int4Weight}),
        (GEMMA4, "fp8, channel", (*NO_VOCABULARY, "per_layer"), FP8),
        (GEMMA4, "fp8, blocks", NO_VOCABULARY, FP8),
        (GEMMA4, "fp8, compressed blocks", (*NO_VOCABULARY, "v_proj"), FP8 | {StackedWeight}),
        (GEMMA4_EXPERTS, "fp8, channel", (*NO_VOCABULARY, "router."), FP8),
        (GEMMA4_EXPERTS, "fp8, compressed blocks", (*NO_VOCABULARY, "router."), FP8),
        (GEMMA4_EXPERTS, "packed", (*NO_VOCABULARY, "router."), INT4),
        (GEMMA4_EXPERTS, "nvfp4, modelopt", (*NO_VOCABULARY, "router.", "self_attn"), NVFP4),
    ],
)
@pytest.mark.parametrize("dtype", slow_after(1, [torch.float32, torch.bfloat16]))
def test_stored_weights_compute_as_their_numbers(
    model_folder: Callable[[int | str], Path],
    tmp_path: Path,
    model: int | str,
    kind: str,
    ignored: tuple[str, ...],
    kinds: set[type],
    dtype: torch.dtype,
) -> None:
    write_checkpoint(model_folder(model), kind, tmp_path / "quantised", tmp_path / "twin", ignored=ignored)
    expected = logits(load(tmp_path / "twin", dtype=dtype))
    stored = load(tmp_path / "quantised", "stored", dtype)
    assert kinds_of(stored) == kinds
    assert torch.equal(logits(stored), expected)
    expanded = load(tmp_path / "quantised", "expanded", dtype)
    assert not any(issubclass(kind, QuantisedWeight) for kind in kinds_of(expanded))
    assert torch.equal(logits(expanded), expected)


def add_biases(folder: Path) -> int:
    """Write a bias of zeros beside each matrix of codes, as older GPTQ tools did; return their number."""
    tensors = load_file(folder / "model.safetensors")
    biases = {
        name.replace("qweight", "bias"): torch.zeros(codes.shape[1], dtype=torch.float16)
        for name, codes in tensors.items()
        if name.endswith(".qweight")
    }
    save_file(tensors | biases, folder / "model.safetensors", {"format": "pt"})
    return len(biases)


@pytest.mark.parametrize("model, kind", [(TIED, "gptq"), (PHI3, "gptq, symmetric"), (QWEN3_MOE, "gptq")])
def test_gptq_with_biases_of_zeros(
    model_folder: Callable[[int | str], Path], tmp_path: Path, model: int | str, kind: str
) -> None:
    ignored = (*NO_VOCABULARY, "mlp.gate.")
    write_checkpoint(model_folder(model), kind, tmp_path / "quantised", tmp_path / "twin", ignored=ignored)
    assert add_biases(tmp_path / "quantised") > 3
    expected = logits(load(tmp_path / "twin"))
    forms: tuple[WeightForm, ...] = ("stored", "expanded")
    for form in forms:
        assert torch.equal(logits(load(tmp_path / "quantised", form)), expected)


@pytest.mark.parametrize(
    "kind, bias",
    [
        ("gptq", torch.tensor([0.0] * 71 + [1e-4])),
        ("gptq", torch.full((72,), torch.nan)),
        ("gptq", torch.zeros(71)),
        ("gptq", torch.zeros(72, 1)),
        ("awq", torch.zeros(72)),
    ],
)
def test_biases_that_are_not_of_the_model_are_refused(
    model_folder: Callable[[int | str], Path], tmp_path: Path, kind: str, bias: torch.Tensor
) -> None:
    write_checkpoint(model_folder(TIED), kind, tmp_path / "quantised", tmp_path / "twin")
    tensors = load_file(tmp_path / "quantised" / "model.safetensors")
    tensors["model.layers.1.self_attn.o_proj.bias"] = bias
    save_file(tensors, tmp_path / "quantised" / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelLoadError, match="model.layers.1.self_attn.o_proj.bias of shape .* is not part"):
        load(tmp_path / "quantised")


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_gguf_blocks_compute_as_their_numbers(tmp_path: Path, name: str) -> None:
    """The files of Llama have the rows of query and key projections in another order."""
    model = make_model(UNTIED, tmp_path)
    write_gguf(model, tmp_path / "model.gguf", GGMLQuantizationType[name])
    stored = load(tmp_path / "model.gguf", "stored")
    assert BlockWeight in kinds_of(stored)
    assert isinstance(stored.weights.embedding, BlockWeight)
    assert torch.equal(logits(stored), logits(load(tmp_path / "model.gguf")))


def test_k_quants_of_several_formats_compute_as_their_numbers(tmp_path: Path) -> None:
    """A file as Q4_K_M files are: the value projection has another format than query and key."""
    kinds = {"v_proj": "Q6_K", "down_proj": "Q6_K", "gate_proj": "Q5_K", "embed_tokens": "Q6_K"}
    shape = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 96}
    config = transformers.LlamaConfig(
        **shape, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128
    )
    model = random_model(transformers.LlamaForCausalLM, config, seed=0)

    def kind_of(name: str) -> GGMLQuantizationType:
        found = [kind for part, kind in kinds.items() if part in name]
        return GGMLQuantizationType[found[0] if found else "Q4_K"]

    write_gguf(model, tmp_path / "model.gguf", kind_of)
    stored = load(tmp_path / "model.gguf", "stored")
    formats = [
        [part.format for part in matrix.parts] if isinstance(matrix, StackedWeight) else matrix.format
        for matrix in all_matrices(stored)
    ]
    layer = [["Q4_K", "Q4_K", "Q6_K"], "Q4_K", ["Q5_K", "Q4_K"], "Q6_K"]
    assert formats == ["Q6_K", "Q4_K", *layer, *layer]
    found = logits(stored)
    assert found.isfinite().all() and found.std() > 0.1
    assert torch.equal(found, logits(load(tmp_path / "model.gguf")))


@pytest.mark.parametrize("form", ["fp8", "int4", "nvfp4"])
@pytest.mark.parametrize("model", [TIED, UNTIED, QWEN3_MOE])
def test_projections_are_quantised_at_load(
    model_folder: Callable[[int | str], Path], tmp_path: Path, model: int | str, form: WeightForm
) -> None:
    folder = model_folder(model)
    found = load(folder, form)
    kind = {"fp8": Fp8Weight, "int4": Int4Weight, "nvfp4": Nvfp4Weight}[form]
    assert kinds_of(found) == {kind, torch.Tensor}
    tensors = load_file(folder / "model.safetensors")
    assert torch.equal(found.weights.embedding, tensors["model.embed_tokens.weight"])
    for name, tensor in tensors.items():
        if "_proj.weight" in name:
            tensors[name] = QUANTISERS[form](tensor).dequantise(torch.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    assert torch.equal(logits(found), logits(load(tmp_path)))


def test_random_weights_are_quantised_as_well(model_folder: Callable[[int | str], Path]) -> None:
    spec = load(model_folder(TIED)).spec
    random = Decoder.random(spec, device="cpu", dtype=torch.float32, form="fp8")
    assert kinds_of(random) == {Fp8Weight, torch.Tensor}


@pytest.mark.parametrize("form", ["stored", "fp8", "int4", "nvfp4"])
@pytest.mark.parametrize("model", [TIED, QWEN3_MOE])
def test_bytes_are_known_before_loading(
    model_folder: Callable[[int | str], Path], tmp_path: Path, model: int | str, form: WeightForm
) -> None:
    folder = model_folder(model)
    if form == "stored":
        write_checkpoint(folder, "awq", tmp_path / "quantised", tmp_path / "twin")
        folder = tmp_path / "quantised"
    source = Source(folder)
    spec = read_spec(source.config)
    announced: list[int] = []
    progress: list[tuple[int, int]] = []
    decoder = Decoder.load(
        spec,
        source.tensors(),
        device="cpu",
        dtype=torch.bfloat16,
        form=form,
        check_bytes=announced.append,
        on_tensor=lambda *numbers: progress.append(numbers),
    )
    total = len(progress)
    assert progress == [(number, total) for number in range(1, total + 1)]
    quantised = sum(matrix.nbytes for matrix in all_matrices(decoder))
    others = sum(
        2 * int(np.prod(source.tensors().shape(name)))
        for name in source.tensors().names()
        if len(source.tensors().shape(name)) == 1 or "mlp.gate.weight" in name
    )
    assert announced == [weight_bytes(spec, torch.bfloat16, form, source.tensors())] == [quantised + others]
    assert announced[0] < 0.75 * weight_bytes(spec, torch.bfloat16)


def test_stored_form_of_plain_files_is_plain(model_folder: Callable[[int | str], Path]) -> None:
    assert kinds_of(load(model_folder(TIED), "stored")) == {torch.Tensor}


def test_odd_columns_cannot_be_int4(tmp_path: Path) -> None:
    make_model(UNTIED, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    size = 37
    for name in list(tensors):
        if "down_proj" in name:
            tensors[name] = tensors[name][:, :size].contiguous()
        elif "gate_proj" in name or "up_proj" in name:
            tensors[name] = tensors[name][:size].contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    config = (
        (tmp_path / "config.json")
        .read_text()
        .replace('"intermediate_size": 80', f'"intermediate_size": {size}')
    )
    (tmp_path / "config.json").write_text(config)
    for form in PAIRED:
        expected = f'down_proj.weight has 37 columns, an odd number: expected another form than "{form}"'
        with pytest.raises(ModelLoadError, match=expected):
            load(tmp_path, form)
    load(tmp_path, "fp8")


@pytest.mark.parametrize("form", ["stored", "expanded"])
@pytest.mark.parametrize(
    "kind, part", [("fp8, channel", "weight"), ("gptq", "scales"), ("nvfp4, modelopt", "weight_scale")]
)
def test_weights_that_are_not_finite_are_named(
    model_folder: Callable[[int | str], Path], tmp_path: Path, kind: str, part: str, form: WeightForm
) -> None:
    write_checkpoint(model_folder(TIED), kind, tmp_path / "quantised", tmp_path / "twin")
    file = tmp_path / "quantised" / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.mlp.down_proj"
    damaged = tensors[f"{name}.{part}"]
    if damaged.dtype == torch.float8_e4m3fn:
        damaged.view(torch.uint8)[3, 4] = 0x7F
    else:
        damaged[0, 3] = float("inf")
    save_file(tensors, file)
    with pytest.raises(ModelLoadError, match=rf"tensor {name}\.{part} has NaN"):
        load(tmp_path / "quantised", form)


@pytest.mark.parametrize("kind", ["packed", "fp8, channel", "fp8, blocks"])
@pytest.mark.parametrize("part", ["experts.1.down_proj", "self_attn.o_proj"])
def test_scales_that_are_missing_or_misshapen_are_named(
    model_folder: Callable[[int | str], Path], tmp_path: Path, part: str, kind: str
) -> None:
    ignored = (*NO_VOCABULARY, "router.")
    folder = model_folder(GEMMA4_EXPERTS)
    write_checkpoint(folder, kind, tmp_path / "quantised", tmp_path / "twin", ignored=ignored)
    file = tmp_path / "quantised" / "model.safetensors"
    tensors = load_file(file)
    name = next(each for each in tensors if f"layers.1.{part}.weight_scale" in each)
    scales = tensors.pop(name)
    save_file(tensors, file)
    with pytest.raises(ModelLoadError, match=rf"tensor {re.escape(name)} is missing"):
        load(tmp_path / "quantised", "stored")
    save_file(tensors | {name: torch.cat((scales, scales))}, file)
    with pytest.raises(ModelLoadError, match=rf"tensor {re.escape(name)} has shape"):
        load(tmp_path / "quantised", "stored")


@pytest.mark.parametrize("has_scales", [True, False])
def test_quantised_experts_in_one_tensor_are_refused(
    model_folder: Callable[[int | str], Path], tmp_path: Path, has_scales: bool
) -> None:
    """Published files of Gemma 4 have quantised experts one by one, and stacked ones in bfloat16."""
    ignored = (*NO_VOCABULARY, "router.", "experts.")
    folder, quantised = model_folder(GEMMA4_EXPERTS), tmp_path / "quantised"
    write_checkpoint(folder, "fp8, blocks", quantised, tmp_path / "twin", ignored=ignored)
    file = quantised / "model.safetensors"
    stacked = stacked_and_each(load_file(file))[0]
    name = "model.layers.0.experts.gate_up_proj"
    codes = {name: stacked[name].to(torch.float8_e4m3fn)}
    scales = {f"{name}_scale_inv": torch.ones(len(stacked[name]), 1, 1)} if has_scales else {}
    save_file(stacked | codes | scales, file)
    message = "gate_up_proj_scale_inv of shape .* is not part" if has_scales else f"{name} is stored as"
    with pytest.raises(ModelLoadError, match=message):
        load(quantised, "stored")


@pytest.mark.parametrize("variant", ["specforge", "speculators", "norm before fc"])
@pytest.mark.parametrize("form", ["fp8", "int4"])
def test_drafts_are_quantised_at_load(
    model_folder: Callable[[int | str], Path], tmp_path: Path, variant: str, form: Any
) -> None:
    target = load(model_folder(UNTIED))
    make_draft(variant, tmp_path / "draft", model_folder(UNTIED))
    plain = DraftDecoder.load(str(tmp_path / "draft"), target)
    quantised = DraftDecoder.load(str(tmp_path / "draft"), target, form=form)
    kind = {"fp8": Fp8Weight, "int4": Int4Weight}[form]
    assert isinstance(quantised.weights.embedding, torch.Tensor)
    assert torch.equal(quantised.weights.embedding, plain.weights.embedding)
    pairs: list[tuple[Any, Any]] = [
        (quantised.weights.fc, plain.weights.fc),
        (quantised.weights.head, plain.weights.head),
    ]
    for found, layer in zip(quantised.weights.layers, plain.weights.layers, strict=True):
        pairs += [(getattr(found.mixer, n), getattr(layer.mixer, n)) for n in ("qkv", "output")]
        pairs += [(getattr(found.channel, n), getattr(layer.channel, n)) for n in ("gate_up", "down")]
    for found, matrix in pairs:
        assert type(found) is kind and isinstance(matrix, torch.Tensor)
        expected = QUANTISERS[form](matrix).dequantise(torch.float32)
        assert torch.equal(found.dequantise(torch.float32), expected)
    features = torch.randn((5, plain.config.target_hidden_size * len(plain.aux_layers)))
    fused = quantised.fuse(features.chunk(len(plain.aux_layers), dim=1), features)
    assert fused.isfinite().all()


@pytest.mark.parametrize(
    "size, name, columns",
    [
        ({"intermediate_size": 37}, "layers.0.mlp.down_proj.weight", 37),
        ({"hidden_size": 63}, "lm_head.weight", 63),
    ],
)
def test_odd_columns_of_drafts_cannot_be_int4(
    model_folder: Callable[[int | str], Path], tmp_path: Path, size: dict[str, int], name: str, columns: int
) -> None:
    target = load(model_folder(UNTIED))
    make_draft("specforge", tmp_path, model_folder(UNTIED))
    file = tmp_path / "config.json"
    settings = {"target_hidden_size": target.spec.hidden_size} | json.loads(file.read_text())
    file.write_text(json.dumps(settings | size))
    DraftDecoder.load_random(str(tmp_path), target, form="fp8")
    expected = f"tensor {name} has {columns} columns, an odd number: expected draft_weights other than .int4"
    with pytest.raises(ModelLoadError, match=expected):
        DraftDecoder.load_random(str(tmp_path), target, form="int4")


@pytest.mark.parametrize("variant", ["ids only", "final hidden"])
def test_drafts_share_a_quantised_embedding_and_head(tmp_path: Path, variant: str) -> None:
    """One takes some rows of the target's head, the other the whole head."""
    model = make_model(UNTIED, tmp_path / "target")
    write_gguf(model, tmp_path / "target.gguf", GGMLQuantizationType.Q8_0)
    make_draft(variant, tmp_path / "draft", tmp_path / "target")
    found = []
    forms: tuple[WeightForm, ...] = ("stored", "expanded")
    for form in forms:
        target = load(tmp_path / "target.gguf", form)
        draft = DraftDecoder.load(str(tmp_path / "draft"), target)
        assert isinstance(draft.weights.head, BlockWeight) == (form == "stored")
        cache = draft.empty_kv_cache(8, 8)
        batch = AttentionBatch([SequenceRows(list(range(8)), 0, 5)], cache, slot_offset=DRAFT_KV_OFFSET)
        generator = torch.Generator().manual_seed(0)
        features = torch.randn((5, draft.config.hidden_size), generator=generator)
        tokens = torch.tensor([3, 400, 7, 7, 499])
        found.append(draft.logits(draft.forward(features, tokens, batch, cache)))
    assert torch.equal(*found)


@pytest.mark.parametrize("model", [TIED, QWEN3_MOE])
def test_random_weights_are_stored_as_the_config_says(
    model_folder: Callable[[int | str], Path], model: int | str
) -> None:
    settings = json.loads((model_folder(model) / "config.json").read_text())
    settings["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [8, 16]}
    spec, dtype = read_spec(settings), torch.float32
    announced: list[int] = []
    stored, again = (
        Decoder.random(spec, device="cpu", dtype=dtype, form="stored", check_bytes=announced.append)
        for _ in range(2)
    )
    plain = Decoder.random(spec, device="cpu", dtype=dtype)
    assert kinds_of(stored) == {Fp8Weight, torch.Tensor} and kinds_of(plain) == {torch.Tensor}
    assert torch.equal(logits(stored), logits(again))
    found, expected = (decoder.weights.layers[0].mixer.output for decoder in (stored, plain))
    assert isinstance(found, Fp8Weight) and found.block == (8, 16)
    difference = found.dequantise(dtype) - expected
    assert 0 < difference.norm() < 0.05 * expected.norm()
    assert announced[0] == announced[1] < weight_bytes(spec, dtype)
    config = EngineConfig(load="random", weights="stored")
    assert bytes_without_files(config, spec, dtype) == announced[0]


def test_random_matrices_smaller_than_a_block_are_not_quantised(
    model_folder: Callable[[int | str], Path],
) -> None:
    settings = json.loads((model_folder(TIED) / "config.json").read_text())
    settings["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    decoder = Decoder.random(read_spec(settings), device="cpu", dtype=torch.float32, form="stored")
    assert kinds_of(decoder) == {torch.Tensor}
