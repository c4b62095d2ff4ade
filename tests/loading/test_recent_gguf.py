"""GGUF files of recent families, with names and metadata of llama.cpp's converter, equal to the folders that
they were written from."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch
from decoder_parity import poisoned_cache, random_tokens, shuffled_blocks
from mtp_zoo import make_mtp_model
from recent_zoo import make_recent_model

from drift_sdk.errors import ModelLoadError
from drift_sdk.families import read_spec
from drift_sdk.loading.source import Source, resolve
from drift_sdk.models.attention import AttentionBatch, SequenceRows
from drift_sdk.models.decoder import Decoder
from drift_sdk.models.draft_head import DraftDecoder, load_mtp, mtp_shapes
from drift_sdk.spec.model import Experts

NUM_MODELS = 4
ARCHITECTURES = {
    "ministral3": "mistral3",
    "qwen3_vl": "qwen3vl",
    "qwen3_vl_moe": "qwen3vlmoe",
    "glm4_moe": "glm4moe",
}
NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
    "eh_proj": "nextn.eh_proj",
    "enorm": "nextn.enorm",
    "hnorm": "nextn.hnorm",
    "shared_head.norm": "nextn.shared_head_norm",
    "shared_head.head": "nextn.shared_head_head",
    "embed_tokens": "nextn.embed_tokens",
}
EXPERT = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.\d+\.(gate|up|down)_proj\.weight")


def _permuted(array: npt.NDArray[np.float32], num_heads: int) -> npt.NDArray[np.float32]:
    """Rows of a projection with the halves of each head interleaved."""
    halves = array.reshape(num_heads, 2, -1, *array.shape[1:])
    return halves.swapaxes(1, 2).reshape(array.shape)


def _stored(architecture: str, source: Source, config: dict[str, Any]) -> dict[str, npt.NDArray[np.float32]]:
    tensors, found = source.tensors(), {}
    experts: dict[str, list[npt.NDArray[np.float32]]] = {}
    for name in sorted(tensors.names(), key=lambda name: [int(part) for part in re.findall(r"\d+", name)]):
        array = tensors.get(name).numpy().copy()
        if name in NAMES:
            found[NAMES[name]] = array
        elif match := EXPERT.fullmatch(name):
            experts.setdefault(f"blk.{match[1]}.ffn_{match[2]}_exps.weight", []).append(array)
        elif ".mlp.experts." in name:  # [experts, in, out], gate and up in one
            layer, is_down = name.split(".")[2], name.endswith("down_proj")
            array = array.swapaxes(1, 2)
            parts = (
                {"down": array} if is_down else dict(zip(("gate", "up"), np.split(array, 2, 1), strict=True))
            )
            for part, each in parts.items():
                found[f"blk.{layer}.ffn_{part}_exps.weight"] = np.ascontiguousarray(each)
        elif name.endswith("e_score_correction_bias"):
            found[f"blk.{name.split('.')[2]}.exp_probs_b.bias"] = array
        else:
            _, _, layer, rest = name.split(".", 3)
            module, _, suffix = rest.rpartition(".")
            own = NAMES[module]
            if architecture == "mistral3" and own in ("attn_q", "attn_k"):
                heads = "num_attention_heads" if own == "attn_q" else "num_key_value_heads"
                array = _permuted(array, config[heads])
            if architecture == "glm4moe" and own == "ffn_norm":
                own = "post_attention_norm"
            found[f"blk.{layer}.{own}.{suffix}"] = array
    return found | {name: np.stack(each) for name, each in experts.items()}


def write_recent(family: str, folder: Path, file: Path, **extra: npt.NDArray[np.float32]) -> None:
    """Write the model of a folder."""
    architecture, source = ARCHITECTURES[family], resolve(folder)
    config = source.config.get("text_config", source.config)
    writer = gguf.GGUFWriter(file, architecture)
    head_dim, rope = config["head_dim"], config["rope_parameters"]
    is_glm = family == "glm4_moe"
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"] + is_glm)
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(head_dim // 2 if is_glm else head_dim)
    if family == "ministral3":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
        writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
        if config["sliding_window"]:
            writer.add_sliding_window(config["sliding_window"])
    if "moe_intermediate_size" in config:
        number = config.get("n_routed_experts") or config.get("num_local_experts") or config["num_experts"]
        writer.add_expert_count(number)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if is_glm:
        writer.add_expert_shared_count(config["n_shared_experts"])
        writer.add_leading_dense_block_count(config["first_k_dense_replace"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
        writer.add_expert_weights_norm(config["norm_topk_prob"])
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])
        writer.add_nextn_predict_layers(1)
    if family.startswith("qwen3_vl"):
        writer.add_rope_dimension_sections([*rope["mrope_section"], 0])
        writer.add_num_deepstack_layers(1)
    writer.add_eos_token_id(7)
    for name, array in (_stored(architecture, source, config) | extra).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@torch.inference_mode()
def logits_of(source: Source) -> torch.Tensor:
    decoder = Decoder.load(read_spec(source.config), source.tensors(), device="cpu", dtype=torch.float32)
    token_ids, cache = random_tokens(decoder.spec, 50), poisoned_cache(decoder.spec)
    batch = AttentionBatch([SequenceRows(shuffled_blocks(), 0, len(token_ids))], cache)
    return decoder.logits(decoder.forward(token_ids, batch, cache)[0])


@pytest.mark.parametrize("seed", range(NUM_MODELS))
@pytest.mark.parametrize("family", ARCHITECTURES)
def test_files_equal_their_folders(family: str, seed: int, tmp_path: Path) -> None:
    """There is no metadata for MLPs beside experts in files of Qwen3-VL."""
    for each in itertools.count(20 * seed):
        make_recent_model(family, each, tmp_path)
        spec = read_spec(resolve(tmp_path).config)
        if family != "qwen3_vl_moe" or all(isinstance(layer.channel, Experts) for layer in spec.layers):
            break
    file = tmp_path / "model.gguf"
    write_recent(family, tmp_path, file)
    found, expected = logits_of(resolve(file)), logits_of(resolve(tmp_path))
    assert torch.equal(found, expected)


def test_drafts_of_files_equal_those_of_their_folders(tmp_path: Path) -> None:
    """Of the layer behind the others, with copies of embedding and head, which are not read."""
    for seed in range(NUM_MODELS):
        folder = tmp_path / str(seed)
        make_mtp_model("glm4_moe", seed, folder)
        file = tmp_path / f"{seed}.gguf"
        write_recent("glm4_moe", folder, file)
        (draft, layer), (expected, other) = (places_of(resolve(each)) for each in (file, folder))
        assert layer.keys() == other.keys() and len(layer) > 30
        for name, tensor in layer.items():
            assert torch.equal(tensor, other[name]), name
        assert torch.equal(draft.weights.joint, expected.weights.joint)
        for name in ("embedding_norm", "hidden_norm", "final_norm"):
            assert torch.equal(getattr(draft.weights, name), getattr(expected.weights, name))


def places_of(source: Source) -> tuple[DraftDecoder, dict[str, torch.Tensor]]:
    """The draft of a source, and the tensors of files that it reads."""
    spec, tensors = read_spec(source.config), source.tensors()
    target = Decoder.load(spec, tensors, device="cpu", dtype=torch.float32)
    return load_mtp(target, tensors), {name: tensors.get(name) for name in mtp_shapes(spec)}


def test_layers_after_the_one_that_predicts_a_token_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_recent_model("glm4_moe", 0, tmp_path)
    file, num_layers = tmp_path / "model.gguf", read_spec(resolve(tmp_path).config).num_layers
    extra = {f"blk.{num_layers + 1}.nextn.enorm.weight": np.ones(8, np.float32)}
    write_recent("glm4_moe", tmp_path, file, **extra)
    assert torch.equal(logits_of(resolve(file)), logits_of(resolve(tmp_path)))
    assert f"layer {num_layers + 1} and later are left out" in caplog.text


def test_temperature_of_another_context_is_refused(tmp_path: Path) -> None:
    make_recent_model("ministral3", 0, tmp_path)
    file = tmp_path / "model.gguf"

    class Writer(gguf.GGUFWriter):
        def add_attn_temperature_scale(self, value: float) -> None:
            super().add_attn_temperature_scale(value)
            self.add_attn_temperature_length(17)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf, "GGUFWriter", Writer)
        write_recent("ministral3", tmp_path, file)
    with pytest.raises(ModelLoadError, match="attention.temperature_length=17, expected 16"):
        assert resolve(file).config
