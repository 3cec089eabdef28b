"""Workers' ports: for any message of a router, the answer is typed, the worker goes on, and nothing leaks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial

import grpc
from hypothesis import given
from hypothesis import strategies as st

from cluster.errors import EngineRequestError, InternalError
from cluster.rpc.errors import ERROR_KEY, error_from_rpc
from tests.fuzz.conftest import BATCH, few
from tests.fuzz.messages import changed, changing, damaged
from tests.fuzz.raw_grpc import PREFACE, frames
from tests.fuzz.raw_http import exchange
from tests.fuzz.tally import ANSWERED, CLOSED, REFUSED, Tally
from tests.fuzz.worker_messages import METHODS, message
from wire import common_pb2, decode_pb2

RUNS = ("Prefill/Run", "Decode/Run")
TYPED = {  # what a router deals with; INTERNAL and UNKNOWN are not among it
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
}
transfer_ids = st.binary(min_size=16, max_size=16)


def call(
    channels: dict[str, grpc.Channel],
    method: str,
    raw: bytes,
    tally: Tally,
    kind: str,
    end_of: Callable[[], common_pb2.AttemptEnd] | None = None,
) -> None:
    """`end_of` reads a Run to its end, for a moment only: an attempt that waits for its other half waits longer."""
    channel, path = channels[method.partition("/")[0]], f"/baton.v1.{method}"
    failure: grpc.RpcError | None = None
    outcome = ANSWERED
    try:
        channel.unary_unary(path, None, None)(raw, timeout=60)
        if end_of is not None:
            with contextlib.suppress(TimeoutError):
                end = end_of()
                assert end.error.code not in (InternalError.__name__, EngineRequestError.__name__), end
                if end.HasField("error"):
                    outcome = REFUSED
    except grpc.RpcError as error:
        failure = error
    if failure is not None and failure.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
        outcome = REFUSED
        assert failure.code() in TYPED, (method, raw, failure)
        assert any(datum.key == ERROR_KEY for datum in failure.trailing_metadata()), failure
        reported = error_from_rpc(failure)
        assert reported.field or failure.code() is not grpc.StatusCode.INVALID_ARGUMENT, failure
    tally.count(kind, outcome)


prompts = st.lists(st.integers(0, 255), min_size=1, max_size=40)


@few(150, 0.07)
@given(
    data=st.data(),
    method=st.sampled_from([*METHODS, "Prefill/Run", *["Decode/Run"] * 4]),
    transfer_id=transfer_ids,
    prompt=prompts,
)
def test_requests_that_are_nearly_right(data, method, transfer_id, prompt, pair, channels, tally):
    asked = message(pair, method, transfer_id, prompt)
    if method in ("Prefill/Run", "Decode/Run"):  # most of what matters is in there
        data.draw(changing(asked.spec, 1) | changing(asked.spec.sampling, 2))
    reading = None
    if method in RUNS:
        worker = pair.prefill if method == "Prefill/Run" else pair.decode
        reading = pair.read(worker, transfer_id, asked.spec)
        asked.handle.CopyFrom(reading.reference)
    asked = data.draw(changed(asked, 1))
    end_of = None if reading is None else partial(pair.client.end_of, reading, 0.5)
    call(channels, method, asked.SerializeToString(), tally, "worker ports: changed requests", end_of)


@few(60, 0.03)
@given(data=st.data(), method=st.sampled_from(sorted(METHODS)), transfer_id=transfer_ids)
def test_messages_that_are_damaged(data, method, transfer_id, pair, channels, tally):
    raw = message(pair, method, transfer_id, [5] * 20).SerializeToString()
    call(channels, method, data.draw(damaged(raw)), tally, "worker ports: damaged messages")


@few(60, 0.02)
@given(method=st.sampled_from(sorted(METHODS)), raw=st.binary(max_size=100))
def test_messages_that_are_noise(method, raw, channels, tally):
    call(channels, method, raw, tally, "worker ports: noise")


@few(64, 0.02, BATCH)
@given(payloads=st.lists(st.lists(frames, max_size=6).map(b"".join), min_size=BATCH, max_size=BATCH))
def test_raw_frames(payloads, pair, channels, tally):
    for worker in (pair.prefill, pair.decode):
        host, port = worker.address.rsplit(":", 1)
        exchange((host, int(port)), [PREFACE + payload for payload in payloads[::2]] + payloads[1::2], 30.0)
        tally.count("worker ports: HTTP/2 frames and raw bytes", CLOSED, len(payloads))
    call(
        channels,
        "Decode/Abort",
        decode_pb2.AbortRequest(transfer_id=bytes(16)).SerializeToString(),
        tally,
        "worker ports: noise",
    )


def test_they_still_compute(pair, channels, tally):
    """And a hand-off goes through: the last word is DONE, from both."""
    for method, transfer_id in (("Decode/Run", b"a" * 16), ("Prefill/Run", b"b" * 16)):
        _, end = pair.answer(channels, method, message(pair, method, transfer_id, [7] * 30), 30.0)
        assert end.outcome == common_pb2.ATTEMPT_OUTCOME_DONE, end
    pair.check_well()
