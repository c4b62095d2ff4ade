"""Find the text that is nearest to a question, and how probable given answers to it are.

python examples/embed_decide.py [MODEL]

With a model of embeddings, such as Qwen/Qwen3-Embedding-0.6B, the similarities mean more; with a chat model,
the probabilities.
"""

import command_line

from drift_sdk import Engine

QUESTION = "Which animal barks?"
TEXTS = ["Dogs bark at strangers.", "The tax is due in May.", "A cat sleeps all day."]
ANSWERS = [" A dog", " A cat", " A fish"]


async def main(model: str) -> None:
    async with Engine(model) as engine:
        question, *texts = await engine.embed([QUESTION, *TEXTS], pooling="mean")
        for text, embedding in zip(TEXTS, texts, strict=True):
            print(f"{float(question.vector @ embedding.vector):6.3f}  {text}")

        decision = await engine.decide(f"{QUESTION} Answer:", ANSWERS)
        for answer, probability in zip(ANSWERS, decision.probabilities, strict=True):
            print(f"{probability:6.1%}  {answer.strip()}")


if __name__ == "__main__":
    command_line.run(main, command_line.parser(__doc__).parse_args().model)
