"""LiteLLM's proxy in front of the router, called by the openai package that it brings."""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import time
from pathlib import Path

import openai

START_SECONDS = 180.0  # of the proxy
KEY = f"sk-{secrets.token_hex(16)}"
KINDS = {"plain": "openai/", "vllm": "hosted_vllm/", "text": "text-completion-openai/"}
with socket.socket() as taken:
    taken.bind(("127.0.0.1", 0))
    port = taken.getsockname()[1]
models = [
    {
        "model_name": name,
        "litellm_params": {
            "model": prefix + os.environ["MODEL"],
            "api_base": os.environ["BASE_URL"] + "/v1",
            "api_key": "-",
        },
    }
    for name, prefix in KINDS.items()
]
Path("config.yaml").write_text(json.dumps({"model_list": models}))
log_file = Path("log")
log = log_file.open("w")
command = [
    "litellm",
    "--config",
    "config.yaml",
    "--port",
    str(port),
    "--host",
    "127.0.0.1",
    "--telemetry",
    "False",
]
environment = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_MASTER_KEY": KEY}
proxy = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=KEY, max_retries=0, timeout=60)


def chat(model: str) -> None:
    ask = {"model": model, "messages": [{"role": "user", "content": "Once"}], "max_tokens": 8, "user": "u"}
    assert client.chat.completions.create(**ask).usage.completion_tokens <= 8
    chunks = list(client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    assert any(chunk.usage for chunk in chunks)
    schema = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "s", "strict": True, "schema": schema}}
    made = client.chat.completions.create(**{**ask, "max_tokens": 64}, response_format=form)
    assert "a" in json.loads(made.choices[0].message.content)


def tools(model: str) -> None:
    schema = {"type": "object", "properties": {"city": {"enum": ["Bern", "Oslo"]}}, "required": ["city"]}
    function = {"name": "weather", "parameters": {**schema, "additionalProperties": False}}
    messages = [{"role": "user", "content": "The weather?"}]
    ask = {"model": model, "max_tokens": 64, "tools": [{"type": "function", "function": function}]}
    chosen = {"type": "function", "function": {"name": "weather"}}
    create = client.chat.completions.create
    answer = create(**ask, messages=messages, temperature=0, tool_choice=chosen).choices[0]
    (call,) = answer.message.tool_calls
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments)["city"] in ("Bern", "Oslo")
    stream = create(**ask, messages=messages, temperature=0, tool_choice=chosen, stream=True)
    deltas = [one for chunk in stream for choice in chunk.choices for one in choice.delta.tool_calls or ()]
    assert "".join(one.function.arguments or "" for one in deltas) == call.function.arguments
    result = {"role": "tool", "tool_call_id": call.id, "content": "12 degrees"}
    turns = [*messages, answer.message.model_dump(exclude_none=True), result]
    after = create(**{**ask, "max_tokens": 8}, messages=turns, tool_choice="auto", parallel_tool_calls=False)
    assert after.usage.completion_tokens <= 8


def completions(model: str) -> None:
    ask = {"model": model, "prompt": "Once", "max_tokens": 8}
    assert client.completions.create(**ask).choices[0].text
    assert "".join(chunk.choices[0].text or "" for chunk in client.completions.create(**ask, stream=True))


def responses(model: str) -> None:
    assert client.responses.create(model=model, input="Once", max_output_tokens=16).output_text
    assert list(client.responses.create(model=model, input="Once", max_output_tokens=16, stream=True))


def messages(model: str) -> None:
    body = {"model": model, "max_tokens": 8, "messages": [{"role": "user", "content": "Once"}]}
    answer = client.post("/messages", body=body, cast_to=dict)
    assert answer["content"]


try:
    deadline = time.monotonic() + START_SECONDS
    while proxy.poll() is None and time.monotonic() < deadline:
        try:
            client.models.list()
            break
        except openai.OpenAIError:
            time.sleep(0.1)
    else:
        print("failed start: " + " ".join(log_file.read_text().split())[-600:], flush=True)
    for step, model in (
        (chat, "plain"),
        (chat, "vllm"),
        (tools, "plain"),
        (tools, "vllm"),
        (completions, "text"),
        (responses, "plain"),
        (messages, "plain"),
    ):
        name = f"{step.__name__} ({KINDS[model]})"
        try:
            step(model)
        except Exception as error:
            print(f"failed {name}: {type(error).__name__}: {str(error)[:400]}", flush=True)
        else:
            print(f"ok {name}", flush=True)
finally:
    proxy.terminate()
    proxy.wait(20)
