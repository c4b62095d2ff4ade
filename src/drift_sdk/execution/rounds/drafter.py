"""The interfaces of drafters that draft inside the graphs of rounds: chains, and trees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from msgspec import Struct
from torch import Tensor

from drift_sdk._kernels.trees.tree_rows import RootTensors
from drift_sdk.execution.forward.caches import DraftKVCache, PagedKVCache
from drift_sdk.execution.forward.rows import HiddenStates, Rows
from drift_sdk.execution.rounds.tree_plan import TreePlan


class RoundSizes(Struct, frozen=True, kw_only=True):
    """Sizes of the largest steps that a drafter takes part in.

    max_num_slots: of a round. max_draft_tokens: of a round of chains. max_prefill_rows: of a prefill step.
    max_path_length: most drafts on a path of a tree. max_path_rows: most rows on accepted paths of a round of
    trees. max_growth_rows: most rows that the draft computes to grow the trees of a round. 0 without trees.
    """

    max_num_slots: int
    max_draft_tokens: int
    max_prefill_rows: int
    max_path_length: int = 0
    max_path_rows: int = 0
    max_growth_rows: int = 0


class VerifiedRows(Struct, frozen=True, kw_only=True):
    """The rows of a round of B slots, T of each, which the target has computed and sampled.

    rows [B * T]: as they were drafted. hidden: their residual stream. chosen [B * T] int32: the token sampled
    after each row. emitted [B] int32: how many of them each slot emitted, from its first row on; 0 for a slot
    of padding.
    """

    rows: Rows
    hidden: HiddenStates
    chosen: Tensor
    emitted: Tensor

    @property
    def num_slots(self) -> int:
        return self.emitted.shape[0]

    @property
    def num_draft_tokens(self) -> int:
        """Most drafts of a slot."""
        return self.chosen.shape[0] // self.num_slots - 1


class ComputedChunks(Struct, frozen=True, kw_only=True):
    """The rows of chunks of prompts that the target has computed. A slot's rows lie together.

    rows [N]: padding rows have slot -1. hidden: their residual stream. next_token [N] int32: the token after
    each row; -1: the sampled token, the slot's last_token [S]. hits [C] int32, C at least the number of
    chunks: the first row of each chunk whose predecessor was computed by no step, because it came from the
    prefix cache; -1: none.
    """

    rows: Rows
    hidden: HiddenStates
    next_token: Tensor
    hits: Tensor
    last_token: Tensor


class RoundDrafter(Protocol):
    """A drafter of the graph executor. Every method records kernels that read all they need from the device.

    A round of B slots with K drafts each has T = K + 1 rows a slot: row b * T holds the newest token, the
    rows after it hold the drafts. A row that its slot has no use for has slot -1.

    aux_layers: the target's layer boundaries whose residual stream the drafter reads, low to high.
    """

    aux_layers: Sequence[int]

    @property
    def is_ngram(self) -> Tensor | None:
        """int32, an entry for each slot of the largest round: 1 if the latest drafts of the round's slot are
        n-grams in place of a draft model's. None if the drafter has one kind of drafts."""

    @property
    def kv_cache(self) -> DraftKVCache | PagedKVCache | None:
        """Keys and values of the draft in the target's blocks; None if the drafter keeps none. The executor
        allocates them together with the target's."""

    def propose(self, rows: Rows, *, num_slots: int, num_draft_tokens: int) -> None:
        """Write drafted tokens to rows.token [B * T]. The slot of a row without a draft becomes -1."""

    def draft_extend(self, verified: VerifiedRows) -> None:
        """Update the drafter's state by the tokens that a round emitted."""

    def draft_extend_prefill(self, chunks: ComputedChunks) -> None:
        """Update the drafter's state by chunks of prompts."""


class TreeDrafter(Protocol):
    """A drafter of trees. Every method records kernels that read all they need from the device.

    A round of B trees with K drafts each has T = K + 1 rows a tree: row b * T holds the newest token of its
    slot, the rows after it hold the other nodes, a parent before its children. A row without a node has slot
    -1.

    plans: by K, of the rounds that draft trees.
    """

    plans: Mapping[int, TreePlan]

    @property
    def first_draft_slot(self) -> int:
        """The first cache slot of the draft behind its blocks, for nodes of trees."""

    def grow(self, rows: RootTensors, plan: TreePlan) -> None:
        """Write the nodes of trees to slot, token and parent of rows, which hold the roots."""

    def extend(self, rows: RootTensors, plan: TreePlan, verified: VerifiedRows, path: Tensor) -> None:
        """Update the drafter's state by the tokens that a round emitted. path [B, PATH_ENTRIES] int32: the
        nodes that tokens were emitted behind, then -1."""
