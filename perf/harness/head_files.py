"""The files of a draft head, checked without its target's weights."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import cast

import msgspec
import torch
from msgspec import Struct

from drift_sdk.errors import ModelLoadError
from drift_sdk.families import read_spec
from drift_sdk.loading.draft import DraftTensors, read_target_ids
from drift_sdk.loading.source import resolve
from drift_sdk.models.assistant import is_assistant
from drift_sdk.models.decoder import Decoder
from drift_sdk.models.dflash import DFlashConfig, load_dflash_weights, read_head_config
from drift_sdk.models.draft_head import is_whole_model, load_draft_weights
from drift_sdk.models.weights import DecoderWeights
from drift_sdk.spec.model import ModelSpec

__all__ = ["HeadFiles", "check_files"]


class HeadFiles(Struct, frozen=True, kw_only=True):
    """The files of a head that fits its target.

    sha256:      of the settings and all tensors, in the order of their names.
    num_bytes:   of the tensors.
    aux_layers:  layers of the target whose input the head reads.
    num_masks:   tokens that a DFlash head drafts at most; None: a head of another kind.
    """

    target: str
    draft: str
    sha256: str
    num_bytes: int
    num_layers: int
    aux_layers: tuple[int, ...]
    vocab_size: int
    draft_vocab_size: int
    num_masks: int | None = None


class StandIn(Struct, frozen=True):
    """A substitute for the target and its weights that loading a head reads, without values and memory."""

    final_norm: torch.Tensor
    embedding: torch.Tensor
    head: torch.Tensor

    @property
    def weights(self) -> StandIn:
        return self

    @property
    def dtype(self) -> torch.dtype:
        return self.final_norm.dtype

    @property
    def device(self) -> torch.device:
        return self.final_norm.device

    @classmethod
    def of(cls, spec: ModelSpec) -> StandIn:
        row = torch.zeros(spec.hidden_size, dtype=torch.bfloat16)
        table = row.expand(spec.vocab_size, -1)
        return cls(row, table, table)


def check_files(target: Path, draft: Path, convention: str | None = None) -> HeadFiles:
    """The files of a head, after a check of all shapes and values.

    Raises ModelLoadError naming file, tensor, found and expected shape, or a draft that is no head.
    """
    config = read_spec(resolve(target).config)
    source = resolve(draft, role="draft")
    settings = source.config
    for is_other, name in (
        (is_assistant(settings), "an assistant"),
        (is_whole_model(source), "a whole model"),
    ):
        if is_other:
            raise ModelLoadError(f"draft: {draft}: {name}: expected a draft head")

    head = read_head_config(settings, config, aux_layer_convention=convention)
    tensors, substitute = DraftTensors(draft), StandIn.of(config)
    target_ids = read_target_ids(tensors, config.vocab_size, head.draft_vocab_size)
    if isinstance(head, DFlashConfig):
        num_layers, num_masks = head.shape.num_layers, head.num_masks
        load_dflash_weights(head, tensors, target_ids, cast(Decoder, substitute))
    else:
        num_layers, num_masks = head.num_layers, None
        load_draft_weights(head, tensors, target_ids, cast(DecoderWeights, substitute))
    digest, num_bytes = hashlib.sha256(msgspec.json.encode(settings, order="sorted")), 0
    for name in sorted(tensors.names()):
        tensor = tensors.get(name).contiguous()
        num_bytes += tensor.nbytes
        digest.update(name.encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().tobytes())
    return HeadFiles(
        target=str(target),
        draft=str(draft),
        sha256=digest.hexdigest(),
        num_bytes=num_bytes,
        num_layers=num_layers,
        aux_layers=head.aux_layers,
        vocab_size=config.vocab_size,
        draft_vocab_size=head.draft_vocab_size,
        num_masks=num_masks,
    )
