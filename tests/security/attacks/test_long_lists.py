"""A worker and messages with lists of millions of entries: they are refused by length, before they are walked."""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import numpy as np
import pytest

from tests.fuzz.worker_messages import message
from tests.fuzz.workers import Pair, running_pair
from wire import common_pb2, handoff_pb2

TOKENS = 4_000_000
MORE = 300_000
STALL_SECONDS = 0.5  # of the worker's event loop; without the limits 1 to 4 s
UNLIMITED = [("grpc.max_send_message_length", -1)]


@pytest.fixture(scope="module")
def pair(checkpoint: Any) -> Iterator[Pair]:
    with running_pair(checkpoint("llama")) as running:
        yield running


class Watch:
    """Measures how long the workers' event loop leaves a callback waiting at most."""

    def __init__(self, pair: Pair):
        self.worst = 0.0
        self._pair = pair
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._ended.wait(0.01):
            began = time.monotonic()
            self._pair.call(asyncio.sleep(0))
            self.worst = max(self.worst, time.monotonic() - began)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()


def long_prompt(asked: Any) -> None:
    asked.spec.prompt_tokens = np.zeros(TOKENS, "<u4").tobytes()


def long_output(asked: Any) -> None:
    asked.spec.output_tokens = np.zeros(TOKENS, "<u4").tobytes()


def many_stop_ids(asked: Any) -> None:
    asked.spec.sampling.stop_token_ids.extend(np.zeros(TOKENS, int))


@pytest.mark.parametrize("method", ["Prefill/Run", "Decode/Run"])
@pytest.mark.parametrize("lengthen", [long_prompt, long_output, many_stop_ids])
def test_a_request_of_millions_of_tokens(method: str, lengthen: Callable[[Any], None], pair: Pair) -> None:
    asked = message(pair, method, secrets.token_bytes(16), [1, 2, 3])
    lengthen(asked)
    raw = asked.SerializeToString()
    address = (pair.prefill if method.startswith("Prefill") else pair.decode).address
    with grpc.insecure_channel(address, options=UNLIMITED) as channel, Watch(pair) as watch:
        with pytest.raises(grpc.RpcError) as caught:
            list(channel.unary_stream(f"/baton.v1.{method}", None, None)(raw, timeout=60))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert watch.worst < STALL_SECONDS


def handed_off(pair: Pair, *said: bytes) -> grpc.RpcError | None:
    """Send messages of a prefill worker after its Hello; returns the error that ends the stream."""
    hello = handoff_pb2.Hello(
        prefill=common_pb2.WorkerRef(worker_id="hostile", epoch=7),
        decode_epoch=pair.decode.epoch,
        layout=pair.layout,
        transports=["grpc"],
        digests="all",
        digest_kinds=["xxh3_128"],
    )
    messages = [handoff_pb2.PrefillToDecode(hello=hello).SerializeToString(), *said]
    with grpc.insecure_channel(pair.decode.address, options=UNLIMITED) as channel:
        call = channel.stream_stream("/baton.v1.Decode/Handoff", None, None)(iter(messages), timeout=30)
        try:
            list(call)
        except grpc.RpcError as error:
            return error
    return None


def test_a_message_that_carries_many_others(pair: Pair) -> None:
    beat = handoff_pb2.PrefillToDecode(beat=common_pb2.Beat()).SerializeToString()
    more = handoff_pb2.PrefillToDecode(
        more=[handoff_pb2.PrefillToDecode.FromString(beat)]
    ).SerializeToString()
    with Watch(pair) as watch:
        error = handed_off(pair, beat + MORE * more)
    assert watch.worst < STALL_SECONDS
    assert error is not None and error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert str(error.details()).startswith("more:")
