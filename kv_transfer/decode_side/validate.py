"""Validates the prefill worker's messages on a pair's control stream. An invalid message ends the stream."""

from __future__ import annotations

from cluster.protocol.names import MAX_NAME, check_name, check_transfer_id, invalid
from kv_transfer.layout.compatibility import can_share_heads
from kv_transfer.layout.digest import MODES
from kv_transfer.outbox import MAX_TOGETHER
from wire import common_pb2, handoff_pb2

MAX_OFFERED = 16  # transports, and kinds of digest
MAX_HELLO_BYTES = 1 << 20  # metadata of an agent has some KB, and a worker few ranks


def check_together(message: handoff_pb2.PrefillToDecode) -> None:
    """Check the number of messages that travel together. Raises InvalidRequestError."""
    if len(message.more) > MAX_TOGETHER:
        raise invalid("more", f"{len(message.more)} messages travel with one, at most {MAX_TOGETHER} may")


def check_message(message: handoff_pb2.PrefillToDecode, layout: common_pb2.KvLayout | None) -> None:
    """`layout`: the peer's, from its Hello; None before that. Raises InvalidRequestError naming the field."""
    kind = message.WhichOneof("message")
    if kind in (None, "beat"):
        return
    if kind == "hello":
        if layout is not None:
            raise invalid("hello", "was sent before")
        _check_hello(message.hello)
        return
    if layout is None:
        raise invalid("hello", f"comes first, not {kind}")
    if kind == "reserve":
        check_name("request_id", message.reserve.request_id)
    elif kind == "slot_request":
        _check_slot_request(message.slot_request, layout)
    if kind in ("reserve", "slot_request", "finish", "abort", "drained"):
        check_transfer_id(getattr(message, str(kind)).transfer_id)


def _check_hello(hello: handoff_pb2.Hello) -> None:
    if hello.ByteSize() > MAX_HELLO_BYTES:
        raise invalid("hello", f"{hello.ByteSize()} bytes, at most {MAX_HELLO_BYTES} may come")
    check_name("prefill.address", hello.prefill.address)
    if not 0 < len(hello.prefill.worker_id) <= MAX_NAME:
        raise invalid("prefill.worker_id", f"must have 1 … {MAX_NAME} characters")
    if not can_share_heads(hello.layout):
        ranks, heads = hello.layout.tensor_parallel, hello.layout.num_kv_heads
        raise invalid("layout.tensor_parallel", f"{ranks} ranks can't share {heads} heads")
    for field in ("model_id", "dtype"):
        check_name(f"layout.{field}", getattr(hello.layout, field))
    for field, offered in (("transports", hello.transports), ("digest_kinds", hello.digest_kinds)):
        if len(offered) > MAX_OFFERED:
            raise invalid(field, f"more than {MAX_OFFERED}")
        for name in offered:
            check_name(field, name)
    if hello.digests not in MODES:
        raise invalid("digests", f"{hello.digests[:20]!r} is not one of {', '.join(MODES)}")


def _check_slot_request(asked: handoff_pb2.SlotRequest, layout: common_pb2.KvLayout) -> None:
    if asked.source_rank >= layout.tensor_parallel:
        raise invalid("source_rank", f"{asked.source_rank} of {layout.tensor_parallel}")
    if not asked.bytes:
        raise invalid("bytes", "must be at least 1")
