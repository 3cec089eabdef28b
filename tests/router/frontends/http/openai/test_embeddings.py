"""`/v1/embeddings` in front of vectors from stubs."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import numpy as np
import pytest

from cluster.protocol.pooling import Embedding, Pooling
from router.admission.admission import HeldBytes
from router.frontends.http.answer_size import MIN_NUMBER_BYTES
from router.frontends.http.openapi.document import build_document
from tests.harness.waiting import wait_for
from tests.router.frontends.http.responses.conftest import serving
from tests.router.frontends.vector_gateway import (
    DIMENSIONS,
    VectorGateway,
    client_of,
    close,
    unit,
    vector_gateway,
    vector_of,
)
from wire import common_pb2


@pytest.fixture(scope="module")
def gateway() -> Iterator[VectorGateway]:
    made = vector_gateway({"max_prompts": 4, "max_answer_entries": 100})
    with serving(made) as made.url:
        yield made
    close(made)


@pytest.fixture
def client(gateway: VectorGateway, monkeypatch: pytest.MonkeyPatch) -> Iterator[httpx.Client]:
    yield from client_of(gateway, monkeypatch)


def ask(client: httpx.Client, **body: Any) -> dict[str, Any]:
    answer = client.post("/v1/embeddings", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_each_input_has_its_vector_of_length_one(gateway, client):
    several = [[5, 6, 7], [8]]
    texts = ["Once upon", "a time"]
    for given in (several, texts, several[0], texts[0]):
        gateway.accepted.clear()
        answer = ask(client, input=given, model="tiny", user="me")
        asked = [one.prompt_tokens for one in gateway.accepted]
        if isinstance(given, list) and isinstance(given[0], list):
            assert asked == several
        elif isinstance(given, str):
            assert asked == [gateway.first.text.tokenizer.encode(given).ids]
        assert [one["index"] for one in answer["data"]] == list(range(len(asked)))
        for tokens, one in zip(asked, answer["data"], strict=True):
            # float32 has 24 bits
            np.testing.assert_allclose(one["embedding"], unit(vector_of(tokens)), rtol=2**-22)
        count = sum(map(len, asked))
        assert (answer["usage"]["prompt_tokens"], answer["usage"]["total_tokens"]) == (count, count)
        assert (answer["object"], answer["model"]) == ("list", "tiny")
    sampling = gateway.accepted[0].sampling
    assert (sampling.pooling, sampling.max_tokens) == (common_pb2.POOLING_MEAN, 1)
    assert gateway.accepted[0].prompt_only and gateway.accepted[0].embedding_dimensions == DIMENSIONS


# By the package `openai` 3.52.0 for `embeddings.create(model=…, input=[…], dimensions=4, user="me")`
RECORDED = (
    b'{"model":"tiny","input":["Once upon","a time"],"user":"me","dimensions":4,"encoding_format":"base64"}'
)


def test_a_recorded_request_is_answered_as_the_package_reads_it(gateway, client):
    answer = client.post(
        "/v1/embeddings", content=RECORDED, headers={"content-type": "application/json"}
    ).json()
    for one, asked in zip(answer["data"], gateway.accepted, strict=True):
        # What openai.resources.embeddings does with it
        found = np.frombuffer(base64.b64decode(one["embedding"]), dtype="float32")
        np.testing.assert_allclose(found, unit(vector_of(asked.prompt_tokens)[:4]), rtol=2**-22)


def test_base64_has_the_same_floats(client):
    numbers = ask(client, input=[[5], [6, 7]], encoding_format="float")["data"]
    coded = ask(client, input=[[5], [6, 7]], encoding_format="base64")["data"]
    for one, other in zip(numbers, coded, strict=True):
        found = np.frombuffer(base64.b64decode(other["embedding"]), dtype="<f4")
        assert np.array_equal(found, np.array(one["embedding"], dtype="<f4"))


def test_a_vector_is_cut_and_then_normalised(gateway, client, monkeypatch):
    cut = ask(client, input=[5], dimensions=4)["data"][0]["embedding"]
    np.testing.assert_allclose(cut, unit(vector_of([5])[:4]), rtol=2**-22)
    monkeypatch.setattr(
        gateway.first.text, "embedding", Embedding(Pooling.MEAN, DIMENSIONS, normalised=False)
    )
    (one,) = ask(client, input=[5])["data"]
    assert np.array_equal(np.array(one["embedding"], dtype="<f4"), vector_of([5]))


def test_inputs_are_truncated_at_the_asked_side(gateway, client):
    long = list(range(5, 45))
    for more, kept in (
        ({"truncate_prompt_tokens": 3}, long[-3:]),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, long[:3]),
        ({"truncate_prompt_tokens": -1}, long[-20:]),
    ):
        ask(client, input=long, **more)
        assert gateway.accepted[-1].prompt_tokens == kept
    ask(client, input="word " * 500, truncate_prompt_tokens=5)
    assert len(gateway.accepted[-1].prompt_tokens) == 5


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({}, "input", "is missing"),
    ({"input": []}, "input", "must be text"),
    ({"input": ""}, "input", "is empty"),
    ({"input": [[]]}, "input", "is empty"),
    ({"input": [[5], 5]}, "input", "must hold texts or token ids"),
    ({"input": [10**9]}, "input", "token ids must lie"),
    ({"input": [5] * 21}, "input", "20 of max_seq_length"),
    ({"input": [5] * 100_000}, "input", "context"),
    ({"input": "word " * 100_000}, "input", "context"),
    ({"input": ["a"] * 5}, "input", "at most 4 at once (max_prompts)"),
    ({"input": ["a"] * 5_000}, "input", "at most 4 at once (max_prompts)"),
    ({"input": ["a", ""]}, "input[1]", "is empty"),
    ({"input": [[5], [6], []]}, "input[2]", "is empty"),
    ({"input": [[5], [5] * 21]}, "input[1]", "20 of max_seq_length"),
    ({"input": [[5], [10**9]]}, "input[1]", "token ids must lie"),
    ({"input": ["a", [5] * 100_000]}, "input[1]", "context"),
    ({"input": ["a", "word " * 100_000]}, "input[1]", "context"),
    ({"input": "a", "encoding_format": "int8"}, "encoding_format", "'float' or 'base64'"),
    ({"input": "a", "dimensions": 0}, "dimensions", "outside"),
    ({"input": "a", "dimensions": 5}, "dimensions", "4, 8"),
    ({"input": "a", "dimensions": 16}, "dimensions", "have 8"),
    ({"input": "a", "truncation_side": "up"}, "truncation_side", "must be one of"),
    ({"input": "a", "stream": True}, "stream", "unknown field"),
]


def test_refusals_name_their_fields(gateway, client, monkeypatch):
    for body, field, said in REFUSED:
        answer = client.post("/v1/embeddings", json=body)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, field), (body, error)
        assert said in error["message"], error
    assert client.post("/v1/embeddings", json={"input": "a", "model": "other"}).status_code == 404
    monkeypatch.setattr(gateway.first.text, "embedding", Embedding(Pooling.MEAN, 50, normalised=True))
    answer = client.post("/v1/embeddings", json={"input": ["a", "b", "c"]})
    assert "3 inputs x 50 dimensions exceed 100 (max_answer_entries)" in answer.text
    answer = client.post("/v1/embeddings", json={"input": "a", "dimensions": 4})
    assert answer.status_code == 400 and "declares no shorter" in answer.text
    assert not gateway.accepted and gateway.admission.in_flight == 0


def test_a_model_without_pooling_says_why(gateway, client, monkeypatch):
    monkeypatch.setattr(gateway.first.text, "embedding", None)
    error = client.post("/v1/embeddings", json={"input": "a"}).json()["error"]
    assert error["param"] == "model" and "no modules.json" in error["message"]
    listed = client.get("/v1/models/tiny").json()
    assert listed["embedding"] is None and "modules.json" in listed["embedding_reason"]


def test_a_base_model_generates_nothing(gateway, client, monkeypatch):
    monkeypatch.setattr(gateway.first.text, "has_head", False)
    for path, body in (
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/responses", {"input": "a"}),
    ):
        error = client.post(path, json=body).json()["error"]
        assert error["param"] == "model" and "base model" in error["message"]
    ask(client, input="a")


def test_each_input_takes_a_place(gateway, client, monkeypatch):
    seen: list[int] = []
    own = gateway.request

    def counted(*given):
        seen.append(gateway.admission.in_flight)
        return own(*given)

    monkeypatch.setattr(gateway, "request", counted)
    ask(client, input=["a", "b", "c"])
    assert seen == [3, 3, 3]
    wait_for(lambda: gateway.admission.in_flight == 0, 5, "places end when the client has read")


@pytest.mark.parametrize("dimensions", [4, DIMENSIONS])
def test_the_room_of_an_answer_is_that_of_its_cut_vectors(gateway, client, monkeypatch, dimensions):
    """Not of those that workers send: a budget would refuse what fits."""
    expected: list[tuple[int, int]] = []
    expect = HeldBytes.expect_answer

    def noted(held: HeldBytes, least: int, most: int, model: str = "") -> None:
        expected.append((least, most))
        expect(held, least, most, model)

    monkeypatch.setattr(HeldBytes, "expect_answer", noted)
    for form in ("float", "base64"):
        vectors = ask(client, input=["a", "b"], dimensions=dimensions, encoding_format=form)["data"]
        sent = sum(len(json.dumps(one["embedding"], separators=(",", ":"))) for one in vectors)
        least, most = expected.pop()
        assert least == 2 * dimensions * MIN_NUMBER_BYTES <= sent <= most + 2 * len("[]")


def test_the_document_describes_request_and_answer(gateway, client):
    document = build_document(gateway)

    def valid(value: Any, name: str) -> None:
        schema = {"$ref": f"#/components/schemas/{name}", "components": document["components"]}
        jsonschema.Draft202012Validator(schema).validate(value)

    for form in ("float", "base64"):
        body = {"input": ["a", "b"], "encoding_format": form, "dimensions": 4, "model": "tiny"}
        valid(body, "EmbeddingRequest")
        valid(ask(client, **body), "Embeddings")
    valid(client.get("/v1/models").json(), "ModelList")
