"""The ranks of a worker: the leader's runner and hand-off endpoint in this process, further ranks in their own processes.

leader process                         rank process (one per further rank, perhaps on another node)
  engine thread ── plan (gloo/NCCL) ──►  main thread: runner.serve()
  asyncio loop  ◄─ messages (pipe) ──►   hand-off endpoint of its share of the KV cache
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.addresses import advertised
from cluster.config.worker import WorkerConfig
from cluster.errors import ConfigError, InternalError, ModelError, SetupError
from cluster.protocol.times import RANK_QUIET_SECONDS
from cluster.sockets import listen_at
from engine.parallel.group import LostRankError
from engine.runner import LoadedModel, ModelRunner
from engine.warm_up import Tell, say
from kv_transfer.ranks import Rank
from worker.ranks import local
from worker.ranks.process import (
    END_SECONDS,
    START_SECONDS,
    RankReports,
    RemoteRank,
    StartingRank,
    spawn_rank,
)
from worker.ranks.rank_main import rank_main
from worker.ranks.watch import RankWatch

STOP_SECONDS = 2.0  # limit of the group's last operation
REASON_SECONDS = 2.0  # after the load has failed, for the rank that ended it to say why
LEAST_SECONDS = 0.1  # for each rank, where others say nothing


@dataclass(frozen=True)
class Ranks:
    """The leader's runner, and every rank's endpoint in order. `addresses[rank]` are landing slots (decode)."""

    runner: ModelRunner
    endpoints: list[Rank[Any, Any]]
    addresses: list[list[int]]
    remote: list[RemoteRank[Any, Any]]
    watch: RankWatch
    draft: ModelRunner | None = None  # of the draft model
    ray_head: str = ""  # host:port of the Ray that has placed ranks on other nodes

    def warm_up(self, tell: Tell) -> None:
        """Run every kernel once, on all ranks. Raises SetupError, also if it takes longer than `warm_up_seconds`."""
        with self.starting("the warm-up"):
            self.runner.warm_up(tell)

    @contextlib.contextmanager
    def starting(self, what: str) -> Iterator[None]:
        """Context of collective operations before the worker serves. Raises SetupError if a rank was lost meanwhile, or
        was silent too long."""
        over = threading.Event()
        threading.Thread(
            target=self.watch.kill_silent_until, args=(over, START_SECONDS), name="start-watch", daemon=True
        ).start()
        try:
            yield
        except InternalError as error:
            raise SetupError(f"{what} failed: {error}") from error
        finally:
            over.set()

    def close(self, *, between_steps: bool = True) -> None:
        """End the other ranks after the engine has stopped; silent ones are killed, because a rank in the middle of a step
        cannot receive the stop and would block its leader."""
        for rank in self.remote:
            rank.expect_end()
        if between_steps and self.watch.prompt():
            # On a thread: a rank that hangs from here on would block this operation.
            stopping = threading.Thread(target=self.runner.stop_ranks, name="stop-ranks", daemon=True)
            stopping.start()
            stopping.join(STOP_SECONDS)
        self.watch.kill_silent(RANK_QUIET_SECONDS)
        for rank in self.remote:
            rank.start_closing()
        deadline = time.monotonic() + END_SECONDS
        for rank in self.remote:
            rank.end(max(0.0, deadline - time.monotonic()))


def open_ranks(config: WorkerConfig, epoch: int, reports: RankReports, tell: Tell = say) -> Ranks:
    """Load the model on every rank. `tell` gets what is being done. Raises ModelError, ConfigError or SetupError."""
    size, nodes = config.engine.tensor_parallel, config.engine.nodes
    if size % nodes:
        raise ConfigError(f"tensor_parallel {size} can't be shared by {nodes} nodes", field="nodes")
    local.check(config)
    host = "127.0.0.1" if nodes == 1 else advertised(config.host, config.advertise_host, config.redis_url)
    try:
        address, listener = listen_at(host) if size > 1 else ("", None)
    except OSError as error:
        message = (
            f"advertise_host: other nodes' ranks join at {host!r}, where this machine cannot listen: {error}"
        )
        raise ConfigError(message, field="advertise_host") from None
    here = size // nodes
    config = local.divided(config, here)
    starting = [spawn_rank(rank, rank_main, config, epoch, address) for rank in range(1, here)]
    ray_head = ""
    if nodes > 1:
        from worker.ranks.remote import place_ranks  # Ray takes a second to import

        placed, ray_head = place_ranks(config, epoch, address, range(here, size))
        starting += placed
    model = _load_leader(config, address, listener, tell, starting)
    deadline = time.monotonic() + START_SECONDS  # of all: they load at the same time
    remote = [rank.wait_ready(reports, deadline) for rank in starting]
    runner, own, addresses = local.open_rank(config, epoch, 0, model)
    return Ranks(
        runner,
        [own, *remote],
        [addresses, *(rank.addresses for rank in remote)],
        remote,
        RankWatch(remote, runner.arrivals),
        model.draft,
        ray_head,
    )


def _load_leader(
    config: WorkerConfig,
    address: str,
    listener: socket.socket | None,
    tell: Tell,
    starting: Sequence[StartingRank],
) -> LoadedModel:
    """The leader's share. Raises as `open_ranks`; if a rank ends meanwhile, with the rank's reason."""
    try:
        return local.load(config, 0, address, listener, tell)
    except (ConfigError, ModelError):  # the leader's own
        raise
    except SetupError as error:  # one has not joined
        if reason := _why_ended(starting):
            raise SetupError(reason) from error
        raise
    except LostRankError as error:
        raise SetupError(_why_ended(starting) or f"the ranks have not loaded the model: {error}") from error


def _why_ended(starting: Sequence[StartingRank]) -> str:
    """The error of the rank that has ended the load; "" if none reports one. The others report the loss of a rank, too, or
    that not all have joined."""
    until, less = time.monotonic() + REASON_SECONDS, ""
    for rank in starting:
        reason = rank.failure(max(LEAST_SECONDS, until - time.monotonic()))
        if not reason or reason.startswith(LostRankError.__name__):
            continue
        said = f"rank {rank.rank} could not start: {reason}"
        if not reason.startswith(SetupError.__name__):
            return said
        less = less or said
    return less
