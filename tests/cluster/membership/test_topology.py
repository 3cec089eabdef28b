"""A worker's topology: from its node's labels, from its configuration, or unknown."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from cluster.config.worker import TopologyConfig
from cluster.errors import SetupError
from cluster.membership.topology import Locating, Location, read_node_labels
from tests.kubernetes.api.server import ApiServer

LABELS = {
    "topology.kubernetes.io/zone": "zone-b",
    "example.com/rack": "r7",
    "nvidia.com/gpu.clique": "8ec3.1",
}


@pytest.fixture(scope="module")
def server() -> Iterator[ApiServer]:
    with ApiServer() as running:
        running.add_node("node-7", LABELS)
        yield running


def config(server: ApiServer, tmp_path: Path, **fields: object) -> TopologyConfig:
    kubeconfig = server.kubeconfig(tmp_path / "kubeconfig")
    return TopologyConfig(node_name="node-7", kubeconfig=kubeconfig, **fields)


def test_a_nodes_labels_give_its_topology(server: ApiServer, tmp_path: Path) -> None:
    here = Locating(config(server, tmp_path, rack_label="example.com/rack")).location()
    assert here == Location(clique="8ec3.1", host="node-7", rack="r7", zone="zone-b")
    assert here.place == "8ec3.1"


def test_configured_values_win(server: ApiServer, tmp_path: Path) -> None:
    here = Locating(config(server, tmp_path, zone="mine", rack="r1")).location()
    assert (here.zone, here.rack, here.host) == ("mine", "r1", "node-7")


def test_without_a_node_name_nothing_is_asked() -> None:
    def read(_: TopologyConfig) -> Mapping[str, str]:
        raise AssertionError("no node was named")

    here = Locating(TopologyConfig(rack="r1"), read).location()
    assert here == Location(host=socket.gethostname(), rack="r1")
    assert here.place == socket.gethostname()


def test_a_node_that_is_not_there_or_not_shown_is_no_reason_to_stop(
    server: ApiServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gone = config(server, tmp_path).model_copy(update={"node_name": "node-9"})
    assert Locating(gone).location() == Location(host="node-9")
    assert "404" in caplog.text
    with pytest.raises(SetupError, match="not in a cluster"):
        read_node_labels(TopologyConfig(node_name="node-7"))


def test_the_api_has_a_deadline(caplog: pytest.LogCaptureFixture) -> None:
    located = threading.Event()

    def read(_: TopologyConfig) -> Mapping[str, str]:
        assert located.wait(60), "the API is waited for"
        return LABELS

    here = Locating(TopologyConfig(node_name="node-7", api_seconds=0.2), read).location()
    located.set()
    assert here == Location(host="node-7")
    assert "within 0.2 s" in caplog.text
