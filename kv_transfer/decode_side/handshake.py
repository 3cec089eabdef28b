"""What a decode worker offers its peers in Welcome, and what each pair agrees on."""

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


@dataclass(frozen=True)
class Agreement:
    transport: str = ""
    digests: str = ""
    digest_kind: str = NONE  # of the parts that carry a digest


class Handshake:
    def __init__(
        self,
        worker: common_pb2.WorkerRef,
        layout: common_pb2.KvLayout,
        config: TransferConfig,
        landing: Landing,
    ):
        self.layout = layout
        self._worker = worker
        self._config = config
        self._landing = landing

    def rejoin(self, worker: common_pb2.WorkerRef) -> None:
        """`worker`: with the new epoch."""
        self._worker = worker

    def agree(self, hello: handoff_pb2.Hello) -> Agreement:
        """Raises HandoffError if the pair has something that does not match."""
        if hello.decode_epoch != self._worker.epoch:
            raise errors.StaleEpochError("this worker has another epoch now", field="decode_epoch")
        check_layouts(hello.layout, self.layout)
        transport = choose(hello.transports, self._config, self._landing.hellos)
        digests = stricter(self._config.digests, hello.digests)
        return Agreement(transport, digests, self._choose_kind(hello.digest_kinds, digests))

    def _choose_kind(self, offered: Sequence[str], digests: str) -> str:
        ours = self._landing.digest_kinds
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
        check_carried(self._config)

    def welcome(self, agreement: Agreement) -> handoff_pb2.Welcome:
        """Also sent again when a rank has new memory."""
        return handoff_pb2.Welcome(
            decode_epoch=self._worker.epoch,
            layout=self.layout,
            slot_bytes=self._config.slot_bytes,
            transport=agreement.transport,
            ranks=self._landing.endpoints(),
            digests=agreement.digests,
            digest_kind=agreement.digest_kind,
        )

    def refusal(self, error: errors.BatonError) -> handoff_pb2.Welcome:
        return handoff_pb2.Welcome(decode_epoch=self._worker.epoch, refused=error.to_wire())
