"""Configuration of a draft head: of an EAGLE-3 draft, from its config.json and its target's configuration,
or of the layer that the target has for it (MTP).

Three formats are read: flat files as SafeAILab's EAGLE repository publishes them, flat files with a table
`eagle_config` (SpecForge, NVIDIA), and files of the speculators library, with a table
`transformer_layer_config`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from drift_sdk.errors import ModelLoadError, short_repr
from drift_sdk.families import families, read_spec
from drift_sdk.spec.model import AnyAttention, LayerSpec, Mlp, ModelSpec, Norm

ARCHITECTURES = (
    "LlamaForCausalLM",
    "LlamaForCausalLMEagle3",
    "Eagle3LlamaForCausalLM",
    "Eagle3DraftModel",
    "Eagle3Speculator",
    "PEagleDraftModel",
    "PEagleSpeculator",
)
AUX_IDS = "eagle_aux_hidden_state_layer_ids"
MASK_TOKENS = ("mask_token_id", "pard_token", "ptd_token_id")
"""Names of the token that stands for those not drafted yet. Only parallel heads (P-EAGLE) have one."""
PARALLEL = "peagle"
OPTIONS = (
    *MASK_TOKENS,
    "draft_vocab_size",
    "truncated_vocab_size",
    "target_hidden_size",
    "num_aux_hidden_states",
    AUX_IDS,
    "use_aux_hidden_state",
    "norm_before_fc",
    "norm_before_residual",
    "fc_norm",
    "norm_output",
    "return_hidden_post_norm",
)
# Options of which one value is implemented. Some formats mean the projection of the features by `bias`,
# others the attention.
FIXED_OPTIONS: dict[str, bool | float | str] = {
    "bias": False,
    "eh_proj_before_attn": False,
    "is_causal": True,
    "logit_scale": 1.0,
    "next_layer_regular": True,
    "parallel_draft_step": 1,
    "qkv_bias": False,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
}
# Concerns parallel drafting alone, which the only accepted value of `parallel_draft_step` rules out.
UNUSED_OPTIONS = ("parallel_draft_heads_num_layers",)
LAYERS = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
}
"""What layers are like, by model_type. Qwen3's have norms of queries and keys."""
NUM_DEFAULT_FEATURES = 3


class DraftConfig(Struct, frozen=True, kw_only=True):
    """Shapes and options of a draft of one target. Names in brackets are those of an EAGLE-3 draft's
    config.json.

    A row takes the embedding of a token and the feature of the position before, both normalised and joined.
    In EAGLE-3 they are the input of the first layer's attention; in MTP they are projected, and begin the
    residual stream.

    vocab_size:          the target's number of tokens; so many can be input.
    draft_vocab_size:    number of tokens the draft can propose.
    target_hidden_size:  width of the target's residual stream.
    aux_layers:          layers of the target whose input (the residual stream) the feature is made of, low to
                         high; the target's number of layers stands for the output of the last one. Empty if
                         the feature is the target's final hidden state after its norm, not projected.
    layer:               of each of its layers. The norm is that of feature, embedding and output too.
    has_joint:           embedding and feature are projected (MTP).
    has_input_norm:      the concatenated hidden states are normalised (`norm_before_fc`).
    has_feature_norms:   each hidden state is normalised by itself (`fc_norm`).
    is_residual_normed:  the draft's residual stream starts from the normalised feature, else from the feature
                         itself (`norm_before_residual`).
    is_output_normed:    the output that becomes the next input has passed the final norm (`norm_output`).
    mask_token_id:       the token in the place of those not drafted yet, in a head that drafts all tokens in
                         one pass (P-EAGLE); None: it drafts one after the other.
    """

    vocab_size: int
    draft_vocab_size: int
    hidden_size: int
    target_hidden_size: int
    num_layers: int
    layer: LayerSpec
    is_head_tied: bool
    aux_layers: tuple[int, ...]
    has_input_norm: bool
    has_feature_norms: bool
    is_residual_normed: bool
    is_output_normed: bool
    has_joint: bool = False
    mask_token_id: int | None = None

    @property
    def attention(self) -> AnyAttention:
        assert isinstance(self.layer.mixer, AnyAttention)
        return self.layer.mixer

    @property
    def norm(self) -> Norm:
        return self.layer.norm

    @classmethod
    def from_hf(
        cls, config: Mapping[str, Any], target: ModelSpec, *, aux_layer_convention: str | None = None
    ) -> DraftConfig:
        """From the contents of a draft's config.json.

        aux_layer_convention: the meaning of `eagle_aux_hidden_state_layer_ids`. "output": id j is the output
        of layer j, which is the input of layer j + 1; "boundary": id j is the input of layer j; None:
        "boundary" in the speculators library's format, and if an id is the target's number of layers, else
        "output".

        Raises ModelLoadError naming the setting that is not implemented, or both values where the draft does
        not fit its target.
        """
        settings = draft_settings(config)
        _check_options(config, settings)
        convention = aux_layer_convention or ("boundary" if _is_nested(config) else None)
        # The rotation is computed from positions, so the draft's own context is no limit.
        layers = {"max_position_embeddings": target.max_position_embeddings} | settings
        shape = read_spec(layers | LAYERS[_model_type(config)])
        mask = _mask_token_id(config, settings, shape.vocab_size)
        draft = cls(
            vocab_size=shape.vocab_size,
            draft_vocab_size=read_draft_vocab_size(settings, shape.vocab_size),
            hidden_size=shape.hidden_size,
            target_hidden_size=settings.get("target_hidden_size", shape.hidden_size),
            num_layers=shape.num_layers,
            layer=_read_layer(shape),
            is_head_tied=shape.is_head_tied,
            aux_layers=_aux_layers(settings, target.num_layers, convention),
            has_input_norm=read_flag(settings, "norm_before_fc"),
            has_feature_norms=read_flag(settings, "fc_norm"),
            is_residual_normed=read_flag(
                settings, "norm_before_residual", default=_is_nested(config) and mask is None
            ),
            is_output_normed=read_flag(settings, "norm_output")
            or read_flag(settings, "return_hidden_post_norm"),
            mask_token_id=mask,
        )
        _check_fit(draft, target)
        return draft

    @classmethod
    def of_mtp(cls, target: ModelSpec) -> DraftConfig:
        """Of the layer that a target has for it, as `ModelSpec.mtp` describes it."""
        assert target.mtp is not None
        return cls(
            vocab_size=target.vocab_size,
            draft_vocab_size=target.vocab_size,
            hidden_size=target.hidden_size,
            target_hidden_size=target.hidden_size,
            num_layers=1,
            layer=target.mtp,
            is_head_tied=False,
            aux_layers=(),
            has_input_norm=False,
            has_feature_norms=False,
            is_residual_normed=False,
            is_output_normed=True,
            has_joint=True,
        )


