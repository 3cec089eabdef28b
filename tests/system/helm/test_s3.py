"""The command that copies a model from an object store, run by Debian's rclone against a small store."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.harness.debian_packages import unpacked
from tests.harness.object_store import FOLDER, MODEL, OTHERS, store_of
from tests.system.conftest import TOOLS
from tests.system.helm.model_copy import copy_container, environment
from tests.system.helm.rendering import Renderer, ValueSet, pods_of

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def rclone() -> str:
    """Installed, or unpacked from Debian's package."""
    if installed := shutil.which("rclone"):
        return installed
    return str(unpacked(TOOLS / "rclone", "rclone") / "usr" / "bin" / "rclone")


@pytest.mark.parametrize("by", ["ray", "leaderWorkerSet"])
def test_every_pod_that_copies_has_the_account_with_the_clouds_identity(renderer: Renderer, by: str) -> None:
    values = {
        "model": {"source": f"s3://weights/{FOLDER}"},
        "rbac": {"annotations": {"eks.amazonaws.com/role-arn": "arn:aws:iam::1:role/weights"}},
        "multiNode": {"by": by},
        "decode": {"gpus": 2, "nodes": 2, "tensorParallel": 4},
    }
    rendered = renderer.render(ValueSet(values=values, apis=("leaderworkerset.x-k8s.io/v1",)))
    annotated = {
        one["metadata"]["name"] for one in rendered.of("ServiceAccount") if one["metadata"].get("annotations")
    }
    copying = [pod for pod in pods_of(rendered) if pod.spec.get("initContainers")]
    assert {pod.component for pod in copying} == {"router", "prefill", "decode", "decode-ranks"}
    for pod in copying:
        assert pod.spec.get("serviceAccountName") in annotated, pod.component
        assert pod.spec["automountServiceAccountToken"] is False


@pytest.mark.parametrize("source", ["s3://weights/large", "hf://org/large@main"])
def test_a_download_is_over_before_probes_begin_and_has_no_limit_in_all(
    renderer: Renderer, source: str
) -> None:
    """Kubernetes asks a pod's probes after its init containers, unless those restart always."""
    rendered = renderer.render(ValueSet(values={"model": {"source": source, "loadSeconds": 77}}))
    probed = [pod for pod in pods_of(rendered) if pod.component in ("prefill", "decode")]
    assert len(probed) == 2
    for pod in probed:
        (fetch,) = pod.spec["initContainers"]
        assert "restartPolicy" not in fetch and "startupProbe" in pod.spec["containers"][0]
        limits = [
            one for one in fetch["args"] if one.startswith(("--seconds", "--timeout", "--max-duration"))
        ]
        assert limits == (["--seconds=77"] if source.startswith("hf") else ["--timeout=60s"])


def copy(container: dict[str, Any], rclone: str, place: Path) -> subprocess.CompletedProcess[str]:
    """Runs the container's command with `place` as its file system."""
    words = [*container["command"], *container["args"], "--low-level-retries=1", "--retries=1"]
    words = [word.replace("/models/", f"{place}/models/").replace("=/tmp/", f"={place}/") for word in words]
    return subprocess.run(
        words,
        env={**environment(container), "HOME": str(place), "PATH": f"{Path(rclone).parent}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def held(place: Path) -> dict[str, bytes]:
    folder = place / "models" / "8b"
    return {str(one.relative_to(folder)): one.read_bytes() for one in folder.rglob("*") if one.is_file()}


def test_a_worker_copies_the_model_and_nothing_else(renderer: Renderer, rclone: str, tmp_path: Path) -> None:
    with store_of({**MODEL, **OTHERS}) as store:
        container = copy_container(renderer, "decode", store.port)
        done = copy(container, rclone, tmp_path)
        assert done.returncode == 0, done.stderr
        assert held(tmp_path) == MODEL
        # A container that starts again downloads nothing twice.
        store.asked.clear()
        assert copy(container, rclone, tmp_path).returncode == 0 and not store.asked


def test_a_router_copies_no_weights(renderer: Renderer, rclone: str, tmp_path: Path) -> None:
    with store_of(MODEL) as store:
        done = copy(copy_container(renderer, "router", store.port), rclone, tmp_path)
    assert done.returncode == 0, done.stderr
    assert held(tmp_path).keys() == {"config.json", "tokenizer.json"}


def test_a_spoiled_file_fails_the_container_and_is_not_kept(
    renderer: Renderer, rclone: str, tmp_path: Path
) -> None:
    name = "model-00002-of-00002.safetensors"
    with store_of(MODEL) as store:
        store.spoil = f"{FOLDER}/{name}"
        done = copy(copy_container(renderer, "decode", store.port), rclone, tmp_path)
    assert done.returncode != 0 and name in done.stderr
    assert name not in held(tmp_path)


def test_a_folder_that_is_not_there_fails_the_container(
    renderer: Renderer, rclone: str, tmp_path: Path
) -> None:
    with store_of({}) as store:
        done = copy(copy_container(renderer, "decode", store.port), rclone, tmp_path)
    assert done.returncode != 0 and "no config.json in store:weights/llama/8b" in done.stderr
