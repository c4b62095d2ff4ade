"""Compares decoders with recurrent layers with transformers, and with each other."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from decoder_parity import inner_terms, poisoned_cache, shuffled_blocks
from hybrid_zoo import VOCAB_SIZE
from tolerances import tie_gap

from drift_sdk.families import read_spec
from drift_sdk.loading.source import resolve
from drift_sdk.models.allocation import WeightForm
from drift_sdk.models.attention import AttentionBatch, SequenceRows
from drift_sdk.models.decoder import Decoder
from drift_sdk.models.kv_cache import SequenceState, StateRows
from drift_sdk.spec.model import BORDER

__all__ = ["MIN_DISTINCT", "answer", "length_of", "load", "logits_of", "num_wrong", "stacked_and_each"]

NUM_TOKENS = 64
LENGTHS = (1, 2, 31, 32, 33, 63, 64, 65, 100, 5 * BORDER + 3)
MIN_DISTINCT = 8
"""Least number of different tokens in an answer: answers that repeat few tokens compare little."""


def load(path: Path, form: WeightForm = "expanded") -> Decoder:
    """The decoder of a folder or file, in float32."""
    source = resolve(path)
    spec, tensors = read_spec(source.config), source.tensors()
    return Decoder.load(spec, tensors, device="cpu", dtype=torch.float32, form=form)


@torch.inference_mode()
def logits_of(decoder: Decoder, token_ids: torch.Tensor, chunks: list[int]) -> torch.Tensor:
    """The logits after all of token_ids [N], computed in chunks."""
    kv_cache, blocks, found, start = poisoned_cache(decoder.spec), shuffled_blocks(), [], 0
    state = SequenceState(decoder.spec, torch.float32, decoder.device)
    for length in chunks:
        batch = AttentionBatch([SequenceRows(blocks, start, length)], kv_cache)
        rows = [StateRows.of(state, start, length, is_final=True)]
        hidden, _ = decoder.forward(token_ids[start : start + length], batch, kv_cache, (), rows)
        found.append(decoder.logits(hidden))
        start += length
    return torch.cat(found)


def length_of(seed: int) -> int:
    return LENGTHS[seed % len(LENGTHS)]


@torch.inference_mode()
def answer(model: Any, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A prompt with transformers' greedy answer, and the logits after each token."""
    generator = torch.Generator().manual_seed(1_000 + seed)
    prompt = torch.randint(3, VOCAB_SIZE, (1, length_of(seed)), generator=generator)
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 2}
    token_ids = model.generate(prompt, max_new_tokens=NUM_TOKENS, **options)
    return token_ids[0], model(token_ids).logits[0]


def random_cuts(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    cuts = sorted({rng.randrange(1, length) for _ in range(3)}) if length > 1 else []
    return [end - start for start, end in zip([0, *cuts], [*cuts, length], strict=True)]


def num_wrong(decoder: Decoder, token_ids: torch.Tensor, expected: torch.Tensor, seed: int) -> int:
    """Number of tokens of an answer that the decoder would not have chosen, but for ties."""
    length = length_of(seed)
    chunks = [*random_cuts(length, seed), *[1] * (NUM_TOKENS - 1)]
    found = logits_of(decoder, token_ids[:-1], chunks)[length - 1 :]
    chosen = expected[length - 1 : -1].gather(1, found.argmax(-1, keepdim=True))[:, 0]
    best = expected[length - 1 : -1].amax(-1)
    gap = tie_gap(expected, inner=inner_terms(decoder.spec), depth=decoder.spec.num_layers + 1)
    return int((best - chosen > gap).sum())


def stacked_and_each(given: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """The tensors of a model with the experts of a layer in one tensor, and with a tensor for each matrix."""
    stacked, each, matrices = dict(given), dict(given), dict[tuple[str, str], dict[int, torch.Tensor]]()
    for name in [name for name in given if ".experts." in name]:
        prefix, rest = name.split(".experts.")
        del stacked[name], each[name]
        if rest == "gate_up_proj":
            gate, up = given[name].chunk(2, 1)
            matrices[prefix, "gate"], matrices[prefix, "up"] = dict(enumerate(gate)), dict(enumerate(up))
        elif rest == "down_proj":
            matrices[prefix, "down"] = dict(enumerate(given[name]))
        else:
            index, part = int(rest.split(".")[0]), rest.split(".")[1].removesuffix("_proj")
            matrices.setdefault((prefix, part), {})[index] = given[name]
    assert matrices
    for (prefix, part), by_index in matrices.items():
        found = [by_index[index] for index in range(len(by_index))]
        for index, matrix in enumerate(found):
            each[f"{prefix}.experts.{index}.{part}_proj.weight"] = matrix.clone()
        if part == "gate":
            ups = matrices[prefix, "up"]
            both = [torch.cat((gate, ups[index])) for index, gate in enumerate(found)]
            stacked[f"{prefix}.experts.gate_up_proj"] = torch.stack(both)
        elif part == "down":
            stacked[f"{prefix}.experts.down_proj"] = torch.stack(found)
    return [stacked, each]
