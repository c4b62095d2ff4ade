"""Embedded, async-first LLM inference."""
