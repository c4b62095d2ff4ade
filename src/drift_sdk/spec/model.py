"""The description of a decoder: its layers, and what is around them. Frozen values, without weights.

Two layers with equal specs are computed by the same code, and by the same kernels.

Also names of the tensors of a decoder in files, by default those of Llama at Hugging Face, and sizes of the
states of recurrent layers. `models.kv_cache` and the kernels say what states hold.
"""

from __future__ import annotations

import itertools
from typing import Literal, get_args

import torch
from msgspec import Struct

from drift_sdk.errors import ModelLoadError, short_repr
from drift_sdk.quantised.scheme import Scheme
from drift_sdk.spec.rope import Rope

ExpertLayout = Literal["each", "stacked", "transposed", "mxfp4"]
"""Form of the experts' projections in files. "each": a tensor for each expert and projection. "stacked": one
tensor for all experts [num_experts, out, in], gate and up in one. "transposed": likewise,
[num_experts, in, out]. "mxfp4": likewise, as MXFP4 blocks and scales."""


def check_choice(field: str, value: str, choices: object) -> None:
    """Raise ModelLoadError for what is not one of the literals of `choices`."""
    if value not in get_args(choices):
        expected = ", ".join(map(repr, get_args(choices)))
        raise ModelLoadError(f"{field}={short_repr(value)}: expected one of {expected}")


class AttentionNames(Struct, frozen=True, kw_only=True):
    """fused: name of query, key and value projections as one tensor; None: they are apart. query_norm,
    key_norm: of heads."""

    module: str = "self_attn"
    query: str = "q_proj"
    key: str = "k_proj"
    value: str = "v_proj"
    gate: str = "gate_proj"
    output: str = "o_proj"
    query_norm: str = "q_norm"
    key_norm: str = "k_norm"
    sinks: str = "sinks"
    fused: str | None = None


class LatentNames(Struct, frozen=True, kw_only=True):
    """query: of models whose queries have no latent. query_down, query_norm, query_up: of the others. latent:
    of the latent of keys and values, with the rotated part of keys. up: of the keys and values of all heads
    from it."""

    module: str = "self_attn"
    query: str = "q_proj"
    query_down: str = "q_a_proj"
    query_norm: str = "q_a_layernorm"
    query_up: str = "q_b_proj"
    latent: str = "kv_a_proj_with_mqa"
    latent_norm: str = "kv_a_layernorm"
    up: str = "kv_b_proj"
    output: str = "o_proj"


class GatedDeltaNames(Struct, frozen=True, kw_only=True):
    """qkvz, ba: names of projections that files have fused."""

    module: str = "linear_attn"
    qkv: str = "in_proj_qkv"
    z: str = "in_proj_z"
    b: str = "in_proj_b"
    a: str = "in_proj_a"
    qkvz: str = "in_proj_qkvz"
    ba: str = "in_proj_ba"
    conv: str = "conv1d"
    decay: str = "A_log"
    step: str = "dt_bias"
    norm: str = "norm"
    output: str = "out_proj"


class MlpNames(Struct, frozen=True, kw_only=True):
    """fused: name of gate and up projections as one tensor; None: they are apart."""

    module: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    fused: str | None = None


class ExpertNames(Struct, frozen=True, kw_only=True):
    """Names inside `module`; "": inside the layer. correction: of a sigmoid router. gate_up: of both
    projections in one tensor. input_factors, expert_factors: of a router with a norm. mlp_post_norm, norm,
    post_norm: of ParallelExperts."""

    module: str = "mlp"
    router: str = "gate"
    correction: str = "gate.e_score_correction_bias"
    experts: str = "experts"
    gate: str = "gate_proj"
    up: str = "up_proj"
    gate_up: str = "gate_up_proj"
    down: str = "down_proj"
    input_factors: str = "router.scale"
    expert_factors: str = "router.per_expert_scale"
    mlp_post_norm: str = "post_feedforward_layernorm_1"
    norm: str = "pre_feedforward_layernorm_2"
    post_norm: str = "post_feedforward_layernorm_2"
    shared: MlpNames = MlpNames(module="shared_experts")
    shared_gate: str = "shared_expert_gate"
    layout: ExpertLayout = "each"

    def __post_init__(self) -> None:
        check_choice("layout", self.layout, ExpertLayout)

    def prefix(self, layer: str) -> str:
        """The prefix of tensors in a layer, which is given by its own prefix."""
        return f"{layer}.{self.module}" if self.module else layer


