"""The stages of a draft: those of the engine, of a float64 computation, and of other engines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from msgspec import Struct
from safetensors.torch import load_file, save_file

from drift_sdk.models.attention import AttentionBatch, SequenceRows
from drift_sdk.models.decoder import Decoder
from drift_sdk.models.draft_head import DRAFT_KV_OFFSET, DraftDecoder
from drift_sdk.models.mixers.attention import AttentionStep
from perf.harness.plain_draft import PlainDraft

__all__ = ["Reference", "StageDifference", "compare", "compare_reference", "own_reference"]

BLOCK_SIZE = 16
TOKENS, AUX_HIDDEN = "token_ids", "aux_hidden"


class StageDifference(Struct, frozen=True, kw_only=True):
    """Differences of a stage over all rows."""

    stage: str
    mean_difference: float
    max_difference: float
    min_cosine: float
    top_k_overlap: float


class Reference(Struct, frozen=True):
    """The stages of another engine.

    token_ids:   [N + 1] int64.
    stages:      by name, [N, width] each.
    aux_hidden:  the residual streams that it started from, [N, hidden] each; None if they are not known.
    """

    token_ids: torch.Tensor
    stages: dict[str, torch.Tensor]
    aux_hidden: list[torch.Tensor] | None = None

    @classmethod
    def read(cls, path: Path) -> Reference:
        """Read a safetensors file. Raises ValueError naming the tensor that is missing or misshapen."""
        try:
            tensors = load_file(path)
        except Exception as error:  # the reader raises errors of many types for a broken file
            raise ValueError(f"{path}: not a safetensors file: {error}") from error

        token_ids, aux = tensors.pop(TOKENS, None), tensors.pop(AUX_HIDDEN, None)
        if token_ids is None or token_ids.dim() != 1 or len(token_ids) < 2 or token_ids.is_floating_point():
            raise ValueError(f"{path}: tensor {TOKENS}: expected two or more integers in one dimension")

        num_rows = len(token_ids) - 1
        if not tensors:
            raise ValueError(f"{path}: holds no stage: expected fc, attention.0, mlp.0, pre_head or logits")
        if aux is not None and (aux.dim() != 3 or aux.shape[1] != num_rows):
            raise ValueError(
                f"{path}: tensor {AUX_HIDDEN} has shape {list(aux.shape)}, expected [*, {num_rows}, *]"
            )
        for name, tensor in tensors.items():
            if tensor.dim() != 2 or len(tensor) != num_rows:
                raise ValueError(
                    f"{path}: tensor {name} has shape {list(tensor.shape)}, expected [{num_rows}, *]"
                )

        return cls(token_ids.long(), tensors, None if aux is None else list(aux))

    def write(self, path: Path) -> None:
        assert self.aux_hidden is not None
        tensors = {TOKENS: self.token_ids, AUX_HIDDEN: torch.stack(self.aux_hidden)} | self.stages
        save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, path)


class RecordedDraft(DraftDecoder):
    """A draft that records the outputs of attention and mlp, and the input of the head."""

    stages: dict[str, torch.Tensor]

    def _attention(self, index: int, inputs: torch.Tensor, step: AttentionStep) -> torch.Tensor:
        added = super()._attention(index, inputs, step)
        self.stages[f"attention.{index}"] = added
        return added

    def _mlp(self, index: int, normed: torch.Tensor) -> torch.Tensor:
        added = super()._mlp(index, normed)
        self.stages[f"mlp.{index}"] = added
        return added

    def _head_input(self, hidden: torch.Tensor) -> torch.Tensor:
        self.stages["pre_head"] = super()._head_input(hidden)
        return self.stages["pre_head"]


def compare(
    target: Decoder, folder: Path, token_ids: Sequence[int], *, top_k: int = 10, **options: Any
) -> list[StageDifference]:
    """The differences of all stages from those of PlainDraft.

    folder:     of the draft.
    token_ids:  two or more. The target runs all but the last, the draft embeds all but the first.
    options:    as in DraftDecoder.load.
    """
    draft = RecordedDraft.load(folder, target, **options)
    own, final = own_stages(draft, target, torch.tensor(token_ids, dtype=torch.int64))
    assert own.aux_hidden is not None
    tokens = own.token_ids[1:].to(target.device)
    expected = PlainDraft(folder, target).stages(own.aux_hidden, final, tokens, draft.target_ids)
    return differences(own.stages, expected, top_k)


def own_reference(target: Decoder, folder: Path, token_ids: Sequence[int], **options: Any) -> Reference:
    """The stages of this engine, as a reference for others; arguments as of `compare`."""
    draft = RecordedDraft.load(folder, target, **options)
    return own_stages(draft, target, torch.tensor(token_ids, dtype=torch.int64))[0]


def compare_reference(
    target: Decoder, folder: Path, reference: Reference, *, top_k: int = 10, **options: Any
) -> list[StageDifference]:
    """The differences of the stages that a reference has; `options` as in DraftDecoder.load.

    Raises ValueError naming a stage or streams that the draft does not have, or has in another shape.
    """
    draft = RecordedDraft.load(folder, target, **options)
    own, _ = own_stages(draft, target, reference.token_ids, reference.aux_hidden)
    for name, tensor in reference.stages.items():
        if name not in own.stages:
            raise ValueError(f"tensor {name}: expected a stage of the draft: {', '.join(own.stages)}")
        if tensor.shape != own.stages[name].shape:
            found, expected = list(tensor.shape), list(own.stages[name].shape)
            raise ValueError(f"tensor {name} has shape {found}, expected {expected}")

    # In the order of computation, in which the first difference counts.
    expected_stages = {
        name: reference.stages[name].to(target.device).double()
        for name in own.stages
        if name in reference.stages
    }
    return differences(own.stages, expected_stages, top_k)


@torch.inference_mode()
def own_stages(
    draft: RecordedDraft,
    target: Decoder,
    token_ids: torch.Tensor,
    aux_hidden: Sequence[torch.Tensor] | None = None,
) -> tuple[Reference, torch.Tensor]:
    """The stages of the engine's draft, and the target's last hidden state.

    aux_hidden: the residual streams to start from; those of the target if None. Raises ValueError for streams
    of other shapes than the target's.
    """
    vocab_size = target.spec.vocab_size
    if not 0 <= int(token_ids.min()) <= int(token_ids.max()) < vocab_size:
        raise ValueError(
            f"token ids from {token_ids.min()} to {token_ids.max()}: expected 0 to {vocab_size - 1}"
        )

    tokens = token_ids.to(target.device)
    own_aux, final = _target_states(target, tokens[:-1], draft.aux_layers)
    if aux_hidden is not None:
        found = [list(stream.shape) for stream in aux_hidden]
        if found != [list(stream.shape) for stream in own_aux]:
            raise ValueError(f"{AUX_HIDDEN} of shapes {found}: expected {[list(s.shape) for s in own_aux]}")
        own_aux = [stream.to(target.device, target.dtype) for stream in aux_hidden]

    num_rows, num_blocks = len(token_ids) - 1, -(-len(token_ids) // BLOCK_SIZE)
    cache = draft.empty_kv_cache(num_blocks, BLOCK_SIZE)
    rows = SequenceRows(range(num_blocks), 0, num_rows)
    batch = AttentionBatch([rows], cache, slot_offset=DRAFT_KV_OFFSET)
    features = draft.fuse(own_aux, final)
    draft.stages = {"fc": features}
    draft.stages["logits"] = draft.logits(draft.forward(features, tokens[1:], batch, cache))
    return Reference(token_ids, draft.stages, own_aux), final


@torch.inference_mode()
def _target_states(
    target: Decoder, tokens: torch.Tensor, aux_layers: Sequence[int]
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The target's residual streams at `aux_layers`, and its last hidden state."""
    num_blocks = -(-len(tokens) // BLOCK_SIZE)
    cache = target.empty_kv_cache(num_blocks, BLOCK_SIZE)
    batch = AttentionBatch([SequenceRows(range(num_blocks), 0, len(tokens))], cache)
    final, aux_hidden = target.forward(tokens, batch, cache, aux_layers)
    return aux_hidden, final


def differences(
    found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], top_k: int
) -> list[StageDifference]:
    """The differences of the expected stages, in their order."""
    return [_difference(stage, found[stage], expected[stage], top_k) for stage in expected]


def _difference(stage: str, found: torch.Tensor, expected: torch.Tensor, top_k: int) -> StageDifference:
    difference = (found.double() - expected).abs()
    top_k = min(top_k, expected.shape[-1])
    mine, theirs = (x.topk(top_k, -1).indices for x in (found.double(), expected))
    is_common = (mine[:, :, None] == theirs[:, None]).any(1)
    return StageDifference(
        stage=stage,
        mean_difference=difference.mean().item(),
        max_difference=difference.max().item(),
        min_cosine=F.cosine_similarity(found.double(), expected, dim=-1).min().item(),
        top_k_overlap=is_common.double().mean().item(),
    )
