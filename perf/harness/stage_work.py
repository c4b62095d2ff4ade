"""The bytes that each stage of a round must read, and the operations that it must compute."""

from __future__ import annotations

import math

from msgspec import Struct

from drift_sdk.models.draft_head import required_shapes, shareable_shapes
from perf.harness.shapes import DRAFT_FUSION, DRAFT_HEAD, Draft, Model, attention_flops

__all__ = ["Work", "stage_work"]

LOGIT_BYTES = 4


class Work(Struct, frozen=True):
    """Bytes to read and floating-point operations to compute."""

    num_bytes: float = 0.0
    num_flops: float = 0.0

    def limit_s(self, bandwidth_tb_s: float, peak_tflop_s: float) -> float:
        """Seconds that the work takes at least: the longer of reading and computing."""
        return max(self.num_bytes / bandwidth_tb_s, self.num_flops / peak_tflop_s) / 1e12


def stage_work(
    model: Model, draft: Draft | None, *, num_drafts: int, batch: int, mean_context: float, itemsize: int
) -> dict[str, Work]:
    """The work of each stage of a round of `batch` sequences.

    num_drafts: tokens drafted for each sequence; 0 without a draft. mean_context: tokens of a sequence.
    itemsize: bytes of a weight. Weights are counted once for each pass, KV of every sequence once for each
    layer, and features once.
    """
    rows = batch * (num_drafts + 1)
    forward = Work(
        model.decode_bytes(batch, mean_context, itemsize, model.spread_experts(rows)),
        rows * (2 * model.num_read_parameters + attention_flops(model.spec) * mean_context),
    )
    work = {
        "verify" if num_drafts else "base_decode": forward,
        "accept": Work(LOGIT_BYTES * rows * model.spec.vocab_size),
        "commit": Work(),
    }
    if draft is None:
        return work

    shapes = required_shapes(draft.config)
    fusion = math.prod(shapes.pop(DRAFT_FUSION, (0,)))
    mlp = sum(math.prod(shape) for name, shape in shapes.items() if ".mlp." in name)
    attending = sum(map(math.prod, shapes.values())) - mlp
    head = math.prod(shareable_shapes(draft.config)[DRAFT_HEAD])
    shape, spec = draft.config, draft.config.attention
    kv = batch * mean_context * shape.num_layers * spec.kv.size
    scores = 4 * shape.num_layers * spec.output_size * mean_context
    features = rows * len(shape.aux_layers) * shape.target_hidden_size
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
