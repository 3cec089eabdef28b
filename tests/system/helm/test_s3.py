"""The command that copies a model from an object store, run by Debian's rclone against a small store."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

import pytest

from tests.system.conftest import TOOLS
from tests.system.helm.rendering import Renderer, ValueSet, pods_of

pytestmark = pytest.mark.system
FOLDER = "llama/8b"
MODEL = {
    "config.json": b"{}",
    "tokenizer.json": b"{ }",
    "model-00001-of-00002.safetensors": os.urandom(3 << 20),
    "model-00002-of-00002.safetensors": os.urandom(1 << 20),
}
OTHERS = {"model.gguf": b"another format", "original/consolidated.safetensors": b"the same weights again"}


@dataclass
class Store:
    """One bucket, `weights`. `asked` counts downloads by name; `spoil` changes what is sent, not what is listed."""

    objects: dict[str, bytes]
    asked: list[str] = field(default_factory=list)
    spoil: str = ""
    port: int = 0


@contextmanager
def store_of(files: dict[str, bytes]) -> Iterator[Store]:
    store = Store({f"{FOLDER}/{name}": content for name, content in files.items()})

    class Answers(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._send_object(body=False)

        def do_GET(self) -> None:
            asked = parse_qs(urlsplit(self.path).query, keep_blank_values=True)
            if "/" in urlsplit(self.path).path.strip("/"):
                self._send_object(body=True)
            else:
                self._send(200, _listing(store.objects, asked.get("prefix", [""])[0], "delimiter" in asked))

        def _send_object(self, *, body: bool) -> None:
            assert "Credential=key/" in self.headers["Authorization"]
            key = unquote(urlsplit(self.path).path).strip("/").partition("/")[2]
            content = store.objects.get(key)
            if content is None:
                self._send(404, b"")
                return
            tag = hashlib.md5(content).hexdigest()
            if body:
                store.asked.append(key)
                if key == store.spoil:
                    content = content[:-1] + bytes([content[-1] ^ 1])
            code, span = 200, self.headers.get("Range", "")
            if span:
                first, _, last = span.removeprefix("bytes=").partition("-")
                content, code = content[int(first) : int(last or len(content)) + 1], 206
            self._send(code, content, {"ETag": f'"{tag}"'}, body=body)

        def _send(
            self, code: int, content: bytes, headers: dict[str, str] | None = None, *, body: bool = True
        ) -> None:
            self.send_response(code)
            dated = {"Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT", "Content-Length": str(len(content))}
            for name, value in {**dated, **(headers or {})}.items():
                self.send_header(name, value)
            self.end_headers()
            if body:
                self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        store.port = server.server_port
        try:
            yield store
        finally:
            server.shutdown()
            thread.join()


def _listing(objects: dict[str, bytes], prefix: str, flat: bool) -> bytes:
    found, folders = [], set()
    for key, content in sorted(objects.items()):
        if not key.startswith(prefix):
            continue
        rest = key.removeprefix(prefix)
        if flat and "/" in rest:
            folders.add(prefix + rest.partition("/")[0] + "/")
            continue
        tag = hashlib.md5(content).hexdigest()
        found.append(
            f"<Contents><Key>{escape(key)}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
            f"<ETag>&quot;{tag}&quot;</ETag><Size>{len(content)}</Size></Contents>"
        )
    found += [f"<CommonPrefixes><Prefix>{one}</Prefix></CommonPrefixes>" for one in sorted(folders)]
    text = "".join(found)
    return f"<ListBucketResult><IsTruncated>false</IsTruncated>{text}</ListBucketResult>".encode()


@pytest.fixture(scope="module")
def rclone() -> str:
    """Installed, or unpacked from Debian's package."""
    if installed := shutil.which("rclone"):
        return installed
    folder = TOOLS / "rclone"
    unpacked = folder / "root" / "usr" / "bin" / "rclone"
    if not unpacked.exists():
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run(["apt-get", "download", "-qq", "rclone"], cwd=folder, check=True, timeout=300)
        (package,) = folder.glob("rclone_*.deb")
        subprocess.run(["dpkg", "-x", str(package), str(folder / "root")], check=True, timeout=120)
    return str(unpacked)


def fetch_container(renderer: Renderer, component: str, port: int) -> dict[str, Any]:
    values = {
        "model": {
            "source": f"s3://weights/{FOLDER}",
            "s3": {"endpoint": f"http://127.0.0.1:{port}", "provider": "Other", "credentialsSecret": "key"},
        }
    }
    (pod,) = [one for one in pods_of(renderer.render(ValueSet(values=values))) if one.component == component]
    (found,) = pod.spec["initContainers"]
    return dict(found)


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


def copy(container: dict[str, Any], rclone: str, place: Path) -> subprocess.CompletedProcess[str]:
    """Runs the container's command with `place` as its file system."""
    words = [*container["command"], *container["args"], "--low-level-retries=1", "--retries=1"]
    words = [word.replace("/models/", f"{place}/models/").replace("=/tmp/", f"={place}/") for word in words]
    environment = {one["name"]: one["value"] for one in container["env"]} | {"HOME": str(place)}
    secret = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
    return subprocess.run(
        words,
        env={**environment, **secret, "PATH": f"{Path(rclone).parent}:/usr/bin:/bin"},
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
        container = fetch_container(renderer, "decode", store.port)
        done = copy(container, rclone, tmp_path)
        assert done.returncode == 0, done.stderr
        assert held(tmp_path) == MODEL
        # A container that starts again downloads nothing twice.
        store.asked.clear()
        assert copy(container, rclone, tmp_path).returncode == 0 and not store.asked


def test_a_router_copies_no_weights(renderer: Renderer, rclone: str, tmp_path: Path) -> None:
    with store_of(MODEL) as store:
        done = copy(fetch_container(renderer, "router", store.port), rclone, tmp_path)
    assert done.returncode == 0, done.stderr
    assert held(tmp_path).keys() == {"config.json", "tokenizer.json"}


def test_a_spoiled_file_fails_the_container_and_is_not_kept(
    renderer: Renderer, rclone: str, tmp_path: Path
) -> None:
    name = "model-00002-of-00002.safetensors"
    with store_of(MODEL) as store:
        store.spoil = f"{FOLDER}/{name}"
        done = copy(fetch_container(renderer, "decode", store.port), rclone, tmp_path)
    assert done.returncode != 0 and name in done.stderr
    assert name not in held(tmp_path)


def test_a_folder_that_is_not_there_fails_the_container(
    renderer: Renderer, rclone: str, tmp_path: Path
) -> None:
    with store_of({}) as store:
        done = copy(fetch_container(renderer, "decode", store.port), rclone, tmp_path)
    assert done.returncode != 0 and "no config.json in store:weights/llama/8b" in done.stderr
