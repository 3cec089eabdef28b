"""What a prefill and a decode worker have agreed on: the decode worker's Welcome, checked against our Hello."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from kv_transfer.layout.digest import stricter
from wire import common_pb2, handoff_pb2


@dataclass(frozen=True)
class Agreement:
    layout: common_pb2.KvLayout  # of the decode worker
    slot_bytes: int
    transport: str
    digests: str
    digest_kind: str  # "" = each rank's own

    @classmethod
    def of(cls, hello: handoff_pb2.Hello, welcome: handoff_pb2.Welcome) -> Self:
        return cls(
            layout=welcome.layout,
            slot_bytes=welcome.slot_bytes,
            transport=welcome.transport,
            digests=stricter(hello.digests, welcome.digests or "off"),
            digest_kind=welcome.digest_kind,
        )

    def over(self, transport: str) -> Self:
        return replace(self, transport=transport)
