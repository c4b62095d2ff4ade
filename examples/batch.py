"""Complete a file of prompts, many at a time, and continue where an earlier run was stopped.

python examples/batch.py [MODEL] [--input prompts.jsonl] [--output answers.jsonl]

Each line of the input is a JSON object with a "prompt". Line n of the output answers line n of the input: it
has "text" and "finish_reason", or "error" if the prompt cannot be served. The program can be stopped with
Ctrl-C and started again: complete lines are not computed again. A file that it has not written is never
changed.
"""

import json
import sys
import time
from collections.abc import AsyncIterable, Iterator
from contextlib import aclosing
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

import command_line
import smollm2

from drift_sdk import Engine, Job, JobResult, SamplingParams

PROMPTS = Path(__file__).parent / "prompts.jsonl"
ANSWERS = smollm2.CACHE.parent / "answers.jsonl"
FIELDS = [["text", "finish_reason"], ["error"]]
STARTS = (b'{"text": "', b'{"error": "')

Answer = dict[str, str]


class FileError(OSError):
    """A file that cannot be used. The message names the file and the reason."""


def lines_of(source: Path) -> Iterator[str]:
    """The prompts of a file. Raises FileError at the first line without a prompt."""
    with source.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                prompt = json.loads(line)["prompt"]
            except (ValueError, TypeError, KeyError, RecursionError):
                prompt = None
            if not isinstance(prompt, str):
                raise FileError(f'{source}, line {number}: expected a JSON object with a string "prompt"')

            yield prompt


def count_prompts(source: Path) -> int:
    """The number of prompts of a file. Raises FileError if the file cannot be used."""
    if not source.is_file():
        raise FileError(f"{source}: expected a file of prompts")

    try:
        return sum(1 for _ in lines_of(source))
    except UnicodeDecodeError as error:
        raise FileError(f"{source}: expected UTF-8: {error}") from error


def complete_lines(output: Path) -> tuple[int, int]:
    """Number and bytes of the complete lines of the output; the last line of a killed run may be incomplete.

    Raises FileError if any line was not written by this program.
    """
    content = output.read_bytes()
    complete, newline, rest = content.rpartition(b"\n")
    lines = complete.split(b"\n") if newline else []
    is_ours = rest.startswith(STARTS) or (bool(lines) and any(start.startswith(rest) for start in STARTS))
    if content and not (all(map(is_answer, lines)) and is_ours):
        raise FileError(f"{output}: has lines that this program did not write; name another output")

    return len(lines), len(complete) + len(newline)


def is_answer(line: bytes) -> bool:
    """True if a line has the form of this program's output."""
    try:
        answer = json.loads(line)
    except (ValueError, RecursionError):
        return False

    is_known = isinstance(answer, dict) and list(answer) in FIELDS
    return is_known and all(isinstance(value, str) for value in answer.values())


def earlier_answers(source: Path, output: Path, num_prompts: int) -> tuple[int, int]:
    """Number and bytes of the answers in the output. Raises FileError if the output cannot be continued."""
    if not output.exists():
        return 0, 0

    if not output.is_file():
        raise FileError(f"{output}: expected a file")

    if output.samefile(source):
        raise FileError(f"{output}: is the input; name another output")

    num_answers, num_bytes = complete_lines(output)
    if num_answers > num_prompts:
        raise FileError(f"{output}: has {num_answers} answers, but {source} has {num_prompts} prompts")

    return num_answers, num_bytes


def answer_of(result: JobResult) -> tuple[Answer, int]:
    """The answer to a prompt, with its number of tokens."""
    if result.error is not None:
        return {"error": str(result.error)}, 0

    completion = result.completion
    answer = {"text": completion.text, "finish_reason": completion.finish_reason}
    return answer, completion.usage.completion_tokens


async def main(model: str, source: Path, output: Path, params: SamplingParams) -> None:
    num_prompts = count_prompts(source)
    num_earlier, num_bytes = earlier_answers(source, output, num_prompts)
    if num_earlier:
        print(f"{num_earlier} of {num_prompts} are already in {output}", file=sys.stderr)
    if num_earlier == num_prompts:
        return

    # Opened before the model is loaded, so that a file that cannot be written is reported at once.
    with output.open("a", encoding="utf-8", newline="\n") as lines:
        lines.truncate(num_bytes)
        async with Engine(model) as engine:
            numbered = enumerate(lines_of(source), 1)
            jobs = (Job(key=number, prompt=prompt) for number, prompt in islice(numbered, num_earlier, None))
            async with aclosing(engine.map(jobs, params, errors="yield")) as results:
                await write(results, lines, num_prompts - num_earlier)


async def write(results: AsyncIterable[JobResult], lines: TextIO, num_wanted: int) -> None:
    """Write the answers as lines, in the order of the prompts, and progress and errors to stderr."""
    num_done = num_errors = num_tokens = 0
    started_at = time.perf_counter()
    try:
        async for result in results:
            answer, num_new = answer_of(result)
            lines.write(json.dumps(answer) + "\n")
            lines.flush()
            num_done += 1
            if result.error is not None:
                num_errors += 1
                show(f"\rline {result.key}: {result.error}\n")
            num_tokens += num_new
            speed = num_tokens / (time.perf_counter() - started_at)
            show(f"\r{num_done}/{num_wanted}  {speed:.1f} tok/s ")
    finally:
        failed = f", {num_errors} of them errors" if num_errors else ""
        show(f"\n{num_done} answers added to {lines.name}{failed}\n")


def show(text: str) -> None:
    print(text, end="", file=sys.stderr, flush=True)


def parse_options() -> Any:
    parser = command_line.parser(__doc__)
    parser.add_argument("--input", type=Path, default=PROMPTS)
    parser.add_argument("--output", type=Path, default=ANSWERS)
    parser.add_argument("--max-tokens", type=command_line.whole(1), default=48)
    return parser.parse_args()


if __name__ == "__main__":
    given = parse_options()
    params = SamplingParams(max_tokens=given.max_tokens, temperature=0.7, seed=0)
    command_line.run(main, given.model, given.input, given.output, params)
