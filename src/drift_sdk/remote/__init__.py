"""Engines in other processes: the host of an engine there, and the engine that stands for it here."""
