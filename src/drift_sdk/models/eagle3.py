"""Draft heads: one or a few layers that predict the target's next feature.

In EAGLE-3 ("Scaling up Inference Acceleration of Large Language Models via Training-Time Test", arXiv
2503.01840) a feature is made of the target's residual stream at a few layers, and layers are Llama's. In MTP
it is the target's output, and the layer is one like the target's, from the target's files: see mtp.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import torch

from drift_sdk.errors import ModelLoadError
from drift_sdk.loading.draft import DraftTensors, read_target_ids
from drift_sdk.loading.random import RandomTensors
from drift_sdk.loading.source import Source, name_role, resolve
from drift_sdk.models.decoder import Decoder, apply_channel
from drift_sdk.models.draft_config import DraftConfig, is_model_config
from drift_sdk.models.draft_weights import (
    DraftForm,
    DraftWeights,
    load_draft_weights,
    required_shapes,
    shareable_shapes,
)
from drift_sdk.models.kv_cache import KVCache
from drift_sdk.models.linear import embed, linear
from drift_sdk.models.mixers.attention import AttentionStep, AttentionWeights, attend
from drift_sdk.models.norms import normalise
from drift_sdk.models.rope import rotary_tables
from drift_sdk.models.tree_attention import StepRows
from drift_sdk.progress import Report

__all__ = ["DRAFT_KV_OFFSET", "DraftDecoder", "is_whole_model"]

DRAFT_KV_OFFSET = 1
"""Draft row i combines the feature of position i with token i + 1. Its keys and values lie at KV slot i + 1,
so that the draft's KV in a block depends only on the tokens of that block and of those before it."""


