"""The policy of drafts: how many tokens to draft, by measured tokens and seconds of rounds.

Partial verification is judged by tokens a second, by rounds over views and refreshes and by whole rounds. A
round over n keys takes its measured time and n times the seconds of a key, which are learned from whole
rounds of long sequences. A cycle of partial verification is as many rounds over views as fill the pending
rows, and a refresh.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate

from msgspec import Struct

from drift_sdk.results import SpeculationStats
from drift_sdk.steps import StepPlan, StepResult, Verification
from drift_sdk.trees import MAX_PATH_LENGTH, max_batch_drafts


class DraftPolicy:
    """Chooses the number of draft tokens of a batch, one for all its rows.

    A round with k draft tokens emits 1 + r1 + r1 r2 + ... + r1 ... rk tokens a slot on average, where r_i is
    the acceptance rate of draft token i given that those before it were accepted. The number with the most
    tokens a second is chosen. The others are tried again from time to time, the less often the more time that
    is expected to lose, so every choice is revised.

    choices:      numbers of draft tokens that the executor can run; 0 is added.
    round_costs:  seconds of a round by (bucket of slots, draft tokens), measured before serving. If empty,
                  the first rounds try every number.
    is_adaptive:  choose as described; False: always the largest number.
    has_trees:    drafts form trees. A round with k draft tokens has the k best nodes of a tree, and emits 1 +
                  p1 + ... + pk tokens a slot on average, where p_i is the probability that node i is
                  accepted. Of the numbers, only those apply with which the trees of a batch have no more
                  nodes together than a round may have (`MAX_TREE_ROWS`); without any, nothing is drafted.
    view_costs:   of partial verification; None without it. Rounds over views have costs of their own, and
                  always draft.
    """

    def __init__(
        self,
        choices: Sequence[int],
        round_costs: Mapping[tuple[int, int], float] = {},
        *,
        is_adaptive: bool,
        has_trees: bool = False,
        view_costs: ViewCosts | None = None,
    ) -> None:
        self._is_adaptive, self._has_trees = is_adaptive, has_trees
        self._choices = sorted({0, *choices})
        self._chains, self._trees = Acceptance(max(choices)), NodeAcceptance(max(choices))
        self._costs = RoundCosts(round_costs)
        self._measured = dict(round_costs)
        self._gain = ViewGain(view_costs) if view_costs is not None else None
        self._view_costs = RoundCosts(round_costs)
        self._num_rounds: dict[int, int] = {}  # by bucket
        # Value of `_num_rounds` when a number was last chosen, by (bucket, number).
        self._tried_at: dict[tuple[int, int], int] = {}

    def wants_views(self, lengths: list[int]) -> bool:
        """Return True if rounds of sequences of these lengths should be verified over views: where that is
        expected to be faster, or wherever it is possible if costs were not measured."""
        gain = self._gain
        assert gain is not None, "no partial verification was configured"
        if not self._is_adaptive or not gain.is_measured:
            return True

        bucket = self._costs.bucket(len(lengths))
        whole = {
            choice: (self._chains.tokens_of_round(choice), self._measured[bucket, choice])
            for choice in self._choices
        }
        partial = {choice: self._view_costs.seconds(bucket, choice) for choice in self._choices}
        return gain.is_faster(lengths, bucket, whole, partial)

    def num_draft_tokens(self, num_slots: int, *, over_views: bool = False) -> int:
        """The number of draft tokens for the next round of `num_slots` slots."""
        choices, costs = self._choices, self._view_costs if over_views else self._costs
        if over_views:
            choices = choices[1:]
        if self._has_trees:
            most = max_batch_drafts(num_slots)
            choices = [choice for choice in choices if choice <= most]
        if not self._is_adaptive or len(choices) == 1:
            return choices[-1]

        bucket = self._costs.bucket(num_slots)
        self._num_rounds[bucket] = self._num_rounds.get(bucket, 0) + 1
        choice = self._choose(bucket, choices, costs)
        self._tried_at[bucket, choice] = self._num_rounds[bucket]
        return choice

    def observe(self, plan: StepPlan, result: StepResult, *, num_keys: int = 0) -> None:
        """Learn from the result of a step with decode rows. num_keys: of its sequences together.

        Its duration is used only if it had no prefill part. A slot's acceptance is used only if it emitted
        tokens and did not finish, because the end of a sequence may cut a round short.
        """
        most = max([row.num_draft_tokens for row in plan.decode])
        rows = [
            (row.num_draft_tokens, output)
            for row, output in zip(plan.decode, result.decode, strict=True)
            if most and output.token_ids and output.finish is None
        ]
        duration_s = None if plan.prefill else result.duration_s
        if not self._has_trees:
            slots = [(num_planned, output.num_accepted) for num_planned, output in rows]
            if self._gain is not None and duration_s is not None:
                duration_s = self._record_views(plan, most, duration_s, num_keys)
            self.record(len(plan.decode), most, duration_s, slots)
            return

        if self._is_adaptive:
            # The nodes of a tree that is a chain are numbered along it.
            nodes = [
                (num_planned, output.accepted_nodes or range(1, output.num_accepted + 1))
                for num_planned, output in rows
            ]
            self._trees.record(nodes)
            self._record_duration(len(plan.decode), most, duration_s)

    def record(
        self,
        num_slots: int,
        num_draft_tokens: int,
        duration_s: float | None,
        slots: Sequence[tuple[int, int]],
    ) -> None:
        """Learn from a round.

        num_draft_tokens:  the most planned for a slot.
        duration_s:        seconds of the round; None if unknown.
        slots:             numbers of (planned, accepted) draft tokens of the slots.
        """
        if self._is_adaptive:
            self._chains.record(slots)
            self._record_duration(num_slots, num_draft_tokens, duration_s)

    def _record_views(
        self, plan: StepPlan, num_draft_tokens: int, duration_s: float, num_keys: int
    ) -> float | None:
        """Learn the costs of partial verification from a round. Returns its seconds if it was a whole one."""
        num_run = next(choice for choice in self._choices if choice >= num_draft_tokens)
        bucket = self._costs.bucket(len(plan.decode))
        if plan.verification == "partial":
            self._view_costs.record(bucket, num_run, duration_s)
        if plan.verification != "whole":
            return None

        measured = self._measured.get((bucket, num_run))
        if self._gain is not None and measured is not None:
            self._gain.record_whole(num_keys, duration_s - measured)
        return duration_s

    def _record_duration(self, num_slots: int, num_draft_tokens: int, duration_s: float | None) -> None:
        if duration_s is not None:
            # The executor runs the next larger number it has a graph for.
            num_run = next(choice for choice in self._choices if choice >= num_draft_tokens)
            self._costs.record(self._costs.bucket(num_slots), num_run, duration_s)

    def _choose(self, bucket: int, choices: Sequence[int], costs: RoundCosts) -> int:
        """Of these numbers, one that was never timed, one that is due to be tried again, or the best one."""
        untried = [choice for choice in choices if not costs.is_known(bucket, choice)]
        if untried:
            return untried[-1]

        acceptance = self._trees if self._has_trees else self._chains
        seconds = {choice: costs.seconds(bucket, choice) for choice in choices}
        tokens = {choice: acceptance.tokens_of_round(choice) for choice in choices}
        best = max(choices, key=lambda choice: tokens[choice] / seconds[choice])
        for choice in choices:
            # Time lost by such a round, in rounds of `best`: it replaces tokens / tokens of `best` of them.
            lost = seconds[choice] / seconds[best] - tokens[choice] / tokens[best]
            gap = (len(choices) - 1) * lost / PROBE_SHARE
            gap = min(max(gap, MIN_PROBE_GAP), MAX_PROBE_GAP)
            if choice != best and self._num_rounds[bucket] - self._tried_at.get((bucket, choice), 0) >= gap:
                return choice

        return best


class DraftCount:
    """The numbers of drafted and accepted tokens of a request, or of an engine."""

    def __init__(self) -> None:
        self._num_drafted = 0
        self._verifications = Counter[Verification]()
        self._ngrams = [0, 0, 0]  # rounds, drafted and accepted tokens of them that were n-grams
        # Number of rounds by accepted tokens, from 0 to the most tokens ever drafted in a round; no more than
        # a path of a tree can have.
        self._num_rounds_of = [0]

    def add(
        self,
        num_drafted: int,
        num_accepted: int,
        *,
        is_ngram: bool = False,
        verification: Verification = "whole",
    ) -> None:
        """Count a round of one slot. One without drafted tokens is ignored, except for its verification.
        is_ngram: of `SlotOutput`. verification: of `StepPlan`."""
        if verification != "whole":
            self._verifications[verification] += 1
        if num_drafted == 0:
            return

        self._num_drafted += num_drafted
        if is_ngram:
            added = (1, num_drafted, num_accepted)
            self._ngrams = [total + more for total, more in zip(self._ngrams, added, strict=True)]
        most = min(num_drafted, MAX_PATH_LENGTH)
        if most >= len(self._num_rounds_of):
            self._num_rounds_of += [0] * (most + 1 - len(self._num_rounds_of))
        self._num_rounds_of[num_accepted] += 1

    def stats(self) -> SpeculationStats:
        """The counts so far."""
        # Entry i: the number of rounds that accepted i tokens or more.
        num_rounds, *accepted_at = [*accumulate(reversed(self._num_rounds_of))][::-1]
        return SpeculationStats(
            num_rounds=num_rounds,
            num_drafted=self._num_drafted,
            num_accepted=sum(accepted_at),
            accepted_at=tuple(accepted_at),
            num_ngram_rounds=self._ngrams[0],
            num_ngram_drafted=self._ngrams[1],
            num_ngram_accepted=self._ngrams[2],
            num_partial_rounds=self._verifications["partial"],
            num_refresh_rounds=self._verifications["refresh"],
        )


MEMORY = 0.99
"""Factor that every round applies to the weights of earlier trials."""
PRIOR_RATE = 0.6
"""Rate assumed before the first trial."""
MIN_WEIGHT = 4.0
"""Weight, in trials, of the assumed rate and of trials long ago."""
MAX_WEIGHT = 400.0
"""Largest weight of earlier trials: enough for a certain rate, and little enough that a large batch replaces
it within a few rounds."""


class Acceptance:
    """The acceptance rate of each position in a draft, given that all positions before it were accepted.

    Each rate has a weight, in trials. Weights decrease with every round; a rate changes only with new trials.
    """

    def __init__(self, num_positions: int) -> None:
        self._rates = [PRIOR_RATE] * num_positions
        self._weights = [MIN_WEIGHT] * num_positions

    def tokens_of_round(self, num_draft_tokens: int) -> float:
        """The expected number of tokens that a slot emits in a round with so many draft tokens: accepted ones
        and the one that the target adds."""
        total = reached = 1.0
        for rate in self._rates[:num_draft_tokens]:
            reached *= rate
            total += reached

        return total

    def record(self, slots: Sequence[tuple[int, int]]) -> None:
        """Add the trials of a round, from the numbers of (planned, accepted) draft tokens of every slot.

        A draft token that was planned but not proposed counts as rejected.
        """
        num_positions = len(self._rates)
        hits, trials = [0] * num_positions, [0] * num_positions
        for (num_planned, num_accepted), num_slots in Counter(slots).items():
            for position in range(min(num_accepted + 1, num_planned)):
                hits[position] += num_slots if position < num_accepted else 0
                trials[position] += num_slots

        for position, weight in enumerate(self._weights):
            faded = min(max(weight * MEMORY, MIN_WEIGHT), MAX_WEIGHT)
            total = faded + trials[position]
            self._rates[position] += (hits[position] - self._rates[position] * trials[position]) / total
            self._weights[position] = total


class NodeAcceptance:
    """The probability that each node of a tree of drafts is accepted, by the node's number.

    Nodes are numbered in the order in which they are preferred, and a round with fewer drafts takes the first
    of them, so rounds of any size are trials of the same probabilities. Until measured, node i counts as
    accepted with probability `PRIOR_RATE` / i. Weights as of `Acceptance`.
    """

    def __init__(self, num_nodes: int) -> None:
        self._rates = [PRIOR_RATE / node for node in range(1, num_nodes + 1)]
        self._weights = [MIN_WEIGHT] * num_nodes

    def tokens_of_round(self, num_draft_tokens: int) -> float:
        """The expected number of tokens that a slot emits in a round with so many draft tokens."""
        return 1.0 + sum(self._rates[:num_draft_tokens])

    def record(self, slots: Sequence[tuple[int, Sequence[int]]]) -> None:
        """Add the trials of a round, from the number of planned draft tokens and the accepted nodes (from 1)
        of every slot.

        A draft token that was planned but not proposed counts as rejected.
        """
        num_nodes = len(self._rates)
        hits, ends = [0] * num_nodes, [0] * (num_nodes + 1)
        for num_planned, accepted in slots:
            ends[num_planned] += 1
            for node in accepted:
                hits[node - 1] += 1

        # Node i was tried in the rounds that planned i draft tokens or more.
        trials = [*accumulate(reversed(ends[1:]))][::-1]
        for node, weight in enumerate(self._weights):
            faded = min(max(weight * MEMORY, MIN_WEIGHT), MAX_WEIGHT)
            total = faded + trials[node]
            self._rates[node] += (hits[node] - self._rates[node] * trials[node]) / total
            self._weights[node] = total


SMOOTHING = 0.1
"""Weight of the newest round in the excess time that all rounds of a bucket share."""
OWN_SMOOTHING = 0.2
"""Weight of a round in the time of its own number of draft tokens, if the one before had another number."""
MAX_SURPRISE = 0.5
"""Largest excess over the expected time that is taken into account, as a share of it: a slow round may have
been delayed by something else."""


class RoundCosts:
    """Seconds of a round by (bucket of slots, number of draft tokens).

    measured: times measured before serving, so with short contexts. Rounds while serving take longer, mostly
    in attention, by about the same time for any number of draft tokens. This excess is learned for the bucket
    as a whole. What remains of the difference is learned for each number, from rounds that follow one of
    another number: between two of the same number, only contexts have changed. If `measured` is empty, the
    times of each number are learned separately, and buckets are powers of two.
    """

    def __init__(self, measured: Mapping[tuple[int, int], float]) -> None:
        self._costs = dict(measured)
        self._is_measured = bool(measured)
        self._buckets = sorted({bucket for bucket, _ in measured})
        self._excess: dict[int, float] = {}  # seconds beyond the measured time, by bucket
        self._latest: dict[int, int] = {}  # number of draft tokens of the latest round, by bucket

    def bucket(self, num_slots: int) -> int:
        """The smallest measured bucket that holds so many slots, else the next power of two."""
        for bucket in self._buckets:
            if num_slots <= bucket:
                return bucket

        return 1 << max(num_slots - 1, 0).bit_length()

    def is_known(self, bucket: int, num_draft_tokens: int) -> bool:
        """Whether the round has been measured or recorded."""
        return (bucket, num_draft_tokens) in self._costs

    def seconds(self, bucket: int, num_draft_tokens: int) -> float:
        """The expected seconds of a known round."""
        return self._costs[bucket, num_draft_tokens] + self._excess.get(bucket, 0.0)

    def record(self, bucket: int, num_draft_tokens: int, duration_s: float) -> None:
        """Update the expectation with a round that took `duration_s` seconds."""
        key = bucket, num_draft_tokens
        latest, self._latest[bucket] = self._latest.get(bucket), num_draft_tokens
        if key not in self._costs:
            self._costs[key] = duration_s
            return

        expected = self.seconds(*key)
        # A slow round, even the first of its kind, may have been delayed by something else; a fast one cannot
        # be an accident, so it counts in full.
        surprise = min(duration_s - expected, MAX_SURPRISE * expected)
        is_fast = duration_s < expected / 2
        weight = 1.0 if is_fast else SMOOTHING
        if not self._is_measured:
            self._costs[key] += weight * surprise
        elif bucket not in self._excess:
            self._excess[bucket] = max(duration_s - expected, 0.0)
        else:
            self._excess[bucket] = max(self._excess[bucket] + weight * surprise, 0.0)
            if latest != num_draft_tokens and not is_fast:
                self._costs[key] += OWN_SMOOTHING * surprise


MIN_GAIN = 1.03
"""Least ratio of speeds for which views are used: a change between both costs a refresh."""


class ViewCosts(Struct, frozen=True, kw_only=True):
    """Measured costs of partial verification.

    refresh_tokens: most pending rows.
    view_tokens:    keys of a view.
    refresh_reads:  times that a refresh reads the keys and values of a sequence.
    refresh_costs:  seconds of a refresh without context, by slots, as measured before serving; if it is
                    empty, views are used wherever they can be.
    """

    refresh_tokens: int
    view_tokens: int
    refresh_reads: float = 1.0
    refresh_costs: Mapping[int, float] = {}


class ViewGain:
    """Compares rounds over views with whole ones."""

    def __init__(self, costs: ViewCosts) -> None:
        self._costs = costs
        self._key_seconds: float | None = None

    @property
    def is_measured(self) -> bool:
        """True if costs were measured, so that speeds can be compared."""
        return bool(self._costs.refresh_costs)

    def record_whole(self, num_keys: int, seconds: float) -> None:
        """Learn from a whole round of so many keys, which took so many seconds more than without context."""
        if num_keys < 2 * self._costs.view_tokens:
            return  # what a round takes beside its keys would be counted as theirs

        found = max(seconds, 0.0) / num_keys
        known = found if self._key_seconds is None else self._key_seconds
        self._key_seconds = known + SMOOTHING * (found - known)

    def is_faster(
        self,
        lengths: list[int],
        bucket: int,
        whole: Mapping[int, tuple[float, float]],
        partial_seconds: Mapping[int, float],
    ) -> bool:
        """Return True if sequences of these lengths gain by partial verification.

        bucket: of slots. whole: by number of drafts, the tokens that a round emits and its seconds without
        context. partial_seconds: by number of drafts, the seconds of a round over views, as far as they are
        known.
        """
        key_seconds, costs = self._key_seconds, self._costs
        if key_seconds is None:
            return False  # whole rounds show it

        num_keys = sum(lengths)
        num_viewed = sum(min(length, costs.view_tokens) for length in lengths)
        best_whole = max(tokens / (seconds + key_seconds * num_keys) for tokens, seconds in whole.values())
        refresh_seconds = costs.refresh_costs[bucket] + costs.refresh_reads * key_seconds * num_keys
        best_partial = 0.0
        for number, (tokens, seconds) in whole.items():
            if number == 0:
                continue

            # Views read more than expected where their blocks are small.
            round_seconds = max(seconds + key_seconds * num_viewed, partial_seconds.get(number, 0.0))
            num_rounds = max((costs.refresh_tokens - number) / tokens, 1.0)
            cycle = num_rounds * round_seconds + refresh_seconds
            best_partial = max(best_partial, (num_rounds + 1) * tokens / cycle)

        return best_partial > MIN_GAIN * best_whole


PROBE_SHARE = 0.005
"""Share of the time that may be lost to rounds that try numbers expected to be worse."""
MIN_PROBE_GAP = 16
MAX_PROBE_GAP = 1000
"""Fewest and most rounds of a bucket between two tries of the same number."""
