"""The command line of perf.speculative, and the checks of its options."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from drift_sdk.errors import ConfigError
from drift_sdk.measurement import AcceptanceTrace
from perf.harness.mtp_draft import MTP
from perf.harness.numbers import at_least, over_zero
from perf.harness.published import PUBLISHED
from perf.harness.recording import add_tensor_parallel, add_weights, parser
from perf.harness.scenario import SCENARIOS, Scenario
from perf.harness.shapes import FP8_BLOCKS

__all__ = ["arguments_of"]

MAX_DRAFT_TOKENS = 16


def arguments_of(arguments: Sequence[str] | None, description: str | None) -> argparse.Namespace:
    """The command line's options. Exits with an error if they do not fit together."""
    made = speculative_parser(description)
    given = made.parse_args(arguments)
    most = max(given.num_draft_tokens)
    if not 0 <= min(given.num_draft_tokens) <= most <= MAX_DRAFT_TOKENS:
        made.error(f"--num-draft-tokens {given.num_draft_tokens}: expected 0 to {MAX_DRAFT_TOKENS}")

    if not all(1 <= length <= most + 1 for length in given.acceptance_length or ()):
        made.error(f"--acceptance-length {given.acceptance_length}: expected 1 to {most + 1}")

    if given.policy_sweep and given.acceptance_length is not None:
        made.error("--policy-sweep sets the acceptance lengths: expected no --acceptance-length")

    if given.policy_sweep and given.tensor_parallel:
        made.error("--policy-sweep: expected no --tensor-parallel")

    if given.trace is not None:
        if given.policy_sweep or given.acceptance_length is not None:
            made.error("--trace: expected no --acceptance-length and no --policy-sweep")
        try:
            given.trace = AcceptanceTrace.load(given.trace)
        except (ConfigError, OSError) as error:
            made.error(f"--trace: {error}")

    is_simulated = given.policy_sweep or given.acceptance_length is not None or given.trace is not None
    if is_simulated and given.executor == "auto":
        given.executor = "graph"
    if is_simulated and (given.executor != "graph" or not given.device.startswith("cuda")):
        made.error("simulated acceptance needs the graph executor on a GPU")

    if given.peer and (
        given.acceptance_length is None or given.policy_sweep or given.draft not in (None, MTP)
    ):
        made.error("--peer: expected --acceptance-length, and a draft with random weights")

    if given.ngrams and (given.draft == "ngram" or given.peer):
        made.error("--ngrams: expected a draft head or a model, and no --peer")

    if given.draft_weights and given.draft == "ngram":
        made.error("--draft-weights: expected an EAGLE-3 head, not n-grams")

    if given.peer and (given.weights not in (None, FP8_BLOCKS) or given.kv_dtype):
        made.error(f"--peer: expected no --kv-dtype, and --weights {FP8_BLOCKS} or none: as peers have them")

    if given.peer and given.draft_weights:
        made.error("--peer: expected no --draft-weights: peers have drafts as files store them")

    if given.text is not None and not (given.text.is_file() and given.text.stat().st_size):
        made.error(f"--text {given.text}: expected a file that is not empty")

    if given.model not in PUBLISHED and given.draft is None:
        made.error(f"--model {given.model}: expected a --draft")

    return given


def speculative_parser(description: str | None) -> argparse.ArgumentParser:
    made = parser(description)
    made.add_argument("--scenario", nargs="+", type=Scenario.parse, default=SCENARIOS, metavar="NAME")
    made.add_argument(
        "--num-draft-tokens",
        nargs="+",
        type=at_least(0),
        default=[3],
        metavar="K",
        help="per round; 0 adds nothing to the run without drafts",
    )
    made.add_argument(
        "--acceptance-length",
        nargs="+",
        type=over_zero,
        metavar="TOKENS",
        help="per round, to simulate, up to drafts + 1; an engine for each",
    )
    made.add_argument(
        "--trace", type=Path, help="rounds to simulate, as AcceptanceTrace.save has written them"
    )
    made.add_argument("--strict-performance", action="store_true", help="as in EngineConfig")
    made.add_argument(
        "--draft",
        help='an EAGLE-3 head, folder or hub id; "peagle", or "dflash-16" for a DFlash head with 15 masks, '
        'with random weights; a model of --model, as a small model; "mtp" for the MTP layer of the model; '
        '"assistant" for an assistant of a Gemma 4 model; or "ngram"',
    )
    made.add_argument("--ngrams", action="store_true", help="measure the draft with n-grams beside it too")
    made.add_argument("--text", type=Path, help="a text to take prompts from; the default is random tokens")
    made.add_argument("--peer", choices=("vllm",), help="an engine to measure in the same run")
    add_weights(made)
    made.add_argument("--draft-weights", choices=("fp8", "int4"), help="as in Speculation")
    made.add_argument("--aux-layer-convention", choices=("output", "boundary"), help="as in Speculation")
    made.add_argument(
        "--policy-sweep", action="store_true", help="measure the adaptive policy on batches of all sizes"
    )
    add_tensor_parallel(made)
    return made