class MtpNames(Struct, frozen=True, kw_only=True):
    """Names of the layer that predicts one more token (MTP), and of what is around it.

    layer: prefix of its tensors, inside which names are those of other layers. embedding, head: copies of the
    model's own that files may have, which are not read; "": files have none.
    """

    joint: str = "mtp.fc.weight"
    embedding_norm: str = "mtp.pre_fc_norm_embedding.weight"
    hidden_norm: str = "mtp.pre_fc_norm_hidden.weight"
    layer: str = "mtp.layers.0"
    final_norm: str = "mtp.norm.weight"
    embedding: str = ""
    head: str = ""

    @property
    def prefix(self) -> str:
        """What all names but those of copies begin with, a dot at its end."""
        parts = [name.split(".") for name in (self.joint, self.layer, self.hidden_norm, self.final_norm)]
        together = itertools.takewhile(lambda each: len(set(each)) == 1, zip(*parts, strict=False))
        return "".join(f"{each[0]}." for each in together)


class LayerInputNames(Struct, frozen=True, kw_only=True):
    """Names of `ModelSpec.layer_inputs`: of the model, and inside a layer from `gate` on."""

    embedding: str = "model.embed_tokens_per_layer.weight"
    model_projection: str = "model.per_layer_model_projection.weight"
    model_norm: str = "model.per_layer_projection_norm.weight"
    gate: str = "per_layer_input_gate.weight"
    projection: str = "per_layer_projection.weight"
    norm: str = "post_per_layer_input_norm.weight"


class Names(Struct, frozen=True, kw_only=True):
    """layer: prefix of the tensors of layer {}. The names of norms are inside it. mtp: of the layer that
    `ModelSpec.mtp` describes. unread: prefixes of tensors that the decoder does not read."""

    embedding: str = "model.embed_tokens.weight"
    final_norm: str = "model.norm.weight"
    head: str = "lm_head.weight"
    layer: str = "model.layers.{}"
    mixer_norm: str = "input_layernorm"
    mixer_post_norm: str = ""
    channel_norm: str = "post_attention_layernorm"
    channel_post_norm: str = ""
    factor: str = "layer_scalar"
    attention: AttentionNames = AttentionNames()
    latent: LatentNames = LatentNames()
    gated_delta: GatedDeltaNames = GatedDeltaNames()
    mlp: MlpNames = MlpNames()
    experts: ExpertNames = ExpertNames()
    mtp: MtpNames = MtpNames()
    layer_inputs: LayerInputNames = LayerInputNames()
    unread: tuple[str, ...] = ()


SANDWICH = Names(
    mixer_post_norm="post_attention_layernorm",
    channel_norm="pre_feedforward_layernorm",
    channel_post_norm="post_feedforward_layernorm",
)
"""Names of layers that also normalise the outputs of mixer and channel."""


Activation = Literal["silu", "gelu_tanh"]
NormKind = Literal["rounded", "offset", "wide"]
RouterKind = Literal["softmax", "sigmoid", "wide"]


class Norm(Struct, frozen=True):
    """A norm by the root mean square of a row, whose square is increased by `eps`.

    kind: "rounded": the normalised row is rounded to the model's dtype, then multiplied by the weight.
          "wide": it is multiplied by the weight in float32, then rounded. "offset": likewise by 1 + weight.
    """

    eps: float
    kind: NormKind = "rounded"

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, NormKind)


class QueryScaling(Struct, frozen=True):
    """Queries at position p are multiplied by 1 + beta * ln(1 + floor(p / context)) after the rotation."""

    beta: float
    context: int


