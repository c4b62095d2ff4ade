"""Structured output: the text follows the JSON schema of a type and is decoded into a value of it.

python examples/structured.py [MODEL]
"""

from typing import Annotated, Literal

import command_line
import msgspec

from drift_sdk import Engine, JsonSchema, Regex, SamplingParams

Text = Annotated[str, msgspec.Meta(max_length=40)]


class Recipe(msgspec.Struct):
    title: Text
    minutes: Annotated[int, msgspec.Meta(ge=5, le=180)]
    level: Literal["easy", "medium", "hard"]
    ingredients: Annotated[list[Text], msgspec.Meta(min_length=2, max_length=5)]


async def main(model: str) -> None:
    async with Engine(model) as engine:
        question = [{"role": "user", "content": "Give me a recipe for a tomato soup, as JSON."}]
        params = SamplingParams(grammar=JsonSchema(Recipe), max_tokens=200)
        async with engine.chat(question, params) as stream:
            async for chunk in stream:
                print(chunk.text, end="", flush=True)

            recipe = (await stream).parsed
        print("\n\ndecoded:", recipe)
        if recipe is not None:  # None if max_tokens cut the text short
            print("shopping list:", ", ".join(recipe.ingredients))

        # A regular expression instead of a JSON schema.
        day = SamplingParams(grammar=Regex(r"\d{4}-(0[1-9]|1[0-2])-([0-2]\d|3[01])"))
        moon = await engine.chat([{"role": "user", "content": "When did man land on the moon?"}], day)
        print("a date:", moon.text)


if __name__ == "__main__":
    command_line.run(main, command_line.parser(__doc__).parse_args().model)
