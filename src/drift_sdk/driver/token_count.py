"""Counting the tokens of a prompt without generating."""

from __future__ import annotations

from drift_sdk.driver.loop_poster import Latch
from drift_sdk.driver.prompts import ModelText, Prompt

__all__ = ["TokenCount"]


class TokenCount:
    """A prompt whose tokens are to be counted on a text thread. `done` is set when `num_tokens` is known, or
    with the error of the prompt."""

    request_id = "count_tokens()"  # for the log

    def __init__(self, prompt: Prompt, model: ModelText) -> None:
        self._prompt = prompt
        self._model = model
        self.text_field: str = prompt.field
        self.done: Latch = Latch()
        self.is_done = False
        self.num_tokens: int = 0

    def run(self) -> None:
        self.num_tokens = self._prompt.num_tokens(self._model)
