"""A server of OpenAI's and Anthropic's protocols. `python -m drift_sdk serve MODEL` has more options.

python examples/http_server.py [MODEL] [--port 8000]

curl localhost:8000/v1/chat/completions -H 'Content-Type: application/json' -d '{
    "messages": [{"role": "user", "content": "What is the capital of France?"}], "stream": true}'
"""

import command_line

import drift_sdk.openai
from drift_sdk import Engine, EngineConfig
from drift_sdk.openai.server import serve


async def main(model: str, port: int) -> None:
    async with Engine(model, EngineConfig(max_queued_requests=256)) as engine:
        await serve(drift_sdk.openai.app(engine), [engine], port=port)


if __name__ == "__main__":
    parser = command_line.parser(__doc__)
    parser.add_argument("--port", type=command_line.whole(0, 65_535), default=8000)
    options = parser.parse_args()
    command_line.run(main, options.model, options.port)
