"""A decode worker's offer to its peers in Welcome, and the agreement of each pair."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cluster import errors
from cluster.config.worker import TransferConfig
from kv_transfer.decode_side.landing import Landing
from kv_transfer.layout.compatibility import check_layouts
from kv_transfer.layout.digest import NONE, stricter
from kv_transfer.transports.registry import check_carried, choose
from wire import common_pb2, handoff_pb2


@dataclass(eq=False)
class Handshake:
    worker: common_pb2.WorkerRef
    layout: common_pb2.KvLayout
    config: TransferConfig
    landing: Landing

    def rejoin(self, worker: common_pb2.WorkerRef) -> None:
        """`worker`: with the new epoch."""
        self.worker = worker

    def agree(self, hello: handoff_pb2.Hello) -> handoff_pb2.Welcome:
        """The answer to Hello. Raises HandoffError with the field that does not match."""
        if hello.decode_epoch != self.worker.epoch:
            raise errors.StaleEpochError("this worker has another epoch now", field="decode_epoch")
        check_layouts(hello.layout, self.layout)
        digests = stricter(self.config.digests, hello.digests)
        return handoff_pb2.Welcome(
            decode_epoch=self.worker.epoch,
            layout=self.layout,
            slot_bytes=self.config.slot_bytes,
            transport=choose(hello.transports, self.config, self.landing.hellos),
            ranks=self.landing.endpoints(),
            digests=digests,
            digest_kind=self._choose_kind(hello.digest_kinds, digests),
        )

    def _choose_kind(self, offered: Sequence[str], digests: str) -> str:
        ours = self.landing.digest_kinds
        common = next((kind for kind in offered if kind in ours), NONE)
        if common == NONE and digests != "off":
            raise errors.TransportError(
                f"no common kind of digest: offered {list(offered)}, verified here {list(ours)}; digests: off on "
                "both sides needs none",
                field="digest_kinds",
            )
        return common

    def check_carried(self) -> None:
        """Raise TransportError if parts must not come over the control stream."""
        check_carried(self.config)

    def with_new_memory(self, welcome: handoff_pb2.Welcome) -> handoff_pb2.Welcome:
        """The pair's Welcome with the ranks' present memory."""
        renewed = handoff_pb2.Welcome()
        renewed.CopyFrom(welcome)
        del renewed.ranks[:]
        renewed.ranks.extend(self.landing.endpoints())
        return renewed

    def refusal(self, error: errors.BatonError) -> handoff_pb2.Welcome:
        return handoff_pb2.Welcome(decode_epoch=self.worker.epoch, refused=error.to_wire())
