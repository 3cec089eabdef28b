"""Instructor in each mode that an OpenAI server has. Prints `ok NAME` or `failed NAME: why` for each."""

from __future__ import annotations

import os

import instructor
import openai
from instructor.core import IncompleteOutputException, InstructorRetryException
from pydantic import BaseModel, ConfigDict

MODES = ("TOOLS", "TOOLS_STRICT", "JSON", "JSON_SCHEMA", "PARALLEL_TOOLS", "RESPONSES_TOOLS")


class Colour(BaseModel):
    """A colour. Without further fields: a small model's JSON would have no end."""

    model_config = ConfigDict(extra="forbid")
    red: bool
    dark: bool


def ask(mode: str) -> None:
    plain = openai.OpenAI(base_url=os.environ["BASE_URL"] + "/v1", api_key="-", max_retries=0)
    client = instructor.from_openai(plain, mode=getattr(instructor.Mode, mode))
    messages = [{"role": "user", "content": "A colour?"}]
    given = {"model": os.environ["MODEL"], "messages": messages, "max_retries": 0}
    if mode == "PARALLEL_TOOLS":
        from collections.abc import Iterable

        try:
            client.create(**given, response_model=Iterable[Colour], max_tokens=24)
        except InstructorRetryException as error:  # the model may choose, and a small one makes no call
            if error.last_completion is None or error.last_completion.choices[0].message.tool_calls:
                raise
        return
    limit = {} if mode.startswith("RESPONSES") else {"max_tokens": 96, "temperature": 0}
    assert isinstance(client.create(**given, response_model=Colour, **limit), Colour)
    if mode in ("TOOLS", "JSON_SCHEMA"):
        parts = list(client.create_partial(**given, response_model=Colour, **limit))
        assert isinstance(parts[-1].red, bool)


for mode in MODES:
    if not hasattr(instructor.Mode, mode):
        continue
    try:
        ask(mode)
    except IncompleteOutputException:
        # Without the schema as a grammar, a small model's JSON has no end before the limit
        print(f"ok {mode} (cut at max_tokens)", flush=True)
    except Exception as error:
        print(f"failed {mode}: {type(error).__name__}: {str(error)[:400]}", flush=True)
    else:
        print(f"ok {mode}", flush=True)
