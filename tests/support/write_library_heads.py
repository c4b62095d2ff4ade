"""Writes small random draft heads with the libraries that train them, and the drafts of their own forward
passes, to tests/models/library_heads.

Run in a folder of heads, once with each library, in an environment that has it (and torch for the CPU):

    python write_library_heads.py speculators
    TORCHDYNAMO_DISABLE=1 python write_library_heads.py specforge

The first run also makes the heads' target, a Llama of transformers. A head has its files as the library saves
them, in bfloat16, and `expected.json`: versions, the boundaries of the target's layers whose streams were its
input, the token ids (a prompt and the target's choice behind it), the drafts behind them, and their logits,
computed in float32. Of heads that drift_sdk refuses there is the config.json alone.
"""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from safetensors.torch import load_file

TARGET = Path("target")
NUM_LAYERS, WIDTH, VOCAB_SIZE, DRAFT_VOCAB_SIZE = 7, 32, 128, 96
SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": WIDTH,
    "intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_act": "silu",
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
NUM_PROMPT_TOKENS, NUM_DRAFTS, BLOCK_SIZE = 23, 4, 5
MASK, WINDOW = 101, 9
"""A window shorter than the prompt."""
MIN_GAP = 1e-3
"""Least difference between the largest two logits of a draft: rounding does not change it."""

Hidden = Sequence[torch.Tensor]
"""The target's residual stream [N, WIDTH] before each layer."""


