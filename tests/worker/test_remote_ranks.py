"""The port at which the ranks of other nodes reach their leader, and what such ranks are given."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client as connect
from multiprocessing.connection import Connection, Pipe, answer_challenge, deliver_challenge
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.config.worker import WorkerConfig
from cluster.errors import SetupError
from tests.worker.rank_port import rank_bytes
from worker.ranks import remote
from worker.ranks.pipe import RankPipe
from worker.ranks.remote import (
    ACCEPTED,
    SECRETS,
    RankListener,
    connect_to_leader,
    without_secrets,
)


def test_only_a_peer_with_the_key_is_accepted() -> None:
    listening = RankListener("127.0.0.1", "w")
    try:
        with pytest.raises(AuthenticationError):
            connect(listening.address, authkey=b"guessed")
        pipe = connect(listening.address, authkey=listening.key)
        pipe.send_bytes(rank_bytes(3))
        there = listening.wait([3])[3]
        there.send_bytes(b"go")
        assert (pipe.recv_bytes(), pipe.recv_bytes()) == (ACCEPTED, b"go")
        pipe.close()
        there.close()
    finally:
        listening.close()


def test_ranks_that_are_not_waited_for_are_closed(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "START_SECONDS", 5.0)
    listening = RankListener("127.0.0.1", "w")
    try:
        with contextlib.ExitStack() as stack:
            pipes = [
                stack.enter_context(connect_to_leader(listening.address, listening.key, rank))
                for rank in (9, 3, 3, 4)
            ]
            there = listening.wait(range(3, 5))
            assert there.keys() == {3, 4}
            for pipe in pipes[:2]:
                assert pipe.poll(10.0)
                with pytest.raises(EOFError):
                    pipe.recv_bytes()
            for connection, pipe in zip(there.values(), pipes[2:], strict=True):
                with connection:
                    connection.send_bytes(b"go")
                    assert pipe.recv_bytes() == b"go"
    finally:
        listening.close()
    assert "unexpected rank 9; expected are [3, 4]" in caplog.text
    (replaced,) = [one for one in caplog.messages if "rank 3 has connected again" in one]
    assert "refused" not in replaced


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_rank_reaches_its_leader_over_both_families(host: str) -> None:
    listening = RankListener(host, "w")
    try:
        pipe = connect_to_leader(listening.address, listening.key, 3)
        with listening.wait([3])[3] as there, pipe:
            there.send_bytes(b"go")
            assert pipe.recv_bytes() == b"go"
        with pytest.raises(AuthenticationError):  # at once: trying again would not help
            connect_to_leader(listening.address, b"guessed", 3)
    finally:
        listening.close()


def test_a_rank_that_was_closed_or_not_answered_tries_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has come to a listener that is flooded, for example."""
    monkeypatch.setattr(remote, "RETRY_SECONDS", 0.05)
    monkeypatch.setattr(remote, "HANDSHAKE_SECONDS", 0.1)
    key, ranks = b"key", []

    def lead(listener: socket.socket) -> None:
        listener.accept()[0].close()
        silent = listener.accept()[0]
        peer = listener.accept()[0]
        with peer, silent, Connection(os.dup(peer.fileno())) as pipe:
            deliver_challenge(pipe, key)  # type: ignore[arg-type]
            answer_challenge(pipe, key)  # type: ignore[arg-type]
            ranks.append(pipe.recv_bytes())
            pipe.send_bytes(ACCEPTED)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        leader = threading.Thread(target=lead, args=(listener,), daemon=True)
        leader.start()
        connect_to_leader(listener.getsockname(), key, 3).close()
        leader.join(10.0)
    assert ranks == [rank_bytes(3)]


