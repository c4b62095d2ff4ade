"""States of recurrent layers: divisions, rewinds and checkpoints do not change what follows."""

from __future__ import annotations

import math
import random

import pytest
import torch
from decoder_parity import inner_terms, load_decoder, poisoned_cache, random_tokens, shuffled_blocks
from hybrid_zoo import HYBRIDS, make_hybrid_model
from slow_cases import slow_after
from tolerances import assert_near

from drift_sdk.families import read_spec
from drift_sdk.models.attention import AttentionBatch, SequenceRows
from drift_sdk.models.decoder import Decoder
from drift_sdk.models.kv_cache import (
    Checkpoint,
    KVCache,
    LayerState,
    SequenceState,
    StateRows,
)
from drift_sdk.models.weights import tensor_shapes
from drift_sdk.spec.model import BORDER, checkpoint_bytes, slot_bytes

NUM_TOKENS = 5 * BORDER + 3


@pytest.fixture(scope="module", params=HYBRIDS)
def decoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder = tmp_path_factory.mktemp("hybrid")
    make_hybrid_model(request.param, 3, folder)
    return load_decoder(folder)


class Sequence:
    """A sequence that is computed in steps."""

    def __init__(
        self, decoder: Decoder, kv_cache: KVCache | None = None, checkpoint: Checkpoint | None = None
    ) -> None:
        self.decoder = decoder
        self.kv_cache = poisoned_cache(decoder.spec) if kv_cache is None else kv_cache
        self.state = SequenceState(decoder.spec, torch.float32, decoder.device, checkpoint)
        self.position = 0 if checkpoint is None else checkpoint.position

    @torch.inference_mode()
    def step(
        self, token_ids: torch.Tensor, *, is_final: bool = True, positions: tuple[int, ...] = ()
    ) -> tuple[torch.Tensor, dict[int, Checkpoint]]:
        """The logits after token_ids [N], and the checkpoints taken at `positions`."""
        num_rows = len(token_ids)
        rows = StateRows.of(self.state, self.position, num_rows, is_final=is_final, positions=positions)
        batch = AttentionBatch([SequenceRows(shuffled_blocks(), self.position, num_rows)], self.kv_cache)
        hidden, _ = self.decoder.forward(token_ids, batch, self.kv_cache, (), [rows])
        self.position += num_rows
        return self.decoder.logits(hidden), rows.checkpoints()


def whole_pass(decoder: Decoder, token_ids: torch.Tensor) -> torch.Tensor:
    return Sequence(decoder).step(token_ids)[0]


def assert_equal(decoder: Decoder, found: torch.Tensor, expected: torch.Tensor, name: str) -> None:
    """Equal but for the rounding of products of other shapes. A recurrent layer has five one after the other:
    projection, convolution, the state's values of keys, their system, and the output."""
    spec = decoder.spec
    depth = 1 + spec.num_layers + 4 * len(spec.recurrent_layers)
    assert_near(found, expected, inner=inner_terms(spec), depth=depth, name=name)


@pytest.mark.parametrize("size", slow_after(2, [7, 33, 1, 31, 32, 64]))
def test_chunks_of_any_size_give_equal_logits(decoder: Decoder, size: int) -> None:
    token_ids = random_tokens(decoder.spec, NUM_TOKENS)
    sequence = Sequence(decoder)
    found = torch.cat([sequence.step(chunk)[0] for chunk in token_ids.split(size)])
    assert_equal(decoder, found, whole_pass(decoder, token_ids), f"chunks of {size}")


@pytest.mark.parametrize("seed", slow_after(1, range(4)))
def test_rejected_rows_leave_no_trace(decoder: Decoder, seed: int) -> None:
    """Each step has a right token and drafts, of which the first few are right."""
    rng = random.Random(seed)
    token_ids = random_tokens(decoder.spec, NUM_TOKENS, seed)
    expected, sequence, num_rejected = whole_pass(decoder, token_ids), Sequence(decoder), 0
    while sequence.position < NUM_TOKENS:
        start = sequence.position
        num_drafts = min(rng.randrange(1, 8), NUM_TOKENS - start - 1)
        num_right = rng.randint(0, num_drafts)
        drafts = token_ids[start : start + num_drafts + 1].clone()
        drafts[num_right + 1 :] = (drafts[num_right + 1 :] + 1) % decoder.spec.vocab_size
        found, _ = sequence.step(drafts, is_final=False)
        sequence.position = start + num_right + 1
        num_rejected += num_drafts - num_right
        right = slice(start, sequence.position)
        assert_equal(decoder, found[: num_right + 1], expected[right], f"rows from {start} on")
    assert num_rejected > 30


