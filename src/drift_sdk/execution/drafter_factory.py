"""Speculation of an opened model: what its drafter needs, and the drafter of each executor.

Everything that depends on the kind of draft is decided here. Executors, scheduler and start-up read it from
the factory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

from drift_sdk.errors import ConfigError
from drift_sdk.execution.eager.drafters import (
    AssistantDrafter,
    DFlashDrafter,
    Drafter,
    EagleDrafter,
    HybridDrafter,
    ModelDrafter,
    NGramDrafter,
)
from drift_sdk.models.assistant import AssistantDecoder
from drift_sdk.models.decoder import Decoder
from drift_sdk.models.dflash import DFlashDecoder
from drift_sdk.models.draft_head import DraftDecoder
from drift_sdk.speculation import DynamicTree, NGram, StaticTree, TreePlan, tree_plan
from drift_sdk.steps import ExecutorLimits

if TYPE_CHECKING:
    from drift_sdk.execution.device.resources import DeviceResources
    from drift_sdk.execution.forward.caches import ModelResources
    from drift_sdk.execution.rounds.drafters import RoundDrafter, RoundSizes, TreeDrafter

MAX_MASK_HEAD = 256
"""Most dimensions of a head of attention whose rows are masks: what attention of trees has room for."""


class DrafterFactory(ABC):
    """Makes the drafter of an executor and states what it needs.

    kind: what drafts, in words of the log; empty without speculation.
    draft_choices: numbers of tokens that a round may draft, ascending, without 0; empty without speculation.
    is_adaptive: whether a batch drafts fewer tokens, or none, where that is measured to be faster.
    needs_history: the drafter reads the token at each position of a slot, those of prefix hits included.
    needs_draft_kv: the drafter keeps its own keys and values in the target's blocks, one position ahead of
    the target's.
    needs_first_token: the drafter computes a row for the first token of a sequence too.
    always_drafts: the drafter finds a token for every slot that may draft.
    max_tree_depth: most tokens of a path if drafts form trees; None: they are chains.
    tree_plans: by number of tokens, the rounds of the graph executor that draft trees.
    draft: the model that drafts, if there is one that the graph executor runs.
    graph_obstacle: why the graph executor cannot draft so; None if it can.
    num_graph_layers: layers of a small model or a DFlash head that a graph records, beside the target's
    layers.
    """

    kind = ""
    needs_history = False
    needs_draft_kv = False
    needs_first_token = False
    always_drafts = False
    draft: DraftDecoder | DFlashDecoder | Decoder | None = None
    graph_obstacle: str | None = None
    num_graph_layers = 0
    max_tree_depth: int | None = None

    def __init__(self, draft_choices: Sequence[int], *, is_adaptive: bool = True) -> None:
        self.draft_choices: tuple[int, ...] = tuple(draft_choices)
        self.is_adaptive = is_adaptive
        self.tree_plans: dict[int, TreePlan] = {}

    def num_values_per_block(self, block_size: int) -> int:
        """Numbers of the model's dtype that the drafter keeps for a block of `block_size` tokens."""
        return 0

    def check_graphs(self) -> None:
        """Raise ConfigError if the graph executor cannot draft so."""
        if self.graph_obstacle is not None:
            raise ConfigError.of("executor", "graph", f'"eager": {self.graph_obstacle}')

    @abstractmethod
    def eager_drafter(self, target: Decoder, limits: ExecutorLimits) -> Drafter | None:
        """The drafter of the eager executor; None without speculation."""

    @abstractmethod
    def round_drafter(
        self, resources: DeviceResources, model: ModelResources, sizes: RoundSizes
    ) -> RoundDrafter | None:
        """The drafter of the graph executor; None without speculation. Imports Triton.

        sizes: of the largest steps that it takes part in.
        """

    def tree_drafter(
        self,
        resources: DeviceResources,
        drafter: RoundDrafter | None,
        rounds: Sequence[tuple[int, int]],
    ) -> TreeDrafter | None:
        """The drafter of the rounds in `tree_plans`, which shares the state of `drafter`; None without any.

        rounds: (slots, drafts) of all rounds.
        """
        return None


class NoDrafterFactory(DrafterFactory):
    """Decoding without speculation."""

    def __init__(self) -> None:
        super().__init__((), is_adaptive=False)

    def eager_drafter(self, target: Decoder, limits: ExecutorLimits) -> Drafter | None:
        return None

    def round_drafter(
        self, resources: DeviceResources, model: ModelResources, sizes: RoundSizes
    ) -> RoundDrafter | None:
        return None


