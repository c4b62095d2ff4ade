"""Models and drafts to measure: published shapes, random weights, and the bytes and operations of a step."""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal

import torch
from msgspec import Struct

from drift_sdk import NGram
from drift_sdk.families import read_spec
from drift_sdk.loading.source import resolve
from drift_sdk.models.allocation import QUANTISERS, WeightForm, quantised_bytes
from drift_sdk.models.decoder import random_tensors
from drift_sdk.models.dflash import DFlashConfig, dflash_shapes, is_dflash
from drift_sdk.models.draft_config import DraftConfig
from drift_sdk.models.draft_head import EMBEDDING, required_shapes, shareable_shapes
from drift_sdk.models.kv_cache import KVForm, bytes_of_head
from drift_sdk.models.weights import tensor_shapes, weight_bytes
from drift_sdk.spec.model import AnyAttention, KVShape, ModelSpec, experts_of
from perf.harness.byte_tokenizer import write_tokenizer
from perf.harness.processes import ROOT
from perf.harness.published import DRAFTS, PUBLISHED, in_fp8_blocks

__all__ = [
    "FP8_BLOCKS",
    "MODELS",
    "Draft",
    "MaskDraft",
    "Model",
    "attention_flops",
    "dflash_settings",
    "draft_settings",
    "model_name",
    "prepare",
    "prepare_draft",
    "prepare_drafts",
]

SMOLLM2 = "smollm2-135m"
MODELS = (*PUBLISHED, SMOLLM2)
EXPERTS = ".experts."
FP8_BLOCKS: Final = "fp8-blocks"
"""The form of weights that files have in blocks of FP8."""
MXFP4_BYTES = 0.5 + 1 / 32
"""Bytes of a number: 4 bits, and a byte for every 32."""
DTYPES = {2: torch.bfloat16, 4: torch.float32}
"""A type by the bytes of a number."""
DRAFT_VOCAB_SIZE = 32_000  # as published for targets of this size
DRAFT_SETTINGS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
    "head_dim", "max_position_embeddings", "rope_theta", "hidden_act", "rms_norm_eps", "tie_word_embeddings",
    "torch_dtype", "bos_token_id", "eos_token_id",
)  # fmt: skip
"""Fields that a draft shares with its target, unless DRAFTS says otherwise."""
DRAFT_HEAD, DRAFT_FUSION = "lm_head.weight", "fc.weight"
PEAGLE, DFLASH = "peagle", re.compile("dflash-([0-9]+)")
"""Names of heads that draft in one pass."""