class Attention(Struct, frozen=True, kw_only=True):
    """Attention of groups of query heads to keys and values of one head.

    head_dim, value_dim: dimensions of a head's queries and keys, and of its values.
    scale:               products of queries and keys are multiplied by it.
    window:              number of keys that a row sees at most, its own included; None: all before it.
    rope:                the rotation of queries and keys; None: they are not rotated.
    has_bias:            of the projections of queries, keys and values.
    has_output_bias:     of the projection of the output.
    head_norm:           norm of each head's query and key before the rotation; None: they have none.
    has_head_weights:    whether this norm has weights.
    has_value_norm:      values of a head are normalised as `head_norm` says, without weights.
    has_values:          files have a projection of values; else the projection of keys, before norm and
                         rotation, is the values too.
    kv_of:               index of the earlier layer whose keys and values it attends to; None: it has its own.
    has_gate:            the output is multiplied by the sigmoid of one more projection of the input.
    is_gate_interleaved: files have the rows of query and gate of each head together.
    has_sinks:           each head has a logit that takes part in the softmax and has no value.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    scale: float
    window: int | None = None
    rope: Rope | None = None
    has_bias: bool = False
    has_output_bias: bool = False
    head_norm: Norm | None = None
    has_head_weights: bool = True
    has_value_norm: bool = False
    has_values: bool = True
    kv_of: int | None = None
    query_scaling: QueryScaling | None = None
    has_gate: bool = False
    is_gate_interleaved: bool = False
    has_sinks: bool = False

    @property
    def group(self) -> int:
        """Query heads of each KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def rotary_dim(self) -> int:
        """The number of elements of a head that are rotated."""
        return 0 if self.rope is None else self.rope.rotary_dim

    @property
    def output_size(self) -> int:
        """Columns of the projection of the output."""
        return self.num_heads * self.value_dim

    @property
    def kv(self) -> KVShape:
        """The shape of the keys and values that it keeps."""
        return KVShape(self.num_kv_heads, self.head_dim, self.value_dim)


class LatentAttention(Struct, frozen=True, kw_only=True):
    """Attention of all heads to one latent of each token (MLA, arXiv 2405.04434), in its absorbed form.

    With c = norm(down(x)) the latent of a token, and a key of all heads that is rotated, the key of a head is
    (K c, rotated) and its value V c, where K and V are matrices of the head. Neither is computed: a query
    (q, rotated) becomes (K^T q, rotated), which is multiplied by (c, rotated), and V multiplies the weighted
    sum of latents. So the heads attend as those of one KV head do, whose values are the beginnings of its
    keys.

    plain_dim, output_dim: of a head's query without its rotated part, and of its output.
    latent_dim:   of c.
    query_rank:   queries are up(norm(down(x))) with so many numbers between; None: they are one projection.
    scale:        products of queries and keys are multiplied by it.
    rope:         the rotation of the rotated parts, of all of their elements.
    is_interleaved: in files, elements 2 i and 2 i + 1 of the rotated parts form a pair; else i and
                  i + rotary_dim / 2. In memory they do so always.
    norm:         of latents.
    has_bias:     of the projections to latents and of the output.
    """

    num_heads: int
    plain_dim: int
    output_dim: int
    latent_dim: int
    query_rank: int | None
    scale: float
    rope: Rope
    norm: Norm
    is_interleaved: bool = True
    has_bias: bool = False

    @property
    def num_kv_heads(self) -> int:
        return 1

    @property
    def group(self) -> int:
        """Query heads of the KV head."""
        return self.num_heads

    @property
    def rotary_dim(self) -> int:
        """Elements of the rotated part of a query or key."""
        return self.rope.rotary_dim

    @property
    def query_dim(self) -> int:
        """Elements of a head's query before it is absorbed."""
        return self.plain_dim + self.rotary_dim

    @property
    def head_dim(self) -> int:
        """Elements of a head's query that is multiplied by keys."""
        return self.latent_dim + self.rotary_dim

    @property
    def value_dim(self) -> int:
        """Elements of the weighted sum of a head's values."""
        return self.latent_dim

    @property
    def window(self) -> int | None:
        """All keys are seen."""
        return None

    @property
    def output_size(self) -> int:
        """Columns of the projection of the output."""
        return self.num_heads * self.output_dim

    @property
    def kv(self) -> KVShape:
        """The shape of what it keeps."""
        return KVShape(1, self.head_dim, self.latent_dim, is_latent=True)


class KVShape(Struct, frozen=True):
    """The keys and values of a token in a layer. Layers of one shape share memory.

    is_latent: values are not stored: they are the first `value_dim` numbers of keys.
    """

    num_kv_heads: int
    head_dim: int
    value_dim: int
    is_latent: bool = False

    @property
    def stored_dims(self) -> tuple[int, ...]:
        """Numbers of a head that each of its tensors has: of keys, then of values."""
        return (self.head_dim,) if self.is_latent else (self.head_dim, self.value_dim)

    @property
    def size(self) -> int:
        """Numbers of a token."""
        return self.num_kv_heads * sum(self.stored_dims)


