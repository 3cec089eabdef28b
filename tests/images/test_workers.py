"""`make images`: workers in containers of the images just built load a model, register, and hand a request over."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest

from baton.client import Client
from tests.harness import containers
from tests.harness.checkpoints import make_checkpoint, prompt_ids
from tests.harness.image_cluster import image_cluster
from tests.harness.waiting import wait_for

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]
MODEL = "/shared/model"
FLAGS = ("--dtype", "float32", "--kv-memory", "64MiB")
NEW = 8
ABSENT = "import importlib.util, sys; sys.exit(importlib.util.find_spec('ray') is not None)"


@pytest.mark.parametrize(
    "images", [("worker", "worker"), ("prefill", "decode")], ids=["without Ray", "with Ray"]
)
def test_workers_of_an_image_generate(images: tuple[str, str], tmp_path: Path) -> None:
    if missing := [one for one in ("redis", "router", *images) if not containers.built(one)]:
        pytest.skip(f"not built: {', '.join(missing)}")
    with image_cluster(tmp_path) as cluster:
        for file in make_checkpoint(cluster.shared / "model").iterdir():
            file.chmod(0o644)  # safetensors are written for their owner alone
        for image, role in zip(images, ("prefill", "decode"), strict=True):
            cluster.start(image, role, *FLAGS, model=MODEL)
        ports = ("--http-port", "0", "--grpc-port", "0")
        router = cluster.start("router", "router", *ports, "--local-prefill", "never", model=MODEL)
        _wait_for_workers(router["http"], 2)
        with Client(router["grpc"]) as client:
            answer = client.generate(prompt_ids(40), max_tokens=NEW, temperature=0, ignore_eos=True)
    assert len(answer.token_ids) == NEW
    assert answer.timings.kv_bytes_shipped > 0


def test_the_image_worker_has_no_ray() -> None:
    if not containers.built("worker"):
        pytest.skip("not built: worker")
    containers.run("worker", "-c", ABSENT, entrypoint="python")


@pytest.mark.parametrize("image", ["worker", "prefill", "decode"])
def test_a_workers_image_is_an_ordinary_user_who_writes_to_tmp_alone(image: str) -> None:
    if not containers.built(image):
        pytest.skip(f"not built: {image}")
    said = containers.run(image, "-c", containers.CONFINEMENT, entrypoint="python")
    assert json.loads(said) == [10001, 10001, "0000000000000000", ["/tmp"]]


def _wait_for_workers(url: str, count: int) -> None:
    def live() -> int:
        workers = httpx.get(f"{url}/v1/cluster", timeout=10).json()["workers"]
        return sum(one["lease"] == "live" for one in workers)

    wait_for(lambda: live() == count, containers.SECONDS, f"{count} workers are live")