class DraftDecoder:
    """A draft head of one target.

    Draft row i takes the feature of position i and token i + 1, and returns the next feature, from which
    `logits` predicts token i + 2.

    It owns weights only, in the dtype and on the device of its target; some are shared with the target. What
    rows see comes in an AttentionBatch made with `slot_offset=DRAFT_KV_OFFSET`; keys and values are kept in a
    KVCache of `num_layers` layers.
    """

    def __init__(self, config: DraftConfig, weights: DraftWeights, target: Decoder) -> None:
        self.config = config
        self.weights = weights
        self._target = target
        rope = config.attention.rope
        assert rope is not None
        self._rope, self._frequencies = rope, rope.frequencies().to(self.device)

    @classmethod
    @torch.inference_mode()
    def load(
        cls,
        name: str | Path,
        target: Decoder,
        *,
        form: DraftForm = "expanded",
        aux_layer_convention: str | None = None,
        cache_dir: str | Path | None = None,
        local_files_only: bool = False,
        report: Report | None = None,
    ) -> Self:
        """A draft from a folder or, for a str alone, a hub id.

        `form` as in `load_draft_weights`, `aux_layer_convention` as in DraftConfig.from_hf. `report` is
        called with (stage, fraction) while files are downloaded.

        Raises ModelLoadError that says it is about the draft and names the file: for a file that is missing
        or broken, for a setting that is not implemented, for a draft that does not fit the target, and for a
        whole model in place of a draft head.
        """
        source = resolve(
            name, role="draft", cache_dir=cache_dir, local_files_only=local_files_only, report=report
        )
        with _explain_errors(source):
            config = _read_config(source, target, aux_layer_convention)
            tensors = DraftTensors(source.path)
            ids = read_target_ids(tensors, config.vocab_size, config.draft_vocab_size)
            return cls(config, load_draft_weights(config, tensors, ids, target.weights, form), target)

    @classmethod
    @torch.inference_mode()
    def random(
        cls, config: DraftConfig, target: Decoder, seed: int = 0, *, form: DraftForm = "expanded"
    ) -> Self:
        """A draft with random weights, the same for the same seed, with an embedding and a head that are not
        shared with the target. A reduced vocabulary is spread evenly over the target's."""
        shapes = required_shapes(config) | shareable_shapes(config)
        tensors = RandomTensors(shapes, device=target.device, dtype=target.dtype, seed=seed)
        ids = (
            torch.arange(config.draft_vocab_size, device="cpu") * config.vocab_size // config.draft_vocab_size
        )
        return cls(config, load_draft_weights(config, tensors, ids, target.weights, form), target)

    @classmethod
    def load_random(
        cls,
        name: str | Path,
        target: Decoder,
        *,
        form: DraftForm = "expanded",
        aux_layer_convention: str | None = None,
        cache_dir: str | Path | None = None,
        local_files_only: bool = False,
        report: Report | None = None,
    ) -> Self:
        """A draft with random weights and the config of a folder or hub id; arguments and errors as in
        `load`.

        The folder needs no weights.
        """
        source = resolve(
            name, role="draft", cache_dir=cache_dir, local_files_only=local_files_only, report=report
        )
        with _explain_errors(source):
            config = _read_config(source, target, aux_layer_convention)
        return cls.random(config, target, form=form)

    @property
    def device(self) -> torch.device:
        return self.weights.final_norm.device

    @property
    def dtype(self) -> torch.dtype:
        return self.weights.final_norm.dtype

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """The target's layers whose input `fuse` takes, low to high; see DraftConfig."""
        return self.config.aux_layers

    @property
    def num_layers(self) -> int:
        return self.config.num_layers

    @property
    def target_ids(self) -> torch.Tensor:
        """The target's token id for each of the draft's, [draft_vocab] int64."""
        return self.weights.target_ids

    def empty_kv_cache(self, num_blocks: int, block_size: int) -> KVCache:
        """A KV cache for this draft, not initialised."""
        shapes = [self.config.attention.kv] * self.config.num_layers
        return KVCache(shapes, num_blocks, block_size, self.dtype, self.device)

    @torch.inference_mode()
    def fuse(self, aux_hidden: Sequence[torch.Tensor], final_hidden: torch.Tensor) -> torch.Tensor:
        """Features [N, hidden] from what the target's `forward` returns.

        aux_hidden:    the residual stream at `aux_layers`, [N, target_hidden] each.
        final_hidden:  the residual stream after the last layer, [N, target_hidden].

        Neither is normalised yet. A row that the draft returns for its own next input is a feature already
        and is not passed to this function. Raises ValueError for a wrong number of tensors in `aux_hidden`.
        """
        if len(aux_hidden) != len(self.aux_layers):
            raise ValueError(f"aux_hidden: {len(aux_hidden)} tensors: expected {len(self.aux_layers)}")

        weights, norm = self.weights, self.config.norm
        if weights.fc is None:
            return self._target.final_normed(final_hidden)

        if weights.feature_norms:
            pairs = zip(aux_hidden, weights.feature_norms, strict=True)
            aux_hidden = [normalise(feature, weight, norm) for feature, weight in pairs]

        features = torch.cat(tuple(aux_hidden), dim=-1)
        if weights.input_norm is not None:
            features = normalise(features, weights.input_norm, norm)

        return linear(features, weights.fc)

    @torch.inference_mode()
    def forward(
        self, features: torch.Tensor, token_ids: torch.Tensor, batch: StepRows, cache: KVCache
    ) -> torch.Tensor:
        """The next features [N, hidden]: input of `logits`, and of the next call together with the tokens
        chosen from those logits.

        features:   [N, hidden], of positions i.
        token_ids:  [N] int64 in the target's vocabulary, of positions i + 1.
        batch:      has the positions i. The rows' keys and values are written to the cache.

        Raises ValueError for other shapes.
        """
        expected = (batch.num_rows, self.config.hidden_size)
        if features.shape != expected or token_ids.shape != expected[:1]:
            raise ValueError(
                f"features of shape {list(features.shape)} and token_ids of {list(token_ids.shape)}: "
                f"expected {list(expected)} and [{expected[0]}]"
            )

        weights, norm = self.weights, self.config.norm
        rope = self._rope
        tables = rotary_tables(batch.positions, self._frequencies, self.dtype, rope.magnitude)
        step = AttentionStep(batch, cache, {rope: tables})
        embedded = embed(token_ids, weights.embedding, self.dtype)
        normed = normalise(features, weights.hidden_norm, norm)
        inputs = torch.cat((normalise(embedded, weights.embedding_norm, norm), normed), dim=-1)
        hidden = normed if self.config.is_residual_normed else features
        if weights.joint is not None:
            hidden = linear(inputs, weights.joint)
        for index, layer in enumerate(weights.layers):
            if index > 0 or weights.joint is not None:
                inputs = normalise(hidden, layer.mixer_norm, norm)
            hidden = hidden + self._attention(index, inputs, step)
            hidden = hidden + self._mlp(index, normalise(hidden, layer.channel_norm, norm))

        return normalise(hidden, weights.final_norm, norm) if self.config.is_output_normed else hidden

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Float32 logits [M, draft_vocab] of rows [M, hidden] that `forward` returned."""
        return linear(self._head_input(hidden), self.weights.head).to(torch.float32)

    def _attention(self, index: int, inputs: torch.Tensor, step: AttentionStep) -> torch.Tensor:
        """The output [N, hidden] of the attention of layer `index`, for its normalised input."""
        weights = self.weights.layers[index].mixer
        assert isinstance(weights, AttentionWeights)
        return attend(inputs, weights, self.config.attention, step, index)

    def _mlp(self, index: int, normed: torch.Tensor) -> torch.Tensor:
        """The output [N, hidden] of the MLP or the experts of layer `index`, for its normalised input."""
        return apply_channel(normed, self.weights.layers[index].channel, self.config.layer.channel)

    def _head_input(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.config.is_output_normed:
            return hidden

        return normalise(hidden, self.weights.final_norm, self.config.norm)


def _read_config(source: Source, target: Decoder, aux_layer_convention: str | None) -> DraftConfig:
    """The draft's config; ModelLoadError naming the folder or its config.json."""
    settings = source.config  # its errors name the file
    try:
        return DraftConfig.from_hf(settings, target.spec, aux_layer_convention=aux_layer_convention)
    except ModelLoadError as error:
        raise ModelLoadError(f"{source.path}: {error}") from error


@contextmanager
def _explain_errors(source: Source) -> Iterator[None]:
    """Make a ModelLoadError say that it is about the draft, and whether the source is a whole model."""
    with name_role("draft"):
        try:
            yield
        except ModelLoadError as error:
            if not is_whole_model(source):
                raise

            raise ModelLoadError(f"{source.path}: holds a whole model, expected a draft head") from error


def is_whole_model(source: Source) -> bool:
    """Return True if a source is a language model: a .gguf file is one, a folder by the names of its tensors,
    or by its config if it has none."""
    if source.path.is_file():
        return True

    try:
        return any(name.startswith("model.") for name in DraftTensors(source.path).names())
    except ModelLoadError:
        pass

    try:
        return is_model_config(source.config)
    except ModelLoadError:
        return False