class GatedDelta(Struct, frozen=True, kw_only=True):
    """The gated delta rule (arXiv 2412.06464): each value head has a matrix as its state.

    With q, k, v after a causal convolution by channels and silu, q and k of length 1, and the decay g and the
    rate beta of a row and head: S <- exp(g) S; u = beta (v - S^T k); S <- S + k u^T; the output is
    S^T q / sqrt(key_dim), normalised by head, weighed, and gated by silu of one more projection.

    num_key_heads, num_value_heads: value head j uses the queries and keys of head j // group.
    key_dim, value_dim:  of a head; its state is [key_dim, value_dim].
    conv_width:          rows that the convolution sees, the row's own included.
    norm:                of the output of a head, with one weight for all heads.
    has_fused_qkvz, has_fused_ba: files have these projections of each key head and its value heads together.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    norm: Norm
    has_fused_qkvz: bool = False
    has_fused_ba: bool = False

    @property
    def group(self) -> int:
        """Value heads of each key head."""
        return self.num_value_heads // self.num_key_heads

    @property
    def num_channels(self) -> int:
        """Channels of the convolution: queries, keys, values."""
        return 2 * self.num_key_heads * self.key_dim + self.output_size

    @property
    def output_size(self) -> int:
        """Columns of the projection of the output."""
        return self.num_value_heads * self.value_dim

    @property
    def state_size(self) -> int:
        """Numbers of the state of a layer."""
        return self.num_value_heads * self.key_dim * self.value_dim


class Mlp(Struct, frozen=True, kw_only=True):
    """down(activation(gate(x)) * up(x)).

    intermediate_size: rows of gate and up, columns of down.
    has_bias:          of all three.
    """

    intermediate_size: int
    activation: Activation = "silu"
    has_bias: bool = False

    def __post_init__(self) -> None:
        check_choice("activation", self.activation, Activation)


class ClampedGate(Struct, frozen=True, kw_only=True):
    """The activation of experts (up + 1) * gate * sigmoid(alpha * gate), with gate <= limit and
    -limit <= up <= limit.

    Rows of gate and up projections alternate: row 2 i is the gate, row 2 i + 1 up.
    """

    alpha: float
    limit: float


class Router(Struct, frozen=True, kw_only=True):
    """The choice of a row's experts, and their weights.

    kind: "softmax": the weights are a softmax of the logits, which are the scores of the choice. "sigmoid":
          they are the sigmoids of the logits in float32; the choice is by these plus a correction that the
          model has for each expert. "wide": the scores are a softmax of the logits, computed in float32.
    input_norm: norm of the router's input, without weights; the input has a factor for each column then, and
                is divided by the square root of their number, and a weight is multiplied by a factor of its
                expert. None: the input is the experts', and weights have no factors.
    is_normalised: the weights of a row's experts add up to 1, before `scale`. Otherwise a softmax is one of
          all experts, and sigmoids remain as they are.
    scale: weights are multiplied by it.
    num_groups, num_active_groups: experts lie in groups of equal size, of which so many take part in the
          choice for a row: those with the largest sums of their two largest scores, of the kind "wide"
          those with the largest score.

    Scale and groups are options of the kinds "sigmoid" and "wide". Raises ValueError where "softmax" has
    them.
    """

    kind: RouterKind = "softmax"
    input_norm: Norm | None = None
    is_normalised: bool = True
    scale: float = 1.0
    num_groups: int = 1
    num_active_groups: int = 1

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, RouterKind)
        if self.kind == "softmax" and (self.scale, self.num_groups, self.num_active_groups) != (1.0, 1, 1):
            raise ValueError(f"{self}: expected neither scale nor groups for softmax")


class Experts(Struct, frozen=True, kw_only=True):
    """A mixture of experts: MLPs of which a router chooses some for each row.

    num_active:         experts that compute a row.
    intermediate_size:  width of an expert's MLP.
    activation:         of gates, unless they are clamped.
    has_bias:           the router and the experts' projections have biases.
    clamped_gate:       None: activation(gate) * up, with all rows of the gate before the rows of up.
    shared:             an MLP whose output is added to the experts'; None: there is none.
    has_shared_gate:    this output is multiplied by the sigmoid of a projection of the input to one number.
    """

    num_experts: int
    num_active: int
    intermediate_size: int
    activation: Activation = "silu"
    router: Router = Router()
    has_bias: bool = False
    clamped_gate: ClampedGate | None = None
    shared: Mlp | None = None
    has_shared_gate: bool = False


class ParallelExperts(Struct, frozen=True, kw_only=True):
    """norm(mlp(x)) + norm(experts(norm(stream))), where x is the normalised stream and the router reads the
    stream itself.

    norm: of the outputs of both and of the experts' input, with weights of their own.
    """

    mlp: Mlp
    experts: Experts
    norm: Norm


AnyAttention = Attention | LatentAttention
"""Mixers that keep keys and values."""
Mixer = AnyAttention | GatedDelta
"""What mixes the rows of a sequence."""
Channel = Mlp | Experts | ParallelExperts
"""What computes each row by itself."""


class LayerSpec(Struct, frozen=True, kw_only=True):
    """stream += multiplier * post(mixer(norm(stream))), then the same with the channel.

    norm:       of the inputs of mixer and channel.
    post_norm:  of their outputs; None: these are not normalised.
    has_factor: at the end, the stream is multiplied by a weight.
    """

    mixer: Mixer
    channel: Channel
    norm: Norm
    post_norm: Norm | None = None
    multiplier: float = 1.0
    has_factor: bool = False

    @property
    def kv(self) -> KVShape | None:
        """The shape of the keys and values that it keeps; None: it keeps none."""
        mixer = self.mixer
        if isinstance(mixer, LatentAttention):
            return mixer.kv

        return mixer.kv if isinstance(mixer, Attention) and mixer.kv_of is None else None


class LayerInputs(Struct, frozen=True, kw_only=True):
    """Inputs of each layer that depend on a row's token alone (per-layer embeddings), [size]:
    (norm(projection(e) / sqrt(hidden)) + sqrt(size) * embedding[token]) / sqrt(2), where e is the row of the
    stream before the first layer.

    After its channel, a layer adds norm(projection(activation(gate(stream)) * input)) to the stream.
    """

    size: int
    norm: Norm
    activation: Activation = "gelu_tanh"


def _window(mixer: Mixer) -> int | None:
    return mixer.window if isinstance(mixer, Attention) else None


class ModelSpec(Struct, frozen=True, kw_only=True):
    """A decoder.

    max_position_embeddings:  the model's context, in tokens: as its config says, or more with YaRN.
    final_norm:               of the stream after the last layer.
    is_head_tied:             the output head is the embedding.
    embedding_multiplier:     embeddings are multiplied by it.
    has_rounded_multiplier:   embedding_multiplier is rounded to the model's dtype before.
    embedding_norm:           norm of the embeddings, without weights; None: they are not normalised.
    logits_divisor:           logits are divided by it.
    logits_cap:               then they are cap * tanh(logits / cap); None: they are not capped.
    layer_inputs:             of all layers; None: they have none.
    names:                    of the tensors in files.
    mtp:                      the layer that predicts one more token from the decoder's output, and drafts so;
                              None: files of the model have none. It is not one of `layers`.
    quantisation:             how files store quantised weights; None: they have none, or MXFP4 experts alone.
    """

    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    max_position_embeddings: int
    final_norm: Norm
    is_head_tied: bool
    embedding_multiplier: float = 1.0
    has_rounded_multiplier: bool = False
    embedding_norm: Norm | None = None
    logits_divisor: float = 1.0
    logits_cap: float | None = None
    layer_inputs: LayerInputs | None = None
    names: Names = Names()
    mtp: LayerSpec | None = None
    quantisation: Scheme | None = None

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def attention(self) -> AnyAttention:
        """The attention of the first layer that has one."""
        return next(each.mixer for each in self.layers if isinstance(each.mixer, AnyAttention))

    @property
    def max_head_dim(self) -> int:
        """The dimensions of the largest heads of attention."""
        mixers = (layer.mixer for layer in self.layers)
        return max(mixer.head_dim for mixer in mixers if isinstance(mixer, AnyAttention))

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer with attention."""
        return tuple(each.mixer.window for each in self.layers if isinstance(each.mixer, AnyAttention))

    @property
    def window_layers(self) -> tuple[int, ...]:
        """The layers that keep keys and values and see the last of them alone."""
        kept = [index for index, layer in enumerate(self.layers) if layer.kv is not None]
        return tuple(index for index in kept if _window(self.layers[index].mixer) is not None)

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """The rotations of all layers, each once."""
        ropes = (each.mixer.rope for each in self.layers if isinstance(each.mixer, AnyAttention))
        return tuple(dict.fromkeys(rope for rope in ropes if rope is not None))

    @property
    def kv_groups(self) -> dict[KVShape, tuple[int, ...]]:
        """The layers of each shape of keys and values, in order."""
        groups: dict[KVShape, list[int]] = {}
        for index, layer in enumerate(self.layers):
            if layer.kv is not None:
                groups.setdefault(layer.kv, []).append(index)
        return {group: tuple(layers) for group, layers in groups.items()}

    @property
    def first_reader(self) -> int:
        """The first of the last layers, of which none keeps keys and values or a state: all attend to those
        of earlier layers. What they compute of a row has no effect on other rows. `num_layers` without."""
        mixers = [layer.mixer for layer in self.layers]
        keeping = [not isinstance(each, Attention) or each.kv_of is None for each in mixers]
        return self.num_layers - keeping[::-1].index(True)

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """The layers with attention."""
        found = enumerate(self.layers)
        return tuple(index for index, layer in found if isinstance(layer.mixer, AnyAttention))

    @property
    def has_latents(self) -> bool:
        """Whether layers keep latents in place of keys and values."""
        return any(isinstance(layer.mixer, LatentAttention) for layer in self.layers)

    @property
    def recurrent_layers(self) -> tuple[int, ...]:
        """The layers that carry a state."""
        return tuple(index for index, layer in enumerate(self.layers) if isinstance(layer.mixer, GatedDelta))

    @property
    def experts(self) -> Experts | None:
        """The experts of the first layer that has some."""
        return next((found for each in self.layers if (found := experts_of(each.channel)) is not None), None)

    @property
    def mlp_size(self) -> int:
        """The width of the widest MLP, shared ones included; 0 without MLPs."""
        mlps = [mlp_of(each.channel) for each in self.layers]
        return max((mlp.intermediate_size for mlp in mlps if mlp is not None), default=0)