class Model(Struct, frozen=True, kw_only=True):
    """A model on disk. `load`, `weights` and `kv_dtype` are the values of fields of `EngineConfig` for it.

    Random weights that are "stored" are in blocks of FP8.
    """

    name: str
    path: Path
    load: Literal["auto", "random"]
    spec: ModelSpec
    weights: WeightForm | None = None
    kv_dtype: KVForm | None = None

    @property
    def dtype_name(self) -> str | None:
        """The names of the types of weights and KV cache, where they are not that of the computation."""
        weights = FP8_BLOCKS if self.weights == "stored" else self.weights
        form = "mxfp4" if self.has_mxfp4_experts else weights
        names = [name for name in (form, self.kv_dtype and f"{self.kv_dtype} KV") if name]
        return ", ".join(names) or None

    @property
    def num_read_parameters(self) -> int:
        """Number of parameters that a decode step of one sequence reads.

        All are read except the embedding table, of which only a few rows are, and the experts that are not
        active. If the table is also the head, it is read as a whole.
        """
        experts = self.spec.experts
        num_active = 0 if experts is None else experts.num_active * self.num_expert_layers
        return self._num_shared_parameters + num_active * self._num_expert_parameters

    @property
    def num_expert_layers(self) -> int:
        """Number of layers that have experts."""
        return sum(experts_of(layer.channel) is not None for layer in self.spec.layers)

    @property
    def has_mxfp4_experts(self) -> bool:
        """Whether files have the experts' projections in MXFP4."""
        return self.spec.experts is not None and self.spec.names.experts.layout == "mxfp4"

    @property
    def _num_shared_parameters(self) -> int:
        """Number of parameters that every step reads: all but the embedding table and the experts."""
        shapes = tensor_shapes(self.spec)
        skipped = 0 if self.spec.is_head_tied else math.prod(shapes[self.spec.names.embedding])
        return sum(math.prod(shape) for name, shape in shapes.items() if EXPERTS not in name) - skipped

    @property
    def _num_expert_parameters(self) -> int:
        """Number of parameters of one expert of a layer: three matrices and their biases."""
        experts, hidden = self.spec.experts, self.spec.hidden_size
        if experts is None:
            return 0

        biases = 2 * experts.intermediate_size + hidden if experts.has_bias else 0
        return 3 * experts.intermediate_size * hidden + biases

    def expert_bytes(self, itemsize: int) -> float:
        """Bytes of one expert of a layer. itemsize: bytes of a number that is not quantised."""
        experts, hidden = self.spec.experts, self.spec.hidden_size
        if experts is not None and not self.has_mxfp4_experts and self.weights is not None:
            size = experts.intermediate_size
            shapes = (size, hidden), (size, hidden), (hidden, size)
            return float(sum(self.matrix_bytes(*shape, itemsize) for shape in shapes))

        if experts is None or not self.has_mxfp4_experts:
            return float(itemsize * self._num_expert_parameters)

        weights = 3 * experts.intermediate_size * hidden
        return MXFP4_BYTES * weights + itemsize * (self._num_expert_parameters - weights)

    def matrix_bytes(self, rows: int, columns: int, itemsize: int) -> int:
        """Bytes of a projection of a layer in the form of the weights."""
        if self.weights in QUANTISERS:
            return quantised_bytes(rows, columns, self.weights)

        blocks = () if self.spec.quantisation is None else self.spec.quantisation.blocks
        if self.weights != "stored" or not blocks or rows < blocks[0][0] or columns < blocks[0][1]:
            return itemsize * rows * columns

        return rows * columns + 4 * math.ceil(rows / blocks[0][0]) * math.ceil(columns / blocks[0][1])

    def spread_experts(self, num_rows: int) -> float:
        """Mean number of experts of a layer that `num_rows` rows have together, if all are equally likely; 0
        for a model without experts."""
        experts = self.spec.experts
        if experts is None:
            return 0.0

        return experts.num_experts * (1 - (1 - experts.num_active / experts.num_experts) ** num_rows)

    @property
    def num_cached_per_token(self) -> int:
        """Numbers that a token adds to the KV cache."""
        return sum(layer.kv.size for layer in self.spec.layers if layer.kv is not None)

    def kv_bytes(self, mean_context: float, itemsize: int) -> float:
        """Bytes of keys and values that a row sees, in layers with a window those in the window, and of the
        states of recurrent layers."""
        return sum(
            min(mean_context, mixer.window or mean_context) * self._token_bytes(mixer.kv, itemsize)
            if isinstance(mixer, AnyAttention)
            else 4 * mixer.state_size
            for mixer in (layer.mixer for layer in self.spec.layers)
        )

    def _token_bytes(self, kv: KVShape, itemsize: int) -> int:
        """Bytes of the keys and values of a token in a layer."""
        dims, dtype = kv.stored_dims, DTYPES[itemsize]
        return kv.num_kv_heads * sum(bytes_of_head(dim, dtype, self.kv_dtype) for dim in dims)

    def decode_bytes(
        self, batch: int, mean_context: float, itemsize: int, num_experts: float | None = None
    ) -> float:
        """Bytes that a decode step must read: the weights once, and the KV of every sequence.

        num_experts: experts of a layer that its rows have; None: `spread_experts` of a row for each sequence.
        """
        if num_experts is None:
            num_experts = self.spread_experts(batch)
        active = num_experts * self.num_expert_layers * self.expert_bytes(itemsize)
        shared = itemsize * self._num_shared_parameters - self._saved_bytes(itemsize)
        return shared + active + batch * self.kv_bytes(mean_context, itemsize)

    def _saved_bytes(self, itemsize: int) -> float:
        """Bytes that all weights but those of experts take less than in numbers of `itemsize` bytes."""
        dtype = DTYPES[itemsize]
        if self.weights is None:
            return 0.0

        experts, stored = self.spec.experts, None
        if self.weights == "stored":
            stored = random_tensors(self.spec, device=torch.device("cpu"), dtype=dtype, form="stored")
        saved = weight_bytes(self.spec, dtype) - weight_bytes(self.spec, dtype, self.weights, stored)
        if experts is None or self.has_mxfp4_experts:
            return saved

        of_expert = itemsize * self._num_expert_parameters - self.expert_bytes(itemsize)
        return saved - experts.num_experts * self.num_expert_layers * of_expert

    def round_bytes(self, num_drafts: float, batch: int, mean_context: float, itemsize: int) -> float:
        """Bytes that a round must read for the drafts of this model in addition to the target's: for each
        drafted token those of a step."""
        return num_drafts * self.decode_bytes(batch, mean_context, itemsize)

    def prefill_flops(self, num_tokens: int) -> float:
        """Operations of a prompt.

        They are 2 per weight and token, the head for the last token only, and causal attention, in which a
        token attends to half of the others on average.
        """
        spec = self.spec
        head = spec.vocab_size * spec.hidden_size
        weights = 2 * (self.num_read_parameters - head) * num_tokens + 2 * head
        attention = attention_flops(spec) * num_tokens**2 / 2
        return weights + attention


