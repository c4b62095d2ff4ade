"""Generates a few tokens under a grammar. This module is used by targets and is not a target."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import lru_cache

import numpy as np

from drift_sdk.grammars import Grammar
from drift_sdk.testing import EOS_TOKEN_ID, byte_tokenizer
from drift_sdk.text.grammar import constrain
from drift_sdk.text.tokenizer import Tokenizer

NUM_TOKENS = 40


@lru_cache(1)
def tokenizer() -> Tokenizer:
    return byte_tokenizer()


def follow(make: Callable[[], Grammar]) -> bytes:
    """Text of the grammar: random bytes that its masks allow, up to its end or to `NUM_TOKENS` bytes."""
    choice = random.Random(0)
    constraint = constrain(make(), tokenizer(), vocab_size=EOS_TOKEN_ID + 1, eos_token_ids=(EOS_TOKEN_ID,))
    text = bytearray()
    while len(text) < NUM_TOKENS:
        row = constraint.masks(())[0]
        allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()
        assert allowed
        token_id = choice.choice(allowed)
        if token_id == EOS_TOKEN_ID:
            break

        assert constraint.masks((token_id,)).shape[0] == 2
        constraint.advance((token_id,))
        text.append(token_id)

    return bytes(text)
