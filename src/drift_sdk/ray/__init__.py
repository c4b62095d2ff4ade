"""Engines in actors of Ray: `RayEngine`, and `ray_pool` with several of them behind the methods of one.

Needs the extra `ray`: DriftError without it. docs/deployment/scaling.md describes when to use it, and
what Ray does to the process.
"""

from __future__ import annotations

from drift_sdk.errors import DriftError

try:
    import ray as _ray  # noqa: F401 - whether it is there
except ImportError as cause:
    raise DriftError('drift_sdk.ray needs the package ray: pip install "drift-engine[ray]"') from cause

from drift_sdk.ray.ray_engine import Placement, RayEngine, ray_pool

__all__ = ["Placement", "RayEngine", "ray_pool"]
