"""One model divided between GPUs: the tokens of one GPU, in less time.

python examples/two_gpus.py meta-llama/Llama-3.1-8B-Instruct
python examples/two_gpus.py MODEL --gpus 4
"""

import command_line

from drift_sdk import Completion, Engine, EngineConfig, SamplingParams

PROMPT = "A short history of the printing press:"


async def generate(model: str, num_gpus: int) -> Completion:
    config = EngineConfig(tensor_parallel=num_gpus)
    async with Engine(model, config) as engine:
        return await engine.generate(PROMPT, SamplingParams(max_tokens=64, ignore_eos=True))


async def main(model: str, num_gpus: int) -> None:
    divided = await generate(model, num_gpus)
    whole = await generate(model, 1)
    print(divided.text)
    for name, completion in ((f"{num_gpus} GPUs", divided), ("one GPU", whole)):
        speed = (completion.usage.completion_tokens - 1) / max(completion.timing.decode_s, 1e-9)
        print(f"{name}: {speed:.1f} tok/s")
    print(f"the same tokens: {divided.token_ids == whole.token_ids}")


if __name__ == "__main__":
    parser = command_line.parser(__doc__)
    parser.add_argument("--gpus", type=command_line.whole(1, 64), default=2, help="GPUs to divide it between")
    options = parser.parse_args()
    command_line.run(main, options.model, options.gpus)
