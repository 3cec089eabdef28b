"""Judges facts: what is there, what is missing, what to do about it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from baton.doctor.facts import Facts

OLDEST = (1, 29)  # the chart is validated from here on
KUBERAY = "rayservices.ray.io"
PROMETHEUS = ("servicemonitors.monitoring.coreos.com", "podmonitors.monitoring.coreos.com")
RULES = "prometheusrules.monitoring.coreos.com"
CERT_MANAGER = ("certificates.cert-manager.io", "issuers.cert-manager.io")

# ok: as it should be; info: Baton runs without; warning: something will be worse; missing: an install would fail.
Grade = Literal["ok", "info", "warning", "missing"]


@dataclass(frozen=True)
class Check:
    name: str
    grade: Grade
    found: str
    advice: str = ""


def judge(facts: Facts) -> list[Check]:
    return [check(facts) for check in _CHECKS]


def _version(facts: Facts) -> Check:
    numbers = re.match(r"v?(\d+)\.(\d+)", facts.version)
    known = (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)
    if known < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        return Check("Kubernetes", "missing", facts.version, f"the chart needs {oldest} or later")
    return Check("Kubernetes", "ok", facts.version)


def _nodes(facts: Facts) -> Check:
    if "nodes" in facts.unread:
        return _unknown(facts, "nodes", "nodes", "ask somebody who may list nodes to run this")
    usable = [node for node in facts.nodes if node.usable]
    found = f"{len(usable)} of {len(facts.nodes)} ready and schedulable"
    return (
        Check("nodes", "ok", found)
        if usable
        else Check("nodes", "missing", found, "no pod could run anywhere")
    )


def _gpus(facts: Facts) -> Check:
    if "nodes" in facts.unread:
        return _unknown(facts, "GPUs", "nodes", "")
    kinds = facts.gpu_kinds()
    if kinds:
        shown = ", ".join(
            f"{count} × {product or resource}" for (product, resource), count in kinds.most_common()
        )
        return Check("GPUs", "ok", f"{shown} on {len(facts.gpu_nodes)} nodes")
    labelled = [node.name for node in facts.nodes if any("gpu" in label for label in node.labels)]
    advice = "workers run on CPUs: only small models; install the GPU operator or device plugin to use GPUs"
    if labelled:
        advice = f"{labelled[0]} has GPU labels and nothing allocatable: the device plugin does not run there"
    return Check("GPUs", "warning", "none allocatable", advice)


def _rdma(facts: Facts) -> Check:
    with_gpus = facts.gpu_nodes
    if not with_gpus:
        return Check("RDMA", "info", "not needed without GPUs")
    having = [node for node in with_gpus if node.rdma]
    names = sorted({name for node in having for name in node.rdma})
    if not having:
        return Check(
            "RDMA", "warning", "no resource", "KV moves over TCP between nodes; install an RDMA device plugin"
        )
    if len(having) < len(with_gpus):
        found = f"{', '.join(names)} on {len(having)} of {len(with_gpus)} GPU nodes"
        return Check("RDMA", "warning", found, "workers that ask for it fit only there")
    return Check("RDMA", "ok", ", ".join(names))


def _kuberay(facts: Facts) -> Check:
    versions = facts.crds.get(KUBERAY)
    if "custom resource definitions" in facts.unread:
        return _unknown(facts, "KubeRay", "custom resource definitions", "ray.mode embedded needs none of it")
    if versions is None:
        return Check("KubeRay", "info", "not installed", "ray.mode embedded needs none of it")
    if "v1" not in versions:
        found = f"ray.io {', '.join(versions)}"
        return Check(
            "KubeRay",
            "warning",
            found,
            "ray.mode kuberay needs ray.io/v1: upgrade the operator to 1.0 or later",
        )
    return Check("KubeRay", "ok", f"ray.io {', '.join(versions)}")


def _prometheus(facts: Facts) -> Check:
    have = [name for name in (*PROMETHEUS, RULES) if name in facts.crds]
    if len(have) == 3:
        return Check("Prometheus operator", "ok", "monitors and rules")
    found = "not installed" if not have else f"only {', '.join(have)}"
    return Check("Prometheus operator", "info", found, "scrape the pods by their annotations, or install it")


def _cert_manager(facts: Facts) -> Check:
    if all(name in facts.crds for name in CERT_MANAGER):
        return Check("cert-manager", "ok", "installed")
    return Check(
        "cert-manager", "info", "not installed", "for TLS bring your own Secrets (tls.source: secrets)"
    )


def _storage(facts: Facts) -> Check:
    default = [one.name for one in facts.storage_classes if one.is_default]
    if default:
        return Check("storage class", "ok", f"{default[0]} (default)")
    if facts.storage_classes:
        names = ", ".join(one.name for one in facts.storage_classes)
        return Check(
            "storage class", "warning", f"{names}; no default", "name one where the chart makes a claim"
        )
    advice = "models come from the image or an existing claim; Redis keeps nothing on disk, which it need not"
    return Check("storage class", "info", "none", advice)


def _permissions(facts: Facts) -> Check:
    denied = [
        f"{one.verb} {_full(one.resource, one.group)}" for one in facts.permissions if one.allowed is False
    ]
    if denied:
        advice = "an administrator installs it, or grants these; rbac.create: false needs no roles"
        return Check("permissions", "missing", f"may not {', '.join(denied)} in {facts.namespace}", advice)
    if any(one.allowed is None for one in facts.permissions):
        return _unknown(facts, "permissions", "permissions", "")
    return Check("permissions", "ok", f"may create what the chart has, in {facts.namespace}")


def _unknown(facts: Facts, name: str, what: str, advice: str) -> Check:
    return Check(name, "warning", f"unknown: {facts.unread.get(what, 'not asked')}", advice)


def _full(resource: str, group: str) -> str:
    return f"{resource}.{group}" if group else resource


_CHECKS: tuple[Callable[[Facts], Check], ...] = (
    _version,
    _nodes,
    _gpus,
    _rdma,
    _kuberay,
    _prometheus,
    _cert_manager,
    _storage,
    _permissions,
)
