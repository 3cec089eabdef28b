"""A worker's link port with mutual TLS: a router's certificate opens a link, and a router links to a worker's only."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from pathlib import Path

import pytest

from cluster.addresses import split
from cluster.link.framing import to_frame
from cluster.security.tls import ClientTls
from router.link import link
from router.link.links import Links
from tests.harness.linked_worker import LinkedWorker
from tests.harness.waiting import until
from tests.router.link.conftest import Reading, info
from tests.security.attacks.link_peer import Attacked, peers


@pytest.mark.parametrize("shown", ["none", "client", "worker", "their router", "plain text"])
async def test_only_a_routers_certificate_opens_a_link(shown: str, certs: Path) -> None:
    ours, theirs = certs / "ours", certs / "theirs"
    attacked = Attacked(ours)
    await attacked.start()
    files = {
        "none": None,
        "client": (ours / "client.pem", ours / "client.key"),
        "worker": (ours / "worker.pem", ours / "worker.key"),
        "their router": (theirs / "router.pem", theirs / "router.key"),
    }
    try:
        if shown == "plain text":
            host, port = split(attacked.worker.address)
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(to_frame(attacked.hello()))
            with contextlib.suppress(OSError):
                assert b"d" not in await asyncio.wait_for(reader.read(), 15)
            writer.close()
        else:
            own = files[shown]
            context = (ClientTls(ours / "ca.pem", *own) if own else ClientTls(ours / "ca.pem")).context()
            with contextlib.suppress(OSError):
                async with attacked.attacker(context) as peer:
                    peer.send(attacked.hello())
                    await peer.closed(15)
                    assert not peer.came, "no welcome"
        await attacked.check_well()
    finally:
        await attacked.stop()


@pytest.mark.parametrize(
    "shown",
    [
        "router",
        "client",
        *(pytest.param(one, marks=pytest.mark.long) for one in ("their worker", "plain text")),
    ],
)
async def test_a_router_links_to_a_worker_only(
    shown: str, certs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An impostor at a worker's address gets no greeting, and so no handle."""
    monkeypatch.setattr(link, "CONNECT_SECONDS", 1.0)
    where = certs / ("theirs" if shown == "their worker" else "ours")
    own = peers(None, "") if shown == "plain text" else peers(where, shown.rpartition(" ")[2])
    impostor = LinkedWorker("d", 7, peers=own)
    await impostor.start()
    links = Links("r", peers(certs / "ours", "router"))
    reading = Reading(bytes(16))
    try:
        links.open(info(impostor), reading)
        await until(lambda: reading.error is not None, "it is lost", 20)
        assert "no link to d" in str(reading.error)
        assert not impostor.routers._routers, "no greeting came"
    finally:
        await links.close()
        await impostor.stop()


async def test_a_link_takes_tls_1_3_only_and_resumes_no_session(certs: Path) -> None:
    attacked = Attacked(certs / "ours")
    await attacked.start()
    context = peers(certs / "ours", "router").link_context()
    assert context is not None
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises((ssl.SSLError, ConnectionError)):
        async with attacked.attacker(context) as peer:
            await peer.greet()
    await attacked.check_well()
    await attacked.stop()