def draft_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a draft's config.json in one flat dict, from all tables of its format, without nulls.

    Raises ModelLoadError for a setting that has two different values.
    """
    settings = {name: value for name, value in config.items() if value is not None}
    for table in ("eagle_config", "dflash_config"):
        for name, value in read_table(config, table).items():
            if settings.setdefault(name, value) != value:
                found = f"{name}={short_repr(settings[name])}, but {short_repr(value)} in {table}"
                raise ModelLoadError(f"config: {found}: expected the same")

    # In the speculators format, the top level describes the draft and the layer's table one Llama layer.
    layer = read_table(config, "transformer_layer_config")
    return settings | layer | {"architectures": config.get("architectures")}


def algorithm(config: Mapping[str, Any]) -> object:
    """The algorithm that a config.json of the speculators library names; None if it names none.

    Raises ModelLoadError if it names two.
    """
    found = read_table(config, "speculators_config").get("algorithm")
    kind = config.get("speculators_model_type")
    if found is not None and kind is not None and found != kind:
        raise ModelLoadError(
            f"config: speculators_config has algorithm={short_repr(found)}, "
            f"but speculators_model_type={short_repr(kind)}: expected the same"
        )

    return kind if found is None else found


def is_head_config(config: Mapping[str, Any]) -> bool:
    """Whether a config.json describes a draft head by a name or a table that no model's has."""
    tables = ("eagle_config", "speculators_config", "transformer_layer_config")
    architectures = config.get("architectures")
    names = architectures if isinstance(architectures, list) else []
    return any(name in config for name in tables) or any(name in ARCHITECTURES[1:] for name in names)


def is_model_config(config: Mapping[str, Any]) -> bool:
    """Whether a config.json describes a language model rather than a draft head of one."""
    is_draft = any(name in config for name in (*OPTIONS, "eagle_config", "transformer_layer_config"))
    architectures = config.get("architectures")
    is_known = any(architectures == [family.architectures[0]] for family in families())
    return is_known and not is_draft


