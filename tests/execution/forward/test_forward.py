"""Prefill and decode passes of the target against the eager decoder: streams of all layers, and logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from decoder_parity import inner_terms, poisoned_cache
from drawn_decoder import drawn_decoder
from msgspec import structs
from slow_cases import slow_rows_after
from tolerances import assert_near

from drift_sdk._kernels.attention.exact_prefill import exact_prefill_config
from drift_sdk._kernels.attention.prefill import prefill_attention_config, prefill_tiles
from drift_sdk._kernels.gemm.tuning import TunedTable
from drift_sdk.execution.device.memory import Workspace
from drift_sdk.execution.forward import channels, products
from drift_sdk.execution.forward.attention import (
    AttentionGroups,
    ChunkAttention,
    FastChunkAttention,
    RowAttention,
    SequenceAttention,
)
from drift_sdk.execution.forward.caches import ModelResources, PagedKVCache
from drift_sdk.execution.forward.forward_pass import ResidualStream, exact_pass, fast_pass
from drift_sdk.execution.forward.kernel_weights import KernelExperts, KernelWeight, arrange_decoder
from drift_sdk.execution.forward.products import multiply_head
from drift_sdk.execution.forward.rows import HiddenStates, Rows
from drift_sdk.families import read_spec
from drift_sdk.models.allocation import WeightForm
from drift_sdk.models.attention import AttentionBatch, SequenceRows
from drift_sdk.models.channels import ExpertWeights, MlpWeights, ParallelWeights, QuantisedMatrices
from drift_sdk.spec.model import Experts, LayerSpec, Mlp, ModelSpec, Norm, QueryScaling, Router
from drift_sdk.steps import ExecutorLimits

pytestmark = pytest.mark.kernel

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BLOCK_SIZE, MAX_MODEL_LEN = 8, 24
WINDOW = 6
# Of two sequences, the rows of each step: prompts in two chunks, then three rows to verify.
PROMPT_STEPS = (((0, 9), (0, 3)), ((9, 14), (3, 6)))
VERIFIED = ((14, 17), (6, 9))

Spans = Sequence[tuple[int, int]]


def tiny(family: str, **more: object) -> ModelSpec:
    config: dict[str, Any] = {
        "model_type": family,
        "vocab_size": 40,
        "hidden_size": 16,
        "intermediate_size": 20,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "rope_theta": 100.0,
        "tie_word_embeddings": True,
    }
    return read_spec(config | more)


LONG_ROPE = {"type": "longrope", "short_factor": [1.0, 1.5, 2.0], "long_factor": [2.0, 3.0, 4.0]}
GRANITE = {
    "embedding_multiplier": 6.0,
    "residual_multiplier": 0.3,
    "attention_multiplier": 0.2,
    "logits_scaling": 5.0,
}
CONFIGS = {
    "mistral": tiny("mistral", sliding_window=WINDOW, num_hidden_layers=1),
    "gemma3": tiny(
        "gemma3_text", sliding_window=WINDOW, sliding_window_pattern=2, query_pre_attn_scalar=5, vocab_size=50
    ),
    "phi3": tiny(
        "phi3",
        sliding_window=None,
        partial_rotary_factor=0.75,
        rope_scaling=LONG_ROPE,
        original_max_position_embeddings=16,
        num_hidden_layers=1,
    ),
    "smollm3": tiny("smollm3", no_rope_layers=[1, 0], use_sliding_window=True, sliding_window=WINDOW),
    "granite": tiny("granite", num_hidden_layers=1, attention_bias=True, mlp_bias=True, **GRANITE),
}
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "truncate": False}
GPT_OSS = {"sliding_window": WINDOW, "num_local_experts": 4, "num_experts_per_tok": 3, "rope_scaling": YARN}
CONFIGS |= {
    "qwen3_moe": tiny("qwen3_moe", mlp_only_layers=[0], attention_bias=True, **EXPERTS),
    "gpt_oss": tiny("gpt_oss", **GPT_OSS),
    "gpt_oss in MXFP4": tiny(
        "gpt_oss",
        num_hidden_layers=1,
        hidden_size=32,
        intermediate_size=64,
        quantization_config={"quant_method": "mxfp4"},
        **GPT_OSS,
    ),
}
GEMMA = CONFIGS["gemma3"]


def with_all(layer: LayerSpec, *, has_rope: bool) -> LayerSpec:
    """A layer of Gemma with biases, a multiplier, and a rotation of half of each head, or none."""
    assert layer.mixer.rope is not None and isinstance(layer.channel, Mlp)
    rope = structs.replace(layer.mixer.rope, rotary_dim=4) if has_rope else None
    return structs.replace(
        layer,
        mixer=structs.replace(layer.mixer, rope=rope, has_bias=True),
        channel=structs.replace(layer.channel, has_bias=True),
        multiplier=0.7,
    )


# All options of these families at once, with a window in the first layer and no rotation in the second.
CONFIGS["all"] = structs.replace(
    GEMMA,
    layers=tuple(with_all(layer, has_rope=index == 0) for index, layer in enumerate(GEMMA.layers)),
    logits_divisor=3.0,
)


def with_gate(layer: LayerSpec, norm: Norm, *, has_bias: bool) -> LayerSpec:
    """A layer of Gemma whose attention has a gate, scales queries by position, and has norms of heads without
    weights."""
    mixer = structs.replace(
        layer.mixer,
        has_bias=has_bias,
        head_norm=Norm(1e-5, "wide"),
        has_head_weights=False,
        query_scaling=QueryScaling(beta=0.5, context=4),
        has_gate=True,
    )
    return structs.replace(layer, mixer=mixer, norm=norm, post_norm=Norm(1e-3, "offset"))


# Every norm has another epsilon or kind.
CONFIGS["gated"] = structs.replace(
    GEMMA,
    layers=(
        with_gate(GEMMA.layers[0], Norm(1e-4, "wide"), has_bias=True),
        with_gate(GEMMA.layers[1], Norm(1e-6, "offset"), has_bias=False),
    ),
    final_norm=Norm(1e-2, "wide"),
    embedding_norm=Norm(0.1),
    logits_divisor=0.5,
    logits_cap=2.0,
)
SIGMOID_EXPERTS = Experts(
    num_experts=6,
    num_active=2,
    intermediate_size=12,
    router=Router(kind="sigmoid", scale=1.8, num_groups=3, num_active_groups=2),
    shared=Mlp(intermediate_size=24),
)
QWEN = tiny("qwen3_moe", num_hidden_layers=3, **EXPERTS)
CHANNELS = (
    Mlp(intermediate_size=28),
    SIGMOID_EXPERTS,
    structs.replace(
        SIGMOID_EXPERTS,
        intermediate_size=8,
        router=Router(kind="sigmoid", is_normalised=False, scale=0.7),
        shared=None,
    ),
)
CONFIGS["sigmoid experts"] = structs.replace(
    QWEN,
    layers=tuple(
        structs.replace(layer, channel=channel) for layer, channel in zip(QWEN.layers, CHANNELS, strict=True)
    ),
)
# Shared experts that are one more expert; the second has a gate.
JOINED = (
    structs.replace(SIGMOID_EXPERTS, shared=Mlp(intermediate_size=12)),
    Experts(
        num_experts=5,
        num_active=3,
        intermediate_size=20,
        shared=Mlp(intermediate_size=20),
        has_shared_gate=True,
    ),
    CHANNELS[1],
)
CONFIGS["joined experts"] = structs.replace(
    QWEN,
    layers=tuple(
        structs.replace(layer, channel=channel) for layer, channel in zip(QWEN.layers, JOINED, strict=True)
    ),
)
# Heads of two sizes in groups of two sizes, of which the larger have keys that are values.
GEMMA4 = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": WINDOW,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "global_head_dim": 16,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 3.0,
}
CONFIGS["gemma4"] = tiny("gemma4_text", **GEMMA4)
EXPERTS4 = {"num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 12, "enable_moe_block": True}
CONFIGS["gemma4 experts"] = tiny("gemma4_text", **GEMMA4, **EXPERTS4)
# The last two layers read the keys and values of others, and have wider MLPs.
SHARED = {"attention_k_eq_v": False, "num_kv_shared_layers": 2, "use_double_wide_mlp": True}
SHARED |= {"hidden_size_per_layer_input": 6, "vocab_size_per_layer_input": 40}
CONFIGS["gemma4 inputs"] = tiny("gemma4_text", **(GEMMA4 | SHARED))
# Windows, scales, multipliers and biases; windows, sinks and experts.
EXACT = ("all", "gpt_oss")
BOTH = ("gated", "sigmoid experts", "joined experts", "gemma4", "gemma4 experts", "gemma4 inputs")
CASES = [(name, name in EXACT) for name in CONFIGS] + [(name, True) for name in BOTH]


class Passes:
    """The same steps of two sequences in kernels and in the eager decoder.

    is_exact: whether prompts get the bits of decoding.
    """

    def __init__(self, config: ModelSpec, form: WeightForm = "expanded", *, is_exact: bool) -> None:
        self.is_exact = is_exact
        self.decoder, self.eager = (
            drawn_decoder(config, device, seed=5, form=form) for device in (DEVICE, "cpu")
        )
        for decoder in (self.decoder, self.eager):
            for layer in decoder.weights.layers:
                if isinstance(layer.channel, ExpertWeights) and layer.channel.correction is not None:
                    with torch.inference_mode():
                        layer.channel.correction.mul_(10)  # so that the choice of experts changes
        arrange_decoder(self.decoder)
        blocks_each = MAX_MODEL_LEN // BLOCK_SIZE + 1
        limits = ExecutorLimits(
            vocab_size=config.vocab_size,
            max_num_seqs=2,
            max_model_len=MAX_MODEL_LEN,
            num_blocks=2 * blocks_each,
            block_size=BLOCK_SIZE,
        )
        generator = torch.Generator().manual_seed(7)
        self.blocks = torch.randperm(2 * blocks_each, generator=generator).view(2, blocks_each)
        self.tokens = torch.randint(config.vocab_size, (2, MAX_MODEL_LEN), generator=generator)
        cache = PagedKVCache(self.decoder, limits)
        cache.allocate(limits.num_blocks)
        self.model = ModelResources(decoder=self.decoder, cache=cache, tuned=TunedTable(), limits=limits)
        self.block_table = self.blocks.int().to(DEVICE)
        self.workspace = Workspace(torch.device(DEVICE))
        self.eager_cache = poisoned_cache(config)
        self.aux_layers = range(config.num_layers + 1)

    def compare(self, spans: Spans, rows_each: int | None) -> None:
        """A step of rows first ... end - 1 of each sequence, `rows_each` of them together, or in prefill."""
        rows, is_live, tiles = self._rows(spans, rows_each)
        num_rows = len(rows.slot)
        found = HiddenStates.take(self.workspace, "step", self.decoder, num_rows, self.aux_layers)
        is_fast = rows_each is None and not self.is_exact
        make_pass = fast_pass if is_fast else exact_pass
        attention = self._attention(tiles, rows, rows_each)
        forward = make_pass(self.model, rows, self.block_table, self.workspace, attention, found)
        forward.run()
        normed = self._gathered(found.final, rows) if is_fast else forward.normed

        expected, expected_aux = self._eager(spans)
        inner, depth = inner_terms(self.decoder.spec), len(self.aux_layers)
        for layer, stream in found.by_layer.items():
            name = f"layer {layer}"
            assert_near(stream[is_live].cpu(), expected_aux[layer], inner=inner, depth=layer + 1, name=name)

        assert torch.equal(found.final[is_live], found.by_layer[depth - 1][is_live])
        logits = self._logits(normed[is_live])
        assert_near(logits, self.eager.logits(expected), inner=inner, depth=depth, name="logits")

    def poison(self, spans: Spans) -> None:
        """Fill with NaN the keys and values that rows of these spans do not see in layers with a window."""
        cache = self.model.cache
        for layer, window in enumerate(self.decoder.spec.windows):
            if self.decoder.spec.layers[layer].kv is None:
                continue

            for blocks, (first, _) in zip(self.blocks, spans, strict=True):
                for position in range(first - window + 1 if window else 0):
                    block = blocks[position // BLOCK_SIZE]
                    kv = cache.layer(layer)
                    kv.keys[block, :, position % BLOCK_SIZE] = torch.nan
                    kv.values[block, :, position % BLOCK_SIZE] = torch.nan

    def _attention(self, tiles: torch.Tensor, rows: Rows, rows_each: int | None) -> RowAttention:
        if rows_each is None:
            head_dim, dtype = self.decoder.spec.max_head_dim, self.decoder.dtype
            if self.is_exact:
                return ChunkAttention(tiles, exact_prefill_config(head_dim, dtype))

            return FastChunkAttention(tiles, prefill_attention_config(head_dim, dtype))

        groups = AttentionGroups.of_model(
            self.model,
            self.workspace,
            self.block_table,
            num_sequences=len(rows.slot) // rows_each,
            num_rows=rows_each,
        )
        return SequenceAttention(groups, rows.planned(rows_each))

    def _rows(self, spans: Spans, rows_each: int | None) -> tuple[Rows, torch.Tensor, torch.Tensor]:
        """The rows, which of them are no padding, and the tiles of prefill."""
        slots, positions = [], []
        for slot, (first, end) in enumerate(spans):
            padding = 0 if rows_each is None else -(end - first) % rows_each
            slots += [slot] * (end - first) + [-1] * padding
            positions += [*range(first, end), *[0] * padding]
        if rows_each is None:
            slots, positions = [*slots, -1, -1], [*positions, 0, 0]
        is_live = torch.tensor(slots) >= 0
        tokens = self.tokens[torch.tensor(slots).clamp(min=0), torch.tensor(positions)]
        columns = torch.stack((torch.tensor(slots), tokens, torch.tensor(positions))).int().to(DEVICE)
        attention_config = exact_prefill_config if self.is_exact else prefill_attention_config
        tile_rows = attention_config(self.decoder.spec.max_head_dim, self.decoder.dtype).tile_rows
        tiles = np.zeros((len(slots) // tile_rows + 2, 4), dtype=np.int32)
        prefill_tiles([(slot, a, b - a) for slot, (a, b) in enumerate(spans)], tile_rows, tiles)
        return Rows(*columns), is_live.to(DEVICE), torch.from_numpy(tiles).to(DEVICE)

    def _gathered(self, source: torch.Tensor, rows: Rows) -> torch.Tensor:
        """The rows of a prefill step, normalised as those that tokens are sampled from."""
        row = torch.arange(len(rows.slot), dtype=torch.int32, device=DEVICE)
        hidden = HiddenStates.take(self.workspace, "gathered", self.decoder, len(row), ())
        stream = ResidualStream(self.decoder, hidden, torch.full_like(source, torch.nan))
        stream.gather(source, row, rows.slot)
        return stream.normed

    def _logits(self, normed: torch.Tensor) -> torch.Tensor:
        cap, head = self.decoder.spec.logits_cap, self.decoder.weights.head
        if cap is None:
            return normed.cpu() @ self.eager.weights.head.T

        logits = torch.full((len(normed), self.decoder.spec.vocab_size), torch.nan, device=DEVICE)
        multiply_head(normed, head, logits, self.model.tuned, cap)
        return logits.cpu()

    def _eager(self, spans: Spans) -> tuple[torch.Tensor, list[torch.Tensor]]:
        sequences = [
            SequenceRows(blocks.tolist(), first, end - first)
            for blocks, (first, end) in zip(self.blocks, spans, strict=True)
        ]
        batch = AttentionBatch(sequences, self.eager_cache)
        tokens = [self.tokens[slot, first:end] for slot, (first, end) in enumerate(spans)]
        return self.eager.forward(torch.cat(tokens), batch, self.eager_cache, self.aux_layers)


@pytest.mark.parametrize(("name", "is_exact"), slow_rows_after(len(CONFIGS), CASES))
def test_passes_equal_those_of_the_eager_decoder(name: str, is_exact: bool) -> None:
    """In layers with a window, keys outside it are NaN when the last rows are computed."""
    passes = Passes(CONFIGS[name], is_exact=is_exact)
    with torch.inference_mode():
        for spans in PROMPT_STEPS:
            passes.compare(spans, None)

        passes.poison(VERIFIED)
        passes.compare(VERIFIED, 3)


@pytest.mark.parametrize("form", ["fp8", "int4", "nvfp4"])
@pytest.mark.parametrize("has_few_rows", [True, False])
def test_passes_with_quantised_weights_equal_those_of_the_eager_decoder(
    form: WeightForm, has_few_rows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefill multiplies by the quantised weights for few rows, and expands them for many."""
    if not has_few_rows:
        monkeypatch.setattr(products, "MAX_KERNEL_ROWS", 0)
    config = tiny(
        "granite", hidden_size=64, intermediate_size=64, num_hidden_layers=1, mlp_bias=True, **GRANITE
    )
    passes = Passes(config, form, is_exact=False)
    for layer in passes.decoder.weights.layers:
        assert isinstance(layer.channel, MlpWeights)
        matrices = layer.mixer.qkv, layer.channel.gate_up, layer.channel.down
        assert all(isinstance(matrix, KernelWeight) for matrix in matrices)
        # Its 16 columns are no multiple of 64.
        assert isinstance(layer.mixer.output, torch.Tensor)
    with torch.inference_mode():
        passes.compare(PROMPT_STEPS[0], None)
        passes.is_exact = True
        passes.compare(PROMPT_STEPS[1], None)


