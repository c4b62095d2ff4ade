"""Small random assistants of Gemma 4 models, as transformers saves them, and their drafts in transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

__all__ = ["draft_of_transformers", "make_assistant", "make_often_right"]

LAYER_TYPES = ("sliding_attention", "full_attention")
OWN = ("hidden_size_per_layer_input", "vocab_size_per_layer_input", "enable_moe_block", "use_double_wide_mlp")


def make_assistant(seed: int, folder: Path, target: Any, *, num_clusters: int = 0, **changes: Any) -> Any:
    """Save an assistant of a transformers model, and return it. The same seed gives the same weights.

    num_clusters: of the vocabulary, of which a fifth are the best ones; 0: it has none. changes: of the
    settings of its layers.
    """
    given = target.config.to_dict()
    kinds = [LAYER_TYPES[0], LAYER_TYPES[0], LAYER_TYPES[1]]
    settings = {
        **{name: value for name, value in given.items() if name not in OWN},
        "hidden_size": given["hidden_size"],
        "intermediate_size": 72,
        "num_hidden_layers": len(kinds),
        "layer_types": kinds,
        "num_attention_heads": given["num_attention_heads"],
        "num_kv_shared_layers": len(kinds),
        "final_logit_softcapping": None,
        "tie_word_embeddings": True,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
    }
    settings.pop("per_layer_config", None)
    settings |= _heads(target) | changes
    config = transformers.Gemma4AssistantConfig(
        text_config=transformers.Gemma4TextConfig(**settings),
        backbone_hidden_size=given["hidden_size"],
        use_ordered_embeddings=num_clusters > 0,
        num_centroids=max(num_clusters, 1),
        centroid_intermediate_top_k=max(num_clusters // 5, 1),
    )
    with pytest.MonkeyPatch.context() as patch:
        # transformers 5 refuses layers of which none has keys.
        modes = property(lambda text: ["reuse"] * text.num_hidden_layers)
        patch.setattr(transformers.Gemma4TextConfig, "kv_sharing_modes", modes, raising=False)
        model = transformers.Gemma4AssistantForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(generator=generator)
            if parameter.dim() == 1:
                parameter.mul_(0.2).add_(1.0)
            else:
                parameter.mul_(parameter.shape[-1] ** -0.5 * (3.0 if "centroids" in name else 1.0))
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.uniform_(0.6, 1.4, generator=generator)
            elif name.endswith("token_ordering"):
                buffer.copy_(torch.randperm(len(buffer), generator=generator))
    model.save_pretrained(folder)
    return model


def _heads(target: Any) -> dict[str, Any]:
    """The sizes of heads of the target's layers without windows, as its published files have them."""
    own = getattr(target.config, "per_layer_config", None) or {}
    kinds = target.config.layer_types
    full = own[kinds.index(LAYER_TYPES[1])]
    return {
        "global_head_dim": full.head_dim,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": full.num_key_value_heads,
    }


@torch.no_grad()
def draft_of_transformers(
    target: Any, assistant: Any, tokens: list[int], number: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The logits [vocab] that an assistant drafts from behind tokens, the last of which the target has not
    computed, and the features [H] that it hands on.

    Layers with windows see the last keys of a window but one: the place of the newest token is in it.
    """
    _store_keys(target)
    output = target(
        torch.tensor([tokens[:-1]]),
        output_hidden_states=True,
        return_shared_kv_states=True,
        use_cache=False,
    )
    window = target.config.sliding_window
    shared = dict(output.shared_kv_states)
    shared[LAYER_TYPES[0]] = tuple(each[:, :, -(window - 1) :] for each in shared[LAYER_TYPES[0]])
    feature, token, position = output.hidden_states[-1][:, -1:], tokens[-1], torch.tensor([[len(tokens) - 1]])
    found = []
    for _ in range(number):
        embedded = target.get_input_embeddings()(torch.tensor([[token]]))
        drafted = assistant(
            inputs_embeds=torch.cat((embedded, feature), dim=-1),
            position_ids=position,
            shared_kv_states=shared,
            use_cache=False,
        )
        feature, token = drafted.last_hidden_state, int(drafted.logits.argmax())
        found.append((drafted.logits[0, 0], feature[0, 0]))
    return found


def _store_keys(target: Any) -> None:
    """Make a model return the keys of the last layer of each type that has some, also if none shares them."""
    number = target.config.num_hidden_layers - target.config.num_kv_shared_layers
    last = {kind: index for index, kind in enumerate(target.config.layer_types[:number])}
    for index in last.values():
        target.model.layers[index].self_attn.store_full_length_kv = True


def make_often_right(folder: Path, assistant: Path) -> None:
    """Change the weights of a model and its assistant so that drafts are often right, and often wrong.

    The model has a head of its own. The next token depends mostly on the one before, because layers add
    little to the residual stream, and the assistant, of its width, begins with the embedding and has its
    head.
    """
    tensors = _with_small_layers(folder)
    tensors["lm_head.weight"].mul_(3.0)  # fewer near ties
    own = _with_small_layers(assistant)
    width = own["pre_projection.weight"].shape[0]
    own["pre_projection.weight"].mul_(0.01)[:, :width] += torch.eye(width)
    own["model.embed_tokens.weight"] = tensors["lm_head.weight"].clone()
    own["model.norm.weight"] = tensors["model.norm.weight"].clone()
    if (name := "masked_embedding.centroids.weight") in own:
        clusters = own["masked_embedding.token_ordering"].view(len(own[name]), -1)
        own[name] = own["model.embed_tokens.weight"][clusters].mean(1)
    for path, changed in ((folder, tensors), (assistant, own)):
        save_file(changed, path / "model.safetensors", {"format": "pt"})


def _with_small_layers(folder: Path) -> dict[str, torch.Tensor]:
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if ".post_" in name and name.endswith(
            ("attention_layernorm.weight", "feedforward_layernorm.weight", "input_norm.weight")
        ):
            tensor.mul_(0.02)
    return tensors
