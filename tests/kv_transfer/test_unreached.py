"""A decode worker that could not be reached: whoever is sent there next hears so at once, and it is tried again."""

from __future__ import annotations

import asyncio
import socket
import time

import pytest

from cluster.errors import PeerLostError
from cluster.probation import FIRST_SECONDS
from kv_transfer import link
from tests.kv_transfer.pair import assert_same, config, decode_side, prefill_side
from wire import common_pb2

TOKENS = 90


async def test_one_that_answers_nothing_is_waited_for_once_and_then_left_alone(monkeypatch):
    """Its machine takes the connection, and that is all."""
    monkeypatch.setattr(link, "SUSPECT_SECONDS", 0.6)
    server = socket.create_server(("127.0.0.1", 0))
    port = server.getsockname()[1]
    nobody = common_pb2.WorkerRef(worker_id="decode", epoch=7, address=f"127.0.0.1:{port}")
    async with prefill_side(config("grpc")) as prefill:
        with pytest.raises(PeerLostError, match="decode@7"):
            await prefill.open(nobody, TOKENS)
        for _ in range(3):
            began = time.monotonic()
            with pytest.raises(PeerLostError, match="could not be reached, and is tried again in"):
                await prefill.open(nobody, TOKENS)
            assert time.monotonic() - began < 0.3  # nothing is asked
        assert prefill.sender.live == 0
    server.close()


async def test_it_is_tried_again_and_an_answer_is_enough():
    async with prefill_side(config("grpc")) as prefill, decode_side(config("grpc")) as decode:
        prefill.sender.unreached.failed(f"{decode.ref.worker_id}@{decode.ref.epoch:x}")
        with pytest.raises(PeerLostError, match="could not be reached"):
            await prefill.open(decode.ref, TOKENS)
        await asyncio.sleep(FIRST_SECONDS)
        await prefill.send(decode.ref, TOKENS)
        assert_same(prefill, decode, TOKENS)
        assert not prefill.sender.unreached.names()
