"""Models and drafts to measure: published shapes, random weights, and the bytes and operations of a step."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct

from drift_sdk.loading.source import resolve
from drift_sdk.models.decoder_config import DecoderConfig
from drift_sdk.models.draft_config import DraftConfig
from drift_sdk.models.draft_weights import required_shapes, shareable_shapes
from drift_sdk.models.weights import tensor_shapes
from perf.harness.byte_tokenizer import write_tokenizer
from perf.harness.processes import ROOT

__all__ = ["MODELS", "Draft", "Model", "prepare", "prepare_draft"]

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
}
PUBLISHED: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131_072,
        "rope_theta": 500_000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
    "smollm2-shapes": {  # six of SmolLM2-135M's thirty layers
        "vocab_size": 49_152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 6,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "max_position_embeddings": 8192,
        "rope_theta": 100_000.0,
    },
    "tiny": {
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 1024,
        "rope_theta": 10_000.0,
    },
}
SMOLLM2 = "smollm2-135m"
MODELS = (*PUBLISHED, SMOLLM2)
EMBEDDING = "model.embed_tokens.weight"
DRAFT_VOCAB_SIZE = 32_000  # as published for targets of this size
DRAFT_HEAD, DRAFT_FUSION = "lm_head.weight", "fc.weight"


class Model(Struct, frozen=True, kw_only=True):
    """A model on disk. `load` is the value of `EngineConfig.load` for it."""

    name: str
    path: Path
    load: Literal["auto", "random"]
    config: DecoderConfig

    @property
    def num_read_parameters(self) -> int:
        """Number of parameters that a decode step reads.

        All are read except the embedding table, of which only a few rows are. If the table is also the head,
        it is read as a whole.
        """
        shapes = tensor_shapes(self.config)
        skipped = 0 if self.config.is_head_tied else math.prod(shapes[EMBEDDING])
        return sum(map(math.prod, shapes.values())) - skipped

    @property
    def num_cached_per_token(self) -> int:
        """Numbers that a token adds to the KV cache."""
        return 2 * self.config.num_layers * self.config.num_kv_heads * self.config.head_dim

    def decode_bytes(self, batch: int, mean_context: float, itemsize: int) -> float:
        """Bytes that a decode step must read: the weights once, and the KV of every sequence."""
        return itemsize * (self.num_read_parameters + batch * mean_context * self.num_cached_per_token)

    def prefill_flops(self, num_tokens: int) -> float:
        """Operations of a prompt.

        They are 2 per weight and token, the head for the last token only, and causal attention, in which a
        token attends to half of the others on average.
        """
        config = self.config
        head = config.vocab_size * config.hidden_size
        weights = 2 * (self.num_read_parameters - head) * num_tokens + 2 * head
        attention = 4 * config.num_layers * config.num_heads * config.head_dim * num_tokens**2 / 2
        return weights + attention


class Draft(Struct, frozen=True, kw_only=True):
    """An EAGLE-3 head: a folder or hub id, and its shapes."""

    path: Path | str
    config: DraftConfig

    def round_bytes(self, num_drafts: float, batch: int, mean_context: float, itemsize: int) -> float:
        """Bytes that a round must read in addition to the target's.

        Layers, head and KV are read for each drafted token, the weights that fuse the target's features once.
        """
        config = self.config
        shapes = required_shapes(config)
        fusion = math.prod(shapes.pop(DRAFT_FUSION, (0,)))
        step = sum(map(math.prod, shapes.values())) + math.prod(shareable_shapes(config)[DRAFT_HEAD])
        step_kv = batch * mean_context * 2 * config.num_layers * config.num_kv_heads * config.head_dim
        return itemsize * (num_drafts * (step + step_kv) + fusion)


def prepare(name: str, folder: Path) -> Model:
    """Write a model with published shapes into `folder`, or locate the real model.

    Raises ValueError for a name that is not in MODELS.
    """
    if name == SMOLLM2:
        path = _smollm2_file()
        return Model(name=name, path=path, load="auto", config=DecoderConfig.from_hf(resolve(path).config))

    if name not in PUBLISHED:
        raise ValueError(f"model={name!r}: expected one of {', '.join(MODELS)}")

    config = LLAMA | PUBLISHED[name]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    write_tokenizer(folder, config["vocab_size"])
    return Model(name=name, path=folder, load="random", config=DecoderConfig.from_hf(config))


def prepare_draft(model: Model, path: Path | str | None = None) -> Draft:
    """The draft at `path`, or a new one with random weights in a folder beside the model's.

    Raises ValueError for a model with real weights and no `path`, ModelLoadError if the draft does not fit.
    """
    if path is None:
        if model.load != "random":
            raise ValueError(f"model={model.name!r}: expected one with random weights, or a draft for it")

        target = json.loads((model.path / "config.json").read_text())
        path = model.path.with_name(f"{model.path.name}-eagle3")
        path.mkdir(exist_ok=True)
        config = target | {
            "architectures": ["LlamaForCausalLMEagle3"],
            "num_hidden_layers": 1,
            "draft_vocab_size": min(DRAFT_VOCAB_SIZE, target["vocab_size"]),
        }
        (path / "config.json").write_text(json.dumps(config, indent=1))

    return Draft(path=path, config=DraftConfig.from_hf(resolve(path).config, model.config))


def _smollm2_file() -> Path:
    """The model's file, downloaded if necessary by examples/smollm2.py (the examples are not a package)."""
    file = ROOT / "examples" / "smollm2.py"
    spec = importlib.util.spec_from_file_location("smollm2", file)
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    path: Path = example.path()
    return path
