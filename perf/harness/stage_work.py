"""What each stage of a round must read and compute."""

from __future__ import annotations

import math

from msgspec import Struct

from drift_sdk.models.draft_weights import required_shapes, shareable_shapes
from perf.harness.shapes import DRAFT_FUSION, DRAFT_HEAD, Draft, Model

__all__ = ["Work", "stage_work"]

LOGIT_BYTES = 4


class Work(Struct, frozen=True):
    num_bytes: float = 0.0
    num_flops: float = 0.0

    def limit_s(self, bandwidth_tb_s: float, peak_tflop_s: float) -> float:
        """Reading or computing, whichever takes longer."""
        return max(self.num_bytes / bandwidth_tb_s, self.num_flops / peak_tflop_s) / 1e12


def stage_work(
    model: Model, draft: Draft | None, *, num_drafts: int, batch: int, mean_context: float, itemsize: int
) -> dict[str, Work]:
    """By stage, of a round of `batch` sequences with `num_drafts` tokens drafted for each; 0 without draft.

    Weights are read once for each pass, the KV of every sequence once for each layer, features once.
    """
    config, rows = model.config, batch * (num_drafts + 1)
    attention = 4 * config.num_layers * config.num_heads * config.head_dim * mean_context
    forward = Work(
        model.decode_bytes(batch, mean_context, itemsize),
        rows * (2 * model.num_read_parameters + attention),
    )
    work = {
        "verify" if num_drafts else "base_decode": forward,
        "accept": Work(LOGIT_BYTES * rows * config.vocab_size),
        "commit": Work(),
    }
    if draft is None:
        return work

    shapes = required_shapes(draft.config)
    fusion = math.prod(shapes.pop(DRAFT_FUSION, (0,)))
    mlp = sum(math.prod(shape) for name, shape in shapes.items() if ".mlp." in name)
    attending = sum(map(math.prod, shapes.values())) - mlp
    head = math.prod(shareable_shapes(draft.config)[DRAFT_HEAD])
    own = draft.config
    kv = batch * mean_context * 2 * own.num_layers * own.num_kv_heads * own.head_dim
    scores = 4 * own.num_layers * own.num_heads * own.head_dim * mean_context
    features = rows * len(own.aux_layers) * own.target_hidden_size
    num_passes = max(num_drafts - 1, 0)
    if num_drafts:
        work["draft_lm_head"] = Work(num_drafts * itemsize * head, num_drafts * batch * 2 * head)
        work["draft_attention"] = Work(
            num_passes * itemsize * (attending + kv), num_passes * batch * (2 * attending + scores)
        )
        work["draft_mlp"] = Work(num_passes * itemsize * mlp, num_passes * batch * 2 * mlp)
    work["draft_extend"] = Work(
        itemsize * (fusion + attending + mlp + kv + features),
        rows * (2 * (fusion + attending + mlp) + scores),
    )
    return work
