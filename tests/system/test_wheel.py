"""The built wheel in fresh environments: the base for clients, everything for `baton up` with the model that it ships."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.waiting import wait_for
from tests.kubernetes.api.server import ApiServer

pytestmark = pytest.mark.system
ROOT = Path(__file__).resolve().parents[2]
HEAVY = {"torch", "ray", "nixl", "numba", "fastapi", "tokenizers"}


def run(*command: str | Path, cwd: Path, seconds: float = 300) -> str:
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, capture_output=True, text=True, timeout=seconds, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder, ROOT, cwd=folder)
    (built,) = folder.glob("baton_serve-*.whl")
    return built


def environment(folder: Path) -> Path:
    """A new virtual environment's folder of programs."""
    run(sys.executable, "-m", "venv", folder, cwd=folder.parent)
    return folder / "bin"


def test_contents_of_the_wheel(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {"baton/py.typed", "baton/demo_model/config.json", "baton/demo_model/model.safetensors"} <= set(
        names
    )
    assert "router/placement/place.lua" in names and any(
        one.startswith("router/frontends/http/ui/static/") for one in names
    )
    assert not [one for one in names if one.startswith(("tests/", "bench/", "demo/"))]


def test_the_base_install_brings_no_torch_ray_or_nixl(wheel: Path, tmp_path: Path) -> None:
    programs = environment(tmp_path / "base")
    run(programs / "pip", "install", "-q", "-c", ROOT / "constraints.txt", wheel, cwd=tmp_path)
    installed = {
        one["name"].lower()
        for one in json.loads(run(programs / "pip", "list", "--format", "json", cwd=tmp_path))
    }
    assert "baton-serve" in installed and not installed & HEAVY
    run(programs / "python", "-c", "import baton.client", cwd=tmp_path)
    for command in ("load", "doctor", "top", "status"):
        assert "Usage" in run(programs / "baton", command, "--help", cwd=tmp_path)
    assert "8 × nvidia.com/gpu on 1 node" in doctored(programs, tmp_path)


@pytest.fixture
def everything(wheel: Path, tmp_path: Path) -> Path:
    """An environment with the wheel, whose dependencies are those of the tests' own environment."""
    programs = environment(tmp_path / "all")
    packages = Path(
        run(
            programs / "python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path
        ).strip()
    )
    # Its own .pth files, which lead to the source tree, are not read from there.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    run(programs / "pip", "install", "-q", "--no-deps", wheel, cwd=tmp_path)
    # Which pip makes where it installs Ray itself
    ray = programs / "ray"
    ray.write_text(
        f"#!{programs / 'python'}\nimport sys\nfrom ray.scripts.scripts import main\nsys.exit(main())\n"
    )
    ray.chmod(0o755)
    return programs


@pytest.fixture
def cluster(everything: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """The state file of `baton up`, which keeps its workers without Ray unless a test has other flags."""
    state = tmp_path / "state.json"
    flags = [
        *getattr(request, "param", ("--pool", "process")),
        "--http-port",
        "0",
        "--grpc-port",
        "0",
        "--kv-memory",
        "64MiB",
        "--state-file",
        str(state),
    ]
    with (tmp_path / "up.log").open("w") as log:
        process = subprocess.Popen(
            [everything / "baton", "up", *flags],
            cwd=tmp_path,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        )
    try:
        wait_for(lambda: state.exists() or process.poll() is not None, 120, "baton up is ready")
        assert process.poll() is None, (tmp_path / "up.log").read_text()
        yield state
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)


def test_the_first_ten_minutes_without_a_checkout(everything: Path, cluster: Path, tmp_path: Path) -> None:
    """Each command that the pages name, against the model that the wheel ships."""
    where = run(everything / "python", "-c", "import baton; print(baton.__file__)", cwd=tmp_path)
    assert str(ROOT) not in where
    grpc = json.loads(cluster.read_text())["grpc"]
    written = run(
        everything / "baton",
        "generate",
        "Once upon a time",
        "--target",
        grpc,
        "--max-tokens",
        "8",
        cwd=tmp_path,
    )
    assert written.strip()
    http = json.loads(cluster.read_text())["http"]
    figures = tmp_path / "load.json"
    load = [
        "load",
        "--target",
        grpc,
        "--requests",
        "6",
        "--concurrency",
        "2",
        "--max-tokens",
        "8",
        "--json",
        figures,
    ]
    shown = run(everything / "baton", *load, cwd=tmp_path)
    assert "none failed" in shown and json.loads(figures.read_text())["requests"] == 6
    frame = run(everything / "baton", "top", "--once", "--url", http, cwd=tmp_path)
    assert "prefill" in frame and "decode" in frame
    said = (tmp_path / "up.log").read_text()
    assert f"page   {http}/ui" in said and f"curl {http}/v1/completions" in said


@pytest.mark.timeout(300)
@pytest.mark.parametrize("cluster", [()], indirect=True, ids=["no flags"])
def test_up_without_a_flag_has_ray_keep_the_workers(everything: Path, cluster: Path, tmp_path: Path) -> None:
    """As a newcomer types it: the processes that Ray starts find the wheel too."""
    http, grpc = (json.loads(cluster.read_text())[name] for name in ("http", "grpc"))
    ask = ["generate", "Once upon a time", "--target", grpc, "--max-tokens", "8"]
    assert run(everything / "baton", *ask, cwd=tmp_path).strip()
    shown = run(everything / "baton", "status", "--url", http, cwd=tmp_path)
    assert "prefill" in shown and "decode" in shown


def test_doctor_looks_at_a_cluster_without_a_checkout(everything: Path, tmp_path: Path) -> None:
    assert "8 × nvidia.com/gpu on 1 node" in doctored(everything, tmp_path)


def doctored(programs: Path, tmp_path: Path) -> str:
    """What doctor prints of a small cluster with one node."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with ApiServer() as server:
        server.add_node("gpu-0", {}, {"cpu": "96", "memory": "1Ti", "pods": "250", "nvidia.com/gpu": "8"})
        config = server.kubeconfig(tmp_path / "kubeconfig")
        found = subprocess.run(
            [programs / "baton", "doctor", "--kubeconfig", config],
            cwd=tmp_path,
            env={**environment, "COLUMNS": "200"},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert found.returncode == 0 and not found.stderr, found.stderr
    return found.stdout
