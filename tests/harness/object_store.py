"""A small object store (S3's protocol, one bucket) with a model in it."""

from __future__ import annotations

import hashlib
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

FOLDER = "llama/8b"
_RANDOM = random.Random(19)
MODEL = {
    "config.json": b"{}",
    "tokenizer.json": b"{ }",
    "model-00001-of-00002.safetensors": _RANDOM.randbytes(3 << 20),
    "model-00002-of-00002.safetensors": _RANDOM.randbytes(1 << 20),
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
