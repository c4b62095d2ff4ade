"""A FastAPI application with endpoints of its own and those of OpenAI's protocol, on one engine.

python examples/embed_fastapi.py [MODEL] [--port 8000]

curl localhost:8000/summary -H 'Content-Type: application/json' -d '{"text": "Once upon a time ..."}'
curl localhost:8000/llm/v1/chat/completions -H 'Content-Type: application/json' -d '{
    "messages": [{"role": "user", "content": "What is the capital of France?"}], "stream": true}'
"""

import command_line
from fastapi import FastAPI, HTTPException
from pydantic import BaseModel

import drift_sdk.openai
from drift_sdk import BaseEngine, Engine, EngineConfig, QueueFull, RequestError
from drift_sdk.openai.server import serve


class Article(BaseModel):
    text: str


def make_app(engine: BaseEngine) -> FastAPI:
    app = FastAPI(title="Summaries")
    app.mount("/llm", drift_sdk.openai.app(engine))

    @app.post("/summary")
    async def summary(article: Article) -> dict[str, str]:
        question = f"Summarise this text in one sentence:\n\n{article.text}"
        try:
            completion = await engine.chat([{"role": "user", "content": question}], max_tokens=100)
        except RequestError as error:
            raise HTTPException(400, str(error)) from error
        except QueueFull as error:
            raise HTTPException(429, str(error)) from error

        return {"summary": completion.text}

    return app


async def main(model: str, port: int) -> None:
    async with Engine(model, EngineConfig(max_queued_requests=256)) as engine:
        await serve(make_app(engine), [engine], port=port)


if __name__ == "__main__":
    parser = command_line.parser(__doc__)
    parser.add_argument("--port", type=command_line.whole(0, 65_535), default=8000)
    options = parser.parse_args()
    command_line.run(main, options.model, options.port)
