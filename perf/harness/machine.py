"""Names and versions of the machine and the software on which figures are measured."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from importlib import metadata
from pathlib import Path

import torch

from perf.harness.processes import ROOT

__all__ = ["commit", "default_device", "driver", "gpu_name", "versions"]

MEASURED_CODE = ("src", "perf", ":!perf/results")


def default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def gpu_name(device: str) -> str:
    """ "NVIDIA H200"; for a CPU, "CPU 2 cores"."""
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else f"CPU {os.cpu_count()} cores"


def driver() -> str | None:
    """The version of NVIDIA's driver; None if there is none."""
    found = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    if found:
        return found.splitlines()[0]

    file = Path("/proc/driver/nvidia/version")
    match = re.search(r"\b\d{3}\.[\d.]+", file.read_text()) if file.is_file() else None
    return match[0] if match else None


def commit() -> str:
    """The commit of the measured code: $DRIFT_COMMIT if it is set (for code without its history), else git's.

    "-dirty" is appended if measured code differs from git's commit.
    """
    given = os.environ.get("DRIFT_COMMIT")
    if given:
        return given

    found = _output("git", "rev-parse", "--short", "HEAD")
    if not found:
        return "unknown"

    return f"{found}-dirty" if _output("git", "status", "--porcelain", "--", *MEASURED_CODE) else found


def versions(*packages: str) -> dict[str, str]:
    """Versions of Python, torch, triton, CUDA and the given packages, of those that are installed."""
    found = {"python": platform.python_version(), "torch": str(torch.__version__)}
    if torch.version.cuda is not None:
        found["cuda"] = torch.version.cuda

    for package in ("triton", *packages):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue

    return found


def _output(*command: str) -> str | None:
    """The output of a command that runs in the repository; None if it fails."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None

    return done.stdout.strip() if done.returncode == 0 else None
