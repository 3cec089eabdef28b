"""rclone's image, built here: the chart's pods copy a model with it, confined as they are."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from deploy import images
from deploy.image_probe import CONFINED, PODMAN
from deploy.versions import tag_of
from tests.harness import containers
from tests.harness.object_store import MODEL, OTHERS, store_of
from tests.system.conftest import _install
from tests.system.helm.model_copy import copy_container, environment
from tests.system.helm.rendering import Renderer

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def built() -> images.Built:
    base = images.base_image(Console())
    found = images.build("rclone", base)
    assert found.bytes - images.size_of(base) <= images.BUDGETS["rclone"] * 10**6, found.largest
    return found


def run(container: dict[str, Any], models: Path) -> subprocess.CompletedProcess[str]:
    """The container as the chart describes it, with `models` in the volume's place."""
    words: list[str] = [*container["command"], *container["args"]]
    command = [*PODMAN, "run", "--rm", *CONFINED, "--volume", f"{models}:/models"]
    for name, value in environment(container).items():
        command += ["--env", f"{name}={value}"]
    command += ["--entrypoint", words[0], container["image"], *words[1:]]
    return subprocess.run(command, capture_output=True, text=True, timeout=containers.SECONDS, check=False)


def test_a_worker_copies_the_model_with_the_image_as_the_chart_starts_it(
    built: images.Built, tmp_path: Path
) -> None:
    models = tmp_path / "models"
    models.mkdir()
    models.chmod(0o777)  # an emptyDir, of the pod's group
    with store_of({**MODEL, **OTHERS}) as store:
        container = copy_container(Renderer(_install(4)), "decode", store.port)
        assert container["image"].rpartition("/")[2] == images.name_of("rclone").rpartition("/")[2]
        done = run({**container, "image": images.name_of("rclone")}, models)
    assert done.returncode == 0, done.stderr
    assert {one.name: one.read_bytes() for one in (models / "8b").iterdir()} == MODEL
    assert {one.stat().st_uid for one in (models / "8b").iterdir()} == {10001}


def test_the_image_is_an_ordinary_users_and_holds_the_version_of_its_tag(built: images.Built) -> None:
    said = containers.run("rclone", "-c", "id -u; grep CapEff /proc/self/status; touch /x /etc/x || touch /tmp/x",
                          entrypoint="sh").split()  # fmt: skip
    assert said == ["10001", "CapEff:", "0000000000000000"]
    (version,) = [one.version for one in built.packages if one.name == "rclone"]
    assert version.partition("+")[0].partition("-")[0] == tag_of("rclone")
