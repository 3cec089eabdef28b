"""The registration of a worker of tests that routers reach by calls and by a link."""

from __future__ import annotations

from cluster.membership.types import WorkerInfo


def worker_info(worker_id: str, epoch: int, role: str, address: str, link_address: str) -> WorkerInfo:
    return WorkerInfo(
        worker_id=worker_id,
        epoch=epoch,
        slot=1,
        role=role,  # type: ignore[arg-type]
        model_id="m",
        address=address,
        metrics_address="",
        layout=b"",
        place="",
        host="h",
        max_model_len=4096,
        blocks_total=100,
        link_address=link_address,
    )
