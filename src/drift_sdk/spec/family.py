"""A family of models: how its files describe a decoder, and name its tensors.

A `GGUFArchitecture` has the Hugging Face names of the tensors of GGUF files, and how their values differ.
Names there are those that llama.cpp's converter writes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct, field

from drift_sdk.errors import ModelLoadError, short_repr
from drift_sdk.spec.model import ModelSpec, MtpNames
from drift_sdk.spec.settings import Settings

MODULES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER_MODULES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
EXPERT_MODULES = LAYER_MODULES | {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
SANDWICH_MODULES = LAYER_MODULES | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}

NEXTN_FIELDS = {
    "eh_proj": "joint",
    "enorm": "embedding_norm",
    "hnorm": "hidden_norm",
    "shared_head_norm": "final_norm",
    "embed_tokens": "embedding",
    "shared_head_head": "head",
}
"""Fields of MtpNames, by the names of a file's modules "nextn"."""
EXPERT_KEYS = ("expert_count", "expert_used_count", "expert_feed_forward_length")
"""Metadata of files with experts."""


class GGUFSettings(Struct, frozen=True, kw_only=True):
    """What a file says of its model.

    values:    the metadata of its architecture, by keys without the architecture.
    config:    the settings that a config.json would have, read alike for all architectures.
    rotary_dim: elements of a head that are rotated; an int unless the file is broken.
    place:     the file and the prefix of keys, for messages: "FILE: llama.".
    tensors:   names of the file's tensors.
    """

    values: Mapping[str, Any]
    config: Mapping[str, Any]
    rotary_dim: Any
    place: str
    tensors: Collection[str]

    @property
    def num_layers(self) -> Any:
        """Layers without those that predict several tokens, which files count as the last ones.
        ModelLoadError if all of them do."""
        found, num_predicting = self.config["num_hidden_layers"], self.values.get("nextn_predict_layers", 0)
        if not (isinstance(found, int) and isinstance(num_predicting, int)):
            return found

        if 0 < found <= num_predicting:
            raise ModelLoadError(
                f"{self.place}nextn_predict_layers={short_repr(num_predicting)}, expected less than "
                f"block_count={found}"
            )

        return found - num_predicting

    @property
    def partial_rope(self) -> dict[str, Any]:
        """The `rope_parameters` of heads that are rotated in part."""
        rope, head_dim = dict(self.config["rope_parameters"]), self.config["head_dim"]
        if not (isinstance(self.rotary_dim, int) and isinstance(head_dim, int) and head_dim):
            return rope

        # Half an element more, so that truncation cannot lose one.
        share = 1.0 if self.rotary_dim == head_dim else (self.rotary_dim + 0.5) / head_dim
        return rope | {"partial_rotary_factor": share}


class Tiles(Struct, frozen=True):
    """Runs of equally many rows or columns, in another order: run i * inner + j of a file is run
    j * outer + i of Hugging Face, with i below `outer` and j below `inner`."""

    outer: int
    inner: int


class GGUFChange(Struct, frozen=True, kw_only=True):
    """How a tensor of a file differs from Hugging Face's.

    rows:      the order of its rows from `first_row` on; None: it is the same.
    columns:   the order of its columns; None: it is the same.
    numbers:   Hugging Face's numbers, from the file's. None: they are equal.
    shape:     Hugging Face's shape, from the file's. None: they are equal.
    """

    rows: Tiles | None = None
    first_row: int = 0
    columns: Tiles | None = None
    numbers: Callable[[npt.NDArray[np.float32]], npt.NDArray[np.float32]] | None = None
    shape: Callable[[tuple[int, ...]], tuple[int, ...]] | None = None


class GGUFJoin(Struct, frozen=True, kw_only=True):
    """A matrix of a layer that files may have as several tensors.

    modules:   of these tensors, by their names in the file.
    shape:     of the matrix, from the shapes of the tensors; None: they do not fit together.
    numbers:   the matrix, from the tensors.
    """

    modules: tuple[str, ...]
    shape: Callable[[Sequence[tuple[int, ...]]], tuple[int, ...] | None]
    numbers: Callable[[Sequence[npt.NDArray[np.float32]]], npt.NDArray[np.float32]]


