"""Records requests of the installed `openai` package: `python -m tests.router.frontends.http.responses.record` writes
recorded.jsonl, a name and a body per line."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import openai
from openai.types.responses import Response
from pydantic import BaseModel

from router.frontends.http.connection.long_body import Lists
from router.frontends.http.responses.output_items import OutputItems
from router.request.answer_parts import CallArguments, CallBegin, ContentText, ReasoningText

RECORDED = Path(__file__).with_name("recorded.jsonl")
MODEL = "tiny"
WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather of a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}


class Person(BaseModel):
    name: str
    age: int


class GetWeather(BaseModel):
    """The weather of a city"""

    city: str


def first_answer() -> list[Any]:
    """The output of a first turn, as the package's objects."""
    items = OutputItems(Lists(), encrypt_reasoning=True)
    items.add([ReasoningText("They ask for the weather."), ContentText("I look it up.")])
    items.add([CallBegin(0, "call_1", "get_weather"), CallArguments(0, '{"city":"Bern"}')])
    items.end(whole=True)
    shown = json.loads(
        openai._models.BaseModel.model_construct(output=items.done).model_dump_json(fallback=_raw)
    )
    return Response.construct(output=shown["output"]).output


def _raw(value: Any) -> Any:
    return []


def requests(client: openai.OpenAI) -> dict[str, Callable[[], Any]]:
    create: Any = client.responses.create
    user: Any = {"role": "user", "content": [{"type": "input_text", "text": "Weather in Bern?"}]}
    result: Any = {"type": "function_call_output", "call_id": "call_1", "output": "12 degrees"}
    return {
        "text": lambda: create(model=MODEL, input="hello"),
        "stream": lambda: create(model=MODEL, input="hello", stream=True, max_output_tokens=5),
        "stream helper": lambda: _consume(client.responses.stream(model=MODEL, input=[user])),
        "instructions": lambda: create(
            model=MODEL, instructions="Be brief", input=[user], temperature=0.5, top_p=0.9, store=True
        ),
        "tools": lambda: create(model=MODEL, input=[user], tools=[WEATHER], tool_choice="auto"),
        "named tool": lambda: create(
            model=MODEL,
            input=[user],
            tools=[WEATHER],
            tool_choice={"type": "function", "name": "get_weather"},
            parallel_tool_calls=False,
        ),
        "pydantic tool": lambda: client.responses.parse(
            model=MODEL, input="hello", tools=[openai.pydantic_function_tool(GetWeather)]
        ),
        "second turn": lambda: create(
            model=MODEL,
            input=[user, *first_answer(), result],
            tools=[WEATHER],
            include=["reasoning.encrypted_content"],
            reasoning={"effort": "low", "summary": "auto"},
        ),
        "parse": lambda: client.responses.parse(model=MODEL, input="Ada, 36", text_format=Person),
        "json object": lambda: create(model=MODEL, input="hi", text={"format": {"type": "json_object"}}),
        "logprobs": lambda: create(
            model=MODEL, input="hi", include=["message.output_text.logprobs"], top_logprobs=2
        ),
        "metadata": lambda: create(
            model=MODEL,
            input="hi",
            metadata={"run": "7"},
            user="someone",
            safety_identifier="s",
            prompt_cache_key="k",
            service_tier="auto",
            truncation="auto",
            extra_body={"top_k": 5, "seed": 1},
        ),
    }


def _consume(manager: Any) -> None:
    with manager as stream:
        for _ in stream:
            pass


def main() -> None:
    bodies: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(400)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{server.server_port}/v1", api_key="-", max_retries=0)
    lines = []
    for name, send in requests(client).items():
        with contextlib.suppress(openai.BadRequestError):
            send()
        lines.append(json.dumps([name, json.loads(bodies[-1])]))
    server.shutdown()
    RECORDED.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