@pytest.mark.parametrize("ending", ["refused", "ended"])
def test_a_rank_is_connected_once_its_leader_says_so(ending: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not when the rank has sent its number: the leader may have ended the handshake by then."""
    monkeypatch.setattr(remote, "RETRY_SECONDS", 0.02)
    key = b"key"

    def lead(listener: socket.socket) -> None:
        for answer in (None, b"no" if ending == "refused" else None, ACCEPTED):
            peer = listener.accept()[0]
            with peer, Connection(os.dup(peer.fileno())) as pipe:
                deliver_challenge(pipe, key)  # type: ignore[arg-type]
                answer_challenge(pipe, key)  # type: ignore[arg-type]
                assert pipe.recv_bytes() == rank_bytes(3)
                if answer is not None:
                    pipe.send_bytes(answer)
                if answer == ACCEPTED:
                    pipe.send_bytes(b"go")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        leader = threading.Thread(target=lead, args=(listener,), daemon=True)
        leader.start()
        with connect_to_leader(listener.getsockname(), key, 3) as pipe:
            assert pipe.recv_bytes() == b"go"
        leader.join(10.0)


def test_a_rank_whose_leader_does_not_answer_tries_again_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer's time is the handshake's."""
    monkeypatch.setattr(remote, "RETRY_SECONDS", 0.02)
    monkeypatch.setattr(remote, "HANDSHAKE_SECONDS", 0.1)
    silent: list[Any] = []
    monkeypatch.setattr(RankListener, "_admit_rank", lambda *arguments: silent.append(arguments))
    listening = RankListener("127.0.0.1", "w")
    try:
        monkeypatch.setattr(remote, "START_SECONDS", 0.3)
        with pytest.raises(SetupError, match="rank 3 did not reach its leader"):
            connect_to_leader(listening.address, listening.key, 3)
        assert len(silent) > 1
    finally:
        listening.close()


def test_a_rank_gives_its_leader_up_after_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "RETRY_SECONDS", 0.02)
    monkeypatch.setattr(remote, "START_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = silent.getsockname()
        with pytest.raises(SetupError, match="rank 3 did not reach its leader"):
            connect_to_leader(address, b"key", 3)
    with pytest.raises(SetupError, match="Refused"):
        connect_to_leader(address, b"key", 3)


class Runs:
    """A pickle that runs code in its reader."""

    ran = False

    def __reduce__(self) -> Any:
        return setattr, (Runs, "ran", True)


def test_messages_of_a_rank_are_never_unpickled() -> None:
    ours, theirs = Pipe()
    theirs.send(Runs())
    with pytest.raises(OSError, match="no message"):
        RankPipe(ours).recv()
    listening = RankListener("127.0.0.1", "w")
    try:
        pipe: Any = connect(listening.address, authkey=listening.key)
        pipe.send(Runs())
        with pytest.raises((EOFError, ConnectionError)):
            pipe.recv_bytes()
    finally:
        listening.close()
    assert not Runs.ran


def test_no_secret_travels_with_a_rank() -> None:
    config = WorkerConfig.model_validate(
        {
            "role": "decode",
            "engine": {"model": "m", "tensor_parallel": 2, "nodes": 2},
            "secret": "the deployment's own",
            "redis_url": "redis://user:the-password@redis:6379/0",
            "redis_password": "the-password",
            "index_url": "redis://user:the-password@index:6379/0",
        }
    )
    described = without_secrets(config)
    assert "own" not in json.dumps(described) and "password" not in json.dumps(described)
    assert WorkerConfig.model_validate(described).engine == config.engine
    hidden = {name for name, field in WorkerConfig.model_fields.items() if not field.repr}
    assert hidden <= SECRETS


def test_ranks_that_do_not_come_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.ranks.remote.START_SECONDS", 0.1)
    listening = RankListener("127.0.0.1", "w")
    with pytest.raises(SetupError, match=r"ranks \[2, 3\] did not connect within"):
        listening.wait([2, 3])
    listening.close()


def test_a_rank_is_given_up_although_the_head_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray waits for its head before it says that an actor is killed; the rank ends with its pipe."""
    never = threading.Event()
    ray = SimpleNamespace(kill=lambda actor: never.wait(60.0), wait=lambda waiting, timeout: ([], waiting))
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr(remote, "KILL_SECONDS", 0.05)
    began = time.monotonic()
    remote.RankActor(None, None).end(0.0)
    assert time.monotonic() - began < 10.0
    never.set()
