"""GGUF files of random models of each family, equal to the models they were written from."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from decoder_parity import inner_terms, poisoned_cache, random_tokens, shuffled_blocks
from expert_zoo import EXPERT_MODELS, YARN, make_expert_model, quantise_folder
from family_zoo import draw_model, own_decoder
from gguf import GGMLQuantizationType as Q
from gguf_files import write_gguf, write_gpt_oss
from msgspec import structs
from slow_cases import slow_rows_after
from tolerances import assert_near

from drift_sdk import Engine, EngineConfig, inspect
from drift_sdk.errors import ConfigError, ModelLoadError
from drift_sdk.families import read_spec
from drift_sdk.families.mixtral import FAMILY as MIXTRAL
from drift_sdk.loading.gguf import GGUFFile
from drift_sdk.loading.source import resolve
from drift_sdk.loading.stored_formats import dequantise_mxfp4
from drift_sdk.loading.tensors import InPlaceSource
from drift_sdk.models.allocation import WeightForm
from drift_sdk.models.attention import AttentionBatch, SequenceRows
from drift_sdk.models.decoder import Decoder
from drift_sdk.quantised.weight import QuantisedWeight
from drift_sdk.spec.model import ModelSpec
from drift_sdk.spec.rope import LinearScaling, Rope

NUM_MODELS = 3
GEMMA4_MODELS = ("gemma4", "gemma4 experts")
NUM_TOKENS = 40
# The layers without rotation are fixed in files of SmolLM3, and they have no windows.
CHANGES: dict[str, dict[str, Any]] = {
    "smollm3": {
        "num_hidden_layers": 5,
        "no_rope_layers": None,
        "no_rope_layer_interval": 4,
        "use_sliding_window": False,
    }
}


@torch.inference_mode()
def _logits(decoder: Decoder, token_ids: torch.Tensor) -> torch.Tensor:
    cache = poisoned_cache(decoder.spec)
    batch = AttentionBatch([SequenceRows(shuffled_blocks(), 0, len(token_ids))], cache)
    return decoder.logits(decoder.forward(token_ids, batch, cache)[0])


def _flat(value: Any) -> Any:
    """Structs and tuples as nested lists, for comparison with pytest.approx."""
    if isinstance(value, structs.Struct):
        return [_flat(part) for part in structs.astuple(value)]

    return [_flat(part) for part in value] if isinstance(value, tuple) else value


def _assert_same(found: Any, expected: Any) -> None:
    """Compare nested lists, with numbers up to their rounding to float32 in the file."""
    if isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            _assert_same(one, other)
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=1e-6)
    else:
        assert found == expected


def _without_scaling(spec: ModelSpec) -> ModelSpec:
    layers = []
    for layer in spec.layers:
        rope = layer.mixer.rope and structs.replace(layer.mixer.rope, scaling=None)
        layers.append(structs.replace(layer, mixer=structs.replace(layer.mixer, rope=rope)))
    return structs.replace(spec, layers=tuple(layers))


@pytest.mark.parametrize("family", ["mistral", "phi3", "gemma3", "gemma4", "smollm3", "granite"])
def test_decoder_equals_that_of_the_model(family: str, tmp_path: Path) -> None:
    for seed in range(NUM_MODELS):
        model = draw_model(family, seed, **CHANGES.get(family, {}))
        max_model_len = (512, 64)[seed % 2]
        write_gguf(model, tmp_path / "model.gguf")
        source = resolve(tmp_path / "model.gguf")
        spec = read_spec(source.config, max_model_len=max_model_len)
        decoder = Decoder.load(spec, source.tensors(), device="cpu", dtype=torch.float32)
        expected = own_decoder(model, max_model_len=max_model_len)
        for name, parameter in model.named_parameters():
            stored = source.tensors().get(name)
            # Files of Gemma hold 1 + weight, rounded to float32; so does the norm compute it.
            offset = 1.0 if family == "gemma3" and name.endswith("norm.weight") else 0.0
            assert torch.equal(stored + offset, parameter + offset), name

        found, own = spec, expected.spec
        if model.config.rope_parameters.get("rope_type") == "llama3":
            # The scaling is stored as factors.
            found, own = _without_scaling(found), _without_scaling(own)
        _assert_same(_flat(found), _flat(own))

        token_ids = random_tokens(spec, NUM_TOKENS, seed=seed)
        inner, depth = inner_terms(spec), spec.num_layers + 1
        assert_near(_logits(decoder, token_ids), _logits(expected, token_ids), inner=inner, depth=depth)


GEMMA4: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "num_global_key_value_heads": None,
    "hidden_size_per_layer_input": 32,
}
"""With rows of whole blocks of 32."""
SEEDS = (3, 0, 1, 5, 7)
"""Of models with and without shared keys, keys that are values, and wide MLPs."""


@pytest.mark.parametrize("kind", [Q.F32, Q.Q4_0, Q.Q8_0])
@pytest.mark.parametrize(
    ("family", "seed"), slow_rows_after(2, [(family, seed) for seed in SEEDS for family in GEMMA4_MODELS])
)
def test_files_of_gemma_4_equal_their_models(family: str, seed: int, kind: Q, tmp_path: Path) -> None:
    """Also as blocks in memory, embeddings among them."""
    experts = {"moe_intermediate_size": 32} if "experts" in family else {}
    model = draw_model(family, seed, **GEMMA4, **experts)
    stored = write_gguf(model, tmp_path / "model.gguf", kind)
    source, expected = resolve(tmp_path / "model.gguf"), own_decoder(stored)
    spec = read_spec(source.config)
    _assert_same(_flat(structs.replace(spec, quantisation=None)), _flat(expected.spec))
    token_ids = random_tokens(spec, NUM_TOKENS, seed=seed)
    logits = _logits(expected, token_ids)
    forms: tuple[WeightForm, ...] = ("expanded", "stored")
    for form in forms:
        decoder = Decoder.load(spec, source.tensors(), device="cpu", dtype=torch.float32, form=form)
        assert torch.equal(_logits(decoder, token_ids), logits)
        is_stored = form == "stored" and kind != Q.F32
        weights = decoder.weights
        inputs = () if weights.layer_inputs is None else (weights.layer_inputs.embedding,)
        matrices = (weights.embedding, weights.layers[0].mixer.qkv, *inputs)
        assert all(isinstance(matrix, QuantisedWeight) == is_stored for matrix in matrices)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention.sliding_window_pattern": 6}, "sliding_window_pattern=6, expected true or false"),
        ({"attention.sliding_window_pattern": [True, False]}, "expected true or false for each of 5 layers"),
        ({"attention.value_length_swa": 8}, "value_length_swa=8, expected 16"),
        ({"rope.dimension_count_swa": 8}, "rope.dimension_count_swa=8, expected 16"),
        ({"rope.dimension_count": 8}, "rope.dimension_count=8, expected 32"),
        (
            {"attention.head_count_kv": [2, 2, 1, 1, 2]},
            "head_count_kv=.*, expected one number for layers of a kind",
        ),
        ({"attention.head_count_kv": [2]}, r"head_count_kv=\[2\], expected one number for layers of a kind"),
        ({"attention.shared_kv_layers": 5}, "shared_kv_layers=5, expected 0 to 4"),
        ({"feed_forward_length": [64, 64, 64, 64, 96]}, "feed_forward_length=.*, expected one number"),
        ({"feed_forward_length": [64, 64, 64, 96, 96]}, "feed_forward_length of 96 in the last 2 layers"),
        ({"expert_count": 4}, "gemma4.expert_used_count is missing"),
        ({"embedding_length_per_layer_input": -1}, "hidden_size_per_layer_input=-1"),
        ({"attention.key_length_swa": "x"}, "head_dim='x'|expected 'x'"),
    ],
)
def test_metadata_of_gemma_4_that_do_not_fit_are_named(
    changes: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = draw_model("gemma4", 4, **GEMMA4)
    assert model.config.num_hidden_layers == 5 and model.config.num_kv_shared_layers == 2
    write_gguf(model, tmp_path / "model.gguf")
    parts = GGUFFile(tmp_path / "model.gguf")._parts
    metadata = parts.header.metadata | {f"gemma4.{key}": value for key, value in changes.items()}
    changed = structs.replace(parts.header, metadata=metadata)
    monkeypatch.setattr("drift_sdk.loading.gguf_file.read_header", lambda file: changed)
    with pytest.raises(ModelLoadError, match=message):
        read_spec(GGUFFile(tmp_path / "model.gguf").config)


@pytest.mark.parametrize("factors", [None, [1.0] * 4 + [0.5] * 12, [1.0, 1e30] * 8, [1e30] * 16])
def test_factors_of_gemma_4_that_are_not_of_a_proportional_rotation(
    factors: list[float] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {} if factors is None else {"rope_freqs.weight": np.array(factors, np.float32)}
    monkeypatch.setattr("gguf_files._rope_factors", lambda model: found)
    write_gguf(draw_model("gemma4", 4, **GEMMA4), tmp_path / "model.gguf")
    with pytest.raises(ModelLoadError, match=r"gemma4\.rope_freqs\.weight with .*, expected 1"):
        GGUFFile(tmp_path / "model.gguf")


def test_spare_keys_of_gemma_4_are_left_out(tmp_path: Path) -> None:
    """Files may have keys of layers that do not use them."""
    model = draw_model("gemma4", 4, **GEMMA4)
    spare = {
        "blk.4.attn_k.weight": np.ones((64, 64), np.float32),
        "blk.4.attn_v.weight": np.ones((64, 64), np.float32),
        "blk.4.attn_k_norm.weight": np.ones(32, np.float32),
    }
    write_gguf(model, tmp_path / "model.gguf", **spare)
    source = resolve(tmp_path / "model.gguf")
    spec = read_spec(source.config)
    decoder = Decoder.load(spec, source.tensors(), device="cpu", dtype=torch.float32)
    token_ids = random_tokens(spec, NUM_TOKENS)
    assert torch.equal(_logits(decoder, token_ids), _logits(own_decoder(model), token_ids))


@pytest.fixture(params=["qwen3_moe", "mixtral"])
def experts(tmp_path: Path, request: pytest.FixtureRequest) -> Any:
    return make_expert_model(request.param, tmp_path / "experts")


@pytest.mark.parametrize("kind", [Q.F32, Q.Q8_0, Q.Q4_0])
def test_experts_are_those_of_the_model(kind: Q, experts: Any, tmp_path: Path) -> None:
    """Matrices of 24 columns have no blocks and stay float32, beside others that have."""
    stored = write_gguf(experts, tmp_path / "model.gguf", kind)
    stored.save_pretrained(tmp_path / "stored")
    source, expected = resolve(tmp_path / "model.gguf"), resolve(tmp_path / "stored")
    assert set(source.tensors().names()) == set(expected.tensors().names())
    for name in expected.tensors().names():
        assert torch.equal(source.tensors().get(name), expected.tensors().get(name)), name
    spec, own = read_spec(source.config), read_spec(expected.config)
    assert spec.experts == own.experts and spec.experts is not None
    decoder, other = (
        Decoder.load(shapes, each.tensors(), device="cpu", dtype=torch.float32)
        for shapes, each in ((spec, source), (own, expected))
    )
    token_ids = random_tokens(spec, NUM_TOKENS, seed=1)
    assert torch.equal(_logits(decoder, token_ids), _logits(other, token_ids))


async def test_experts_stay_blocks_with_the_tokens_of_their_numbers(experts: Any, tmp_path: Path) -> None:
    write_gguf(experts, tmp_path / "model.gguf", Q.Q8_0)
    answers = []
    for form in ("stored", "expanded"):
        config = EngineConfig(device="cpu", weights=form, max_model_len=64)  # type: ignore[arg-type]
        async with Engine(tmp_path / "model.gguf", config) as engine:
            answers.append(await engine.generate([5, 6, 7], max_tokens=12, ignore_eos=True, logprobs=1))
    assert answers[0].token_ids == answers[1].token_ids
    assert answers[0].logprobs == answers[1].logprobs


@pytest.fixture
def gpt_oss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The folder and the GGUF file of a model with MXFP4 experts, whose rotation GGUF files can say."""
    yarn = YARN | {"beta_fast": 32.0, "truncate": False}
    monkeypatch.setitem(EXPERT_MODELS["gpt_oss"][2], "rope_parameters", yarn)
    model = make_expert_model("gpt_oss", tmp_path / "numbers")
    quantise_folder(model, tmp_path / "numbers", tmp_path / "mxfp4")
    write_gpt_oss(model, tmp_path / "mxfp4", tmp_path / "model.gguf")
    return tmp_path / "mxfp4", tmp_path / "model.gguf"


