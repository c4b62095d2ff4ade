"""Sampling in plain torch: penalties and masks, filters, Gumbel noise, log-probabilities.

The eager executor samples with it, and it is the reference of the kernels.

Counter-based Gumbel noise in plain torch: a function of (seed, position, token id) and of nothing else.

Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") with the 64-bit seed as its
key and (token id // 4, position, 0, 0) as its counter; word token id % 4 of the output is the token's. The
eager executor samples with it, and it is the reference of `gumbel`, the noise inside kernels.

The operations that change logits before a token is chosen: biases, penalties for tokens seen before,
masks.

In plain torch: the eager executor applies them, and they are the reference of `apply_logits_rules`. Each
works on the rows it is given and does not change its arguments (`count_tokens` excepted). A row's result
depends only on that row.
"""

from __future__ import annotations

import torch
from torch import Tensor

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


def add_bias(logits: Tensor, rows: Tensor, token_ids: Tensor, bias: Tensor) -> Tensor:
    """logits [M, V] fp32 with bias [N] fp32 added at (rows [N], token_ids [N]), both int64."""
    return logits.index_put((rows, token_ids), bias, accumulate=True)


def count_tokens(counts: Tensor, token_ids: Tensor) -> None:
    """Count each of token_ids [N] int64, which may repeat, in counts [V] int32, in place."""
    counts.index_add_(0, token_ids, torch.ones_like(token_ids, dtype=counts.dtype))


def penalise_repetition(logits: Tensor, is_seen: Tensor, penalty: Tensor) -> Tensor:
    """logits [M, V] fp32 divided by penalty [M] fp32 where is_seen [M, V] bool; multiplied where negative.

    Keskar et al. 2019, "CTRL", with the case of the sign as in transformers.
    """
    penalised = torch.where(logits < 0, logits * penalty[:, None], logits / penalty[:, None])
    return torch.where(is_seen, penalised, logits)


def penalise_counts(
    logits: Tensor, counts: Tensor, frequency_penalty: Tensor, presence_penalty: Tensor
) -> Tensor:
    """logits [M, V] fp32 minus frequency_penalty [M] times counts [M, V] int32, then minus
    presence_penalty [M] where the count is not 0. The formula of OpenAI's API."""
    logits = logits - frequency_penalty[:, None] * counts
    return logits - presence_penalty[:, None] * (counts > 0)


def select_tokens(num_rows: int, vocab_size: int, rows: Tensor, token_ids: Tensor) -> Tensor:
    """Bool [num_rows, vocab_size], true at (rows [N], token_ids [N]), both int64."""
    selected = torch.zeros(num_rows, vocab_size, dtype=torch.bool, device=rows.device)
    selected[rows, token_ids] = True
    return selected


def unpack_mask(words: Tensor, vocab_size: int) -> Tensor:
    """Bool [M, vocab_size] of words [M, ceil(vocab_size / 32)] int32: bit i % 32 of word i // 32 is i's."""
    # An arithmetic shift of a negative word fills it with ones from the left; only the lowest bit is kept.
    bits = (words[:, :, None] >> torch.arange(32, dtype=torch.int32, device=words.device)) & 1
    return bits.flatten(1)[:, :vocab_size].to(torch.bool)


def mask_logits(logits: Tensor, is_kept: Tensor, is_kept_at_least: Tensor) -> Tensor:
    """logits [M, V] with -inf where not is_kept [M, V] bool. In rows where is_kept holds for no token,
    is_kept_at_least [M, V] bool takes its place."""
    is_kept = torch.where(is_kept.any(dim=-1, keepdim=True), is_kept, is_kept_at_least)
    return logits.masked_fill(~is_kept, -torch.inf)


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    position: Tensor,
) -> Tensor:
    """One token id per row: int64 [M].

    logits [M, V] fp32; temperature, top_p, min_p [M] fp32; top_k, seed, position [M] int64, on one device.
    `position` is the absolute position of the token being chosen. Rows of temperature 0 take the arg max;
    the others the arg max of filtered logits / temperature + Gumbel noise, which samples the softmax. Ties
    go to the lowest id. A row's token depends only on that row.
    """
    tokens = logits.argmax(dim=-1)
    rows = (temperature > 0).nonzero().flatten()
    if rows.numel() == 0:
        return tokens

    # With the largest logit at zero, none overflows to infinity, at which several would tie, however low the
    # temperature.
    scaled = (logits[rows] - logits[rows].amax(dim=-1, keepdim=True)) / temperature[rows, None]
    kept = filter_logits(scaled, top_k[rows], top_p[rows], min_p[rows])
    noise = gumbel_noise(seed[rows], position[rows], logits.shape[-1])
    tokens[rows] = (kept + noise).argmax(dim=-1)
    return tokens


def filter_logits(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """logits [M, V] with -inf where top_k, then top_p, then min_p (each [M]) cut a token off.

    logits are scaled by the temperature already. Each filter is a threshold on the logit, so tokens that tie
    with the last one kept stay.
    """
    num_tokens = logits.shape[-1]
    needs_order = bool(((top_k > 0) & (top_k < num_tokens)).any() or (top_p < 1).any())
    if needs_order:
        ordered = logits.sort(dim=-1, descending=True).values
        last = torch.where(top_k > 0, top_k, num_tokens).clamp(max=num_tokens) - 1
        threshold = ordered.gather(-1, last[:, None])
        ordered = ordered.masked_fill(ordered < threshold, -torch.inf)
        probs = ordered.softmax(dim=-1)
        # A token stays while the probability of the tokens before it is under top_p; the first always does.
        before = probs.cumsum(dim=-1) - probs
        num_kept = ((before < top_p[:, None]) & (probs > 0)).sum(dim=-1).clamp(min=1)
        nucleus = ordered.gather(-1, num_kept[:, None] - 1)
        threshold = torch.where(top_p[:, None] < 1, torch.maximum(threshold, nucleus), threshold)
        logits = logits.masked_fill(logits < threshold, -torch.inf)

    if bool((min_p > 0).any()):
        floor = logits.max(dim=-1, keepdim=True).values + min_p[:, None].log()
        logits = logits.masked_fill(logits < floor, -torch.inf)

    return logits


def top_logprobs(logits: Tensor, tokens: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-softmax of raw logits [M, V] fp32 at tokens [M], and its `num_top` largest entries.

    Returns (token log-probability [M], top ids [M, num_top], top log-probabilities [M, num_top]).
    """
    logprobs = logits.log_softmax(dim=-1)
    top = logprobs.topk(min(num_top, logits.shape[-1]), dim=-1)
    return logprobs.gather(-1, tokens[:, None]).squeeze(-1), top.indices, top.values
