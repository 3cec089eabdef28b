"""Routers as real processes in front of stub workers, for tests of admission."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from cluster.security.keys import new_key
from tests.harness import router_process as router_setup
from tests.harness.waiting import wait_for

START_SECONDS = 60.0
Router = router_setup.RunningRouter


class KeyFile:
    """A keys file that a test writes again and again."""

    def __init__(self, path: Path):
        self.path = path
        self.entries: list[dict[str, Any]] = []
        self.write()

    def add(self, tenant: str, **fields: Any) -> str:
        key, entry = new_key(tenant, **fields)
        self.entries.append(entry.model_dump(mode="json", exclude_defaults=True))
        self.write()
        return key

    def write(self) -> None:
        part = self.path.with_suffix(".part")
        part.write_text(yaml.safe_dump(self.entries))
        part.replace(self.path)


@contextlib.contextmanager
def stub_workers(redis_url: str, namespace: str, *module: str) -> Iterator[str]:
    """Both roles, answering at once with made-up tokens; or another module's, with its flags."""
    served = module or ("tests.harness.stub_workers",)
    with router_setup.stub_workers(redis_url, namespace, *served, "--pairs", "1") as address:
        yield address


@contextlib.contextmanager
def run_router(directory: Path, config: dict[str, Any]) -> Iterator[Router]:
    """`baton router` with this configuration; stopped at the end, and it must not have logged an exception."""
    with router_setup.run_router(directory, config) as running:
        yield running
    said = running.log.read_text(errors="replace")
    assert '"exception"' not in said and "Traceback" not in said, said


def known_key(router: Router, key: str) -> str:
    """The key, once the router has read it: it looks at its file every half second."""
    import httpx

    headers = {"authorization": f"Bearer {key}"}

    def known() -> bool:
        return bool(httpx.get(f"{router.http}/v1/models", headers=headers).status_code == 200)

    wait_for(known, 30, "the router has read the key")
    return key


def wait_ready(http: str, **client: Any) -> None:
    import httpx

    def ready() -> bool:
        return bool(httpx.get(f"{http}/ready", **client).status_code == 200)

    wait_for(ready, START_SECONDS, "the router is ready")
