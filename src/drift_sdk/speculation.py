"""Settings of speculative decoding: kinds and shapes of drafts, partial verification and its views."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct
from msgspec.structs import force_setattr

from drift_sdk._fields import (
    ConfigFields,
    check_field_names,
    check_fields,
    check_int,
    make_struct,
    unknown_name,
)
from drift_sdk.errors import ConfigError
from drift_sdk.trees import (
    MAX_CANDIDATES,
    MAX_DRAFT_ROWS,
    MAX_PATH_LENGTH,
    MAX_TREE_DRAFTS,
    RankedTree,
    check_paths,
    max_batch_drafts,
    rank_tree,
    read_tree_file,
)

MAX_VIEW_BLOCK_SIZE = 64
"""Most tokens of a block. A larger block is read whole for the few tokens in it that are attended to."""

MAX_TOKENS = 2**20
MAX_REFRESH_TOKENS = 128
MAX_REFRESH_ROWS = 1024
"""Most rows of a refresh, of all sequences together."""
MAX_QUERY_ROWS = 64
"""Most rows of a sequence, times query heads of a group, for which a program of attention has registers."""


class PartialVerification(Struct, frozen=True, kw_only=True, metaclass=ConfigFields):
    """Lossy verification of drafts in long sequences over a part of their keys and values (SpecPV, arXiv
    2512.02337): the first tokens of a sequence, the last ones, and in each layer the blocks between them that
    get most attention. Tokens may differ from those without it. At intervals a round verifies over all keys
    and values, computes those of the tokens accepted since again, and chooses the blocks anew; what was
    emitted before is not revised.

    sink_tokens:      tokens at the beginning that are always read, 1 to 2**20, in whole blocks.
    retrieved_tokens: tokens read between the first and the last ones, 1 to 2**20, in whole blocks.
    window_tokens:    tokens at the end that are always read, 1 to 2**20, beside those since the last full
                      verification.
    refresh_tokens:   most tokens that are accepted by partial verification before a full one, 2 to 128, and
                      more than a round drafts. More of them cost less time and more agreement.

    Sequences of no more than these tokens together are verified as without it. A wrong value raises
    ConfigError.
    """

    sink_tokens: Annotated[int, Meta(ge=1, le=MAX_TOKENS)] = 64
    retrieved_tokens: Annotated[int, Meta(ge=1, le=MAX_TOKENS)] = 4096
    window_tokens: Annotated[int, Meta(ge=1, le=MAX_TOKENS)] = 256
    refresh_tokens: Annotated[int, Meta(ge=2, le=MAX_REFRESH_TOKENS)] = 28

    def __post_init__(self) -> None:
        check_fields(ConfigError, self)

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> PartialVerification:
        """Make it from plain data. ConfigError for a wrong value, and for an unknown field, with the name of
        the most similar one."""
        return make_struct(ConfigError, cls, settings)

    def layout(self, block_size: int, num_draft_tokens: int) -> ViewLayout:
        """The layout of views for blocks of so many tokens and rounds of at most so many drafts."""
        return ViewLayout(
            block_size=block_size,
            num_sinks=-(-self.sink_tokens // block_size),
            num_retrieved=-(-self.retrieved_tokens // block_size),
            window_tokens=self.window_tokens,
            refresh_tokens=self.refresh_tokens,
            num_drafts=num_draft_tokens,
            max_sequences=MAX_REFRESH_ROWS // (self.refresh_tokens + num_draft_tokens + 1),
        )


class ViewLayout(Struct, frozen=True, kw_only=True):
    """The layout of views: block tables of a part of a sequence's blocks, in order.

    A view has the sequence's first `num_sinks` blocks, `num_retrieved` chosen ones, and all from the first
    block of its window on. Where no more blocks than these lie before the window, it has all blocks. A key at
    position p from the window on has the position p - block_size * dropped in the view, where `dropped` is
    the number of blocks left out.

    block_size:     tokens of a block.
    window_tokens:  fewest tokens of the window, at the time of a refresh.
    refresh_tokens: most pending tokens: those accepted in partial rounds since.
    num_drafts:     most drafts of a round.
    max_sequences:  most sequences that decode together over views: a refresh of more takes too many rows.
    """

    block_size: int
    num_sinks: int
    num_retrieved: int
    window_tokens: int
    refresh_tokens: int
    num_drafts: int
    max_sequences: int

    @property
    def num_kept(self) -> int:
        """Blocks before the window."""
        return self.num_sinks + self.num_retrieved

    @property
    def num_blocks(self) -> int:
        """Most blocks of a view."""
        num_last = self.window_tokens + self.refresh_tokens + self.num_drafts + 1
        return self.num_kept + -(-num_last // self.block_size) + 2

    def refresh_tiles(self, group: int) -> tuple[int, int]:
        """Tiles that a sequence's rows of a refresh are divided into, and rows of a tile, the last of them
        being padding where they are more. group: query heads that share a KV head."""
        num_rows = self.refresh_tokens + self.num_drafts + 1
        num_tiles = -(-num_rows // max(1, MAX_QUERY_ROWS // group))
        return num_tiles, -(-num_rows // num_tiles)

    @property
    def capacity(self) -> int:
        """Tokens of the longest sequences that need no refresh, because a view has all their blocks."""
        return self.num_kept * self.block_size + self.window_tokens

    def first_window_block(self, position: int) -> int:
        """The window's first block after a refresh whose newest token is at a position."""
        return max(position + 1 - self.window_tokens, 0) // self.block_size

    def num_dropped(self, position: int) -> int:
        """Blocks that views leave out after a refresh whose newest token is at a position."""
        return max(self.first_window_block(position) - self.num_kept, 0)


