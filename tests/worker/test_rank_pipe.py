"""Every message between a leader and its ranks arrives as it was sent, and an invalid one ends the pipe."""

from __future__ import annotations

import dataclasses
from multiprocessing import Pipe
from typing import Any, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import step_delta
from wire import handoff_pb2
from worker.ranks import pipe
from worker.ranks.pipe import Beat, RankPipe

PLAIN: dict[Any, st.SearchStrategy[Any]] = {
    int: st.integers(-(2**63), 2**64 - 1),
    str: st.text(),
    bytes: st.binary(),
    bool: st.booleans(),
    float: st.floats(allow_nan=False),
}


UINT32, UINT64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
PART = {"transfer_id": st.binary(), "source_rank": UINT32, "target_rank": UINT32, "part": UINT32}
OF_WIRE: dict[Any, st.SearchStrategy[Any]] = {
    handoff_pb2.SlotRequest: st.builds(handoff_pb2.SlotRequest, **PART, bytes=UINT64),
    handoff_pb2.SlotGrant: st.builds(
        handoff_pb2.SlotGrant,
        **PART,
        slot=UINT32,
        generation=UINT64,
        address=UINT64,
        device=UINT64,
        deadline_seconds=st.floats(allow_nan=False),
    ),
    handoff_pb2.PartResult: st.builds(handoff_pb2.PartResult, **PART, verified=st.booleans()),
    handoff_pb2.PartData: st.builds(
        handoff_pb2.PartData,
        header=st.builds(handoff_pb2.PartHeader, **PART, generation=UINT64, digest=st.binary()),
        payload=st.binary(),
    ),
}


def of_type(kind: Any) -> st.SearchStrategy[Any]:
    """Values that a field of this type may have."""
    if kind in PLAIN:
        return PLAIN[kind]
    if kind in OF_WIRE:
        return OF_WIRE[kind]
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        hints = get_type_hints(kind)
        return st.builds(
            kind, **{field.name: of_type(hints[field.name]) for field in dataclasses.fields(kind)}
        )
    inner = get_args(kind)
    if get_origin(kind) is tuple and inner[-1] is not Ellipsis:
        return st.tuples(*map(of_type, inner))
    lists = st.lists(of_type(inner[0]), max_size=4)
    return lists.map(tuple) if get_origin(kind) is tuple else lists


messages = st.one_of([of_type(kind) for kind in pipe._KINDS])


@given(sent=st.lists(messages, min_size=1, max_size=5))
def test_messages_arrive_as_they_were_sent(sent: list[Any]) -> None:
    one_end, other_end = Pipe()
    ours, theirs = RankPipe[Any, Any](one_end), RankPipe[Any, Any](other_end)
    for message in sent:
        ours.send(message)
        assert theirs.poll(0)
        assert theirs.recv() == message
    ours.close()
    with pytest.raises(EOFError):
        theirs.recv()
    theirs.close()


def test_every_kind_is_sent_by_its_own_number() -> None:
    kinds = pipe._KINDS
    assert len(set(kinds)) == len(kinds) < 256
    assert {kind.__name__ for kind in kinds} >= {
        "Ready",
        "Beat",
        "PartData",
        "SlotRequest",
        "SlotGrant",
        "Wake",
    }


DEEP = b"\x04\x81\xa1x" + b"\x91" * 100_000
NO_TEXT = b"\x04\x81\xa1\xff\x01"


@pytest.mark.parametrize(
    "frame",
    [b"", b"\xff\x80", b"\x04", b"\x04\xc1", b"\x04\x80", b"\x04\x81\xa7arrived\xa1x", NO_TEXT, DEEP],
)
def test_an_invalid_message_is_an_error_of_the_pipe(frame: bytes) -> None:
    ours, theirs = Pipe()
    assert pipe._KINDS[4] is Beat
    theirs.send_bytes(frame)
    with pytest.raises(OSError, match="no message"):
        RankPipe(ours).recv()


def test_a_message_too_long_is_an_error_of_the_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that could be read."""
    monkeypatch.setattr(pipe, "MAX_MESSAGE_BYTES", 16)
    one_end, other_end = Pipe()
    ours, theirs = RankPipe[Any, Any](one_end), RankPipe[Any, Any](other_end)
    theirs.send(pipe.Failed("short"))
    assert ours.recv() == pipe.Failed("short")
    theirs.send(pipe.Failed("x" * 17))
    with pytest.raises(OSError):
        ours.recv()


def test_ranks_whose_plans_have_another_form_are_of_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are arrays without names: a rank that reads them otherwise would compute something else, not fail."""
    assert pipe._digest() == pipe.KINDS_DIGEST
    monkeypatch.setattr(step_delta, "WIDTHS", (*step_delta.WIDTHS[:-1], 4))
    assert pipe._digest() != pipe.KINDS_DIGEST
