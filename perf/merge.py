"""Merge result files that were written elsewhere into perf/results, each into the file of its GPU and topic.

python -m perf.merge from-the-gpu/decode.json from-the-gpu/kernels.json

Afterwards, `python docs/generate_report.py` writes the pages that show them.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import msgspec

from perf.harness.record import read, result_path, write

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", type=Path, nargs="+", help="result files, named after their topics")
    for file in parser.parse_args(arguments).files:
        try:
            results = read(file)
        except (OSError, msgspec.DecodeError) as error:
            parser.error(f"{file}: expected a result file: {error}")

        path = result_path(file.stem, results.gpu)
        merged = write(results, path)
        print(f"{path}: {len(results.runs)} runs merged, {len(merged.runs)} in total")


if __name__ == "__main__":
    main()