MAX_DRAFT_TOKENS = MAX_PATH_LENGTH
TREE_CHOICES = (1, 3, 7, 15, 31)
"""Numbers of draft tokens that a batch may use instead of a whole tree: with the root, powers of two."""
MAX_NGRAM = 16
MTP = "mtp"
"""The string that stands for the model's own MTP layer; a folder of that name is given as a Path."""
NGRAM_NAMES = ("ngram", "n-gram", "n_gram")
"""Strings that are taken for n-gram drafts by mistake; a folder of such a name is given as a Path."""
DRAFT_FILES = "a folder, a .gguf file or a hub id"


class Chain(Struct, frozen=True, metaclass=ConfigFields):
    """Drafts of one token after another.

    num_draft_tokens: most tokens drafted in a round, 1 to 16. Where attention on a GPU has room for fewer,
        the error of the start says how many.

    A wrong value raises ConfigError.
    """

    num_draft_tokens: Annotated[int, Meta(ge=1, le=MAX_DRAFT_TOKENS)] = 3

    def __post_init__(self) -> None:
        check_fields(ConfigError, self)

    @property
    def choices(self) -> tuple[int, ...]:
        """The numbers of draft tokens that a batch may choose from, ascending; graphs are captured for
        these."""
        shorter = [length for length in (1, 3, 5, 8, 12) if length < self.num_draft_tokens]
        return (*shorter, self.num_draft_tokens)


class StaticTree(Struct, frozen=True, metaclass=ConfigFields):
    """Drafts in the form of a tree that is the same in every round.

    paths: the paths of all nodes but the root. A path lists, from the root on, the rank of each token among
           the draft's candidates after its parent, 0 being the best: (0, 1) is the second best candidate
           after the best one. 1 to 63 paths, each once, of 1 to 16 ranks from 0 to 15; the prefixes of a path
           must be listed as well. At most 16 nodes of one depth may have children.

    A round that drafts fewer tokens takes nodes by the sum of (rank + 1) along their path, the smallest
    first; of equal sums the shortest path, then the path that sorts first. In a batch, rounds are limited to
    256 nodes together, the roots included. A wrong value raises ConfigError.
    """

    paths: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        force_setattr(self, "paths", check_paths(self.paths))

    @property
    def num_draft_tokens(self) -> int:
        """Most tokens drafted in a round."""
        return len(self.paths)

    @property
    def depth(self) -> int:
        """Most tokens of a path, and so most drafts that a round accepts."""
        return max(map(len, self.paths))

    @property
    def num_candidates(self) -> int:
        """Most candidates that are needed after a token."""
        return max(path[-1] for path in self.paths) + 1

    def num_draft_rows(self, num_draft_tokens: int) -> int:
        """Rows that the draft computes for a round of one sequence with so many drafted tokens: nodes with
        children, without the root."""
        return sum(rank_tree(self.paths).tree.prefix(num_draft_tokens + 1).num_non_leaves[1:])

    @property
    def choices(self) -> tuple[int, ...]:
        """The numbers of draft tokens that a batch may choose from, ascending."""
        return (*(number for number in TREE_CHOICES if number < self.num_draft_tokens), self.num_draft_tokens)


