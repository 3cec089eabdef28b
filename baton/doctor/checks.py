"""Checks of the facts: what exists, what is missing, and what to do."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from baton.doctor.facts import CERT_MANAGER, GATEWAY, GROUPS, KUBERAY, PROMETHEUS, RULES, Facts
from baton.doctor.pods import blocking, pods_of, shown, without_room
from baton.doctor.values import CUDA, OLDER_CUDA, OLDER_SUFFIX, values_for

OLDEST = (1, 29)  # oldest version for which the chart is validated

# ok; info: Baton runs without it; warning: Baton works worse; missing: an install would fail.
Grade = Literal["ok", "info", "warning", "missing"]


class Finding(NamedTuple):
    grade: Grade
    found: str
    advice: str = ""


@dataclass(frozen=True)
class Check:
    name: str
    grade: Grade
    found: str
    advice: str = ""


def judge(facts: Facts) -> list[Check]:
    return [Check(name, *check(facts)) for name, check in _CHECKS.items()]


def _version(facts: Facts) -> Finding:
    numbers = re.match(r"v?(\d+)\.(\d+)", facts.version)
    known = (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)
    if known < OLDEST:
        return Finding("missing", facts.version, f"the chart needs {'.'.join(map(str, OLDEST))} or later")
    return Finding("ok", facts.version)


def _nodes(facts: Facts) -> Finding:
    if "nodes" in facts.unread:
        return _unknown(facts, "nodes", "ask an administrator who may list nodes to run this")
    usable = [node for node in facts.nodes if node.usable]
    found = f"{len(usable)} of {len(facts.nodes)} ready and schedulable"
    return Finding("ok", found) if usable else Finding("missing", found, "no pod could run anywhere")


def _gpus(facts: Facts) -> Finding:
    if "nodes" in facts.unread:
        return _unknown(facts, "nodes")
    kinds = facts.gpu_kinds()
    if kinds:
        counted = ", ".join(
            f"{count} × {product or resource}" for (product, resource), count in kinds.most_common()
        )
        found = f"{counted} on {len(facts.gpu_nodes)} node{'s' if len(facts.gpu_nodes) != 1 else ''}"
        if kinds.total() == 1:
            advice = "one decode worker, which prefills by itself: a second GPU makes two pools"
            return Finding("warning", found, advice)
        return Finding("ok", found)
    labelled = [node.name for node in facts.nodes if any("gpu" in label for label in node.labels)]
    advice = "workers run on CPUs: only small models; install the GPU operator or device plugin to use GPUs"
    if others := facts.other_devices():
        advice = (
            f"{', '.join(others)}: the images compute on NVIDIA's GPUs and CPUs; AMD's need images of yours with "
            f"PyTorch for ROCm (prefill.image, decode.image, gpuResource)"
        )
    elif labelled:
        advice = f"{labelled[0]} has GPU labels and nothing allocatable: the device plugin does not run there"
    return Finding("warning", "none allocatable", advice)


def _drivers(facts: Facts) -> Finding:
    if "nodes" in facts.unread:
        return _unknown(facts, "nodes")
    if not facts.gpu_nodes:
        return Finding("info", "not needed without GPUs")
    if not facts.cudas:
        return Finding(
            "info", "unknown: no labels", f"images are for CUDA {CUDA}, or {OLDER_CUDA} with {OLDER_SUFFIX}"
        )
    found = f"for CUDA {', '.join(map(str, facts.cudas))}"
    if facts.cudas[0] >= CUDA:
        return Finding("ok", found)
    if facts.cudas[-1] < OLDER_CUDA:
        return Finding("missing", found, f"install drivers for CUDA {OLDER_CUDA} or later")
    advice = f"images with {OLDER_SUFFIX} (see the values) run from CUDA {OLDER_CUDA} on; or install drivers for {CUDA}"
    return Finding("warning", found, advice)


def _room(facts: Facts) -> Finding:
    if "nodes" in facts.unread:
        return _unknown(facts, "nodes")
    pods = pods_of(values_for(facts))
    if left := without_room(pods, facts.nodes):
        names = ", ".join(f"{count} × {name}" for name, count in Counter(pod.name for pod in left).items())
        tainted = sum(bool(blocking(node.taints)) for node in facts.nodes if node.usable)
        advice = "add nodes, or ask for less in resources"
        if tainted:
            advice += f"; {tainted} nodes have taints, which pod.tolerations of a component may tolerate"
        return Finding("missing", f"none for {names}: {shown(left)}", advice)
    return Finding(
        "ok", f"for {shown(pods)}", "of what nodes have in all: what runs there already is not counted"
    )


def _rdma(facts: Facts) -> Finding:
    with_gpus = facts.gpu_nodes
    if not with_gpus:
        return Finding("info", "not needed without GPUs")
    having = [node for node in with_gpus if node.rdma]
    names = ", ".join(sorted({name for node in having for name in node.rdma}))
    if not having:
        advice = "KV moves over TCP between nodes; install an RDMA device plugin"
        return Finding("warning", "no resource", advice)
    if len(having) < len(with_gpus):
        found = f"{names} on {len(having)} of {len(with_gpus)} GPU nodes"
        return Finding("warning", found, "workers that ask for it fit only there")
    return Finding("ok", names)


def _kuberay(facts: Facts) -> Finding:
    return _operator(facts, (KUBERAY,), "only ray.mode kuberay needs it")


def _prometheus(facts: Facts) -> Finding:
    have = [name for name in (*PROMETHEUS, RULES) if name in facts.crds]
    if len(have) == 3:
        return Finding("ok", "monitors and rules")
    found = "not installed" if not have else f"only {', '.join(have)}"
    advice = "have Prometheus discover the pods and scrape their port named metrics, or install it"
    return Finding("info", found, advice)


def _cert_manager(facts: Facts) -> Finding:
    if all(name in facts.crds for name in CERT_MANAGER):
        return Finding("ok", "installed")
    return Finding("info", "not installed", "for TLS bring your own Secrets (tls.source: secrets)")


def _storage(facts: Facts) -> Finding:
    default = [one.name for one in facts.storage_classes if one.is_default]
    if default:
        return Finding("ok", f"{default[0]} (default)")
    if facts.storage_classes:
        names = ", ".join(one.name for one in facts.storage_classes)
        return Finding("warning", f"{names}; no default", "name one where the chart makes a claim")
    advice = "models come from the image or an existing claim; Redis keeps nothing on disk, which it need not"
    return Finding("info", "none", advice)


def _groups(facts: Facts) -> Finding:
    return _operator(facts, GROUPS, "for workers that span nodes, multiNode.by ray needs none of it")


def _gateway(facts: Facts) -> Finding:
    return _operator(facts, GATEWAY, "clients reach the routers' Service, or an Ingress of yours")


def _operator(facts: Facts, names: Sequence[str], without: str) -> Finding:
    """An operator that the chart can use: the definitions that it brings."""
    if "custom resource definitions" in facts.unread:
        return _unknown(facts, "custom resource definitions", without)
    missing = [name for name in names if "v1" not in facts.crds.get(name, ())]
    if not missing:
        return Finding("ok", "v1")
    is_there = any(name in facts.crds for name in names)
    return Finding("info", f"no v1 of {', '.join(missing)}" if is_there else "not installed", without)


def _permissions(facts: Facts) -> Finding:
    if not facts.permissions:
        return Finding("info", "not asked")
    denied = [one for one in facts.permissions if one.allowed is False]
    required = [f"{one.verb} {one.full_name}" for one in denied if not one.feature]
    if required:
        found = f"may not {', '.join(required)} in {facts.namespace}"
        return Finding("missing", found, "an administrator installs it, or grants these")
    if any(one.allowed is None for one in facts.permissions):
        return _unknown(facts, "permissions")
    operators = (KUBERAY, *GROUPS, *GATEWAY, *PROMETHEUS, RULES, *CERT_MANAGER)
    # Rights to kinds that this cluster does not have are not needed.
    optional = [
        one for one in denied if one.full_name not in operators or facts.crds.get(one.full_name) is not None
    ]
    if optional:
        names = ", ".join(f"{one.verb} {one.full_name}" for one in optional)
        features = ", ".join(dict.fromkeys(feature for one in optional for feature in one.features))
        advice = f"the values below do without {features}; an administrator may grant these"
        return Finding("warning", f"may not {names}", advice)
    return Finding("ok", f"may create what the chart has, in {facts.namespace}")


def _unknown(facts: Facts, what: str, advice: str = "") -> Finding:
    return Finding("warning", f"unknown: {facts.unread.get(what, 'not asked')}", advice)


_CHECKS: dict[str, Callable[[Facts], Finding]] = {
    "Kubernetes": _version,
    "nodes": _nodes,
    "GPUs": _gpus,
    "GPU drivers": _drivers,
    "room": _room,
    "RDMA": _rdma,
    "KubeRay": _kuberay,
    "Prometheus operator": _prometheus,
    "cert-manager": _cert_manager,
    "LeaderWorkerSet": _groups,
    "Gateway API": _gateway,
    "storage class": _storage,
    "permissions": _permissions,
}
