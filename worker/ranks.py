"""The hand-off endpoints of a worker's ranks: the leader's own, and those in other processes."""

from __future__ import annotations

from kv_transfer.ranks import Rank
from kv_transfer.receiver_rank import ReceiverRank
from kv_transfer.sender_rank import SenderRank
from worker.core import WorkerCore
from worker.endpoints import open_endpoint


def open_sender_ranks(core: WorkerCore) -> list[Rank]:
    """The leader's rank also becomes its engine's export sink."""
    runner = core.runner
    rank = SenderRank(
        rank=0,
        kv_cache=runner.kv_cache,
        kv_head_range=runner.kv_head_range,
        endpoint=open_endpoint(core.config.transfer, core.worker_id, core.epoch, 0),
        config=core.config.transfer,
    )
    runner.export_sink = rank
    return [rank]


def open_receiver_ranks(core: WorkerCore) -> tuple[list[Rank], list[list[int]]]:
    """The ranks, and the addresses of each one's landing slots."""
    runner = core.runner
    rank = ReceiverRank(
        rank=0,
        kv_cache=runner.kv_cache,
        kv_head_range=runner.kv_head_range,
        endpoint=open_endpoint(core.config.transfer, core.worker_id, core.epoch, 0),
        config=core.config.transfer,
        decode_epoch=core.epoch,
    )
    return [rank], [rank.first_addresses]
