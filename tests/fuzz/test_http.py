"""The HTTP endpoint: for any request, the answer is right or a clean 4xx that names the mistake."""

from __future__ import annotations

import json
import string

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz.conftest import BATCH, few
from tests.fuzz.raw_http import exchange
from tests.fuzz.strategies import anything, bodies, raw_requests, texts
from tests.fuzz.tally import ANSWERED, CLOSED, REFUSED, Tally
from tests.harness.router import Router

ENDPOINTS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")


@pytest.fixture(scope="module")
def client(router: Router):
    with httpx.Client(base_url=router.http, timeout=20) as made:
        yield made


def check(answer: httpx.Response, tally: Tally, kind: str) -> None:
    assert answer.status_code < 500, (answer.request.content, answer.text)
    tally.count(kind, REFUSED if answer.status_code >= 400 else ANSWERED)
    if answer.status_code >= 400:
        error = answer.json()["error"]
        assert error["message"]
        assert error["type"]
        return
    if "event-stream" in answer.headers.get("content-type", ""):
        events = [line[6:] for line in answer.text.split("\n\n") if line]
        assert events[-1] == "[DONE]", answer.text
        assert all("error" not in json.loads(event) for event in events[:-1]), answer.text


def post(client: httpx.Client, path: str, body: object, tally: Tally) -> None:
    headers = {"content-type": "application/json"}
    check(client.post(path, content=json.dumps(body).encode(), headers=headers), tally, "HTTP: JSON bodies")


@few(200, 0.12)
@given(body=bodies("prompt"))
def test_completions(body, client, tally):
    post(client, "/v1/completions", body, tally)


@few(200, 0.12)
@given(body=bodies("messages"))
def test_chats(body, client, tally):
    post(client, "/v1/chat/completions", body, tally)


@few(100, 0.04)
@given(
    path=st.sampled_from(ENDPOINTS),
    raw=st.one_of(st.binary(max_size=300), anything.map(repr).map(str.encode)),
)
def test_bodies_that_are_not_json(path, raw, client, tally):
    try:
        json.loads(raw)
    except (ValueError, RecursionError):
        assert client.post(path, content=raw).status_code == 400
        tally.count("HTTP: bodies that are not JSON", REFUSED)


_NAME = st.text(string.ascii_letters + string.digits + "-_", min_size=1, max_size=20)
_VALUE = st.binary(max_size=60).map(lambda raw: raw.translate(None, b"\r\n\x00"))
_KNOWN = st.sampled_from(
    ["x-request-id", "accept", "authorization", "content-type", "content-encoding", "te", "range"]
)


@few(80, 0.03)
@given(headers=st.lists(st.tuples(st.one_of(_NAME, _KNOWN), _VALUE), max_size=8), name=texts)
def test_headers(headers, name, client, tally):
    framing = {"content-length", "transfer-encoding", "host", "connection", "expect", "upgrade"}
    sent = [(key.encode(), value) for key, value in headers if key.lower() not in framing]
    body = json.dumps({"prompt": name, "max_tokens": 1}).encode()
    try:
        request = client.build_request("POST", "/v1/completions", content=body, headers=sent)
        answer = client.send(request)
    except httpx.LocalProtocolError:
        return  # the client refuses to send it: the raw test does
    check(answer, tally, "HTTP: headers")


@few(60, 0.02)
@given(
    path=st.text(min_size=1, max_size=30).map(lambda text: "/" + text.encode("utf-8", "replace").hex("%")),
    method=st.sampled_from(["GET", "PUT", "DELETE", "PATCH", "POST", "OPTIONS", "HEAD"]),
)
def test_paths(path, method, client, tally):
    answer = client.request(method, path)
    assert answer.status_code < 500
    tally.count("HTTP: paths and methods", REFUSED if answer.status_code >= 400 else ANSWERED)
    if method != "HEAD" and answer.status_code >= 400:
        assert answer.json()["error"]["message"]


@few(320, 0.1, BATCH)
@given(payloads=st.lists(raw_requests(), min_size=BATCH, max_size=BATCH))
def test_raw_bytes(payloads, router, tally):
    for payload, answer in zip(payloads, exchange(router.address, payloads, 3.0), strict=True):
        status = 0
        if answer:
            assert answer.startswith(b"HTTP/1.1 "), (payload, answer)
            status = int(answer[9:12])
            assert 100 <= status < 500, (payload, answer)
        tally.count("HTTP: raw bytes", CLOSED if not status else REFUSED if status >= 400 else ANSWERED)
