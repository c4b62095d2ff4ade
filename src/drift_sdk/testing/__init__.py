"""An engine without weights or GPU, for testing code that embeds one.

    engine = scripted_engine("Paris.")
    async with engine:
        assert (await engine.generate("Capital of France?")).text == "Paris."

Everything but the model is real: threads, streams, scheduling, stops, cancellation, parsing of tool calls.
"""

from drift_sdk.testing.engine import (
    CHAT_TEMPLATE,
    ScriptedEngine,
    ScriptedExecutor,
    ScriptedModel,
    ScriptedSyncEngine,
    scripted_engine,
    scripted_sync_engine,
)
from drift_sdk.testing.replies import EOS_TOKEN_ID, NextToken, Reply, ReplyLike, byte_alphabet, byte_tokenizer

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
