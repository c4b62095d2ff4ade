"""Training of a head: the loss over unrolled drafts, the loop, and its checkpoints."""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from msgspec import Struct

from .acceptance import evaluate, evaluation_groups
from .answers import Answer, AnswerError
from .batches import Batch, Conversation, make_batches
from .head import DraftHead
from .target import Target

__all__ = ["CheckpointError", "Training", "TrainingSettings", "draft_loss"]

MIN_WARMUP = 100
"""Fewest steps in which the learning rate rises."""
JUDGED = "chat 0"
"""The group of evaluation answers whose acceptance decides which head is the best."""


class CheckpointError(OSError):
    """A checkpoint that training cannot continue from. The message names its file and the reason."""


class TrainingSettings(Struct, frozen=True, kw_only=True):
    """The settings of a training.

    num_steps, seconds:  where training ends, whichever comes first; the learning rate falls until then.
    unrolled:            steps of drafting that the loss covers. A later step counts `decay` times as much as
                         that before it.
    warmup:              share of training in which the learning rate rises.
    """

    num_steps: int
    seconds: float
    evaluate_every_s: float = 20.0
    tokens_per_batch: int = 8192
    max_length: int = 512
    unrolled: int = 5
    decay: float = 0.8
    learning_rate: float = 1e-3
    warmup: float = 0.03
    max_norm: float = 1.0
    seed: int = 0


