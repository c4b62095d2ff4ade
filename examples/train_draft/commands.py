"""The commands: generate, train, measure."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import command_line
import smollm2
import torch

from drift_sdk import ConfigError, Engine, EngineConfig, ModelLoadError, Progress
from drift_sdk.models.dflash import is_dflash
from drift_sdk.models.draft_config import DraftConfig

from .acceptance import NUM_DRAFTS
from .answers import Answer, AnswerError, AnswerFolder, Limits, generate
from .batches import draft_vocabulary, unused_token
from .dflash import DFlashHead, dflash_settings
from .eagle import EagleHead, eagle_settings
from .head import DraftHead, feature_sizes, mlp_width
from .measuring import measure, measure_shapes, speculation_of
from .target import Target, load_chat_format, load_target
from .training import Training, TrainingSettings

__all__ = ["main"]

MAX_MODEL_LEN = 1024
"""Longest question and answer in training, in tokens."""
BATCHES, SHAPE_BATCHES = (1, 8, 64), (1, 8)
"""Requests at a time for which speed is measured by default."""
NUM_SIZED = 64
"""Answers from which the sizes of features are found."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit status."""
    options = parser().parse_args(arguments)
    return command_line.status_of(lambda: options.run(options))


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m examples.train_draft", description="Train a draft head for a model."
    )
    commands = made.add_subparsers(required=True, metavar="COMMAND")
    number = command_line.whole

    def command(name: str, run: object, text: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=text)
        added.add_argument("model", nargs="?", help="folder, .gguf file or hub id (default: SmolLM2-135M)")
        added.set_defaults(run=run)
        return added

    generating = command("generate", run_generate, "write answers to train with, and to evaluate with")
    generating.add_argument("--work", type=Path, required=True, help="folder of the answers")
    generating.add_argument("--tokens", type=number(1), default=4_000_000, help="tokens to generate")
    generating.add_argument("--seconds", type=positive, default=float("inf"), help="longest time to generate")
    generating.add_argument("--lanes", type=number(1, 4096), default=256, help="questions at a time")
    generating.add_argument(
        "--max-answer", type=number(8, 512), default=256, help="tokens of an answer at most"
    )
    generating.add_argument(
        "--own-share", type=share, default=0.5, help="share of questions that the model writes itself"
    )
    generating.add_argument("--seed", type=number(0), default=0, help="other seeds give other questions")

    training = command("train", run_train, "train a head, or continue")
    training.add_argument("--work", type=Path, required=True, help="folder of answers and results")
    training.add_argument("--answers", type=Path, help="folder of the answers (default: --work)")
    training.add_argument("--wait-tokens", type=number(1), help="wait for so many tokens of answers")
    training.add_argument("--kind", choices=("eagle3", "dflash"), default="eagle3", help="of the head")
    training.add_argument(
        "--layers", type=number(1, 16), default=2, help="of a DFlash head; an EAGLE-3 head has one"
    )
    training.add_argument("--start", type=Path, help="folder of a head to train further")
    training.add_argument("--vocabulary", type=number(16), default=5504, help="tokens that it can propose")
    training.add_argument("--shared-head", action="store_true", help="use the model's output projection")
    training.add_argument("--intermediate", type=number(16), help="width of its MLP (default: the model's)")
    training.add_argument("--steps", type=number(1), default=1_000_000, help="most steps of training")
    training.add_argument("--seconds", type=positive, default=float("inf"), help="longest time of training")
    training.add_argument("--evaluate-every", type=positive, default=20.0, help="seconds between evaluations")
    training.add_argument("--batch-tokens", type=number(64), default=8192, help="tokens in a batch")
    training.add_argument(
        "--unrolled",
        type=number(1, 16),
        help="drafts that the loss covers: steps of an EAGLE-3 head (default: 5), or masks of a DFlash head, "
        "which it then always has (default: 7)",
    )
    training.add_argument("--learning-rate", type=positive, default=1e-3)
    training.add_argument(
        "--device", type=device_name, default="cuda" if torch.cuda.is_available() else "cpu"
    )

    measuring = command("measure", run_measure, "measure acceptance and speed in the engine")
    measuring.add_argument("--draft", type=Path, required=True, help="folder of the head")
    measuring.add_argument("--output", type=Path, required=True, help="file of the results, JSON")
    measuring.add_argument("--prompts", type=Path, help="JSONL of kind and prompt")
    measuring.add_argument("--max-tokens", type=number(8), default=256)
    measuring.add_argument(
        "--batches",
        type=number(1, 4096),
        nargs="*",
        help="requests at a time, default 1, 8 and 64, with --shapes 1 and 8; none: no speeds",
    )
    measuring.add_argument("--trace", type=Path, help="file for the rounds of greedy chat answers")
    measuring.add_argument(
        "--shapes",
        type=shape_name,
        nargs="+",
        metavar="SHAPE",
        help="measure shapes such as chain-7, tree-7, ngram-7 and hybrid-7 instead",
    )
    measuring.add_argument(
        "--executor",
        choices=("auto", "eager", "graph"),
        default="auto",
        help="as in EngineConfig",
    )
    return made


