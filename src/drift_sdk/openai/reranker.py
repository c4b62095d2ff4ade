"""How a model that generates text judges whether a document is relevant to a query."""

from __future__ import annotations

import re
from collections.abc import Mapping

from msgspec import Struct

from drift_sdk import ConfigError

PLACE = re.compile(r"\{(instruction|query|document)\}")


class Reranker(Struct, frozen=True, kw_only=True):
    """How a model that generates text judges a document.

    template:    the prompt, tokenised without special tokens: a text with the places {query}, {instruction},
                 and {document} once.
    instruction: what the query asks for, where a request does not say it.
    choices:     the answers of which the first one means that the document is relevant.

    ConfigError for a template without these places.
    """

    template: str
    instruction: str
    choices: tuple[str, str] = ("yes", "no")

    def __post_init__(self) -> None:
        places = PLACE.findall(self.template)
        if "query" not in places or places.count("document") != 1:
            raise ConfigError.of("template", self.template, "a text with {query}, and {document} once")

    def prompt(self, query: str, document: str, instruction: str | None) -> tuple[str, str, str]:
        """The prompt in three parts: what is before the document, the document, and what is after it."""
        values = {"query": query, "instruction": self.instruction if instruction is None else instruction}
        before, _, after = self.template.partition("{document}")
        first, last = (PLACE.sub(lambda match: values[match[1]], each) for each in (before, after))
        return first, document, last


RERANKERS: Mapping[str, Reranker] = {
    "qwen3": Reranker(
        template=(
            "<|im_start|>system\n"
            "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
            'Note that the answer can only be "yes" or "no".<|im_end|>\n'
            "<|im_start|>user\n"
            "<Instruct>: {instruction}\n"
            "<Query>: {query}\n"
            "<Document>: {document}<|im_end|>\n"
            "<|im_start|>assistant\n<think>\n\n</think>\n\n"
        ),
        instruction="Given a web search query, retrieve relevant passages that answer the query",
    ),
}
"""Of published models, by names for the command line: Qwen3-Reranker."""
