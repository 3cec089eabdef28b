"""A proxy that passes requests to a router unchanged, and keeps those with a body."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

_HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "te", "trailer", "upgrade"}


@dataclass
class Recording:
    """`url` of the proxy; requests as path, body and the status that the router answered."""

    url: str
    requests: list[dict[str, Any]] = field(default_factory=list)


@contextlib.contextmanager
def record(router: str) -> Iterator[Recording]:
    host = urlsplit(router).netloc

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.0"  # an answer ends with its connection

        def do_GET(self) -> None:
            self._pass_on(b"")

        def do_POST(self) -> None:
            self._pass_on(self._body())

        def _body(self) -> bytes:
            if self.headers.get("transfer-encoding", "").lower() != "chunked":
                return self.rfile.read(int(self.headers.get("content-length", 0)))
            parts = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)

        def _pass_on(self, body: bytes) -> None:
            skipped = {*_HOP_BY_HOP, "host", "content-length", "accept-encoding", "expect"}
            headers = {name: value for name, value in self.headers.items() if name.lower() not in skipped}
            connection = http.client.HTTPConnection(host, timeout=120)
            with contextlib.closing(connection):
                connection.request(self.command, self.path, body or None, headers)
                answer = connection.getresponse()
                recording.requests.append(
                    {
                        "method": self.command,
                        "path": self.path,
                        "body": json.loads(body) if body else None,
                        "status": answer.status,
                    }
                )
                self.send_response(answer.status)
                for name, value in answer.getheaders():
                    if name.lower() not in {*_HOP_BY_HOP, "date", "server"}:
                        self.send_header(name, value)
                self.end_headers()
                with contextlib.suppress(OSError):  # the client has left
                    while part := answer.read1(1 << 16):
                        self.wfile.write(part)
                        self.wfile.flush()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        recording = Recording(f"http://127.0.0.1:{server.server_address[1]}")
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield recording
        finally:
            server.shutdown()
            thread.join()