def test_rows_that_were_kept_wrongly_are_found(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above is red if one rejected row stays in the state."""
    begin = LayerState.begin

    def begin_late(state: LayerState, position: int) -> None:
        begin(state, min(position + 1, state.position))
        state.border -= state.position - position  # one row too many, at the place of the right one

    monkeypatch.setattr(LayerState, "begin", begin_late)
    with pytest.raises(AssertionError):
        test_rejected_rows_leave_no_trace(decoder, 0)


@pytest.mark.parametrize("size", slow_after(2, [13, NUM_TOKENS, 1, 64]))
def test_sequences_go_on_from_checkpoints(decoder: Decoder, size: int) -> None:
    """Whatever the division of the prompt that took the checkpoint, and at every border."""
    token_ids = random_tokens(decoder.spec, NUM_TOKENS)
    expected, writer = whole_pass(decoder, token_ids), Sequence(decoder)
    taken: dict[int, Checkpoint] = {}
    for chunk in token_ids.split(size):
        start, end = writer.position, writer.position + len(chunk)
        borders = range(start // BORDER * BORDER + BORDER, end + 1, BORDER)
        taken |= writer.step(chunk, positions=tuple(borders))[1]
    assert [*taken] == list(range(BORDER, NUM_TOKENS + 1, BORDER))
    for position, checkpoint in taken.items():
        reader = Sequence(decoder, writer.kv_cache, checkpoint)
        found, _ = reader.step(token_ids[position:])
        assert_equal(decoder, found, expected[position:], f"from {position} on")


def test_checkpoint_of_another_border_is_found(decoder: Decoder) -> None:
    token_ids = random_tokens(decoder.spec, NUM_TOKENS)
    writer = Sequence(decoder)
    expected, taken = writer.step(token_ids, positions=(BORDER, 2 * BORDER))
    early = Checkpoint(2 * BORDER, taken[BORDER].layers)
    found, _ = Sequence(decoder, writer.kv_cache, early).step(token_ids[2 * BORDER :])
    with pytest.raises(AssertionError):
        assert_equal(decoder, found, expected[2 * BORDER :], "a state that is a border old")


def test_checkpoints_do_not_change_with_the_sequence(decoder: Decoder) -> None:
    token_ids = random_tokens(decoder.spec, NUM_TOKENS)
    sequence = Sequence(decoder)
    _, taken = sequence.step(token_ids[: 2 * BORDER], positions=(BORDER, 2 * BORDER))
    copies = {
        position: [(state.clone(), inputs.clone()) for state, inputs in checkpoint.layers]
        for position, checkpoint in taken.items()
    }
    sequence.step(token_ids[2 * BORDER :])
    for position, checkpoint in taken.items():
        for found, copy in zip(checkpoint.layers, copies[position], strict=True):
            assert all(map(torch.equal, found, copy))


def test_bytes_are_those_of_the_tensors(decoder: Decoder) -> None:
    sequence = Sequence(decoder)
    _, taken = sequence.step(random_tokens(decoder.spec, BORDER), positions=(BORDER,))
    tensors = [tensor for layer in taken[BORDER].layers for tensor in layer]
    assert checkpoint_bytes(decoder.spec, torch.float32) == sum(tensor.nbytes for tensor in tensors)
    # Two borders of rows: a step may cross a border that rejected rows must not.
    sequence = Sequence(decoder)
    sequence.step(random_tokens(decoder.spec, 2 * BORDER), is_final=False)
    layers = sequence.state.layers.values()
    held = [(layer.state, layer.keys, layer.updates, layer.decays, layer.inputs) for layer in layers]
    num_bytes = sum(tensor.nbytes for tensors in held for tensor in tensors)
    assert slot_bytes(decoder.spec, torch.float32) == num_bytes


def test_published_sizes() -> None:
    """Of Qwen3.5-27B, from the config as it is published."""
    rope = {
        "rope_type": "default",
        "rope_theta": 10_000_000,
        "partial_rotary_factor": 0.25,
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
    }
    text = {
        "model_type": "qwen3_5_text",
        "attention_bias": False,
        "attn_output_gate": True,
        "eos_token_id": 248_044,
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "hidden_size": 5120,
        "intermediate_size": 17_408,
        "layer_types": [*["linear_attention"] * 3, "full_attention"] * 16,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "linear_value_head_dim": 128,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262_144,
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "num_attention_heads": 24,
        "num_hidden_layers": 64,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6,
        "rope_parameters": rope,
        "tie_word_embeddings": False,
        "vocab_size": 248_320,
    }
    spec = read_spec(
        {
            "architectures": ["Qwen3_5ForConditionalGeneration"],
            "model_type": "qwen3_5",
            "image_token_id": 248_056,
            "text_config": text,
            "vision_config": {"depth": 27},
            "tie_word_embeddings": False,
        }
    )
    assert len(spec.recurrent_layers) == 48
    assert sum(map(math.prod, tensor_shapes(spec).values())) == 26_895_998_464
    inputs = 2 * 3 * (2 * 16 * 128 + 48 * 128)
    assert checkpoint_bytes(spec, torch.bfloat16) == 48 * (4 * 48 * 128 * 128 + inputs)
    assert spec.attention.rope is not None and spec.attention.rope.rotary_dim == 64
