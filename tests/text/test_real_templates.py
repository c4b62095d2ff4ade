"""Chat templates of published models, which `make template-test` downloads: rendered as by transformers, and
read back."""

from __future__ import annotations

import pytest
from real_templates import TOKENS, differences, read_back, sources

from drift_sdk.text.chat import ChatTemplate

pytestmark = pytest.mark.slow

SOURCES = sources()  # none before the download: the tests are skipped then


@pytest.mark.parametrize("name", SOURCES)
def test_no_part_of_a_conversation_is_lost(name: str) -> None:
    """The prompt is what transformers renders from the messages in a form that the template shows most of."""
    assert differences(ChatTemplate(SOURCES[name], **TOKENS)) == {}


@pytest.mark.parametrize("name", SOURCES)
def test_tool_format_reads_the_calls_of_its_template(name: str) -> None:
    assert not read_back(ChatTemplate(SOURCES[name], **TOKENS)).endswith("NOT READ")
