"""A server of OpenAI's and Anthropic's protocols, as `python -m drift_sdk serve MODEL` runs it.

python examples/http_server.py [MODEL]

curl localhost:8000/v1/chat/completions -H 'Content-Type: application/json' -d '{
    "messages": [{"role": "user", "content": "What is the capital of France?"}], "stream": true}'
"""

import command_line

import drift_sdk.openai
from drift_sdk import Engine
from drift_sdk.openai.server import serve


async def main(model: str) -> None:
    async with Engine(model, max_queued_requests=256) as engine:
        await serve(drift_sdk.openai.app(engine), [engine], port=8000)


if __name__ == "__main__":
    command_line.run(main, command_line.parser(__doc__).parse_args().model)