class Draft(Struct, frozen=True, kw_only=True):
    """An EAGLE-3 head: a folder or hub id, and its shapes.

    weights: `Speculation.draft_weights` for it; aux_layer_convention: as in Speculation.
    """

    path: Path | str
    config: DraftConfig
    weights: Literal["fp8", "int4"] | None = None
    aux_layer_convention: Literal["output", "boundary"] | None = None

    def round_bytes(self, num_drafts: float, batch: int, mean_context: float, itemsize: int) -> float:
        """Bytes that a round must read in addition to the target's.

        Layers, head and KV are read for each drafted token, or once by a head that drafts in one pass; the
        weights that fuse the target's features once.
        """
        config = self.config
        if config.mask_token_id is not None:
            num_drafts = min(num_drafts, 1.0)
        shapes = required_shapes(config)
        shapes.pop(EMBEDDING, None)  # of which a few rows are read
        fusion = matrix_bytes(shapes.pop(DRAFT_FUSION, (0,)), self.weights, itemsize)
        shapes[DRAFT_HEAD] = shareable_shapes(config)[DRAFT_HEAD]
        step = sum(matrix_bytes(shape, self.weights, itemsize) for shape in shapes.values())
        step_kv = batch * mean_context * config.num_layers * config.attention.kv.size
        return num_drafts * (step + itemsize * step_kv) + fusion


class MaskDraft(Struct, frozen=True, kw_only=True):
    """A DFlash head: a folder or hub id, and its shapes; the rest as of `Draft`."""

    path: Path | str
    config: DFlashConfig
    weights: Literal["fp8", "int4"] | None = None
    aux_layer_convention: Literal["output", "boundary"] | None = None

    def round_bytes(self, num_drafts: float, batch: int, mean_context: float, itemsize: int) -> float:
        """Bytes that a round must read in addition to the target's, if it has drafts: all weights once, and
        those that make keys and values of features once more; the KV of every sequence."""
        config, shapes = self.config, dflash_shapes(self.config)
        del shapes[EMBEDDING]
        names = [name for name in shapes if name.endswith((".k_proj.weight", ".v_proj.weight"))]
        read = [*shapes.values(), *(shapes[name] for name in names)]
        kv = sum(layer.kv.size for layer in config.shape.layers if layer.kv is not None)
        weights = sum(matrix_bytes(shape, self.weights, itemsize) for shape in read)
        return min(num_drafts, 1.0) * (weights + itemsize * batch * mean_context * kv)


def matrix_bytes(shape: tuple[int, ...], form: Literal["fp8", "int4"] | None, itemsize: int) -> int:
    """Bytes of a tensor of a head, of which matrices are quantised if `form` says so."""
    if form is None or len(shape) != 2:
        return itemsize * math.prod(shape)

    return quantised_bytes(shape[0], shape[1], form)


def attention_flops(spec: ModelSpec) -> int:
    """Operations of the attention of all layers for a row and a key that it sees."""
    mixers = [layer.mixer for layer in spec.layers if isinstance(layer.mixer, AnyAttention)]
    return sum(2 * mixer.num_heads * (mixer.head_dim + mixer.value_dim) for mixer in mixers)


def model_name(text: str) -> str:
    """A name of MODELS or a path, of an argument."""
    if text not in MODELS and not Path(text).exists():
        names = ", ".join(MODELS)
        raise argparse.ArgumentTypeError(f"{text}: expected a path that exists, or one of {names}")

    return text


def prepare(
    name: str,
    folder: Path,
    weights: WeightForm | Literal["fp8-blocks"] | None = None,
    kv_dtype: KVForm | None = None,
) -> Model:
    """Write a model with published shapes into `folder`, or locate the real model of that name or path.

    weights, kv_dtype: as in EngineConfig; FP8_BLOCKS: of a model with published shapes, as its files would
    have them. Raises ValueError for a name that is neither in MODELS nor an existing path, and for a model
    that cannot have these weights.
    """
    if name == SMOLLM2 or (name not in PUBLISHED and Path(name).exists()):
        path = _smollm2_file() if name == SMOLLM2 else Path(name)
        name = path.resolve().name if name != SMOLLM2 else name
        if weights == FP8_BLOCKS:
            raise ValueError(f"model={name!r}: expected one with random weights for {FP8_BLOCKS}")

        spec = read_spec(resolve(path).config)
        return Model(name=name, path=path, load="auto", spec=spec, weights=weights, kv_dtype=kv_dtype)

    if name not in PUBLISHED:
        raise ValueError(f"model={name!r}: expected a path that exists, or one of {', '.join(MODELS)}")

    published, form = PUBLISHED[name], "stored" if weights == FP8_BLOCKS else weights
    if weights == FP8_BLOCKS:
        published = in_fp8_blocks(published)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(published, indent=1))
    write_tokenizer(folder, published["vocab_size"])
    spec = read_spec(published)
    return Model(name=name, path=folder, load="random", spec=spec, weights=form, kv_dtype=kv_dtype)


