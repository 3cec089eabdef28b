"""LangChain's ChatOpenAI, OpenAI and agents' usual calls. Prints `ok NAME` or `failed NAME: why` for each."""

from __future__ import annotations

import functools
import operator
import os
from collections.abc import Callable
from typing import Literal

import openai
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel

BASE = os.environ["BASE_URL"] + "/v1"
MODEL = os.environ["MODEL"]


class Colour(BaseModel):
    """A colour"""

    red: bool
    dark: bool


@tool
def add(left: Literal[1, 2], right: Literal[1, 2]) -> int:
    """Add two numbers"""
    return left + right


def chat(**more: object) -> ChatOpenAI:
    given: dict = {
        "base_url": BASE,
        "api_key": "-",
        "model": MODEL,
        "max_retries": 0,
        "temperature": 0,
        **more,
    }
    return ChatOpenAI(**{"max_tokens": 16, **given})


def invoke() -> None:
    answer = chat().invoke([("system", "Be brief"), ("human", "Once upon a time")])
    assert answer.content and answer.usage_metadata["output_tokens"] <= 16


def stream() -> None:
    chunks = list(chat(stream_usage=True).stream("Once upon a time"))
    assert "".join(chunk.content for chunk in chunks) and any(chunk.usage_metadata for chunk in chunks)


def batch() -> None:
    assert len(chat().batch(["One", "Two", "Three"])) == 3


def structured() -> None:
    for method in ("json_schema", "function_calling"):
        made = chat(max_tokens=128).with_structured_output(Colour, method=method).invoke("A colour?")
        assert isinstance(made, Colour), method
    *_, last = chat(max_tokens=128).with_structured_output(Colour, method="json_schema").stream("A colour?")
    assert isinstance(last, Colour)


def json_mode() -> None:
    try:
        answer = chat(max_tokens=8).bind(response_format={"type": "json_object"}).invoke("json")
    except openai.LengthFinishReasonError:  # how the openai package says that an answer was cut
        return
    assert answer.content.lstrip().startswith("{")


def tools() -> None:
    # Not strict, further arguments are allowed, and a small model goes on with them
    bound = chat(max_tokens=128).bind_tools([add], tool_choice="add", strict=True)
    answer = bound.invoke("1 + 2?")
    (call,) = answer.tool_calls
    assert call["name"] == "add"
    whole = functools.reduce(operator.add, bound.stream("1 + 2?"))
    assert [one["args"] for one in whole.tool_calls] == [call["args"]]
    result = add.invoke(call)
    assert result.content == str(call["args"]["left"] + call["args"]["right"])
    after = chat().bind_tools([add]).invoke([("human", "1 + 2?"), answer, result])
    assert after.usage_metadata["input_tokens"] > answer.usage_metadata["input_tokens"]


def strict_tools() -> None:
    bound = chat(max_tokens=128).bind_tools([add], tool_choice="any", strict=True, parallel_tool_calls=False)
    assert bound.invoke("1 + 2?").tool_calls


def responses() -> None:
    answer = chat(use_responses_api=True).invoke("Once upon a time")
    assert answer.text
    assert list(chat(use_responses_api=True).stream("Once upon a time"))


def log_probabilities() -> None:
    answer = chat(logprobs=True, top_logprobs=2).invoke("Once")
    assert answer.response_metadata["logprobs"]["content"]


def completions() -> None:
    text = OpenAI(base_url=BASE, api_key="-", model=MODEL, max_tokens=8, temperature=0, max_retries=0)
    assert text.invoke("Once upon a time")
    assert "".join(text.stream("Once upon a time"))


def run(*steps: Callable[[], None]) -> None:
    for step in steps:
        try:
            step()
        except Exception as error:
            print(f"failed {step.__name__}: {type(error).__name__}: {str(error)[:400]}", flush=True)
        else:
            print(f"ok {step.__name__}", flush=True)


run(
    invoke,
    stream,
    batch,
    structured,
    json_mode,
    tools,
    strict_tools,
    responses,
    log_probabilities,
    completions,
)
