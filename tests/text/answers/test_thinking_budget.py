"""A budget of reasoning: what masks allow, in each format and with drafts."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
from chat_families import FAMILIES, family_tokenizer

from drift_sdk import RequestError
from drift_sdk.testing import byte_tokenizer
from drift_sdk.text.answers.formats import AnswerFormats
from drift_sdk.text.answers.reasoning import ThinkingBudget
from drift_sdk.text.tokenizer import Tokenizer
from drift_sdk.text.tools import ToolSet

EOS = 256
THINK = "think"
HARMONY = "harmony"
ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|start|>assistant<|channel|>final<|message|>"
FORMATS = {
    # name -> (format, family whose special tokens there are, or None; opening, closing)
    "text": (THINK, None, "<think>", "</think>"),
    "special": (THINK, "deepseek_v31", "<think>", "</think>"),
    "mistral": ("mistral", "magistral", "[THINK]", "[/THINK]"),
    "granite": ("granite", None, "Here is my thought process:", "Here is my response:"),
    "granite tag": ("granite", None, "<think>", "</think>"),
    "gemma4": ("gemma4", "gemma4", "<|channel>thought\n", "<channel|>"),
    HARMONY: (HARMONY, HARMONY, ANALYSIS, f"<|end|>{FINAL}"),
}


class Answers:
    """Answers of a model that writes a text of its own as far as a budget lets it."""

    def __init__(self, name: str, *, prompt: str = "", is_thinking: bool = False) -> None:
        self.formats = AnswerFormats(tools=None, reasoning=FORMATS[name][0])
        family = FORMATS[name][1]
        self.tokenizer = byte_tokenizer() if family is None else family_tokenizer(FAMILIES[family])
        self.prompt = prompt
        self.is_thinking = is_thinking

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def budget(self, num_tokens: int) -> ThinkingBudget:
        thinking = self.formats.thinking(self.prompt, is_thinking=self.is_thinking)
        assert thinking is not None
        return ThinkingBudget(
            thinking,
            num_tokens,
            self.tokenizer,
            marker_ids=self.tokenizer.special_ids_of(self.formats.markers),
            vocab_size=self.tokenizer.vocab_size,
        )

    def written(self, text: str, num_tokens: int) -> str:
        """What is written under a budget in place of a text: what is forced, then what the model goes on
        with after it has noticed."""
        budget, ids = self.budget(num_tokens), self.encode(text)
        written: list[int] = []
        for token_id in ids:
            while (forced := forced_by(budget)) is not None and forced != token_id:
                written.append(forced)
                budget.advance([forced])
            written.append(token_id)
            budget.advance([token_id])
        while (forced := forced_by(budget)) is not None:
            written.append(forced)
            budget.advance([forced])
        return self.tokenizer.decode(written, skip_special_tokens=False)

    def reasoning(self, text: str) -> str:
        splitter = self.formats.splitter(ToolSet.of(None), prompt=self.prompt, is_thinking=self.is_thinking)
        splitter.push(text)
        splitter.flush()
        return "".join(text[start:end] for start, end in splitter.reasoning_spans)


def allowed_by(row: np.ndarray) -> list[int]:
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()


def forced_by(budget: ThinkingBudget) -> int | None:
    """The only token that is allowed; None if all are."""
    allowed = allowed_by(budget.masks(())[0])
    return allowed[0] if len(allowed) == 1 else None


@pytest.mark.parametrize("name", FORMATS)
def test_reasoning_ends_when_its_tokens_are_used_up(name: str) -> None:
    _, _, opening, closing = FORMATS[name]
    answers = Answers(name, prompt="<|start|>assistant" if name == HARMONY else "")
    thought = "Um, well."  # tokens are bytes
    whole = f"{opening}{thought}{closing}Yes."
    for num_tokens in range(len(thought) + 3):
        found = answers.written(whole, num_tokens)
        if num_tokens >= len(thought):
            assert found == whole
            continue

        end = closing.removesuffix(FINAL)
        assert found.startswith(f"{opening}{thought[:num_tokens]}{end}")
        assert answers.reasoning(found) == thought[:num_tokens]


@pytest.mark.parametrize("name", ["text", "special", "mistral"])
def test_reasoning_that_the_prompt_has_opened_counts(name: str) -> None:
    closing = FORMATS[name][3]
    answers = Answers(name, is_thinking=True)
    assert answers.written("Hm.", 2) == f"Hm{closing}."
    assert answers.written("Hm.", 0) == f"{closing}Hm."
    assert answers.written("", 0) == closing
    assert answers.written(f"{closing}Yes.", 2) == f"{closing}Yes."


@pytest.mark.parametrize("name", ["text", "special"])
def test_answers_without_reasoning_are_free(name: str) -> None:
    answers = Answers(name)
    for text in ("Yes.", "  A tag: <think>Hm.", "<thick>Hm.", "Hm.</think>Yes."):
        assert answers.written(text, 0) == text


def test_a_marker_that_has_begun_is_completed() -> None:
    answers = Answers("text")
    assert answers.written("<think>Hm</thing>", 6) == "<think>Hm</think>g>"
    assert answers.written("<think>Hm</think>Yes.", 5) == "<think>Hm</think>Yes."
    assert answers.reasoning("<think>Hm</think>") == "Hm"


def test_harmony_may_choose_a_message_before_the_final_one_is_forced() -> None:
    answers = Answers(HARMONY, prompt="<|start|>assistant")
    call = "<|start|>assistant<|channel|>commentary to=functions.add<|message|>{}<|call|>"
    first = f"{ANALYSIS}Hm.<|end|><|start|>assistant{ANALYSIS}Well"
    assert answers.written(f"{first}<|end|>{call}", 5) == f"{first[:-2]}<|end|>ll<|end|>{call}"
    again = f"{ANALYSIS}Hm<|end|><|start|>assistant{ANALYSIS}"
    assert answers.written(f"{again}Yes.", 2) == f"{again}<|end|>{FINAL}Yes."
    begun = Answers(HARMONY, prompt=f"<|start|>user<|message|>x<|end|><|start|>assistant{ANALYSIS}Hm")
    assert begun.written("well", 2) == "we<|end|>ll"


@pytest.mark.parametrize("name", FORMATS)
def test_masks_after_drafts_are_those_after_tokens(name: str) -> None:
    rng = random.Random(name)
    _, _, opening, closing = FORMATS[name]
    answers = Answers(name, prompt="<|start|>assistant" if name == HARMONY else "")
    for _ in range(50):
        num_tokens = rng.randrange(6)
        text = f"{opening}{'Hm, well'[: rng.randrange(9)]}{closing}Yes."
        ids = answers.encode(answers.written(text, num_tokens))
        start = rng.randrange(len(ids))
        drafts = ids[start : start + 5]
        budget = answers.budget(num_tokens)
        budget.advance(ids[:start])
        rows = budget.masks(drafts)
        for row, draft in zip(rows, [*drafts, None], strict=True):
            np.testing.assert_array_equal(row, budget.masks(())[0])
            if draft is not None:
                budget.advance([draft])


def test_drafts_that_are_not_allowed_have_no_masks_after_them() -> None:
    answers = Answers("special", is_thinking=True)
    closing, other = answers.encode("</think>")[0], answers.encode("x")[0]
    rows = answers.budget(1).masks([other, other, other])
    assert [len(allowed_by(row)) for row in rows] == [answers.tokenizer.vocab_size, 1, 0, 0]
    assert allowed_by(rows[1]) == [closing]
    with pytest.raises(RequestError, match="thinking_budget"):
        answers.budget(1).advance([other, other])


def test_ids_of_padding_are_not_allowed() -> None:
    for vocab_size in (288, 289, 319):
        thinking = Answers("text").formats.thinking("", is_thinking=False)
        assert thinking is not None
        budget = ThinkingBudget(thinking, 9, byte_tokenizer(), marker_ids=frozenset(), vocab_size=vocab_size)
        assert allowed_by(budget.masks(())[0]) == list(range(vocab_size))


def test_a_marker_without_tokens_is_refused() -> None:
    class Deaf(Tokenizer):
        def encode(self, text: str, *, add_special_tokens: bool = True) -> Sequence[int]:  # type: ignore[override]
            return [0]

    thinking = Answers("text").formats.thinking("", is_thinking=False)
    deaf = byte_tokenizer()
    deaf.__class__ = Deaf
    assert thinking is not None
    with pytest.raises(RequestError, match="thinking_budget=9.*'</think>'"):
        ThinkingBudget(thinking, 9, deaf, marker_ids=frozenset(), vocab_size=257)


@pytest.mark.parametrize("name", FORMATS)
def test_a_mask_ahead_is_the_mask_after_every_token_that_may_be_next(name: str) -> None:
    """It is missing before the token that may use the budget up, and nowhere else."""
    answers = Answers(name)
    opening, closing = FORMATS[name][2:]
    rng = random.Random(3)
    num_known = num_open = num_forced = 0
    for num_tokens in (0, 1, 5):
        budget = answers.budget(num_tokens)
        written: list[int] = []
        for token_id in answers.encode(f"{opening}abcdefgh{closing}xyz"):
            forced = forced_by(budget)
            chosen = token_id if forced is None else forced
            ahead = budget.mask_ahead()
            others = rng.sample(range(answers.tokenizer.vocab_size), 20) if forced is None else []
            after: set[bytes] = set()
            for each in (chosen, *others):
                other = answers.budget(num_tokens)
                other.advance([*written, each])
                after.add(other.masks(()).tobytes())
            if ahead is None:
                num_open += 1
            else:
                num_known += 1
                assert after == {ahead.tobytes()}
            num_forced += forced is not None
            written.append(chosen)
            budget.advance([chosen])
    assert num_known > 20 and num_forced > 0 and num_open >= 2
