"""Extreme but valid requests at the router: long lists of stop strings, resumed streams with and without a ticket,
chunked bodies with trailers. Each is answered, or refused with the field's name; a trailer never acts as a header."""

from __future__ import annotations

import json
import string

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.errors import InternalError
from cluster.rpc.errors import error_from_rpc
from tests.fuzz.conftest import BATCH, few
from tests.fuzz.raw_grpc import CLEAN
from tests.fuzz.raw_http import exchange
from tests.fuzz.tally import ANSWERED, REFUSED, Tally
from tests.harness.router import Router
from wire import inference_pb2 as pb

CONTEXT = 64  # tokens: the router under test
MAX_STOPS, LONGEST_STOP = 16, 1024


@pytest.fixture(scope="module")
def channel(router: Router):
    with grpc.insecure_channel(router.grpc) as made:
        yield made


def generate(
    channel: grpc.Channel, request: pb.GenerateRequest, tally: Tally, kind: str
) -> list[pb.GenerateResponse]:
    failure: grpc.RpcError | None = None
    answers: list[pb.GenerateResponse] = []
    try:
        for raw in channel.unary_stream("/baton.v1.Inference/Generate", None, None)(
            request.SerializeToString(), timeout=20
        ):
            answers.append(pb.GenerateResponse.FromString(raw))
    except grpc.RpcError as error:
        failure = error
    tally.count(kind, ANSWERED if failure is None else REFUSED)
    if failure is None:
        assert answers[-1].HasField("completed")
        return answers
    assert failure.code() in CLEAN, (request, failure)
    reported = error_from_rpc(failure)
    assert not isinstance(reported, InternalError), failure
    assert reported.field or failure.code() is not grpc.StatusCode.INVALID_ARGUMENT, failure
    return []


# Prefixes of each other, runs of one character, and strings that occur in the stub's text.
_letters = st.sampled_from([*string.ascii_lowercase[:4], "é", "\U0001f642", " "])
stops = st.one_of(
    st.text(_letters, min_size=1, max_size=6),
    st.builds(lambda one, times: one * times, _letters, st.sampled_from([1, 2, 1023, LONGEST_STOP])),
    st.builds(lambda one, times: one * times + "!", _letters, st.integers(1, LONGEST_STOP - 1)),
)


@few(60, 0.1)
@given(given_stops=st.lists(stops, min_size=1, max_size=MAX_STOPS), keep=st.booleans(), n=st.integers(1, 3))
def test_stop_strings(given_stops, keep, n, channel, tally):
    options = pb.GenerateOptions(
        stop=given_stops, include_stop_text=keep, n=n, max_tokens=40, ignore_eos=True
    )
    generate(channel, pb.GenerateRequest(text="abc", options=options), tally, "gRPC: lists of stop strings")


@few(60, 0.06)
@given(
    held=st.sampled_from([1, 2, 10, CONTEXT - 4, CONTEXT - 3, CONTEXT, 5000]),
    most=st.sampled_from([1, 2, 10, CONTEXT - 3]),
    ticket=st.sampled_from(["none", "own", "changed", "another's"]),
    reconnects=st.sampled_from([0, 1, 2**32 - 1]),
    position=st.integers(0, 40),
)
def test_resumed_streams(held, most, ticket, reconnects, position, channel, tally):
    options = pb.GenerateOptions(max_tokens=most, seed=3)
    first = pb.GenerateRequest(text="abc", options=options, request_id="one")
    begun = generate(channel, first, tally, "gRPC: streams to resume")
    real = begun[0].started.resume_ticket
    changed = bytearray(real)
    if changed:
        changed[position % len(changed)] ^= 1
    request = pb.GenerateRequest(
        text="abc" if ticket != "another's" else "abd", options=options, request_id="one"
    )
    request.reconnects = reconnects
    request.resume_tokens.ids.extend([5] * held)
    request.resume_ticket = {"none": b"", "own": real, "changed": bytes(changed), "another's": real}[ticket]
    answers = generate(channel, request, tally, "gRPC: resumed streams")
    sent = sum(len(answer.chunk.tokens) for answer in answers)
    assert not answers or (ticket == "own" and sent <= most - held < most), (held, most, ticket, sent)


_NAMES = st.sampled_from(
    [
        "Authorization",
        "authorization",
        "X-Request-Id",
        "Content-Length",
        "Transfer-Encoding",
        "Host",
        "X-Other",
    ]
)


@few(64, 0.04, BATCH)
@given(
    trailers=st.lists(st.lists(_NAMES, max_size=4), min_size=BATCH, max_size=BATCH), cut=st.integers(1, 20)
)
def test_trailers(trailers, cut, guarded, tally):
    """An API key in a trailer does not authenticate."""
    router, key = guarded
    values = {"authorization": f"Bearer {key}", "content-length": "5", "transfer-encoding": "chunked"}
    body = json.dumps({"prompt": "abc", "max_tokens": 2}).encode()
    chunks = [body[:cut], body[cut:]]
    coded = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)
    payloads = []
    for names in trailers:
        lines = "".join(f"{name}: {values.get(name.lower(), 'x')}\r\n" for name in names)
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        payloads.append(head + coded + b"0\r\n" + lines.encode() + b"\r\n")
    for payload, answer in zip(payloads, exchange(router.address, payloads, 5.0), strict=True):
        assert answer.startswith((b"HTTP/1.1 401", b"HTTP/1.1 400")), (payload, answer)
        tally.count("HTTP: trailers", REFUSED)