@pytest.mark.parametrize("form", ["fp8", "int4", "nvfp4"])
def test_passes_with_quantised_experts_equal_those_of_the_eager_decoder(form: WeightForm) -> None:
    sizes = {"hidden_size": 64, "moe_intermediate_size": 64, "num_experts": 5, "num_experts_per_tok": 2}
    passes = Passes(tiny("qwen3_moe", **sizes), form, is_exact=False)
    for layer in passes.decoder.weights.layers:
        assert isinstance(layer.channel, ExpertWeights)
        assert isinstance(layer.channel.gate_up, KernelExperts)
        assert isinstance(layer.channel.down, KernelExperts)
        assert layer.channel.gate_up.shape == (5 * 128, 64)
    with torch.inference_mode():
        for spans in PROMPT_STEPS:
            passes.compare(spans, None)

        passes.compare(VERIFIED, 3)


@pytest.mark.parametrize("form", ["expanded", "fp8", "int4"])
@pytest.mark.parametrize("model_type", ["glm4_moe", "qwen3_next"])
def test_joined_experts_are_one_weight_with_the_others(
    model_type: str, form: WeightForm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a product of their own, and with the output of the eager decoder."""
    sizes = {"hidden_size": 64, "moe_intermediate_size": 64, "num_experts_per_tok": 2, "num_hidden_layers": 2}
    sizes |= {"n_routed_experts": 5, "first_k_dense_replace": 0} if model_type == "glm4_moe" else {}
    sizes |= {"num_experts": 5, "layer_types": ["full_attention"] * 2} if model_type == "qwen3_next" else {}
    sizes |= {"shared_expert_intermediate_size": 64} if model_type == "qwen3_next" else {}
    passes = Passes(tiny(model_type, **sizes), form, is_exact=False)
    monkeypatch.setattr(channels.ExpertForward, "_run_shared", None)
    for layer in passes.decoder.weights.layers:
        weights = layer.channel
        assert isinstance(weights, ExpertWeights)
        assert weights.num_joined == 1 and weights.shared is None
        assert (weights.shared_gate is not None) == (model_type == "qwen3_next")
        if form == "expanded":
            assert weights.gate_up.shape == (6, 128, 64) and weights.down.shape == (6, 64, 64)
        else:
            assert isinstance(weights.gate_up, KernelExperts) and isinstance(weights.down, KernelExperts)
            assert weights.gate_up.packed.num_experts == weights.down.packed.num_experts == 6
    with torch.inference_mode():
        for spans in PROMPT_STEPS:
            passes.compare(spans, None)

        passes.compare(VERIFIED, 3)


def test_quantised_inputs_and_experts_beside_an_mlp_equal_those_of_the_eager_decoder() -> None:
    """Kernels multiply by quantised matrices of layer inputs. Those of gates with gelu are expanded."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_kv_shared_layers": 0}
    inputs = GEMMA4 | SHARED | sizes | {"layer_types": None, "hidden_size_per_layer_input": 64}
    experts = GEMMA4 | EXPERTS4 | sizes | {"layer_types": None, "moe_intermediate_size": 64}
    each = tiny("gemma4_text", **experts)
    names = structs.replace(each.names.experts, layout="each")
    each = structs.replace(each, names=structs.replace(each.names, experts=names))
    for config in (tiny("gemma4_text", **inputs), each):
        passes = Passes(config, "fp8", is_exact=True)
        for layer in passes.decoder.weights.layers:
            if layer.input is not None:
                assert isinstance(layer.input.gate, KernelWeight)
                assert isinstance(layer.input.projection, KernelWeight)
            if isinstance(layer.channel, ParallelWeights):
                assert isinstance(layer.channel.mlp.down, KernelWeight)
                assert isinstance(layer.channel.experts.gate_up, torch.Tensor)
                assert isinstance(layer.channel.experts.down, KernelExperts)
        with torch.inference_mode():
            passes.compare(PROMPT_STEPS[0], None)


@pytest.mark.parametrize("form", ["fp8", "int4"])
def test_passes_with_quantised_attention_beside_experts_in_mxfp4(form: WeightForm) -> None:
    sizes = {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 64}
    mxfp4 = {"quantization_config": {"quant_method": "mxfp4"}}
    passes = Passes(tiny("gpt_oss", **sizes, **mxfp4, **GPT_OSS), form, is_exact=False)
    (layer,) = passes.decoder.weights.layers
    assert isinstance(layer.mixer.qkv, KernelWeight) and isinstance(layer.channel, ExpertWeights)
    assert isinstance(layer.channel.gate_up, QuantisedMatrices)
    with torch.inference_mode():
        for spans in PROMPT_STEPS:
            passes.compare(spans, None)

        passes.compare(VERIFIED, 3)