def positive(text: str) -> float:
    """A number over 0, of an argument."""
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text}: expected a number over 0")

    return value


def device_name(text: str) -> str:
    """A device that torch has here, of an argument."""
    try:
        kind = torch.device(text).type
    except RuntimeError:
        kind = ""
    if kind not in ("cpu", "cuda") or kind == "cuda" and not torch.cuda.is_available():
        has_gpu = " or cuda" if torch.cuda.is_available() else ", as there is no GPU here"
        raise argparse.ArgumentTypeError(f"{text}: expected cpu{has_gpu}")

    return text


def shape_name(text: str) -> str:
    """The name of a shape, of an argument."""
    try:
        speculation_of(Path(), text)
    except (ValueError, ConfigError) as error:
        raise argparse.ArgumentTypeError(str(error)) from error

    return text


def share(text: str) -> float:
    """A number from 0 to 1, of an argument."""
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text}: expected a number from 0 to 1")

    return value


def run_generate(options: argparse.Namespace) -> None:
    limits = Limits(
        num_tokens=options.tokens,
        seconds=options.seconds,
        max_answer=options.max_answer,
        num_lanes=options.lanes,
        own_share=options.own_share,
    )
    model = options.model or str(smollm2.path())
    chat = load_chat_format(model)
    options.work.mkdir(parents=True, exist_ok=True)
    length = min(MAX_MODEL_LEN, chat.max_model_len)
    config = EngineConfig(
        max_model_len=length, max_num_seqs=options.lanes, kv_cache_tokens=options.lanes * length
    )

    async def run() -> None:
        async with Engine(model, config, on_progress=show) as engine:
            num_tokens = await generate(engine, chat, options.work, limits, options.seed)
        print(f"{num_tokens} tokens are generated", file=sys.stderr)

    anyio.run(run)


def show(progress: Progress) -> None:
    if progress.fraction in (0.0, 1.0):
        print(f"{progress.stage}: {progress.fraction:.0%}", file=sys.stderr, flush=True)