def draft_loss(
    head: DraftHead, target: Target, batch: Batch, settings: TrainingSettings
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of drafting from every row of the answers, and the share [unrolled] of drafts of each step
    that are the answers' tokens.

    The head learns the target's distribution over the tokens that it can propose, where the answer's next
    token is one of them. Each step is given the answer's tokens up to its own.
    """
    token_ids, (_, length) = batch.token_ids, batch.token_ids.shape
    features, final = target.run(token_ids, head.aux_layers)
    # The target's prediction of what row i drafts first, token i + 2, is made at i + 1.
    predicted = (
        target.logits(final.flatten(0, 1)[batch.rows + 1], head.target_rows).softmax(-1).to(final.dtype)
    )

    head_pass = head.open(head.cast(target.decoder.dtype), length)
    losses: list[torch.Tensor] = []
    shares: list[torch.Tensor] = []

    def take(step: int, hidden: torch.Tensor) -> torch.Tensor:
        known = batch.known(step)
        rows = batch.rows[known]
        logits = head_pass.logits(hidden.flatten(0, 1)[rows])
        wanted = token_ids.view(-1)[rows + 2 + step]
        # Rows of an answer follow each other, and so do their predictions.
        losses.append(cross_entropy(predicted[known + step], logits, head.is_proposable[wanted]))
        shares.append((head.target_ids[logits.detach().argmax(-1)] == wanted).float().mean())
        return token_ids.roll(-2 - step, 1)

    head_pass.draft(target, token_ids, features, settings.unrolled, take)
    weights = [settings.decay**step for step in range(settings.unrolled)]
    loss = sum(weight * loss for weight, loss in zip(weights, losses, strict=True)) / sum(weights)
    return torch.as_tensor(loss), torch.stack(shares)


def cross_entropy(wanted: torch.Tensor, logits: torch.Tensor, is_counted: torch.Tensor) -> torch.Tensor:
    """The mean cross entropy of distributions `wanted` [N, V] and logits [N, V] over the rows counted."""
    losses = -(wanted * F.log_softmax(logits, -1)).sum(-1)
    return (losses * is_counted).sum() / is_counted.sum().clamp(min=1)


class Training:
    """A head in training, which can be stopped at any time and continued from the folder `work`.

    The folder receives checkpoint.pt (everything needed to continue), curve.jsonl (a line per evaluation) and
    draft/ (the best head so far, in the published format).
    """

    def __init__(self, head: DraftHead, target: Target, work: Path, settings: TrainingSettings) -> None:
        self.step = 0
        self.seconds = 0.0
        self.num_tokens = 0
        self.best = 0.0
        self._head = head
        self._target = target
        self._work = work
        self._settings = settings
        weights = list(head.weights.values())
        self._optimizer = torch.optim.AdamW(
            weights,
            lr=settings.learning_rate,
            betas=(0.9, 0.95),
            weight_decay=0.0,
            fused=target.device.type == "cuda",
        )

    @property
    def checkpoint(self) -> Path:
        return self._work / "checkpoint.pt"

    @property
    def _curve(self) -> Path:
        return self._work / "curve.jsonl"

    def restore(self) -> bool:
        """Continue from the folder's checkpoint; False if there is none. CheckpointError if it is damaged or
        of another head."""
        if not self.checkpoint.exists():
            return False

        try:
            self._take(torch.load(self.checkpoint, map_location=self._target.device, weights_only=True))
        except Exception as error:  # reading a damaged file may raise anything
            reason = " ".join(str(error).split())
            raise CheckpointError(f"{self.checkpoint}: not a checkpoint of this head: {reason}") from error

        return True

    def _take(self, state: dict[str, Any]) -> None:
        """Continue from what `_save` wrote."""
        head = self._head
        current = {"target_ids": head.target_ids, "feature_rms": head.feature_rms} | head.weights
        stored = {"target_ids": state["target_ids"], "feature_rms": state["feature_rms"]} | state["weights"]
        for name, tensor in current.items():
            if stored[name].shape != tensor.shape:
                found, expected = list(stored[name].shape), list(tensor.shape)
                raise ValueError(f"{name} has shape {found}, expected {expected}")

        for name, weight in head.weights.items():
            weight.data.copy_(state["weights"][name])
        head.feature_rms.copy_(state["feature_rms"])
        # More answers since then may have other frequent tokens.
        head.propose(self._target, state["target_ids"])
        self._optimizer.load_state_dict(state["optimizer"])
        self.step, self.seconds = state["step"], state["seconds"]
        self.num_tokens, self.best = state["num_tokens"], state["best"]

    def run(self, answers: Callable[[], Sequence[Answer]], evaluation: Sequence[Answer]) -> None:
        """Train until the settings' end. `answers` is called before each pass over them."""
        settings = self._settings
        started_at, evaluated_at = time.monotonic() - self.seconds, time.monotonic()
        losses: list[torch.Tensor] = []
        for conversations in self._batches(answers):
            if self.progress >= 1.0:
                break

            batch = Batch(conversations, self._target.device)
            loss, shares = draft_loss(self._head, self._target, batch, settings)
            self._update(loss)
            losses.append(torch.cat((loss.detach()[None], shares)))
            self.step += 1
            self.num_tokens += batch.num_tokens
            self.seconds = time.monotonic() - started_at
            if time.monotonic() - evaluated_at >= settings.evaluate_every_s:
                self._evaluate(evaluation, losses)
                losses, evaluated_at = [], time.monotonic()

        if losses or not self._curve.is_file():
            self._evaluate(evaluation, losses)

    @property
    def progress(self) -> float:
        """The share of training that is done."""
        return max(self.step / self._settings.num_steps, self.seconds / self._settings.seconds)

    @property
    def learning_rate(self) -> float:
        """The present learning rate: it rises for a short time, then falls to zero along a cosine."""
        settings, progress = self._settings, min(self.progress, 1.0)
        rise = min(1.0, (self.step + 1) / MIN_WARMUP, (progress + 1e-3) / settings.warmup)
        return settings.learning_rate * rise * 0.5 * (1 + math.cos(math.pi * progress))

    def _batches(self, answers: Callable[[], Sequence[Answer]]) -> Iterator[list[Conversation]]:
        """Batches without end, from the one after `step`."""
        settings, num_passed = self._settings, 0
        for epoch in itertools.count():
            conversations = [Conversation.of(answer, settings.max_length) for answer in answers()]
            usable = [each for each in conversations if len(each.token_ids) >= each.start + settings.unrolled]
            if not usable:
                raise AnswerError(f"expected answers of {settings.unrolled} tokens or more")

            batches = make_batches(usable, settings.tokens_per_batch, settings.seed + epoch)
            yield from batches[max(0, self.step - num_passed) :]
            num_passed += len(batches)

    def _update(self, loss: torch.Tensor) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = self.learning_rate
        self._optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._head.weights.values(), self._settings.max_norm)
        self._optimizer.step()

    def _evaluate(self, evaluation: Sequence[Answer], losses: Sequence[torch.Tensor]) -> None:
        """Measure acceptance, append it to the curve, and write the checkpoint and a head that is the best so
        far."""
        groups = evaluation_groups(evaluation)
        measured = {name: evaluate(self._head, self._target, group) for name, group in sorted(groups.items())}
        lengths = {name: acceptance.length for name, acceptance in measured.items()}
        mean = torch.stack(list(losses)).mean(0).tolist() if losses else [0.0]
        line = {
            "step": self.step,
            "seconds": round(self.seconds, 1),
            "tokens": self.num_tokens,
            "loss": round(mean[0], 4),
            "accuracy": [round(share, 4) for share in mean[1:]],
            "acceptance_length": {name: round(length, 4) for name, length in lengths.items()},
            "acceptance_rates": {
                name: [round(rate, 4) for rate in acceptance.rates] for name, acceptance in measured.items()
            },
        }
        print(json.dumps(line), flush=True)
        with self._curve.open("a", encoding="utf-8") as curve:
            curve.write(json.dumps(line) + "\n")
        judged = lengths.get(JUDGED, sum(lengths.values()))
        if judged > self.best:
            self.best = judged
            self._head.save(self._work / "draft")
        self._save()

    def _save(self) -> None:
        state: dict[str, Any] = {
            "weights": {name: weight.detach() for name, weight in self._head.weights.items()},
            "feature_rms": self._head.feature_rms,
            "target_ids": self._head.target_ids,
            "optimizer": self._optimizer.state_dict(),
            "step": self.step,
            "seconds": self.seconds,
            "num_tokens": self.num_tokens,
            "best": self.best,
        }
        part = self.checkpoint.with_suffix(".part")
        torch.save(state, part)
        part.rename(self.checkpoint)
