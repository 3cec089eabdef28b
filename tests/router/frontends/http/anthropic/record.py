"""Records requests of the installed `anthropic` package: `python -m tests.router.frontends.http.anthropic.record` writes
recorded.jsonl, per line a name, a path, the headers that matter, and a body."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import anthropic

RECORDED = Path(__file__).with_name("recorded.jsonl")
MODEL = "tiny"
WEATHER: Any = {
    "name": "get_weather",
    "description": "The weather of a city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
CACHED: Any = {"cache_control": {"type": "ephemeral"}}
BLOCKS: Any = [{"type": "text", "text": "You are."}, {"type": "text", "text": "Brief.", **CACHED}]
CACHED_TOOLS: Any = [{**WEATHER, **CACHED}]
USER: Any = {"role": "user", "content": "Weather in Bern?"}
TURN: Any = [
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "They ask for Bern.", "signature": "baton"},
            {"type": "text", "text": "I look it up."},
            {"type": "tool_use", "id": "call_1", "name": "get_weather", "input": {"city": "Bern"}},
        ],
    },
    {
        "role": "user",
        "content": [
            {
                "type": "tool_result",
                "tool_use_id": "call_1",
                "content": [{"type": "text", "text": "12 degrees"}],
            },
            {"type": "text", "text": "And tomorrow?", **CACHED},
        ],
    },
]


def requests(client: anthropic.Anthropic) -> dict[str, Callable[[], Any]]:
    create = client.messages.create
    ask: Any = {"model": MODEL, "max_tokens": 8, "messages": [USER]}
    return {
        "text": lambda: create(**ask),
        "stream": lambda: create(**ask, stream=True),
        "stream helper": lambda: _consume(client.messages.stream(**ask)),
        "options": lambda: create(
            **ask,
            system="Be brief",
            extra_body={
                "temperature": 0.5,
                "top_p": 0.9,
                "top_k": 5,
            },  # earlier releases have them as arguments
            stop_sequences=["\n\nHuman:", "END"],
            metadata={"user_id": "u-1"},
            service_tier="auto",
        ),
        "system blocks": lambda: create(**ask, system=BLOCKS),
        "tools": lambda: create(**ask, tools=CACHED_TOOLS),
        "any tool": lambda: create(
            **ask, tools=[WEATHER], tool_choice={"type": "any", "disable_parallel_tool_use": True}
        ),
        "named tool": lambda: create(
            **ask, tools=[WEATHER], tool_choice={"type": "tool", "name": "get_weather"}
        ),
        "no tool": lambda: create(**ask, tools=[WEATHER], tool_choice={"type": "none"}),
        "second turn": lambda: create(
            **{**ask, "messages": [USER, *TURN]},
            tools=[WEATHER],
            thinking={"type": "enabled", "budget_tokens": 1024},
        ),
        "adaptive thinking": lambda: create(
            **ask, thinking={"type": "adaptive"}, output_config={"effort": "high"}
        ),
        "no thinking": lambda: create(**ask, thinking={"type": "disabled"}),
        "prefill": lambda: create(**{**ask, "messages": [USER, {"role": "assistant", "content": "It is"}]}),
        "beta": lambda: client.beta.messages.create(
            **ask, betas=["interleaved-thinking-2025-05-14", "a-later-one"], mcp_servers=[]
        ),
        "count": lambda: client.messages.count_tokens(
            model=MODEL, messages=[USER, *TURN], system="Be brief", tools=[WEATHER]
        ),
        "beta count": lambda: client.beta.messages.count_tokens(
            model=MODEL, messages=[USER], betas=["token-counting-2024-11-01"]
        ),
    }


def _consume(manager: Any) -> None:
    with manager as stream:
        for _ in stream:
            pass


def main() -> None:
    import anthropic

    seen: list[tuple[str, dict[str, str], bytes]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            names = ("x-api-key", "anthropic-version", "anthropic-beta", "content-type")
            headers = {name: self.headers[name] for name in names if name in self.headers}
            seen.append((self.path, headers, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(400)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    client = anthropic.Anthropic(
        base_url=f"http://127.0.0.1:{server.server_port}", api_key="k", max_retries=0
    )
    lines = []
    for name, send in requests(client).items():
        with contextlib.suppress(anthropic.BadRequestError):
            send()
        path, headers, body = seen[-1]
        lines.append(json.dumps([name, path, headers, json.loads(body)]))
    server.shutdown()
    RECORDED.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
