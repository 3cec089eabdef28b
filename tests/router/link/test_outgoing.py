"""What a router's frames hold: their size, their entries, and what of them counts (rules 7 and 11)."""

from __future__ import annotations

import pytest

from cluster.link.framing import MAX_FRAME_BYTES, to_frame
from cluster.protocol.link import FRAME_ENTRIES
from router.link.outgoing import Outgoing, attach_frames
from wire import link_pb2

LARGEST = 2**64 - 1
MOST_CHOICES = 129  # 128 answers and their prompt


def size(frame: link_pb2.RouterFrame) -> int:
    return len(to_frame(frame))


def entries(frame: link_pb2.RouterFrame) -> int:
    return len(frame.cancel) + len(frame.status) + len(frame.close) + len(frame.credit)


@pytest.mark.parametrize("count", [10, 3000])
def test_frames_have_bounded_entries_and_each_comes_once(count):
    outgoing = Outgoing()
    numbers = [LARGEST - number for number in range(count)]
    for number in numbers:
        outgoing.cancel(number)
        outgoing.status(number)
        outgoing.close(number)
        outgoing.credit(number, 127, LARGEST)
    outgoing.beat()
    frames = list(outgoing.frames())
    assert max(map(size, frames)) <= MAX_FRAME_BYTES and max(map(entries, frames)) <= FRAME_ENTRIES
    assert [frame.beat for frame in frames] == [True] + [False] * (len(frames) - 1)
    for field in ("cancel", "status", "close"):
        assert [one for frame in frames for one in getattr(frame, field)] == numbers
    credits = [(one.handle, one.choice, one.limit) for frame in frames for one in frame.credit]
    assert credits == [(number, 127, LARGEST) for number in numbers]
    assert not list(outgoing.frames()), "nothing is left"


def test_of_several_credits_of_a_choice_the_last_is_sent():
    outgoing = Outgoing()
    for limit in (256, 320, 384):
        outgoing.credit(1, 0, limit)
    outgoing.credit(1, 1, 300)
    (frame,) = outgoing.frames()
    assert [(one.choice, one.limit) for one in frame.credit] == [(0, 384), (1, 300)]


def test_what_is_cleared_is_not_sent():
    outgoing = Outgoing()
    outgoing.cancel(1)
    outgoing.credit(1, 0, 256)
    outgoing.beat()
    outgoing.clear()
    assert not list(outgoing.frames())


@pytest.mark.parametrize(("handles", "choices"), [(0, 1), (1, 1), (5000, 1), (400, MOST_CHOICES)])
def test_a_list_of_handles_fits_its_frames_and_ends_in_the_last(handles, choices):
    attaches = [
        link_pb2.LinkAttach(
            transfer_id=number.to_bytes(16, "big"),
            handle=LARGEST - number,
            next=[LARGEST] * choices,
            limit=[LARGEST] * choices,
        )
        for number in range(handles)
    ]
    frames = list(attach_frames(attaches, LARGEST))
    assert max(map(size, frames)) <= MAX_FRAME_BYTES
    assert [one for frame in frames for one in frame.attach] == attaches
    assert [frame.HasField("attach_done") for frame in frames] == [False] * (len(frames) - 1) + [True]
    assert frames[-1].attach_done.next_handle == LARGEST
    assert len(frames) <= 1 + sum(one.ByteSize() + 4 for one in attaches) // (MAX_FRAME_BYTES - 8192)