def test_gpt_oss_is_that_of_the_folder(gpt_oss: tuple[Path, Path]) -> None:
    expected, source = map(resolve, gpt_oss)
    tensors, stored = expected.tensors(), source.tensors()
    assert isinstance(stored, InPlaceSource)
    assert set(stored.names()) == set(tensors.names())
    for name in tensors.names():
        assert torch.equal(stored.get(name), tensors.get(name)), name
        assert stored.shape(name) == tensors.shape(name) and stored.file(name) == str(gpt_oss[1])
        place = torch.empty_like(tensors.get(name))
        stored.read_into(name, place)
        assert torch.equal(place, tensors.get(name)), name
    spec, own = (read_spec(each.config, max_model_len=512) for each in (source, expected))
    _assert_same(_flat(spec), _flat(own))
    decoder, other = (
        Decoder.load(spec, each.tensors(), device="cpu", dtype=torch.float32) for each in (source, expected)
    )
    token_ids = random_tokens(spec, NUM_TOKENS, seed=1)
    assert torch.equal(_logits(decoder, token_ids), _logits(other, token_ids))


async def test_engine_serves_gpt_oss_of_either_form(gpt_oss: tuple[Path, Path]) -> None:
    config = EngineConfig(device="cpu", dtype="float32", max_model_len=128)
    answers = []
    for path in gpt_oss:
        info = inspect(path, config)
        assert info.reasons == ()
        async with Engine(path, config) as engine:
            answer = await engine.generate([5, 6, 7] * 9, max_tokens=24, ignore_eos=True, logprobs=1)
        assert answer.logprobs is not None
        answers.append((answer.token_ids, [each.logprob for each in answer.logprobs], info.weight_bytes))
    assert answers[0] == answers[1]