NO_DRAFTER = NoDrafterFactory()


class NGramDrafterFactory(DrafterFactory):
    """Prompt look-up in each sequence's own history."""

    kind = "n-grams"
    needs_history = True

    def __init__(self, ngram: NGram, draft_choices: Sequence[int], *, is_adaptive: bool = True) -> None:
        super().__init__(draft_choices, is_adaptive=is_adaptive)
        self._ngram = ngram

    def eager_drafter(self, target: Decoder, limits: ExecutorLimits) -> Drafter:
        return NGramDrafter(self._ngram.min_length, self._ngram.max_length)

    def round_drafter(
        self, resources: DeviceResources, model: ModelResources, sizes: RoundSizes
    ) -> RoundDrafter:
        from drift_sdk.execution.rounds.drafters import NGramRoundDrafter

        return NGramRoundDrafter(
            resources.table.history,
            resources.workspace,
            min_length=self._ngram.min_length,
            max_length=self._ngram.max_length,
        )


class EagleDrafterFactory(DrafterFactory):
    """A draft head of the target (EAGLE-3, P-EAGLE or MTP). tree: the shape of its drafts; None: chains."""

    needs_draft_kv = True
    always_drafts = True
    draft: DraftDecoder

    def __init__(
        self,
        draft: DraftDecoder,
        draft_choices: Sequence[int],
        *,
        is_adaptive: bool = True,
        tree: StaticTree | DynamicTree | None = None,
    ) -> None:
        super().__init__(draft_choices, is_adaptive=is_adaptive)
        self.draft = draft
        if draft.config.has_joint:
            self.kind = "the model's MTP layer"
        else:
            self.kind = "an EAGLE-3 head" if draft.config.mask_token_id is None else "a P-EAGLE head"
        self._tree = tree
        self.max_tree_depth = None if tree is None else tree.depth
        if tree is not None:
            plans = {number: tree_plan(tree, number) for number in self.draft_choices}
            self.tree_plans = {number: plan for number, plan in plans.items() if plan is not None}

    def num_values_per_block(self, block_size: int) -> int:
        """Keys and values of all layers, and the feature kept beside each block."""
        config = self.draft.config
        return config.num_layers * config.attention.kv.size * block_size + config.hidden_size

    def eager_drafter(self, target: Decoder, limits: ExecutorLimits) -> Drafter:
        return EagleDrafter(self.draft, target, limits, self._tree)

    def round_drafter(
        self, resources: DeviceResources, model: ModelResources, sizes: RoundSizes
    ) -> RoundDrafter:
        from drift_sdk.execution.rounds.eagle import EagleRoundDrafter

        return EagleRoundDrafter(
            self.draft, model, resources.table, resources.workspace, sizes, stages=resources.stages
        )

    def tree_drafter(
        self,
        resources: DeviceResources,
        drafter: RoundDrafter | None,
        rounds: Sequence[tuple[int, int]],
    ) -> TreeDrafter | None:
        from drift_sdk.execution.rounds.eagle import EagleRoundDrafter, EagleTreeDrafter

        if not self.tree_plans:
            return None

        assert isinstance(drafter, EagleRoundDrafter)
        table, workspace = resources.table, resources.workspace
        return EagleTreeDrafter(
            self.draft, drafter, table, workspace, self.tree_plans, rounds, stages=resources.stages
        )


class DFlashDrafterFactory(DrafterFactory):
    """A DFlash head of the target."""

    kind = "a DFlash head"
    always_drafts = True
    draft: DFlashDecoder

    def __init__(
        self, draft: DFlashDecoder, draft_choices: Sequence[int], *, is_adaptive: bool = True
    ) -> None:
        """draft_choices: none above the head's number of masks."""
        super().__init__(draft_choices, is_adaptive=is_adaptive)
        self.draft = draft
        shape = draft.config.shape
        # Those that store keys and values, and those that draft.
        self.num_graph_layers = 2 * shape.num_layers
        if shape.max_head_dim > MAX_MASK_HEAD:
            self.graph_obstacle = (
                f"CUDA graphs do not support DFlash heads of more than {MAX_MASK_HEAD} dimensions"
            )

    def num_values_per_block(self, block_size: int) -> int:
        """Keys and values of all layers."""
        layers = self.draft.config.shape.layers
        return sum(layer.kv.size for layer in layers if layer.kv is not None) * block_size

    def eager_drafter(self, target: Decoder, limits: ExecutorLimits) -> Drafter:
        return DFlashDrafter(self.draft, limits)

    def round_drafter(
        self, resources: DeviceResources, model: ModelResources, sizes: RoundSizes
    ) -> RoundDrafter:
        from drift_sdk.execution.rounds.dflash import DFlashRoundDrafter

        return DFlashRoundDrafter(
            self.draft, model, resources.table, resources.workspace, sizes, stages=resources.stages
        )


