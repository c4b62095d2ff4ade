"""Deep models give the same bits whether launches of layers are repeated or all layers are computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from interpreted_device import FirstRunDevice
from scheduled_run import run_scheduled, sampling_of
from tiny_llama import tiny_llama

from drift_sdk._kernels.gemm.tuning import TunedTable
from drift_sdk.execution.device.device import GpuDevice
from drift_sdk.execution.forward import repeated_layers
from drift_sdk.execution.forward.kernel_weights import arrange_decoder
from drift_sdk.execution.graph.executor import GraphExecutor, GraphOptions
from drift_sdk.models.decoder import Decoder
from drift_sdk.models.decoder_config import DecoderConfig
from drift_sdk.models.kv_scales import KVScales
from drift_sdk.steps import ExecutorLimits, StepPlan, StepResult

pytestmark = pytest.mark.kernel

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NUM_LAYERS = 6
BUDGET = 16


def drawn(form: str = "expanded", kv_form: str | None = None, **changes: object) -> Decoder:
    """A model whose layers have different weights, norms and scales of keys and values."""
    sizes = {"num_hidden_layers": NUM_LAYERS, "hidden_size": 64, "intermediate_size": 64}
    fields = tiny_llama(**sizes | changes)
    config = DecoderConfig.from_hf(fields)
    decoder = Decoder.random(config, device=DEVICE, dtype=torch.float32, form=form, kv_form=kv_form, seed=3)
    if kv_form is not None:
        numbers = torch.rand(2, config.num_layers, config.num_kv_heads, device=DEVICE) + 0.01
        decoder.weights = replace(decoder.weights, kv_scales=KVScales(*numbers))
    arrange_decoder(decoder)
    return decoder


def biased() -> Decoder:
    fields = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
    return drawn(**fields)


def windowed() -> Decoder:
    """Layers of two kinds in turn, with norms of queries and keys."""
    kinds = ["sliding_attention", "full_attention"] * 5
    fields = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "layer_types": kinds}
    return drawn(num_hidden_layers=10, sliding_window=5, use_sliding_window=True, **fields)


def mixed() -> Decoder:
    """Experts whose rows are counted by layer."""
    fields = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]}
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    return drawn(mlp_only_layers=[], decoder_sparse_step=1, norm_topk_prob=True, **fields, **sizes)


MODELS: dict[str, Callable[[], Decoder]] = {
    "llama": drawn,
    "qwen2": biased,
    "qwen3 with windows": windowed,
    "qwen3 with experts": mixed,
    "int4": lambda: drawn("int4", head_dim=32),
    # Four scales a layer: others are aligned in some layers alone, for which kernels are compiled again.
    "cache of e4m3": lambda: drawn(kv_form="fp8", num_attention_heads=4, num_key_value_heads=4),
}


def results(decoder: Decoder, *, is_exact: bool) -> tuple[list[list[int]], list[object]]:
    limits = ExecutorLimits(
        vocab_size=decoder.config.vocab_size, max_num_seqs=2, max_model_len=32, num_blocks=16, block_size=4
    )
    executor = GraphExecutor(
        GpuDevice(0) if DEVICE.type == "cuda" else FirstRunDevice(),
        decoder,
        limits,
        TunedTable(),
        GraphOptions(prefill_token_budget=BUDGET, fast_prompts=not is_exact),
    )
    found: list[object] = []

    def on_step(_: StepPlan, result: StepResult) -> None:
        found.append((result.prefill, result.decode))

    requests = [
        (list(range(5, 16)), sampling_of(11, 3, num_logprobs=2)),
        ([7, 8, 9], sampling_of(3, 3, temperature=1.0, seed=5, num_logprobs=2)),
    ]
    tokens = run_scheduled(executor, requests, prefill_token_budget=BUDGET, on_step=on_step)
    executor.close()
    return tokens, found


@pytest.mark.parametrize("is_exact", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_repeated_layers_have_the_same_bits(
    name: str, is_exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder, repeated = MODELS[name](), list[bool]()
    is_usable = repeated_layers._KindTape.is_usable

    def noted(tape: repeated_layers._KindTape, layers: Sequence[repeated_layers.LayerTensors]) -> bool:
        repeated.append(is_usable(tape, layers))
        return repeated[-1]

    monkeypatch.setattr(repeated_layers._KindTape, "is_usable", noted)
    found = results(decoder, is_exact=is_exact)
    assert any(repeated)
    monkeypatch.setattr(repeated_layers._KindTape, "is_usable", lambda tape, layers: False)
    assert found == results(decoder, is_exact=is_exact)
