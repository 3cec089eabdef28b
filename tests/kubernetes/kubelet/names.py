"""Names of Services and of pods behind them, as lines of a hosts file."""

from __future__ import annotations

from collections.abc import Iterator

from tests.kubernetes.controllers.base import Client


def host_lines(client: Client, namespace: str) -> str:
    """What a pod of `namespace` can look up: a Service's own address, or its pods' where it is headless."""
    lines = []
    for service in client.all("Service"):
        meta, spec = service["metadata"], service["spec"]
        names = _names(meta["name"], meta["namespace"], namespace)
        if spec.get("clusterIP") not in (None, "", "None"):
            lines.append(f"{spec['clusterIP']} {names}")
            continue
        for address, hostname in _addresses(client, meta["namespace"], meta["name"]):
            lines.append(f"{address} {names}")
            if hostname:
                lines.append(
                    f"{address} {_names(f'{hostname}.' + meta['name'], meta['namespace'], namespace)}"
                )
    return "".join(f"{line}\n" for line in sorted(lines))


def _names(name: str, namespace: str, seen_from: str) -> str:
    full = [f"{name}.{namespace}.svc.cluster.local", f"{name}.{namespace}.svc", f"{name}.{namespace}"]
    return " ".join([*full, name] if namespace == seen_from else full)


def _addresses(client: Client, namespace: str, name: str) -> Iterator[tuple[str, str]]:
    endpoints = client.find("Endpoints", namespace, name) or {}
    for subset in endpoints.get("subsets") or ():
        for address in subset.get("addresses") or ():
            yield address["ip"], address.get("hostname", "")
