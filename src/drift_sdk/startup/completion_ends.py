"""The tokens that end a completion: those that settings name, the tokenizer's, and the chat template's."""

from __future__ import annotations

from collections.abc import Sequence

from drift_sdk.errors import RequestError
from drift_sdk.loading.gguf_ends import ANSWER_ENDS, MESSAGE_END
from drift_sdk.text.chat import ChatTemplate
from drift_sdk.text.tokenizer import Tokenizer

__all__ = ["completion_ends"]

QUESTION, THOUGHT, ANSWER = "driftquestion", "driftthought", "driftanswer"
"""Texts of messages that no template has by itself."""


def completion_ends(
    named_ids: Sequence[int], tokenizer: Tokenizer, template: ChatTemplate | None, vocab_size: int
) -> tuple[int, ...]:
    """The ids that end a completion, `named_ids` first.

    Many fine-tuned models have settings of their base model, which name another end than their answers have:
    the tokenizer's end-of-sequence token and the token after an assistant's message in the template are ends
    as well. Of gpt-oss, whose answers consist of several messages, the end of a message is none.
    """
    found = dict.fromkeys(named_ids)
    ends = [tokenizer.eos_token_id, None if template is None else _turn_end(tokenizer, template)]
    if any(tokenizer.token_to_id(text) is not None for text in ANSWER_ENDS):
        message_end = tokenizer.token_to_id(MESSAGE_END)
        ends = [token_id for token_id in ends if token_id != message_end]
    found |= {token_id: None for token_id in ends if token_id is not None and token_id < vocab_size}
    return tuple(found)


def _turn_end(tokenizer: Tokenizer, template: ChatTemplate) -> int | None:
    """The added token that follows an assistant's message in a template. None if there is none, if it also
    stands inside of a message, after the reasoning, or if the template rejects the messages."""
    messages = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": ANSWER, "reasoning_content": THOUGHT},
    ]
    try:
        prompt = template.render(messages, add_generation_prompt=False)
    except RequestError:
        return None

    before, answer, after = prompt.rpartition(ANSWER)
    token = tokenizer.leading_added_token(after.lstrip()) if answer else None
    _, thought, between = before.rpartition(THOUGHT)
    if token is None or (thought and token in between):
        return None

    return tokenizer.token_to_id(token)
