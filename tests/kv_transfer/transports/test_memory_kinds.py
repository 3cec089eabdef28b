"""The memory and device that a write names: the local one for its source, the peer's for its target."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from kv_transfer import messages as m
from kv_transfer.decode_side.receiver_rank import ReceiverRank
from kv_transfer.layout.digest import XXH3_128
from kv_transfer.transports.nixl import NixlEndpoint
from tests.harness.waiting import until
from tests.kv_transfer.pair import config, decode_side, prefill_side
from tests.kv_transfer.scripted_peer import ScriptedPeer


class Agent:
    """A NIXL agent that notes what it is given."""

    def __init__(self) -> None:
        self.descriptors: list[tuple[list[tuple[int, int, int]], str]] = []

    def get_xfer_descs(self, places: list[tuple[int, int, int]], kind: str) -> int:
        self.descriptors.append((places, kind))
        return len(self.descriptors)

    def initialize_xfer(self, *arguments: Any) -> str:
        return "handle"

    def transfer(self, handle: str) -> str:
        return "DONE"


def piece(device: str, index: int | None, address: int) -> Any:
    return SimpleNamespace(
        device=SimpleNamespace(type=device, index=index), data_ptr=lambda: address, numel=lambda: 64
    )


@pytest.mark.parametrize("ours", [("cpu", None, "DRAM"), ("cuda", 1, "VRAM")])
@pytest.mark.parametrize("theirs", [("DRAM", 0), ("VRAM", 3)])
def test_descriptors_name_local_memory_and_remote_memory(ours, theirs):
    endpoint = NixlEndpoint.__new__(NixlEndpoint)
    endpoint._agent = agent = Agent()
    endpoint._broken = set()
    device, index, own_memory = ours
    memory, their_device = theirs
    endpoint.write("peer", [piece(device, index, 1000)], 5000, their_device, b"n", memory)
    assert agent.descriptors == [
        ([(1000, 64, index or 0)], own_memory),
        ([(5000, 64, their_device)], memory),
    ]


async def test_a_grant_names_the_ranks_device_and_welcome_its_memory(monkeypatch):
    async with decode_side(config("grpc"), tensor_parallel=2) as decode:
        hellos = [m.PeerRank(i, "", b"", m.VRAM, 4 + i, (XXH3_128,)) for i in range(2)]
        monkeypatch.setattr(ReceiverRank, "hello", property(lambda self: hellos[self.rank]))
        one = ScriptedPeer(decode.receiver, tensor_parallel=2)
        one.hello()
        welcome = await one.received("welcome")
        assert [rank.memory for rank in welcome.ranks] == ["VRAM", "VRAM"]
        transfer_id = await one.reserve(8)
        one.want(transfer_id, 0, 64, source=1, target=1)
        grant = await one.granted(transfer_id, 0, source=1)
        assert grant.device == 5
        await one.close()


async def test_the_senders_write_uses_memory_and_device_of_welcome_and_grant(monkeypatch):
    """The peer names VRAM of device 2; the write is recorded and not carried out."""
    async with decode_side(config("nixl")) as decode, prefill_side(config("nixl")) as prefill:
        real = decode.ranks[0].hello
        fake = replace(real, memory=m.VRAM, device=2)
        monkeypatch.setattr(ReceiverRank, "hello", property(lambda self: fake))
        noted: list[tuple[int, str]] = []

        class Pending:
            def poll(self) -> str:
                return "done"

        def write(agent: str, data: Any, address: int, device: int, header: bytes, memory: str) -> Pending:
            noted.append((device, memory))
            return Pending()

        monkeypatch.setattr(prefill.ranks[0]._endpoints["nixl"], "write", write)
        handoff = await prefill.open(decode.ref, 8)
        await until(lambda: bool(noted), "written")
        assert set(noted) == {(2, "VRAM")}
        await handoff.abort("seen")
