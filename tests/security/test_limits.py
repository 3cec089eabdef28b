"""Requests that are too large, too many or too late are refused with the limit's name, and the router goes on."""

from __future__ import annotations

import contextlib
import json
import socket
import time

import grpc
import httpx
import pytest

from baton.client import Client
from cluster.errors import InvalidRequestError
from tests.harness.waiting import wait_for
from wire import inference_pb2 as pb

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"


@pytest.fixture(scope="module")
def settings():
    return {
        "api_keys_file": None,
        "max_body_bytes": 100_000,
        "max_header_bytes": 4096,
        "max_headers": 20,
        "max_http_connections": 30,
        "max_json_depth": 6,
        "max_choices": 3,
        "max_prompts": 4,
        "max_stop_strings": 2,
        "max_stop_string_characters": 10,
        "max_stop_token_ids": 2,
        "max_logit_bias": 2,
        "max_allowed_token_ids": 2,
        "max_bad_words": 2,
        "max_bad_word_characters": 3,
        "max_logprobs": 5,
        "header_seconds": 1.0,
        "body_seconds": 1.0,
    }


LIMITS = [
    ({"n": 4}, "n", "3"),
    ({"prompt": ["a"] * 5}, "prompt", "4"),
    ({"stop": ["a", "b", "c"]}, "stop", "2"),
    ({"stop": "x" * 11}, "stop", "10"),
    ({"stop_token_ids": [1, 2, 3]}, "stop_token_ids", "2"),
    ({"logit_bias": {"1": 1, "2": 1, "3": 1}}, "logit_bias", "2"),
    ({"allowed_token_ids": [1, 2, 3]}, "allowed_token_ids", "2"),
    ({"bad_words": ["a", "b", "c"]}, "bad_words", "2"),
    ({"bad_words": ["abcd"]}, "bad_words", "3"),
    ({"logprobs": 6}, "logprobs", "5"),
    ({"metadata": {"a": {"b": {"c": {"d": {"e": {}}}}}}}, "body", "6"),
    ({"seed": "now"}, "seed", ""),
    ({"seed": 1.5}, "seed", ""),
    ({"seed": 2**64}, "seed", ""),
    ({"top_k": "many"}, "top_k", ""),
    ({"top_k": [1]}, "top_k", ""),
]


@pytest.mark.parametrize(("fields", "name", "limit"), LIMITS)
def test_a_field_beyond_its_limit_is_named_with_it(fields, name, limit, router):
    answer = httpx.post(f"{router.http}/v1/completions", json={"prompt": "abc", "max_tokens": 2, **fields})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == name
    assert limit in error["message"]


