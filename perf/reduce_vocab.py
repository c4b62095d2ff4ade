"""Reduce a draft's vocabulary to its most frequent tokens, so that its head multiplies fewer rows.

    python -m perf.reduce_vocab DRAFT OUTPUT --size 16000 --frequencies counts.json
    python -m perf.reduce_vocab DRAFT OUTPUT --size 16000 --texts a.txt b.txt --tokenizer TARGET --keep 128009

counts.json is an object from token ids to counts. If the draft has its own head, rows of the head are
removed; if it uses the target's head, only the list of ids changes. The draft proposes other tokens;
generated tokens stay the same.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import save

from drift_sdk.errors import ModelLoadError
from drift_sdk.loading.draft import OFFSETS, PROPOSABLE, DraftTensors, read_target_ids
from drift_sdk.loading.source import resolve
from drift_sdk.models.draft_config import draft_settings

__all__ = ["choose_ids", "main", "reduce_vocabulary"]

HEAD = "lm_head.weight"
VOCABULARY_KEYS = ("draft_vocab_size", "truncated_vocab_size")


def choose_ids(
    available: Sequence[int], counts: Mapping[int, int], size: int, keep: Collection[int] = ()
) -> list[int]:
    """`size` of the available ids, in ascending order.

    Ids in `keep` are chosen first, then those with the highest counts, then those with the lowest ids. Raises
    ValueError for a size that is too small or too large, and for an id to keep that is not available.
    """
    missing = sorted(set(keep) - set(available))
    if missing:
        raise ValueError(f"keep={missing}: expected ids that the draft proposes")

    if not len(set(keep)) <= size <= len(available) or size < 1:
        least = max(1, len(set(keep)))
        raise ValueError(f"size={size}: expected {least} (ids to keep) to {len(available)} (ids available)")

    kept = set(keep)
    ranked = sorted(available, key=lambda token: (token not in kept, -counts.get(token, 0), token))
    return sorted(ranked[:size])


def reduce_vocabulary(
    folder: Path, output: Path, counts: Mapping[int, int], size: int, keep: Collection[int] = ()
) -> list[int]:
    """Write the draft in `folder`, with a vocabulary of `size`, into `output`.

    Returns the target's ids that it can propose. Raises ModelLoadError for a broken draft, ValueError as
    `choose_ids`, FileExistsError if `output` exists and is not an empty folder.
    """
    config = resolve(folder).config
    settings, tensors = draft_settings(config), DraftTensors(folder)
    vocab_size = settings["vocab_size"]
    draft_vocab_size = next((settings[key] for key in VOCABULARY_KEYS if key in settings), vocab_size)
    available = read_target_ids(tensors, vocab_size, draft_vocab_size)
    ids = torch.tensor(choose_ids(available.tolist(), counts, size, keep), dtype=torch.int64)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise FileExistsError(f"{output} is not an empty folder")

    reduced = {
        name: tensors.get(name).clone(memory_format=torch.contiguous_format) for name in tensors.names()
    }
    if HEAD in reduced:
        reduced[HEAD] = reduced[HEAD][torch.searchsorted(available, ids)]
    elif settings.get("tie_word_embeddings") and "embed_tokens.weight" in reduced:
        reduced[HEAD] = reduced["embed_tokens.weight"][ids]

    reduced[OFFSETS] = ids - torch.arange(len(ids))
    reduced[PROPOSABLE] = torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    output.mkdir(parents=True, exist_ok=True)
    # Not by save_file, whose files no other user may read.
    (output / "model.safetensors").write_bytes(save(reduced, metadata={"format": "pt"}))
    for table in (config, config.get("eagle_config") or {}, config.get("transformer_layer_config") or {}):
        for key in VOCABULARY_KEYS:
            table.pop(key, None)

    config["draft_vocab_size"] = len(ids)
    (output / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    tokens: list[int] = ids.tolist()
    return tokens


def count_tokens(model: str, texts: Sequence[Path]) -> Counter[int]:
    """The number of occurrences of each token in the texts."""
    tokenizer = resolve(model).tokenizer()
    counts: Counter[int] = Counter()
    for text in texts:
        counts.update(tokenizer.encode(text.read_text(encoding="utf-8"), add_special_tokens=False))

    return counts


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("draft", type=Path, help="folder")
    parser.add_argument("output", type=Path, help="folder to write, empty or new")
    parser.add_argument("--size", type=int, required=True, help="tokens to keep")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--frequencies", type=Path, help="JSON object from token ids to counts")
    source.add_argument("--texts", type=Path, nargs="+", help="text files to count tokens in")
    parser.add_argument("--tokenizer", help="the target: folder, .gguf file or hub id; with --texts")
    parser.add_argument("--keep", type=int, nargs="*", default=[], help="ids to keep, whatever their counts")
    options = parser.parse_args(arguments)
    try:
        if options.frequencies is not None:
            stored = json.loads(options.frequencies.read_text(encoding="utf-8"))
            counts = {int(token): int(count) for token, count in stored.items()}
        elif options.tokenizer is not None:
            counts = count_tokens(options.tokenizer, options.texts)
        else:
            parser.error("--texts needs --tokenizer")

        ids = reduce_vocabulary(options.draft, options.output, counts, options.size, options.keep)
    except (ModelLoadError, OSError, ValueError) as error:
        parser.error(str(error))

    covered, total = sum(counts.get(token, 0) for token in ids), sum(counts.values())
    print(f"{options.output}: {len(ids)} tokens, {covered / max(total, 1):.2%} of {total} counted")


if __name__ == "__main__":
    main()
