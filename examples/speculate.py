"""The same tokens in fewer steps: a draft proposes tokens, the model verifies them in one step.

python examples/speculate.py                     n-gram drafts for SmolLM2-135M
python examples/speculate.py MODEL DRAFT         an EAGLE-3 head or a smaller model (folder or hub id)
"""

import command_line

from drift_sdk import Completion, Engine, EngineConfig, NGram, SamplingParams, Speculation

PROMPT = "".join(f"Day {day}: woke up at 7, had tea and bread, walked to work.\n" for day in range(1, 7))


async def generate(model: str, speculation: Speculation | None) -> Completion:
    async with Engine(model, EngineConfig(speculation=speculation)) as engine:
        return await engine.generate(PROMPT, SamplingParams(max_tokens=64))


async def main(model: str, draft: str | NGram) -> None:
    plain = await generate(model, None)
    drafted = await generate(model, Speculation(draft=draft))
    print(drafted.text)
    for name, completion in (("plain", plain), ("drafted", drafted)):
        speed = (completion.usage.completion_tokens - 1) / max(completion.timing.decode_s, 1e-9)
        print(f"{name}: {speed:.1f} tok/s")
    if drafted.speculation is not None:
        print(f"tokens per round: {drafted.speculation.acceptance_length:.2f}")
    print(f"the same tokens: {plain.token_ids == drafted.token_ids}")


if __name__ == "__main__":
    parser = command_line.parser(__doc__)
    parser.add_argument(
        "draft", nargs="?", default=NGram(), help="an EAGLE-3 head or a smaller model (default: n-grams)"
    )
    options = parser.parse_args()
    command_line.run(main, options.model, options.draft)
