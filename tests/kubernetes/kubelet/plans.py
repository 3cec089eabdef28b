"""Derive from a pod's description what its containers need to start."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tests.kubernetes.api.kinds import Object
from tests.kubernetes.api.quantity import amount
from tests.kubernetes.controllers.base import Client
from tests.kubernetes.kubelet.environment import environment_of, expand
from tests.kubernetes.kubelet.image import Image
from tests.kubernetes.kubelet.rootfs import Identity, Mount, RootFs
from tests.kubernetes.kubelet.runtime import Plan
from tests.kubernetes.kubelet.sandbox import Sandbox
from tests.kubernetes.kubelet.volumes import ACCOUNT_PATH, Volumes


class Planner:
    """Plans for the containers of one pod. Makes the volumes; raises MissingObject where it can't."""

    def __init__(self, client: Client, pod: Object, volumes: Volumes, sandbox: Sandbox, folder: Path):
        self._client = client
        self._pod = pod
        self._sandbox = sandbox
        self._folder = folder
        self._volumes = volumes.make()
        self._account = volumes.account_folder() if _wants_token(client, pod) else None

    def plan(self, spec: Object, image: Image, server: Mapping[str, str]) -> Plan:
        """`server`: the API server's address."""
        base = {"HOME": "/", "HOSTNAME": self._sandbox.hostname, **server, **image.environment}
        environment = environment_of(self._client, self._pod, spec, base)
        command = spec.get("command") or list(image.entrypoint)
        # A command of the pod's own takes the image's arguments away too.
        arguments = spec.get("args") or ([] if spec.get("command") else image.arguments)
        words = [expand(word, environment) for word in [*command, *arguments]]
        if not spec.get("command") and not image.entrypoint:
            words = words or ["sh"]
        security = spec.get("securityContext") or {}
        root = RootFs(
            self._folder / f"{spec['name']}.root",
            image.visible(),
            self._mounts(spec, image),
            bool(security.get("readOnlyRootFilesystem", False)),
        )
        limits = (spec.get("resources") or {}).get("limits") or {}
        return Plan(
            spec["name"],
            f"{self._pod['metadata']['uid'][:8]}-{spec['name']}",
            image,
            words,
            environment,
            identity_of(self._pod["spec"].get("securityContext") or {}, security, image.user),
            spec.get("workingDir", ""),
            root,
            self._folder / f"{spec['name']}.log",
            int(amount(limits.get("memory", 0))),
        )

    def _mounts(self, spec: Object, image: Image) -> list[Mount]:
        made = [Mount(source, target, read_only=True) for target, source in image.files.items()]
        made.append(Mount(self._sandbox.hosts, "/etc/hosts"))
        made.append(Mount(self._sandbox.resolver, "/etc/resolv.conf"))
        if self._account is not None:
            made.append(Mount(self._account, ACCOUNT_PATH, read_only=True))
        for mount in sorted(spec.get("volumeMounts") or (), key=lambda mount: len(mount["mountPath"])):
            source = self._volumes[mount["name"]]
            if mount.get("subPath"):
                source = source / mount["subPath"]
            made.append(Mount(source, mount["mountPath"].rstrip("/"), mount.get("readOnly", False)))
        return made


def _wants_token(client: Client, pod: Object) -> bool:
    """The pod's word counts, then the account's."""
    said = pod["spec"].get("automountServiceAccountToken")
    if said is not None:
        return bool(said)
    account = client.find("ServiceAccount", pod["metadata"]["namespace"], pod["spec"]["serviceAccountName"])
    return bool((account or {}).get("automountServiceAccountToken", True))


def identity_of(pod: Object, container: Object, image_user: int) -> Identity:
    merged = {**pod, **container}
    user = int(merged.get("runAsUser", image_user))
    if merged.get("runAsNonRoot") and user == 0:
        raise ValueError("container has runAsNonRoot and image will run as root")
    groups = tuple(
        sorted({int(pod["fsGroup"])} if "fsGroup" in pod else set(pod.get("supplementalGroups") or ()))
    )
    capabilities = container.get("capabilities") or {}
    return Identity(
        user,
        int(merged.get("runAsGroup", user)),
        groups,
        not container.get("allowPrivilegeEscalation", True),
        "ALL" in (capabilities.get("drop") or ()),
        tuple(capabilities.get("add") or ()),
    )
