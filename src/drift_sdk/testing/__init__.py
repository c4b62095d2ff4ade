"""An engine without weights or GPU, for testing code that embeds one.

    engine = scripted_engine("Paris.")
    async with engine:
        assert (await engine.generate("Capital of France?")).text == "Paris."

Everything but the model is real: threads, streams, scheduling, stops, cancellation, parsing of tool calls.
"""

from drift_sdk.testing.byte_tokens import EOS_TOKEN_ID, byte_alphabet, byte_tokenizer
from drift_sdk.testing.engine import (
    CHAT_TEMPLATE,
    ScriptedEngine,
    ScriptedModel,
    ScriptedSyncEngine,
    scripted_engine,
    scripted_sync_engine,
)
from drift_sdk.testing.executor import ScriptedExecutor
from drift_sdk.testing.replies import NextToken, Reply, ReplyLike

__all__ = [
    "CHAT_TEMPLATE",
    "EOS_TOKEN_ID",
    "NextToken",
    "Reply",
    "ReplyLike",
    "ScriptedEngine",
    "ScriptedExecutor",
    "ScriptedModel",
    "ScriptedSyncEngine",
    "byte_alphabet",
    "byte_tokenizer",
    "scripted_engine",
    "scripted_sync_engine",
]
