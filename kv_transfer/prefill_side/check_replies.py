"""Validates the decode worker's messages on a pair's control stream.

An invalid Welcome ends the stream, because it decides what the pair does. An invalid grant or result ends its hand-off.
"""

from __future__ import annotations

from cluster.errors import StaleEpochError, TransportError
from kv_transfer.layout.compatibility import MAX_RANKS, can_share_heads, check_layouts
from kv_transfer.layout.digest import MODES
from kv_transfer.outbox import MAX_TOGETHER
from wire import common_pb2, handoff_pb2


def check_welcome(
    welcome: handoff_pb2.Welcome, decode: common_pb2.WorkerRef, hello: handoff_pb2.Hello
) -> None:
    """Check Welcome against our Hello. Raises HandoffError with the field."""
    if welcome.decode_epoch != decode.epoch:
        raise StaleEpochError(
            f"{decode.worker_id} has another epoch now; read its registration again",
            field="decode_epoch",
        )
    check_layouts(hello.layout, welcome.layout)
    if not can_share_heads(welcome.layout):
        ranks, heads = welcome.layout.tensor_parallel, welcome.layout.num_kv_heads
        raise _wrong("layout.tensor_parallel", f"{ranks} ranks can't share {heads} heads")
    if welcome.transport not in hello.transports:
        offered = ", ".join(hello.transports)
        raise _wrong("transport", f"{welcome.transport!r} was not offered ({offered})")
    for one in welcome.ranks:
        # The ranks write to an agent by its name; that of another worker would lead its hand-offs here.
        if one.agent_name and not one.agent_name.startswith(f"{decode.worker_id}#"):
            raise _wrong("ranks.agent_name", f"{one.agent_name[:80]!r} is not an agent of {decode.worker_id}")
    if not welcome.slot_bytes:
        raise _wrong("slot_bytes", "must be at least 1")
    if welcome.digests not in ("", *MODES):
        raise _wrong("digests", f"{welcome.digests!r} is not one of {', '.join(MODES)}")
    if welcome.digest_kind not in ("", *hello.digest_kinds):
        offered = ", ".join(hello.digest_kinds)
        raise _wrong("digest_kind", f"{welcome.digest_kind!r} was not offered ({offered})")


def check_number_of_ranks(welcome: handoff_pb2.Welcome, layout: common_pb2.KvLayout) -> None:
    """Check how many ranks a Welcome lists; `layout`: of the pair's first one. Raises TransportError."""
    # A layout with 0 ranks is refused by `check_welcome`.
    most = min(layout.tensor_parallel or 1, MAX_RANKS)
    if len(welcome.ranks) > most:
        raise _wrong("ranks", f"{len(welcome.ranks)} ranks, the decode worker has at most {most}")


def check_same_agents(welcome: handoff_pb2.Welcome, earlier: handoff_pb2.Welcome) -> None:
    """Check a repeated Welcome: it names the memory of the same agents. Each further one would be a connection that the
    end of the link does not close. Raises TransportError."""
    if [(one.rank, one.agent_name) for one in welcome.ranks] != [
        (one.rank, one.agent_name) for one in earlier.ranks
    ]:
        raise _wrong("ranks", "a repeated Welcome names other agents")


def check_together(reply: handoff_pb2.DecodeToPrefill) -> None:
    """Check the number of messages that travel together. Raises TransportError."""
    if len(reply.more) > MAX_TOGETHER:
        raise _wrong("more", f"{len(reply.more)} messages travel with one, at most {MAX_TOGETHER} may")


def check_ranks(
    reply: handoff_pb2.SlotGrant | handoff_pb2.PartResult, source_ranks: int, target_ranks: int
) -> None:
    """Check the rank numbers of a grant or a result. Raises TransportError naming the field."""
    if reply.source_rank >= source_ranks:
        raise _wrong("source_rank", f"{reply.source_rank} of {source_ranks}")
    if reply.target_rank >= target_ranks:
        raise _wrong("target_rank", f"{reply.target_rank} of {target_ranks}")


def _wrong(field: str, message: str) -> TransportError:
    return TransportError(f"{field}: {message}", field=field)
