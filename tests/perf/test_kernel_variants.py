"""The number of kernels that a default engine compiles when it first starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
MOST = {"plain": 67, "EAGLE-3": 142}
"""Variants, by the kind of decoding."""


def test_default_engines_compile_no_more_variants_of_kernels(tmp_path: Path) -> None:
    """Those of Llama-3.1-8B on an H200, recorded by a process whose kernels are not interpreted."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    command = [sys.executable, "-m", "perf.kernel_variants", "--model", "llama-3.1-8b"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    *_, total = done.stdout.splitlines()
    for (kind, most), found in zip(MOST.items(), total.split()[:2], strict=True):
        assert int(found) <= most, (
            f"{kind}: {found} variants of kernels: expected at most {most}. Each takes about 0.3 s of an "
            "engine's first start on a machine, and is loaded at every other start. Numbers that differ from "
            f"step to step need no variants of their own: see `do_not_specialize`.\n{done.stdout}"
        )