class DynamicTree(Struct, frozen=True, kw_only=True, metaclass=ConfigFields):
    """Drafts in the form of a tree that each round builds from the tokens that the draft considers most
    likely (EAGLE-2, arXiv 2406.16858).

    top_k:             candidates considered after each token, and tokens of one depth that are drafted
                       further, 1 to 16.
    depth:             most tokens of a path, 1 to 16. top_k * (depth - 1) is at most 64.
    num_draft_tokens:  tokens of the tree, the best by the product of probabilities on their path: 1 to 63,
                       and no more than are considered, top_k + (depth - 1) * top_k ** 2.

    In a batch, rounds are limited to 256 nodes together, the roots included: the best ones of each tree are
    kept. A wrong value raises ConfigError.
    """

    top_k: Annotated[int, Meta(ge=1, le=MAX_CANDIDATES)] = 4
    depth: Annotated[int, Meta(ge=1, le=MAX_PATH_LENGTH)] = 5
    num_draft_tokens: Annotated[int, Meta(ge=1, le=MAX_TREE_DRAFTS)] = 15

    def __post_init__(self) -> None:
        check_fields(ConfigError, self)
        if self.top_k * (self.depth - 1) > MAX_DRAFT_ROWS:
            most = MAX_DRAFT_ROWS // self.top_k + 1
            raise ConfigError.of("depth", self.depth, f"an integer from 1 to {most} with top_k={self.top_k}")

        most = self.top_k + (self.depth - 1) * self.top_k**2
        if self.num_draft_tokens > most:
            allowed = f"an integer from 1 to {most} with top_k={self.top_k} and depth={self.depth}"
            raise ConfigError.of("num_draft_tokens", self.num_draft_tokens, allowed)

    @property
    def num_candidates(self) -> int:
        """Most candidates that are needed after a token."""
        return self.top_k

    def num_draft_rows(self, num_draft_tokens: int) -> int:
        """Most rows that the draft computes for a round of one sequence with so many drafted tokens."""
        levels = min(self.depth, num_draft_tokens)
        return min(self.top_k, num_draft_tokens) * max(levels - 1, 0)

    @property
    def choices(self) -> tuple[int, ...]:
        """The numbers of draft tokens that a batch may choose from, ascending."""
        return (*(number for number in TREE_CHOICES if number < self.num_draft_tokens), self.num_draft_tokens)


TreeShape = StaticTree | DynamicTree


def load_tree(file: str | Path) -> StaticTree | DynamicTree:
    """The tree in a TOML, JSON or YAML file: the fields of a `StaticTree` or of a `DynamicTree`, or in JSON
    and YAML a list of paths.

    Raises ConfigError naming `file` for a file that cannot be read, and the field for a wrong value.
    """
    settings = read_tree_file(file)
    if "paths" in settings:
        return make_struct(ConfigError, StaticTree, settings)

    known = (*DynamicTree.__struct_fields__, *StaticTree.__struct_fields__)
    for name, value in settings.items():
        if name not in known:
            raise unknown_name(ConfigError, name, value, known)

    return DynamicTree(**settings)


class NGram(Struct, frozen=True, kw_only=True, metaclass=ConfigFields):
    """Drafts without a draft model: the newest tokens of a sequence are looked up in its prompt and output,
    and the tokens that followed their last earlier occurrence are the draft.

    min_length: fewest newest tokens that are looked up, 1 to 16.
    max_length: most newest tokens that are looked up, min_length to 16. The longest run that occurs is used,
                and of its occurrences the last.

    A wrong value raises ConfigError.
    """

    min_length: Annotated[int, Meta(ge=1, le=MAX_NGRAM)] = 2
    max_length: Annotated[int, Meta(le=MAX_NGRAM)] = MAX_NGRAM

    def __post_init__(self) -> None:
        check_fields(ConfigError, self)
        check_int(ConfigError, "max_length", self.max_length, ge=self.min_length, le=MAX_NGRAM)


