"""Ray's own processes of a cluster, and streams that watch what happens when they are killed."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import psutil

from baton.client import Client
from tests.end_to_end.conftest import Cluster
from tests.end_to_end.handover import assert_reference
from tests.harness.checkpoints import prompt_ids
from tests.harness.waiting import wait_for

NEW = 400


def ray_pids(cluster: Cluster, title: str) -> list[int]:
    """Of the processes under `baton up` whose command begins so (its last path component)."""
    found = []
    for process in psutil.Process(cluster.pid).children(recursive=True):
        try:
            command = process.cmdline()
        except psutil.NoSuchProcess:
            continue
        if command and command[0].rsplit("/", 1)[-1].startswith(title):
            found.append(process.pid)
    return found


def kill_ray(cluster: Cluster, title: str) -> list[int]:
    pids = ray_pids(cluster, title)
    assert pids, f"no process {title}"
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    return pids


def wait_whole(cluster: Cluster, title: str, killed: Sequence[int], replicas: int = 2) -> None:
    """The killed process has a successor, and Serve its replicas."""

    def whole() -> bool:
        there = ray_pids(cluster, title)
        return (
            bool(there)
            and not set(there) & set(killed)
            and len(ray_pids(cluster, "ray::ServeReplica")) == replicas
        )

    wait_for(whole, 180.0, f"{title} and the replicas are back")


class HasGrpc(Protocol):
    @property
    def grpc(self) -> str: ...


class Streams:
    """A stream after the other in each thread: every one must end whole."""

    def __init__(self, cluster: HasGrpc, threads: int = 2):
        self._address = cluster.grpc
        self._stop = threading.Event()
        self.answers: list[tuple[list[int], list[int]]] = []
        self.problems: list[Exception] = []
        self.longest_silence_seconds = 0.0
        self._threads = [threading.Thread(target=self._run, args=(n,), daemon=True) for n in range(threads)]
        for thread in self._threads:
            thread.start()

    def _run(self, number: int) -> None:
        prompt = prompt_ids(70, seed=number)
        with Client(self._address) as client:
            while not self._stop.is_set():
                try:
                    self.answers.append((prompt, self._stream(client, prompt)))
                except Exception as error:
                    self.problems.append(error)
                    return

    def _stream(self, client: Client, prompt: list[int]) -> list[int]:
        tokens: list[int] = []
        last = time.monotonic()
        for chunk in client.stream(prompt, max_tokens=NEW, temperature=0, ignore_eos=True):
            tokens += chunk.token_ids
            now = time.monotonic()
            self.longest_silence_seconds = max(self.longest_silence_seconds, now - last)
            last = now
        return tokens

    def wait_for_more(self, count: int) -> None:
        """That many streams more have ended whole."""
        wanted = len(self.answers) + count
        wait_for(lambda: len(self.answers) >= wanted or self.problems, 120.0, f"{count} streams more")

    def stop(self, model: Path) -> None:
        """And check every token."""
        self._stop.set()
        for thread in self._threads:
            thread.join(120.0)
        assert not self.problems, self.problems
        assert all(len(tokens) == NEW for _, tokens in self.answers)
        for prompt, tokens in {tuple(tokens): (prompt, tokens) for prompt, tokens in self.answers}.values():
            assert_reference(model, prompt, tokens)
