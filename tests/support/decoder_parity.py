"""Compares a decoder with transformers: log-probabilities and features of prefill chunks and decode steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tolerances import assert_near

from drift_sdk.families import read_spec
from drift_sdk.loading.source import resolve
from drift_sdk.models.attention import AttentionBatch, SequenceRows
from drift_sdk.models.decoder import Decoder
from drift_sdk.models.kv_cache import KVCache
from drift_sdk.spec.model import ModelSpec

__all__ = [
    "assert_parity",
    "inner_terms",
    "load_decoder",
    "poisoned_cache",
    "random_tokens",
    "shuffled_blocks",
]

BLOCK_SIZE = 8
MAX_MODEL_LEN = 256


def load_decoder(folder: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    source = resolve(folder)
    spec = read_spec(source.config, max_model_len=MAX_MODEL_LEN)
    return Decoder.load(spec, source.tensors(), device="cpu", dtype=dtype)


def inner_terms(spec: ModelSpec) -> int:
    """Number of terms of a decoder's longest sums."""
    experts = 0 if spec.experts is None else spec.experts.intermediate_size
    widths = (layer.mixer.output_size for layer in spec.layers)
    return max(spec.hidden_size, spec.mlp_size, experts, *widths)


def poisoned_cache(spec: ModelSpec, num_blocks: int = 32, dtype: torch.dtype = torch.float32) -> KVCache:
    """A cache filled with NaN, so that reading a slot before it was written shows in the result."""
    shapes = [layer.kv for layer in spec.layers]
    cache = KVCache(shapes, num_blocks, BLOCK_SIZE, dtype, "cpu")
    for tensor in cache.tensors:
        tensor.fill_(float("nan"))
    return cache


def shuffled_blocks(num_blocks: int = 32, seed: int = 0) -> list[int]:
    return torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed)).tolist()


def random_tokens(spec: ModelSpec, num_tokens: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, spec.vocab_size, (num_tokens,), generator=generator)


@torch.inference_mode()
def assert_parity(decoder: Decoder, model: Any, token_ids: torch.Tensor, chunks: Sequence[int]) -> None:
    """Run token_ids [N] in steps of `chunks` rows and compare every row with a single pass of transformers.

    The output of every layer is compared as well. Raises AssertionError that names the first difference.
    """
    assert sum(chunks) == len(token_ids)
    expected = model(token_ids[None], output_hidden_states=True, use_cache=False)
    cache, blocks = poisoned_cache(decoder.spec), shuffled_blocks()
    aux_layers = range(decoder.spec.num_layers + 1)
    inner = inner_terms(decoder.spec)
    start = 0
    for num_rows in chunks:
        rows = slice(start, start + num_rows)
        batch = AttentionBatch([SequenceRows(blocks, start, num_rows)], cache)
        hidden, features = decoder.forward(token_ids[rows], batch, cache, aux_layers)
        # transformers' last hidden state is the one after the final norm, so the output of the last layer is
        # compared through the logits only.
        for aux_layer in aux_layers[:-1]:
            assert_near(
                features[aux_layer],
                expected.hidden_states[aux_layer][0, rows],
                inner=inner,
                depth=aux_layer + 1,
                name=f"layer {aux_layer}",
            )

        assert torch.equal(features[-1], hidden)
        logprobs = decoder.logits(hidden).log_softmax(-1)
        logprobs_expected = expected.logits[0, rows].log_softmax(-1)
        assert_near(logprobs, logprobs_expected, inner=inner, depth=len(aux_layers), name="log-probabilities")
        start += num_rows
