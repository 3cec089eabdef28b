"""The gRPC endpoint: for any request, the answer is right or INVALID_ARGUMENT with the field's name."""

from __future__ import annotations

import contextlib

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.errors import InternalError
from cluster.rpc.errors import error_from_rpc
from tests.fuzz.conftest import BATCH, few
from tests.fuzz.raw_grpc import CLEAN, PREFACE, frames
from tests.fuzz.raw_http import exchange
from tests.fuzz.strategies import tokens
from tests.fuzz.tally import ANSWERED, CLOSED, REFUSED, Tally
from tests.harness.router import Router
from wire import inference_pb2 as pb

METHODS = {
    "Generate": pb.GenerateRequest,
    "Embed": pb.EmbedRequest,
    "Tokenize": pb.TokenizeRequest,
    "ListModels": pb.ListModelsRequest,
}
_texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
_floats = st.one_of(st.floats(width=32), st.floats(-1, 3, width=32))


@pytest.fixture(scope="module")
def channel(router: Router):
    with grpc.insecure_channel(router.grpc) as made:
        yield made


def call(
    channel: grpc.Channel,
    method: str,
    raw: bytes,
    tally: Tally,
    kind: str,
    metadata: tuple[tuple[str, str | bytes], ...] = (),
) -> None:
    path = f"/baton.v1.Inference/{method}"
    failure: grpc.RpcError | None = None
    try:
        if method == "Generate":
            answers = list(channel.unary_stream(path, None, None)(raw, timeout=20, metadata=metadata))
            assert pb.GenerateResponse.FromString(answers[-1]).HasField("completed")
        else:
            channel.unary_unary(path, None, None)(raw, timeout=20, metadata=metadata)
    except grpc.RpcError as error:
        failure = error
    tally.count(kind, ANSWERED if failure is None else REFUSED)
    if failure is not None:
        assert failure.code() in CLEAN, (raw, failure)
        reported = error_from_rpc(failure)
        assert not isinstance(reported, InternalError)
        assert reported.field or failure.code() is not grpc.StatusCode.INVALID_ARGUMENT, failure


def _options() -> st.SearchStrategy[pb.GenerateOptions]:
    fields = {
        "max_tokens": st.integers(0, 70),
        "temperature": _floats,
        "top_k": st.integers(0, 2**32 - 1),
        "top_p": _floats,
        "min_p": _floats,
        "repetition_penalty": _floats,
        "presence_penalty": _floats,
        "frequency_penalty": _floats,
        "n": st.one_of(st.integers(0, 18), st.integers(0, 2**31 - 1)),
        "stop": st.lists(_texts, max_size=5),
        "stop_token_ids": st.lists(st.integers(0, 2**31 - 1), max_size=5),
        "min_tokens": st.integers(0, 70),
        "ignore_eos": st.booleans(),
        "logprobs": st.integers(0, 25),
        "logit_bias": st.dictionaries(st.integers(0, 600), _floats, max_size=4),
        "allowed_token_ids": st.lists(st.integers(0, 600), max_size=5),
        "bad_words": st.lists(_texts, max_size=3),
        "include_stop_text": st.booleans(),
        "priority": st.integers(-(2**31), 2**31 - 1),
    }
    some = st.lists(st.sampled_from(sorted(fields)), max_size=4, unique=True)
    chosen = some.flatmap(lambda names: st.fixed_dictionaries({name: fields[name] for name in names}))
    return chosen.map(lambda given: pb.GenerateOptions(**given))  # type: ignore[arg-type]  # drawn by name


@st.composite
def requests(draw: st.DrawFn) -> pb.GenerateRequest:
    request = pb.GenerateRequest(options=draw(_options()))
    kind = draw(st.sampled_from(["text", "token_ids", "chat", "none"]))
    if kind == "text":
        request.text = draw(_texts)
    elif kind == "token_ids":
        request.token_ids.ids.extend(abs(one) for one in draw(tokens))
    elif kind == "chat":
        for role in draw(st.lists(st.sampled_from(["system", "user", "assistant", "", "x"]), max_size=4)):
            request.chat.messages.add(role=role, content=draw(_texts))
    if draw(st.booleans()):
        request.resume_tokens.ids.extend(abs(one) for one in draw(tokens))
    if draw(st.booleans()):
        request.resume_ticket = draw(st.binary(max_size=40))
        request.reconnects = draw(st.integers(0, 2**32 - 1))
    request.explain = draw(st.booleans())
    request.request_id = draw(_texts)
    return request


@few(150, 0.1)
@given(request=requests())
def test_requests(request, channel, tally):
    call(channel, "Generate", request.SerializeToString(), tally, "gRPC: requests")


@few(150, 0.06)
@given(
    request=requests(),
    cut=st.integers(0, 200),
    noise=st.binary(max_size=10),
    method=st.sampled_from(sorted(METHODS)),
)
def test_messages_that_are_damaged(request, cut, noise, method, channel, tally):
    raw = request.SerializeToString()
    cut = min(cut, len(raw))
    call(channel, method, raw[:cut] + noise + raw[cut + len(noise) :], tally, "gRPC: damaged messages")


@few(100, 0.03)
@given(raw=st.binary(max_size=100), method=st.sampled_from(sorted(METHODS)))
def test_messages_that_are_noise(raw, method, channel, tally):
    call(channel, method, raw, tally, "gRPC: noise")


_KEYS = st.from_regex(r"[a-z][a-z0-9_.]{0,15}", fullmatch=True).filter(lambda key: not key.startswith("grpc"))


@few(40, 0.02)
@given(
    metadata=st.lists(
        st.tuples(st.one_of(_KEYS, st.just("authorization")), st.text(" !~azAZ09", max_size=30)), max_size=6
    ),
    binary=st.binary(max_size=40),
)
def test_metadata(metadata, binary, channel, tally):
    with contextlib.suppress(ValueError):  # what the client itself refuses
        call(channel, "ListModels", b"", tally, "gRPC: metadata", (*metadata, ("x-bin", binary)))


@few(240, 0.05, BATCH)
@given(
    payloads=st.lists(st.lists(frames, max_size=6).map(b"".join), min_size=BATCH, max_size=BATCH),
    bare=st.binary(max_size=60),
)
def test_raw_frames(payloads, bare, router, channel, tally):
    host, port = router.grpc.rsplit(":", 1)
    exchange((host, int(port)), [PREFACE + payload for payload in payloads] + [bare + b"\r\n\r\n"], 5.0)
    tally.count("gRPC: HTTP/2 frames and raw bytes", CLOSED, len(payloads) + 1)
    call(channel, "ListModels", b"", tally, "gRPC: requests")