class Speculation(Struct, frozen=True, kw_only=True, metaclass=ConfigFields):
    """Speculative decoding: several tokens are drafted, and the model verifies them in one step. A draft is
    accepted only if it is the token that the model chooses there. On the graph executor, tokens
    are the same as without drafts, to the last bit of the logits, unless `EngineConfig(fast_prompts=True)`;
    on the eager executor near ties may resolve differently.

    draft:                folder or hub id of a head (EAGLE-3, P-EAGLE or DFlash), or of the assistant of a
                          Gemma 4 model; or folder, .gguf file or hub id of a model with the same vocabulary,
                          smaller than the engine's; or `NGram()`; or "mtp" for the layer of the model's own
                          files that predicts one more token (Qwen3.5 and others: docs/speculation.md).
    ngrams:               n-grams beside a head or a model as the draft: they take its place in the rounds of
                          a sequence in which they find something and are accepted at least as often, as
                          measured in the sequence. Drafts are chains then. None = no n-grams.
    shape:                how many tokens are drafted in a round, and in which form: `Chain`, `StaticTree` or
                          `DynamicTree`. Trees need an EAGLE-3 head without `ngrams`; sequences under a
                          grammar draft chains.
    adaptive:             draft fewer tokens, or none, where measurements show that to be faster.
    aux_layer_convention: meaning of explicit layer ids in the draft's config: "output", the output of that
                          layer, or "boundary", the boundary before it. None = as most publishers mean them.
    draft_weights:        "fp8" or "int4": the matrices of the draft are quantised when they are loaded, of a
                          head but for its embedding and what it shares with the model, of a model or an
                          assistant those of its layers. They take less memory, and drafts may be accepted
                          less often. None = in the engine's dtype, but for "mtp" with the model's
                          `weights`="stored": as stored.
    partial_verification: LOSSY: drafts in long sequences are verified over a part of the KV cache, where
                          that is faster; see `PartialVerification`. Drafts are chains then, without
                          `checks`. A request with num_draft_tokens=0 or a grammar is verified over all of it,
                          and so are those that decode beside it. None = all drafts are.
    checks:               check every round, at a cost in speed. A request whose drafts break a rule decodes
                          without drafts from then on; one whose state is wrong ends with ExecutorError.
                          `EngineStats.violations` counts both.
    required:             True: a draft that cannot be loaded or does not fit raises ModelLoadError. False: it
                          is logged as a warning, and the engine decodes without drafts. Settings that are
                          wrong for the draft raise ConfigError in both cases.

    A wrong value raises ConfigError.
    """

    draft: str | Path | NGram
    ngrams: NGram | None = None
    shape: Chain | StaticTree | DynamicTree = Chain(3)
    adaptive: bool = True
    aux_layer_convention: Literal["output", "boundary"] | None = None
    draft_weights: Literal["fp8", "int4"] | None = None
    partial_verification: PartialVerification | None = None
    checks: bool = False
    required: bool = True

    def __post_init__(self) -> None:
        check_fields(ConfigError, self)
        if not isinstance(self.draft, str | Path | NGram) or self.draft == "":
            raise ConfigError.of("draft", self.draft, f'{DRAFT_FILES}, "{MTP}" or NGram()')

        if isinstance(self.draft, str) and self.draft.lower() in NGRAM_NAMES:
            allowed = f'NGram() for n-gram drafts, or {DRAFT_FILES}, or "{MTP}"'
            raise ConfigError.of("draft", self.draft, allowed)

        if self.draft == MTP and self.aux_layer_convention is not None:
            allowed = f'None with draft="{MTP}"'
            raise ConfigError.of("aux_layer_convention", self.aux_layer_convention, allowed)

        if self.ngrams is not None:
            if not isinstance(self.ngrams, NGram):
                raise ConfigError.of("ngrams", self.ngrams, "NGram() or None")

            if isinstance(self.draft, NGram):
                raise ConfigError.of("ngrams", self.ngrams, "None with draft=NGram()")

        if not isinstance(self.shape, Chain | StaticTree | DynamicTree):
            raise ConfigError.of("shape", self.shape, "a Chain, a StaticTree or a DynamicTree")

        if (isinstance(self.draft, NGram) or self.ngrams is not None) and not isinstance(self.shape, Chain):
            raise ConfigError.of("shape", self.shape, "a Chain with NGram()")

        if self.draft_weights is not None and isinstance(self.draft, NGram):
            raise ConfigError.of("draft_weights", self.draft_weights, "None with NGram()")

        if self.partial_verification is not None:
            self._check_partial(self.partial_verification)

    def _check_partial(self, partial: PartialVerification) -> None:
        name = "partial_verification"
        if not isinstance(partial, PartialVerification):
            raise ConfigError.of(name, partial, "PartialVerification() or None")

        if not isinstance(self.shape, Chain):
            raise ConfigError.of(name, partial, "None with trees: a Chain as the shape")

        if self.checks:
            raise ConfigError.of(name, partial, "None with checks")

        if partial.refresh_tokens <= self.shape.num_draft_tokens:
            allowed = f"an integer from {self.shape.num_draft_tokens + 1}, with {self.shape}"
            raise ConfigError.of("refresh_tokens", partial.refresh_tokens, allowed)

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> Speculation:
        """Make it from plain data. `draft` may be "ngram", or the fields of `NGram` as a mapping, which
        `ngrams` may be too; `partial_verification` may be a mapping of its fields; `shape` may be the number
        of tokens of a `Chain`, or a mapping with the fields of a shape: those of `StaticTree` if it has
        `paths`, of `DynamicTree` if it has `top_k` or `depth`, else of `Chain`. ConfigError for a wrong
        value, and for an unknown field, with the name of the most similar one."""
        check_field_names(ConfigError, cls, settings)
        if "draft" not in settings:
            raise ConfigError.of("draft", None, f'{DRAFT_FILES}, "{MTP}" or NGram()')

        given = dict(settings)
        draft, shape = given["draft"], given.get("shape")
        for name in ("draft", "ngrams"):
            if isinstance(fields := given.get(name), Mapping):
                given[name] = make_struct(ConfigError, NGram, fields)
        if isinstance(fields := given.get("partial_verification"), Mapping):
            given["partial_verification"] = PartialVerification.from_dict(fields)
        if isinstance(draft, str) and draft.lower() in NGRAM_NAMES:
            given["draft"] = NGram()
        if isinstance(shape, Mapping):
            is_dynamic = "top_k" in shape or "depth" in shape
            struct: type[Chain | TreeShape] = DynamicTree if is_dynamic else Chain
            struct = StaticTree if "paths" in shape else struct
            given["shape"] = make_struct(ConfigError, struct, shape)
        elif isinstance(shape, int):
            given["shape"] = Chain(shape)
        return cls(**given)


