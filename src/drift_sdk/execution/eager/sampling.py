"""From logits to tokens in plain torch: the rules of slots, filters, Gumbel noise, log-probabilities.

The eager executor samples with it, and it is the reference of the kernels. Rules are biases, penalties and
masks that apply before a token is sampled. Functions of logits do not change their arguments (`count_tokens`
excepted), and a row's result depends on that row alone: rows have parameters of their own.

Gumbel noise is a function of (seed, position, token id) and of nothing else, as it is in the kernels'
`gumbel`. Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") has the 64-bit
seed as its key and (token id // 4, position, 0, 0) as its counter; word token id % 4 of the output is the
token's.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from msgspec.structs import replace
from numpy.typing import NDArray
from torch import Tensor

from drift_sdk.errors import RequestError, error_repr
from drift_sdk.processors import LogitsFunction
from drift_sdk.results import TokenLogprobs
from drift_sdk.steps import SlotAssignment, SlotSampling

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


class LogitsProcessors:
    """The logits rules of one slot, with their tensors on the device. `of` returns None for a slot without
    rules.

    stop_ids:       [N] int64.
    bias_ids, bias: [N] int64 and [N] fp32.
    is_allowed:     [V] bool; None = all tokens.
    is_in_prompt:   [V] bool, tokens of the prompt; [0] without penalties.
    output_counts:  [V] int32, how often each token was generated; [0] without penalties.
    """

    def __init__(self, assignment: SlotAssignment, vocab_size: int, device: torch.device) -> None:
        def tensor(values: Sequence[int] | Sequence[float], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        sampling = assignment.sampling
        self.sampling = sampling
        self.constraint = assignment.constraint
        self.functions = assignment.functions
        self.output_ids: list[int] = []  # with functions
        self.stop_ids: torch.Tensor = tensor(sampling.stop_token_ids, torch.int64)
        self.bias_ids: torch.Tensor = tensor([token_id for token_id, _ in sampling.logit_bias], torch.int64)
        self.bias: torch.Tensor = tensor([addend for _, addend in sampling.logit_bias], torch.float32)
        self.is_allowed: Tensor | None = None
        if sampling.allowed_token_ids is not None:
            self.is_allowed = torch.zeros(vocab_size, dtype=torch.bool, device=device)
            self.is_allowed[tensor(sampling.allowed_token_ids, torch.int64)] = True

        num_counted = vocab_size if sampling.has_penalties else 0
        self.is_in_prompt: torch.Tensor = torch.zeros(num_counted, dtype=torch.bool, device=device)
        self.output_counts: torch.Tensor = torch.zeros(num_counted, dtype=torch.int32, device=device)
        self.count(assignment.cached_token_ids, 0)
        self.begin_step()

    @classmethod
    def of(cls, assignment: SlotAssignment, vocab_size: int, device: torch.device) -> LogitsProcessors | None:
        """The rules of a slot; None if it has none."""
        sampling = assignment.sampling
        has_rules = (
            sampling.has_penalties
            or bool(sampling.logit_bias)
            or (bool(sampling.stop_token_ids) and sampling.min_length > sampling.num_prompt_tokens)
            or sampling.allowed_token_ids is not None
            or assignment.constraint is not None
            or bool(assignment.functions)
        )
        return cls(assignment, vocab_size, device) if has_rules else None

    def count(self, token_ids: Sequence[int], start: int) -> None:
        """Count tokens of the prompt or of the output, at positions from `start` on, for the penalties and
        functions."""
        if self.functions:
            self.output_ids += token_ids[max(0, self.sampling.num_prompt_tokens - start) :]
        if not token_ids or not self.sampling.has_penalties:
            return

        ids = torch.tensor(token_ids, dtype=torch.int64, device=self.output_counts.device)
        num_prompt_ids = max(0, self.sampling.num_prompt_tokens - start)
        self.is_in_prompt[ids[:num_prompt_ids]] = True
        count_tokens(self.output_counts, ids[num_prompt_ids:])

    def begin_step(self, draft_token_ids: Sequence[int] = ()) -> None:
        """Prepare for a step that samples a token at its first row and, while they agree, after each draft
        token."""
        self._draft_token_ids = draft_token_ids
        self._masks: NDArray[np.int32] | None = None
        self._num_chosen = 0

    def append(self, token_id: int, position: int) -> None:
        """Count a token that was just sampled; the next row of the step follows."""
        self._num_chosen += 1
        self.count((token_id,), position)

    @property
    def mask(self) -> NDArray[np.int32]:
        """The constraint's mask at the current row of the step: [ceil(V / 32)] int32, see `TokenConstraint`.

        Rows after a draft token that the constraint forbids are never reached, because no such token is
        sampled.
        """
        assert self.constraint is not None
        # Computed once for all rows: for each row alone, the constraint would process all draft tokens before
        # it again.
        if self._masks is None:
            self._masks = self.constraint.masks(self._draft_token_ids)

        row: NDArray[np.int32] = self._masks[self._num_chosen]
        return row

    def is_short(self, length: int) -> bool:
        """Whether a sequence of this length is too short to stop."""
        return length < self.sampling.min_length

    def forbids(self, length: int) -> bool:
        """Whether any token may be forbidden in a sequence of this length."""
        return self.is_short(length) or self.is_allowed is not None or self.constraint is not None


def apply_processors(
    logits: Tensor, rules: Sequence[LogitsProcessors | None], lengths: Sequence[int]
) -> Tensor:
    """logits [M, V] fp32 after the rules of each row; the same tensor if no row has any.

    lengths: the number of tokens of each row's sequence.

    The order is that of transformers' `generate`: biases; repetition, frequency and presence penalties; then
    all rules that forbid tokens.
    """
    rows = [row for row, rule in enumerate(rules) if rule is not None]
    if not rows:
        return logits

    ruled = [rule for rule in rules if rule is not None]
    changed = _add_biases(logits[rows], ruled)
    changed = _penalise(changed, ruled)
    changed = _forbid(changed, ruled, [lengths[row] for row in rows])
    return _replace_rows(logits, rows, changed)


def apply_functions(
    logits: Tensor, rules: Sequence[LogitsProcessors | None]
) -> tuple[Tensor, dict[int, RequestError]]:
    """logits [M, V] fp32 after the functions of each row, and the errors of functions, by row: its logits are
    left as they were."""
    errors: dict[int, RequestError] = {}
    rows: list[int] = []
    changed: list[Tensor] = []
    for row, rule in enumerate(rules):
        if rule is None or not rule.functions:
            continue

        try:
            values = called(rule.functions, rule.output_ids, logits[row])
        except BaseException as error:  # also SystemExit, which would end the engine's thread
            errors[row] = RequestError(f"logits_processors: {error_repr(error)}", field="logits_processors")
            errors[row].__cause__ = error
        else:
            rows.append(row)
            changed.append(values)
    return (_replace_rows(logits, rows, torch.stack(changed)) if rows else logits), errors


def called(functions: Sequence[LogitsFunction], output_ids: Sequence[int], logits: Tensor) -> Tensor:
    """Logits [V] after functions. ValueError for a result that is no such row."""
    values = logits.cpu().numpy().copy()
    for function in functions:
        found = function(tuple(output_ids), values)
        # A function that returns nothing may have given the array itself another shape or type.
        result = np.asarray(values if found is None else found)
        if result.dtype.kind not in "biuf" or result.shape != tuple(logits.shape):
            expected = f"real numbers [{logits.shape[0]}]"
            raise ValueError(f"a result of {result.dtype} {list(result.shape)}: expected {expected}")

        values = result.astype(np.float32)  # a copy: the next function may change it

    if np.isnan(values).any() or not (values > -np.inf).any() or (values == np.inf).any():
        raise ValueError("expected logits that are finite or -inf, at least one of them finite")

    return torch.from_numpy(values).to(logits.device)


def _add_biases(logits: Tensor, rules: list[LogitsProcessors]) -> Tensor:
    token_ids = torch.cat([rule.bias_ids for rule in rules])
    if token_ids.numel() == 0:
        return logits

    bias = torch.cat([rule.bias for rule in rules])
    return add_bias(logits, _rows_of([rule.bias_ids for rule in rules]), token_ids, bias)


def _penalise(logits: Tensor, rules: list[LogitsProcessors]) -> Tensor:
    rows = [row for row, rule in enumerate(rules) if rule.sampling.has_penalties]
    if not rows:
        return logits

    def column(name: str) -> Tensor:
        values = [getattr(rules[row].sampling, name) for row in rows]
        return torch.tensor(values, dtype=torch.float32, device=logits.device)

    counts = torch.stack([rules[row].output_counts for row in rows])
    is_seen = torch.stack([rules[row].is_in_prompt for row in rows]) | (counts > 0)
    changed = penalise_repetition(logits[rows], is_seen, column("repetition_penalty"))
    changed = penalise_counts(changed, counts, column("frequency_penalty"), column("presence_penalty"))
    return _replace_rows(logits, rows, changed)


def _forbid(logits: Tensor, rules: list[LogitsProcessors], lengths: list[int]) -> Tensor:
    rows = [row for row, rule in enumerate(rules) if rule.forbids(lengths[row])]
    if not rows:
        return logits

    # If no token remains, `is_kept_at_least` applies instead: stop ids are allowed again, and a constraint
    # takes precedence over allowed ids.
    stop_ids = [rules[row].stop_ids[: None if rules[row].is_short(lengths[row]) else 0] for row in rows]
    num_rows, vocab_size = len(rows), logits.shape[-1]
    is_kept = ~select_tokens(num_rows, vocab_size, _rows_of(stop_ids), torch.cat(stop_ids))
    is_kept_at_least = torch.ones_like(is_kept)

    allowed = [index for index, row in enumerate(rows) if rules[row].is_allowed is not None]
    if allowed:
        mask = torch.stack([mask for index in allowed if (mask := rules[rows[index]].is_allowed) is not None])
        is_kept[allowed] &= mask
        is_kept_at_least[allowed] = mask

    constrained = [index for index, row in enumerate(rows) if rules[row].constraint is not None]
    if constrained:
        words = np.stack([rules[rows[index]].mask for index in constrained])
        mask = unpack_mask(torch.from_numpy(words).to(logits.device), vocab_size)
        is_kept[constrained] &= mask
        is_kept_at_least[constrained] = mask

    return _replace_rows(logits, rows, mask_logits(logits[rows], is_kept, is_kept_at_least))


def _replace_rows(logits: Tensor, rows: list[int], changed: Tensor) -> Tensor:
    return logits.index_copy(0, torch.tensor(rows, dtype=torch.int64, device=logits.device), changed)


def _rows_of(parts: list[Tensor]) -> Tensor:
    """For each element of the concatenated parts, the index of its part: [N] int64."""
    sizes = [part.numel() for part in parts]
    lengths = torch.tensor(sizes, dtype=torch.int64, device=parts[0].device)
    return torch.arange(len(parts), device=lengths.device).repeat_interleave(lengths)


CUT_OFF = 1e6
"""Subtracted from the scores of tokens that filters cut off, so that they rank after the others."""


def choose(logits: Tensor, samplings: Sequence[SlotSampling], positions: Sequence[int]) -> Tensor:
    """Sample a token from each row of logits [M, V] fp32.

    positions: of the tokens in their sequences, from 0; part of the key of the random numbers.

    Returns [M] int64.
    """

    def column(values: Sequence[float] | Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=logits.device)

    return sample(
        logits,
        temperature=column([sampling.temperature for sampling in samplings], torch.float32),
        top_k=column([sampling.top_k for sampling in samplings], torch.int64),
        top_p=column([sampling.top_p for sampling in samplings], torch.float32),
        min_p=column([sampling.min_p for sampling in samplings], torch.float32),
        seed=column([sampling.seed for sampling in samplings], torch.int64),
        position=column(positions, torch.int64),
    )


def rank(
    logits: Tensor, samplings: Sequence[SlotSampling], positions: Sequence[int], num_candidates: int
) -> tuple[list[list[int]], list[list[float]]]:
    """The tokens that `choose` is most likely to choose from logits like these [M, V] fp32.

    Returns, for each row, `num_candidates` different ids, best first, and the logarithms of their
    probabilities. The first is the token that `choose` chooses. Scores are logits / temperature + noise, so
    candidates are ordered by the noise by which the target will choose.
    """

    def column(values: Sequence[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=logits.device)

    temperature = column([each.temperature for each in samplings], torch.float32)
    rows = (temperature > 0).nonzero().flatten().tolist()
    scores = logits
    if rows:
        sampled = [samplings[row] for row in rows]
        scaled = (logits[rows] - logits[rows].amax(dim=-1, keepdim=True)) / temperature[rows, None]
        kept = filter_logits(
            scaled,
            column([each.top_k for each in sampled], torch.int64),
            column([each.top_p for each in sampled], torch.float32),
            column([each.min_p for each in sampled], torch.float32),
        )
        seeds = column([each.seed for each in sampled], torch.int64)
        noise = gumbel_noise(seeds, column([positions[row] for row in rows], torch.int64), logits.shape[-1])
        is_cut_off = (kept == -torch.inf) & (scaled > -torch.inf)
        noisy = scaled + noise - CUT_OFF * is_cut_off.to(torch.float32)
        scores = logits.index_copy(0, column(rows, torch.int64), noisy)

    top = scores.log_softmax(dim=-1).topk(num_candidates, dim=-1)
    return top.indices.tolist(), top.values.tolist()


def token_logprobs(
    logits: Tensor, tokens: Tensor, wanted: Sequence[int | None]
) -> list[TokenLogprobs | None]:
    """The log-probabilities of tokens [M] under logits [M, V], and of the most likely tokens.

    wanted: for each row the number of most likely tokens; None = no entry, returned as None.
    """
    rows = [row for row, num_top in enumerate(wanted) if num_top is not None]
    entries: list[TokenLogprobs | None] = [None] * len(wanted)
    if not rows:
        return entries

    most = max(num_top for num_top in wanted if num_top is not None)
    chosen, top_ids, top_values = top_logprobs(logits[rows], tokens[rows], most)
    for row, token, logprob, ids, values in zip(
        rows, tokens[rows].tolist(), chosen.tolist(), top_ids.tolist(), top_values.tolist(), strict=True
    ):
        num_top = wanted[row]
        top = tuple(zip(ids[:num_top], values[:num_top], strict=True))
        entries[row] = TokenLogprobs(token_id=token, logprob=logprob, top=top)

    return entries


def with_given(
    entries: Sequence[TokenLogprobs | None], logits: Tensor, wanted: Sequence[tuple[int, ...]]
) -> list[TokenLogprobs | None]:
    """The entries of rows of logits [M, V] with the log-probabilities of given tokens. wanted: of each row,
    the ids."""
    found = list(entries)
    for row, (entry, token_ids) in enumerate(zip(entries, wanted, strict=True)):
        if entry is not None and token_ids:
            values = logits[row].log_softmax(dim=-1)[list(token_ids)].tolist()
            found[row] = replace(entry, given=tuple(zip(token_ids, values, strict=True)))

    return found
