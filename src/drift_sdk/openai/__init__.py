"""An ASGI application that serves engines by the protocols of OpenAI and Anthropic.

    app = drift_sdk.openai.app(engine)

Needs the extra `openai`. `python -m drift_sdk serve MODEL` runs it under uvicorn.
"""

from __future__ import annotations

from drift_sdk.errors import DriftError

try:
    import starlette  # noqa: F401
except ImportError as cause:
    raise DriftError(
        'drift_sdk.openai needs the package starlette: pip install "drift-engine[openai]"'
    ) from cause

from drift_sdk.openai.application import app
from drift_sdk.openai.service import RERANKERS, Reranker

__all__ = ["RERANKERS", "Reranker", "app"]
