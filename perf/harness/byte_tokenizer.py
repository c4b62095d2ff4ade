"""Makes a tokenizer of any size for models without one.

Loading and decoding cost as much as with a real one.
"""

from __future__ import annotations

import itertools
import json
import string
from collections.abc import Iterator
from pathlib import Path

import tokenizers

__all__ = ["NUM_SPECIAL", "write_tokenizer"]

SPECIAL = ("<bos>", "<eos>")
NUM_SPECIAL = len(SPECIAL)
SPACE = "Ġ"  # represents a space in byte-level tokens


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write a byte-level BPE tokenizer: two special tokens, the 256 bytes, then artificial words.

    Raises ValueError if `vocab_size` is too small for the bytes.
    """
    pieces = [*SPECIAL, *sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())]
    if vocab_size < len(pieces):
        raise ValueError(f"vocab_size={vocab_size}: expected at least {len(pieces)}")

    words = list(itertools.islice(_words(), vocab_size - len(pieces)))
    vocab = {piece: index for index, piece in enumerate(pieces + words)}
    # Each word extends an earlier word by one letter, so it needs a single merge.
    merges = [(word[:-1], word[-1]) for word in words]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": SPECIAL[0], "eos_token": SPECIAL[1]}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def _words() -> Iterator[str]:
    for length in itertools.count(1):
        for letters in itertools.product(string.ascii_lowercase, repeat=length):
            yield SPACE + "".join(letters)
