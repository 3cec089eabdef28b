"""PersistentVolumeClaims: bound at once, to a volume of their name."""

from __future__ import annotations

from tests.kubernetes.controllers.base import Client


class Claims:
    def __init__(self, client: Client):
        self._client = client

    def step(self) -> None:
        for claim in self._client.all("PersistentVolumeClaim"):
            if (claim.get("status") or {}).get("phase") == "Bound":
                continue
            status = {
                "phase": "Bound",
                "accessModes": claim["spec"].get("accessModes", []),
                "capacity": claim["spec"]["resources"]["requests"],
            }
            self._client.set_status(claim, status)
