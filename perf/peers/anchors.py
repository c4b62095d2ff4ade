"""Anchors: speeds that peers reached on a GPU, in bfloat16, MXFP4 or FP8, with their best settings.

Measured with vLLM 0.26 and torch 2.11, on an H200 on 2026-11-21 and on an H100 on 2026-11-26. A peer's run
more than 3% below its anchor is void. gpt-oss-120b has anchors of one row alone: rows of the runs with
several had the same experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

__all__ = ["ANCHORS", "Anchor", "anchor_of", "is_void", "num_gpus_of"]

TOLERANCE = 0.03


class Anchor(Struct, frozen=True):
    """The speed of a peer in a scenario, on so many GPUs. dtype: the form of the weights, unless it is the
    model's own."""

    engine: str
    model: str
    scenario: str
    tokens_per_s: float
    num_draft_tokens: int = 0
    acceptance_length: float | None = None
    num_gpus: int = 1
    dtype: str = ""


OWN_DTYPES = ("bfloat16", "mxfp4")
LLAMA, GPT_OSS, QWEN_EXPERTS = "llama-3.1-8b", "gpt-oss-120b", "qwen3-30b-a3b"
ANCHORS = {
    "NVIDIA H200": (
        Anchor("vllm", LLAMA, "single-512", 205.0),
        Anchor("vllm", LLAMA, "single-32k", 169.0),
        Anchor("vllm", LLAMA, "batch4-16k", 586.0),
        Anchor("vllm", LLAMA, "batch8-512", 1579.0),
        Anchor("vllm", LLAMA, "batch64-512", 9552.0),
        Anchor("vllm", LLAMA, "single-512", 498.0, 3, 3.2),
        Anchor("vllm", LLAMA, "single-32k", 433.0, 3, 3.2),
        Anchor("vllm", LLAMA, "batch4-16k", 1503.0, 3, 3.2),
        Anchor("vllm", LLAMA, "batch8-512", 3756.0, 3, 3.2),
        Anchor("vllm", LLAMA, "batch64-512", 18_406.0, 3, 3.2),
        Anchor("vllm", LLAMA, "single-512", 288.0, num_gpus=2),
        Anchor("vllm", LLAMA, "batch32-512", 7764.0, num_gpus=2),
        Anchor("vllm", LLAMA, "single-512", 288.0, dtype="fp8"),
        Anchor("vllm", LLAMA, "batch64-512", 12_222.0, dtype="fp8"),
        Anchor("vllm", QWEN_EXPERTS, "single-512", 242.0),
        Anchor("vllm", QWEN_EXPERTS, "batch32-512", 2010.0),
        Anchor("vllm", GPT_OSS, "single-512", 231.0),
        Anchor("vllm", GPT_OSS, "single-32k", 215.0),
        Anchor("transformers", LLAMA, "single-512", 203.0),
    ),
    "NVIDIA H100 80GB HBM3": (
        Anchor("vllm", LLAMA, "single-512", 150.6),
        Anchor("vllm", LLAMA, "single-32k", 123.3),
        Anchor("vllm", LLAMA, "batch4-16k", 419.3),
        Anchor("vllm", LLAMA, "batch8-512", 1173.0),
        Anchor("vllm", LLAMA, "batch64-512", 7256.0),
        Anchor("vllm", LLAMA, "single-512", 368.4, 3, 3.2),
        Anchor("vllm", LLAMA, "single-32k", 308.7, 3, 3.2),
        Anchor("vllm", LLAMA, "batch4-16k", 1066.0, 3, 3.2),
        Anchor("vllm", LLAMA, "batch8-512", 2774.0, 3, 3.2),
        Anchor("vllm", LLAMA, "batch64-512", 15_480.0, 3, 3.2),
    ),
}
"""By GPU."""


def anchor_of(run: Mapping[str, Any], gpu: str) -> Anchor | None:
    """The anchor for a run on a GPU; None if there is none."""
    dtype = "" if run["dtype"] in OWN_DTYPES else run["dtype"]
    same = ("engine", "model", "scenario", "num_draft_tokens", "acceptance_length")
    for anchor in ANCHORS.get(gpu, ()):
        is_same = all(getattr(anchor, name) == run[name] for name in same)
        if is_same and (anchor.num_gpus, anchor.dtype) == (num_gpus_of(run), dtype):
            return anchor

    return None


def num_gpus_of(run: Mapping[str, Any]) -> int:
    """The number of GPUs of a run; 1 of runs that do not say it."""
    return int(run.get("num_gpus", 1))


def is_void(run: Mapping[str, Any], gpu: str) -> bool:
    """True if a peer's run is so far below its anchor that no conclusions may be drawn from it."""
    anchor = anchor_of(run, gpu)
    return anchor is not None and run["tokens_per_s"] < (1 - TOLERANCE) * anchor.tokens_per_s
