"""The images of router and Redis, built here and run as the chart runs them; and what their SBOMs say."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import pytest
import redis
from rich.console import Console

from deploy import image_sbom, images
from deploy.versions import tag_of
from tests.harness import containers
from tests.harness.image_cluster import ImageCluster, image_cluster

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]
TARGETS = ("redis", "router")
DISTRIBUTIONS = """
import importlib.metadata, json
print(json.dumps(sorted({(one.metadata["Name"], one.version) for one in importlib.metadata.distributions()})))
"""


@pytest.fixture(scope="module")
def built() -> dict[str, images.Built]:
    base = images.base_image(Console())
    found = {target: images.build(target, base) for target in TARGETS}
    for target, one in found.items():
        assert one.bytes - images.size_of(base) <= images.BUDGETS[target] * 10**6, one.largest
    return found


@pytest.fixture(scope="module")
def cluster(
    built: dict[str, images.Built], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ImageCluster]:
    with image_cluster(tmp_path_factory.mktemp("images")) as found:
        yield found


def test_a_router_answers_with_redis_of_its_own_image(cluster: ImageCluster) -> None:
    addresses = cluster.start("router", "router", "--http-port", "0", "--grpc-port", "0")
    answer = httpx.get(f"{addresses['http']}/health", timeout=10)
    assert answer.status_code == 200, answer.text
    with redis.Redis.from_url(cluster.redis_url) as client:
        assert list(client.scan_iter("*"))
        assert (
            client.info("server")["redis_version"]
            == containers.run("redis", "--version", entrypoint="redis-server").split("v=")[1].split()[0]
        )


def test_containers_are_an_ordinary_user_who_writes_to_tmp_alone(built: dict[str, images.Built]) -> None:
    for target in TARGETS:
        said = containers.run(target, "-c", containers.CONFINEMENT, entrypoint="python")
        assert json.loads(said) == [10001, 10001, "0000000000000000", ["/tmp"]], target


@pytest.mark.parametrize("target", TARGETS)
def test_the_sbom_has_what_dpkg_and_python_find_in_the_image(
    built: dict[str, images.Built], target: str
) -> None:
    shown = containers.run(target, "-W", "-f", "${Package} ${Version}\\n", entrypoint="dpkg-query")
    wanted = {("deb", *line.split(" ")) for line in shown.splitlines()}
    said = containers.run(target, "-c", DISTRIBUTIONS, entrypoint="python")
    wanted |= {("pypi", *one) for one in json.loads(said)}
    packages = built[target].packages
    assert {(one.kind, one.name, one.version) for one in packages} == wanted
    assert not [one.name for one in packages if image_sbom.UNKNOWN in one.licenses]
    names = {one.name for one in packages}
    assert {"router": "baton-serve", "redis": "redis-server"}[target] in names
    assert names.isdisjoint({"torch", "ray", "nixl", "pip"})


def test_the_charts_tag_of_redis_is_the_version_in_its_image(built: dict[str, images.Built]) -> None:
    (version,) = [one.version for one in built["redis"].packages if one.name == "redis-server"]
    assert version.partition(":")[2].partition("-")[0] == tag_of("redis")
