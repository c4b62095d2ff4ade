"""A tool call: the model requests a call, this program answers it, the model continues.

python examples/tools.py [MODEL]

Large models decide by themselves to call a tool. For a small one, `tool_choice` forces the call; the model
chooses only the arguments.
"""

import json
from typing import Any

import command_line

from drift_sdk import Engine, SamplingParams, ToolCall

WEATHER = {
    "name": "get_weather",
    "description": "The weather in a city, right now.",
    "parameters": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "minLength": 2, "maxLength": 20},
            "unit": {"enum": ["celsius", "fahrenheit"]},
        },
        "required": ["city", "unit"],
        "additionalProperties": False,
    },
}
TOOLS = [{"type": "function", "function": WEATHER}]


def get_weather(city: str, unit: str) -> dict[str, Any]:
    return {"city": city, "sky": "sunny", "temperature": 21 if unit == "celsius" else 70, "unit": unit}


def answer(call: ToolCall) -> str:
    print("call: ", call.name, call.arguments)
    result = json.dumps(get_weather(**call.arguments))
    print("result:", result)
    return result


async def main(model: str) -> None:
    # Templates that support tools receive them. Others ignore them, so the system message describes them too.
    system = (
        f"You can call this function: {json.dumps(WEATHER)}\n"
        'To call it, write <tool_call>{"name": ..., "arguments": {...}}</tool_call>.'
    )
    messages = [
        {"role": "system", "content": system},
        {"role": "user", "content": "What is the weather like in Lisbon? I think in celsius."},
    ]
    async with Engine(model) as engine:
        asked = await engine.chat(messages, tools=TOOLS, tool_choice="get_weather")
        print(asked.raw_text)
        messages.append(asked.message())
        messages += [
            {"role": "tool", "tool_call_id": call.id, "content": answer(call)} for call in asked.tool_calls
        ]

        async for chunk in engine.chat(messages, SamplingParams(max_tokens=64)):
            print(chunk.text, end="", flush=True)
    print()


if __name__ == "__main__":
    command_line.run(main, command_line.parser(__doc__).parse_args().model)
