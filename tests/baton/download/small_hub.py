"""A hub that sends false data, breaks off, or asks for a token."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import http.server
import json
import ssl
import threading
from collections.abc import Iterator

FILES = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": bytes(range(256)) * 5000,
    "pytorch_model.bin": b"another format",
    "original/consolidated.safetensors": b"in a folder",
}
COMMIT = "c" * 40


class SmallHub(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.scheme = "http"
        if tls is not None:
            self.scheme, self.socket = "https", tls.wrap_socket(self.socket, server_side=True)
        self.promised = dict(FILES)
        self.files = dict(FILES)  # what is sent, whatever is promised
        self.held: dict[
            str, threading.Event
        ] = {}  # names of files whose first MiB is sent, and the rest on the event
        self.break_after: int | None = None
        self.token = ""
        self.tokens: list[str] = []  # that clients sent
        self.leads_to = ""  # a URL that files are fetched from instead
        self.asked: list[str] = []

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.server_port}"


class _Handler(http.server.BaseHTTPRequestHandler):
    """Compresses where a client accepts it, as servers of large files do."""

    server: SmallHub

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self.server.tokens += self.headers.get_all("authorization", [])
        if self.server.token and self.headers["authorization"] != f"Bearer {self.server.token}":
            self._answer(401, b"")
        elif self.path.startswith("/api/models/org/name/revision/main"):
            self._answer(
                200,
                json.dumps(
                    {"sha": COMMIT, "siblings": [_sibling(*one) for one in self.server.promised.items()]}
                ).encode(),
            )
        elif self.server.leads_to and not self.path.startswith("/api/"):
            self._answer(302, b"", location=self.server.leads_to + self.path)
        elif self.path.startswith(f"/org/name/resolve/{COMMIT}/"):
            self._send_file(self.path.rpartition(f"{COMMIT}/")[2])
        else:
            self._answer(404, b"")

    def _send_file(self, name: str) -> None:
        first = int((self.headers["range"] or "bytes=0-").partition("=")[2].rstrip("-"))
        self.server.asked.append(f"{name}@{first}")
        body, encoding = self._encoded(self.server.files[name][first:])
        cut = self.server.break_after
        self.server.break_after = None
        self.send_response(206 if first else 200)
        self.send_header("content-encoding", encoding)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        if name in self.server.held:
            self.wfile.write(body[: 1 << 20])
            self.server.held[name].wait(20)
            body = body[1 << 20 :]
        self.wfile.write(body if cut is None else body[:cut])
        if cut is not None:
            self.close_connection = True

    def _encoded(self, body: bytes) -> tuple[bytes, str]:
        accepted = "gzip" in self.headers.get("accept-encoding", "")
        return (gzip.compress(body), "gzip") if accepted else (body, "identity")

    def _answer(self, status: int, body: bytes, **headers: str) -> None:
        body, encoding = self._encoded(body)
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("content-encoding", encoding)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def _sibling(name: str, content: bytes) -> dict[str, object]:
    git = hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()
    one: dict[str, object] = {"rfilename": name, "size": len(content), "blobId": git}
    if name.endswith(".safetensors"):
        one["lfs"] = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content)}
    return one


@contextlib.contextmanager
def running_hub(tls: ssl.SSLContext | None = None) -> Iterator[SmallHub]:
    server = SmallHub(tls)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join(5)
