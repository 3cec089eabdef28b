"""The process of a tensor-parallel rank other than the leader: loads its share, follows the leader's plans, sends beats.

A rank whose node or pod is about to end (the file that LEAVING_FILE names appears) reports it, and its worker drains.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing import parent_process
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from cluster.config.worker import WorkerConfig
from cluster.errors import BatonError
from cluster.protocol.times import RANK_BEAT_SECONDS
from engine.parallel.group import Arrivals
from kv_transfer.ranks import Rank
from worker.ranks import local
from worker.ranks import pipe as p

log = logging.getLogger(__name__)
LEAVING_FILE = "BATON_LEAVING_FILE"  # in the environment of ranks in pods of their own
LEAVING_LOOK_SECONDS = 1.0
Pipe = p.RankPipe[p.FromRankProcess, p.ToRankProcess]
Send = Callable[[p.FromRankProcess], None]


def rank_main(rank: int, connection: Connection, config: WorkerConfig, epoch: int, address: str) -> None:
    """Run a rank in this process until its leader ends it. `address` is the process group's."""
    pipe: Pipe = p.RankPipe(connection)
    try:
        model = local.load(config, rank, address)
        runner, endpoint, addresses = local.open_rank(config, epoch, rank, model)
    except Exception as error:
        pipe.send(p.Failed(f"{type(error).__name__}: {error}"))
        os._exit(1)
    _leave_signals_to_leader()
    report_raised = serve_pipe(pipe, endpoint, p.RankHello(endpoint.hello, addresses), runner.arrivals)
    try:
        runner.serve()
    except BaseException as error:
        # The exit closes the pipe, which notifies the leader. On Ray the process would otherwise stay.
        log.exception("rank %d of %s ends", rank, config.worker_id)
        # A BatonError follows the loss of another rank; anything else was raised by this rank's own computation.
        if isinstance(error, Exception) and not isinstance(error, BatonError):
            report_raised(error)
        os._exit(1)


def _leave_signals_to_leader() -> None:
    """A terminal sends SIGINT, and a service manager SIGTERM, to the leader and to the ranks on its node. The leader
    drains, and ends its ranks then."""
    if parent_process() is None:  # it is a process of Ray's
        return
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def serve_pipe(
    pipe: Pipe, endpoint: Rank[Any, Any], hello: p.RankHello, arrivals: Arrivals
) -> Callable[[Exception], None]:
    """Report readiness to the leader, then pass messages both ways and send beats, on threads.

    Returns a function that reports to the leader the exception of a step in this rank.
    """
    lock = threading.Lock()

    def send(message: p.FromRankProcess) -> None:
        with lock:
            pipe.send(message)

    endpoint.start(send)
    send(p.Ready(p.KINDS_DIGEST, hello))
    threading.Thread(target=_receive, args=(pipe, endpoint), name="leader-pipe", daemon=True).start()
    threading.Thread(target=_beat, args=(arrivals, send), name="beats", daemon=True).start()
    if LEAVING_FILE in os.environ:
        file = Path(os.environ[LEAVING_FILE])
        file.unlink(missing_ok=True)  # left by an earlier process in this container
        threading.Thread(target=_report_leaving, args=(file, send), name="leaving", daemon=True).start()

    def report_raised(error: Exception) -> None:
        with contextlib.suppress(OSError):  # the leader is gone
            send(p.Raised(type(error).__name__))

    return report_raised


def _beat(arrivals: Arrivals, send: Send) -> None:
    with contextlib.suppress(OSError):  # the leader is gone: `_receive` ends this process
        while True:
            send(p.Beat(arrivals.count))
            time.sleep(RANK_BEAT_SECONDS)


def _report_leaving(file: Path, send: Send) -> None:
    """Report repeatedly: the leader may not listen yet."""
    with contextlib.suppress(OSError):  # the leader is gone: `_receive` ends this process
        while True:
            time.sleep(LEAVING_LOOK_SECONDS)
            if file.exists():
                send(p.Leaving())


def _receive(pipe: Pipe, endpoint: Rank[Any, Any]) -> None:
    try:
        while not isinstance(message := pipe.recv(), p.Close):
            endpoint.handle(message)
        endpoint.close()
    except (EOFError, OSError):
        os._exit(1)  # the leader died: a rank alone only holds memory
    except BaseException:
        # Beats would go on, and the leader would notice only when its messages fill the pipe.
        log.exception("rank %d cannot handle messages any more and ends", endpoint.hello.rank)
        os._exit(1)
    os._exit(0)