@pytest.mark.parametrize(
    "name", ["transfer_id", "decode", "worker_id", "kv_transfer_params", "slot", "salt", "tenant"]
)
def test_no_label_names_transfers_workers_slots_or_tenants(name, router):
    answer = httpx.post(f"{router.http}/v1/completions", json={"prompt": "abc", name: "x"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)


def test_grpc_has_no_field_for_them_either():
    """Any field that a client may set, at any depth."""
    names: set[str] = set()
    seen: set[str] = set()
    left = [
        pb.GenerateRequest.DESCRIPTOR,
        pb.EmbedRequest.DESCRIPTOR,
        pb.TokenizeRequest.DESCRIPTOR,
        pb.ListModelsRequest.DESCRIPTOR,
    ]
    while left:
        message = left.pop()
        if message.full_name not in seen:
            seen.add(message.full_name)
            names |= {field.name for field in message.fields}
            left += [field.message_type for field in message.fields if field.message_type is not None]
    words = (
        "transfer",
        "worker",
        "address",
        "slot",
        "salt",
        "tenant",
        "epoch",
        "agent",
        "weight",
        "endpoint",
    )
    assert not [name for name in names for word in words if word in name]
    assert "request_id" in names and "temperature" in names


def test_just_within_every_limit_is_fine(router):
    body = {
        "prompt": ["a"] * 4,
        "max_tokens": 2,
        "stop": ["xxxxxxxxxx", "y"],
        "stop_token_ids": [1, 2],
        "logit_bias": {"1": 1, "2": 1},
        "allowed_token_ids": [1, 2],
        "bad_words": ["abc", "b"],
        "logprobs": 5,
        "metadata": {"a": {"b": {"c": {"d": {"e": 1}}}}},
        "top_k": -1,
        "seed": -1,
    }
    answer = httpx.post(f"{router.http}/v1/completions", json=body)
    assert answer.status_code == 200, answer.text


def test_grpc_names_the_same_limits(router):
    with Client(router.grpc) as client:
        for options, name in (
            ({"n": 4}, "n"),
            ({"stop": ["a", "b", "c"]}, "stop"),
            ({"stop_token_ids": [1, 2, 3]}, "stop_token_ids"),
            ({"logit_bias": {1: 1, 2: 1, 3: 1}}, "logit_bias"),
            ({"allowed_token_ids": [1, 2, 3]}, "allowed_token_ids"),
            ({"bad_words": ["a", "b", "c"]}, "bad_words"),
            ({"logprobs": 6}, "logprobs"),
        ):
            with pytest.raises(InvalidRequestError) as caught:
                client.generate("abc", **options)
            assert caught.value.field == name and caught.value.limit


def talk(router, *pieces: bytes, seconds: float = 60.0) -> bytes:
    """Everything that comes back until the other side ends it."""
    with socket.create_connection(router.address, timeout=seconds) as sock:
        came = b""
        with contextlib.suppress(ConnectionError):
            for piece in pieces:
                sock.sendall(piece)
            while data := sock.recv(65536):
                came += data
    return came


def error_of(raw: bytes, status: int) -> dict[str, object]:
    head, _, body = raw.partition(b"\r\n\r\n")
    assert head.startswith(f"HTTP/1.1 {status} ".encode()), raw
    error: dict[str, object] = json.loads(body)["error"]
    return error


def test_heads_have_a_size(router):
    many = b"".join(b"a%d: b\r\n" % i for i in range(30))
    long = b"cookie: " + b"x" * 5000 + b"\r\n"
    for head in (HEAD + many + b"\r\n", HEAD + long + b"\r\n"):
        assert error_of(talk(router, head), 431)["param"] == "headers"
    url = b"GET /" + b"x" * 5000 + b" HTTP/1.1\r\nhost: x\r\n\r\n"
    assert error_of(talk(router, url), 431)["param"] == "headers"
    # An unending one, in small pieces.
    endless = [b"GET /health HTTP/1.1\r\na: "] + [b"x" * 500] * 40
    assert error_of(talk(router, *endless), 431)["param"] == "headers"


def test_bodies_have_a_size_also_without_a_length(router):
    said = talk(router, HEAD + b"content-length: 200000\r\nconnection: close\r\n\r\n", b" " * 200_000)
    assert error_of(said, 413)["code"] == "request_too_large"
    chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    said = talk(
        router, HEAD + b"transfer-encoding: chunked\r\nconnection: close\r\n\r\n", chunk, chunk, b"0\r\n\r\n"
    )
    assert error_of(said, 413)["code"] == "request_too_large"


def test_heads_and_bodies_must_come_in_time(router):
    for pieces in ((b"GET /hea",), (HEAD + b"content-length: 10\r\n\r\n{",)):
        began = time.monotonic()
        assert "did not arrive within 1 s" in str(error_of(talk(router, *pieces), 408)["message"])
        assert 0.9 < time.monotonic() - began < 4


def test_a_connection_that_sends_nothing_is_closed_in_time(router):
    began = time.monotonic()
    assert talk(router) == b""
    assert 0.9 < time.monotonic() - began < 4


def test_a_head_that_trickles_is_late_all_the_same(router):
    with socket.create_connection(router.address, timeout=60) as sock:
        began = time.monotonic()
        sock.settimeout(0.2)
        sock.sendall(b"GET /health HTTP/1.1\r\na: ")
        came = b""
        while time.monotonic() - began < 5 and not came:
            with contextlib.suppress(TimeoutError):
                sock.sendall(b"x")
                came = sock.recv(4096)
    assert error_of(came, 408)


def test_a_body_that_waits_a_little_is_read(router):
    body = json.dumps({"prompt": "abc", "max_tokens": 2}).encode()
    with socket.create_connection(router.address, timeout=60) as sock:
        sock.sendall(HEAD + b"content-length: %d\r\nexpect: 100-continue\r\n\r\n" % len(body))
        assert sock.recv(4096).startswith(b"HTTP/1.1 100")
        for at in range(0, len(body), 10):
            sock.sendall(body[at : at + 10])
        came = b""
        while not came.endswith(b"}}"):
            came += sock.recv(4096)
        assert came.startswith(b"HTTP/1.1 200")
        # And the connection is good for another, later than the head's deadline counts from: that of a connection which
        # was opened now is over.
        assert talk(router) == b""
        sock.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert b"200 OK" in sock.recv(4096)


def test_not_http_gets_an_openai_error(router):
    for raw in (b"\x00\x01\x02\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00"):
        assert error_of(talk(router, raw), 400)["type"] == "invalid_request_error"


def test_connections_have_a_number(router):
    def refused() -> bool:
        with contextlib.ExitStack() as stack:
            for _ in range(30):
                one = stack.enter_context(socket.create_connection(router.address, timeout=60))
                one.sendall(HEAD + b"content-length: 10\r\n\r\n{")
                time.sleep(0.01)  # until its request has a place: one without would make room
            said = talk(router, b"GET")
        return said.startswith(b"HTTP/1.1 429") and b"retry-after: 1" in said

    wait_for(refused, 60, "a connection too many is refused")
    wait_for(lambda: httpx.get(f"{router.http}/health").status_code == 200, 60, "places are given back")


def test_grpc_metadata_and_messages_have_a_size(router):
    with grpc.insecure_channel(router.grpc) as channel:
        call = channel.unary_unary("/baton.v1.Inference/ListModels", None, None)
        with pytest.raises(grpc.RpcError) as caught:
            call(b"", metadata=(("x", "y" * 5000),), timeout=60)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        with pytest.raises(grpc.RpcError) as caught:
            call(bytes(200_000), timeout=60)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert call(b"", timeout=60)


def test_grpc_connections_must_begin_in_time(router):
    """Nothing sent, or half a preface: the place is given back. A connection that has begun may be silent."""
    address = ("127.0.0.1", int(router.grpc.rsplit(":", 1)[1]))

    def is_ended(said: bytes) -> None:
        with socket.create_connection(address, timeout=30) as sock:
            sock.sendall(said)
            with contextlib.suppress(ConnectionError):
                while sock.recv(65536):  # until the other side ends it, or the time above is over
                    pass

    for said in (b"", b"PRI * HTTP/2.0\r\n\r\nSM"):
        is_ended(said)
    with grpc.insecure_channel(router.grpc) as channel:
        call = channel.unary_unary("/baton.v1.Inference/ListModels", None, None)
        assert call(b"", timeout=5)
        is_ended(b"")  # the time of a connection that was opened later is over
        assert call(b"", timeout=5)


def test_grpc_batches_and_depth_have_a_size(router):
    """A gRPC request has one prompt, and can nest as deep as its description allows: there is nothing to exceed."""
    request = pb.GenerateRequest.DESCRIPTOR
    assert not any(one.name in ("prompts", "texts") for one in request.fields)

    def depth(message, seen=()):
        if message.full_name in seen:
            return 99
        inner = [one.message_type for one in message.fields if one.message_type is not None]
        return 1 + max((depth(one, (*seen, message.full_name)) for one in inner), default=0)

    assert depth(request) <= 6, "a message that contains itself could be of any depth"
