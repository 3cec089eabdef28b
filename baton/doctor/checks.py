"""Checks of the facts: what exists, what is missing, and what to do."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from baton.doctor.facts import CERT_MANAGER, KUBERAY, PROMETHEUS, RULES, Facts
from baton.doctor.pods import pods_of
from baton.doctor.room import blocking, shown, without_room
from baton.doctor.values import values_for

OLDEST = (1, 29)  # oldest version for which the chart is validated

# ok; info: Baton runs without it; warning: Baton works worse; missing: an install would fail.
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
        counted = ", ".join(
            f"{count} × {product or resource}" for (product, resource), count in kinds.most_common()
        )
        found = f"{counted} on {len(facts.gpu_nodes)} node{'s' if len(facts.gpu_nodes) != 1 else ''}"
        if kinds.total() == 1:
            advice = "one decode worker, which prefills by itself: a second GPU makes two pools"
            return Check("GPUs", "warning", found, advice)
        return Check("GPUs", "ok", found)
    labelled = [node.name for node in facts.nodes if any("gpu" in label for label in node.labels)]
    advice = "workers run on CPUs: only small models; install the GPU operator or device plugin to use GPUs"
    if labelled:
        advice = f"{labelled[0]} has GPU labels and nothing allocatable: the device plugin does not run there"
    return Check("GPUs", "warning", "none allocatable", advice)


def _room(facts: Facts) -> Check:
    if "nodes" in facts.unread:
        return _unknown(facts, "room", "nodes", "")
    pods = pods_of(values_for(facts))
    if left := without_room(pods, facts.nodes):
        names = ", ".join(f"{count} × {name}" for name, count in Counter(pod.name for pod in left).items())
        tainted = sum(bool(blocking(node.taints)) for node in facts.nodes if node.usable)
        advice = "add nodes, or ask for less in resources"
        if tainted:
            advice += f"; {tainted} nodes have taints, which pod.tolerations of a component may tolerate"
        return Check("room", "missing", f"none for {names}: {shown(left)}", advice)
    found = f"for {shown(pods)}"
    return Check("room", "ok", found, "of what nodes have in all: what runs there already is not counted")


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
    advice = "have Prometheus discover the pods and scrape their port named metrics, or install it"
    return Check("Prometheus operator", "info", found, advice)


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
    denied = [one for one in facts.permissions if one.allowed is False]
    required = [f"{one.verb} {one.full_name}" for one in denied if not one.feature]
    if required:
        found = f"may not {', '.join(required)} in {facts.namespace}"
        return Check("permissions", "missing", found, "an administrator installs it, or grants these")
    if any(one.allowed is None for one in facts.permissions):
        return _unknown(facts, "permissions", "permissions", "")
    operators = (KUBERAY, *PROMETHEUS, RULES, *CERT_MANAGER)
    # Rights to kinds that this cluster does not have are not needed.
    optional = [
        one for one in denied if one.full_name not in operators or facts.crds.get(one.full_name) is not None
    ]
    if optional:
        names = ", ".join(f"{one.verb} {one.full_name}" for one in optional)
        features = ", ".join(dict.fromkeys(one.feature for one in optional))
        advice = f"the values below do without {features}; an administrator may grant these"
        return Check("permissions", "warning", f"may not {names}", advice)
    return Check("permissions", "ok", f"may create what the chart has, in {facts.namespace}")


def _unknown(facts: Facts, name: str, what: str, advice: str) -> Check:
    return Check(name, "warning", f"unknown: {facts.unread.get(what, 'not asked')}", advice)


_CHECKS: tuple[Callable[[Facts], Check], ...] = (
    _version,
    _nodes,
    _gpus,
    _room,
    _rdma,
    _kuberay,
    _prometheus,
    _cert_manager,
    _storage,
    _permissions,
)
