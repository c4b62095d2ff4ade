"""An example of Ray in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from model_zoo import make_model

__all__ = ["LIMIT_S", "chat_model", "running"]

EXAMPLES = Path(__file__).parents[2] / "examples"
TEMPLATE = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
LIMIT_S = 240.0


def chat_model(folder: Path) -> str:
    """A model with random weights and a chat template."""
    make_model(1, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return str(folder)


@contextmanager
def running(name: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """The process of an example; it is killed at the end."""
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), *arguments]
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            yield process
        finally:
            process.kill()
