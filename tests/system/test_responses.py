"""The unmodified `openai` package's Responses on a whole cluster."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from tests.end_to_end.conftest import run_cluster

MODEL = Path(__file__).resolve().parents[2] / "demo" / "model"
FLAGS = ("--pool", "process", "--dtype", "float32", "--local-prefill", "fallback", "--kv-memory", "64MiB")
HELLO = "Once upon a time"


class Colour(BaseModel):
    name: Literal["red", "green"]
    shade: Literal[1, 2, 3]


class Paint(BaseModel):
    """Paints a wall"""

    colour: Colour


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    with (
        run_cluster(tmp_path_factory.mktemp("responses"), MODEL, *FLAGS) as cluster,
        openai.OpenAI(base_url=f"{cluster.http}/v1", api_key="-", max_retries=0, timeout=60) as made,
    ):
        yield made


@pytest.mark.system
def test_create_and_stream_answer_alike(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    ask: Any = {"model": model.id, "input": HELLO, "temperature": 0, "max_output_tokens": 24}
    whole = client.responses.create(**ask, instructions="Tell a story")
    assert whole.status in ("completed", "incomplete") and whole.output_text
    assert whole.usage is not None and whole.usage.output_tokens <= 24
    deltas = []
    with client.responses.stream(**ask, instructions="Tell a story") as stream:
        for event in stream:
            if event.type == "response.output_text.delta":
                deltas.append(event.delta)
    assert "".join(deltas) == whole.output_text
    assert event.type in ("response.completed", "response.incomplete")
    assert event.response.usage is not None
    assert event.response.usage.output_tokens == whole.usage.output_tokens
    # Its items are the next request's input
    question: Any = {"role": "user", "content": "Go on"}
    items: Any = [{"role": "user", "content": HELLO}, *whole.output, question]
    after = client.responses.create(**{**ask, "input": items})
    assert after.usage is not None and after.usage.input_tokens > whole.usage.input_tokens


@pytest.mark.system
def test_parse_returns_a_pydantic_model(client: openai.OpenAI) -> None:
    for seed in range(3):
        answer = client.responses.parse(
            model="", input="A colour?", text_format=Colour, extra_body={"seed": seed}
        )
        assert answer.status == "completed" and isinstance(answer.output_parsed, Colour)
        with client.responses.stream(model="", input="A colour?", text_format=Colour) as stream:
            assert isinstance(stream.get_final_response().output_parsed, Colour)


@pytest.mark.system
def test_what_is_refused_names_its_field(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model="", input="a", previous_response_id="resp_1")
    assert caught.value.param == "previous_response_id"
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model="", input="a", tools=[{"type": "web_search"}])
    assert caught.value.param == "tools[0].type"
