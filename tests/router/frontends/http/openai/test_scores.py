"""`/score` and `/rerank` in front of vectors from stubs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import numpy as np
import pytest

from cluster.protocol.pooling import Embedding, Pooling
from router.admission.admission import HeldBytes
from router.frontends.http.gate import RERANK, SCORE
from router.frontends.http.openapi.document import build_document
from tests.harness.waiting import wait_for
from tests.router.frontends.http.responses.conftest import serving
from tests.router.frontends.vector_gateway import (
    DIMENSIONS,
    VectorGateway,
    client_of,
    close,
    vector_gateway,
    vector_of,
)
from wire import common_pb2

TEXTS = ["Once upon a time", "there was", "a router", "Once upon a time"]


@pytest.fixture(scope="module")
def gateway() -> Iterator[VectorGateway]:
    made = vector_gateway({"max_prompts": 5, "max_answer_entries": 100})
    with serving(made) as made.url:
        yield made
    close(made)


@pytest.fixture
def client(gateway: VectorGateway, monkeypatch: pytest.MonkeyPatch) -> Iterator[httpx.Client]:
    yield from client_of(gateway, monkeypatch)


def ask(client: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def similarity(gateway: VectorGateway, one: str, other: str) -> float:
    vectors = [
        vector_of(gateway.first.text.tokenizer.encode(text).ids).astype(np.float64) for text in (one, other)
    ]
    return float(vectors[0] @ vectors[1] / np.prod([np.linalg.norm(vector) for vector in vectors]))


@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize(
    ("text_1", "text_2"),
    [
        (TEXTS[0], TEXTS[1]),
        ([TEXTS[0]], [TEXTS[1]]),
        (TEXTS[0], TEXTS),
        ([TEXTS[0]], TEXTS),
        (TEXTS[:2], TEXTS[2:]),
    ],
    ids=["1:1", "lists of 1", "1:N", "a list of 1:N", "N:N"],
)
def test_scores_are_the_cosines_of_embeddings(text_1, text_2, normalised, gateway, client, monkeypatch):
    how = Embedding(Pooling.MEAN, DIMENSIONS, normalised=normalised)
    monkeypatch.setattr(gateway.first.text, "embedding", how)
    answer = ask(client, "/v1/score", text_1=text_1, text_2=text_2, model="tiny", user="me")
    one, other = ([given] if isinstance(given, str) else given for given in (text_1, text_2))
    pairs = zip(one * len(other) if len(one) == 1 else one, other, strict=True)
    expected = [similarity(gateway, *pair) for pair in pairs]
    assert [(entry["index"], entry["object"]) for entry in answer["data"]] == [
        (index, "score") for index in range(len(expected))
    ]
    np.testing.assert_allclose([entry["score"] for entry in answer["data"]], expected, atol=1e-12)
    assert (answer["object"], answer["model"], answer["id"][:6]) == ("list", "tiny", "score-")
    count = sum(len(asked.prompt_tokens) for asked in gateway.accepted)
    assert len(gateway.accepted) == len(one) + len(other), "each text is computed once"
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["total_tokens"]) == (count, count)
    sampling = gateway.accepted[0].sampling
    assert (sampling.pooling, sampling.max_tokens) == (common_pb2.POOLING_MEAN, 1)


def test_a_text_is_as_similar_to_itself_as_can_be(client):
    (same,) = ask(client, "/score", text_1=TEXTS[0], text_2=TEXTS[0])["data"]
    assert same["score"] == pytest.approx(1.0, abs=1e-12) and same["score"] <= 1.0


def test_documents_are_ordered_by_their_similarity(gateway, client):
    answer = ask(client, "/rerank", query=TEXTS[0], documents=TEXTS)
    scores = [similarity(gateway, TEXTS[0], text) for text in TEXTS]
    assert {answer["results"][0]["index"], answer["results"][1]["index"]} == {0, 3}
    for result, before in zip(answer["results"][1:], answer["results"], strict=False):
        assert result["relevance_score"] <= before["relevance_score"]
    for result in answer["results"]:
        assert result["document"] == {"text": TEXTS[result["index"]]}
        assert result["relevance_score"] == pytest.approx(scores[result["index"]], abs=1e-12)
    assert sorted(result["index"] for result in answer["results"]) == [0, 1, 2, 3]
    assert (answer["model"], answer["id"][:7]) == ("tiny", "rerank-")
    for top_n, kept in ((1, 1), (4, 4), (9, 4), (0, 4), (-1, 4), (None, 4)):
        more = ask(client, "/rerank", query=TEXTS[0], documents=TEXTS, top_n=top_n)
        assert more["results"] == answer["results"][:kept]
    bare = ask(client, "/rerank", query=TEXTS[0], documents=TEXTS, return_documents=False)
    assert bare["results"] == [
        {name: result[name] for name in ("index", "relevance_score")} for result in answer["results"]
    ]


def test_long_documents_are_shown_as_they_came(client):
    long = ['"é\n' * 8000, "\u0001" * 20000]
    answer = ask(client, "/rerank", query="a", documents=long, truncate_prompt_tokens=5)
    assert {result["document"]["text"] for result in answer["results"]} == {*long}


@pytest.mark.parametrize("paths", [SCORE, RERANK], ids=["score", "rerank"])
def test_the_paths_of_an_endpoint_are_the_same(paths, client):
    body = {"text_1": "a", "text_2": "b"} if paths is SCORE else {"query": "a", "documents": ["b", "c"]}
    answers = [ask(client, path, **body) for path in paths]
    for answer in answers:
        for name in ("id", "created", "baton"):
            answer.pop(name, None)
    assert all(answer == answers[0] for answer in answers)


def test_texts_are_truncated(gateway, client):
    ask(client, "/score", text_1="a b c d e f", text_2="word " * 500, truncate_prompt_tokens=3)
    assert [len(one.prompt_tokens) for one in gateway.accepted] == [3, 3]


REFUSED: list[tuple[str, dict[str, Any], str, str]] = [
    ("/score", {"text_2": "a"}, "text_1", "is missing"),
    ("/score", {"text_1": "a"}, "text_2", "is missing"),
    ("/score", {"text_1": [], "text_2": "a"}, "text_1", "must be text or a list"),
    ("/score", {"text_1": [], "text_2": []}, "text_1", "must be text or a list"),
    ("/score", {"text_1": "a", "text_2": []}, "text_2", "must be text or a list"),
    ("/score", {"text_1": "", "text_2": "a"}, "text_1", "is empty"),
    ("/score", {"text_1": "a", "text_2": ["b", ""]}, "text_2[1]", "is empty"),
    ("/score", {"text_1": "a", "text_2": [5]}, "text_2", "must hold texts"),
    ("/score", {"text_1": 5, "text_2": "a"}, "text_1", "must be text"),
    ("/score", {"text_1": ["a", "b"], "text_2": "c"}, "text_2", "as many texts as text_1"),
    ("/score", {"text_1": ["a", "b"], "text_2": ["c", "d", "e"]}, "text_2", "as many texts as text_1"),
    ("/score", {"text_1": "a", "text_2": ["b"] * 6}, "text_2", "at most 5 at once (max_prompts)"),
    ("/score", {"text_1": "a", "text_2": ["b"] * 5}, "text_2", "6 texts in all; at most 5"),
    ("/score", {"text_1": ["a"] * 3, "text_2": ["b"] * 3}, "text_2", "6 texts in all; at most 5"),
    ("/score", {"text_1": "a", "text_2": "word " * 100_000}, "text_2", "context"),
    ("/score", {"text_1": "a", "text_2": "b", "dimensions": 4}, "dimensions", "unknown field"),
    (
        "/score",
        {"text_1": "a", "text_2": "b", "mm_processor_kwargs": {"a": 1}},
        "mm_processor_kwargs",
        "not supported",
    ),
    ("/rerank", {"documents": ["a"]}, "query", "is missing"),
    ("/rerank", {"query": ["a"], "documents": ["a"]}, "query", "must be a string"),
    ("/rerank", {"query": "a", "documents": []}, "documents", "must be text or a list"),
    ("/rerank", {"query": "a", "documents": ["a"] * 5}, "documents", "6 texts in all; at most 5"),
    ("/rerank", {"query": "", "documents": ["a"]}, "query", "is empty"),
    ("/rerank", {"query": "a", "documents": ["a", ""]}, "documents[1]", "is empty"),
    ("/rerank", {"query": "a", "documents": ["a"], "top_n": 1.5}, "top_n", "not a whole number"),
]


def test_refusals_name_their_fields(gateway, client, monkeypatch):
    for path, body, field, said in REFUSED:
        answer = client.post(path, json=body)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, field), (body, error)
        assert said in error["message"], error
    assert client.post("/score", json={"text_1": "a", "text_2": "b", "model": "other"}).status_code == 404
    monkeypatch.setattr(gateway.first.text, "embedding", Embedding(Pooling.MEAN, 50, normalised=True))
    answer = client.post("/rerank", json={"query": "a", "documents": ["b", "c"]})
    assert answer.json()["error"]["param"] == "documents"
    assert "3 inputs x 50 dimensions exceed 100 (max_answer_entries)" in answer.text
    monkeypatch.setattr(gateway.first.text, "embedding", None)
    answer = client.post("/rerank", json={"query": "a", "documents": ["b"]})
    assert answer.json()["error"]["param"] == "model" and "no modules.json" in answer.text
    assert not gateway.accepted and gateway.admission.in_flight == 0


def test_each_text_takes_a_place_and_repeated_documents_count(gateway, client, monkeypatch):
    seen: list[int] = []
    expected: list[int] = []
    own, expect = gateway.request, HeldBytes.expect_answer

    def counted(*given):
        seen.append(gateway.admission.in_flight)
        return own(*given)

    def noted(held: HeldBytes, least: int, most: int, model: str = "") -> None:
        expected.append(least)
        expect(held, least, most, model)

    monkeypatch.setattr(gateway, "request", counted)
    monkeypatch.setattr(HeldBytes, "expect_answer", noted)
    body = {"query": "a", "documents": ["é" * 100, "b"], "truncate_prompt_tokens": 3}
    ask(client, "/rerank", **body)
    ask(client, "/rerank", **body, return_documents=False)
    assert seen == [3] * 6 and expected[0] - expected[1] == 201
    wait_for(lambda: gateway.admission.in_flight == 0, 5, "places end when the client has read")


def test_the_document_describes_requests_and_answers(gateway, client):
    document = build_document(gateway)

    def valid(value: Any, name: str) -> None:
        schema = {"$ref": f"#/components/schemas/{name}", "components": document["components"]}
        jsonschema.Draft202012Validator(schema).validate(value)

    score = {"text_1": "a", "text_2": ["a", "b"], "use_activation": False, "cache_salt": "x"}
    rerank = {"query": "a", "documents": ["a", "b"], "top_n": -1, "return_documents": None}
    for path, body, kind, answer in (
        ("/score", score, "ScoreRequest", "Scores"),
        ("/rerank", rerank, "RerankRequest", "Ranking"),
        ("/rerank", rerank | {"return_documents": False}, "RerankRequest", "Ranking"),
    ):
        valid(body, kind)
        valid(ask(client, path, **body), answer)
    assert {*SCORE, *RERANK} <= document["paths"].keys()