def experts_of(channel: Channel) -> Experts | None:
    """The experts of a channel; None: it has none."""
    if isinstance(channel, ParallelExperts):
        return channel.experts

    return channel if isinstance(channel, Experts) else None


def mlp_of(channel: Channel) -> Mlp | None:
    """The MLP of a channel, or the one that its experts share; None: it has none."""
    if isinstance(channel, ParallelExperts):
        return channel.mlp

    return channel.shared if isinstance(channel, Experts) else channel


BORDER = 32
"""Positions between borders, at which states are stored."""


def num_ring_rows(max_rows: int) -> int:
    """Rows since a border that kernels keep, if at most `max_rows` are verified at once: the stored border
    may be the last one up to the first row of the verification before, whose rows may all be accepted."""
    return -(-(BORDER - 1 + 2 * max_rows) // 8) * 8


def num_input_rows(spec: GatedDelta, max_rows: int) -> int:
    """Inputs of the convolution that kernels keep, if at most `max_rows` are verified at once: those are
    written while the rows before the first one are read."""
    return max_rows + spec.conv_width - 1


def checkpoint_bytes(spec: ModelSpec, dtype: torch.dtype) -> int:
    """Bytes of the states of all layers at a border."""
    return sum(
        4 * mixer.state_size + dtype.itemsize * (mixer.conv_width - 1) * mixer.num_channels
        for mixer in _mixers(spec)
    )


def slot_bytes(spec: ModelSpec, dtype: torch.dtype) -> int:
    """Bytes of the states of a sequence that runs in plain torch, with the rows of two borders."""
    row = sum(
        4 * (mixer.num_key_heads * mixer.key_dim + mixer.output_size + mixer.num_value_heads)
        + dtype.itemsize * mixer.num_channels
        for mixer in _mixers(spec)
    )
    return checkpoint_bytes(spec, dtype) + 2 * BORDER * row


def graph_slot_bytes(spec: ModelSpec, dtype: torch.dtype, max_rows: int) -> int:
    """Bytes of the states of a sequence that runs in kernels, with at most `max_rows` rows verified at once:
    of each row a key of two bytes a number, what it adds, their factors, and the convolution's inputs."""
    return sum(
        4 * mixer.state_size
        + num_ring_rows(max_rows)
        * ((2 * mixer.key_dim + 4) * mixer.num_key_heads + 4 * (mixer.value_dim + 1) * mixer.num_value_heads)
        + dtype.itemsize * num_input_rows(mixer, max_rows) * mixer.num_channels
        for mixer in _mixers(spec)
    )


def _mixers(spec: ModelSpec) -> list[GatedDelta]:
    mixers = [layer.mixer for layer in spec.layers]
    return [mixer for mixer in mixers if isinstance(mixer, GatedDelta)]