class GGUFArchitecture(Struct, frozen=True, kw_only=True):
    """An architecture of GGUF files.

    name:           `general.architecture` in their metadata.
    mark:           metadata of these files that others of the same name do not have; "": there are no others,
                    or they have a mark.
    layer_modules:  Hugging Face names of a layer's modules, by their names in the file; "{}" is an expert's
                    number.
    layer_tensors:  Hugging Face names of a layer's tensors that belong to no module, likewise. Their names in
                    the file may have no suffix, or the suffix "scale".
    mtp:            Hugging Face names of the layer that predicts one more token, by the number of the
                    decoder's layers, behind which files have it; None: it is not read.
    modules:        Hugging Face names of modules outside layers, likewise.
    is_permuted:    the rows of query and key projections are interleaved, see `GGUFFile.get`.
    is_partial:     a part of each head may be rotated.
    yarn:           settings of YaRN that files do not say; None: YaRN is not implemented.
    norm_offset:    what files add to the weights of norms.
    change:         other differences of a tensor, by its Hugging Face name and the settings; None: there are
                    none.
    joins:          matrices that files may have in parts, by the names that files without parts have for
                    their modules.
    keys:           metadata that changes the arithmetic and is read for this architecture.
    required:       metadata that files of this architecture have.
    settings:       settings of the architecture alone. Raises ModelLoadError naming the place.
    """

    name: str
    mark: str = ""
    layer_modules: Mapping[str, str] = field(default_factory=lambda: LAYER_MODULES)
    layer_tensors: Mapping[str, str] = {}
    mtp: Callable[[int], MtpNames] | None = None
    modules: Mapping[str, str] = field(default_factory=lambda: MODULES)
    is_permuted: bool = False
    is_partial: bool = False
    yarn: Mapping[str, Any] | None = None
    norm_offset: float = 0.0
    change: Callable[[str, Mapping[str, Any]], GGUFChange] | None = None
    joins: Mapping[str, GGUFJoin] = {}
    keys: tuple[str, ...] = ()
    required: tuple[str, ...] = ()
    settings: Callable[[GGUFSettings], dict[str, Any]] | None = None

    @property
    def has_expert_matrices(self) -> bool:
        """Whether models have a tensor for each matrix of an expert."""
        return any("{}" in name for name in self.layer_modules.values())

    def tensor_name(self, name: str, num_layers: int) -> str:
        """The Hugging Face name of a tensor; its name in the file if models have no such tensor.

        num_layers: of the decoder.
        """
        mtp = None if self.mtp is None else self.mtp(num_layers)
        if match := re.fullmatch(r"blk\.([0-9]+)\.nextn\.(\w+)\.weight", name):
            layer, module = match.groups()
            is_read = mtp is not None and int(layer) == num_layers and module in NEXTN_FIELDS
            return (getattr(mtp, NEXTN_FIELDS[module]) or name) if is_read else name

        if match := re.fullmatch(r"blk\.([0-9]+)\.(\w+)(?:\.([0-9]+))?(?:\.(weight|bias|scale))?", name):
            layer, module, expert, suffix = match.groups()
            prefix = f"model.layers.{layer}" if mtp is None or int(layer) != num_layers else mtp.layer
            own = self.layer_tensors.get(module if suffix is None else f"{module}.{suffix}")
            if own is not None and expert is None:
                return f"{prefix}.{own}"

            known = self.layer_modules.get(module)
            if known is None or suffix in (None, "scale") or (expert is None) == ("{}" in known):
                return name

            return f"{prefix}.{known.format(expert)}.{suffix}"

        module, _, suffix = name.rpartition(".")
        return f"{self.modules[module]}.{suffix}" if module in self.modules else name


class OriginalFiles(Struct, frozen=True, kw_only=True):
    """Files of a family that are not in the form of Hugging Face.

    marks:        settings that no config.json of Hugging Face has together.
    settings:     the settings of Hugging Face's config.json, from the file's settings.
    tensor_name:  Hugging Face's name of a tensor; its own name if the family has no such tensor.
    """

    marks: tuple[str, ...]
    settings: Callable[[Mapping[str, Any]], dict[str, Any]]
    tensor_name: Callable[[str], str]


class Family(Struct, frozen=True, kw_only=True):
    """A family of models.

    model_type:     as in a config.json.
    architectures:  values of `architectures` in a config.json. The first one is for models with a head;
                    whether a head is missing, files tell.
    spec:           the description of a model. Raises ModelLoadError naming a setting that is missing, out of
                    range or not implemented.
    defaults:       settings that files may lack, where transformers' defaults differ from those that
                    `spec` reads by itself.
    outer:          architectures of models of which a model of the family is the text part.
    gguf:           architectures of GGUF files.
    original:       other files; None: there are none.
    has_mxfp4:      files may have experts in MXFP4, and no quantised weights but these.
    """

    model_type: str
    architectures: tuple[str, ...]
    spec: Callable[[Settings], ModelSpec]
    defaults: Mapping[str, Any] = {}
    outer: tuple[str, ...] = ()
    gguf: tuple[GGUFArchitecture, ...] = ()
    original: OriginalFiles | None = None
    has_mxfp4: bool = False
