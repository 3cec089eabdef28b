"""Frames are cut where they were joined, however their bytes arrive."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.errors import InvalidRequestError
from cluster.link.framing import MAX_FRAME_BYTES, FrameReader, to_frame
from wire import link_pb2


@given(
    handles=st.lists(st.lists(st.integers(0, 2**32 - 1), max_size=20), max_size=8),
    cuts=st.lists(st.integers(1, 40), min_size=1, max_size=50),
)
def test_frames_survive_any_cut_of_their_bytes(handles, cuts):
    frames = [link_pb2.RouterFrame(close=numbers) for numbers in handles]
    data, reader, found = b"".join(map(to_frame, frames)), FrameReader(), []
    while data:
        size = cuts[len(data) % len(cuts)]
        found += reader.feed(data[:size])
        data = data[size:]
    assert [link_pb2.RouterFrame.FromString(one) for one in found] == frames


def test_a_frame_above_the_limit_is_refused_before_it_is_held():
    with pytest.raises(InvalidRequestError, match="65533"):
        FrameReader().feed((MAX_FRAME_BYTES - 3).to_bytes(4, "little"))


def test_a_message_above_the_limit_is_not_framed():
    with pytest.raises(ValueError, match="at most"):
        to_frame(link_pb2.LinkHello(router_id="x" * MAX_FRAME_BYTES))
