"""Volumes as folders of this machine, filled from the objects that they refer to."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.kubernetes.api.kinds import Object
from tests.kubernetes.controllers.base import Client
from tests.kubernetes.kubelet.environment import MissingObject, contents, pod_field, resource_field

MEMORY = Path("/dev/shm")
Tokens = Callable[[str, str], Mapping[str, bytes]]
AUTHORITY = "kube-root-ca.crt"  # a ConfigMap that a real cluster puts into every namespace
ACCOUNT_PATH = "/var/run/secrets/kubernetes.io/serviceaccount"


class Volumes:
    """The volumes of one pod; claims outlive it.

    Args:
        folder: of this pod alone.
        claims: where claims' contents lie, by namespace and name.
        tokens: what a service account's projected token volume holds.
        mark: begins the names of folders in memory.
    """

    def __init__(self, client: Client, pod: Object, folder: Path, claims: Path, tokens: Tokens, mark: str):
        self._client = client
        self._pod = pod
        self._folder = folder
        self._claims = claims
        self._tokens = tokens
        self._mark = mark
        self._namespace = pod["metadata"]["namespace"]
        self._group = int((pod["spec"].get("securityContext") or {}).get("fsGroup", 0))
        self._memory: list[Path] = []

    def make(self) -> dict[str, Path]:
        """Folders by the volumes' names. Raises MissingObject."""
        made = {}
        for volume in self._pod["spec"].get("volumes") or ():
            made[volume["name"]] = self._make(volume)
        return made

    def remove(self) -> None:
        for folder in self._memory:
            shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(self._folder, ignore_errors=True)

    def account_folder(self) -> Path:
        """What is mounted where in-cluster clients look."""
        return self._written(
            "account", self._tokens(self._namespace, self._pod["spec"]["serviceAccountName"]), 0o644
        )

    def _make(self, volume: Object) -> Path:
        name = volume["name"]
        if (empty := volume.get("emptyDir")) is not None:
            return self._empty(name, in_memory=empty.get("medium") == "Memory")
        if claim := volume.get("persistentVolumeClaim"):
            return self._shared(self._claims / self._namespace / claim["claimName"])
        if path := volume.get("hostPath"):
            return Path(path["path"])
        if source := volume.get("configMap"):
            found = self._picked("ConfigMap", source["name"], source)
            return self._written(name, found, source.get("defaultMode", 0o644))
        if source := volume.get("secret"):
            found = self._picked("Secret", source["secretName"], source)
            return self._written(name, found, source.get("defaultMode", 0o644))
        if source := volume.get("downwardAPI"):
            return self._written(name, self._downward(source), source.get("defaultMode", 0o644))
        if source := volume.get("projected"):
            return self._written(name, self._projected(source), source.get("defaultMode", 0o644))
        raise MissingObject(f"volume {name}: nothing here makes {', '.join(volume)}")

    def _empty(self, name: str, *, in_memory: bool) -> Path:
        if not in_memory:
            return self._shared(self._folder / name)
        folder = MEMORY / f"{self._mark}-{self._pod['metadata']['uid']}-{name}"
        self._memory.append(folder)
        return self._shared(folder)

    def _shared(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        os.chown(folder, 0, self._group)
        folder.chmod(0o2777 if self._group else 0o777)
        return folder

    def _written(self, name: str, files: Mapping[str, bytes], mode: int) -> Path:
        folder = self._folder / name
        folder.mkdir(parents=True, exist_ok=True)
        for path, content in files.items():
            file = folder / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
            os.chown(file, 0, self._group)
            file.chmod(mode | (0o440 if self._group else 0))
        return folder

    def _picked(self, kind: str, name: str, source: Object) -> dict[str, bytes]:
        optional = source.get("optional", False)
        if (kind, name) == ("ConfigMap", AUTHORITY):
            account = self._pod["spec"].get("serviceAccountName", "default")
            found = {"ca.crt": self._tokens(self._namespace, account)["ca.crt"]}
        else:
            found = contents(self._client, kind, self._namespace, name, optional=optional)
        if not source.get("items"):
            return found
        missing = [item["key"] for item in source["items"] if item["key"] not in found]
        if missing and not optional:
            raise MissingObject(f'{kind.lower()} "{name}" has no key {missing[0]}')
        return {item["path"]: found[item["key"]] for item in source["items"] if item["key"] in found}

    def _downward(self, source: Object) -> dict[str, bytes]:
        made = {}
        for item in source.get("items") or ():
            if reference := item.get("fieldRef"):
                text = pod_field(self._pod, reference["fieldPath"])
            else:
                text = resource_field(self._pod, {}, item["resourceFieldRef"])
            made[item["path"]] = text.encode()
        return made

    def _projected(self, source: Object) -> dict[str, bytes]:
        made: dict[str, bytes] = {}
        for part in source.get("sources") or ():
            if "configMap" in part:
                made |= self._picked("ConfigMap", part["configMap"]["name"], part["configMap"])
            elif "secret" in part:
                made |= self._picked("Secret", part["secret"]["name"], part["secret"])
            elif "downwardAPI" in part:
                made |= self._downward(part["downwardAPI"])
            elif "serviceAccountToken" in part:
                tokens = self._tokens(self._namespace, self._pod["spec"]["serviceAccountName"])
                made[part["serviceAccountToken"]["path"]] = tokens["token"]
        return made
