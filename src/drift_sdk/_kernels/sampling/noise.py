"""Counter-based Gumbel noise in plain torch: a function of (seed, position, token id) and of nothing else.

Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") with the 64-bit seed as its
key and (token id // 4, position, 0, 0) as its counter; word token id % 4 of the output is the token's. The
eager executor samples with it, and it is the reference of `gumbel`, the noise inside kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["gumbel_noise", "philox"]

ROUND_A, ROUND_B = 0xD2511F53, 0xCD9E8D57
"""Multipliers of a round, PHILOX_M4x32_0 and _1 of the paper."""
KEY_A, KEY_B = 0x9E3779B9, 0xBB67AE85
"""What each half of the key grows by in a round, PHILOX_W32_0 and _1: golden section and sqrt(3) - 1, times
2**32."""
LOW_BITS = 0xFFFFFFFF
"""The low 32 bits of an int64."""
NUM_ROUNDS = 10
"""Rounds of the paper's Philox4x32-10."""


def philox(seed: Tensor, counters: tuple[Tensor, Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Four words of 32 bits for each counter.

    seed and the four counter words: int64 tensors that broadcast together, counter words in [0, 2**32).
    Returns four int64 tensors in [0, 2**32).
    """
    c0, c1, c2, c3 = counters
    key_a, key_b = seed & LOW_BITS, (seed >> 32) & LOW_BITS
    for _ in range(NUM_ROUNDS):
        # int64 products wrap modulo 2**64, so both halves of the unsigned product are in the bits.
        product_a, product_b = c0 * ROUND_A, c2 * ROUND_B
        c0 = ((product_b >> 32) & LOW_BITS) ^ c1 ^ key_a
        c2 = ((product_a >> 32) & LOW_BITS) ^ c3 ^ key_b
        c1, c3 = product_b & LOW_BITS, product_a & LOW_BITS
        key_a, key_b = (key_a + KEY_A) & LOW_BITS, (key_b + KEY_B) & LOW_BITS

    return c0, c1, c2, c3


def gumbel_noise(seed: Tensor, position: Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel variates [M, vocab_size] in fp32 for seed [M] and position [M], both int64.

    Noise that decides an arg max is large, so it comes from small exponential variates: the uniform is kept
    precise near zero. u = (word + 1/2) / 2**32 in fp32, at most 1 - 2**-24, the last number before 1;
    E = -log(1 - u) through log1p; noise = -log(E).
    """
    num_counters = -(-vocab_size // 4)
    counters = torch.arange(num_counters, dtype=torch.int64, device=seed.device)
    zero = torch.zeros((), dtype=torch.int64, device=seed.device)
    words = philox(seed[:, None], (counters[None, :], position[:, None], zero, zero))
    bits = torch.stack([word.expand(seed.shape[0], num_counters) for word in words], dim=-1)
    uniform = bits.flatten(1)[:, :vocab_size].to(torch.float32) * 2.0**-32 + 2.0**-33
    uniform = uniform.clamp(max=1.0 - 2.0**-24)
    return -torch.log(-torch.log1p(-uniform))