class TreePlan(Struct, frozen=True, kw_only=True):
    """The growth of trees of T = num_drafts + 1 nodes.

    depth:           most drafts on a path.
    num_candidates:  candidates after each row.
    widths:          rows that the draft computes at depths 1 to `depth - 1`, of each tree.
    ranked:          the first T nodes of a static tree; None: the tree is dynamic.
    """

    num_drafts: int
    depth: int
    num_candidates: int
    widths: tuple[int, ...]
    ranked: RankedTree | None = None

    @property
    def num_nodes(self) -> int:
        """T, the root included."""
        return self.num_drafts + 1

    @property
    def num_draft_nodes(self) -> int:
        """Nodes that the draft computes, and the root."""
        return 1 + sum(self.widths)

    @property
    def pool_size(self) -> int:
        """Candidates of a dynamic tree."""
        return self.num_candidates * (1 + sum(self.widths))

    def frontier(self, depth: int) -> list[int]:
        """Nodes of a static tree that the draft computes at a depth, and -1 for rows without one."""
        assert self.ranked is not None
        tree = self.ranked.tree.prefix(self.num_nodes)
        nodes = [node for node in range(1, self.num_nodes) if tree.depths[node] == depth]
        found = [node for node in nodes if not tree.is_leaf(node)]
        return found + [-1] * (self.widths[depth - 1] - len(found))


def chain_plan(num_drafts: int) -> TreePlan:
    """The plan of trees without branches."""
    return TreePlan(num_drafts=num_drafts, depth=num_drafts, num_candidates=1, widths=())


def tree_plan(shape: StaticTree | DynamicTree, num_drafts: int) -> TreePlan | None:
    """The plan of trees with so many drafts; None if they are chains."""
    if isinstance(shape, DynamicTree):
        num_candidates, depth = min(shape.top_k, num_drafts), min(shape.depth, num_drafts)
        if num_candidates < 2:
            return None

        widths = (num_candidates,) * (depth - 1)
        return TreePlan(num_drafts=num_drafts, depth=depth, num_candidates=num_candidates, widths=widths)

    ranked = rank_tree(shape.paths)
    tree = ranked.tree.prefix(num_drafts + 1)
    if tree.is_chain:
        return None

    # Powers of two: kernels are compiled for each width.
    return TreePlan(
        num_drafts=num_drafts,
        depth=tree.max_depth,
        num_candidates=max(ranked.ranks[: num_drafts + 1]) + 1,
        widths=tuple(1 << (number - 1).bit_length() for number in tree.num_non_leaves[1:-1]),
        ranked=ranked,
    )


def tree_rounds(buckets: Sequence[int], choices: Sequence[int]) -> list[tuple[int, int]]:
    """The rounds (slots, drafts) that batches can have whose trees share the rows of a round: for each of the
    ascending buckets, the choices that fit the smallest batch in it."""
    rounds = []
    least = 1
    for num_slots in buckets:
        most = max_batch_drafts(least)
        rounds += [(num_slots, choice) for choice in choices if choice <= most]
        least = num_slots + 1

    return rounds
