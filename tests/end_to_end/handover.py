"""Settings, references and ends of clusters that hand requests over."""

from __future__ import annotations

from tests.end_to_end.conftest import Cluster
from tests.harness.exactness import assert_greedy
from tests.harness.waiting import wait_for

PROCESS = ("--pool", "process", "--dtype", "float32", "--local-prefill", "fallback", "--kv-memory", "64MiB")
NEW = 48


def assert_reference(model, prompt, tokens):
    assert_greedy("through a cluster", model, prompt, tokens)


def assert_all_free(cluster: Cluster) -> None:
    """Blocks and ring slots of every worker are back where they were."""

    def free() -> bool:
        # The registry keeps a dead worker's last words for a while.
        for worker in [w for w in cluster.workers() if w["lease"] == "live"]:
            status = worker["status"]
            if status["blocks_held"] or status["attempts"] or status["handoffs_live"]:
                return False
            if "ring_slots" in status and status["ring_free"] != status["ring_slots"]:
                return False
        return True

    wait_for(free, 60.0, "all blocks and slots free")


def pid_of(cluster: Cluster, role: str, worker_ids: tuple[str, ...]) -> int:
    (pid,) = [w["status"]["pid"] for w in cluster.workers() if w["role"] == role and w["id"] in worker_ids]
    return int(pid)