def prepare_draft(
    model: Model,
    path: Path | str | None = None,
    weights: Literal["fp8", "int4"] | None = None,
    aux_layer_convention: Literal["output", "boundary"] | None = None,
) -> Draft:
    """The draft head at `path`, or a new one with random weights in a folder beside the model's.

    weights: `Speculation.draft_weights`; aux_layer_convention: as in Speculation. Raises ValueError for a
    model with real weights and no `path`, ModelLoadError if the draft does not fit.
    """
    if path is None:
        if model.load != "random":
            raise ValueError(f"model={model.name!r}: expected one with random weights, or a draft for it")

        target = json.loads((model.path / "config.json").read_text())
        path = model.path.with_name(f"{model.path.name}-eagle3")
        path.mkdir(exist_ok=True)
        (path / "config.json").write_text(json.dumps(draft_settings(target), indent=1))

    found = resolve(path).config
    config = DraftConfig.from_hf(found, model.spec, aux_layer_convention=aux_layer_convention)
    return Draft(path=path, config=config, weights=weights, aux_layer_convention=aux_layer_convention)


def draft_settings(target: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of an EAGLE-3 draft for a target, given the target's."""
    settings = {name: target[name] for name in DRAFT_SETTINGS if name in target} | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "draft_vocab_size": min(DRAFT_VOCAB_SIZE, target["vocab_size"]),
    }
    return settings | DRAFTS.get(target["model_type"], {})


def dflash_settings(target: Mapping[str, Any], block_size: int) -> dict[str, Any]:
    """The config.json of a DFlash head for a target, given the target's: of five layers with the shapes of
    its own, as published for Qwen3; of a model whose channels are all experts, with MLPs of three times its
    width."""
    num_layers = target["num_hidden_layers"]
    taps = [round(1 + number * (num_layers - 4) / 4) for number in range(5)] if num_layers > 8 else [0]
    return {name: target[name] for name in DRAFT_SETTINGS if name in target} | {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "intermediate_size": target.get("intermediate_size") or 3 * target["hidden_size"],
        "num_hidden_layers": min(5, num_layers),
        "num_target_layers": num_layers,
        "block_size": block_size,
        "dflash_config": {"mask_token_id": target["vocab_size"] - 1, "target_layer_ids": taps},
    }


def prepare_masks(
    model: Model, name: str, weights: Literal["fp8", "int4"] | None = None
) -> Draft | MaskDraft:
    """A head with random weights that drafts in one pass, in a folder beside the model's: "peagle", or
    "dflash-N" for a DFlash head with an anchor and N - 1 masks. Errors as of `prepare_draft`."""
    if model.load != "random":
        raise ValueError(f"model={model.name!r}: expected one with random weights")

    target, path = json.loads((model.path / "config.json").read_text()), model.path.with_name(name)
    path.mkdir(exist_ok=True)
    size = DFLASH.fullmatch(name)
    if size is None:
        settings = draft_settings(target) | {"mask_token_id": target["vocab_size"] - 1}
        (path / "config.json").write_text(json.dumps(settings, indent=1))
        return prepare_draft(model, path, weights)

    settings = dflash_settings(target, int(size[1]))
    (path / "config.json").write_text(json.dumps(settings, indent=1))
    return MaskDraft(path=path, config=DFlashConfig.from_hf(settings, model.spec), weights=weights)


def prepare_drafts(
    model: Model,
    name: str | None,
    weights: Literal["fp8", "int4"] | None = None,
    aux_layer_convention: Literal["output", "boundary"] | None = None,
) -> Draft | MaskDraft | Model | NGram:
    """The drafts that `name` stands for: "ngram", a model of MODELS with random weights, a name of
    `prepare_masks`, or a head as `prepare_draft` takes it."""
    if name == "ngram":
        return NGram()

    if name in PUBLISHED:
        return prepare(name, model.path.with_name(name), weights)

    if name is not None and (name == PEAGLE or DFLASH.fullmatch(name)):
        return prepare_masks(model, name, weights)

    if name is not None and is_dflash(found := resolve(name).config):
        config = DFlashConfig.from_hf(found, model.spec, aux_layer_convention=aux_layer_convention)
        return MaskDraft(path=name, config=config, weights=weights, aux_layer_convention=aux_layer_convention)

    return prepare_draft(model, name, weights, aux_layer_convention)


def _smollm2_file() -> Path:
    """The model's file, downloaded if necessary by examples/smollm2.py (the examples are not a package)."""
    file = ROOT / "examples" / "smollm2.py"
    spec = importlib.util.spec_from_file_location("smollm2", file)
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    path: Path = example.path()
    return path
