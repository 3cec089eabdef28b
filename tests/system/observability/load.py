"""A little load that exercises everything, until it is stopped."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

from baton.client import Client
from cluster.errors import BatonError
from tests.harness.checkpoints import prompt_ids


@contextlib.contextmanager
def trickle(
    grpc: str, *, threads: int = 1, pause_seconds: float = 0.1, max_tokens: int = 8
) -> Iterator[list[int]]:
    """Requests one after the other in each thread; every other prompt has been asked before. Yields [answered]."""
    stop = threading.Event()
    answered = [0]

    def ask(seed: int) -> None:
        with Client(grpc, max_reconnects=0) as client:
            while not stop.wait(pause_seconds):
                seed += 1
                prompt = prompt_ids(80, seed % 2 and seed)
                try:
                    client.generate(prompt, max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
                    answered[0] += 1
                except BatonError:
                    time.sleep(0.05)  # refused, or no router: what the test wants to see

    workers = [threading.Thread(target=ask, args=(1000 * index,), daemon=True) for index in range(threads)]
    for worker in workers:
        worker.start()
    try:
        yield answered
    finally:
        stop.set()
        for worker in workers:
            worker.join(60)