class AssistantDrafterFactory(DrafterFactory):
    """The assistant of a Gemma 4 model."""

    kind = "an assistant"
    always_drafts = True

    def __init__(
        self, draft: AssistantDecoder, draft_choices: Sequence[int], *, is_adaptive: bool = True
    ) -> None:
        super().__init__(draft_choices, is_adaptive=is_adaptive)
        self.assistant, self.draft = draft, draft.layers
        self.num_graph_layers = draft.config.shape.num_layers * self.draft_choices[-1]

    def eager_drafter(self, target: Decoder, limits: ExecutorLimits) -> Drafter:
        return AssistantDrafter(self.assistant, target)

    def round_drafter(
        self, resources: DeviceResources, model: ModelResources, sizes: RoundSizes
    ) -> RoundDrafter:
        from drift_sdk.execution.rounds.drafters import AssistantRoundDrafter

        return AssistantRoundDrafter(
            self.assistant, model, resources.table, resources.workspace, sizes, stages=resources.stages
        )


class ModelDrafterFactory(DrafterFactory):
    """A small model of the target's vocabulary."""

    kind = "a small model"
    needs_draft_kv = True
    needs_first_token = True
    always_drafts = True
    draft: Decoder

    def __init__(self, draft: Decoder, draft_choices: Sequence[int], *, is_adaptive: bool = True) -> None:
        super().__init__(draft_choices, is_adaptive=is_adaptive)
        self.draft = draft
        # Each drafted token is a pass, the first one that of the tokens of the round before.
        self.num_graph_layers = draft.spec.num_layers * self.draft_choices[-1]

    def num_values_per_block(self, block_size: int) -> int:
        """Keys and values of all layers."""
        return sum(layer.kv.size for layer in self.draft.spec.layers if layer.kv is not None) * block_size

    def eager_drafter(self, target: Decoder, limits: ExecutorLimits) -> Drafter:
        return ModelDrafter(self.draft, limits)

    def round_drafter(
        self, resources: DeviceResources, model: ModelResources, sizes: RoundSizes
    ) -> RoundDrafter:
        from drift_sdk.execution.rounds.drafters import ModelRoundDrafter

        return ModelRoundDrafter(
            self.draft, model, resources.table, resources.workspace, sizes, stages=resources.stages
        )


class HybridDrafterFactory(DrafterFactory):
    """Chains of a draft model, or n-grams in their place where these are accepted more often."""

    needs_history = True
    always_drafts = True

    def __init__(self, model: DrafterFactory, ngram: NGram) -> None:
        """model: of chains."""
        super().__init__(model.draft_choices, is_adaptive=model.is_adaptive)
        self._model, self._ngram, self.draft = model, ngram, model.draft
        self.kind = f"{model.kind} and {NGramDrafterFactory.kind}"
        self.needs_draft_kv, self.needs_first_token = model.needs_draft_kv, model.needs_first_token
        self.num_graph_layers: int = model.num_graph_layers
        self.graph_obstacle = model.graph_obstacle

    def num_values_per_block(self, block_size: int) -> int:
        return self._model.num_values_per_block(block_size)

    def eager_drafter(self, target: Decoder, limits: ExecutorLimits) -> Drafter:
        model = self._model.eager_drafter(target, limits)
        assert model is not None
        return HybridDrafter(model, self._ngram.min_length, self._ngram.max_length)

    def round_drafter(
        self, resources: DeviceResources, model: ModelResources, sizes: RoundSizes
    ) -> RoundDrafter:
        from drift_sdk.execution.rounds.drafters import HybridRoundDrafter

        drafter = self._model.round_drafter(resources, model, sizes)
        assert drafter is not None
        return HybridRoundDrafter(
            drafter,
            resources.table,
            resources.workspace,
            max_num_slots=sizes.max_num_slots,
            min_length=self._ngram.min_length,
            max_length=self._ngram.max_length,
        )
