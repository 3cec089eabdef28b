"""A worker's description of itself for its peers: its id, epoch, address and KV layout."""

from __future__ import annotations

import secrets
import socket
from dataclasses import dataclass

from cluster.config.worker import WorkerConfig
from cluster.errors import StaleEpochError
from cluster.kubernetes.pod import Pod, own_pod
from cluster.membership.topology import Location
from cluster.membership.types import WorkerInfo
from cluster.protocol import kv_format
from cluster.protocol.wire_version import WIRE_VERSION
from engine.runner import ModelRunner
from wire import common_pb2
from worker.validate import SpecLimits


def draw_epoch() -> int:
    return secrets.randbits(64) or 1


@dataclass(eq=False)
class WorkerIdentity:
    """Everything but the epoch stays the same until the process ends."""

    config: WorkerConfig
    epoch: int
    model_id: str
    runner: ModelRunner
    address: str
    metrics_address: str
    link_address: str
    adapters: tuple[tuple[str, str], ...] = ()  # (name, digest)

    def __post_init__(self) -> None:
        self.worker_id = self.config.worker_id
        self.role = self.config.role
        self.fenced = 0  # how often the epoch was renewed
        self.page_size = self.runner.page_size

    @property
    def ref(self) -> common_pb2.WorkerRef:
        return common_pb2.WorkerRef(worker_id=self.worker_id, epoch=self.epoch, address=self.address)

    @property
    def layout(self) -> common_pb2.KvLayout:
        """The facts that a pair compares field by field before KV moves."""
        config, model = self.runner.config, self.runner.model_config
        # On the wire KV has the prefill worker's format; a decode worker converts it.
        sent = kv_format.side(self.config.engine.kv_dtype, of_decode=False)
        return common_pb2.KvLayout(
            wire_version=WIRE_VERSION,
            model_id=self.model_id,
            dtype=kv_format.dtype_name(sent, config.dtype),
            page_size=self.page_size,
            num_layers=model.num_layers,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            tensor_parallel=config.tensor_parallel,
        )

    @property
    def spec_limits(self) -> SpecLimits:
        """The limits that a request's spec is checked against."""
        config = self.runner.config
        return SpecLimits(
            model_id=self.model_id,
            vocab_size=self.runner.model_config.vocab_size,
            max_choices=config.max_batch_requests,
            max_model_len=config.max_model_len or self.runner.model_config.max_model_len,
            generates=self.runner.model_config.generates,
        )

    def check_epoch(self, epoch: int) -> None:
        """Raises StaleEpochError if a call is addressed to an earlier epoch."""
        if epoch != self.epoch:
            raise StaleEpochError(
                f"{self.worker_id} has another epoch now; read its registration again", field="worker_epoch"
            )

    def renew_epoch(self) -> None:
        """After the worker was fenced: calls to the old epoch are refused from now on."""
        self.epoch = draw_epoch()
        self.fenced += 1

    def registration(self, location: Location) -> WorkerInfo:
        """The worker's entry in the registry."""
        return WorkerInfo(
            worker_id=self.worker_id,
            epoch=self.epoch,
            slot=0,
            role=self.role,
            model_id=self.model_id,
            address=self.address,
            metrics_address=self.metrics_address,
            link_address=self.link_address,
            served_model=self.config.served_model_name,
            layout=self.layout.SerializeToString(),
            place=location.place,
            host=socket.gethostname(),
            max_model_len=self.runner.model_config.max_model_len,
            blocks_total=self.runner.num_blocks,
            page_size=self.page_size,
            adapters=self.adapters,
            location=location,
            # A proof that this process has exited would not cover ranks on other nodes.
            pod=own_pod() if self.config.engine.nodes == 1 else Pod(),
        )