def main(library: str) -> None:
    torch.manual_seed(0)
    if not TARGET.exists():
        write_target()
    target = transformers.AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()
    prompt = torch.randint(VOCAB_SIZE, (NUM_PROMPT_TOKENS,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        output = target(prompt[None], output_hidden_states=True)
    token_ids = torch.cat((prompt, output.logits[0, -1:].argmax(-1)))
    # transformers normalises the last one, which is the only boundary that no head here has.
    hidden = [stream[0] for stream in output.hidden_states[:-1]]
    {"speculators": write_speculators, "specforge": write_specforge}[library](target, token_ids, hidden)


def write_target() -> None:
    rope = {"rope_type": "default", "rope_theta": 1000.0}
    config = transformers.LlamaConfig(**SHAPE, num_hidden_layers=NUM_LAYERS, rope_parameters=rope)
    model = transformers.LlamaForCausalLM(config)
    draw_weights(model, seed=0)
    model.to(torch.bfloat16).save_pretrained(TARGET)


def draw_weights(model: torch.nn.Module, seed: int, *, kept: Sequence[str] = ()) -> None:
    """Fill all parameters but those that begin with a name in `kept`. Attention has large ones, so that
    positions make a difference to drafts."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in sorted(model.named_parameters()):
        drawn = torch.randn(weight.shape, generator=generator)
        if weight.dim() == 1:
            drawn = drawn * 0.3 if name.endswith("bias") else 1.0 + 0.2 * drawn
        elif "embed" not in name and "mask_hidden" not in name:
            drawn = drawn * weight.shape[-1] ** -0.5 * (3.0 if "self_attn" in name else 1.0)
        if not name.startswith(tuple(kept)):
            weight.data.copy_(drawn)


def draft_vocabulary() -> tuple[torch.Tensor, torch.Tensor]:
    """The marks t2d [VOCAB_SIZE] and offsets d2t [DRAFT_VOCAB_SIZE] of a reduced vocabulary."""
    order = torch.randperm(VOCAB_SIZE, generator=torch.Generator().manual_seed(2))
    ids = order[:DRAFT_VOCAB_SIZE].sort().values
    marks = torch.zeros(VOCAB_SIZE, dtype=torch.bool).scatter_(0, ids, True)
    return marks, ids - torch.arange(DRAFT_VOCAB_SIZE)


def record(
    folder: Path, library: str, layers: Sequence[int], token_ids: torch.Tensor, logits: torch.Tensor
) -> None:
    """Write expected.json. logits: [NUM_DRAFTS, draft vocabulary] of the drafts."""
    ids = torch.arange(VOCAB_SIZE)
    if logits.shape[1] == DRAFT_VOCAB_SIZE:
        ids = draft_vocabulary()[1] + torch.arange(DRAFT_VOCAB_SIZE)
    best = logits.topk(2).values
    gap = (best[:, 0] - best[:, 1]).min()
    drafts = ids[logits.argmax(-1)].tolist()
    if gap < MIN_GAP or len(set(drafts)) < 3:
        raise ValueError(f"{folder}: {drafts} within {gap} of others: take another seed")

    versions = {name: importlib.metadata.version(name) for name in (library, "torch", "transformers")}
    content = {
        "versions": versions,
        "layers": list(layers),
        "token_ids": token_ids.tolist(),
        "drafts": drafts,
        "logits": [[round(value, 5) for value in row] for row in logits.tolist()],
    }
    (folder / "expected.json").write_text(json.dumps(content) + "\n")


class Captured(Exception):
    """Ends a forward pass whose logits are known."""


def logits_of(
    head: torch.nn.Module, run: Callable[[], object], *, number: int = 1, module: str = "lm_head"
) -> torch.Tensor:
    """The output [N, draft vocabulary] of the `number`-th call of a head's output projection in `run`."""
    found: list[torch.Tensor] = []

    def keep(module: object, inputs: object, output: torch.Tensor) -> None:
        found.append(output)
        if len(found) == number:
            raise Captured

    handle = head.get_submodule(module).register_forward_hook(keep)
    try:
        with torch.no_grad():
            run()
    except Captured:
        pass
    finally:
        handle.remove()
    return found[-1].flatten(0, -2).float()


@contextmanager
def replaced(place: object, name: str, value: object) -> Iterator[None]:
    """Put a value in the place of a random choice of training."""
    old = getattr(place, name)
    setattr(place, name, value)
    try:
        yield
    finally:
        setattr(place, name, old)


def chain_logits(
    head: torch.nn.Module,
    token_ids: torch.Tensor,
    ids: torch.Tensor,
    run: Callable[[torch.Tensor, int], object],
) -> torch.Tensor:
    """Logits of a chain of drafts behind `token_ids`. Training unrolls drafts of all rows at once, with the
    tokens of the text; here the text goes on with the drafts.

    ids: [draft vocabulary], the target's. run: a pass over rows of tokens, and its number of unrolled steps.
    """
    last, chain = len(token_ids) - 2, []
    rows = torch.cat((token_ids[1:], torch.zeros(NUM_DRAFTS, dtype=torch.int64)))
    for step in range(NUM_DRAFTS):
        number = step + 1
        logits = logits_of(head, lambda number=number: run(rows, number), number=number)[last]
        chain.append(logits)
        rows[last + number] = ids[logits.argmax(-1)]
    return torch.stack(chain)


def masked_rows(seq_length: int, *args: object, **kwargs: object) -> tuple[torch.Tensor, torch.Tensor]:
    """Anchors and depths of rows, in the place of P-EAGLE's sampling: all of depth 0, and the masks behind
    the last row of the text."""
    last, masks = seq_length - NUM_DRAFTS, torch.arange(1, NUM_DRAFTS)
    anchors = torch.cat((torch.arange(seq_length), torch.full_like(masks, last)))
    return anchors, torch.cat((torch.zeros(seq_length, dtype=torch.int64), masks))


def of_masks(logits: torch.Tensor) -> torch.Tensor:
    """The logits of the drafts among those of `masked_rows`."""
    length = len(logits) - NUM_DRAFTS + 1
    return torch.cat((logits[length - NUM_DRAFTS][None], logits[length:]))


def padded(rows: torch.Tensor, number: int) -> torch.Tensor:
    """Rows with zeros behind them, which no row of a draft sees."""
    return torch.cat((rows, rows.new_zeros(number, *rows.shape[1:])))


# speculators


def write_speculators(target: Any, token_ids: torch.Tensor, hidden: Hidden) -> None:
    from speculators import SpeculatorModel, SpeculatorModelConfig
    from speculators.models import dflash, dflash2, dspark, eagle3, peagle, xpress
    from speculators.train.cli import create_transformer_layer_config

    models = {
        "eagle3": eagle3.Eagle3DraftModel,
        "peagle": peagle.PEagleDraftModel,
        "dflash": dflash.DFlashDraftModel,
        "dspark": dspark.DSparkDraftModel,
        "dflash2": dflash2.DFlash2DraftModel,
        "xpress": xpress.XPressDraftModel,
    }

    def write(name: str, algorithm: str, options: dict[str, Any], seed: int = 3, **layers: Any) -> None:
        layers = {"num_layers": 1, "full_attention_indices": [], "sliding_window": WINDOW} | layers
        config = create_transformer_layer_config(str(TARGET), hidden_act=None, **layers)
        is_reduced = options.pop("is_reduced", True)
        marks, offsets = draft_vocabulary()
        head = models[algorithm].from_training_args(
            config,
            **({"t2d": marks, "d2t": offsets} if is_reduced else {}),
            draft_vocab_size=DRAFT_VOCAB_SIZE if is_reduced else VOCAB_SIZE,
            verifier_name_or_path=str(TARGET),
            draft_attn_impl="eager",
            ttt_steps=NUM_DRAFTS,
            num_depths=NUM_DRAFTS,
            block_size=BLOCK_SIZE,
            **{"mask_token_id": MASK} | options,
        )
        kept = ["verifier"]
        kept += [] if algorithm == "peagle" else ["embed_tokens"]
        kept += [] if is_reduced or algorithm in ("eagle3", "peagle") else ["lm_head"]
        draw_weights(head, seed=seed, kept=kept)
        folder = Path(f"speculators-{name}")
        head.to(torch.bfloat16).save_pretrained(folder)
        (folder / "config.py").unlink()  # the library's own
        if algorithm in ("dspark", "dflash2", "xpress"):
            (folder / "model.safetensors").unlink()
            return

        own = SpeculatorModelConfig.from_pretrained(folder)
        own.transformer_layer_config._attn_implementation = "eager"
        read = SpeculatorModel.from_pretrained(str(folder), config=own).float().eval()
        boundaries = read.target_layer_ids
        inputs = torch.cat([hidden[layer] for layer in boundaries], dim=-1)
        ids = torch.arange(len(read.lm_head.weight)) + (0 if read.d2t is None else read.d2t)
        passes = {"eagle3": speculators_chain, "peagle": speculators_masks, "dflash": speculators_block}
        logits = passes[algorithm](read, token_ids, inputs, ids)
        record(folder, "speculators", boundaries, token_ids, logits)

    full = {"draft_arch": "qwen3", "full_attention_indices": [0, 1], "num_layers": 2}
    defaults = {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True}
    # Windows of unrolled steps stay where the window of their first row is, in drafting they move on.
    write("eagle3", "eagle3", defaults, draft_arch="llama", sliding_window=NUM_PROMPT_TOKENS + NUM_DRAFTS)
    options = {"norm_before_residual": True, "fc_norm": True, "is_reduced": False}
    write("eagle3-qwen3", "eagle3", options | {"target_layer_ids": [1, 4]}, seed=6, **full)
    write("peagle", "peagle", {}, draft_arch="qwen3")
    options = {"norm_before_residual": True, "norm_before_fc": True, "target_layer_ids": [0, 2, 3]}
    write("peagle-llama", "peagle", options, **full | {"draft_arch": "llama"})
    # The library begins the window of a whole block before its anchor, others before each row.
    wide = {"draft_arch": "qwen3", "num_layers": 2, "sliding_window": NUM_PROMPT_TOKENS + BLOCK_SIZE}
    write("dflash", "dflash", {}, seed=7, **wide | {"full_attention_indices": [1]})
    options = {"is_reduced": False, "sliding_window_non_causal": True, "target_layer_ids": [1, 2, 3, 4]}
    write("dflash-shared", "dflash", options, **wide)
    for algorithm in ("dspark", "dflash2", "xpress"):
        write(algorithm, algorithm, {"is_reduced": False}, **wide)


def speculators_chain(
    head: Any, token_ids: torch.Tensor, inputs: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    def run(rows: torch.Tensor, number: int) -> None:
        features = padded(inputs, len(rows) - len(inputs))
        head(features[None], rows[None], torch.zeros_like(rows)[None], ttt_steps=number)

    return chain_logits(head, token_ids, ids, run)


def speculators_masks(
    head: Any, token_ids: torch.Tensor, inputs: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    from speculators.models.peagle import core

    rows = padded(token_ids[1:], NUM_DRAFTS - 1)[None]
    with replaced(core, "generate_cod_sample_indices", masked_rows):
        logits = logits_of(
            head,
            lambda: head(
                padded(inputs, NUM_DRAFTS - 1)[None],
                rows,
                torch.zeros_like(rows),
                verifier_last_hidden_states=torch.zeros(1),
            ),
        )
    return of_masks(logits)


def speculators_block(
    head: Any, token_ids: torch.Tensor, inputs: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    from speculators.models.dflash import core

    anchor = torch.tensor([len(token_ids) - 1]), torch.tensor([True])
    rows = padded(token_ids, BLOCK_SIZE)[None]
    with replaced(core, "select_anchors", lambda *args: anchor):
        logits = logits_of(
            head,
            lambda: head(
                padded(inputs, BLOCK_SIZE + 1)[None],
                rows,
                torch.ones_like(rows),
                torch.zeros(1, rows.shape[1], WIDTH),
                torch.zeros_like(rows),
                max_anchors=1,
            ),
        )
    return logits[1:]


# SpecForge


def write_specforge(target: Any, token_ids: torch.Tensor, hidden: Hidden) -> None:
    from specforge.algorithms.model_providers import resolve_eagle_capture_layers
    from specforge.export.to_hf import export_to_hf
    from specforge.modeling.auto import AutoDraftModel, AutoDraftModelConfig

    config_file, state_file = Path("specforge.json"), Path("specforge.pt")

    def write(name: str, architecture: str, settings: dict[str, Any], seed: int = 4) -> None:
        is_reduced = settings.get("draft_vocab_size") == DRAFT_VOCAB_SIZE
        config_file.write_text(json.dumps({"architectures": [architecture], **SHAPE, **settings}))
        head = AutoDraftModel.from_config(AutoDraftModelConfig.from_file(str(config_file)))
        draw_weights(head, seed=seed)
        if is_reduced:
            marks, offsets = draft_vocabulary()
            head.load_state_dict({"t2d": marks, "d2t": offsets}, strict=False)
        # A checkpoint of its trainer, which the library's command exports.
        state = {"draft_state_dict": head.to(torch.bfloat16).state_dict()}
        torch.save(state, state_file)
        folder = Path(f"specforge-{name}")
        shutil.rmtree(folder, ignore_errors=True)
        export_to_hf(str(state_file), str(config_file), str(folder))
        state_file.unlink()
        config_file.unlink()
        if architecture in ("DSparkDraftModel", "DominoDraftModel"):
            (folder / "model.safetensors").unlink()
            return

        # Its `from_pretrained` leaves the rotation of some heads without values.
        read = AutoDraftModel.from_config(AutoDraftModelConfig.from_file(str(folder / "config.json"))).eval()
        read.load_state_dict(load_file(folder / "model.safetensors"))
        if architecture == "DFlashDraftModel":
            layers = [layer + 1 for layer in read.target_layer_ids]
            logits = specforge_block(read, target, token_ids, hidden)
        else:
            run = SimpleNamespace(model=SimpleNamespace(aux_hidden_state_layer_ids=None))
            outputs = resolve_eagle_capture_layers(run, read.config, target.config)
            layers = [layer + 1 for layer in outputs]
            inputs = torch.cat([hidden[layer] for layer in layers], dim=-1)
            ids = torch.arange(len(read.d2t)) + read.d2t
            write_logits = specforge_masks if architecture == "PEagleDraftModel" else specforge_chain
            logits = write_logits(read, token_ids, inputs, ids)
        record(folder, "specforge", layers, token_ids, logits)

    llama = {"model_type": "llama", "num_hidden_layers": 1, "rope_theta": 500.0}
    llama["draft_vocab_size"] = DRAFT_VOCAB_SIZE
    table = {"eagle_aux_hidden_state_layer_ids": [0, 2, 3]}
    write("eagle3", "LlamaForCausalLMEagle3", llama | {"eagle_config": table})
    write("eagle3-fc-norm", "LlamaForCausalLMEagle3", llama | {"fc_norm": True})
    write("peagle", "PEagleDraftModel", llama | {"num_hidden_layers": 2}, seed=7)
    qwen = {
        "model_type": "qwen3",
        "num_hidden_layers": 2,
        "rope_theta": 700.0,
        "block_size": BLOCK_SIZE,
        "num_target_layers": NUM_LAYERS,
        "layer_types": ["sliding_attention", "full_attention"],
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "max_window_layers": 2,
    }
    table = {"mask_token_id": MASK, "target_layer_ids": [0, 3]}
    write("dflash", "DFlashDraftModel", qwen | {"dflash_config": table})
    for name, more in (
        ("dspark", {"markov_rank": 4}),
        ("domino", {"emb_dim": 8, "gru_hidden_dim": 8, "shift_label": True}),
    ):
        options = table | {"projector_type": name} | more
        architecture = {"dspark": "DSparkDraftModel", "domino": "DominoDraftModel"}[name]
        write(name, architecture, qwen | {"dflash_config": options})


def specforge_chain(
    head: Any, token_ids: torch.Tensor, inputs: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    def run(rows: torch.Tensor, number: int) -> None:
        features = head.project_hidden_states(padded(inputs, len(rows) - len(inputs))[None])
        places = torch.arange(len(rows))[None]
        mask = head.prepare_decoder_attention_mask(
            torch.ones_like(places, dtype=torch.bool), features, 1, len(rows), 0
        )
        cached: list[list[torch.Tensor]] = [[], []]
        for step in range(number):
            embedded = head.embed_input_ids(torch.cat((rows[step:], rows[:step])))[None]
            features = head.backbone(embedded, features, cached, mask, places)
            head.compute_logits(features)

    return chain_logits(head, token_ids, ids, run)


def specforge_masks(
    head: Any, token_ids: torch.Tensor, inputs: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    from specforge.algorithms.peagle import model

    rows = padded(token_ids[1:], NUM_DRAFTS - 1)[None]
    training = model.OnlinePEagleModel(head, MASK, num_depths=NUM_DRAFTS)
    with replaced(model, "generate_cod_sample_indices", masked_rows):
        logits = logits_of(
            head,
            lambda: training(
                rows,
                torch.ones_like(rows),
                torch.zeros(1),
                torch.ones_like(rows),
                padded(inputs, NUM_DRAFTS - 1)[None],
            ),
        )
    return of_masks(logits)


def specforge_block(head: Any, target: Any, token_ids: torch.Tensor, hidden: Hidden) -> torch.Tensor:
    from specforge.algorithms.common.dflash_family_model import OnlineDFlashModel
    from specforge.modeling.draft.dflash import extract_context_feature

    inputs = extract_context_feature([*hidden], head.target_layer_ids)
    rows = padded(token_ids, BLOCK_SIZE)[None]
    head.config._attn_implementation = "eager"
    training = OnlineDFlashModel(
        head, target.lm_head, target.get_input_embeddings(), MASK, BLOCK_SIZE, attention_backend="eager"
    )
    anchor = torch.tensor([[len(token_ids) - 1]]), torch.tensor([[True]])
    training._sample_anchor_positions = lambda *args: anchor
    with torch.no_grad():
        output = training._forward_draft_blocks(rows, padded(inputs, BLOCK_SIZE + 1)[None], torch.ones(1))
        return target.lm_head(output[-1][0, 1:])


if __name__ == "__main__":
    main(sys.argv[1])