def test_blocks_of_gpt_oss_have_the_numbers_of_the_gguf_package(gpt_oss: tuple[Path, Path]) -> None:
    source = resolve(gpt_oss[1])
    prefix = "model.layers.1.mlp.experts.gate_up_proj"
    blocks, scales = (source.tensors().get(f"{prefix}_{kind}") for kind in ("blocks", "scales"))
    reader = gguf.GGUFReader(gpt_oss[1])
    for first, name in enumerate(("gate", "up")):
        (tensor,) = [each for each in reader.tensors if each.name == f"blk.1.ffn_{name}_exps.weight"]
        expected = torch.from_numpy(gguf.quants.dequantize(tensor.data, Q.MXFP4).copy())
        assert torch.equal(dequantise_mxfp4(blocks, scales, torch.float32)[:, first::2], expected)


def test_experts_of_gpt_oss_in_other_formats_are_refused(
    gpt_oss: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = resolve(gpt_oss[1])
    monkeypatch.setattr("drift_sdk.loading.gguf.GGMLQuantizationType", SimpleNamespace(MXFP4=Q.Q4_0))
    with pytest.raises(ModelLoadError, match=r"ffn_gate_exps.weight is MXFP4, expected Q4_0"):
        source.tensors().get("model.layers.0.mlp.experts.gate_up_proj_blocks")


@pytest.mark.parametrize(
    "tensors",
    [
        {"gate_exps.weight": (2, 3, 4)},
        {"gate_exps.weight": (2, 3, 4), "up_exps.weight": (2, 5, 4)},
        {"down_exps.weight": (3, 4)},
        {"down_exps.bias": (2, 3, 4)},
    ],
)
def test_experts_of_gpt_oss_that_do_not_fit_are_refused(
    tensors: dict[str, tuple[int, ...]], tmp_path: Path
) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "gpt-oss")
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_sliding_window(8)
    writer.add_expert_count(2)
    writer.add_expert_used_count(1)
    writer.add_expert_feed_forward_length(32)
    for name, shape in tensors.items():
        writer.add_tensor(f"blk.0.ffn_{name}", np.zeros(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelLoadError, match=r"blk\.0\.ffn_.*: shapes \[.*, expected one"):
        resolve(tmp_path / "model.gguf").tensors()


@pytest.mark.parametrize("num_experts", [0, 1025])
def test_number_of_experts_is_bounded(num_experts: int, tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "qwen3moe")
    writer.add_block_count(1)
    writer.add_tensor("blk.0.ffn_up_exps.weight", np.zeros((num_experts, 2, 2), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelLoadError, match="1 to 1024|whole"):
        GGUFFile(tmp_path / "model.gguf")


def test_experts_in_old_files_of_mixtral_have_tensors_of_their_own() -> None:
    (architecture,) = MIXTRAL.gguf
    for name in ("blk.3.ffn_up.7.weight", "blk.3.ffn_up_exps.7.weight"):
        assert architecture.tensor_name(name, 4) == "model.layers.3.block_sparse_moe.experts.7.w3.weight"
    assert architecture.tensor_name("blk.3.ffn_up.weight", 4) == "blk.3.ffn_up.weight"


def test_experts_that_are_cut_already_are_refused(experts: Any, tmp_path: Path) -> None:
    cut = {"blk.0.ffn_up_exps.1.weight": np.ones((2, 2), np.float32)}
    write_gguf(experts, tmp_path / "model.gguf", **cut)
    with pytest.raises(ModelLoadError, match=r"tensor blk\.0\.ffn_up_exps\.1\.weight, expected one of all"):
        GGUFFile(tmp_path / "model.gguf")


def test_matrices_of_experts_are_bounded(
    experts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_gguf(experts, tmp_path / "model.gguf")
    monkeypatch.setattr("drift_sdk.loading.gguf.MAX_TENSORS", 20)
    with pytest.raises(ModelLoadError, match="more than 20 matrices of experts"):
        GGUFFile(tmp_path / "model.gguf")


def test_names_of_hugging_face_in_files_of_gpt_oss_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "model.layers.0.mlp.experts.down_proj_bias"
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "gpt-oss")
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_sliding_window(8)
    writer.add_expert_count(2)
    writer.add_expert_used_count(1)
    writer.add_expert_feed_forward_length(32)
    writer.add_tensor(name, np.zeros((2, 3), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelLoadError, match=f"tensor {name}, expected the names of GGUF files"):
        resolve(tmp_path / "model.gguf").tensors()


async def test_attention_of_gpt_oss_stays_blocks(gpt_oss: tuple[Path, Path], tmp_path: Path) -> None:
    """Beside experts in MXFP4, with the tokens of its numbers. It is not quantised again."""
    file = tmp_path / "blocks.gguf"
    write_gpt_oss(make_expert_model("gpt_oss", tmp_path / "again"), gpt_oss[0], file, Q.Q8_0)
    answers, sizes = [], []
    for form in ("stored", "expanded"):
        config = EngineConfig(device="cpu", dtype="float32", weights=form, max_model_len=64)  # type: ignore[arg-type]
        sizes.append(inspect(file, config).weight_bytes)
        async with Engine(file, config) as engine:
            answer = await engine.generate([5, 6, 7], max_tokens=12, ignore_eos=True, logprobs=1)
        answers.append((answer.token_ids, answer.logprobs))
    assert answers[0] == answers[1]
    assert sizes[0] is not None and sizes[1] is not None and sizes[0] < sizes[1]
    with pytest.raises(ConfigError, match="the files are quantised"):
        await Engine(file, EngineConfig(device="cpu", weights="int4", max_model_len=64)).start()


def _spec_of(model: Any, file: Path) -> ModelSpec:
    write_gguf(model, file)
    return read_spec(GGUFFile(file).config)


def test_window_of_zero_is_none(tmp_path: Path) -> None:
    """Files of Phi-4 have a window of 0."""
    model = draw_model("phi3", 1, sliding_window=None)
    spec = _spec_of(model, tmp_path / "model.gguf")
    assert set(spec.windows) == {None}


def test_files_of_gemma_3_without_a_pattern(tmp_path: Path) -> None:
    """Older files have neither the pattern of windows, nor the local theta, nor the attention's scale: they
    are those of the published models."""
    file = tmp_path / "model.gguf"
    found = {}
    for num_layers, window in ((7, 24), (62, 24), (8, 0)):
        writer = gguf.GGUFWriter(file, "gemma3")
        writer.add_context_length(512)
        writer.add_embedding_length(48)
        writer.add_block_count(num_layers)
        writer.add_feed_forward_length(64)
        writer.add_head_count(4)
        writer.add_head_count_kv(2)
        writer.add_key_length(16)
        writer.add_value_length(16)
        writer.add_layer_norm_rms_eps(1e-6)
        writer.add_rope_freq_base(1e6)
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(8.0)
        if window:
            writer.add_sliding_window(window)
        writer.add_tensor("token_embd.weight", np.zeros((9, 48), np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        found[num_layers] = read_spec(GGUFFile(file).config)

    spec = found[7]
    assert spec.windows == (24,) * 5 + (None, 24)
    local, whole = (
        Rope(theta=1e4, rotary_dim=16),
        Rope(theta=1e6, rotary_dim=16, scaling=LinearScaling(factor=8.0)),
    )
    assert [layer.mixer.rope for layer in spec.layers] == [local] * 5 + [whole, local]
    assert spec.ropes == (local, whole)
    assert {layer.mixer.scale for layer in spec.layers} == {16**-0.5}
    assert found[62].attention.scale == 12**-0.5  # the 27B model: the width of heads is not the scale's
    assert (found[8].windows, found[8].ropes) == ((None,) * 8, (whole,))  # no windows at all
    assert spec.is_head_tied and spec.embedding_multiplier == 48**0.5


@pytest.mark.parametrize(
    "tensor, metadata, message",
    [
        ("rope_factors_long.weight", {}, "rope short_factor None: expected 4 numbers"),
        ("rope_factors_long.weight", {"phi3.rope.scaling.type": "linear"}, "beside rope scaling 'linear'"),
        ("rope_factors_long.weight", {"phi3.rope.dimension_count": 6}, "expected one factor for each two"),
    ],
)
def test_factors_of_long_rope_that_do_not_fit(
    tensor: str, metadata: dict[str, Any], message: str, tmp_path: Path
) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "phi3")
    writer.add_layer_norm_rms_eps(1e-6)
    settings = {
        "context_length": 512,
        "embedding_length": 32,
        "block_count": 1,
        "feed_forward_length": 64,
        "attention.head_count": 4,
    }
    for key, value in ({f"phi3.{key}": value for key, value in settings.items()} | metadata).items():
        (writer.add_string if isinstance(value, str) else writer.add_uint32)(key, value)

    writer.add_tensor("token_embd.weight", np.zeros((9, 32), np.float32))
    writer.add_tensor(tensor, np.ones(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelLoadError, match=message):
        read_spec(GGUFFile(tmp_path / "model.gguf").config)