def run_train(options: argparse.Namespace) -> None:
    folder = AnswerFolder(options.answers or options.work)
    target = load_target(options.model or str(smollm2.path()), torch.device(options.device))
    if options.wait_tokens is not None:
        folder.wait(options.wait_tokens)
    answers, evaluation = folder.training(), folder.evaluation()
    if not answers or not evaluation:
        raise AnswerError(f"{options.answers or options.work}: holds no answers: run generate first")

    vocab_size = target.spec.vocab_size
    for each in (*answers, *evaluation):
        ids = each.prompt_ids + each.token_ids
        if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
            reason = f"answers of another model: a token id is not from 0 to {vocab_size - 1}"
            raise AnswerError(f"{options.answers or options.work}: {reason}")

    head, share = make_head(options, target, answers)
    num_tokens = sum(len(answer.token_ids) for answer in answers)
    print(f"{len(answers)} answers, {num_tokens} tokens, {share:.2%} can be proposed", file=sys.stderr)
    options.work.mkdir(parents=True, exist_ok=True)
    training = Training(
        head,
        target,
        options.work,
        TrainingSettings(
            num_steps=options.steps,
            seconds=options.seconds,
            evaluate_every_s=options.evaluate_every,
            tokens_per_batch=options.batch_tokens,
            unrolled=head.config.num_masks if isinstance(head, DFlashHead) else options.unrolled or 5,
            learning_rate=options.learning_rate,
        ),
    )
    if training.restore():
        print(f"continues after step {training.step}", file=sys.stderr)
    training.run(folder.training, evaluation)


def make_head(
    options: argparse.Namespace, target: Target, answers: Sequence[Answer]
) -> tuple[DraftHead, float]:
    """The head to train, and the share of the answers' tokens that it can propose."""
    vocabulary, share = draft_vocabulary(answers, options.vocabulary)
    width = options.intermediate or mlp_width(target.spec)
    settings = eagle_settings(target.spec, options.vocabulary, width)
    aux_layers = DraftConfig.from_hf(settings, target.spec).aux_layers
    sizes = feature_sizes(
        target, aux_layers, [each.prompt_ids + each.token_ids for each in answers[:NUM_SIZED]]
    )
    kind: type[DraftHead] = DFlashHead if options.kind == "dflash" else EagleHead
    if options.start is not None:
        check_head("--start", options.start)
        found = json.loads((options.start / "config.json").read_text(encoding="utf-8"))
        if is_dflash(found) != (kind is DFlashHead):
            raise ConfigError.of("start", str(options.start), f"a head of --kind {options.kind}")

        if kind is DFlashHead and options.unrolled not in (None, found["block_size"] - 1):
            raise ConfigError.of("unrolled", options.unrolled, f"the head's {found['block_size'] - 1} masks")

        return kind.load(options.start, target, sizes), share

    if kind is DFlashHead:
        if options.unrolled is not None and options.unrolled < NUM_DRAFTS:
            raise ConfigError.of("unrolled", options.unrolled, f"at least {NUM_DRAFTS} masks")

        settings = dflash_settings(
            target.spec,
            options.vocabulary,
            width,
            aux_layers=aux_layers,
            num_layers=options.layers,
            num_masks=options.unrolled or 7,
            mask_token_id=unused_token(answers, target.spec.vocab_size),
        )
    head = kind.start(settings, target, vocabulary, sizes, seed=0, has_head=not options.shared_head)
    return head, share


def check_head(option: str, folder: Path) -> None:
    """Raise ModelLoadError for a folder without a head."""
    for name in ("config.json", "model.safetensors"):
        if not (folder / name).is_file():
            raise ModelLoadError(f"{option} {folder}: expected the folder of a head; it has no {name}")


def run_measure(options: argparse.Namespace) -> None:
    check_head("--draft", options.draft)
    shapes = options.shapes or []
    if len(set(shapes)) < len(shapes):
        raise ConfigError.of("shapes", shapes, "different ones")

    if shapes and options.trace is not None:
        raise ConfigError.of("trace", str(options.trace), "none with --shapes")

    if not options.output.resolve().parent.is_dir():
        raise ConfigError.of("output", str(options.output), "a file in a folder that exists")

    given = {
        "prompts": options.prompts,
        "max_tokens": options.max_tokens,
        "batches": (SHAPE_BATCHES if shapes else BATCHES) if options.batches is None else options.batches,
        "executor": options.executor,
    }
    if shapes:
        run: Any = partial(measure_shapes, names=shapes, **given)
    else:
        run = partial(measure, trace=options.trace, **given)
    record = anyio.run(run, options.model or str(smollm2.path()), options.draft)
    print(json.dumps(record, indent=1))
    options.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
