"""A worker's ranks: the leader's runner and hand-off endpoint here, those of further ranks in processes of their own.

leader process                         rank process (one per further rank, perhaps on another node)
  engine thread ── plan (gloo/NCCL) ──►  main thread: runner.serve()
  asyncio loop  ◄─ messages (pipe) ──►   hand-off endpoint of its share of the KV cache
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from cluster.addresses import advertised
from cluster.config.worker import WorkerConfig
from cluster.errors import BatonError, ConfigError, InternalError, SetupError
from cluster.faults.orders import open_faults
from cluster.protocol.times import RANK_QUIET_SECONDS
from engine.build import check, load_runner
from engine.parallel.group import DistributedGroup, NullGroup, TpGroup, listen_at
from engine.runner import ModelRunner
from kv_transfer.decode_side.receiver_rank import ReceiverRank
from kv_transfer.messages import PeerRank
from kv_transfer.prefill_side.sender_rank import SenderRank
from kv_transfer.ranks import Rank
from worker.ranks.nixl_endpoint import open_endpoint
from worker.ranks.pipe import RankHello, RankPipe
from worker.ranks.process import (
    END_SECONDS,
    START_SECONDS,
    RemoteRank,
    report_failure,
    serve_pipe,
    spawn_rank,
)
from worker.ranks.watch import LOOK_SECONDS, RankWatch

log = logging.getLogger(__name__)
STOP_SECONDS = 2.0  # limit of the group's last operation


@dataclass(frozen=True)
class Ranks:
    """The leader's runner, and every rank's endpoint in order. `addresses[rank]` are landing slots (decode)."""

    runner: ModelRunner
    endpoints: list[Rank]
    addresses: list[list[int]]
    remote: list[RemoteRank]
    watch: RankWatch

    def warm_up(self) -> None:
        """Run every kernel once, on all ranks. Raises SetupError if one was lost meanwhile, or was silent too long."""
        over = threading.Event()
        threading.Thread(target=self._end_silent, args=(over,), name="warm-up-watch", daemon=True).start()
        try:
            self.runner.warm_up()
        except InternalError as error:
            raise SetupError(f"the warm-up failed: {error}") from error
        finally:
            over.set()

    def _end_silent(self, over: threading.Event) -> None:
        while not over.wait(LOOK_SECONDS):
            self.watch.kill_silent(START_SECONDS)

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


class _RemoteEndpoint:
    """A RemoteRank with the face of an endpoint."""

    def __init__(self, remote: RemoteRank, hello: PeerRank):
        self._remote = remote
        self.hello = hello

    @property
    def on_event(self) -> Any:
        return self._remote.on_event

    @on_event.setter
    def on_event(self, callback: Any) -> None:
        self._remote.on_event = callback

    def handle(self, message: Any) -> None:
        self._remote.handle(message)

    def close(self) -> None:
        """Its process ends with the worker (Ranks.close)."""


def open_ranks(config: WorkerConfig, epoch: int) -> Ranks:
    """Loads the model on every rank. Raises ModelError, ConfigError or SetupError."""
    size, nodes = config.engine.tensor_parallel, config.engine.nodes
    if size % nodes:
        raise ConfigError(f"tensor_parallel {size} can't be shared by {nodes} nodes", field="nodes")
    check(config.engine)
    host = "127.0.0.1" if nodes == 1 else advertised(config.host, config.advertise_host, config.redis_url)
    try:
        address, listener = listen_at(host) if size > 1 else ("", None)
    except OSError as error:
        message = (
            f"advertise_host: other nodes' ranks join at {host!r}, where this machine cannot listen: {error}"
        )
        raise ConfigError(message, field="advertise_host") from None
    here = size // nodes
    remote = [spawn_rank(rank, rank_main, config, epoch, address) for rank in range(1, here)]
    if nodes > 1:
        from worker.ranks.remote import place_ranks  # Ray takes a second to import

        remote += place_ranks(config, epoch, address, range(here, size))
    runner = load_runner(config.engine, _group(config, 0, address, listener), beside_bytes=_beside(config))
    hellos = [rank.wait_ready() for rank in remote]
    own, addresses = _endpoint(config, epoch, 0, runner)
    return Ranks(
        runner,
        [own, *(_RemoteEndpoint(rank, hello.peer) for rank, hello in zip(remote, hellos, strict=True))],
        [addresses, *(hello.addresses for hello in hellos)],
        remote,
        RankWatch(remote, runner.arrivals),
    )


def _beside(config: WorkerConfig) -> int:
    """Upper bound in bytes of the device memory that a rank's hand-off buffers take after the model is loaded."""
    transfer = config.transfer
    return transfer.staging_bytes if config.role == "prefill" else transfer.ring_max_bytes


def _group(config: WorkerConfig, rank: int, address: str, listener: socket.socket | None = None) -> TpGroup:
    size = config.engine.tensor_parallel
    if size == 1:
        return NullGroup()
    cuda = config.engine.device == "cuda" or (config.engine.device == "auto" and torch.cuda.is_available())
    # A node's ranks are its GPUs in order; a far rank sees one GPU only.
    device = torch.device("cuda", rank % torch.cuda.device_count()) if cuda else torch.device("cpu")
    return DistributedGroup(rank, size, address, device, listener)


def _endpoint(config: WorkerConfig, epoch: int, rank: int, runner: ModelRunner) -> tuple[Rank, list[int]]:
    """The rank's end of hand-offs; a sender is also its runner's export sink."""
    transport = open_endpoint(
        config.transfer,
        config.worker_id,
        epoch,
        rank,
        host=advertised(config.host, config.advertise_host, config.redis_url),
        tls=config.tls_cert is not None,
    )
    faults = open_faults(config.fault_orders, config.worker_id)
    if config.role == "prefill":
        sender = SenderRank(
            rank=rank,
            kv_cache=runner.kv_cache,
            kv_head_range=runner.kv_head_range,
            endpoint=transport,
            config=config.transfer,
            faults=faults,
        )
        runner.export_sink = sender
        return sender, []
    receiver = ReceiverRank(
        rank=rank,
        kv_cache=runner.kv_cache,
        kv_head_range=runner.kv_head_range,
        endpoint=transport,
        config=config.transfer,
        decode_epoch=epoch,
        faults=faults,
    )
    return receiver, receiver.first_addresses


def rank_main(rank: int, connection: Connection, config: WorkerConfig, epoch: int, address: str) -> None:
    """Main of a rank's process, wherever it runs."""
    pipe = RankPipe(connection)
    try:
        runner = load_runner(config.engine, _group(config, rank, address), beside_bytes=_beside(config))
        endpoint, addresses = _endpoint(config, epoch, rank, runner)
    except Exception as error:
        report_failure(pipe, error)
        os._exit(1)
    tell_raised = serve_pipe(pipe, endpoint, RankHello(endpoint.hello, addresses), runner.arrivals)
    try:
        runner.serve()
    except BaseException as error:
        # The exit closes the pipe, which notifies the leader. On Ray the process would otherwise stay.
        log.exception("rank %d ends", rank)
        # A BatonError follows the loss of another rank; anything else was raised by this rank's own computation.
        if isinstance(error, Exception) and not isinstance(error, BatonError):
            tell_raised(error)
        os._exit(1)
