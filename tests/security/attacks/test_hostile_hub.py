"""`baton fetch` from a hostile server: each false answer is a typed error within `--seconds`."""

from __future__ import annotations

import http.server
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from baton.download import hub as hub_module
from baton.download.fetch import fetch
from cluster.errors import BatonError, ConfigError, DeadlineError, UnavailableError

Answer = Callable[["_Handler"], None]
DRIPS = 200


class Hub(http.server.ThreadingHTTPServer):
    daemon_threads = True
    answer: Answer

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self.server.answer(self)

    def send(self, body: bytes, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for name, value in {**headers, "content-length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def drip(self) -> None:
        for _ in range(DRIPS):
            self.wfile.write(b"a")
            self.wfile.flush()
            time.sleep(0.1)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setattr(hub_module, "PAUSE_SECONDS", 0.01)
    server = Hub(("127.0.0.1", 0), _Handler)
    server.handle_error = lambda *_: None  # type: ignore[method-assign]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join(5)


def listing(**file: object) -> bytes:
    one = {"rfilename": "config.json", "size": 5, "blobId": "0" * 40, **file}
    return json.dumps({"sha": "c" * 40, "siblings": [one]}).encode()


@pytest.mark.parametrize(
    "description",
    [
        b"[" * 200_000,
        listing(size=0).replace(b"0", b"1e999", 1),
        listing(size=-1),
        listing(size=(1 << 50) + 1),
        listing(size=5.0),
        listing(lfs={"size": -5, "sha256": "0" * 64}),
        listing(rfilename="a\0.json"),
        listing(rfilename="a\n.json"),
        listing(rfilename="\ud800.json"),
        listing(rfilename="a" * 300 + ".json"),
        listing().replace(b"c" * 40, b"c" * 100_000),
    ],
    ids=[
        "depth",
        "infinite",
        "negative",
        "huge",
        "fraction",
        "large-negative",
        "nul",
        "newline",
        "surrogate",
        "long-name",
        "long-commit",
    ],
)
def test_a_description_that_is_none_is_refused(description: bytes, hub: Hub, tmp_path: Path) -> None:
    hub.answer = lambda handler: handler.send(description if handler.path.startswith("/api/") else b"12345")
    with pytest.raises(UnavailableError) as caught:
        fetch("hf://org/name", tmp_path, endpoint=hub.url, seconds=10)
    assert caught.value.field == "endpoint"
    assert {one.name for one in tmp_path.iterdir()} <= {".lock"}


@pytest.mark.parametrize(
    ("first", "second"),
    [("config.json", "config.json"), ("config.json", "CONFIG.json"), ("\u00e9.json", "e\u0301.json")],
)
def test_two_names_that_may_be_one_file_are_refused(
    first: str, second: str, hub: Hub, tmp_path: Path
) -> None:
    """On a file system that ignores case or Unicode's normal form one would overwrite the other."""
    siblings = [json.loads(listing(rfilename=name))["siblings"][0] for name in (first, second)]
    described = json.dumps({"sha": "c" * 40, "siblings": siblings}).encode()
    hub.answer = lambda handler: handler.send(described if handler.path.startswith("/api/") else b"12345")
    with pytest.raises(UnavailableError) as caught:
        fetch("hf://org/name", tmp_path, endpoint=hub.url, seconds=10)
    assert f"{first!a} and {second!a} are one file" in caught.value.message


def test_a_redirect_to_no_host_is_an_error_of_the_endpoint(hub: Hub, tmp_path: Path) -> None:
    hub.answer = lambda handler: handler.send(b"", 302, location=f"http://{'a' * 300}/")
    with pytest.raises(UnavailableError):
        fetch("hf://org/name", tmp_path, endpoint=hub.url, seconds=10)


def _silent(handler: _Handler) -> None:
    time.sleep(DRIPS / 10)


def _slow_head(handler: _Handler) -> None:
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nx: ")
    handler.drip()


def _slow_body(handler: _Handler) -> None:
    handler.send_response(200)
    handler.end_headers()
    handler.drip()


def _slow_file(handler: _Handler) -> None:
    handler.send(listing(size=DRIPS)) if handler.path.startswith("/api/") else _slow_body(handler)


@pytest.mark.parametrize("answer", [_silent, _slow_head, _slow_body, _slow_file])
def test_a_connection_with_a_byte_now_and_then_is_closed_in_time(
    answer: Answer, hub: Hub, tmp_path: Path
) -> None:
    hub.answer = answer
    began = time.monotonic()
    with pytest.raises(DeadlineError):
        fetch("hf://org/name", tmp_path, endpoint=hub.url, seconds=1)
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("endpoint", ["", "hub", "ftp://hub", "http://[", "http://hub:99999", "http://a\nb"])
def test_an_address_that_is_no_endpoint_is_reported_at_once(endpoint: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        fetch("hf://org/name", tmp_path, endpoint=endpoint, seconds=60)
    assert caught.value.field == "endpoint"


def test_a_folder_that_cannot_be_written_is_named(hub: Hub, tmp_path: Path) -> None:
    hub.answer = lambda handler: handler.send(listing())
    (tmp_path / "file").touch()
    with pytest.raises(BatonError) as caught:
        fetch("hf://org/name", tmp_path / "file", endpoint=hub.url, seconds=10)
    assert caught.value.field == "out"