def read_table(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A table of the config without its nulls; empty if there is none."""
    table = config.get(name) or {}
    if not isinstance(table, Mapping):
        raise ModelLoadError(f"config: {name}={short_repr(table)}: expected a table of settings")

    return {key: value for key, value in table.items() if value is not None}


def _is_nested(config: Mapping[str, Any]) -> bool:
    """Whether the file has the speculators library's format."""
    return bool(config.get("transformer_layer_config"))


def _check_options(config: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    architectures = settings["architectures"]
    if not (
        isinstance(architectures, list) and len(architectures) == 1 and architectures[0] in ARCHITECTURES
    ):
        raise ModelLoadError(
            f"config: architectures={short_repr(architectures)}: expected one of {', '.join(ARCHITECTURES)}"
        )

    known = tuple(LAYERS) if _is_nested(config) else ("llama",)
    if (model_type := _model_type(config)) not in known:
        expected = " or ".join(map(repr, known))
        raise ModelLoadError(f"config: model_type={short_repr(model_type)}: expected {expected}")

    if (name := algorithm(config)) not in (None, "eagle3", PARALLEL):
        raise ModelLoadError(
            f"config: algorithm={short_repr(name)} of the speculators library: "
            f"expected 'eagle3', {PARALLEL!r} or 'dflash'"
        )

    for name, implemented in FIXED_OPTIONS.items():
        value = settings.get(name, implemented)
        if value != implemented or isinstance(value, bool) != isinstance(implemented, bool):
            raise ModelLoadError(
                f"config: {name}={short_repr(value)}: only {short_repr(implemented)} is implemented"
            )

    for name, value in read_table(config, "eagle_config").items():
        if name not in OPTIONS and name not in FIXED_OPTIONS and name not in UNUSED_OPTIONS:
            raise ModelLoadError(f"config: eagle_config has {name}={short_repr(value)}, which is not known")


def _model_type(config: Mapping[str, Any]) -> Any:
    """What the layers are like. In the speculators format, the top level's model_type does not say it."""
    return (config.get("transformer_layer_config") or config).get("model_type") or "llama"


def _read_layer(shape: ModelSpec) -> LayerSpec:
    """The draft's layers. ModelLoadError for options that these do not implement."""
    check_layers(shape)
    if any(layer != shape.layers[0] for layer in shape.layers):
        found = ", ".join("none" if window is None else str(window) for window in shape.windows)
        raise ModelLoadError(f"config: layers with windows of {found}: expected all layers alike in a draft")

    return shape.layers[0]


def check_layers(shape: ModelSpec) -> None:
    """Raise ModelLoadError for options of layers that no draft implements."""
    if shape.quantisation is not None:
        found = f"quantization_config ({shape.quantisation.name})"
        raise ModelLoadError(f"config: {found} is not implemented in drafts")

    mlp = shape.layers[0].channel
    assert isinstance(mlp, Mlp)
    if mlp.activation != "silu":
        raise ModelLoadError(f"config: hidden_act={mlp.activation!r}: only 'silu' is implemented in drafts")


def read_draft_vocab_size(settings: Mapping[str, Any], vocab_size: int) -> int:
    names = [name for name in ("draft_vocab_size", "truncated_vocab_size") if name in settings]
    sizes = [settings[name] for name in names]
    for name, size in zip(names, sizes, strict=True):
        if not is_int(size) or not 1 <= size <= vocab_size or size != sizes[0]:
            expected = f"one size from 1 to vocab_size={vocab_size}"
            raise ModelLoadError(f"config: {name}={short_repr(size)}: expected {expected}")

    return sizes[0] if sizes else vocab_size


def _mask_token_id(config: Mapping[str, Any], settings: Mapping[str, Any], vocab_size: int) -> int | None:
    """The token id of a parallel head; None for a head that drafts one token after the other."""
    names = [name for name in MASK_TOKENS if name in settings]
    is_parallel = algorithm(config) == PARALLEL or settings["architectures"] == ["PEagleDraftModel"]
    if is_parallel and not names:
        raise ModelLoadError(f"config: {MASK_TOKENS[0]} is missing: expected the token that masks stand for")

    return read_mask_token(settings, names, vocab_size) if names and algorithm(config) != "eagle3" else None


def read_mask_token(settings: Mapping[str, Any], names: Sequence[str], vocab_size: int) -> int:
    """The token id that all of these settings have; ModelLoadError for others than one of the vocabulary."""
    first = settings[names[0]]
    for name in names:
        token_id = settings[name]
        if not is_int(token_id) or not 0 <= token_id < vocab_size or token_id != first:
            raise ModelLoadError(
                f"config: {name}={short_repr(token_id)}: expected one token id below vocab_size={vocab_size}"
            )

    assert isinstance(first, int)
    return first


def _aux_layers(settings: Mapping[str, Any], num_layers: int, convention: str | None) -> tuple[int, ...]:
    """The field `aux_layers` for a target of `num_layers` layers; ModelLoadError for ids out of range."""
    check_convention(convention)
    if not read_flag(settings, "use_aux_hidden_state", default=True):
        return ()

    ids = settings.get(AUX_IDS) or []
    aux_layers = layers_of_ids(AUX_IDS, ids, num_layers, convention) if ids else _default_layers(num_layers)
    num_features = settings.get("num_aux_hidden_states", len(aux_layers))
    if num_features != len(aux_layers):
        raise ModelLoadError(
            f"config: num_aux_hidden_states={short_repr(num_features)}: expected {len(aux_layers)}"
        )

    return tuple(aux_layers)


def check_convention(convention: str | None) -> None:
    """Raise ModelLoadError for a convention that is none."""
    if convention not in ("output", "boundary", None):
        raise ModelLoadError(
            f"aux_layer_convention={short_repr(convention)}: expected 'output', 'boundary' or None"
        )


def _default_layers(num_layers: int) -> list[int]:
    """The layers of drafts that name none: those of SafeAILab's EAGLE-3 code."""
    if num_layers < NUM_DEFAULT_FEATURES:
        raise ModelLoadError(
            f"config: no eagle_aux_hidden_state_layer_ids, and a target of {num_layers} layers: "
            f"expected {NUM_DEFAULT_FEATURES} or more"
        )

    return sorted((2, num_layers // 2, num_layers - 3))


def layers_of_ids(name: str, ids: object, num_layers: int, convention: str | None) -> list[int]:
    """The layers whose input is meant, low to high, of the ids in a setting, for a target of `num_layers`
    layers.

    convention: as of `DraftConfig.from_hf`. ModelLoadError for ids out of range.
    """
    if not isinstance(ids, list) or not all(is_int(layer_id) for layer_id in ids):
        raise ModelLoadError(f"config: {name}={short_repr(ids)}: expected a list of integers")

    if convention is None:
        convention = "boundary" if num_layers in ids else "output"

    first = 1 if convention == "output" else 0
    aux_layers = sorted(layer_id + first for layer_id in ids)
    if len(ids) > num_layers + 1 - first:
        raise ModelLoadError(
            f"config: {name}={short_repr(ids)} as {convention} ids, "
            f"and a target of {num_layers} layers: expected {len(ids) + first - 1} or more"
        )

    is_distinct = len(set(aux_layers)) == len(ids)
    if not is_distinct or not all(first <= aux_layer <= num_layers for aux_layer in aux_layers):
        raise ModelLoadError(
            f"config: {name}={short_repr(ids)} as {convention} ids: "
            f"expected different ones from 0 to {num_layers - first}"
        )

    return aux_layers


def check_vocabulary(vocab_size: int, target: ModelSpec) -> None:
    """Raise ModelLoadError if the draft's vocabulary is not the target's."""
    if vocab_size != target.vocab_size:
        raise ModelLoadError(
            f"config: the draft has vocab_size={vocab_size}, its target {target.vocab_size}: "
            "expected the same"
        )


def _check_fit(draft: DraftConfig, target: ModelSpec) -> None:
    """ModelLoadError for shapes that are not the target's, and for options that exclude each other."""
    check_vocabulary(draft.vocab_size, target)
    if draft.target_hidden_size != target.hidden_size:
        raise ModelLoadError(
            f"config: the draft is for a target of hidden size {short_repr(draft.target_hidden_size)} "
            f"(target_hidden_size, else hidden_size), its target has {target.hidden_size}: expected the same"
        )

    if not draft.aux_layers and draft.hidden_size != target.hidden_size:
        raise ModelLoadError(
            f"config: use_aux_hidden_state=False with hidden_size={draft.hidden_size}: "
            f"expected the target's {target.hidden_size}"
        )

    if not draft.aux_layers and (draft.has_input_norm or draft.has_feature_norms):
        raise ModelLoadError(
            "config: norm_before_fc or fc_norm with use_aux_hidden_state=False: expected none"
        )

    if not draft.aux_layers and draft.mask_token_id is not None:
        raise ModelLoadError("config: use_aux_hidden_state=False in a parallel head: expected true")

    if draft.has_input_norm and draft.has_feature_norms:
        raise ModelLoadError("config: norm_before_fc and fc_norm are both true: expected at most one")


def read_flag(settings: Mapping[str, Any], name: str, *, default: bool = False) -> bool:
    value = settings.get(name, default)
    if not isinstance(value, bool):
        raise ModelLoadError(f"config: {name}={short_repr(value)}: expected true or false")

    return value


def is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
