"""Default deny, every edge to a real listener, every listener with an edge."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import yaml

from cluster.redis.connect import check_url
from tests.system.helm.rendering import Manifest, Pod, Rendered, Renderer, ValueSet, pods_of, selects
from tests.system.helm.value_sets import VALUE_SETS

pytestmark = pytest.mark.system
WITH_POLICIES = {name: one for name, one in VALUE_SETS.items() if name != "nothing optional"}


@dataclass(frozen=True)
class Ports:
    first: int
    last: int

    def holds(self, port: int) -> bool:
        return self.first <= port <= self.last


def _ports(rule: dict[str, Any]) -> list[Ports]:
    return [
        Ports(one["port"], one.get("endPort", one["port"]))
        for one in rule["ports"]
        if one["protocol"] == "TCP"
    ]


def _listened(rendered: Rendered, pod: Pod) -> list[Ports]:
    """What a pod's processes listen on: container ports, NIXL's range, Ray's workers' range."""
    found = [Ports(port, port) for port in pod.ports.values()]
    workers = pod.component.removesuffix("-ranks")
    if workers.partition("-")[0] in ("prefill", "decode"):  # behind it the name of a further model
        config = yaml.safe_load(rendered.named("ConfigMap", f"t-baton-{workers}")["data"]["worker.yaml"])
        first, _, last = config["transfer"]["port_range"].partition("-")
        found.append(Ports(int(first), int(last)))
    for container in pod.containers:
        flags = dict(arg.partition("=")[::2] for arg in container.get("args", []) if arg.startswith("--"))
        if "--min-worker-port" in flags:
            found.append(Ports(int(flags["--min-worker-port"]), int(flags["--max-worker-port"])))
    if pod.owner.startswith("RayService"):
        groups = pod.manifest["spec"]["rayClusterConfig"]
        params = groups["headGroupSpec"]["rayStartParams"]
        found.append(Ports(int(params["min-worker-port"]), int(params["max-worker-port"])))
    return found


@pytest.fixture(params=list(WITH_POLICIES.values()), ids=list(WITH_POLICIES))
def rendered(request: pytest.FixtureRequest, renderer: Renderer) -> Rendered:
    return renderer.render(request.param)


def _policies(rendered: Rendered) -> list[Manifest]:
    return rendered.of("NetworkPolicy")


def test_every_pod_is_denied_everything_first(rendered: Rendered) -> None:
    (default,) = [one for one in _policies(rendered) if one["metadata"]["name"] == "t-baton-default"]
    assert default["spec"]["policyTypes"] == ["Ingress", "Egress"]
    assert "ingress" not in default["spec"]
    for pod in pods_of(rendered):
        assert selects(default["spec"]["podSelector"], pod.labels), pod.owner
    (names, *_) = default["spec"]["egress"]
    assert {port["port"] for port in names["ports"]} == {53, 5353}


def test_every_edge_into_a_pod_meets_a_listener(rendered: Rendered) -> None:
    pods = pods_of(rendered)
    for policy in _policies(rendered):
        chosen = [pod for pod in pods if selects(policy["spec"]["podSelector"], pod.labels)]
        assert chosen, policy["metadata"]["name"]
        for rule in policy["spec"].get("ingress", []):
            for ports in _ports(rule):
                if ports.last - ports.first > 60000:
                    continue
                reached = [pod for pod in chosen if ports in _listened(rendered, pod)]
                assert reached, f"{policy['metadata']['name']} opens {ports}, where no process listens"


def test_every_listener_has_an_edge(rendered: Rendered) -> None:
    for pod in pods_of(rendered):
        rules = _ingress(rendered, pod)
        for listened in _listened(rendered, pod):
            assert any(
                ports.holds(listened.first) and ports.holds(listened.last)
                for rule in rules
                for ports in _ports(rule)
            ), f"no pod may reach {pod.owner} at {listened}"


def _ingress(rendered: Rendered, pod: Pod) -> list[dict[str, Any]]:
    policies = [one for one in _policies(rendered) if selects(one["spec"]["podSelector"], pod.labels)]
    return [rule for one in policies for rule in one["spec"].get("ingress", [])]


def _egress(rendered: Rendered, pod: Pod) -> list[dict[str, Any]]:
    policies = [one for one in _policies(rendered) if selects(one["spec"]["podSelector"], pod.labels)]
    return [rule for one in policies for rule in one["spec"].get("egress", [])]


def _inside(peer: dict[str, Any]) -> bool:
    return "podSelector" in peer and "app.kubernetes.io/instance" in peer["podSelector"].get(
        "matchLabels", {}
    )


def test_both_ends_of_every_inner_edge_agree(rendered: Rendered) -> None:
    """What a pod may send to another one of the release, that one may take, and the other way round."""
    pods = pods_of(rendered)
    for pod in pods:
        for rule in _ingress(rendered, pod):
            for peer in filter(_inside, rule.get("from", [])):
                senders = [one for one in pods if selects(peer["podSelector"], one.labels)]
                assert senders, f"{pod.owner} admits {peer}, which does not exist"
                for sender in senders:
                    _assert_met(rule, _egress(rendered, sender), "to", pod, sender)
        for rule in _egress(rendered, pod):
            for peer in filter(_inside, rule.get("to", [])):
                takers = [one for one in pods if selects(peer["podSelector"], one.labels)]
                assert takers, f"{pod.owner} may reach {peer}, which does not exist"
                reached = [Ports(one.first, one.last) for one in _ports(rule)]
                for ports in reached:
                    assert any(
                        _meets(ports, other, "from", pod)
                        for taker in takers
                        for other in _ingress(rendered, taker)
                    ), f"{pod.owner} may send to {ports} of {peer}, which does not admit it"


def _assert_met(
    rule: dict[str, Any], others: list[dict[str, Any]], direction: str, pod: Pod, sender: Pod
) -> None:
    for ports in _ports(rule):
        assert any(_meets(ports, other, direction, pod) for other in others), (
            f"{pod.owner} admits {sender.owner} at {ports}, which {sender.owner} may not send to"
        )


def _meets(ports: Ports, rule: dict[str, Any], direction: str, pod: Pod) -> bool:
    peers = rule.get(direction)
    known = peers is None or any(_inside(one) and selects(one["podSelector"], pod.labels) for one in peers)
    return known and any(other.holds(ports.first) and other.holds(ports.last) for other in _ports(rule))


@pytest.mark.parametrize(
    ("name", "port", "peer"),
    [
        ("multi-node", 6379, {"app.kubernetes.io/component": ["redis"]}),
        ("ray's state elsewhere", 6390, "192.0.2.0/24"),
        ("redis by url", 6391, None),
    ],
)
def test_rays_head_reaches_the_redis_that_keeps_its_state(
    name: str, port: int, peer: Any, renderer: Renderer
) -> None:
    (head,) = [one for one in pods_of(renderer.render(VALUE_SETS[name])) if one.component == "ray-head"]
    rendered = renderer.render(VALUE_SETS[name])
    policy = rendered.named("NetworkPolicy", "t-baton-ray-head")
    assert selects(policy["spec"]["podSelector"], head.labels)
    (rule,) = policy["spec"]["egress"]
    assert _ports(rule) == [Ports(port, port)]
    environment = {one["name"]: one for one in head.spec["containers"][0]["env"]}
    assert str(port) in environment["RAY_REDIS_ADDRESS"]["value"]
    password = (
        environment.get("RAY_REDIS_SECRET", {}).get("valueFrom", {}).get("secretKeyRef", {}).get("name")
    )
    if peer is None:
        assert "to" not in rule
        assert password == "redis-password"
    elif isinstance(peer, str):
        assert rule["to"] == [{"ipBlock": {"cidr": peer}}]
        assert password is None, "the chart's own password is for no external Redis"
    else:
        (to,) = rule["to"]
        (expression,) = to["podSelector"]["matchExpressions"]
        assert {expression["key"]: expression["values"]} == peer
        assert password == "t-baton"


def test_clients_reach_the_public_endpoints_and_nothing_else(renderer: Renderer) -> None:
    """In a cluster that names its clients, only the endpoints and metrics are open to pods outside the release."""
    rendered = renderer.render(VALUE_SETS["ray beside workers"])
    open_to_all = set()
    for pod in pods_of(rendered):
        for rule in _ingress(rendered, pod):
            if "from" not in rule:
                open_to_all |= {(pod.component, ports.first) for ports in _ports(rule)}
    assert open_to_all == {
        ("router", 8002),
        ("prefill", 9400),
        ("decode", 9401),
        ("prefill", 6386),
        ("decode", 6386),
        ("ray-head", 6386),
    }


def test_redis_and_its_sentinels_are_within_reach(renderer: Renderer) -> None:
    rendered = renderer.render(VALUE_SETS["redis by sentinels"])
    peers = [{"ipBlock": {"cidr": "192.0.2.0/24"}}]
    for pod in pods_of(rendered):
        if pod.component in ("router", "prefill", "decode"):
            (rule,) = [rule for rule in _egress(rendered, pod) if rule.get("to") == peers]
            assert {ports.first for ports in _ports(rule)} == {6379, 26379}
    url = rendered.named("Secret", "t-baton-external-redis")["stringData"]["url"]
    check_url(url)
    assert "s1.example:26379,s2.example:26379/master" in url


def test_a_redis_of_the_prefix_index_is_within_reach_of_those_who_use_it(renderer: Renderer) -> None:
    peers = [{"ipBlock": {"cidr": "192.0.2.0/24"}}]
    secret = {"name": "index", "workerKey": "worker-url"}
    values = {
        "urlSecret": secret,
        "tlsSecret": "index-tls",
        "peers": peers,
        "port": 6390,
        "otherPorts": [26379],
    }
    rendered = renderer.render(ValueSet(values={"externalIndex": values, "autoscaling": {"enabled": True}}))
    seen = set()
    for pod in pods_of(rendered):
        found: dict[str, Any] = {}
        for container in pod.spec["containers"]:
            own = [one for one in container.get("env", []) if one["name"] == "BATON_INDEX_URL"]
            found |= {one["valueFrom"]["secretKeyRef"]["key"]: one for one in own}
        mounted = any(one["name"] == "index-tls" for one in pod.spec.get("volumes", []))
        rules = [rule for rule in _egress(rendered, pod) if rule.get("to") == peers]
        if pod.component not in ("router", "prefill", "decode"):
            assert not found and not mounted and not rules, pod.component
            continue
        seen.add(pod.component)
        assert set(found) == {"url" if pod.component == "router" else "worker-url"} and mounted
        assert [{ports.first for ports in _ports(rule)} for rule in rules] == [{6390, 26379}]
    assert seen == {"router", "prefill", "decode"}


def test_hub_and_collector_are_no_way_out_to_every_address(renderer: Renderer) -> None:
    collector = [{"ipBlock": {"cidr": "192.0.2.9/32"}}]
    values: dict[str, Any] = {
        "model": {"source": "hf://org/name@main"},
        "observability": {"otlpEndpoint": "http://collector.observability:4318"},
        "networkPolicy": {"collector": collector, "apiServer": [{"ipBlock": {"cidr": "192.0.2.1/32"}}]},
    }
    rendered = renderer.render(ValueSet(values=values))
    to_hub = []
    for pod in pods_of(rendered):
        for rule in _egress(rendered, pod):
            assert rule["to"], pod.owner
            ports = {one["port"] for one in rule["ports"]}
            if ports == {4318}:
                assert rule["to"] == collector
            elif ports == {443}:
                to_hub.append(pod.component)
                blocks = [one["ipBlock"] for one in rule["to"]]
                assert {one["cidr"] for one in blocks} == {"0.0.0.0/0", "::/0"}
                assert {"10.0.0.0/8", "169.254.0.0/16", "fc00::/7"} <= {
                    hidden for one in blocks for hidden in one["except"]
                }
    assert set(to_hub) == {"router", "prefill", "decode"}
    values["networkPolicy"]["hub"] = collector
    rendered = renderer.render(ValueSet(values=values))
    rules = rendered.named("NetworkPolicy", "t-baton-router")["spec"]["egress"]
    assert [one["to"] for one in rules if {port["port"] for port in one["ports"]} == {443}] == [collector]


def test_ways_out_to_every_address_are_closed_by_naming_the_addresses(renderer: Renderer) -> None:
    """docs/security.md ("Ports") lists them."""
    peers = [{"ipBlock": {"cidr": "192.0.2.9/32"}}]

    def open_ways(**named: list[dict[str, Any]]) -> dict[str, set[int]]:
        values = {
            "autoscaling": {"enabled": True},
            "topology": {"enabled": True},
            "redis": {"enabled": False},
            "ray": {"mode": "none"},
            "externalRedis": {"url": "rediss://redis.example:6379", "peers": named.get("redis", [])},
            "externalIndex": {
                "urlSecret": {"name": "index"},
                "port": 6390,
                "peers": named.get("index", []),
            },
            "networkPolicy": {"apiServer": named.get("api", [])},
        }
        rendered = renderer.render(ValueSet(values=values))
        found: dict[str, set[int]] = {}
        for pod in pods_of(rendered):
            ports = {
                one.first for rule in _egress(rendered, pod) if not rule.get("to") for one in _ports(rule)
            }
            if ports:
                found[pod.component] = ports
        return found

    api, redis, index = {443, 6443}, {6379}, {6390}
    assert open_ways() == {
        "router": redis | index,
        "prefill": api | redis | index,
        "decode": api | redis | index,
        "autoscaler": api | redis,
    }
    assert open_ways(redis=peers, index=peers, api=peers) == {}


@pytest.mark.parametrize(
    ("endpoint", "port"),
    [
        ("http://minio.storage", 80),
        ("http://minio.storage:9000", 9000),
        ("https://minio.storage", 443),
        ("", 443),
    ],
)
@pytest.mark.parametrize("source", ["s3://weights/large", "hf://org/name"])
def test_the_way_to_a_store_has_the_port_of_its_scheme(
    source: str, endpoint: str, port: int, renderer: Renderer
) -> None:
    store = {"endpoint": endpoint or "https://store.example"}
    key = "s3" if source.startswith("s3") else "huggingFace"
    rendered = renderer.render(ValueSet(values={"model": {"source": source, key: store}}))
    (hub,) = [
        {one["port"] for one in rule["ports"]}
        for rule in rendered.named("NetworkPolicy", "t-baton-router")["spec"]["egress"]
        if any(peer.get("ipBlock", {}).get("cidr") == "0.0.0.0/0" for peer in rule["to"])
    ]
    assert hub == {port}
