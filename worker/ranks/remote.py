"""Ranks on other nodes: Ray reserves nodes and starts the processes; the ranks' messages do not pass through Ray.

leader ── placement group: a bundle a node ──► Ray ──► actor a rank
leader ◄────── TCP, opened by the rank (worker/ranks/listener.py) ──────► rank
"""

from __future__ import annotations

import contextlib
import logging
import time
from typing import Any

from cluster.addresses import advertised, source_address
from cluster.config.worker import WorkerConfig
from cluster.errors import SetupError
from worker.ranks.listener import RankListener, connect_to_leader
from worker.ranks.local import uses_cuda
from worker.ranks.pipe import RankPipe
from worker.ranks.process import START_SECONDS, StartingRank
from worker.ranks.rank_main import rank_main

log = logging.getLogger(__name__)
RETRY_SECONDS = 1.0
SECRETS = {"secret", "secret_file", "redis_url", "redis_password", "redis_password_file"}


class RankHost:
    """The actor of one rank: its process is the rank, and ends with it."""

    def run(
        self, rank: int, leader: tuple[str, int], key: bytes, config: dict[str, Any], epoch: int, group: str
    ) -> None:
        connection = connect_to_leader(leader, key, rank)
        settings = WorkerConfig.model_validate({**config, "advertise_host": source_address(leader[0])})
        rank_main(rank, connection, settings, epoch, group)


class RankActor:
    """The process of a rank on another node."""

    def __init__(self, actor: Any, ended: Any):
        self._actor = actor
        self._ended = ended  # never has a value: it fails when the process is gone

    def end(self, seconds: float) -> None:
        import ray

        with contextlib.suppress(Exception):  # Ray itself is gone, and its actors with it
            ray.wait([self._ended], timeout=seconds)
        self.kill()

    def kill(self) -> None:
        import ray

        with contextlib.suppress(Exception):  # the actor is gone already, or Ray itself is
            ray.kill(self._actor)


def place_ranks(config: WorkerConfig, epoch: int, group: str, ranks: range) -> list[StartingRank]:
    """Start `ranks` on other nodes, as many on each as on the leader's. `group` is the process group's address.

    A node qualifies by the Ray resource `<role>-ranks`. Raises SetupError when none is free in time.
    """
    _connect_to_ray(config.ray_address)
    per_node = config.engine.tensor_parallel // config.engine.nodes
    gpus = 1 if uses_cuda(config.engine) else 0
    placement = _reserve(config, per_node, gpus)
    listener = RankListener(
        advertised(config.host, config.advertise_host, config.redis_url), config.worker_id
    )
    settings = without_secrets(config)
    try:
        processes = {}
        for number, rank in enumerate(ranks):
            actor = _actor(placement, number // per_node, gpus)
            ended = actor.run.remote(rank, listener.address, listener.key, settings, epoch, group)
            processes[rank] = RankActor(actor, ended)
        connections = listener.wait(ranks)
    finally:
        listener.close()
    log.info("%s: ranks %d to %d have connected from other nodes", config.worker_id, ranks[0], ranks[-1])
    return [StartingRank(rank, RankPipe(connections[rank]), processes[rank]) for rank in ranks]


def without_secrets(config: WorkerConfig) -> dict[str, Any]:
    """The settings that a rank needs. Ray keeps arguments, so there is no secret among them: only the leader uses Redis
    and hashes blocks."""
    return config.model_dump(mode="json", exclude=SECRETS)


def _connect_to_ray(address: str) -> None:
    """Connect, and wait for this machine's Ray node, which may start at the same time. Raises SetupError."""
    import ray

    deadline = time.monotonic() + START_SECONDS
    while not ray.is_initialized():
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except (ConnectionError, RuntimeError, ValueError) as error:
            if time.monotonic() > deadline:
                raise SetupError(
                    f"no Ray node of {address} on this machine: {error}", field="ray_address"
                ) from error
            time.sleep(RETRY_SECONDS)


def _reserve(config: WorkerConfig, per_node: int, gpus: int) -> Any:
    """Reserve one bundle per node, all at once: two starting workers must not each hold half of what both need."""
    import ray
    from ray.util.placement_group import placement_group

    bundle = {"CPU": per_node, f"{config.role}-ranks": 1, **({"GPU": gpus * per_node} if gpus else {})}
    placement = placement_group([bundle] * (config.engine.nodes - 1), strategy="STRICT_SPREAD")
    try:
        ray.get(placement.ready(), timeout=START_SECONDS)
    except ray.exceptions.GetTimeoutError:
        raise SetupError(
            f"Ray has no {config.engine.nodes - 1} free nodes with {bundle} for the ranks of {config.worker_id}",
            field="nodes",
        ) from None
    return placement


def _actor(placement: Any, node: int, gpus: int) -> Any:
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    strategy = PlacementGroupSchedulingStrategy(placement_group=placement, placement_group_bundle_index=node)
    return ray.remote(RankHost).options(num_cpus=1, num_gpus=gpus, scheduling_strategy=strategy).remote()
