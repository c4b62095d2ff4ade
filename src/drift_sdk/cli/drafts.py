"""The commands `acceptance` and `tree`, about drafts.

`acceptance` measures how many tokens rounds with a draft head emit, under each meaning of the layer ids in
the head's config, and says which one fits. `tree` draws a tree of drafts, its statistics, and the buffers it
implies.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from math import sqrt
from pathlib import Path
from typing import Literal, get_args

from msgspec import Struct, structs

from drift_sdk._files import has_file
from drift_sdk.cli.engine_start import hide_progress, show_progress
from drift_sdk.config import EngineConfig
from drift_sdk.engine import Engine, inspect
from drift_sdk.errors import ConfigError, ModelLoadError
from drift_sdk.events import Progress
from drift_sdk.jobs import Job
from drift_sdk.results import SpeculationStats
from drift_sdk.sampling_params import SamplingParams
from drift_sdk.speculation import DynamicTree, StaticTree, load_tree
from drift_sdk.trees import MAX_PATH_LENGTH, MAX_TREE_ROWS, RankedTree, max_batch_drafts, rank_tree

Convention = Literal["output", "boundary"]

PROMPTS = (
    "Explain how a transistor works.",
    "Write a Python function that merges two sorted lists, and describe its complexity.",
    "Which causes led to the First World War?",
    "Solve 3x + 7 = 2x - 5, step by step.",
    "Write a short story about a lighthouse keeper.",
    "Compare TCP with UDP in a table.",
    "Translate into French: The meeting has been moved to Thursday morning.",
    "List the planets of the solar system with one fact about each.",
)
"""Texts that are continued, or messages that are answered, unless others are given."""

MAX_FILE_BYTES = 64 * 2**20
"""Largest file of prompts."""

CERTAIN = 4.0
"""Standard errors by which the shares of right first drafts must differ."""


class Measured(Struct, frozen=True, kw_only=True):
    """Rounds of drafts under one convention.

    layers: those whose input the head reads; the number of the model's layers stands for the output of the
            last. speculation: counts of the rounds; None if the head cannot be loaded so, for `reason`.
    """

    convention: Convention
    layers: tuple[int, ...] = ()
    speculation: SpeculationStats | None = None
    reason: str = ""


async def run_acceptance(
    model: str | Path, config: EngineConfig, prompts: Sequence[str], params: SamplingParams
) -> int:
    """Run `measure` and print its outcome; the exit status, 1 if no convention can be used."""
    found = await measure(model, config, prompts, params)
    hide_progress()
    for one in found:
        if one.speculation is None:
            print(f'"{one.convention}": {one.reason}')
            continue

        counts = one.speculation
        rates = " ".join(f"{rate:.3f}" for rate in counts.rates)
        layers = ", ".join(map(str, one.layers))
        print(f'"{one.convention}": the head reads the hidden states before layers {layers}')
        print(f"    {counts.acceptance_length:.3f} tokens a round, {counts.num_rounds} rounds")
        print(f"    shares of rounds with drafts 1, 2, ... accepted: {rates}")
    print(verdict(found))
    return 0 if any(one.speculation is not None for one in found) else 1


async def measure(
    model: str | Path, config: EngineConfig, prompts: Sequence[str], params: SamplingParams
) -> list[Measured]:
    """Generate from all prompts under each convention, one engine after the other.

    config: with the speculation to measure; its policy and its convention are replaced. Prompts are answered
    as messages if the model has a chat template, else continued. A head that names no layers is measured
    once. Raises what starting an engine and submitting a request raise, but for a head that one convention
    alone does not permit.
    """
    assert config.speculation is not None
    has_template = bool(inspect(model, config.replace(speculation=None)).has_chat_template)
    jobs = [
        Job(key=None, messages=[{"role": "user", "content": prompt}])
        if has_template
        else Job(key=None, prompt=prompt)
        for prompt in prompts
    ]
    found: list[Measured] = []
    for convention, layers in layers_by_convention(model, config).items():
        if isinstance(layers, ModelLoadError):
            found.append(Measured(convention=convention, reason=str(layers)))
            continue

        if any(one.layers == layers for one in found):
            continue

        speculation = structs.replace(config.speculation, adaptive=False, aux_layer_convention=convention)
        async with Engine(
            model, config.replace(speculation=speculation), on_progress=show_progress
        ) as engine:
            num_done = 0
            async for _ in engine.map(jobs, params):
                num_done += 1
                show_progress(Progress(stage=f'measure "{convention}"', fraction=num_done / len(jobs)))
            counts = engine.stats().speculation
        found.append(Measured(convention=convention, layers=layers, speculation=counts))
    return found


def layers_by_convention(
    model: str | Path, config: EngineConfig
) -> dict[Convention, tuple[int, ...] | ModelLoadError]:
    """The layers whose input a head reads under each convention; an error if its config does not permit it.

    Raises ModelLoadError if the head or the model is not found, and ConfigError for a model in place of a
    head.
    """
    # Imported here, so that the command line starts without torch.
    from drift_sdk.loading.source import resolve
    from drift_sdk.models.assistant import is_assistant
    from drift_sdk.models.dflash import read_head_config
    from drift_sdk.models.draft_head import is_whole_model
    from drift_sdk.startup.model_startup import read_model

    assert config.speculation is not None and isinstance(config.speculation.draft, str | Path)
    find = partial(
        resolve, cache_dir=config.cache_dir, local_files_only=config.local_files_only, has_weights=False
    )
    target = read_model(find(model, revision=config.revision), config)
    source = find(config.speculation.draft, role="draft")
    for is_other, name in (
        (is_assistant(source.config), "an assistant"),
        (is_whole_model(source), "a whole model"),
    ):
        if is_other:
            raise ConfigError.of("draft", config.speculation.draft, f"a draft head; this is {name}")

    found: dict[Convention, tuple[int, ...] | ModelLoadError] = {}
    for convention in get_args(Convention):
        try:
            draft = read_head_config(source.config, target, aux_layer_convention=convention)
            found[convention] = draft.aux_layers
        except ModelLoadError as error:
            found[convention] = error
    return found


def verdict(found: Sequence[Measured]) -> str:
    """A sentence about which convention fits."""
    measured = [one for one in found if one.speculation is not None]
    if not measured:
        return "the head can be loaded under neither convention, for the reasons above"

    if len(found) == 1:
        return "the head names no layers: there is nothing to choose"

    if len(measured) == 1:
        return setting(measured[0])

    (best, best_rate), (_, other_rate) = sorted(
        ((one, first_rate(one)) for one in measured), key=lambda pair: -pair[1]
    )
    least = min(map(rounds, measured))
    variance = (best_rate * (1 - best_rate) + other_rate * (1 - other_rate)) / max(least, 1)
    if least == 0 or best_rate - other_rate <= CERTAIN * sqrt(variance):
        return "no difference can be seen: measure more prompts, and such as the head was trained for"

    return setting(best)


def setting(one: Measured) -> str:
    return f'"{one.convention}" fits: Speculation(aux_layer_convention="{one.convention}")'


def first_rate(one: Measured) -> float:
    """The share of rounds whose first draft was right."""
    assert one.speculation is not None
    return (*one.speculation.rates, 0.0)[0] if rounds(one) else 0.0


def rounds(one: Measured) -> int:
    assert one.speculation is not None
    return one.speculation.num_rounds


def read_prompts(path: Path | None) -> Sequence[str]:
    """The lines of a UTF-8 file that are not empty; PROMPTS without a file. Raises ConfigError for a file
    that cannot be read or has none."""
    if path is None:
        return PROMPTS

    try:
        if not has_file(path):
            raise ConfigError.of("prompts", str(path), "a file that exists")

        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise ConfigError.of("prompts", str(path), f"at most {MAX_FILE_BYTES} bytes")

        prompts = [line for line in data.decode().splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError, ModelLoadError) as error:
        raise ConfigError.of("prompts", str(path), f"a readable text file: {error}") from error

    if not prompts:
        raise ConfigError.of("prompts", str(path), "a file with a prompt in each line")

    return prompts


def run_tree(file: Path) -> int:
    """Print the description of the tree in a file; ConfigError for a file or tree that is wrong."""
    print("\n".join(describe_tree(load_tree(file))))
    return 0


def describe_tree(shape: StaticTree | DynamicTree) -> Iterator[str]:
    """Lines: the drawing of a static tree, statistics, and buffers."""
    if isinstance(shape, StaticTree):
        ranked = rank_tree(shape.paths)
        yield from draw(ranked)
        yield ""
        yield from static_statistics(ranked)
    else:
        yield f"dynamic tree: the best {shape.num_draft_tokens} drafts of each round"
        yield f"candidates after a token  {shape.top_k}"
        considered = shape.top_k + (shape.depth - 1) * shape.top_k**2
        yield f"candidates considered     {considered}"
        yield f"longest path              {shape.depth} drafts"
    yield ""
    yield from buffers(shape)


def draw(ranked: RankedTree) -> Iterator[str]:
    """The tree, a node a line: its number, and its rank among the candidates after its parent."""
    tree = ranked.tree
    yield "0  newest token"

    def lines(node: int, indent: str) -> Iterator[str]:
        for child in tree.children(node):
            is_last = tree.next_sibling[child] < 0
            yield f"{indent}{'`--' if is_last else '|--'} {child}  rank {ranked.ranks[child]}"
            yield from lines(child, indent + ("    " if is_last else "|   "))

    yield from lines(0, "")


def static_statistics(ranked: RankedTree) -> Iterator[str]:
    """Counts of nodes."""
    tree = ranked.tree
    yield f"nodes                     {tree.num_nodes}, the newest token included"
    yield f"leaves                    {sum(tree.is_leaf(node) for node in range(tree.num_nodes))}"
    yield f"longest path              {tree.max_depth} drafts"
    yield f"candidates after a token  {max(ranked.ranks) + 1}"
    for depth, num_non_leaves in enumerate(tree.num_non_leaves):
        yield f"nodes of depth {depth:2}         {tree.depths.count(depth)}, with children {num_non_leaves}"


def buffers(shape: StaticTree | DynamicTree) -> Iterator[str]:
    """Rows and bytes of a round, by the number of sequences."""
    yield f"sequences  drafts each  rows verified (at most {MAX_TREE_ROWS})  rows drafted  masks and paths"
    shown = 0
    for number in (1, 2, 4, 8, 16, 32, 64, 128):
        most = max_batch_drafts(number)
        drafts = max((choice for choice in shape.choices if choice <= most), default=0)
        if drafts == shown == 0:
            continue

        shown = drafts
        rows = number * (drafts + 1)
        # Ancestors are 64 bits a row, a path is one int32 for each of its nodes.
        num_bytes = rows * (8 + 4 * (MAX_PATH_LENGTH + 1))
        drafted = number * shape.num_draft_rows(drafts)
        yield f"{number:9}  {drafts:11}  {rows:29}  {drafted:12}  {num_bytes:9} bytes"
    yield f"KV rows of trees, behind the blocks of sequences: {MAX_TREE_ROWS}"
